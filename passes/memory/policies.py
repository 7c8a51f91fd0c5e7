"""The policies of recomputation, and what they keep, by name: options are made of these, and import no torch."""

from __future__ import annotations

from typing import Literal, get_args

Action = Literal["save", "recompute", "offload"]
OfLayer = Literal["none", "full", "attention", "selective", "offload"]
Policy = Literal[OfLayer, "every_n", "budget"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
# Products and attention: the most time for the bytes of their results.
PRODUCTS = ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "_scaled_mm", "grouped_mm", "convolution")
ATTENTION = "attention"  # stands for all kernels of it
SAVE = (*PRODUCTS, ATTENTION)
