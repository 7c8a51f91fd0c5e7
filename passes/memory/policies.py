"""The policies of recomputation and the operators that they keep, by name.

The options schema uses them without torch.
"""

from __future__ import annotations

from typing import Literal, get_args

Action = Literal["save", "recompute", "offload"]
OfLayer = Literal["none", "full", "attention", "selective", "offload"]
Policy = Literal[OfLayer, "every_n", "budget"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
# Matmuls and attention: the most time for the bytes of their results.
MATMULS = ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "_scaled_mm", "grouped_mm", "convolution")
ATTENTION = "attention"  # stands for all attention kernels
SAVE = (*MATMULS, ATTENTION)
