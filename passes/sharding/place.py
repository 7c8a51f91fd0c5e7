"""Place the inputs: the batch on the data axes and `cp`, parameters by a plan and by FSDP.

    tokens                 i64[16, 256]    ->  [16@dp_shard, 256@cp]
    layers.0.wq.weight     f32[256, 256]   ->  [256@tp@fsdp, 256]

A plan maps parameter-name patterns to the dim that each axis shards: `{"*.wq.weight": {"tp": 0}}`; the first match
holds. Without a plan, `infer` derives one from the graph. FSDP is only a placement: a parameter stored in shards on
`dp_shard` (with `cp`: on both as one axis, `fsdp`) is gathered at its uses, because on these axes activations stay and
weights move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from passes.ir import ir
from passes.ir.mesh import AXES, BATCH_AXES, SEQUENCE_AXIS, Mesh
from passes.ir.spec import Dim, Factor, Spec
from passes.ir.stages import Stage
from passes.rules.roles import matrices, roles
from passes.sharding.custom import inline_custom_functions
from passes.sharding.infer import Blocks, experts_of, infer
from passes.sharding.towers import Tower, dim_to_share, tower_of

LABELS = ("batch", "sequence")


def place_batch(shape: tuple[int, ...], mesh: Mesh) -> Spec:
    """Place a batch tensor: rows over the data axes, the sequence over `cp`; label these dims batch and sequence."""
    spec = Spec.whole(shape, LABELS)
    batch_axes = [tuple(axis for axis in BATCH_AXES if axis in mesh.axes), tuple({SEQUENCE_AXIS} & set(mesh.axes))]
    axes = [axes if size > 1 else () for axes, size in zip(batch_axes, shape)]
    dims = tuple((replace(dim[0], axes=axes[d]),) if d < len(axes) else dim for d, dim in enumerate(spec.dims))
    return replace(spec, dims=dims)


def samples_of(rank: int, samples: int, mesh: Mesh) -> list[int]:
    """Return the numbers of a rank's samples, of those of a microbatch."""
    (rows,) = place_batch((samples,), mesh).dims[0]
    return [row for start, _, n in rows.runs(mesh, mesh.coordinates(rank)) for row in range(start, start + n)]


def add_axis(dim: Dim, axis: str) -> Dim:
    """Split a dim's major factor over one more axis, inside the axes that already shard it."""
    return (replace(dim[0], axes=(*dim[0].axes, axis)), *dim[1:])


def split_blocks(spec: Spec, blocks: Blocks, axis: str) -> Spec:
    """Split the blocks (heads, for example) of one dim over the axis."""
    sizes = ((blocks.outer, ()), (blocks.size, (axis,)), (blocks.inner, ()))
    dim = tuple(Factor(size, axes) for size, axes in sizes if size > 1 or axes)
    return replace(spec, dims=(*spec.dims[: blocks.dim], dim, *spec.dims[blocks.dim + 1 :]))


def split_dim(spec: Spec, d: int, axis: str) -> Spec:
    """Split a dim over one more axis."""
    return replace(spec, dims=tuple(add_axis(dim, axis) if i == d else dim for i, dim in enumerate(spec.dims)))


def fsdp_dim(spec: Spec, shape: tuple[int, ...]) -> int:
    """Return the dim that FSDP splits: the first without blocks (heads) or experts, the first without blocks, or 0."""
    plain = [d for d, dim in enumerate(spec.dims) if len(dim) == 1 and shape[d] > 1]
    without_experts = [d for d in plain if set(spec.dims[d][0].axes) <= {"tp"}]
    return (without_experts or plain or [0])[0]


def share_images(inputs: list[ir.Input], tower: Tower, mesh: Mesh) -> list[ir.Input]:
    """Split the images of a batch over `tp`, too: samples or images of a sample, whichever wastes least."""
    images = [item for item in inputs if item.name in tower.entries]
    if not tower.parameters:
        return inputs
    largest = max(images, key=lambda item: math.prod(item.spec.shape))
    d = dim_to_share(largest.spec, mesh, "tp")
    return [replace(i, spec=split_dim(i.spec, d, "tp")) if i in images and i.spec.shape[d] > 1 else i for i in inputs]


@dataclass(frozen=True)
class Place(ir.Pass):
    """Give every input its placement; `plan` is pattern -> {axis: dim}, None to infer it.

    Ranks of `tp` split the weights of a tower, or with `tower="data"` share its images. `stored` has the placements
    that parameters already have, by name: those of another program over the same state.
    """

    plan: Mapping[str, Mapping[str, int]] | None = None
    min_shard_elements: int = 1
    tower: Literal["weights", "data"] = "weights"
    stored: Mapping[str, Spec] = field(default_factory=dict)
    name = "place"
    takes = (Stage.NORMALIZED,)
    gives = Stage.PLACED

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        unmatched = set() if self.stored else set(self.plan or ())
        flat = inline_custom_functions(program, ctx)
        inferred = infer(flat, program.mesh["tp"]) if "tp" in program.mesh.axes else {}
        experts = experts_of(program) if program.mesh.experts else {}
        if "tp" in program.mesh.experts:
            inferred = {name: blocks for name, blocks in inferred.items() if name not in experts}
        tower = tower_of(flat) if self.tower == "data" and "tp" in program.mesh.axes else Tower()
        inferred = {name: blocks for name, blocks in inferred.items() if name not in tower.parameters}
        used, parts = roles(flat), matrices(flat)
        placed = [self.place(input_, program.mesh, unmatched, inferred, experts) for input_ in program.inputs]
        placed = share_images(placed, tower, program.mesh)
        inputs = tuple(replace(i, roles=used.get(i.name, i.roles), parts=parts.get(i.name)) for i in placed)
        if unmatched:
            raise ir.Refused("place", None, f"passes.shard.plan: no parameter matches {', '.join(sorted(unmatched))}")
        notes = tuple(f"{i.name}: {i.spec}" for i in inputs if i.kind in (*ir.WEIGHTS, "batch"))
        sharded = sum(bool(i.spec.sharded) for i in inputs if i.kind in ir.WEIGHTS)
        changes = {"parameters_sharded": sharded}
        program = replace(program, inputs=inputs)
        return program, ir.Report(changes, notes, effects=tuple(self.effects(program, tower)))

    def effects(self, program: ir.Program, tower: Tower) -> Iterator[ir.Effect]:
        """Yield the effects on the parameters."""
        counts = {item: program.layers(item.layer) for item in program.inputs if item.kind in ir.WEIGHTS}
        total = sum(counts.values())
        if self.min_shard_elements > 1 and program.mesh.stored_over:
            small = sum(n for item, n in counts.items() if math.prod(item.spec.shape) < self.min_shard_elements)
            yield ir.Effect("passes.shard.min_shard_elements", small, "parameters are whole on each rank", total)
        if self.plan:
            planned = sum(n for item, n in counts.items() if any(fnmatchcase(item.name, p) for p in self.plan))
            yield ir.Effect("passes.shard.plan", planned, "parameters placed as it says", total)
        if self.tower == "data":
            whole = sum(n for item, n in counts.items() if item.name in tower.parameters)
            shared = ", ".join(f"{i.name} {i.spec}" for i in program.inputs if i.name in tower.entries)
            unmet = "mesh.tp is 1" if "tp" not in program.mesh.axes else "no weights are used by images alone"
            things, unmet = "parameters are of the tower, and whole on each rank of tp", f"{unmet}; set it to weights"
            yield ir.Effect("passes.shard.tower", whole, things, total, detail=shared, unmet=unmet)

    def place(
        self,
        input_: ir.Input,
        mesh: Mesh,
        unmatched: set[str],
        inferred: Mapping[str, Blocks],
        experts: Mapping[str, Blocks],
    ) -> ir.Input:
        """Return one input with its placement."""
        if input_.kind == "batch":
            return replace(input_, spec=place_batch(input_.spec.shape, mesh).ordered(input_.spec.order))
        if input_.kind not in ir.WEIGHTS:
            return input_
        if input_.name in self.stored:
            return replace(input_, spec=self.stored[input_.name])
        spec = Spec.whole(input_.spec.shape)
        pattern = next((p for p in self.plan or () if fnmatchcase(input_.name, p)), None)
        if pattern is not None and self.plan is not None:
            unmatched.discard(pattern)
            spec = self.apply(input_, spec, self.plan[pattern], mesh, inferred.get(input_.name))
        elif self.plan is None and input_.name in inferred:
            spec = split_blocks(spec, inferred[input_.name], "tp")
        if input_.name not in experts:
            return replace(input_, spec=self.store(spec, mesh, mesh.stored_over))
        if conflicts := [axis for axis in spec.sharded if axis in mesh.experts]:
            fix = f"mesh.ep spreads experts over it already; leave {conflicts[0]} out"
            raise ir.Refused("place", None, f"passes.shard.plan: {input_.name} is sharded on {conflicts[0]}, but {fix}")
        spec = split_blocks(spec, experts[input_.name], mesh.experts_over)  # type: ignore[arg-type]
        free = [axis for axis in mesh.over(mesh.stored_over or "fsdp") if axis not in mesh.experts]
        return replace(input_, spec=self.store(spec, mesh, free[0] if free else None))

    def store(self, spec: Spec, mesh: Mesh, axis: str | None) -> Spec:
        """Shard the parameter over `axis`, unless it is too small."""
        size = math.prod(spec.shape)
        if axis is None or size == 1 or size < self.min_shard_elements:
            return spec
        return split_dim(spec, fsdp_dim(spec, spec.shape), axis)

    def apply(
        self, input_: ir.Input, spec: Spec, sharding: Mapping[str, int], mesh: Mesh, blocks: Blocks | None
    ) -> Spec:
        """Apply the plan's axes to the parameter's dims."""
        stored = () if mesh.stored_over is None else mesh.over(mesh.stored_over)
        for axis, dim in sharding.items():
            if axis in stored:
                fix = f"parameters are always stored over {' and '.join(stored)}; leave {axis} out"
                raise ir.Refused("place", None, f"passes.shard.plan: {input_.name} is sharded on {axis}, but {fix}")
            if axis not in AXES:
                problem = f"{input_.name} is sharded on {axis!r}, which is no axis"
                raise ir.Refused("place", None, f"passes.shard.plan: {problem}; use tp or ep")
            if not -len(spec.shape) <= dim < len(spec.shape):
                raise ir.Refused(
                    "place",
                    None,
                    f"passes.shard.plan: {input_.name} has shape {spec.shape}, no dim {dim} to shard on {axis}",
                )
            d = dim % len(spec.shape)
            if axis == "tp" and axis in mesh.axes and blocks is not None and blocks.dim == d:
                spec = split_blocks(spec, blocks, axis)
            elif axis in mesh.axes:
                spec = split_dim(spec, d, axis)
        return spec
