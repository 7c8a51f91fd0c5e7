"""Attention over a sharded sequence: by value, forward and gradients, in fp64 on lockstep ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_cases import F64, HEADS, RANKS, SIZES, TOLERANCE, WIDTH, WINDOW, documents, grids, random, sequence
from oracle import assert_same, batches, compile_lockstep, llama, llama_loss, train_plainly, train_step
from rule_harness import Function, capture, check, sharded
from rule_harness import _local_inputs as local_inputs
from torch import Tensor

from passes.autograd.joint import Joint
from passes.check.simulate import Lockstep
from passes.check.verify import check_specs
from passes.context import kernels
from passes.context.attention import repeat_heads
from passes.context.balance import imbalance, pairs_by_rank
from passes.context.call import METHODS, AttentionCall
from passes.context.kernels import Block, merge
from passes.context.sdpa import attention_with_dropout
from passes.cost.accounting import Ledger, traffic_of
from passes.ir import ir
from passes.ir.machine import Balance
from passes.ir.mesh import Mesh
from passes.ir.order import PLAIN, ZIGZAG
from passes.ir.spec import Factor, Spec, shard, unshard
from passes.ir.stages import Stage
from passes.memory.recompute import saved_bytes
from passes.ops.shift import shift
from passes.sharding.collectives import Collectives
from passes.sharding.shard import Shard
from passes.torch_private import FakeTensorMode, c10d
from passes.trace.abstract_eval import abstract_eval


def mask_of(form: str, size: int) -> Tensor | None:
    row, column = grids(size)
    if form == "bool":
        return ((row * 7 + column * 3) % 5 > 0) & (row != 2)  # one query that sees nothing
    if form == "document":
        ids = documents(size)[:, None]
        return (ids[..., :, None] == ids[..., None, :]) & (row >= column)
    return (row >= column) & (row - column < WINDOW) if form == "window" else None


def attention(inputs: list[Tensor], mesh: Mesh, mask: Tensor | None = None, **options) -> Function:
    """Return SDPA of parameters, multiplied by activations of their shapes so that `cp` keeps its shards."""
    masks = [] if mask is None else [mask]

    def run(q, k, v, *rest):
        q, k, v = (x * unit for x, unit in zip((q, k, v), rest[len(masks):]))
        return F.scaled_dot_product_attention(q, k, v, *rest[: len(masks)], **options)

    units = [torch.ones(x.shape, dtype=torch.int64) for x in inputs]
    return capture(run, [*inputs, *masks, *units], mesh, weights=(0, 1, 2))


def run(function: Function, place: Callable[[Tensor], Spec], mask: Spec | None = None, context: str = "auto") -> ir.Report:
    """Check a function with queries, keys and values, and a mask, in these placements."""
    tensors = function.values[1:]
    placed = {i: place(tensors[i]) for i in range(3)}
    at = 3 if mask is None else 4
    placed |= {at + i: spec for i, spec in placed.items()} | ({} if mask is None else {3: mask})
    return check(function, placed, TOLERANCE, context=context)


@functools.cache
def captured(form: str, heads: str, size: int, ranks: int):
    """Return SDPA in a form, with query, key and value as activations."""
    h, g = HEADS[heads]
    mask = mask_of(form, size)
    inputs = [random(2, h, size, WIDTH), random(2, g, size, WIDTH), random(2, g, size, WIDTH + (heads == "MQA"))]
    options = {"is_causal": form == "causal", "enable_gqa": h != g, "scale": 0.3}
    function = attention(inputs, Mesh.of({"cp": ranks}), mask, **options)
    return replace(function, order=ZIGZAG) if form == "causal" else function


def run_case(method: str, form: str, heads: str, size: int, ranks: int):
    function = captured(form, heads, size, ranks)
    mask = mask_of(form, size)
    report = run(function, sequence, None if mask is None else sequence(mask), method)
    h, g = HEADS[heads]
    exchanging = {"ulysses": ranks, "hybrid": 2 if ranks % 4 == 0 else 7}.get(method, 1)  # ranks that exchange heads
    uneven = h % exchanging or (g % exchanging and exchanging % g)
    text = f": all_gather over cp, {method} cannot: {h} heads" if uneven else f": {method} over cp"
    assert any(text in note for note in report.notes), report.notes


CASES = list(itertools.product(METHODS, ("causal", "full", "bool", "document", "window"), HEADS, SIZES, RANKS))
EVERY_RUN = [case for i, case in enumerate(CASES) if i % 23 == 0]


@pytest.mark.parametrize("case", EVERY_RUN, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.sample(4)
def test_attention_over_ranks_is_that_of_one_device(case):
    method, form, heads, size, ranks = case
    run_case(method, form, heads, SIZES[size], ranks)


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_every_form_of_attention(method, record_property):
    cases = [case for case in CASES if case[0] == method]
    for _, form, heads, size, ranks in cases:
        run_case(method, form, heads, SIZES[size], ranks)
    record_property("counted", f"{method}: {len(cases)} cases of (form, heads, size, ranks), forward and gradients, in fp64 to 1e-10")


def run_soft_capped(heads: str, size: int, ranks: int) -> None:
    """Check a written-out score function: rows of scores stay on their rank, keys are gathered, with any method."""
    h, g = HEADS[heads]

    def run_it(q, k, v, *units):
        q, k, v = (x * unit for x, unit in zip((q, k, v), units))
        k, v = k.repeat_interleave(h // g, 1), v.repeat_interleave(h // g, 1)
        row, column = grids(size)
        scores = torch.where(row >= column, 2 * torch.tanh(q @ k.transpose(-1, -2) / 4), -torch.inf)
        return scores.softmax(-1) @ v

    q, k, v = (random(2, n, size, WIDTH) for n in (h, g, g))
    units = [torch.ones(x.shape, dtype=torch.int64) for x in (q, k, v)]
    function = capture(run_it, [q, k, v + 1, *units], Mesh.of({"cp": ranks}), weights=(0, 1, 2))
    report = run(function, sequence)
    assert not any(" over cp, " in note for note in report.notes), report.notes


CAPPED = list(itertools.product(HEADS, SIZES, RANKS))


@pytest.mark.parametrize(("heads", "size", "ranks"), CAPPED[::11])
@pytest.mark.sample(2)
def test_soft_capped_scores_over_ranks(heads, size, ranks):
    run_soft_capped(heads, SIZES[size], ranks)


@pytest.mark.full
def test_soft_capped_scores_of_every_form(record_property):
    for heads, size, ranks in CAPPED:
        run_soft_capped(heads, SIZES[size], ranks)
    record_property("counted", f"soft-cap: {len(CAPPED)} cases of (heads, size, ranks), forward and gradients, in fp64 to 1e-10")


# ---- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["causal", "full", "bool"])
def test_kernels_agree(form):
    """Compare results and gradients of the CPU kernel and the one in plain operators."""
    q, k, v, gradient = random(2, 4, 6, 4), random(2, 2, 6, 4), random(2, 2, 6, 5), random(2, 4, 6, 5)
    mask = mask_of(form, 6)
    block = Block(form == "causal", 0.3, None if mask is None else torch.zeros(1, 1, 6, 6, dtype=F64).masked_fill(~mask, -torch.inf))
    v = v[..., :4]
    gradient = gradient[..., :4]
    (a, la), (b, lb) = kernels._flash_cpu(q, k, v, block), kernels._math(q, k, v, block)
    visible = torch.ones(6, dtype=torch.bool) if mask is None else mask.any(-1)
    torch.testing.assert_close(a[:, :, visible], b[:, :, visible], rtol=0, atol=1e-12)
    torch.testing.assert_close(la[:, :, visible], lb[:, :, visible], rtol=0, atol=1e-12)
    out, lse = kernels.forward(q, k, v, block)
    assert torch.equal(lse > -torch.inf, visible.expand(2, 4, 6))
    arguments = (gradient, q, k, v, out, torch.where(lse > -torch.inf, lse, 0.0), block)
    for x, y in zip(kernels._flash_cpu_backward(*arguments), kernels._math_backward(*arguments), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS)
def test_kernels_of_cuda_give_what_a_ring_takes(heads):
    """Compare shapes and dtypes, which needs no GPU."""
    h, g = HEADS[heads]
    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, 16, 64, dtype=torch.bfloat16, device="cuda") for n in (h, g, g))
        out, lse = kernels.forward(q, k, v, Block(True))
        gradients = kernels.backward(out, q, k, v, out, lse, Block(True))
        odd = torch.empty(2, h, 16, 12, dtype=torch.bfloat16, device="cuda")  # flash takes multiples of 8
    assert kernels.kernel_for(q, v, Block(True))[0] is kernels._flash_cuda
    assert kernels.kernel_for(odd, odd, Block(True))[0] is kernels._math
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((2, h, 16), torch.float32)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


def test_merging_with_nothing_changes_nothing():
    out, lse = random(1, 2, 3, 4), random(1, 2, 3)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for a, b in (((out, lse), nothing), (nothing, (out, lse))):
        assert all(torch.equal(x, y) for x, y in zip(merge(a, b), (out, lse), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(merge(nothing, nothing), nothing, strict=True))


# ---- what attention is not of one sequence -----------------------------------------------------------


def test_keys_of_another_length_are_gathered():
    mesh = Mesh.of({"cp": 2})
    q, k, v = random(2, 4, 10, 4), random(2, 4, 7, 4), random(2, 4, 7, 4)
    assert not any("ring" in note for note in run(attention([q, k, v], mesh), sequence).notes)
    assert not any("ring" in note for note in run(attention([q, k, v], mesh, is_causal=True), sequence).notes)


def test_a_mask_by_head_is_not_exchanged():
    mask = mask_of("bool", 10).expand(1, 4, 10, 10)
    q = random(2, 4, 10, 4)
    report = run(attention([q, q + 1, q + 2], Mesh.of({"cp": 2}), mask), sequence, sequence(mask), "ulysses")
    assert any("all_gather over cp, ulysses cannot: the mask differs by head" in note for note in report.notes)


def test_a_mask_with_a_gradient_has_it():
    mesh = Mesh.of({"cp": 2})
    q, bias = random(2, 4, 10, 4), random(1, 4, 10, 10)
    report = run(attention([q, q + 1, q + 2], mesh, bias), sequence, Spec.whole(bias.shape), "ring")
    assert any("all_gather over cp, ring cannot: a floating-point mask may need a gradient" in note for note in report.notes)


@pytest.mark.parametrize(("method", "cp"), [*zip(METHODS, (2, 2, 2, 4))])
@pytest.mark.sample(2)
def test_batch_heads_and_sequence_shard_together(method, cp):
    mesh = Mesh.of({"dp_shard": 2, "cp": cp, "tp": 2})
    q, k = random(3, 8, 11, 4), random(3, 2, 11, 4)
    heads = {8: (Factor(2, ("tp",)), Factor(4)), 2: (Factor(2, ("tp",)),)}

    def place(x: Tensor) -> Spec:
        return Spec(((Factor(3, ("dp_shard",)),), heads[x.shape[1]], (Factor(11, ("cp",)),), (Factor(4),)), fill=None)

    function = replace(attention([q, k, k + 1], mesh, is_causal=True, enable_gqa=True), order=ZIGZAG)
    report = run(function, place, context=method)
    assert any(f"{method} over cp, as configured" in note for note in report.notes)


@pytest.mark.parametrize("size", [48, 37])
@pytest.mark.parametrize(("method", "ranks", "steps"), [("ring", 4, (0, 1)), ("ring", 8, (0, 1)), ("hybrid", 8, (0, 1))])
@pytest.mark.sample(2)
def test_a_ring_of_a_sliding_window_ends_early(method, ranks, steps, size):
    """Check that with a constant mask the graph omits steps at which no rank sees anything, and their sends."""

    def window(q, k, v, *units):
        row, column = grids(size)
        q, k, v = (x * unit for x, unit in zip((q, k, v), units))
        mask = (row >= column) & (row - column < WINDOW)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    q, k, v = random(2, 8, size, WIDTH), random(2, 2, size, WIDTH), random(2, 2, size, WIDTH) + 1
    units = [torch.ones(x.shape, dtype=torch.int64) for x in (q, k, v)]
    function = capture(window, [q, k, v, *units], Mesh.of({"cp": ranks}), weights=(0, 1, 2))
    report = run(function, sequence, None, method)
    assert any(f"{method} over cp, as configured; needed steps: {steps};" in note for note in report.notes), report.notes


# ---- the choice --------------------------------------------------------------------------------------

SEEN = {"causal": True, "zigzag": True}
NEIGHBOURS = frozenset((i, j) for i in range(8) for j in (i, i - 1) if j >= 0)
CHOICES = [  # heads, heads of keys, queries of a rank, ranks, what is masked -> the cheapest
    (32, 32, 1024, 2, SEEN, "ulysses"),  # queries are no more than keys
    (32, 32, 1024, 8, SEEN, "ulysses"),
    (32, 8, 8192, 4, SEEN, "ring"),  # few keys, and long enough to hide them
    (32, 1, 1024, 4, SEEN, "ring"),
    (6, 6, 1024, 4, SEEN, "hybrid"),  # heads go over two ranks, not over four
    (36, 36, 1024, 8, SEEN, "hybrid"),
    (6, 6, 64, 4, SEEN, "all_gather"),  # too short to hide anything
    (32, 32, 1024, 4, {"mask": "numbers"}, "ulysses"),
    (30, 6, 1024, 4, {"mask": "numbers"}, "all_gather"),  # the mask may need a gradient, and ranks do not divide heads
    (32, 8, 1024, 8, {"mask": "bool", "pairs": NEIGHBOURS}, "ring"),  # a window needs two steps
    (32, 8, 8192, 16, SEEN, "hybrid"),  # two nodes: heads are exchanged within, few keys travel between
    (32, 8, 65536, 16, SEEN, "ring"),  # long enough to hide keys between nodes
    (32, 8, 8192, 16, SEEN | {"balance": Balance(gpus_per_node=16)}, "ring"),
    (32, 8, 1024, 4, SEEN | {"stride": 8}, "all_gather"),  # each in a node of its own
    (32, 8, 1024, 4, SEEN, "ring"),
]


@pytest.mark.parametrize(("h", "g", "length", "parts", "seen", "wanted"), CHOICES, ids=str)
def test_auto_takes_the_cheapest(h, g, length, parts, seen, wanted):
    call = AttentionCall((1, h, length, 128), (1, g, length, 128), (1, g, length, 128), torch.bfloat16, parts, **seen)
    method, reason = call.choose("auto")
    print(f"{h} heads, {g} of keys, {length} tokens on each of {parts} ranks: {method}, {reason}")
    assert method == wanted and f"{method} " in reason


# ---- what is sent, held and lost ---------------------------------------------------------------------


def partitioned(method: str, ranks: int, size: int = 64, dtype: torch.dtype = torch.float32) -> tuple[ir.Program, ir.Context]:
    """Return causal attention of 8 heads, 2 of keys, forward and backward, with collectives written out."""
    mesh = Mesh.of({"cp": ranks})
    inputs = [random(2, 8, size, 8).to(dtype), *(random(2, 2, size, 8).to(dtype) for _ in "kv")]
    function = attention(inputs, mesh, is_causal=True, enable_gqa=True)
    tensors = function.values[1:]
    placed = {i: sequence(tensors[i]).ordered(ZIGZAG) for i in (0, 1, 2, 3, 4, 5)}
    placed_inputs = tuple(replace(g, spec=placed.get(i - 1, g.spec)) for i, g in enumerate(function.program.inputs))
    program = replace(function.program, inputs=placed_inputs, stage=Stage.PLACED)
    for step in (Shard(context=method), Joint(), Collectives()):
        program, _ = step(program, function.ctx)
    return program, function.ctx


def test_a_value_in_another_order_than_the_batch_is_found():
    program, _ = partitioned("ring", 2)
    assert not list(check_specs(program))
    node = next(n for n in program.calls() if (spec := ir.spec(n)) and "cp" in spec.sharded)
    ir.set_spec(node, ir.spec(node).ordered(PLAIN))
    ((result, message),) = check_specs(program)
    assert result is node and message.endswith("is in another order over cp than the batch")


@pytest.mark.parametrize(("method", "ranks"), [*itertools.product(METHODS[:3], (2, 4)), ("hybrid", 4), ("hybrid", 8)])
@pytest.mark.sample(2)
def test_bytes_sent_are_those_of_the_formula(method, ranks):
    program, ctx = partitioned(method, ranks)
    sent = sum(t.sent_bytes for t in traffic_of(Ledger(program, abstract_eval(program, ctx))) if t.kind != "all_reduce")
    local = 64 // ranks
    call = AttentionCall((2, 8, local, 8), (2, 2, local, 8), (2, 2, local, 8), torch.float32, ranks, True, True)
    result = (ranks - 1) * 2 * 8 * local * 8 * 4  # which leaves the program whole
    assert sent - result == call.sent_bytes(method)


def test_keys_and_values_of_a_ring_are_a_share_of_the_sequence():
    """Check the most bytes of keys and values alive at once in the forward, packed for travel or gathered."""

    def divisor(method: str, ranks: int) -> int:
        program, _ = partitioned(method, ranks)
        total = 2 * 2 * 64 * 8 * 2 * 4
        target = shift if method == "ring" else c10d.all_gather_into_tensor.default
        sends = [n for n in program.calls() if n.target is target and ir.phase(n) == "forward"]
        sizes = [size for n in sends if (size := ir.example(n).nbytes) <= total // 2]  # without the result
        return total // (2 * max(sizes) if method == "ring" else sum(sizes))  # what is here and what is coming

    for ranks in (2, 4, 8):
        print(f"cp {ranks}: of keys and values held at once, ring 1/{divisor('ring', ranks)}, all_gather 1/{divisor('all_gather', ranks)}")
        assert divisor("ring", ranks) == ranks // 2 and divisor("all_gather", ranks) == 1


@pytest.mark.parametrize(("method", "ranks"), [*itertools.product(METHODS[:3], (2, 4)), ("hybrid", 4)])
@pytest.mark.sample(2)
def test_bf16_loses_no_more_than_one_device(method, ranks):
    """Compare with fp64: result and gradients have at most 1.5 times the error of the single kernel in bf16."""
    exact = attention([random(2, 8, 64, 8), random(2, 2, 64, 8), random(2, 2, 64, 8)], Mesh.of({}), is_causal=True, enable_gqa=True)
    bf16 = torch.bfloat16
    single = capture_bf16(exact)
    program, ctx = partitioned(method, ranks, dtype=bf16)
    values = iter([v.to(bf16) if v.is_floating_point() and v.dim() > 1 else v for v in exact.values])
    full = {i.name: next(values) for i in program.inputs if i.kind != "coordinate"}
    outs = Lockstep(program).run(local_inputs(program, full))
    for k, (output, want) in enumerate(zip(program.outputs, exact.wanted, strict=True)):
        if output.kind == "loss":
            continue
        got = unshard([out[k] for out in outs], output.spec, program.mesh)
        mine, theirs = ((x.double() - want).norm() for x in (got, single[k]))
        assert mine <= 1.5 * theirs, (output.name, float(mine / theirs))


def capture_bf16(exact: Function) -> list[Tensor]:
    """Return loss, result and gradients of the same attention in bf16, by PyTorch on one device."""
    one, q, k, v, *_, scales = exact.values
    leaves = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    loss = (out * scales.to(torch.bfloat16)).sum()
    return [loss.detach(), out.detach(), *torch.autograd.grad(loss, leaves)]


# ---- a model ---------------------------------------------------------------------------------------

SETTINGS = [
    ({"cp": 2}, {"context": {"method": "ring"}}, {}),
    ({"cp": 3}, {"context": {"method": "all_gather"}}, {}),
    ({"cp": 4}, {"remat": {"policy": "full"}, "context": {"method": "ring"}}, {}),
    ({"cp": 2}, {"context": {"method": "ulysses"}, "remat": {"policy": "offload"}}, {}),
    ({"cp": 2, "tp": 2}, {"remat": {"policy": "selective"}}, {}),
    ({"cp": 2, "dp_shard": 2}, {}, {"microbatches": 5}),
    ({"dp_replicate": 2, "cp": 2, "tp": 2}, {"context": {"method": "all_gather"}}, {}),
    ({"dp_shard": 2, "cp": 2, "tp": 2}, {"shard": {"sequence_parallel": False}}, {}),
    ({"dp_shard": 2, "cp": 4}, {"context": {"method": "hybrid"}, "remat": {"policy": "full"}}, {}),
]


@functools.cache
def plain(microbatches: int):
    return train_plainly(llama(2), llama_loss, batches(), microbatches=microbatches)


@pytest.mark.parametrize(("mesh", "passes", "options"), [
    setting if i in (4, 8) else pytest.param(*setting, marks=pytest.mark.full) for i, setting in enumerate(SETTINGS)
], ids=str)
@pytest.mark.sample(1)
def test_a_llama_trains_as_on_one_device(mesh, passes, options):
    """Compare losses, gradient norms and parameters over three steps.

    The length 7 divides by nothing, some labels are ignored.
    """
    step = compile_lockstep(llama(2), llama_loss, batches()[0], mesh, passes=passes, **options)
    metrics, state = plain(options.get("microbatches", 1))
    for actual, wanted in zip(train_step(step, batches()), metrics, strict=True):
        assert_same(actual, wanted, 1e-10)
    assert_same(step.state_dict(), state, 1e-10)


@pytest.mark.full
def test_remat_takes_a_ring_as_one_operator():
    """Check that a policy keeps only a ring's result and log-sum-exp, and that an option repeats it."""

    def compiled(**remat) -> tuple[int, int, list[dict[str, float]]]:
        programs = {}
        options = {"remat": remat, "context": {"method": "ring"}}
        step = compile_lockstep(llama(2), llama_loss, batches()[0], {"cp": 2}, passes=options,
                                observe=lambda program, record: programs.update({(record.program, record.name): program}))
        final, joint = programs["step", "overlap"], programs["step", "remat"]
        return sum(n.target is shift for n in final.calls()), saved_bytes(joint), train_step(step, batches())

    by_policy = [compiled(policy=policy) for policy in ("selective", "full")]
    again = compiled(policy="full", ops={"ring_attention*": "recompute"})
    layers, forward, backward = 2, 1, 1 + 2
    assert [count for count, _, _ in by_policy] == [layers * (forward + backward)] * 2
    assert again[0] == layers * (2 * forward + backward)
    assert by_policy[0][1] > by_policy[1][1] > again[1]
    assert by_policy[0][2] == by_policy[1][2] == again[2]


# ---- work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_head_and_tail_share_causal_work_evenly(ranks):
    mesh, causal = Mesh.of({"cp": ranks}), torch.arange(4096)[None] + 1
    assert imbalance([causal], mesh, ZIGZAG) < 1.01
    assert imbalance([causal], mesh, PLAIN) == pytest.approx((2 * ranks - 1) / ranks, rel=0.01)  # the last rank's


def test_work_within_documents_is_that_of_a_mask():
    """Compare the pairs counted from positions with the entries of the mask, for each rank's queries."""
    size, mesh = 37, Mesh.of({"cp": 4})
    ids = documents(size)
    position = torch.stack([torch.arange(size) - torch.searchsorted(row, row) for row in ids])
    mask = mask_of("document", size).sum((1, 3))  # keys seen, by row and query
    spec = sharded(mask.shape, 1, "cp", 0).ordered(ZIGZAG)
    by_rank = [shard(mask, spec, mesh, place).sum() for place in mesh]
    assert pairs_by_rank(position + 1, mesh, ZIGZAG).tolist() == torch.stack(by_rank).tolist()


def test_key_heads_are_repeated_for_their_own_queries():
    keys = torch.arange(24.0).view(2, 3, 2, 2)
    assert torch.equal(repeat_heads(keys, 2), keys.repeat_interleave(2, dim=1))


def test_what_drops_out_of_a_row_that_sees_nothing_is_nothing():
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=F64) for _ in range(3))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    out = attention_with_dropout(lambda weights, p: weights, q, k, v, mask)
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out[..., [0, 2], :], wanted[..., [0, 2], :])
    assert not out[..., 1, :].any()
