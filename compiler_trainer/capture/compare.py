"""Compare a captured program with its model on one device: loss, gradients and new buffers.

The two share nothing: the model runs in eager PyTorch with its own `backward`, the program in an interpreter that
autograd follows. All later checks start from the program, so only this one notices a gradient that the capture cut. A
model that is too large to run, or that draws random numbers, is compared without values: by the parameters that
autograd reaches from the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from compiler_trainer.capture.capture import capture, fake_copy
from compiler_trainer.capture.returned import parted
from compiler_trainer.request import LossFn
from passes.ir import ir
from passes.torch_private import FakeTensorMode
from passes.trace.functions import Function, function_of

Results = dict[str, Tensor]  # `loss`, `gradient of NAME` for trained parameters, `buffer NAME`
EXACT, ROUNDED = 1e-3, 5e-2  # largest difference allowed, relative to the largest entry: in float32, in 16 bits
FLOOR = 1e-4  # differences of smaller values are relative to this
SEEDS = (0, 1)
CPU = torch.device("cpu")


def captured_difference(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Mapping[str, Tensor],
    eager: Callable[[nn.Module], nn.Module] = lambda model: model,
    values: bool = True,
) -> str:
    """Return the first difference between a model and its captured program in words, empty if there is none.

    `eager` turns a copy into a model that eager PyTorch can run. Without `values`, only the parameters that get
    gradients are compared. Raises UserError if the model cannot be captured.
    """
    program, ctx = capture(model, loss_fn, batch, CPU)
    if not values:
        return difference_reached(program, ctx, model, loss_fn, batch, eager)
    expected, repeated = (eager_results(eager(copy.deepcopy(model)), loss_fn, batch, s) for s in SEEDS)
    if first_difference(repeated, expected, 0.0):  # the model draws random numbers
        return difference_reached(program, ctx, model, loss_fn, batch, eager)
    allowed = ROUNDED if rounds(program) else EXACT
    return first_difference(program_results(program, model, batch), expected, allowed)


def eager_results(model: nn.Module, loss_fn: LossFn, batch: Mapping[str, Tensor], seed: int = 0) -> Results:
    """Return the results of eager PyTorch; changes the model."""
    model.zero_grad()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        loss = parted(loss_fn(model, {name: value.clone() for name, value in batch.items()}))[0]
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return results(loss, gradients, dict(model.named_parameters()), dict(model.named_buffers()))


def program_results(program: ir.Program, model: nn.Module, batch: Mapping[str, Tensor]) -> Results:
    """Return the results of a captured program with a model's values, by autograd through its operators."""
    state = {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    trained = {i.name: state[i.name].requires_grad_() for i in program.inputs if i.kind == "parameter"}
    inputs = [
        batch[i.name].clone() if i.kind == "batch" else state[i.name] if i.value is None else i.value
        for i in program.inputs
    ]
    with torch.enable_grad():
        outputs = dict(zip(((o.kind, o.name) for o in program.outputs), Differentiable(program.module).run(*inputs)))
        loss = outputs["loss", "loss"]
        has_gradient = loss.requires_grad and bool(trained)
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if has_gradient else ()
    buffers = {name: state[name] for name, _ in model.named_buffers()}
    buffers |= {name: value for (kind, name), value in outputs.items() if kind == "buffer"}
    return results(loss, dict(zip(trained, gradients)), dict(model.named_parameters()), buffers)


def results(
    loss: Tensor,
    gradients: Mapping[str, Tensor | None],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Results:
    """Return detached values by name; a gradient that is None counts as zeros."""
    values = {"loss": loss.detach()}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            gradient = gradients.get(name)
            values[f"gradient of {name}"] = torch.zeros_like(parameter) if gradient is None else gradient
    values |= {f"buffer {name}": value for name, value in buffers.items()}
    return {name: value.detach() for name, value in values.items()}


def rounds(program: ir.Program) -> bool:
    """Return True if a program computes anything in 16 bits."""
    return any(ir.example(n).dtype in (torch.bfloat16, torch.float16) for n in program.graph.nodes if ir.is_tensor(n))


def first_difference(actual: Results, expected: Results, allowed: float) -> str:
    """Return the first value that differs, with the size of the difference; empty if none does."""
    for name, value in expected.items():
        dtype = torch.complex128 if value.is_complex() else torch.float64
        ours, theirs = actual[name].to(dtype), value.to(dtype)
        size = theirs.abs().max().item() if theirs.numel() else 0.0
        error = (ours - theirs).abs().max().item() if theirs.numel() else 0.0
        if not error <= allowed * (size + FLOOR):
            return f"{name} differs by {error:.2g} and its largest entry is {size:.2g}"
    return ""


def difference_reached(
    program: ir.Program,
    ctx: ir.Context,
    model: nn.Module,
    loss_fn: LossFn,
    batch: Mapping[str, Tensor],
    eager: Callable[[nn.Module], nn.Module],
) -> str:
    """Return the first parameter that only one of the losses reaches, in words; runs both without values."""
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.enable_grad(), FakeTensorMode() as mode:
        fake = eager(fake_copy(model, mode, CPU, None))
        fake_batch = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in batch.items()}
        expected = reached_parameters(parted(loss_fn(fake, fake_batch))[0], dict(fake.named_parameters()))
    with torch.enable_grad(), ctx.fake_mode:
        inputs = [ir.example(node).detach() for node in program.placeholders()]
        trained = {i.name: v.requires_grad_() for i, v in zip(program.inputs, inputs) if i.kind == "parameter"}
        outputs = Differentiable(program.module).run(*inputs)
        actual = reached_parameters(outputs[[o.kind for o in program.outputs].index("loss")], trained)
    if missing := sorted((expected - actual) & names):
        return f"no gradient reaches {missing[0]} ({len(missing)} parameters), though the model has one"
    if extra := sorted((actual - expected) & names):
        return f"a gradient reaches {extra[0]} ({len(extra)} parameters), though the model has none"
    return ""


def reached_parameters(loss: Tensor, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the parameters that the backward of a loss reaches."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    waiting, visited, parameters_reached = [loss.grad_fn], set(), set()
    while waiting:
        record = waiting.pop()
        if record is None or record in visited:
            continue
        visited.add(record)
        parameters_reached |= {names[id(leaf)]} if (leaf := getattr(record, "variable", None)) is not None else set()
        waiting += [earlier for earlier, _ in record.next_functions]
    return parameters_reached


class Differentiable(fx.Interpreter):
    """An interpreter of a captured graph in which autograd calls the backward of custom functions."""

    def run_node(self, n: fx.Node) -> Any:
        """Return the node's value."""
        if (function := function_of(n)) is None:
            return super().run_node(n)
        outputs = FunctionCall.apply(function, *self.fetch_args_kwargs_from_env(n)[0])
        return outputs if len(outputs) > 1 else outputs[0]


class FunctionCall(torch.autograd.Function):
    """A call of a captured custom function."""

    @staticmethod
    def forward(ctx: Any, function: Function, *operands: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return all results of the function's forward, each in its own memory."""
        outputs = tuple(value.clone(memory_format=torch.contiguous_format) for value in function.forward(*operands))
        ctx.function = function
        ctx.save_for_backward(*operands, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the operands."""
        function: Function = ctx.function
        return None, *function.backward(*ctx.saved_tensors, *gradients[: function.results])
