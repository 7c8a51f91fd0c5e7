"""Decide which values the backward recomputes (`passes/memory/recompute.py` rewrites the graph).

    none        keep everything
    full        keep each layer's inputs
    attention   keep each layer's inputs and the results of attention
    selective   keep each layer's inputs and the results of the operators in `save`; if two of these are only added
                (LoRA's and the layer's own), their sum; a model without layers keeps everything
    every_n     `full` for every n-th layer, the others keep everything
    offload     keep each layer's values as `none` does, but in host memory (`passes/memory/offload.py`)
    budget      keep the values that cost most to recompute, within `budget_bytes` (`passes/memory/budget.py`)

`layers` maps patterns of layers to other policies. With any policy, calls of `torch.utils.checkpoint` in the model are
recomputed. Results of communication (repeated only if `ops` says so), of random operators (which would draw other
numbers) and of selections (the top-k of experts or keys, whose ties might fall otherwise) are kept. `modules` and `ops`
map patterns of module paths and operator names to `save`, `recompute` or `offload`. They override the policy, and
modules override operators. `regather` repeats the gathers of sharded parameters (ZeRO-3; without it gathered weights
are kept, ZeRO-2). In a step with microbatches that gathers once, gathered weights are kept. Frozen weights stored as
integers are always unpacked again.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import fx

from passes.context.operators import kernel_of
from passes.cost.accounting import Ledger, peak_of
from passes.ir import ir
from passes.ir.folds import Fold
from passes.ir.layer import Layer, within
from passes.ir.machine import H100, Balance
from passes.ir.operators import kind_of, name_of
from passes.ir.slices import weight_nodes
from passes.ir.stages import Stage
from passes.memory.budget import fit
from passes.memory.offload import offload
from passes.memory.outcome import Asked, Decision, Outcome
from passes.memory.policies import ATTENTION, POLICIES, SAVE, Action, OfLayer, Policy
from passes.memory.recompute import (
    reason_to_run_once,
    recompute,
    saved_nodes,
    sent_nodes,
    storages,
)
from passes.trace.abstract_eval import abstract_eval

Region = Layer | str | None  # a layer, or a part that the model marked for recomputation


RECOMPUTED = Decision("recompute")
OFFLOADED = Decision("offload", "offloaded")
SELECTED = Decision("save", "selected")
ASKED: dict[Action, Decision] = {
    "save": Decision("save", "requested"),
    "recompute": RECOMPUTED,
    "offload": OFFLOADED,
}
Decisions = Mapping[fx.Node, Decision]
ADD, SCALE = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor


def weights_to_regather(program: ir.Program) -> set[fx.Node]:
    """Return forward gathers of parameters, and operators on only these and other weights."""
    return following(program, lambda node: kind_of(node) == "all_gather")


def weights_to_unpack(program: ir.Program) -> set[fx.Node]:
    """Return the forward operators on frozen weights stored as integers, and those on only these and tables."""
    inputs, written = dict(zip(program.placeholders(), program.inputs, strict=True)), {o.name for o in program.outputs}
    packed = {n for n, i in inputs.items() if i.kind == "frozen" and not ir.example(n).is_floating_point()}
    tables = {n for n, i in inputs.items() if i.kind == "buffer" and i.name not in written}
    packed |= {n for n in weight_nodes(program) if kind_of(n) and packed.intersection(n.all_input_nodes)}
    nodes = following(program, lambda node: not kind_of(node) and not packed.isdisjoint(node.all_input_nodes), tables)
    return nodes | made_of_tables(program, tables, nodes)


def made_of_tables(program: ir.Program, tables: Set[fx.Node], users: Set[fx.Node]) -> set[fx.Node]:
    """Return the forward operators on `tables` alone whose results only `users` read, as the scales of blocks."""
    nodes = set[fx.Node]()
    for node in program.calls():
        operands = node.all_input_nodes
        if ir.phase(node) == "forward" and operands and all(n in tables or n in nodes for n in operands):
            nodes.add(node)
    for node in reversed([n for n in program.calls() if n in nodes]):
        if not all(user in users or user in nodes for user in node.users):
            nodes.discard(node)
    return nodes


def following(
    program: ir.Program, is_first: Callable[[fx.Node], bool], tables: Set[fx.Node] = frozenset()
) -> set[fx.Node]:
    """Return the first operators on weights, in the forward, and those that read only these, others and `tables`."""
    nodes: set[fx.Node] = set()
    for node in weight_nodes(program, tables):
        follows = any(n in nodes for n in node.all_input_nodes) and not reason_to_run_once(node)
        if ir.phase(node) == "forward" and (is_first(node) or follows):
            nodes.add(node)
    return nodes


def producer_of(node: fx.Node) -> fx.Node:
    """Return the node, or the node that made the tuple of which it is an item."""
    return producer_of(node.args[0]) if node.target is operator.getitem else node  # type: ignore[arg-type]


def operator_name(node: fx.Node) -> str:
    """Return the operator's name, `mm` or `all_gather`; an item of a tuple has the name of the tuple's operator."""
    return name_of(producer_of(node)).split("::")[-1]


def is_called(node: fx.Node, pattern: str) -> bool:
    """Return True if a pattern matches the operator's name, or is `attention` and the node is an attention kernel."""
    return (
        fnmatchcase(operator_name(node), pattern) or pattern == ATTENTION and kernel_of(producer_of(node)) is not None
    )


@dataclass(frozen=True)
class Remat(ir.Pass):
    """Recompute in the backward the values that the policy, the overrides and the model's own marks choose.

    `following` are the passes that finish the program, by which a budget's peak is predicted. `reserved` returns the
    bytes of memory outside of the program (optimizer state in a step with microbatches). A budget weighs recomputation
    against memory traffic by the `balance` of a machine.
    """

    policy: Policy = "none"
    regather: bool = True
    save: tuple[str, ...] = SAVE
    every_n: int = 2
    budget_bytes: int | None = None
    headroom: float = 0.0
    layers: Mapping[str, OfLayer] = field(default_factory=dict)
    modules: Mapping[str, Action] = field(default_factory=dict)
    ops: Mapping[str, Action] = field(default_factory=dict)
    following: tuple[ir.Pass, ...] = ()
    reserved: Callable[[ir.Program], int] = lambda program: 0
    gathers_once: bool = False
    balance: Balance = H100
    name = "remat"
    takes = (Stage.JOINT,)
    keeps = True
    after = ("simplify", "cse", "reassociate", "defer")  # these would merge clones with their originals

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if self.policy not in POLICIES:
            raise ir.Refused("remat", None, f"passes.remat.policy: {self.policy!r} is not one of {', '.join(POLICIES)}")
        notes, requests = list[str](), dict[fx.Node, Asked]()
        regatherable, unpacked = weights_to_regather(program), weights_to_unpack(program)
        gathers = regatherable | unpacked if self.regather and not self.gathers_once else unpacked
        decisions = self.decisions(program, requests)
        if self.gathers_once:
            once = Decision("save", "gathered once per step")
            decisions |= {node: once for node in (regatherable & decisions.keys()) - unpacked if not is_view(node)}
        chosen = {node for node, decision in decisions.items() if decision == RECOMPUTED}
        if self.policy == "budget":
            if self.budget_bytes is None:
                raise ir.Refused("remat", None, "passes.remat.budget_gib: policy=budget needs it, the GiB of a rank")
            peak = partial(self.peak, program, ctx, gathers)
            fitted = fit(program, ctx, chosen, self.budget_bytes, self.headroom, peak, self.balance)
            decisions |= dict.fromkeys(chosen - fitted.chosen, Decision("save", "within the budget"))
            chosen, notes = fitted.chosen, [fitted.note]
        before, (program, clones, copies) = program, rewrite(program, gathers | chosen)
        moved = offload(
            program, {copies[node] for node, decision in decisions.items() if decision.action == "offload"}, ctx
        )
        saved = set(saved_nodes(program))
        reasons = Counter(decision.reason for node, decision in decisions.items() if copies[node] in saved)
        notes += [f"kept instead of recomputed, {reason}: {count}" for reason, count in sorted(reasons.items())]
        weights = regatherable | unpacked
        outcome = Outcome(before, program, copies, clones.keys(), moved, decisions, weights, requests)
        offloads = "offload" in (self.policy, *self.layers.values())
        effects = [*outcome.effects(self.policy, self.gathers_once, offloads)]
        if self.save != SAVE:
            count = before.count(node for node, decision in decisions.items() if decision == SELECTED)
            unmet = f"no layer with policy=selective has operators called {', '.join(self.save)}; correct the names"
            effects.append(ir.Effect("passes.remat.save", count, "results kept by name", unmet=unmet))
        return program, ir.Report(outcome.counts(), tuple(notes), effects=tuple(effects))

    def peak(self, program: ir.Program, ctx: ir.Context, gathers: set[fx.Node], chosen: set[fx.Node]) -> int:
        """Return the predicted peak bytes of the finished program if the backward recomputes the chosen nodes."""
        copied, _, _ = rewrite(program, gathers | chosen)
        for step in self.following:
            copied, _ = step(copied, ctx)
        return peak_of(Ledger(copied, abstract_eval(copied, ctx))).bytes + self.reserved(copied)

    # -- choice of nodes --------------------------------------------------------------------------

    def decisions(self, program: ir.Program, requests: dict[fx.Node, Asked]) -> dict[fx.Node, Decision]:
        """Return the decision for every forward node that policies, overrides or the model's marks concern.

        Requests of overrides are added to `requests`.
        """
        layers = list(dict.fromkeys(filter(None, map(ir.layer, program.calls()))))
        if self.policy not in ("none", "selective") and not layers:
            raise ir.Refused(
                "remat",
                None,
                f"passes.remat.policy={self.policy} recomputes repeated layers (layers.0, layers.1, ...), "
                "the model has none; set passes.remat.policy=none",
            )
        policy = self.by_layer(layers, program.folds)
        region: dict[fx.Node, Region] = {
            n: layer if (layer := ir.layer(n)) in policy else ir.record(n).checkpoint or layer for n in program.calls()
        }
        decisions, matched, sent_to_stages = dict[fx.Node, Decision](), set[str](), sent_nodes(program)
        for node in program.calls():
            if ir.phase(node) != "forward":
                continue
            option, requested = self.override(node, matched) or ("", None)
            if requested:
                requests[node] = option, requested
            wanted = ASKED[requested] if requested else self.policy_decision(node, policy.get(ir.layer(node)))
            if wanted is None:
                continue
            if wanted == OFFLOADED and node not in sent_to_stages:
                decisions[node] = RECOMPUTED if is_view(node) else OFFLOADED
                continue
            once = "sent to another stage" if node in sent_to_stages else reason_to_run_once(node)
            if once == "communication" and requested == "recompute":
                once = None
            if once is None and leaves(node, region):
                once = "leaves its region"
            decisions[node] = Decision("save", once) if once else wanted
        decisions |= sums_for_terms(decisions)
        if unmatched := [p for p in (*self.modules, *self.ops) if p not in matched]:
            option = "modules" if unmatched[0] in self.modules else "ops"
            kind = "module" if option == "modules" else "operator of the forward"
            raise ir.Refused("remat", None, f"passes.remat.{option}: no {kind} is named like {unmatched[0]!r}")
        return decisions

    def override(self, node: fx.Node, matched: set[str]) -> Asked | None:
        """Return the action that `modules` or `ops` give the node, with the option; None if none.

        Matching patterns are added to `matched`.
        """
        path = ir.module_path(node)
        by_module = [p for p in self.modules if within(path, p)]
        by_op = [p for p in self.ops if is_called(node, p)]
        matched.update(by_module, by_op)
        if by_module:
            return "modules", self.modules[by_module[0]]
        return ("ops", self.ops[by_op[0]]) if by_op else None

    def by_layer(self, layers: list[Layer], folds: Sequence[Fold]) -> dict[Layer | None, Policy]:
        """Return the policy of each layer that does not keep everything.

        Raise Refused for a pattern without a match.
        """
        names = [*map(str, layers), *(name for fold in folds for name in fold.names())]
        policies: dict[Layer, Policy] = dict.fromkeys(layers, self.policy)
        if self.policy == "every_n":
            policies = {layer: "none" if i % self.every_n else "full" for i, layer in enumerate(layers)}
        for pattern, policy in reversed(self.layers.items()):
            if not any(within(layer, pattern) for layer in names):
                layer_range = (
                    f"they are named from {layers[0]} to {layers[-1]}" if layers else "the model has no layers"
                )
                problem = f"passes.remat.layers: no layer is named like {pattern!r}; {layer_range}"
                raise ir.Refused("remat", None, problem)
            policies |= {layer: policy for layer in layers if within(str(layer), pattern)}
        return {layer: policy for layer, policy in policies.items() if policy != "none"}

    def policy_decision(self, node: fx.Node, policy: Policy | None) -> Decision | None:
        """Return the decision of the policy of a node's layer, or of the model's marks; None if neither concerns it."""
        if policy is None:
            return RECOMPUTED if ir.record(node).checkpoint else None
        if policy == "offload":
            return OFFLOADED
        patterns = {"selective": self.save, "attention": (ATTENTION,)}.get(policy, ())
        return SELECTED if any(is_called(node, pattern) for pattern in patterns) else RECOMPUTED


def sums_for_terms(decisions: Decisions) -> dict[fx.Node, Decision]:
    """Return changed decisions for two selected results of which only the sum is used: it has half of their bytes."""
    changed: dict[fx.Node, Decision] = {}
    sums = (node for node, decision in decisions.items() if node.target is ADD and decision == RECOMPUTED)
    for node in sums:
        terms = [selected_term(n, decisions) for n in node.all_input_nodes]
        if len(terms) == 2 and all(t and ir.example(t).numel() == ir.example(node).numel() for t in terms):
            changed |= {node: SELECTED} | {term: RECOMPUTED for term in terms if term}
    return changed


def selected_term(node: fx.Node, decisions: Decisions) -> fx.Node | None:
    """Return the selected result that a node shows, reshaped or scaled, if it has no other use."""
    while len(node.users) == 1 and decisions.get(node) == RECOMPUTED and (is_view(node) or node.target is SCALE):
        if len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return node if len(node.users) == 1 and decisions.get(node) == SELECTED else None


def is_view(node: fx.Node) -> bool:
    """Return True if the operator's result is in its operand's memory: recomputing it costs nothing."""
    operands = {id(s) for n in node.all_input_nodes for s in storages(n)}
    return reason_to_run_once(node) is None and any(id(s) in operands for s in storages(node))


def leaves(node: fx.Node, region: Mapping[fx.Node, Region]) -> bool:
    """Return True if the forward uses the node outside of its region."""
    return any(
        user.op == "output" or ir.phase(user) == "forward" and region[user] != region[node] for user in node.users
    )


def rewrite(
    program: ir.Program, chosen: set[fx.Node]
) -> tuple[ir.Program, dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """Return a program whose backward recomputes the chosen nodes, its clones, and its copy of each node."""
    copied = program.copy()
    copies = dict(zip(program.graph.nodes, copied.graph.nodes, strict=True))
    return copied, recompute(copied, {copies[node] for node in chosen}), copies
