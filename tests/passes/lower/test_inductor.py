"""Compiled bodies: each is compiled once, stored and loaded again, and values are freed at their last use."""

from __future__ import annotations

import operator
import os
import shutil
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import NO_DECAY, assert_same, llama, llama_loss, train_step
from oracle import batches as rows_of
from small_programs import Small, cut, ordered
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import LambdaFuture

from compiler_trainer import compile_step
from passes.ir import ir
from passes.ir.bodies import calls_of
from passes.ir.layer import Layer
from passes.ir.stages import Stage
from passes.lower import inductor
from passes.lower import store as stores
from passes.lower.backends import lower_inductor
from passes.lower.calls import Calls
from passes.lower.cpu_start import kernels
from passes.lower.cpu_start.ready import Ready
from passes.lower.inductor import ALONE, Workers, compile_bodies, counts, stored_key
from passes.lower.segment import Segment
from passes.lower.store import Store
from passes.torch_private import kernels_together

aten = torch.ops.aten
F32 = torch.float32


def chain(layers=3, side=4, constant=2.0):
    """Build matmuls with a pointwise operator per layer, cut where layers begin."""
    small = Small()
    x = small.input("x", cut((side, side)), "batch", F32)
    w = small.input("w", cut((side, side)), dtype=F32)
    for layer in range(layers):
        product = small.call(aten.mm.default, x, w)
        x = small.call(aten.mul.Tensor, product, constant)
        for node in (product, x):
            ir.update(node, layer=Layer("layers", layer))
    program = small.program([("loss", "l", x, cut((side, side)))], Stage.EXPLICIT)
    return Segment()(ordered(program, small.ctx), small.ctx)[0], small.ctx


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return a store for this test alone."""
    for module in (inductor, stores):
        monkeypatch.setattr(module, "compiler_folder", lambda: tmp_path)
    counts.clear()
    return tmp_path / "bodies"


def test_a_body_is_compiled_once_and_loaded_ever_after(store, monkeypatch):
    program, ctx = chain()
    compile_bodies(list(calls_of(program)), ctx)
    assert counts == {"compiled": 1}
    monkeypatch.setattr(inductor, "compile_inner", None)  # nothing is compiled, nor traced
    monkeypatch.setattr(inductor, "make_fx", None)
    deeper, ctx = chain(layers=7)
    run = lower_inductor(deeper, ctx)
    assert counts == {"compiled": 1, "loaded": 1}
    assert_is_chain(run, side=4, layers=7)


@pytest.mark.parametrize("other", [{"constant": 3.0}, {"side": 5}])
def test_another_text_is_another_body(other):
    (one,), (two,) = (calls_of(chain(**changes)[0]) for changes in ({}, other))
    assert one.key != two.key


def test_threads_are_part_of_what_kernels_are_known_by(monkeypatch):
    (body,) = calls_of(chain()[0])
    key = stored_key(body)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert stored_key(body) != key


def test_what_is_switched_later_in_a_process_is_part_of_it_too():
    """Check for jobs of one process, as in a sweep, that a deterministic one gets its own kernels."""
    (body,) = calls_of(chain()[0])
    keys = [stored_key(body)]
    for mode in (True, False):
        torch.use_deterministic_algorithms(mode)
        keys.append(stored_key(body))
    assert keys[0] == keys[2] != keys[1]


def test_workers_compile_their_share_and_load_the_rest(store):
    """Run two workers in turn; the second finds at the meeting the results that the first has compiled."""
    program, ctx = chain(layers=2)
    other, _ = chain(layers=2, side=6)
    bodies = [*calls_of(program), *calls_of(other)]
    met = []

    def second():
        met.append(dict(counts))
        compile_bodies(bodies, ctx, Workers(1, 2, lambda: None))

    compile_bodies(bodies, ctx, Workers(0, 2, second))
    assert met == [{"compiled": 1}]
    assert counts == {"compiled": 2, "loaded": 2}


def test_values_die_at_their_last_use():
    program, _ = chain(layers=4)
    alive, outputs = [], []

    def run(args):
        x, w = args
        args.clear()
        y = x @ w
        del x
        outputs.append(weakref.ref(y))
        alive.append(sum(r() is not None for r in outputs))
        return (y,)

    calls = Calls(program, {body: run for body in calls_of(program)})
    calls([torch.randn(4, 4), torch.randn(4, 4)])
    assert alive == [1, 1, 1, 1]  # computed values only: the call that reads an operand last frees it


def test_results_keep_their_strides_across_bodies():
    """Check a transposed result that the next body reads in its layout, for which its kernels are made."""
    small = Small()
    x = small.input("x", cut((4, 6)), "batch", F32)
    turned = small.call(aten.clone.default, small.call(aten.t.default, x), memory_format=torch.preserve_format)
    product = small.call(aten.mm.default, x, turned)
    for node, layer in ((turned, 0), (product, 1)):
        ir.update(node, layer=Layer("layers", layer))
    program = small.program([("loss", "l", product, cut((4, 4)))], Stage.EXPLICIT)
    program, _ = Segment()(ordered(program, small.ctx), small.ctx)
    value = torch.randn(4, 6)
    torch.testing.assert_close(lower_inductor(program, small.ctx)([value])[0], value @ value.t())


def test_parts_that_are_taken_outside_of_bodies():
    """Check flat bodies on items of a tuple, which are taken before the calls."""
    small = Small()
    flat = small.input("flat", cut((12,)), "batch", F32)
    parts = small.call(aten.split_with_sizes.default, flat, [8, 4])
    first, second = (small.call(operator.getitem, parts, i) for i in range(2))
    squares = [small.call(aten.mul.Tensor, part, part, phase="optimizer") for part in (first, second)]
    for node, name in zip(squares, ("a", "b")):
        ir.update(node, parameter=name)
    ends = [("metric", f"m{i}", node, cut(tuple(ir.example(node).shape))) for i, node in enumerate(squares)]
    program, report = Segment()(ordered(small.program(ends, Stage.EXPLICIT), small.ctx), small.ctx)
    assert report.counts == {"calls": 2, "bodies": 1}
    value = torch.randn(12)
    result = lower_inductor(replace(program, stage=Stage.SEGMENTED), small.ctx)([value])
    torch.testing.assert_close(torch.cat(result), value * value)


@pytest.mark.full
def test_training_with_and_without_segments_is_the_same_to_the_bit():
    data = rows_of(rows=6)
    actual = []
    for enabled in (True, False):
        step = compile_step(
            llama(2, dtype=F32),
            llama_loss,
            data[0],
            optim=NO_DECAY,
            lower={"backend": "inductor"},
            passes={"segment": {} if enabled else {"max_nodes": None}},
        )
        actual.append((train_step(step, data), step.state_dict()))
    (metrics, state), (wanted, wanted_state) = actual
    assert metrics == wanted
    assert_same(state, wanted_state, 0.0)


# ---- the fast start on a CPU ------------------------------------------------------------------------


@pytest.mark.full
def test_kernels_are_built_one_by_one_where_pytorch_has_changed_and_that_is_said(store, monkeypatch):
    def changed(source):
        raise TypeError("load_async() has another argument")

    program, ctx = chain(side=5)
    monkeypatch.setattr(inductor, "failed", [])
    monkeypatch.setattr(kernels, "build_library", changed)
    with pytest.warns(UserWarning, match=r"one by one.*another argument.*lower.fast_start=false"):
        assert_is_chain(lower_inductor(program, ctx), side=5)
    assert counts == {"compiled": 2}, "they do not share what is stored: of another instruction set it may be"
    with warnings.catch_warnings(action="error"):  # warned once; kernels built in this way are found again
        assert_is_chain(lower_inductor(program, ctx), side=5)
    assert counts == {"compiled": 2, "loaded": 1}


def test_kernels_are_built_one_by_one_where_that_is_asked_for(store, monkeypatch):
    for part in ("fast_cpu_start", "without_lowering"):
        monkeypatch.setattr(inductor, part, None)
    program, ctx = chain(side=6)
    assert_is_chain(lower_inductor(program, ctx, replace(ALONE, fast=False)), side=6)
    assert counts == {"compiled": 1}


def test_an_error_of_both_ways_is_the_first_ones(store, monkeypatch):
    def fails(*args):
        raise OSError("g++: no such file")

    program, ctx = chain(side=7)
    monkeypatch.setattr(inductor, "failed", [])
    monkeypatch.setattr(inductor, "compile_inner", fails)
    with pytest.raises(OSError, match="no such file") as caught:
        lower_inductor(program, ctx)
    assert isinstance(caught.value.__cause__, OSError)


def test_the_fast_start_is_for_bodies_on_a_cpu(store, monkeypatch):
    """Check that all kernels of a GPU's bodies are compiled as for Triton, and Inductor is not patched for C++."""
    built: list = []
    monkeypatch.setattr(inductor, "is_on_cpu", lambda body: body.name != "forward_1")
    monkeypatch.setattr(inductor, "stored_or_compiled", lambda bodies, *how: built.append([b.name for b in bodies]) or {})
    monkeypatch.setattr(inductor, "fast_cpu_start", lambda *how: nullcontext(built.append("fast")))
    bodies = [SimpleNamespace(name=f"forward_{n}") for n in range(3)]
    inductor.load_or_compile(bodies, None, Ready(Store(store), "ours"), True, lambda what: None)
    assert built == ["fast", ["forward_0", "forward_2"], ["forward_1"]]


def test_pytorch_is_as_it_was_after_a_compilation(store):
    """Check that patches are undone, and later compilations in this process are PyTorch's own."""
    program, ctx = chain(side=9)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    places = [(codecache, "write"), (codecache, "_worker_compile_cpp"), (AsyncCompile, "wait"), (AsyncCompile, "cpp_pybinding")]
    before = [getattr(*place) for place in places]
    assert_is_chain(lower_inductor(program, ctx), side=9)
    assert [getattr(*place) for place in places] == before
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 0
    saved, x = {*store.iterdir()}, torch.randn(3)
    torch.testing.assert_close(torch.compile(lambda x: (x * 1.25).relu() + 0.125)(x), (x * 1.25).relu() + 0.125)
    assert {*store.iterdir()} == saved, "no library of it was noted"
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 1


def assert_is_chain(run, side, layers=3):
    """Check matmuls by a matrix, each doubled."""
    x, w = torch.randn(side, side), torch.randn(side, side)
    wanted = x
    for _ in range(layers):
        wanted = wanted @ w * 2.0
    torch.testing.assert_close(run([x, w])[0], wanted)


# ---- the store --------------------------------------------------------------------------------------


def test_the_store_gives_back_what_was_put(tmp_path):
    store = Store(tmp_path / "a")
    assert store.get("k") is None
    store.put("k", b"one")
    store.put("k", b"two")
    assert store.get("k") == b"two" and os.listdir(tmp_path / "a") == ["k"]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: b""]
)
def test_a_damaged_entry_is_said_and_not_used(tmp_path, damage):
    store = Store(tmp_path)
    store.put("k", b"0123456789" * 4)
    path = tmp_path / "k"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="k is damaged; it is compiled again"):
        assert store.get("k") is None


def test_a_stored_body_is_of_the_passes_as_they_are(tmp_path, monkeypatch):
    """Check that a change of any file in `passes/` counts: finding collectives also orders kernels."""
    program, _ = chain(layers=1)
    (body,) = {*calls_of(program)}
    before = stored_key(body)
    shutil.copytree(Path(inductor.__file__).parents[1], tmp_path / "passes", ignore=shutil.ignore_patterns("__pycache__"))
    assert inductor.sources_of(tmp_path / "passes") == inductor.sources_of(Path(inductor.__file__).parents[1])
    with (tmp_path / "passes/communication/layer_starts.py").open("a") as file:
        file.write("# changed\n")
    changed = inductor.sources_of(tmp_path / "passes")
    monkeypatch.setattr(inductor, "sources_of", lambda folder: changed)
    inductor.our_sources.cache_clear()
    try:
        assert stored_key(body) != before
    finally:
        inductor.our_sources.cache_clear()


def test_triton_kernels_of_all_bodies_are_waited_for_together():
    order: list[str] = []

    def kernel(name):
        return LambdaFuture(lambda: order.append(name) or object())

    shared = kernel("shared")
    bodies = [{"a": kernel("first"), "b": shared}, {"a": kernel("second"), "b": shared}]
    with kernels_together():
        for number, scope in enumerate(bodies):
            AsyncCompile().wait(scope)
            order.append(f"lowered {number}")
    assert order == ["lowered 0", "lowered 1", "first", "shared", "second"]
    assert bodies[0]["b"] is bodies[1]["b"] and bodies[0]["a"] is not bodies[1]["a"]
    AsyncCompile().wait(scope := {"a": kernel("later")})
    assert order[-1] == "later" and not isinstance(scope["a"], LambdaFuture)
