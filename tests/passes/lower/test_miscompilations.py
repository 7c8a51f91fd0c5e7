"""Known miscompilations of PyTorch's compiler: still there with their options on, avoided by our options.

A test fails if one is gone in a version that the table lists: then the table is too broad.
"""

from __future__ import annotations

import pytest
from absent_gpu import HERE, run

from passes.lower.miscompilations import KNOWN, workaround_options
from passes.torch_private import VERSION

BUCKET_CUDA = HERE / "bucket_cuda.py"
FUSE = {"triton.mix_order_reduction": True}
SMALL = {"triton.mix_order_reduction_non_strict_mode": True}  # fuse small reductions, too
(MIX_ORDER,) = (each for each in KNOWN if "triton.mix_order_reduction" in each.options)


@pytest.mark.parametrize(("version", "is_off"), [((2, 9), False), ((2, 10), True), ((2, 13), True), ((2, 14), False)])
def test_known_miscompilations_are_avoided_in_the_versions_that_have_them(version, is_off):
    assert (workaround_options(version) == {"triton.mix_order_reduction": False}) == is_off
    assert all(item.link.startswith("https://github.com/pytorch/pytorch/issues/") for item in KNOWN)


@pytest.mark.parametrize(
    ("shape", "further"),
    [
        ((256, 64), SMALL),
        pytest.param((8192, 1024), {}, marks=[pytest.mark.full, pytest.mark.timeout(1200)]),
    ],
)
def test_kernels_store_every_gradient_of_a_bucket(shape, further, library, record_property):
    """Add along rows and along columns, the latter concatenated; every kernel runs in Triton's interpreter."""
    cases = [shape, workaround_options() | further], [shape, FUSE | further]
    ours, fused = run(BUCKET_CUDA, library, cases, TRITON_INTERPRET="1")
    assert ours["unwritten"] == [0, 0] and ours["error"] == 0
    assert fused["fused"] and fused["error"] == 0
    bucket = 2 * shape[1] if MIX_ORDER.affects(VERSION) else 0
    assert fused["unwritten"] == [0, bucket]
    assert ours["fused"] == (not MIX_ORDER.affects(VERSION))
    record_property("counted", f"Triton in the interpreter, {shape}: {fused['unwritten'][1]} elements are not stored")
