"""A model that looks up a table by a buffer and rearranges it before it meets tensors sharded by tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

MESH = {"dp_shard": 2, "tp": 2}
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of [4, 2, 5] and of the rows looked up, [5, 2]
    "t": lambda y, rows: y + rows.t(),
    "view": lambda y, rows: (y.transpose(1, 2) + rows.view(1, 5, -1)).transpose(1, 2),
    "view, transpose": lambda y, rows: y + rows.view(1, 5, -1).transpose(1, 2),
}
ROWS = {"of the second rank": torch.arange(6, 11), "of the first": torch.arange(5)}


class Rearranged(nn.Module):
    """A convolution and two linear layers around the sum."""

    def __init__(self, form: str, rows: str):
        super().__init__()
        self.c, self.l, self.o = nn.Conv1d(4, 4, 1), nn.Linear(4, 2), nn.Linear(2, 4)
        self.e = nn.Embedding(11, 2)
        self.register_buffer("at", ROWS[rows])
        self.form = FORMS[form]

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(self.c(x).transpose(1, 2))
        return self.o(self.form(y.transpose(1, 2), self.e(self.at)).transpose(1, 2))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean square."""
    return model(batch["x"]).square().mean()


def example(form: str, rows: str) -> tuple[Rearranged, dict[str, Tensor]]:
    """Return the model and a batch, always the same, fp64."""
    torch.manual_seed(0)
    model = Rearranged(form, rows).double()
    return model, {"x": torch.randn(4, 4, 5, dtype=torch.float64)}
