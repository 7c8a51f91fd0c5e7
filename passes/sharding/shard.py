"""Turn the global program into the local program that every rank runs.

    linear(x, w)    x [4@dp_shard, 9, 8]  w [8@dp_shard, 8]
becomes
    all_gather(w, 0, "dp_shard")
    linear(x, all_gather)

`propagate` decides placements; `partition` emits local operators and the reshard operators between them.
With `strict`, an operator without a rule, whose operands would have to be gathered, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from passes.context.call import Method
from passes.ir import ir
from passes.ir.machine import H100, Balance
from passes.ir.operators import is_operator, name_of
from passes.ir.stages import Stage
from passes.rules import has_rule, tensor_operands
from passes.sharding.partition import Partitioner
from passes.sharding.propagate import propagate
from passes.trace.functions import function_of


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
        how = (ctx, self.reduce_dtype, decide, True, self.context, self.skip_steps, self.balance)
        partitioner = Partitioner(program, plan := decide(program), *how)
        local = partitioner.run()
        notes = [f"%{n.name} ({ir.source(n)}): {name_of(n)} has no rule, its operands are gathered" for n in unknown]
        notes += partitioner.builder.notes
        notes += map(str, reshards := partitioner.reshards)
        notes += [f"%{node.name} ({ir.source(node)}): {reason}" for (node, _), reason in plan.reasons.items()]
        counts = {"reshards": len(reshards), "masks": partitioner.builder.masks, "unknown": len(unknown)}
        return local, ir.Report(counts, tuple(notes), tuple(reshards), tuple(partitioner.builder.bodies))
