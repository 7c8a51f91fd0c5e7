"""Attention by interval: masks that are read, a rank's computation, on every method and layout."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from attention_cases import (
    F64,
    HEADS,
    RANKS,
    SIZES,
    TOLERANCE,
    WIDTH,
    WINDOW,
    documents,
    grids,
    random,
    sequence,
    shuffled,
)  # fmt: skip
from bounds import BOUNDS, bounds_of
from oracle import assert_same, compile_lockstep, train_plainly, train_step
from packed_models import batches, loss_of
from rule_harness import Function, capture, check, on, sharded
from torch import Tensor, fx, nn

from compiler_trainer.capture.capture import capture as capture_model
from compiler_trainer.config.errors import UserError
from passes.context import flex, interval_cpu
from passes.context.call import METHODS
from passes.context.interval_cpu import ROWS, calls, pieces
from passes.context.sequence_layout import bounds_of as bounds_program
from passes.idioms import intervals
from passes.idioms.intervals import Intervals
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.order import PLAIN, ZIGZAG
from passes.ir.spec import Spec
from passes.ops.attend import attend, attend_backward, evaluate, interval_attention


def of_documents(size: int, ids: Tensor) -> Tensor:
    i, j = grids(size)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (i >= j)


MASKS = {  # (size, ids) -> mask
    "documents": of_documents,
    "documents both ways": lambda size, ids: ids[:, None, :, None] == ids[:, None, None, :],
    "documents and window": lambda size, ids: of_documents(size, ids) & (grids(size)[0] - grids(size)[1] < WINDOW),
    "window": lambda size, ids: (grids(size)[0] >= grids(size)[1]) & (grids(size)[1] > grids(size)[0] - WINDOW),
    "prefix": lambda size, ids: (grids(size)[0] >= grids(size)[1]) | (grids(size)[1] < ids[:, :1, None, None] * 0 + 6),
    "lower triangle": lambda size, ids: torch.ones(size, size, dtype=torch.bool).tril(1),
    "rows that see nothing": lambda size, ids: of_documents(size, ids) & (ids % 3 > 0)[:, None, :, None],
}


def soft_capped(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Compute soft-capped attention as Gemma 2 writes it."""
    k, v = (x[:, :, None].expand(-1, -1, q.shape[1] // x.shape[1], -1, -1).reshape(2, q.shape[1], *x.shape[2:]) for x in (k, v))
    mask = torch.where(of_documents(q.shape[2], ids), torch.zeros((), dtype=F64), torch.finfo(F64).min)
    scores = torch.tanh(q @ k.transpose(2, 3) * 0.3 / 2.0) * 2.0 + mask
    return F.dropout(scores.softmax(-1, dtype=F64), 0.0) @ v


def sloped(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Compute attention with ALiBi, one slope per head; a query that sees nothing has zeros."""
    i, j = grids(q.shape[2])
    slopes = torch.pow(2.0, -torch.arange(1, q.shape[1] + 1, dtype=F64) / 2).view(-1, 1, 1)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q * 0.3, k.mT) + slopes * (j - i)
    mask = of_documents(q.shape[2], ids) & (ids % 3 > 0)[:, None, :, None]
    visible = mask.any(-1, True)
    scores = torch.where(visible, torch.where(mask, scores, -torch.inf), 0.0)
    return torch.where(visible, scores.softmax(-1) @ v, 0.0)


def sunk(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, sinks: Tensor) -> Tensor:
    """Compute attention with a learned sink per head as gpt-oss writes it; some queries see the sink alone."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    mask = of_documents(q.shape[2], ids) & (ids % 3 > 0)[:, None, :, None]
    scores = torch.matmul(q, k.mT) * 0.3 + torch.where(mask, torch.zeros((), dtype=F64), torch.finfo(F64).min)
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], -1)
    weights = F.softmax(scores - scores.max(-1, keepdim=True).values, -1, dtype=F64)[..., :-1]
    return F.dropout(weights, 0.0) @ v


SCORED = {"soft-cap": soft_capped, "ALiBi": sloped, "sinks": sunk}
FORMS = (*MASKS, *SCORED)


@functools.cache
def captured(form: str, heads: str, size: int) -> Function:
    """Return attention with a mask made from ids in the graph; query, key and value are activations."""
    h, g = HEADS[heads]
    arguments = [random(2, h, size, WIDTH), random(2, g, size, WIDTH), random(2, g, size, WIDTH + (heads == "MQA"))]
    units = [torch.ones(x.shape, dtype=torch.int64) for x in arguments]

    def run(q, k, v, ids, *others):
        *sinks, units = (others[0], others[1:]) if form == "sinks" else (others,)
        q, k, v = (x * unit for x, unit in zip((q, k, v), units))
        if form in SCORED:
            return SCORED[form](q, k, v, ids, *sinks)
        return F.scaled_dot_product_attention(q, k, v, MASKS[form](size, ids), enable_gqa=h != g, scale=0.3)

    sinks = [random(h) * 2] if form == "sinks" else []
    weights = (0, 1, 2, 4) if sinks else (0, 1, 2)
    return by_interval(capture(run, [*arguments, documents(size), *sinks, *units], Mesh(), weights=weights))


def by_interval(function: Function) -> Function:
    program, report = Intervals()(function.program, function.ctx)
    assert report.counts == {"attention_by_interval": 1}, report.notes
    return replace(function, program=replace(program, bounds=bounds_program(program)))


LAYOUTS = {
    "none": lambda ranks: PLAIN,
    "head_tail": lambda ranks: ZIGZAG,
    "blocks": lambda ranks: shuffled(ranks, 3),
}


def run_case(method: str, form: str, heads: str, size: int, ranks: int, layout: str) -> ir.Report:
    function = on(Mesh.of({"cp": ranks}), captured(form, heads, size), LAYOUTS[layout](ranks))
    tensors = function.values[1:]
    placed = {i: sequence(tensors[i]) for i in (0, 1, 2, *range(len(tensors) - 3, len(tensors)))}
    if form == "sinks":
        placed[4] = Spec.whole(tuple(tensors[4].shape))
    placed[3] = Spec.whole(tuple(tensors[3].shape)) if form == "prefix" else along_last(tensors[3])
    return check(function, placed, TOLERANCE, context=method)


def along_last(x: Tensor) -> Spec:
    """Return the placement of samples of ids, sharded along the sequence."""
    return sharded(x.shape, x.dim() - 1, "cp", None)


CASES = list(itertools.product(METHODS, FORMS, HEADS, SIZES, RANKS, LAYOUTS))


@pytest.mark.parametrize("case", CASES[::73], ids=lambda case: "-".join(map(str, case)))
@pytest.mark.sample(4)
def test_attention_over_ranks_is_that_of_one_device(case):
    method, form, heads, size, ranks, layout = case
    report = run_case(method, form, heads, SIZES[size], ranks, layout)
    assert any(" over cp" in note for note in report.notes), report.notes


@pytest.mark.sweep(1)
@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_every_form(method, record_property):
    cases = [case for case in CASES if case[0] == method]
    for _, form, heads, size, ranks, layout in cases:
        run_case(method, form, heads, SIZES[size], ranks, layout)
    record_property("counted", f"{method}: {len(cases)} cases of (form, heads, size, ranks, layout), in fp64 to 1e-10")


# ---- what is read, and what is not -------------------------------------------------------------------


def read_of(mask, *tensors: Tensor) -> ir.Report:
    """Return the report on attention of 12 tokens with a mask made by a function of tensors."""
    q = random(2, 4, 12, WIDTH)

    def run(q, k, v, *tables):
        return F.scaled_dot_product_attention(q, k, v, mask(*tables))

    function = capture(run, [q, q + 1, q + 2, *tensors], Mesh())
    return Intervals()(function.program, function.ctx)[1]


def alike(ids: Tensor) -> Tensor:
    return ids[:, None, :, None] == ids[:, None, None, :]


IDS = documents(12)
LEFT = {
    "every third key": (lambda: (grids(12)[0] + grids(12)[1]) % 3 == 0, "than the same of the query"),
    "keys of some documents": (lambda ids: (ids > 0)[:, None, None, :].expand(2, 1, 12, 12), "picks keys one by one"),
    "another's documents": (lambda ids, more: ids[:, None, :, None] == more[:, None, None, :], "than the same of the query"),
    "two intervals": (lambda: (grids(12)[1] > grids(12)[0] + 2) | (grids(12)[1] < grids(12)[0] - 2), "may see two intervals"),
    "ids that come again": (lambda ids: alike(ids % 2), "need not be adjacent"),
    "numbers": (lambda: torch.zeros(12, 12, dtype=torch.float64), "a mask of torch.float64"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_no_interval_says_stays_a_mask_and_the_report_says_why(name):
    mask, reason = LEFT[name]
    tensors = (IDS, IDS + 1)[: mask.__code__.co_argcount]
    report = read_of(mask, *tensors)
    assert report.counts == {"attention_by_interval": 0}
    (note,) = report.notes
    assert "its mask stays in memory: " in note and reason in note, note


def test_each_attention_under_a_mask_is_asked_for_its_kernel(monkeypatch):
    """Check heads of widths 4 and 6 under one mask, of which a kernel takes only the narrow one."""
    monkeypatch.setattr(intervals, "why_no_kernel", lambda q, k, v: "too wide" if q.shape[-1] > 4 else "")

    def both(x):
        i, j = grids(7)
        visible = i >= j
        narrow = F.scaled_dot_product_attention(x[..., :4], x[..., :4], x[..., :4], visible)
        return narrow.sum() + F.scaled_dot_product_attention(x, x, x, visible).sum()

    function = capture(both, [random(2, 1, 7, 6)], Mesh(), weights=[0])
    _, report = Intervals()(function.program, function.ctx)
    assert report.counts == {"attention_by_interval": 1} and "too wide" in report.notes[0]


def test_ids_given_from_outside_have_to_stand_together():
    inputs = {"tokens": torch.zeros(2, 12, dtype=torch.int64), "ids": IDS}
    model = Attentive()
    step = compile_lockstep(model, lambda model, batch: model(batch["tokens"], batch["ids"]), inputs, {"cp": 2})
    step(inputs)
    apart = torch.tensor([0, 0, 1, 1, 2, 2, 0, 3, 3, 3, 3, 3])
    with pytest.raises(UserError, match=r"batch\['ids'\]: row 1 has 0 in two places with other ids between"):
        step(inputs | {"ids": torch.stack([IDS[0], apart])})
    step(inputs | {"ids": IDS.flip(1)})  # any order will do


class Attentive(nn.Module):
    """A model with one attention within documents."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3 * 4 * WIDTH, dtype=torch.float64)

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.table(tokens).view(*tokens.shape, 3, 4, WIDTH).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, of_documents(tokens.shape[1], ids)).square().mean()


# ---- kernels ---------------------------------------------------------------------------------------

EXPRESSIONS = {
    "": [],
    "tanh(s / 2.0) * 2.0": [],
    "s + t0 * (j - t1)": [random(1, 4, 1, 1), torch.arange(300, dtype=F64).view(1, 1, 300, 1)],
}




def plainly(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, at: Tensor, score: str) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    x = q @ k.transpose(-1, -2) * 0.3
    x = evaluate(score, x, at, EXPRESSIONS[score]) if score else x
    sees = (at >= first[:, None, :, None]) & (at < last[:, None, :, None])
    weights = torch.where(sees, x, -1e9).softmax(-1)
    return torch.where(sees, weights, 0.0) @ v


@pytest.mark.parametrize("score", EXPRESSIONS)
@pytest.mark.parametrize("form", BOUNDS)
def test_the_kernel_is_attention_with_a_mask(form, score):
    """Compare with keys in order and in two runs, values of the keys' width and of another."""
    size = 300
    first, last = bounds_of(form, size)
    for at, width in ((torch.arange(size), WIDTH), (torch.arange(size).roll(150), WIDTH), (torch.arange(size), 5)):
        shapes = (2, 4, size, WIDTH), (2, 2, size, WIDTH), (2, 2, size, width)
        q, k, v = (random(*shape).requires_grad_() for shape in shapes)
        runs = None if at[0] == 0 else torch.tensor([150, 0])
        out, lse = attend(q, k, v, first, last, runs, EXPRESSIONS[score], 0.3, score)
        wanted = plainly(q, k, v, first, last, at, score)
        gradient = random(*wanted.shape)
        for x, y in zip(
            (out, *torch.autograd.grad(out, (q, k, v), gradient)),
            (wanted, *torch.autograd.grad(wanted, (q, k, v), gradient)), strict=True
        ):  # fmt: skip
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
        assert torch.equal(lse > -torch.inf, (last > first)[:, None].expand(2, 4, size))


@pytest.mark.parametrize("score", EXPRESSIONS)
@pytest.mark.parametrize("form", ["causal", "documents and window", "any"])
@pytest.mark.sample(2)
def test_the_kernel_is_flex_attention_with_blocks_made_of_bounds(form, score):
    first, last = bounds_of(form, 300)
    q, k, v = random(2, 4, 300, 16), random(2, 2, 300, 16), random(2, 2, 300, 16) + 1
    for runs in (None, torch.tensor([150, 0])):
        arguments = (first, last, runs, EXPRESSIONS[score], 0.3, score)
        actual, wanted = attend(q, k, v, *arguments), flex.forward(q, k, v, *arguments)
        gradient = random(*actual[0].shape)
        actual += attend_backward(gradient, q, k, v, *actual, *arguments)
        wanted += flex.backward(gradient, q, k, v, *wanted, *arguments)
        for x, y in zip(actual, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", BOUNDS)
def test_no_pair_of_blocks_is_computed_for_nothing(form):
    """Check that pieces cover each visible pair, and no other except in tiles of mixed queries."""
    first, last = bounds_of(form, 300)
    for lower, upper in zip(first, last):
        covered = torch.zeros(300, 300, dtype=torch.int64)
        for rows, keys, causal, masked in pieces(lower, upper):
            block = covered[rows, keys]
            block += torch.ones_like(block).tril(block.shape[1] - block.shape[0]) if causal else 1
            assert masked is False or rows.stop - rows.start <= 2 * ROWS
        i, j = grids(300)
        sees = (j >= lower[:, None]) & (j < upper[:, None])
        assert bool((covered[sees] == 1).all()) and int(covered.max()) == 1


@pytest.mark.parametrize("form", BOUNDS)
@pytest.mark.parametrize("runs", [None, torch.tensor([150, 0])], ids=["one run", "two runs"])
def test_a_kernel_gets_all_pieces_of_one_size_at_once(form, runs):
    """Check that parts of one call share no query, because results are written at once, and one mask."""
    q, k, v = random(2, 2, 300, WIDTH), random(2, 2, 300, WIDTH), random(2, 2, 300, WIDTH)
    first, last = bounds_of(form, 300)
    arguments = (first, last, runs, [], 0.3, "")
    for together, _ in calls(q, k, v, arguments):
        given_to = torch.zeros(2, 300, dtype=torch.int64)
        for part in together:
            given_to[part.batch, part.rows] += 1
        assert int(given_to.max()) == 1
    result = attend(q, k, v, *arguments)
    with mock.patch.object(interval_cpu, "ENOUGH", 0):
        assert all(len(together) == 1 for together, _ in calls(q, k, v, arguments))
        for x, y in zip(result, attend(q, k, v, *arguments), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_documents_of_one_length_are_few_calls():
    first = torch.arange(4096)[None] // 512 * 512
    q = random(1, 1, 4096, WIDTH)
    assert len(list(calls(q, q, q, (first, torch.arange(4096)[None] + 1, None, [], 0.3, "")))) == 512 // ROWS


@pytest.mark.parametrize("window", [None, 16])
def test_masks_of_transformers_are_read(window):
    """Read masks of samples packed by positions, as transformers' models take them."""
    kind, config = {None: ("Llama", {}), 16: ("Mistral", {"sliding_window": 16})}[window]
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    built = getattr(transformers, f"{kind}Config")(**sizes, num_key_value_heads=2, attn_implementation="sdpa", **config)
    model = getattr(transformers, f"{kind}ForCausalLM")(built)
    batch = {"input_ids": torch.zeros(2, 32, dtype=torch.int64), "position_ids": torch.zeros(2, 32, dtype=torch.int64)}
    program, ctx = capture_model(model, lambda model, b: model(**b, use_cache=False).logits.mean(), batch, torch.device("cpu"))
    program, report = Intervals()(program, ctx)
    assert report.counts == {"attention_by_interval": 2} and not report.notes
    assert not [i.name for i in program.inputs if i.runs]  # the model counts runs
    (first, last) = {node.args[3:5] for node in program.calls() if node.target is interval_attention}.pop()
    positions = torch.cat([torch.arange(20), torch.arange(12)]).expand(2, 32)
    actual = fx.Interpreter(program_of(program, first, last)).run(positions)
    i = torch.arange(32)
    start = torch.where(i < 20, 0, 20)
    wanted = (start if window is None else start.maximum(i - window + 1)).expand(2, 32), (i + 1).expand(2, 32)
    for x, y in zip(actual, wanted, strict=True):
        assert torch.equal(x.expand(2, 32), y)


class Turned(nn.Module):
    """A model with attention within documents; keys have fewer heads, another dtype, and are cast back."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(11, 16), nn.Linear(16, 32), nn.Linear(16, 11)

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in self.qkv(x).split((16, 8, 8), -1))
        q, k = (torch.cos(y.float()).to(y.dtype) for y in (q, k))
        i, j = grids(tokens.shape[1])
        visible = (ids[:, None, :, None] == ids[:, None, None, :]) & (i >= j)
        y = F.scaled_dot_product_attention(q, *(y.repeat_interleave(2, 1) for y in (k, v)), visible)
        return self.head(x + y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("load_balance", ["head_tail", "blocks"])
def test_keys_that_are_cast_are_gathered_before_their_cast(load_balance):
    torch.manual_seed(0)
    model, data = Turned().double(), batches()
    metrics, state = train_plainly(model, loss_of, data)
    context = {"method": "all_gather", "load_balance": load_balance} | ({"block": 3} if load_balance == "blocks" else {})
    step = compile_lockstep(model, loss_of, data[0], {"cp": 2}, passes={"context": context})
    for actual, wanted in zip(train_step(step, data), metrics, strict=True):
        assert_same(actual, wanted, 1e-6)
    assert_same(step.state_dict(), state, 1e-6)


def program_of(program: ir.Program, *results: fx.Node) -> fx.GraphModule:
    """Return a program that computes two nodes from the positions."""
    graph, copies = fx.Graph(), {}
    for node, arguments in zip(program.placeholders(), program.inputs):
        if arguments.name == "position_ids":
            copies[node] = graph.placeholder("positions")
    needed, stack = set(), list(results)
    while stack:
        node = stack.pop()
        if node not in needed and node not in copies:
            needed.add(node)
            stack += node.all_input_nodes
    for node in program.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule({}, graph)
