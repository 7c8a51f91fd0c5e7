"""Operators that must not compute below a dtype, by name; the options schema uses them without torch."""

from __future__ import annotations

from typing import Literal

# Sums of exponentials; norms keep fp32 inside their kernels whatever dtype they are given.
OPS: dict[str, Literal["float32", "bfloat16"]] = {
    "softmax": "float32",
    "_softmax": "float32",
    "log_softmax": "float32",
    "_log_softmax": "float32",
    "logsumexp": "float32",
    "cross_entropy_loss": "float32",
    "nll_loss*": "float32",
}
