"""Check that a pass keeps the numbers: run the programs before and after it on the same small inputs.

A global program runs on one device, a local one on all ranks in lockstep; full tensors are compared. Results are the
returned values (loss, gradients, metrics, buffers) and the inputs written in place. A program without gradients is
differentiated by running it: autograd goes back through all ranks by the definition of each exchange, independent of
the operators' registered gradients. Custom autograd functions run their author's backward in a global program; a local
program with one is not differentiated.

A program that draws from PyTorch's generator is not deterministic: it has no results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.check.simulate import Lockstep, coordinate
from passes.check.verify import failure
from passes.communication.batch_overlap import has_copies, microbatches_in
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.operators import is_mutable, is_random
from passes.ir.spec import Spec, boxes, shard, unshard
from passes.ir.stages import Stage
from passes.sharding.collectives import Collectives
from passes.trace.functions import Function, body_of, function_of

ZERO_AT_FIRST = ("moment", "gradient")  # kinds of inputs that start at zero if no value is given
VARYING = (*ir.WEIGHTS, "batch", "gradient", "moment", "carried")  # kinds of inputs that are no constants
NEGLIGIBLE = 1e-3  # fraction of the largest result of a kind


@dataclass(frozen=True)
class Result:
    """A full value of a run; `node` computes it, or is the parameter whose gradient it is."""

    value: Tensor
    node: fx.Node


Results = dict[tuple[str, str], Result]  # by kind and name


def verify_numeric(
    before: ir.Program, after: ir.Program, ctx: ir.Context, inputs: Mapping[str, Tensor], *, pass_name: str = "verify"
) -> dict[str, float]:
    """Return the relative error of each result that both programs have; `inputs` are full tensors by input name.

    Moments and gradient accumulators (named `gradient.<parameter>`) without a value start at zero. Raises CompileError,
    naming the pass, the result and its node, if an error exceeds the rounding of the coarsest dtype.
    """
    tolerance = max(coarsest(before), coarsest(after)) ** 0.5
    return compare(pass_name, run(before, ctx, inputs), run(after, ctx, inputs), tolerance)


def compare(pass_name: str, before: Results, after: Results, tolerance: float) -> dict[str, float]:
    """Return largest difference over largest magnitude for each result in both; raise CompileError beyond tolerance."""
    errors = {}
    for kind, name in (key for key in before if key in after):
        # the scale of a result that is zero up to rounding comes from the other results of its kind
        largest = max(_largest(r.value) for (other, _), r in before.items() if other == kind)
        old, new = before[kind, name].value, after[kind, name].value
        scale = max(_largest(old), NEGLIGIBLE * largest)
        try:
            errors[f"{kind} {name}"] = relative_error(old, new, scale, tolerance)
        except ValueError as error:
            raise failure(pass_name, after[kind, name].node, f"{kind} {name!r} {error}", compare.__name__) from error
    return errors


def relative_error(old: Tensor, new: Tensor, scale: float, tolerance: float) -> float:
    """Return the largest difference over `scale`; raise ValueError, with both values, beyond tolerance.

    Also raises ValueError if the shapes differ.
    """
    if old.shape != new.shape:
        raise ValueError(f"was of shape {tuple(old.shape)}, is {tuple(new.shape)}")
    if not old.numel():
        return 0.0
    difference = (old.double() - new.double()).abs().flatten().nan_to_num(torch.inf)
    index = int(difference.argmax())
    error = difference[index].item() / (scale or 1.0)
    if error > tolerance:
        raise ValueError(
            f"is off by {error:.3g} of its largest entry (tolerance {tolerance:.3g}): entry {index} "
            f"was {old.flatten()[index]:.6g}, is {new.flatten()[index]:.6g}"
        )
    return error


def _largest(value: Tensor) -> float:
    return value.detach().double().abs().amax().item() if value.numel() else 0.0


def coarsest(program: ir.Program) -> float:
    """Return the largest rounding step (eps) of the floating values that depend on a value of the inputs.

    Constants, such as tables of rotations, are the same before and after a pass.
    """
    ends = zip(program.placeholders(), program.inputs, strict=True)
    varying = {node for node, i in ends if i.kind in VARYING and ir.example(node).is_floating_point()}
    for node in program.calls():
        if not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    vals = map(ir.value, varying)
    return max((torch.finfo(v.dtype).eps for v in vals if isinstance(v, Tensor) and v.is_floating_point()), default=0.0)


# ---- running -------------------------------------------------------------------------------------


def run(program: ir.Program, ctx: ir.Context, inputs: Mapping[str, Tensor]) -> Results:
    """Return the program's results on full inputs; if it has no gradients yet, differentiate its loss."""
    if any(map(is_random, program.calls())):
        return {}
    differentiable = not program.has_backward and not any(body_of(node) for node in program.calls())
    if program.stage < Stage.LOCAL:
        program = with_authors_backward(on_one_device(program))
    elif program.stage < Stage.EXPLICIT:
        program, _ = Collectives()(program, ctx)
    by_rank = place_inputs(program, inputs)
    for values in by_rank if differentiable else ():
        for value, i in zip(values, program.inputs, strict=True):
            value.requires_grad_(i.kind == "parameter")
    with torch.set_grad_enabled(differentiable):
        results = collect(program, Lockstep(program).run(by_rank), by_rank)
    results |= differentiate(program, results, by_rank) if differentiable else {}
    microbatches = microbatches_in([program])  # their losses and gradients are added, and all get the same input
    return {
        (kind, name): replace(result, value=result.value / microbatches) if kind in ("loss", "gradient") else result
        for (kind, name), result in results.items()
    }


def on_one_device(program: ir.Program) -> ir.Program:
    """Return a global program as the local program of a single rank."""

    def full(end: Any) -> Any:
        return replace(end, spec=Spec.whole(end.spec.shape))

    return replace(
        program, mesh=Mesh(), inputs=tuple(map(full, program.inputs)), outputs=tuple(map(full, program.outputs))
    )


class _Authored(torch.autograd.Function):
    """A custom function with its author's backward; the values it saves are further outputs."""

    @staticmethod
    def forward(ctx: Any, function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        out = tuple(t.clone() for t in function.forward(*tensors))
        ctx.function = function
        ctx.save_for_backward(*tensors, *out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.function.backward(*ctx.saved_tensors, *gradients[: ctx.function.results])


def with_authors_backward(program: ir.Program) -> ir.Program:
    """Return the global program with custom functions that autograd can differentiate."""
    program = program.copy()
    for node in program.calls():
        if function := function_of(node):
            node.target = _call(function)
    return program


def _call(function: Function) -> Callable[..., Any]:
    def call(*tensors: Tensor) -> Any:
        out = _Authored.apply(function, *tensors)
        return out if len(out) > 1 else out[0]

    return call


def place_inputs(program: ir.Program, inputs: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Return copies of the inputs, by rank; raise CompileError naming an input that is missing or malformed."""
    full = [
        None if i.kind in ("coordinate", "layout") else _full_value(node, i, inputs)
        for node, i in zip(program.placeholders(), program.inputs, strict=True)
    ]
    return [
        [
            coordinate(program.mesh, rank, i, program.order) if v is None else _local_part(v, i.spec, program.mesh, at)
            for i, v in zip(program.inputs, full, strict=True)
        ]
        for rank, at in enumerate(program.mesh)
    ]


def telling(value: Tensor) -> Tensor:
    """Replace an all-zero value by small positive numbers: zeros would hide terms added once per rank."""
    if not value.is_floating_point() or value.any():
        return value
    numbers = torch.arange(1, value.numel() + 1, device=value.device) % 7 + 1
    return (numbers / 16).reshape(value.shape).to(value.dtype)


def _full_value(node: fx.Node, input_: ir.Input, inputs: Mapping[str, Tensor]) -> Tensor:
    name = input_.original if has_copies(input_) else input_.name
    name = f"gradient.{name}" if input_.kind == "gradient" else name
    dtype = ir.example(node).dtype
    if input_.value is not None:
        return input_.value
    if input_.count is not None:  # all microbatches get the same input
        return (input_.count.of(inputs) * input_.count.microbatches).to(dtype)
    if name not in inputs and input_.kind in ZERO_AT_FIRST:
        return torch.zeros(input_.spec.shape, dtype=dtype)
    if name not in inputs:
        raise ir.CompileError("numeric", node, f"{input_.kind} {name!r} has no value; add it to inputs")
    value = inputs[name].detach()
    if tuple(value.shape) != input_.spec.shape or value.is_floating_point() != dtype.is_floating_point:
        raise ir.CompileError(
            "numeric",
            node,
            f"{input_.kind} {name!r} is given as {value.dtype} {list(value.shape)}, "
            f"the program takes {dtype} {list(input_.spec.shape)}",
        )
    return value.to(dtype)


def _local_part(full: Tensor, spec: Spec, mesh: Mesh, coordinates: dict[str, int]) -> Tensor:
    """Return a rank's part; of a partial sum the first rank has all, the others zeros."""
    has_terms = all(coordinates[axis] == 0 for axis in spec.partial_axes)
    return shard(full if has_terms else torch.zeros_like(full), spec, mesh, coordinates)


# ---- results -------------------------------------------------------------------------------------


def collect(program: ir.Program, outputs: Sequence[tuple[Any, ...]], by_rank: Sequence[Sequence[Tensor]]) -> Results:
    """Return full results by kind and name: computed outputs, and inputs written in place."""
    results: Results = {}
    for k, (node, output) in enumerate(zip(program.results(), program.outputs, strict=True)):
        if node.op != "placeholder":
            full = unshard([values[k] for values in outputs], output.spec, program.mesh)
            results[output.kind, output.name] = Result(full, node)
    written = {node.args[0] for node in program.calls() if is_mutable(node)}
    for k, (node, i) in enumerate(zip(program.placeholders(), program.inputs, strict=True)):
        if node in written:
            results[i.kind, i.name] = Result(unshard([values[k] for values in by_rank], i.spec, program.mesh), node)
    return results


def differentiate(program: ir.Program, results: Results, by_rank: Sequence[Sequence[Tensor]]) -> Results:
    """Return the loss's gradient for each full parameter; the terms of all ranks that hold an entry are added."""
    parameters = [k for k, i in enumerate(program.inputs) if i.kind == "parameter"]
    losses = [result.value for (kind, _), result in results.items() if kind == "loss" and result.value.requires_grad]
    if not losses or not parameters:
        return {}
    tensors = [values[k] for k in parameters for values in by_rank]
    terms = iter(torch.autograd.grad(losses[0], tensors, materialize_grads=True))
    nodes, gradients = program.placeholders(), {}
    for k in parameters:
        spec = program.inputs[k].spec
        total = by_rank[0][k].new_zeros(spec.shape)
        for coordinates in program.mesh:
            term = next(terms)
            for box in boxes(spec, program.mesh, coordinates):
                box.of(total).add_(box.of_local(term))
        gradients["gradient", program.inputs[k].name] = Result(total, nodes[k])
    return gradients
