"""Does a pass keep the numbers? The program before it and the one after are run on the same small inputs.

A global program runs on one device, a local one on all ranks in lockstep; results are compared whole. What counts
as a result: the loss, the gradients, metrics, and new values of buffers and gradient accumulators, returned or
written in place. A program that has no gradients yet is differentiated by running it: autograd goes back through
all ranks by the definition of each exchange, which owes nothing to the operators' registered gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes import ir
from passes.collectives import Expand
from passes.mesh import Mesh
from passes.simulate import Lockstep, places
from passes.spec import Spec, boxes, shard, unshard
from passes.torch_private import OpOverload
from passes.verify import failure

ZERO_AT_FIRST = ("moment", "gradient")  # kinds of inputs that start at zero if no value is given
KEPT = ("buffer", "gradient")  # kinds of inputs whose new value, written in place, is a result


@dataclass(frozen=True)
class Result:
    """One value of a run, whole; `node` computes it, or is the parameter that it is the gradient of."""

    value: Tensor
    node: fx.Node


Results = dict[tuple[str, str], Result]  # by kind and name


def verify_numeric(before: ir.Program, after: ir.Program, ctx: ir.Context, inputs: Mapping[str, Tensor], *,
                   pass_name: str = "verify") -> dict[str, float]:
    """Relative error of each result that both programs have; `inputs` are whole tensors by input name.

    Moments and gradient accumulators (named `gradient.<parameter>`) that are not given start at zero. Raises
    CompileError, naming the pass, the result and its node, if an error exceeds what the coarsest dtype explains.
    """
    tolerance = max(coarsest(before), coarsest(after)) ** 0.5
    return compare(pass_name, run(before, ctx, inputs), run(after, ctx, inputs), tolerance)


def compare(pass_name: str, before: Results, after: Results, tolerance: float) -> dict[str, float]:
    """Largest difference over largest magnitude, for every result in both; raises CompileError beyond tolerance."""
    errors = {}
    for kind, name in before:
        if (kind, name) not in after:
            continue
        old, new = before[kind, name].value.double(), after[kind, name].value.double()
        node = after[kind, name].node
        if old.shape != new.shape:
            raise failure(pass_name, node, f"{kind} {name!r} was of shape {tuple(old.shape)}, is {tuple(new.shape)}")
        difference = (old - new).abs().flatten()
        error = (difference.amax() / old.abs().amax().clamp(min=1e-30)).item() if old.numel() else 0.0
        if not error <= tolerance:
            at = int(difference.nan_to_num(torch.inf).argmax())
            raise failure(pass_name, node, f"{kind} {name!r} is off by {error:.3g} of its largest entry (tolerance "
                          f"{tolerance:.3g}): entry {at} was {old.flatten()[at]:.6g}, is {new.flatten()[at]:.6g}")
        errors[f"{kind} {name}"] = error
    return errors


def coarsest(program: ir.Program) -> float:
    """The largest rounding step (eps) of any floating dtype in the graph."""
    vals = (node.meta.get("val") for node in program.graph.nodes)
    return max((torch.finfo(v.dtype).eps for v in vals if isinstance(v, Tensor) and v.is_floating_point()), default=0.0)


# ---- running -------------------------------------------------------------------------------------


def run(program: ir.Program, ctx: ir.Context, inputs: Mapping[str, Tensor]) -> Results:
    """The program's results on whole inputs; gradients of its loss are added if it returns none."""
    is_local = "local" in program.facts
    if is_local and "collectives" not in program.facts:
        program, _ = Expand()(program, ctx)
    mesh = program.mesh if is_local else Mesh()
    given = place_inputs(program, inputs, mesh)
    wants_gradients = "joint" not in program.facts
    leaves = [[_leaf(v) if i.kind == "parameter" and wants_gradients else v for i, v in zip(program.inputs, values)]
              for values in given]
    with torch.set_grad_enabled(wants_gradients):
        outputs = Lockstep(program).run(leaves) if is_local else [fx.Interpreter(program.module).run(*leaves[0])]
    results = collect(program, outputs, leaves, mesh)
    if wants_gradients:
        results |= differentiate(program, results, leaves, mesh)
    return results


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()


def place_inputs(program: ir.Program, inputs: Mapping[str, Tensor], mesh: Mesh) -> list[list[Tensor]]:
    """Every rank's inputs, copies, by rank; raises CompileError naming an input that is missing or does not fit."""
    whole = [None if i.kind == "coordinate" else _whole(n, i, inputs)
             for n, i in zip(program.placeholders(), program.inputs, strict=True)]
    return [[places(mesh, rank, i.name) if v is None else _local(v, i.spec, mesh, place)
             for i, v in zip(program.inputs, whole, strict=True)] for rank, place in enumerate(mesh)]


def _whole(node: fx.Node, given: ir.Input, inputs: Mapping[str, Tensor]) -> Tensor:
    name = f"gradient.{given.name}" if given.kind == "gradient" else given.name
    dtype = ir.example(node).dtype
    if name not in inputs and given.kind in ZERO_AT_FIRST:
        return torch.zeros(given.spec.shape, dtype=dtype)
    if name not in inputs:
        raise ir.CompileError("numeric", node, f"no value is given for {given.kind} {name!r}")
    value = inputs[name].detach()
    if tuple(value.shape) != given.spec.shape or value.dtype != dtype:
        raise ir.CompileError("numeric", node, f"{given.kind} {name!r} is given as {value.dtype}{list(value.shape)}, "
                              f"the program takes {dtype}{list(given.spec.shape)}")
    return value


def _local(whole: Tensor, spec: Spec, mesh: Mesh, place: dict[str, int]) -> Tensor:
    """The rank's part; of a partial sum the first rank has all, the others zero."""
    if mesh == Mesh():
        return whole.clone()
    has_terms = all(place[axis] == 0 for axis in spec.partial_axes)
    return shard(whole if has_terms else torch.zeros_like(whole), spec, mesh, place)


# ---- results -------------------------------------------------------------------------------------


def collect(program: ir.Program, outputs: list[tuple[Any, ...]], given: list[list[Tensor]], mesh: Mesh) -> Results:
    """Whole results by kind and name: outputs that are computed, and inputs written in place."""
    results: Results = {}
    for k, (node, output) in enumerate(zip(program.results(), program.outputs, strict=True)):
        if node.op != "placeholder":
            results[output.kind, output.name] = Result(_join([out[k] for out in outputs], output.spec, mesh), node)
    written = {node.args[0] for node in program.calls() if _is_mutable(node)}
    for k, (node, i) in enumerate(zip(program.placeholders(), program.inputs, strict=True)):
        if node in written and i.kind in KEPT:
            results[i.kind, i.name] = Result(_join([values[k] for values in given], i.spec, mesh), node)
    return results


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _join(values: list[Tensor], spec: Spec, mesh: Mesh) -> Tensor:
    return values[0] if mesh == Mesh() else unshard(values, spec, mesh)


def differentiate(program: ir.Program, results: Results, leaves: list[list[Tensor]], mesh: Mesh) -> Results:
    """Gradients of the loss for every whole parameter: terms of all ranks that hold an entry are added."""
    losses = [r.value for (kind, _), r in results.items() if kind == "loss"]
    if not losses:
        return {}
    found: Results = {}
    parameters = [k for k, i in enumerate(program.inputs) if i.kind == "parameter"]
    if not parameters or not losses[0].requires_grad:
        return {}
    wanted = [values[k] for k in parameters for values in leaves]
    terms = iter(torch.autograd.grad(losses[0], wanted, allow_unused=True))
    nodes = program.placeholders()
    for k in parameters:
        total = torch.zeros(program.inputs[k].spec.shape, dtype=leaves[0][k].dtype)
        for place in mesh:
            term = next(terms)
            if term is not None:
                _add(total, term, program.inputs[k].spec, mesh, place)
        found["gradient", program.inputs[k].name] = Result(total, nodes[k])
    return found


def _add(total: Tensor, term: Tensor, spec: Spec, mesh: Mesh, place: dict[str, int]) -> None:
    if mesh == Mesh():
        total.add_(term)
        return
    for box in boxes(spec, mesh, place):
        box.of(total).add_(box.of_local(term))
