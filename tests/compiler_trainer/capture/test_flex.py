"""FlexAttention equals its formula, with gradients, on every mesh."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle import assert_same, compile_lockstep, train_plainly, train_step
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from compiler_trainer.config.errors import UserError

F64 = torch.float64
HEADS, KEYS, WIDTH, WINDOW, ROWS, SIZE = 4, 2, 4, 3, 4, 11
FLAG = torch.tensor(False)
LONG = torch.arange(SIZE + 3) // 2


def document(b, h, i, j, ids, slopes):
    return (i >= j) & (ids[b, i] == ids[b, j])


def window(b, h, i, j, ids, slopes):
    return (i >= j) & (i - j < WINDOW)


def causal(b, h, i, j, ids, slopes):
    return i >= j


def by_head(b, h, i, j, ids, slopes):
    return (i >= j) | (h % 2 == 0)


def nothing_for_one(b, h, i, j, ids, slopes):
    return (i >= j) & (i != 2)


def no_key(b, h, i, j, ids, slopes):
    return torch.full((), False)


def a_captured_flag(b, h, i, j, ids, slopes):
    return FLAG


def every_key(b, h, i, j, ids, slopes):
    return torch.full((), True)


def longer_table(b, h, i, j, ids, slopes):
    return (LONG[i] >= LONG[j]) & (i >= j)


def stacked(b, h, i, j, ids, slopes):
    return torch.stack([i >= j, i - j < WINDOW]).all()


def summed(score, b, h, i, j, slopes):
    return score + score.sum()


def made_inside(b, h, i, j, ids, slopes):
    return (i >= j) & (i - j < torch.tensor(WINDOW)) | torch.tensor(False)


def scaled_inside(score, b, h, i, j, slopes):
    return score * torch.tensor(0.5, dtype=F64)


def table_inside(score, b, h, i, j, slopes):
    return score * torch.tensor([0.5, 1, 2, 3], dtype=F64)[h]


def alibi(score, b, h, i, j, slopes):
    return score + slopes[h] * (j - i)


def cap(score, b, h, i, j, slopes):
    return 2 * torch.tanh(score / 2)


FORMS = {"document": (document, None), "window": (window, None), "causal": (causal, None), "by head": (by_head, None),
         "unseen": (nothing_for_one, None), "alibi": (causal, alibi), "cap": (document, cap), "all": (None, None)}
CONSTANT = {"no key": (no_key, None), "a captured flag": (a_captured_flag, None), "every key": (every_key, None)}
OTHERS = {**CONSTANT, "longer table": (longer_table, None), "stacked": (stacked, None), "summed": (causal, summed),
          "number inside": (made_inside, scaled_inside), "table inside": (causal, table_inside)}


class Model(nn.Module):
    """Attention over tokens of several documents, by the formula or by FlexAttention."""

    def __init__(self, form: str, flex: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8, dtype=F64)
        self.q = nn.Linear(8, HEADS * WIDTH, dtype=F64)
        self.kv = nn.Linear(8, 2 * KEYS * WIDTH, dtype=F64)
        self.out = nn.Linear(HEADS * WIDTH, 13, dtype=F64)
        self.register_buffer("slopes", torch.linspace(0.1, 0.4, HEADS, dtype=F64))
        (self.mask, self.score), self.flex = (FORMS | OTHERS)[form], flex

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        x = self.embed(tokens)
        rows, size = tokens.shape
        q = self.q(x).view(rows, size, HEADS, WIDTH).transpose(1, 2)
        k, v = self.kv(x).view(rows, size, 2, KEYS, WIDTH).permute(2, 0, 3, 1, 4)
        attend = self.by_flex if self.flex else self.by_formula
        return self.out(attend(q, k, v, ids).transpose(1, 2).flatten(2))

    def by_flex(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        rows, size = ids.shape
        mask = score = None
        if self.mask is not None:
            def mask_mod(b, h, i, j):
                return self.mask(b, h, i, j, ids, self.slopes)
            mask = create_block_mask(mask_mod, rows, HEADS, size, size, device=ids.device)
        if self.score is not None:
            def score(s, b, h, i, j):
                return self.score(s, b, h, i, j, self.slopes)
        return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True)

    def by_formula(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
        scores, result = q @ k.transpose(-1, -2) / WIDTH**0.5, []
        rows, size = ids.shape
        for b in range(rows):
            for h in range(HEADS):
                i, j = torch.arange(size)[:, None], torch.arange(size)[None, :]
                s = scores[b, h] if self.score is None else self.score(scores[b, h], b, h, i, j, self.slopes)
                everywhere = torch.ones(size, size, dtype=torch.bool)
                sees = everywhere if self.mask is None else everywhere & self.mask(b, h, i, j, ids, self.slopes)
                weights = torch.where(sees, s.masked_fill(~sees, -1e9).exp(), 0.0)
                total = weights.sum(-1, keepdim=True)
                result.append(weights / torch.where(total > 0, total, 1.0) @ v[b, h])
        return torch.stack(result).view(rows, HEADS, size, WIDTH)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["tokens"], batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def one() -> dict[str, Tensor]:
        tokens, labels = (torch.randint(0, 13, (ROWS, SIZE), generator=generator) for _ in range(2))
        starts = torch.rand(ROWS, SIZE, generator=generator) < 0.3
        return {"tokens": tokens, "labels": labels, "ids": starts.cumsum(1)}

    return [one() for _ in range(3)]


@functools.cache
def wanted(form: str):
    return train_plainly(Model(form, flex=False), loss_fn, data())


def check(form: str, mesh: dict[str, int], method: str = "auto") -> list[str]:
    step = compile_lockstep(Model(form, flex=True), loss_fn, data()[0], mesh, passes={"context": {"method": method}})
    metrics, state = wanted(form)
    for result, expected in zip(train_step(step, data()), metrics, strict=True):
        assert_same(result, expected, 1e-10)
    assert_same(step.state_dict(), state, 1e-10)
    return [note for p in step.report["passes"] if p["name"] == "shard" for note in p["report"]["notes"]]


def mostly_full(cases: list, every_run: tuple[int, ...]) -> list:
    """Return the cases, most of them marked for `make test-full` only."""
    rare = pytest.mark.full
    return [case if i in every_run else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=rare)
            for i, case in enumerate(cases)]


@pytest.mark.parametrize("form", mostly_full(list(FORMS), (0, 4, 5)))
@pytest.mark.sample(2)
def test_a_model_with_flex_attention_trains_on_the_cpu(form):
    check(form, {})


@pytest.mark.parametrize("form", CONSTANT)
def test_a_constant_mask_counts_with_its_value(form):
    check(form, {})


def test_a_table_may_be_longer_than_the_sequence():
    check("longer table", {})


def test_a_function_may_make_numbers():
    check("number inside", {})


def test_a_function_that_makes_a_table_is_refused():
    with pytest.raises(UserError, match=r"torch.tensor\(...\) in a mask or score function of flex_attention makes more than one"):
        compile_lockstep(Model("table inside", flex=True), loss_fn, data()[0], {})


@pytest.mark.parametrize(("form", "operator"), [("stacked", "aten.stack"), ("summed", "aten.sum")])
def test_a_function_that_is_not_computed_entry_by_entry_is_refused(form, operator):
    with pytest.raises(UserError, match=f"a mask or score function of flex_attention calls {operator}.default on values"):
        compile_lockstep(Model(form, flex=True), loss_fn, data()[0], {})


@pytest.mark.parametrize(("form", "mesh", "method"), mostly_full([
    ("document", {"cp": 2}, "ring"), ("document", {"cp": 4}, "ulysses"), ("document", {"cp": 2, "dp_shard": 2}, "all_gather"),
    ("window", {"cp": 2, "tp": 2}, "ring"), ("causal", {"cp": 3}, "ring"), ("by head", {"cp": 2}, "ring"),
    ("unseen", {"cp": 2}, "ring"), ("alibi", {"cp": 2}, "ring"), ("cap", {"cp": 2, "tp": 2}, "auto"),
], (0, 3, 6, 8)), ids=str)
@pytest.mark.sample(2)
def test_flex_attention_over_ranks(form, mesh, method):
    notes = check(form, mesh, method)
    if form not in ("alibi", "cap"):
        assert any(f"{method} over cp, as configured" in note for note in notes), notes


def test_documents_stay_where_they_are():
    """The mask of a rank's queries uses its own document ids; only those of keys are gathered."""
    notes = check("document", {"cp": 2}, "ring")
    assert not any("index" in note for note in notes), notes
