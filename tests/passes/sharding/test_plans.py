"""The inferred tensor-parallel plan of every model is Megatron's: golden files, reviewed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from oracle import batches, llama, llama_loss
from torch import nn

from compiler_trainer.capture.capture import capture
from passes.ir.mesh import Mesh
from passes.sharding.infer import infer
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place

GOLDEN = Path(__file__).parent / "golden" / "plans"


def plan_text(model, loss_fn, batch) -> str:
    """Return one line for each split parameter: its shape, and the dim as outer * blocks@tp * inner."""
    program, ctx = capture(model, loss_fn, batch, torch.device("cpu"))
    program, _ = Normalize()(replace(program, mesh=Mesh.of({"tp": 2})), ctx)
    shapes = {i.name: i.spec.shape for i in program.inputs}
    return "".join(f"{name} {list(shapes[name])} dim {b.dim}: {b.outer} * {b.size}@tp * {b.inner}\n"
                   for name, b in infer(program, 2).items())


@pytest.mark.parametrize("name", ["ours", *zoo.MODELS])
@pytest.mark.sample(2)
def test_inferred_plan_is_megatrons(name: str, request: pytest.FixtureRequest) -> None:
    if name == "ours":
        text = plan_text(llama(2), llama_loss, batches()[0])
    else:
        text = plan_text(zoo.build(name), zoo.loss_fn, zoo.batch())
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(("dim", "placed"), [(2, "[3, 4, 6@tp]"), (-1, "[3, 4, 6@tp]"), (-3, "[3@tp, 4, 6]")])
def test_a_dim_of_a_plan_may_be_counted_from_the_end(dim, placed):
    class Batched(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 4, 6))

        def forward(self, x):
            return torch.bmm(x, self.w)

    program, ctx = capture(Batched(), lambda m, b: m(b["x"]).sum(), {"x": torch.ones(3, 2, 4)}, torch.device("cpu"))
    program, _ = Normalize()(replace(program, mesh=Mesh.of({"tp": 2})), ctx)
    program, _ = Place({"w": {"tp": dim}})(program, ctx)
    assert str(next(i.spec for i in program.inputs if i.name == "w")) == placed
