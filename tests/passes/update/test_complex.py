"""Complex parameters are trained as the pairs of their parts."""

from __future__ import annotations

import pytest
import torch
from oracle import ADAMW, compile_lockstep, trained_alike
from torch import Tensor, nn

from passes.ir.ir import CompileError
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec
from passes.update.moments import codec

MESHES = [{}, {"dp_shard": 3}, {"tp": 2}, {"dp_shard": 2, "tp": 2}]


class Turned(torch.autograd.Function):
    """A multiplication of complex numbers whose backward is not its derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        return (g * w.conj() if ctx.needs_input_grad[0] else None), (g * x.conj() * 0.7).sum((0, 1))


class Filter(nn.Module):
    """A model that multiplies frequencies of a row by complex weights, one of which has its own function."""

    def __init__(self, width: int = 9):
        super().__init__()
        self.inside = nn.Linear(4, width).double()
        self.all = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex128))
        self.own = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex128))
        self.out = nn.Linear(width, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x)
        z = torch.fft.rfft(y[:, None]) * self.all
        return self.out(torch.fft.irfft(Turned.apply(z, self.own), n=y.shape[-1])[:, 0])


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def filters() -> tuple[Filter, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    return Filter(), [{"x": torch.randn(5, 4).double(), "y": torch.randn(5, 4).double()} for _ in range(3)]


OPTIMIZERS = [ADAMW, {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1, "max_norm": 0.5}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim["name"])
@pytest.mark.sample(2)
def test_updates_norms_and_clipping_are_those_of_pytorch(mesh, optim):
    model, data = filters()
    trained_alike(model, squared, data, mesh, optim)


def test_gradients_of_microbatches_are_added_with_their_imaginary_parts():
    model, data = filters()
    data = [{name: x[:4] for name, x in batch.items()} for batch in data]
    trained_alike(model, squared, data, {"dp_shard": 2}, microbatches=2)


def written_over(model: Filter, batch: dict[str, Tensor]) -> Tensor:
    """Weigh a slice of frequencies and write it over the others."""
    frequencies = torch.fft.rfft(model.inside(batch["x"]))
    spectrum = model.all * frequencies
    spectrum[:, 1:3] = (frequencies * model.own)[:, 1:3].conj()
    return (model.out(torch.fft.irfft(spectrum, n=9)) - batch["y"]).square().mean()


def test_a_slice_of_complex_numbers_that_is_written_over_is_differentiated():
    model, data = filters()
    trained_alike(model, written_over, data, {"dp_shard": 2, "tp": 2})


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "float8"])
def test_moments_are_complex_where_the_parameter_is(name):
    storage = codec(name, True, 256, torch.complex64, Spec.whole((64, 256)), Mesh.of({}))
    moment = torch.randn(64, 256, dtype=torch.complex64)
    assert torch.equal(storage.decode(storage.encode(torch.view_as_real(moment))), moment)


def test_a_cast_that_drops_imaginary_parts_is_refused_by_line():
    model, data = filters()
    loss = lambda model, batch: (model.all * batch["x"].sum()).to(torch.float64).sum()  # noqa: E731
    with pytest.raises(CompileError, match=r"test_complex.py:\d+.* drops the imaginary parts"):
        compile_lockstep(model, loss, data[0], {})
