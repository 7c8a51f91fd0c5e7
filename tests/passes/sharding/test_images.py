"""Image models: convolutions split over tp in pairs, norms with the statistics of all ranks' rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import EXACT, compile_lockstep, trained_alike
from torch import Tensor, nn

MESHES = ({"dp_shard": 2}, {"tp": 2}, {"tp": 4}, {"dp_shard": 2, "tp": 2})
SGD = {"name": "sgd", "momentum": 0.9, "max_norm": 0.5}


class Net(nn.Module):
    """A stem, a residual block with a column and a row split, a depthwise, a grouped and a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding="same"), nn.BatchNorm2d(6)
        self.up, self.up_norm = nn.Conv2d(6, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10, affine=False, momentum=None)
        self.down, self.groups = nn.Conv2d(10, 6, 1), nn.GroupNorm(3, 6)
        self.each, self.wide = nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6), nn.Conv2d(6, 8, 1)
        self.instances, self.grouped = nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.larger, self.head = nn.ConvTranspose2d(8, 5, 2, stride=2), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        x = F.silu(self.groups(x + self.down(F.gelu(self.up_norm(self.up(x))))))
        x = self.larger(self.grouped(self.instances(self.wide(self.each(x)))))
        x = F.interpolate(F.avg_pool2d(F.pad(x, (1, 0, 1, 0), "circular"), 2), scale_factor=2.0, mode="bilinear")
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def net() -> Net:
    """Return a net with the same weights at each call, and running statistics other than their initial ones."""
    torch.manual_seed(0)
    model = Net().double()
    for name, buffer in model.named_buffers():
        if name.endswith(("mean", "var")):
            buffer.uniform_(0.5, 1.5)
    return model


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy over images."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def images(rows: int = 5) -> list[dict[str, Tensor]]:
    """Return batches of 8 x 8 pixels."""
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64),
             "y": torch.randint(0, 4, (rows,), generator=generator)} for _ in range(3)]


def gathered(step) -> list[str]:
    """Return the notes on operators without a rule, whose operands are gathered."""
    return [note for record in step.report["passes"] for note in record["report"]["notes"] if "has no rule" in note]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(1)
def test_trains_as_on_one_device(mesh):
    """Compare losses, gradient norms, weights and running statistics; then evaluation, which uses those."""
    model = net()
    step = trained_alike(model, loss, images(), mesh, SGD, evaluate=True)
    assert not gathered(step)
    model.load_state_dict(step.state_dict())
    (batch,) = images()[:1]
    assert step.evaluate(batch) == pytest.approx(loss(model.eval(), batch).item(), abs=EXACT)


def plan_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, str]:
    """Map each parameter to its placement over two ranks of tp."""
    step = compile_lockstep(model, loss, batch, {"tp": 2})
    return {name.removeprefix("model."): str(state.spec) for name, state in step.state.items()}


def test_a_column_is_followed_by_a_row():
    plan = plan_of(net(), images()[0])
    names = ("stem", "norm", "up", "down", "groups", "each", "wide", "grouped", "larger", "head")
    assert {name: plan[f"{name}.weight"].replace(", 3, 3", "") for name in names} == {
        "stem": "[3@tp*2, 3]", "norm": "[3@tp*2]",  # in blocks that match the groups of `groups`, to which the residual is added
        "up": "[10, 6@tp]", "down": "[3@tp*2, 10, 1, 1]", "groups": "[3@tp*2]", "each": "[3@tp*2, 1]",
        "wide": "[8, 3@tp*2, 1, 1]", "grouped": "[4@tp*2, 2]", "larger": "[4@tp*2, 5, 2, 2]", "head": "[4@tp, 5]"}
