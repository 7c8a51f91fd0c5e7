"""Nodes move with all that they hang together with, however long the chain is."""

from __future__ import annotations

import torch
from torch import fx

from passes.program.rewrite import move_after, move_before

LONG = 3000  # more than Python's stack has frames


def chains() -> tuple[fx.Graph, list[fx.Node], fx.Node]:
    """A graph with a chain, and a node after it that is of nothing in it."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    nodes = [x]
    for _ in range(LONG):
        nodes.append(graph.call_function(torch.neg, (nodes[-1],)))
    other = graph.call_function(torch.abs, (y,))
    graph.output((nodes[-1], other))
    return graph, nodes[1:], other


def test_a_node_moves_behind_with_its_users():
    graph, chain, other = chains()
    move_after(chain[0], other)
    assert other < chain[0] and all(a < b for a, b in zip(chain, chain[1:]))
    graph.lint()


def test_a_node_moves_ahead_with_what_it_reads():
    graph, chain, other = chains()
    first = chain[0]
    first.prepend(other)
    move_before(chain[-1], other)
    assert chain[-1] < other and all(a < b for a, b in zip(chain, chain[1:]))
    graph.lint()
