"""Compare a captured program with its model on one device: loss, gradients and new buffers, by value.

The two share nothing: the model runs by eager PyTorch with its own `backward`, the program by an interpreter that
autograd follows. Every later check begins with the program, so that only this one notices a gradient that capture cut.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from compiler_trainer.capture.capture import LossFn, capture
from compiler_trainer.capture.returned import parted
from passes.program import ir
from passes.program.functions import Function, function_of

Results = dict[str, Tensor]  # `loss`, `gradient of NAME` of each trained parameter, `buffer NAME`
EXACT, ROUNDED = 1e-3, 5e-2  # largest difference allowed, relative to the largest entry: in float32, in 16 bits
FLOOR = 1e-4  # smaller entries are compared to this one
SEED = 0


def capture_alike(
    model: nn.Module, loss_fn: LossFn, batch: Mapping[str, Tensor], expected: Results | None = None
) -> str:
    """The first difference between model and captured program in words, empty if there is none.

    `expected` are the model's results if they are known. Raises UserError if the model cannot be captured.
    """
    expected = eager_results(copy.deepcopy(model), loss_fn, batch) if expected is None else expected
    program, _ = capture(model, loss_fn, batch, torch.device("cpu"))
    allowed = ROUNDED if rounds(program) else EXACT
    return first_difference(program_results(program, model, batch), expected, allowed)


def eager_results(model: nn.Module, loss_fn: LossFn, batch: Mapping[str, Tensor]) -> Results:
    """The results of eager PyTorch; changes the model."""
    model.zero_grad()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(SEED)
        loss = parted(loss_fn(model, {name: value.clone() for name, value in batch.items()}))[0]
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return results(loss, gradients, dict(model.named_parameters()), dict(model.named_buffers()))


def program_results(program: ir.Program, model: nn.Module, batch: Mapping[str, Tensor]) -> Results:
    """The results of a captured program with the values of a model, by autograd through its operators."""
    state = {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    trained = {i.name: state[i.name].requires_grad_() for i in program.inputs if i.kind == "parameter"}
    given = [
        batch[i.name].clone() if i.kind == "batch" else state[i.name] if i.value is None else i.value
        for i in program.inputs
    ]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(SEED)
        outputs = dict(zip(((o.kind, o.name) for o in program.outputs), Differentiable(program.module).run(*given)))
        loss = outputs["loss", "loss"]
        has_gradient = loss.requires_grad and bool(trained)
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if has_gradient else ()
    buffers = {name: state[name] for name, _ in model.named_buffers()}
    buffers |= {name: value for (kind, name), value in outputs.items() if kind == "buffer"}
    return results(loss, dict(zip(trained, found)), dict(model.named_parameters()), buffers)


def results(
    loss: Tensor,
    gradients: Mapping[str, Tensor | None],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Results:
    """Values by name; a gradient that is None counts as zeros."""
    found = {"loss": loss.detach()}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            gradient = gradients.get(name)
            found[f"gradient of {name}"] = torch.zeros_like(parameter) if gradient is None else gradient
    found |= {f"buffer {name}": value for name, value in buffers.items()}
    return {name: value.detach() for name, value in found.items()}


def rounds(program: ir.Program) -> bool:
    """Whether a program computes anything in 16 bits."""
    return any(ir.example(n).dtype in (torch.bfloat16, torch.float16) for n in program.graph.nodes if ir.is_tensor(n))


def first_difference(found: Results, expected: Results, allowed: float) -> str:
    """The first value that differs, with the size of the difference; empty if none does."""
    for name, value in expected.items():
        wide = torch.complex128 if value.is_complex() else torch.float64
        ours, theirs = found[name].to(wide), value.to(wide)
        size = theirs.abs().max().item() if theirs.numel() else 0.0
        off = (ours - theirs).abs().max().item() if theirs.numel() else 0.0
        if not off <= allowed * (size + FLOOR):
            return f"{name} differs by {off:.2g} where it is at most {size:.2g}"
    return ""


class Differentiable(fx.Interpreter):
    """Runs a captured graph so that autograd calls the backward of custom functions."""

    def run_node(self, n: fx.Node) -> Any:
        """The node's value."""
        if (function := function_of(n)) is None:
            return super().run_node(n)
        made = Called.apply(function, *self.fetch_args_kwargs_from_env(n)[0])
        return made if len(made) > 1 else made[0]


class Called(torch.autograd.Function):
    """A call of a custom function that was captured."""

    @staticmethod
    def forward(ctx: Any, function: Function, *operands: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """All that the function's forward returns, each in memory of its own."""
        made = tuple(value.clone(memory_format=torch.contiguous_format) for value in function.forward(*operands))
        ctx.function = function
        ctx.save_for_backward(*operands, *made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients of the operands."""
        function: Function = ctx.function
        return None, *function.backward(*ctx.saved_tensors, *gradients[: function.results])
