"""The outcome of recomputation: the values that the backward computes again, and those moved to the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from passes.ir import ir
from passes.ir.operators import is_view, kind_of
from passes.memory.policies import Action, Policy
from passes.memory.recompute import saved_bytes


class Decision(NamedTuple):
    """The action for a forward value that might be recomputed, and the reason."""

    action: Action
    reason: str = ""


Asked = tuple[str, Action]  # the option that decides on a value, and the action
POLICY = "passes.remat.policy"
UNREAD = "the backward reads no value of a layer that could be computed again or moved; set it to none"
NEEDS_SOMETHING = ("full", "attention", "every_n")


@dataclass(frozen=True)
class Outcome:
    """A program `before` and `after`; `copies` are the nodes of the second by those of the first.

    `decisions` and `requests` (those of `modules` and `ops`) are by nodes before, `clones` and `moved` are nodes after.
    `weights` are operators on weights alone, of which `regatherable` ones need gathers.
    """

    before: ir.Program
    after: ir.Program
    copies: Mapping[fx.Node, fx.Node]
    clones: Set[fx.Node]
    moved: Set[fx.Node]
    decisions: Mapping[fx.Node, Decision]
    weights: Set[fx.Node]
    requests: Mapping[fx.Node, Asked] = field(default_factory=dict)

    @property
    def recomputed(self) -> set[fx.Node]:
        """The nodes that the backward computes again."""
        return {node for node, copy in self.copies.items() if copy in self.clones}

    @property
    def offloaded(self) -> set[fx.Node]:
        """The nodes whose results are moved."""
        return {node for node, copy in self.copies.items() if copy in self.moved}

    @property
    def gathered(self) -> set[fx.Node]:
        """The gathers of parameters in the forward."""
        return {node for node in self.weights if kind_of(node) == "all_gather"}

    def counts(self) -> dict[str, int]:
        """Return the counts of the report."""
        return {
            "recomputed": len(self.clones),
            "regathered": len(self.gathered & self.recomputed),
            "saved_bytes_before": saved_bytes(self.before),
            "saved_bytes_after": saved_bytes(self.after),
            "offloaded_bytes": self.bytes_of(self.offloaded),
        }

    def bytes_of(self, nodes: Set[fx.Node]) -> int:
        """Return the bytes of results, in all layers."""
        return sum(self.before.times(node) * ir.example(node).nbytes for node in nodes)

    def effects(self, policy: Policy, gathers_once: bool, offloads: bool) -> Iterator[ir.Effect]:
        """Yield the effects of the options, except those of names."""
        weights = [self.copies[node] for node in self.weights]
        bytes_before, bytes_after = saved_bytes(self.before, self.weights), saved_bytes(self.after, weights)
        if policy != "none" or self.recomputed - self.weights:
            yield self.of_policy(policy, bytes_before, bytes_after)
        if offloads:
            things = "bytes of activations kept in host memory"
            yield ir.Effect(POLICY, self.bytes_of(self.offloaded), things, bytes_before, unmet=UNREAD)
        yield from self.of_requests()
        if not self.gathered:
            return
        count, repeated = (self.before.count(nodes) for nodes in (self.gathered, self.gathered & self.recomputed))
        if gathers_once:
            yield ir.Effect("passes.accumulate.gather", count, "gathers of parameters once a step")
        else:
            yield ir.Effect("passes.remat.regather", repeated, "gathers of parameters repeated in the backward", count)

    def of_policy(self, policy: Policy, bytes_before: int, bytes_after: int) -> ir.Effect:
        """Return the effect of recomputation, given the bytes of activations before and after."""
        forward = {node for node in self.before.calls() if ir.phase(node) == "forward" and not is_view(node)}
        done = self.before.count((self.recomputed - self.weights) & forward)
        detail = f"{bytes_before - bytes_after:,} of {bytes_before:,} bytes of activations less"
        if not done and not any(map(ir.layer, forward)):
            detail = "the model has no repeated layers"
        unmet = UNREAD if policy in NEEDS_SOMETHING else ""
        things = "operators recomputed (without views)"
        return ir.Effect(POLICY, done, things, self.before.count(forward), detail, unmet)

    def of_requests(self) -> Iterator[ir.Effect]:
        """Yield the effects of `modules` and `ops`: the values treated as they ask, of those that they match."""
        saved = {node for node, decision in self.decisions.items() if decision.action == "save"}
        done = {"save": saved, "recompute": self.recomputed, "offload": self.offloaded}
        for option in dict.fromkeys(option for option, _ in self.requests.values()):
            nodes = [node for node, (by, _) in self.requests.items() if by == option]
            met = [node for node in nodes if node in done[self.requests[node][1]]]
            reasons = dict.fromkeys(self.decisions[node].reason or "the backward does not read it" for node in nodes)
            unmet = f"these values are treated otherwise: {', '.join(reasons)}; leave it out"
            things = "operators saved, recomputed or offloaded as it says"
            yield ir.Effect(
                f"passes.remat.{option}", self.before.count(met), things, self.before.count(nodes), unmet=unmet
            )
