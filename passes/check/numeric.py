"""Does a pass keep the numbers? The program before it and the one after are run on the same small inputs.

A global program runs on one device, a local one on all ranks in lockstep; results are compared whole. Results are
what is returned (loss, gradients, metrics, buffers) and what is written into inputs in place. A program that has no
gradients yet is differentiated by running it: autograd goes back through all ranks by the definition of each
exchange, which owes nothing to the operators' registered gradients. There, a custom autograd function has its
author's backward while the program is global, and none that would show once it is local.

What a program yields that draws from PyTorch's generator is not determined: it has no results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.check.simulate import Lockstep, coordinate
from passes.check.verify import failure
from passes.communication.batch_overlap import is_own, microbatches_in
from passes.program import ir
from passes.program.functions import Function, body_of, function_of
from passes.program.mesh import Mesh
from passes.program.operators import is_mutable, is_random
from passes.program.spec import Spec, boxes, shard, unshard
from passes.program.stages import Stage
from passes.sharding.collectives import Collectives

ZERO_AT_FIRST = ("moment", "gradient")  # kinds of inputs that start at zero if no value is given
NEGLIGIBLE = 1e-3  # of the largest result of a kind


@dataclass(frozen=True)
class Result:
    """One value of a run, whole; `node` computes it, or is the parameter that it is the gradient of."""

    value: Tensor
    node: fx.Node


Results = dict[tuple[str, str], Result]  # by kind and name


def verify_numeric(
    before: ir.Program, after: ir.Program, ctx: ir.Context, inputs: Mapping[str, Tensor], *, pass_name: str = "verify"
) -> dict[str, float]:
    """Relative error of each result that both programs have; `inputs` are whole tensors by input name.

    Moments and gradient accumulators (named `gradient.<parameter>`) that are not given start at zero. Raises
    CompileError, naming the pass, the result and its node, if an error exceeds what the coarsest dtype explains.
    """
    tolerance = max(coarsest(before), coarsest(after)) ** 0.5
    return compare(pass_name, run(before, ctx, inputs), run(after, ctx, inputs), tolerance)


def compare(pass_name: str, before: Results, after: Results, tolerance: float) -> dict[str, float]:
    """Largest difference over largest magnitude, for every result in both; raises CompileError beyond tolerance."""
    errors = {}
    for kind, name in (key for key in before if key in after):
        # a result that is zero but for rounding is measured against the others of its kind
        largest = max(_largest(r.value) for (other, _), r in before.items() if other == kind)
        old, new = before[kind, name].value, after[kind, name].value
        scale = max(_largest(old), NEGLIGIBLE * largest)
        try:
            errors[f"{kind} {name}"] = relative_error(old, new, scale, tolerance)
        except ValueError as error:
            raise failure(pass_name, after[kind, name].node, f"{kind} {name!r} {error}", compare.__name__) from error
    return errors


def relative_error(old: Tensor, new: Tensor, scale: float, tolerance: float) -> float:
    """Largest difference over `scale`; raises ValueError, with both values, beyond tolerance or of other shape."""
    if old.shape != new.shape:
        raise ValueError(f"was of shape {tuple(old.shape)}, is {tuple(new.shape)}")
    if not old.numel():
        return 0.0
    difference = (old.double() - new.double()).abs().flatten().nan_to_num(torch.inf)
    at = int(difference.argmax())
    error = difference[at].item() / (scale or 1.0)
    if error > tolerance:
        raise ValueError(
            f"is off by {error:.3g} of its largest entry (tolerance {tolerance:.3g}): entry {at} "
            f"was {old.flatten()[at]:.6g}, is {new.flatten()[at]:.6g}"
        )
    return error


def _largest(value: Tensor) -> float:
    return value.detach().double().abs().amax().item() if value.numel() else 0.0


def coarsest(program: ir.Program) -> float:
    """The largest rounding step (eps) of any floating dtype in the graph."""
    vals = (ir.value(node) for node in program.graph.nodes)
    return max((torch.finfo(v.dtype).eps for v in vals if isinstance(v, Tensor) and v.is_floating_point()), default=0.0)


# ---- running -------------------------------------------------------------------------------------


def run(program: ir.Program, ctx: ir.Context, inputs: Mapping[str, Tensor]) -> Results:
    """The program's results on whole inputs; gradients of its loss are added if it has none yet."""
    if any(map(is_random, program.calls())):
        return {}
    differentiable = not program.has_backward and not any(body_of(node) for node in program.calls())
    if program.stage < Stage.LOCAL:
        program = with_authors_backward(on_one_device(program))
    elif program.stage < Stage.EXPLICIT:
        program, _ = Collectives()(program, ctx)
    given = place_inputs(program, inputs)
    for values in given if differentiable else ():
        for value, i in zip(values, program.inputs, strict=True):
            value.requires_grad_(i.kind == "parameter")
    with torch.set_grad_enabled(differentiable):
        results = collect(program, Lockstep(program).run(given), given)
    results |= differentiate(program, results, given) if differentiable else {}
    several = microbatches_in([program])  # whose losses, and so gradients, are added: all of them are the one given
    return {
        (kind, name): replace(result, value=result.value / several) if kind in ("loss", "gradient") else result
        for (kind, name), result in results.items()
    }


def on_one_device(program: ir.Program) -> ir.Program:
    """A global program as the local one of a single rank."""

    def whole(end: Any) -> Any:
        return replace(end, spec=Spec.whole(end.spec.shape))

    return replace(
        program, mesh=Mesh(), inputs=tuple(map(whole, program.inputs)), outputs=tuple(map(whole, program.outputs))
    )


class _Authored(torch.autograd.Function):
    """A custom function with its author's backward; what it saves are further outputs."""

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
    """The global program with custom functions that autograd can go back through."""
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
    """Every rank's inputs, copies, by rank; raises CompileError naming an input that is missing or does not fit."""
    whole = [
        None if i.kind in ("coordinate", "layout") else _whole(node, i, inputs)
        for node, i in zip(program.placeholders(), program.inputs, strict=True)
    ]
    return [
        [
            coordinate(program.mesh, rank, i, program.order) if v is None else _part(v, i.spec, program.mesh, at)
            for i, v in zip(program.inputs, whole, strict=True)
        ]
        for rank, at in enumerate(program.mesh)
    ]


def telling(value: Tensor) -> Tensor:
    """A value to verify with: small positive numbers in place of zeros, which hide what is added once a rank."""
    if not value.is_floating_point() or value.any():
        return value
    numbers = torch.arange(1, value.numel() + 1, device=value.device) % 7 + 1
    return (numbers / 16).reshape(value.shape).to(value.dtype)


def _whole(node: fx.Node, given: ir.Input, inputs: Mapping[str, Tensor]) -> Tensor:
    name = given.original if is_own(given) else given.name
    name = f"gradient.{name}" if given.kind == "gradient" else name
    dtype = ir.example(node).dtype
    if given.value is not None:
        return given.value
    if given.count is not None:  # as if all microbatches were the one given
        return given.count.of([inputs] * given.count.microbatches)
    if name not in inputs and given.kind in ZERO_AT_FIRST:
        return torch.zeros(given.spec.shape, dtype=dtype)
    if name not in inputs:
        raise ir.CompileError("numeric", node, f"no value is given for {given.kind} {name!r}")
    value = inputs[name].detach()
    if tuple(value.shape) != given.spec.shape or value.is_floating_point() != dtype.is_floating_point:
        raise ir.CompileError(
            "numeric",
            node,
            f"{given.kind} {name!r} is given as {value.dtype} {list(value.shape)}, "
            f"the program takes {dtype} {list(given.spec.shape)}",
        )
    return value.to(dtype)


def _part(whole: Tensor, spec: Spec, mesh: Mesh, coordinates: dict[str, int]) -> Tensor:
    """A rank's part; of a partial sum the first rank has all, the others zero."""
    has_terms = all(coordinates[axis] == 0 for axis in spec.partial_axes)
    return shard(whole if has_terms else torch.zeros_like(whole), spec, mesh, coordinates)


# ---- results -------------------------------------------------------------------------------------


def collect(program: ir.Program, outputs: Sequence[tuple[Any, ...]], given: Sequence[Sequence[Tensor]]) -> Results:
    """Whole results by kind and name: outputs that are computed, and inputs written in place."""
    results: Results = {}
    for k, (node, output) in enumerate(zip(program.results(), program.outputs, strict=True)):
        if node.op != "placeholder":
            whole = unshard([values[k] for values in outputs], output.spec, program.mesh)
            results[output.kind, output.name] = Result(whole, node)
    written = {node.args[0] for node in program.calls() if is_mutable(node)}
    for k, (node, i) in enumerate(zip(program.placeholders(), program.inputs, strict=True)):
        if node in written:
            results[i.kind, i.name] = Result(unshard([values[k] for values in given], i.spec, program.mesh), node)
    return results


def differentiate(program: ir.Program, results: Results, given: Sequence[Sequence[Tensor]]) -> Results:
    """Gradients of the loss for every whole parameter: terms of all ranks that hold an entry are added."""
    parameters = [k for k, i in enumerate(program.inputs) if i.kind == "parameter"]
    losses = [result.value for (kind, _), result in results.items() if kind == "loss" and result.value.requires_grad]
    if not losses or not parameters:
        return {}
    wanted = [values[k] for k in parameters for values in given]
    terms = iter(torch.autograd.grad(losses[0], wanted, materialize_grads=True))
    nodes, found = program.placeholders(), {}
    for k in parameters:
        spec = program.inputs[k].spec
        total = given[0][k].new_zeros(spec.shape)
        for coordinates in program.mesh:
            term = next(terms)
            for box in boxes(spec, program.mesh, coordinates):
                box.of(total).add_(box.of_local(term))
        found["gradient", program.inputs[k].name] = Result(total, nodes[k])
    return found
