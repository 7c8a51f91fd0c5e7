"""Random cases train as eager PyTorch does or are refused; failures are detected, shrunk and printed."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from compiler_trainer.capture import grad_modes
from compiler_trainer.parity import compare as comparison
from compiler_trainer.parity import oracle
from compiler_trainer.parity.compare import Outcome, compare, spread
from compiler_trainer.parity.subject import Settings, Subject
from tests.nightly.parity.case import Case, case_of
from tests.nightly.parity.command import main
from tests.nightly.parity.draw import cases, without_ambiguity
from tests.nightly.parity.features import features
from tests.nightly.parity.models import KINDS
from tests.nightly.parity.page import lines
from tests.nightly.parity.record import Record, load, run_case
from tests.nightly.parity.shrink import shrink_case

SHORT, FULL, BLOCK = 10, 2000, 25


@pytest.mark.parametrize("number", range(SHORT))
@pytest.mark.sample(3)
def test_a_random_case_trains_as_eager_pytorch_does(number):
    case = next(itertools.islice(cases(SHORT, seed=7), number, None))
    outcome = run_case(case).outcome
    assert outcome.verdict in ("right", "refused"), f"{case}: {outcome}"


@pytest.mark.full
@pytest.mark.sweep(8)
@pytest.mark.parametrize("block", range(FULL // BLOCK))
def test_two_thousand_random_cases_train_as_eager_pytorch_does(block):
    records = map(run_case, itertools.islice(cases(FULL, seed=0), block * BLOCK, (block + 1) * BLOCK))
    assert not [f"{r.case}: {r.outcome}" for r in records if r.outcome.verdict not in ("right", "refused")]


def test_a_line_is_the_case_that_it_was_printed_of():
    for case in cases(300, seed=1):
        assert Case.parse(str(case)) == case


def test_the_same_seed_draws_the_same_cases_and_reaches_every_model_and_axis():
    drawn = list(cases(600, seed=2))
    assert drawn == list(cases(600, seed=2)) != list(cases(600, seed=3))
    assert {case.model for case in drawn} == set(KINDS)
    assert set().union(*map(features, drawn)) >= {"dp_replicate", "dp_shard", "cp", "tp", "ep", "muon", "uneven heads"}


def test_what_is_ambiguous_is_not_drawn():
    assert without_ambiguity("experts", {}, {}, {"name": "sgd"}, {"passes.cast.param_dtype": "float32"}) == {}
    bounded = without_ambiguity("experts", {}, {"dp_shard": 3, "ep": 3}, {"name": "sgd"}, {"passes.moe.dispatch": "bounded"})
    assert bounded["passes.moe.capacity_factor"] == 9.0
    assert not any(c.named_options["optim.name"] == "muon" for c in cases(300, seed=4) if not c.kind.muon)


def changed(subject, change):
    """Return the subject with a change to the model that trains in eager PyTorch."""

    def eager(model):
        model = subject.eager(model)
        with torch.no_grad():
            change(model)
        return model

    return dataclasses.replace(subject, eager=eager)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}])
def test_a_small_difference_is_wrong_and_named(mesh):
    subject = Case.parse("perceptron rows=3").subject()
    assert compare(subject, Settings(mesh)).verdict == "right"
    other = compare(changed(subject, lambda model: model.down.bias[1].add_(1e-8)), Settings(mesh))
    assert other.verdict == "wrong" and 1e-9 < other.error < 1e-6 and "down" in str(other), other


def test_a_wrong_gradient_is_heard_though_no_parameter_moves():
    subject = Case.parse("perceptron rows=3").subject()
    other = changed(subject, lambda model: model.up.weight.register_hook(lambda g: g * 1.001))
    outcome = compare(other, Settings(optim={"name": "adamw"}, lrs=(0.0, 0.0, 0.0)))
    assert outcome.verdict == "wrong" and "up.weight" in outcome.value, outcome


@pytest.mark.full
def test_what_rounding_moves_is_not_compared():
    """Softmax ignores the bias of keys: AdamW divides the rounding error that is its gradient by its own size."""
    subject = Case.parse("bert seed=294 rows=3").subject()
    key = "bert.encoder.layer.0.attention.self.key.bias"
    with torch.no_grad():
        subject.model.get_parameter(key).zero_()
    adamw = Settings({"tp": 2}, {"name": "adamw", "eps": 1e-12})
    first = oracle.train(subject, adamw)[0]
    gradient = first[f"optim.exp_avg.{key}"].abs().max() * 10  # beta 0.9
    assert 0 < gradient < 1e-16 < first["grad_norm"] and first[f"chance.{key}"].any()
    assert sum(int(entries.sum()) for name, entries in first.items() if name.startswith("chance.")) <= 16
    assert compare(subject, adamw).verdict == "right"
    moved = changed(subject, lambda model: model.get_parameter(key)[1].add_(1e-3))
    assert key in compare(moved, Settings({"tp": 2})).value  # under SGD it is compared


@pytest.mark.full
def test_what_eager_pytorch_makes_of_the_last_bit_is_allowed_and_no_more():
    """AdamW divides small gradients by their size, and three steps of a deep model multiply rounding errors."""
    case = Case.parse("decoder seed=6 rows=1 layers=3 heads=3 latent=true labels=all optim.name=adamw optim.eps=1e-06")
    subject, how = case.subject(), case.settings()
    wanted = oracle.train(subject, how)
    allowed = 2 * spread(subject, how, wanted, 2**-52)
    assert 1e-12 < allowed < 1e-8 and compare(subject, how).error < max(allowed, 1e-10)
    moved = changed(subject, lambda model: model.get_parameter("layers.2.feed_forward.w1.weight").mul_(1 + 100 * allowed))
    assert compare(moved, how).verdict == "wrong"


@pytest.mark.parametrize(("step", "error", "verdict"), [(0, 1e-4, "wrong"), (1, 1e-4, "right"), (1, 2e-3, "wrong")])
def test_rounding_in_fp32_excuses_small_differences_of_later_steps(step, error, verdict, monkeypatch):
    monkeypatch.setattr(comparison, "spread", lambda *_: 1.0)  # eager PyTorch amplifies rounding as much as that
    expected = [{"loss": torch.ones(())} for _ in range(2)]
    states = [{"loss": 1 + error * (at == step) * torch.ones(())} for at in range(2)]
    outcome = comparison.judged(states, expected, 2e-5)
    assert outcome.verdict == "wrong"
    assert comparison.judged_by_drift(outcome, None, None, states, expected).verdict == verdict


def test_microbatches_that_change_buffers_are_evaluated_without_each_other():
    case = Case.parse("teacher rows=3 length=1 train.microbatches=3 eval.interval=1")
    assert run_case(case).outcome.verdict == "right"
    subject, how = case.subject(), case.settings()
    assert oracle.evaluate(subject, 3) != oracle.train(subject, how)[0]["loss"]


@pytest.mark.parametrize(
    ("line", "verdict", "why"),
    [
        ("reader passes.remat.policy=full", "refused", "remat: passes.remat.policy=full"),
        ("reader train.microbatches=3 rows=2", "refused", "microbatches: 3 does not divide the 2 rows"),
        ("perceptron mesh.zz=2", "refused", "mesh.zz: no such axis"),
    ],
)
def test_a_refusal_has_its_reason(line, verdict, why):
    outcome = Case.parse(line).run()
    assert outcome.verdict == verdict and outcome.reason.startswith(why), outcome


def test_what_names_no_place_is_a_crash(monkeypatch):
    def broken(*args, **kwargs):
        raise IndexError("list index out of range")

    monkeypatch.setattr("compiler_trainer.parity.compare.compile_step", broken)
    outcome = Case.parse("perceptron").run()
    assert outcome.verdict == "crash" and "broken" in outcome.trace
    assert str(outcome) == "crash: IndexError: list index out of range"


@pytest.mark.full
def test_dropout_is_compared_with_a_step_of_one_rank():
    assert Case.parse("encoder dropout=0.2 rows=3 mesh.dp_shard=2").run().verdict == "right"


def fails_with(*needed):
    """Return a fake run: wrong if a case has all of some options; it raises for less than three rows."""

    def run(case):
        if case.named_options.get("rows", 2) < 3:
            raise ValueError("no case")
        return Outcome("wrong" if set(needed) <= case.named_options.keys() else "right")

    return run


def test_a_failing_case_is_made_small():
    case = case_of(
        "decoder", {"rows": 12, "length": 9, "layers": 3, "mesh.tp": 6, "mesh.cp": 2, "optim.name": "adamw", "tied": True}
    )
    smaller = shrink_case(case, Outcome("wrong"), fails_with("mesh.tp", "tied"))
    assert str(smaller) == "decoder rows=3 mesh.tp=2 tied=true length=1"


def record(line, verdict="right", **fields):
    return Record(Case.parse(line), Outcome(verdict, **fields))


def test_the_page_counts_cases_pairs_gaps_and_reasons():
    text = "\n".join(lines([
        record("reader mesh.tp=2 optim.name=sgd", error=3e-15, allowed=1e-10),
        record("reader mesh.tp=2 mesh.cp=2", "wrong", error=0.5, value="step 1: loss"),
        record("reader mesh.cp=2 optim.name=muon", "refused", why="a: %b_1 is 3"),
        record("reader mesh.cp=3 optim.name=muon", "refused", why="a: %c is 4.5"),
    ]))  # fmt: skip
    assert "4 cases, 0 minutes of one process: 1 right, 2 refused, 1 wrong, 0 crash." in text
    assert "| tp | 2 | 1 | 0 | 1 | 3e-15 |" in text
    assert "| cp |  | **0 of 1** |" in text and "| muon | refused | - |" in text
    assert "- cp: tp (1), muon (2), plain (3), sgd" in text and "- tp: muon" in text
    assert "| 2 | a: %b_1 is 3 | `reader mesh.cp=2 optim.name=muon` |" in text
    assert "- `reader mesh.tp=2 mesh.cp=2`: wrong, off by 5.0e-01 at step 1: loss" in text


def test_the_tool_runs_a_case_stores_it_and_writes_the_page(tmp_path, capsys):
    store, page = tmp_path / "found.jsonl", tmp_path / "parity.md"
    page.write_text("before\n<!-- parity -->\nold\n<!-- end of parity -->\nafter\n")
    arguments = ["--case", "perceptron rows=3 mesh.dp_shard=2", "--store", str(store), "--write", str(page)]
    assert main(arguments) == 0
    assert "right, off by" in capsys.readouterr().out
    assert [str(r.case) for r in load(store)] == ["perceptron rows=3 mesh.dp_shard=2"]
    assert main(arguments) == 0 and "right, off by" not in capsys.readouterr().out  # it is in the store
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "| dp_shard | 1 | 1 |" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("novel rows=3", "model 'novel' does not exist; use one of decoder, "),
        ("perceptron heads=3", "perceptron has no option heads; it has norm, loss"),
    ],
)
def test_what_is_no_case_is_said(line, message, capsys):
    assert main(["--case", line]) == 2
    assert f"error: case: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "says"), [
    (["--fault", "nothing_like_it"], "--fault: 'nothing_like_it' is not a fault of tools.faults"),
    (["--fault", "copies_not_replicate", "--store", "x"], "--fault: takes only --cases, --from and --seed"),
    (["--cases", "500", "--from", "500"], "--from: 500 leaves none of 500 cases"),
])
def test_a_fault_is_one_of_the_table_and_nothing_given_beside_it_is_ignored(arguments, says, capsys):
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and says in capsys.readouterr().err


@pytest.mark.full
def test_a_planted_fault_is_heard(capfd):
    assert main(["--cases", "30", "--seed", "1", "--fault", "copies_not_replicate"]) == 1
    assert "wrong" in capfd.readouterr().out


class Dropping(torch.nn.Module):
    """A model with random numbers, compared with a compiled step, and a statistic of a cast that changes nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = torch.dropout(self.a(x), 0.5, True)
        with torch.no_grad():
            self.seen.add_(y.to(self.b.weight.dtype).mean())
        return self.b(y)


def test_a_gradient_that_capture_cuts_is_heard_where_both_steps_share_the_capture(monkeypatch):
    subject = Subject(Dropping().double(), lambda m, b: (None, m(b["x"]).square().mean()), [{"x": torch.ones(3, 4).double()}] * 3)
    assert compare(subject, Settings(), alone=True).verdict == "right"
    monkeypatch.setattr(grad_modes, "same_value", lambda node: None)
    outcome = compare(subject, Settings(), alone=True)
    assert outcome.verdict == "wrong" and outcome.value.startswith("capture: no gradient reaches a.bias")
