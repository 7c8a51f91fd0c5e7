"""Features that older versions of PyTorch lack on the CPU."""

from __future__ import annotations

import pytest

from passes.torch_private import VERSION


def needs_scales_by_row() -> None:
    """Skip a test that runs float8 matmuls with a scale for each row."""
    if VERSION < (2, 12):
        pytest.skip("PyTorch 2.11 has a scale a row on GPUs only")
