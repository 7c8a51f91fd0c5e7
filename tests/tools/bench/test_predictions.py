"""Predicted against published and measured: rows that can run, their tables, and a measured machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.bench import predicted, published
from tools.bench.job import composed
from tools.bench.published import Outcome, Row
from tools.pages import markers

ROWS = list(published.read_rows())
ROW = Row("a/b", "a page", "h100", 8, (), tokens_per_s=1000.0, gib=50.0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.sample(4)
def test_every_published_row_can_be_run_and_says_where_it_comes_from(row):
    cfg = composed(row.options, row.gpus)
    assert cfg.cluster.name == row.cluster
    assert row.source and row.tokens_per_s > 0
    assert not (row.sets and row.unlike)


def test_there_are_a_dozen_rows_that_are_judged():
    assert sum(row.is_judged for row in ROWS) >= 12


def test_what_set_a_factor_or_is_another_job_is_shown_and_not_judged():
    outcomes = [
        Outcome(ROW, 1100.0, 45.0, 1.0),
        Outcome(replace(ROW, sets="throttle"), 2000.0, 100.0, 1.0),
        Outcome(replace(ROW, unlike="stages"), 3000.0, 100.0, 1.0),
        Outcome(replace(ROW, gib_sets="allocator_loss"), 1050.0, 100.0, 1.0),
    ]
    text = published.report(outcomes)
    assert "| a/b | 1,000 | 1,100 (+10%) | 50.0 | 45.0 (-10%) |  |" in text
    assert "| a/b | 1,000 | 2,000 (+100%) | 50.0 | 100.0 (+100%) | set the throttle |" in text
    assert "| stages |" in text and "| its memory set the allocator_loss |" in text
    assert "throughput: 2 rows are judged; median error 7.5%, largest +10.0%." in text
    assert "memory: 1 rows are judged; median error 10.0%, largest -10.0%." in text


@pytest.mark.full
def test_a_loss_that_the_published_trainer_did_not_compile_writes_all_it_makes():
    """Logits in fp32, their softmax and gradients take memory that a compiled loss does not need."""
    small = ("model.dim=64", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=64", "model.vocab_size=8192")
    row = replace(ROW, options=(*small, "cluster=h100", "train.seq_len=1024", "train.global_batch_size=8", "mesh.dp_shard=8", "passes.chunk_loss.chunks=1"))
    compiled, eager = (published.predicted(replace(row, eager_loss=flag)) for flag in (False, True))
    logits_gib = 1024 * 8192 * 4 / 2**30
    assert eager.gib - compiled.gib > logits_gib and eager.tokens_per_s < compiled.tokens_per_s


def test_a_pattern_that_names_no_row_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        published.main(["--only", "nobody/*"])
    assert stopped.value.code == 2
    assert "error: --only: 'nobody/*' names no row; there are llama3/" in capsys.readouterr().err


def test_a_page_is_not_written_with_a_part_of_the_rows(capsys, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(before := "\n".join(markers(published.TITLE)))
    monkeypatch.setattr(published, "tried", lambda row, overrides: None)
    monkeypatch.setattr(published, "report", lambda outcomes: "")
    for only, message in (("llama3/*", "--write: is for the table of all rows"), ("*", "rows could not be compiled")):
        with pytest.raises(SystemExit):
            published.main(["--only", only, "--write", str(page)])
        assert message in capsys.readouterr().err and page.read_text() == before


RESULT = {
    "ranks": 2, "name": "dp_shard=2", "backend": "eager", "clock": "cpu", "measured_ms": 100.0, "predicted_ms": 110.0,
    "measured_bytes": 2**20, "predicted_bytes": 2**20, "load": 1.0,
}  # fmt: skip


def test_the_table_of_measured_settings():
    slower = RESULT | {"name": "tp=2", "measured_ms": 200.0, "predicted_ms": 100.0, "predicted_bytes": 2**21}
    text = predicted.report([RESULT, slower])
    assert "| 2 | dp_shard=2 | eager, cpu | 1 | 100 | 110 (+10%) | 1.0 | 1.0 (+0.0%) | 1.0 |" in text
    assert "2 settings: median error of step time 30.0%, of peak memory 50.00%; rank correlation of step times -1.00." in text
    assert text.endswith("Of 2 ranks tp=2 is predicted to be fastest, 100.0% slower than the fastest measured.")


def test_a_peak_above_its_budget_is_marked():
    over, within = (predicted.line(RESULT | {"runs": 1, "budget_bytes": size}) for size in (2**20 - 1, 2**20))
    assert "dp_shard=2 OVER" in over and "dp_shard=2" in within


def test_budgets_lie_between_the_peaks_of_full_and_none(monkeypatch):
    peaks = {"full": 2**30, "none": 2**31}
    monkeypatch.setattr(predicted, "predicted", lambda one, *_: {"prediction": {"memory": {"written_bytes": peaks[one.name.split(", ")[1]]}}})
    chosen = list(predicted.budgets(3, {}, "eager"))
    assert [one.budget_bytes / 2**30 for one in chosen] == [1.25, 1.5, 1.75]
    assert [one.name for one in chosen][0] == "dp_shard=1, budget 1280.0 MiB"
    assert composed([*predicted.MODEL, *chosen[0].options], 1).passes.remat.budget_gib == 1.25


def test_the_table_has_the_median_of_a_settings_runs():
    runs = [RESULT | {"measured_ms": ms, "predicted_ms": ms + 10} for ms in (90.0, 400.0, 100.0)]
    (one,) = predicted.medians(runs)
    assert (one["measured_ms"], one["predicted_ms"], one["runs"]) == (100.0, 110.0, 3)
    assert "| 3 | 100 | 110 (+10%)" in predicted.report(runs)


@pytest.mark.full
def test_settings_are_a_dozen_on_one_two_and_four_ranks():
    assert len(predicted.SETTINGS) >= 12
    assert {s.ranks for s in predicted.SETTINGS} == {1, 2, 4}
    for one in predicted.SETTINGS:
        composed([*predicted.MODEL, *one.options], one.ranks)
