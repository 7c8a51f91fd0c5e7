"""Turn the global program into the local program that every rank runs.

    linear(x, w)    x [4@dp_shard, 9, 8]  w [8@dp_shard, 8]
becomes
    all_gather(w, 0, "dp_shard")
    linear(x, all_gather)

`propagate` decides placements; `partition` emits local operators and the reshard operators between them.
With `strict`, an operator without a rule, whose operands would have to be gathered, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from passes.context.call import Method
from passes.context.operators import OPERATORS
from passes.context.sequence_layout import length_of
from passes.ir import ir
from passes.ir.machine import H100, Balance
from passes.ir.mesh import SEQUENCE_AXIS
from passes.ir.operators import is_operator, name_of
from passes.ir.stages import Stage
from passes.rules import has_rule, tensor_operands
from passes.sharding.cuts import find_cuts
from passes.sharding.partition import Partitioner
from passes.sharding.propagate import propagate
from passes.trace.builder import MethodChoice
from passes.trace.functions import function_of


def is_between_positions(node: fx.Node, length: int) -> bool:
    """Return True for a softmax over pairs of positions of a sequence: attention that no operator of ours computes."""
    return name_of(node) in ("softmax", "_softmax") and tuple(ir.example(node).shape[-2:]) == (length, length)


@dataclass(frozen=True)
class Shard(ir.Pass):
    """Partition the program; gradients of weights are reduced in `reduce_dtype` (None: their own).

    `context` is the attention method over a sequence that `cp` shards; `auto` chooses by the `balance` of a machine.
    With `skip_steps`, rings omit, for each batch, the steps that no rank needs.
    """

    sequence_parallel: bool = True
    strict: bool = False
    reduce_dtype: torch.dtype | None = None
    context: Method = "auto"
    skip_steps: bool = True
    balance: Balance = H100
    name = "shard"
    takes = (Stage.PLACED,)
    gives = Stage.LOCAL

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        unknown = [
            n
            for n in program.calls()
            if is_operator(n) and tensor_operands(n) and not has_rule(n) and not function_of(n)
        ]
        if unknown and self.strict:
            raise ir.Refused(
                "shard",
                unknown[0],
                f"{name_of(unknown[0])} has no rule; add one with "
                "passes.rules.add_rule or set passes.shard.strict=false to gather its operands",
            )
        decide = partial(propagate, sequence_parallel=self.sequence_parallel, ctx=ctx)
        plan = decide(program)
        if cuts := find_cuts(program, plan):
            plan = decide(program, cuts=cuts)
        partitioner = Partitioner(
            program, plan, ctx, self.reduce_dtype, decide, True, self.context, self.skip_steps, self.balance
        )
        local = partitioner.run()
        notes = [f"%{n.name} ({ir.source(n)}): {name_of(n)} has no rule, its operands are gathered" for n in unknown]
        notes += [choice.note for choice in partitioner.builder.methods.values()]
        notes += map(str, reshards := partitioner.reshards)
        notes += [f"%{node.name} ({ir.source(node)}): {reason}" for (node, _), reason in plan.reasons.items()]
        counts = {"reshards": len(reshards), "masks": partitioner.builder.masks, "unknown": len(unknown)}
        effects = tuple(self.effects(program, partitioner.builder.methods))
        if unknown:
            operators, things = program.count(program.calls()), "operators have no rule and gather their operands"
            effects += (ir.Effect("passes.shard.strict", program.count(unknown), things, operators),)
        return local, ir.Report(
            counts, tuple(notes), tuple(reshards), tuple(partitioner.builder.bodies), effects=effects
        )

    def effects(self, program: ir.Program, methods: Mapping[fx.Node, MethodChoice]) -> Iterator[ir.Effect]:
        """Yield the effects on attention over a sharded sequence, given the method of each call."""
        if SEQUENCE_AXIS not in program.mesh.axes:
            return
        length, names = length_of(program), Counter[str]()
        for node, choice in methods.items():
            names[choice.method] += program.times(node)
        written = program.count(n for n in program.calls() if is_between_positions(n, length))
        others = program.count(n for n in program.calls() if n.target in OPERATORS and n not in methods)
        total = names.total() + written + others
        more = {"by a softmax of the model, which reads all keys": written, "of whole sequences on each rank": others}
        detail = ", ".join(f"{name} {count:,}" for name, count in (names | more).items() if count)
        yield ir.Effect("mesh.cp", names.total(), "attentions over the sharded sequence", total, detail)
        if self.context != "auto":
            reasons = dict.fromkeys(choice.reason for choice in methods.values())
            unmet, things = "; ".join(reasons) or "no attention runs over mesh.cp", "attentions by this method"
            unmet = f"{unmet}; set it to auto"
            yield ir.Effect("passes.context.method", names[self.context], things, total, unmet=unmet)
