"""Keep master weights in their own dtype: each parameter is cast to the dtype in which the model was captured.

    linear(x, w)      bf16 graph over a bf16 parameter
becomes
    linear(x, _to_copy(w, bf16))    over an fp32 parameter

The model is captured with its parameters already in the compute dtype, so that casts its author wrote (a loss in
fp32) are in the graph. A tensor's dtype is the graph's; the gather of a sharded weight takes over the
cast, so that bf16 travels and the gradient is reduced uncast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from passes import ir

aten = torch.ops.aten


@dataclass(frozen=True)
class Cast:
    """`masters` is the dtype in which each parameter is stored, by name."""

    masters: Mapping[str, torch.dtype] = field(default_factory=dict)
    name: str = "cast"
    requires: frozenset[str] = frozenset({"captured"})
    establishes: frozenset[str] = frozenset({"cast"})

    def __call__(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        counts: dict[str, int] = {}
        for node, given in zip(program.placeholders(), program.inputs):
            stored, used = self.masters.get(given.name), ir.example(node).dtype
            if given.kind != "parameter" or stored is None or stored == used:
                continue
            with program.graph.inserting_after(program.placeholders()[-1]):
                cast = program.graph.call_function(aten._to_copy.default, (node,), {"dtype": used})
            ir.set_value(cast, ir.example(node))
            with ctx.fake_mode:
                ir.set_value(node, torch.empty_like(ir.example(cast), dtype=stored))
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
            key = f"{stored} -> {used}"
            counts[key] = counts.get(key, 0) + 1
        program.module.recompile()
        return program, ir.Report(counts)
