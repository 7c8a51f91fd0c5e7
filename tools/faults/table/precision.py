"""Faults of `passes/precision`."""

from __future__ import annotations

from tools.faults.fault import Fault

FAULTS = (
    # cast.py
    Fault(
        "rounding_casts_dropped",
        "passes/precision/cast.py",
        "keeps_all = torch.promote_types(first, middle) == middle",
        "keeps_all = True",
        "A cast that rounds on purpose is dropped.",
    ),
    Fault(
        "loss_rounded",
        "passes/precision/cast.py",
        "if floating(x) and x.dim() else x",
        "if floating(x) else x",
        "A loss that was computed in fp32 is rounded to bf16.",
    ),
    Fault(
        "ops_narrowed",
        "passes/precision/cast.py",
        "return widen[0] if widen and widen[0].itemsize > now.itemsize else None",
        "return widen[0] if widen and widen[0].itemsize < now.itemsize else None",
        "Operators that should compute in fp32 stay in bf16.",
    ),
    # float8.py
    Fault(
        "float8_gradient_of_x",
        "passes/precision/float8.py",
        "product(rows, w.t(), quantize, dtype), product(rows.t(), flat.t(), quantize, dtype)",
        "product(rows, w.t(), quantize, dtype), product(rows.t(), flat.t(), quantize, E4M3)",
        "The gradient of a weight is quantized in the narrower format.",
    ),
)
