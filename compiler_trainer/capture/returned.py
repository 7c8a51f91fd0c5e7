"""Check what a loss function returns: the loss, or the loss and a dict of further scalars, the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compiler_trainer.config.errors import UserError

FORM = "return the loss, or (loss, {name: scalar}) with metrics to log"
RESERVED = frozenset(
    "step tokens loss eval_loss grad_norm lr skipped tokens_per_s step_ms data_ms tflops mfu peak_mem_bytes "
    "busy_ms_median busy_ms_max slowest_rank wait_share cp_imbalance cp_imbalance_head_tail "
    "expert_load expert_load_max expert_load_mean expert_entropy balance_loss dropped_rows".split()
)  # names of a run's own metrics, some with a suffix after "/": docs/reference/metrics.md


def parted(returned: Any, rows: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, metrics by name) from the result of a loss function; raise UserError if it has another form.

    A metric may have values for each of `rows` samples: its first dim.
    """
    if isinstance(returned, Tensor):
        return check_loss(returned, "returns"), {}
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise UserError("loss_fn", f"returns {describe(returned)}; {FORM}")
    loss, metrics = returned
    for name, value in metrics.items():
        if not isinstance(name, str) or not name or name in RESERVED:
            raise UserError(
                "loss_fn", f"returns a metric named {name!r}, which is reserved or not a name; choose another"
            )
        if not isinstance(value, Tensor) or value.shape[:1] not in ((), (rows,)):
            raise UserError("loss_fn", f"returns {describe(value)} as the metric {name!r}; it must be a scalar tensor")
    numbers = {name: value if value.is_floating_point() else value.double() for name, value in metrics.items()}
    return check_loss(loss, "returns as the loss"), numbers


def check_loss(loss: Any, verb: str) -> Tensor:
    """Return a loss that can be differentiated; raise UserError for anything else."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise UserError("loss_fn", f"{verb} {describe(loss)}; must be a scalar")
    return loss


def describe(value: Any) -> str:
    """Return a short description such as `(float32[4, 16], dict)`."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(describe, value))})"
    return type(value).__name__
