"""Faults of `passes/pipeline`, and of what other rooms do for stages."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    Fault(
        "stages_in_any_order",
        "passes/pipeline/assign.py",
        "max([stage, *stages_read(node)])",
        "stage",
        "An operator may belong to an earlier stage than what it reads.",
    ),
    Fault(
        "one_copy_for_all_stages",
        "passes/pipeline/assign.py",
        "        users.setdefault(given[node].name, []).append(stage)\n        if ir.pipeline_stage(node) is None:",
        "        users.setdefault(given[node].name, []).append(stage)\n        if True:",
        "A parameter that several stages use is an input of the last of them alone.",
    ),
    Fault(
        "changed_buffers_recomputed",
        "passes/pipeline/assign.py",
        "        share_buffers(program)\n",
        "",
        "The backward reads a buffer as later microbatches left it.",
    ),
    Fault(
        "sent_values_recomputed",
        "passes/memory/remat.py",
        '"sent to another stage" if node in elsewhere else why_once(node, written)',
        "why_once(node, written)",
        "A stage recomputes for its backward what it was sent.",
    ),
    Fault(
        "copies_counted_twice",
        "passes/update/optimize.py",
        "if first[name] == self.rank]",
        "]",
        "The clip norm counts a parameter on every rank that uses it.",
    ),
    Fault(
        "last_term_not_added",
        "passes/update/accumulate.py",
        "for term in terms[1:]:",
        "for term in terms[2:]:",
        "Of a parameter that two ranks use the gradient lacks a term.",
    ),
    Fault(
        "norm_of_the_ranks_before",
        "passes/update/optimize.py",
        "return heard.get(SQUARE, total),",
        "return total,",
        "Each pipeline rank clips by the norm of its own gradients and those before it.",
    ),
    Fault(
        "views_of_carried_values_sent",
        "passes/pipeline/cut.py",
        "for node in task:\n        if node.target is operator.getitem and node.args[0] in task:",
        "for node in ():\n        if node.target is operator.getitem and node.args[0] in task:",
        "Parts of a tuple may belong to another task than the tuple.",
    ),
)
