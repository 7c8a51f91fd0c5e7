"""Values that are too large for kernels which count in 32 bits are refused by name; generated kernels count in 64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from absent_gpu import HERE, run
from small_programs import Small, cut
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiler_trainer.config.compose import compose
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config, TrainConfig
from compiler_trainer.planning.dry import compile_dry
from compiler_trainer.step.captured import Captured, check_offsets
from passes.ir import ir
from passes.ir.record import Origin
from passes.lower.offsets import MOST, NARROW, NARROW_BY_OPERATOR, overflows
from passes.ops.attend import attend, attend_backward
from passes.ops.routed import grouped_mm

aten = torch.ops.aten
WIDE_CUDA = HERE / "wide_cuda.py"
BF16, F32, I64, I32 = torch.bfloat16, torch.float32, torch.int64, torch.int32


class Sized:
    """A program of one call, on values without memory."""

    def __init__(self):
        self.small = Small()

    def value(self, shape, dtype=BF16, stride=None):
        """Return an input of a shape, and of strides."""
        node = self.small.input(f"x{len(self.small.inputs)}", cut(shape), dtype=dtype)
        if stride is not None:
            with self.small.ctx.fake_mode:
                ir.set_value(node, torch.empty_strided(shape, stride, dtype=dtype))
        return node

    def of(self, target, *args, like=None, **kwargs):
        """Return the program of a call, whose result is as large as one of its operands."""
        node = self.small.builder.graph.call_function(target, args, kwargs)
        ir.set_value(node, ir.value(like or next(a for a in args if isinstance(a, torch.fx.Node))))
        ir.update(node, origin=Origin("model.py:41", ("layers.0",)), phase="backward")
        return self.small.program([("loss", "l", node, cut(ir.example(node).shape))])


def flash(samples):
    """Return FlashAttention's backward of `samples` samples of 4 heads and 10,496 queries."""
    sized = Sized()
    q, k = sized.value((samples, 4, 10496, 100)), sized.value((samples, 4, 128, 100))
    return sized.of(aten._scaled_dot_product_flash_attention_backward.default, q, q, k, k, q, q)


def flex(rows, target=attend):
    """Return FlexAttention of `rows` rows of 128 heads of 128, which are adjacent in memory."""
    sized = Sized()
    q = sized.value((1, 128, rows, 128), stride=(rows * 128 * 128, 128, 128 * 128, 1))
    bounds = sized.value((1, rows), I64)
    first = (q,) if target is attend else (q, q, q, q, q, q)
    return sized.of(target, *first, *(q, q)[: 2 * (target is attend)], bounds, bounds, None, [], 1.0, "")


def masked(rows):
    """Return attention with a mask of so many rows and columns."""
    sized = Sized()
    q, mask = sized.value((1, 2, rows, 64)), sized.value((1, 1, rows, rows), torch.bool)
    return sized.of(aten._scaled_dot_product_efficient_attention.default, q, q, q, mask, True)


def grouped(rows):
    """Return the matmul of so many rows by their experts' matrices."""
    sized = Sized()
    operands = sized.value((rows, 8)), sized.value((4, 8, 8)), sized.value((1, 4), I32)
    return sized.of(grouped_mm, *operands, 1.0)


def product(rows):
    """Return a matmul of so many rows."""
    sized = Sized()
    return sized.of(aten.mm.default, sized.value((rows, 1)), sized.value((1, 1)))


def ordered(entries):
    """Return a sort of so many entries."""
    sized = Sized()
    return sized.of(aten.sort.stable, sized.value((1, entries), I64), dim=1, stable=True)


def positions(step):
    """Return a multiple of the numbers below 1,025, in a small tensor of the model."""
    sized = Sized()
    index = sized.small.call(aten.arange.default, 1025)
    view = sized.small.call(aten.view.default, index, [1025, 1])
    return sized.of(aten.mul.Tensor, view, step, like=view)


def look_up(rows, dtype=I32):
    """Return a look-up in a table of so many rows of 8,192, by int32 indices."""
    sized = Sized()
    return sized.of(aten.embedding.default, sized.value((rows, 8192)), sized.value((4,), dtype))


LIMITS = {  # a program, the last valid size, the first invalid size, the error's text
    "FlashAttention": (flash, 399, 400, "train.microbatches: step: %.*400 samples x 4 heads x 10,496 queries x 128"),
    "FlexAttention": (flex, 131072, 131073, "mesh.cp: step: %.*q has 131,073 rows, 16,384 elements apart"),
    "FlexAttention's backward": (
        lambda rows: flex(rows, attend_backward), 131072, 131073, "mesh.cp: step: %.*gradient has 131,073 rows"),
    "a mask": (masked, 65536, 65537, "mesh.cp: step: %.*a mask of 65,537 x 65,537"),
    "experts": (grouped, MOST, MOST + 1, "train.microbatches: step: %.*rows of tokens by expert: 2,147,483,648"),
    "a matmul": (product, MOST, MOST + 1, "train.microbatches: step: %.*a dim of a matmul: 2,147,483,648"),
    "a sort": (ordered, MOST, MOST + 1, "train.microbatches: step: %.*a sorted dim of a tensor: 2,147,483,648"),
    "positions": (positions, 2**21 - 1, 2**21, "model: step: %.*made of `torch.arange` and constants: 2,147,483,648"),
    "a look-up": (look_up, 2**18 - 1, 2**18, "model: step: %.*int32 indices, of a tensor with as many elements as 2,147,483,648"),
}  # fmt: skip


@pytest.mark.parametrize(("program", "last", "first", "says"), LIMITS.values(), ids=LIMITS)
def test_the_first_size_beyond_a_limit_is_refused_by_name(program, last, first, says):
    check_offsets({"step": Captured(program(last), None)})
    with pytest.raises(UserError, match=says) as caught:
        check_offsets({"step": Captured(program(first), None)})
    assert "(model.py:41), backward: " in str(caught.value) and "To fix it, " in str(caught.value)
    (overflow,) = overflows(program(first))
    assert overflow.narrow.link in str(caught.value)


def test_numbers_that_are_no_constants_are_not_bounded():
    sized = Sized()
    index = sized.small.call(aten.bitwise_and.Scalar, sized.small.call(aten.arange.default, 1025), 0xFFFFFFFF)
    assert not overflows(sized.of(aten.mul.Tensor, index, 2**40, like=index))


def test_int64_indices_look_up_in_any_table():
    assert not overflows(look_up(2**20, I64))


def test_sizes_that_depend_on_data_are_not_judged():
    sized = Sized()
    node, one = sized.value((4, 1)), sized.value((1, 1))
    with sized.small.ctx.fake_mode:
        ir.set_value(node, torch.empty(ShapeEnv().create_unbacked_symint(), 1))
    assert not overflows(sized.of(aten.mm.default, node, one, like=one))


def test_every_entry_of_the_table_has_a_link_and_is_used():
    assert all(item.link.startswith("https://") for item in NARROW)
    assert set(NARROW_BY_OPERATOR) == {operator for item in NARROW for operator in item.operators}


def job(rows: int, microbatches: int, cluster: str = "h100") -> Config:
    """Return a job of so many samples of 1,024 tokens, with 8 heads of 32."""
    cfg = build(Config, compose([f"cluster={cluster}", "model.n_layers=1", "mesh.dp_shard=1", "passes.verify=none"]))
    train = TrainConfig(seq_len=1024, global_batch_size=rows, microbatches=microbatches)
    return resolve_auto(dataclasses.replace(cfg, train=train), on_gpu=True)


def test_a_dry_run_refuses_and_names_the_option():
    with pytest.raises(UserError, match=r"train.microbatches: step: %\w+ \(.*\.py:\d+\), backward: accumulates query gradients"):
        compile_dry(job(16640, 1), None)
    compile_dry(job(16640, 4), None)


# ---- generated kernels ------------------------------------------------------------------------------

OVER = {"embedding": 262145, "cross_entropy": 16640, "experts": 524290, "update": 262145, "bucket": 262146}
UNDER = {"embedding": 262136, "cross_entropy": 16383, "experts": 524286, "update": 262143, "bucket": 262142}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_generated_kernels_of_large_tensors_count_in_64_bits(library, record_property):
    over, under = run(WIDE_CUDA, library, OVER), run(WIDE_CUDA, library, UNDER)
    for name in OVER:
        large = [(kernel, is_wide) for kernel, is_wide, elements in over[name] if elements > MOST]
        assert large and all(is_wide for _, is_wide in large), name
        assert all(elements <= MOST for _, _, elements in under[name])
        assert not all(is_wide for _, is_wide, _ in under[name]), f"{name}: the size decides"
    counted = sum(elements > MOST for kernels in over.values() for _, _, elements in kernels)
    record_property("counted", f"Triton for an H100: {counted} kernels of more than 2^31 - 1 elements count in 64 bits")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_kept", [True, False])
def test_random_numbers_of_a_shard_do_not_wrap(is_kept, library, record_property):
    """Check indices up to 2^34 of the full tensor in a kernel of 65,536 elements; Inductor would use 32 bits."""
    wrong = run(WIDE_CUDA, library, [[64, 2**20, 256], 2**18, MOST if is_kept else 2**60], TRITON_INTERPRET="1")
    assert (wrong == 0) == is_kept
    record_property("counted", f"random numbers in Triton's interpreter: {wrong} of 65,536 differ, kept in 64 bits: {is_kept}")
