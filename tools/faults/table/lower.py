"""Faults of `passes/lower`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # segment.py
    Fault(
        "bodies_of_any_shape",
        "passes/lower/segment.py",
        "texts = [text_of(graph, line) for graph, line in zip(graphs, flat)]",
        "texts = [text_of(graph, True) for graph, line in zip(graphs, flat)]",
        "Pieces that differ in shape alone are taken for one body.",
    ),
    Fault(
        "sent_is_not_held",
        "passes/lower/segment.py",
        "        if where[start] != where[wait]:",
        "        if where[start] > where[wait]:",
        "What a collective sends may be freed before it is waited for in another body.",
    ),
    # unfold.py
    Fault(
        "repeated_layers_read_one",
        "passes/lower/unfold.py",
        "return copy if reader <= self.fold.number else self.fold.left_out",
        "return 0 if reader <= self.fold.number else self.fold.left_out",
        "Layers that one stood for read what that one reads.",
    ),
    Fault(
        "repeated_layers_are_one",
        "passes/program/folds.py",
        "else Layer(self.stack, self.counted(number) + missing)",
        "else Layer(self.stack, number)",
        "Layers that one stood for all bear its number.",
    ),
    Fault(
        "repeated_without_a_look",
        "passes/lower/unfold.py",
        "if len({self.described(node) for node in nodes}) > 1:",
        "if False:",
        "A layer is repeated though the layers around it call other bodies.",
    ),
)
