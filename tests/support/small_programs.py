"""Programs written node by node, for tests of code that reads, runs and checks programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from passes.communication.overlap import Overlap
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.ir.stages import Stage
from passes.sharding.partition import GraphBuilder
from passes.torch_private import FakeTensorMode


class Small:
    """A local program under construction; values of nodes are computed on fake tensors."""

    def __init__(self, **mesh: int):
        self.mesh, self.ctx = Mesh.of(mesh), ir.Context(FakeTensorMode())
        self.builder = GraphBuilder(self.mesh, self.ctx)
        self.inputs: list[ir.Input] = []

    def input(self, name: str, spec: Spec, kind: ir.InputKind = "parameter",
              dtype: torch.dtype = torch.float64) -> fx.Node:
        """Add a placeholder of the spec's local shape."""
        with self.ctx.fake_mode:
            val = torch.empty(spec.local_shape(self.mesh), dtype=dtype)
        self.inputs.append(ir.Input(name, kind, spec))
        return self.builder.placeholder(name.replace(".", "_"), val, spec)

    def axis_index(self, axis: str) -> fx.Node:
        """Add the rank's coordinate on an axis."""
        return self.input(axis, Spec((), replicate=(axis,)), "coordinate", torch.int64)

    def call(self, target: Any, *args: Any, spec: Spec | None = None, phase: str = "forward", **kwargs: Any) -> fx.Node:
        """Add an operator."""
        node = self.builder.call(target, args, kwargs)
        ir.set_spec(node, spec)
        ir.update(node, phase=phase, layer=None)
        return node

    def program(self, outputs: Iterable[tuple[ir.OutputKind, str, fx.Node, Spec]], stage: Stage = Stage.LOCAL) -> ir.Program:
        """Return the program of the given outputs."""
        outputs = list(outputs)
        self.builder.graph.output(tuple(node for _, _, node, _ in outputs))
        module = fx.GraphModule(nn.Module(), self.builder.graph)
        ends = tuple(ir.Output(name, kind, spec) for kind, name, _, spec in outputs)
        return ir.Program(module, tuple(self.inputs), ends, self.mesh, stage)


def ordered(program: ir.Program, ctx: ir.Context) -> ir.Program:
    """Return the program in its own order, as `segment` expects it."""
    return Overlap(prefetch=0)(program, ctx)[0]


def cut(shape: Iterable[int], **dims: int) -> Spec:
    """Return a spec that shards each given axis on its dim: `cut((5, 3), tp=0)`."""
    axes = {d: tuple(a for a, at in dims.items() if at == d) for d in dims.values()}
    return Spec(tuple((Factor(n, axes.get(d, ())),) for d, n in enumerate(shape)), fill=0.0)
