"""Capture batch norms with `momentum=None`, whose running statistics are means over all batches.

PyTorch reads the number of batches into Python, which no graph can do: here the weight of a batch stays a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.torch_private import BatchNorm


def cumulative_averages() -> AbstractContextManager:
    """Make such batch norms count their batches in the graph, inside the block."""
    return patch.object(BatchNorm, "forward", _with_tensors(BatchNorm.forward))


def _with_tensors(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: BatchNorm, x: Tensor) -> Tensor:
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if self.momentum is not None or not self.training or mean is None or var is None or count is None:
            return original(self, x)
        self._check_input_dim(x)
        batch_mean, batch_var = torch.zeros_like(mean), torch.zeros_like(var)
        out = F.batch_norm(x, batch_mean, batch_var, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            count.add_(1)
            mean.lerp_(batch_mean, 1 / count.to(mean.dtype))
            var.lerp_(batch_var, 1 / count.to(var.dtype))
        return out

    return forward
