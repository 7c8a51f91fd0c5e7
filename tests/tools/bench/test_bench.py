"""The benchmark: its table for contenders that ran, failed, or computed other losses; and real rounds."""

from __future__ import annotations

import itertools
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import ExpertsConfig, ModelConfig
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.loss import PADDING_DOCUMENT
from tools import pages
from tools.bench import command
from tools.bench.stock import StockLlama

TINY = (
    "lower.backend=eager model.dim=8 model.n_layers=1 model.n_heads=2 model.n_kv_heads=2 model.ffn_dim=8 "
    "train.seq_len=8 train.global_batch_size=2"
).split()


def options(**changes):
    given = {"ranks": 2, "rounds": 3, "steps": 4, "threads": None, "timeout_s": 500, "contenders": "ours,eager,block", "write": None, "once": False, "unchecked": False}
    return Namespace(**{**given, "overrides": ["mesh.tp=2"], **changes})


def found(speed, **more):
    figures = {"tokens_per_s": speed, "step_ms": 1e3 / speed, "peak_bytes": 2 * command.MIB, "sent_bytes": command.MIB}
    first = {"cold_s": 9.0, "cold_cpu_s": 12.0, "cold_bodies": {"compiled": 11}, "first_s": 4.0, "first_cpu_s": 5.0, "bodies": {"loaded": 11}}
    return {**figures, **first, "off": 1e-7, **more}


FOUND = {
    "ours": [found(30.0, floor_ms=30.0), found(10.0, floor_ms=50.0), found(20.0, floor_ms=40.0)],
    "eager": [found(40.0)],
    "block": [found(50.0), {"error": "no result after 100 s"}],
}


def cells(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return dict(zip(command.HEADINGS, (cell.strip() for cell in line.strip("|").split("|")), strict=True))


def test_a_row_has_medians_spreads_and_both_compile_times():
    ours = cells(command.report(FOUND, options()), "this trainer")
    assert ours["tokens/s"] == "20 (10 to 30)" and ours["ratio"] == "0.50"
    assert (ours["first step cold, s"], ours["warm, s"]) == ("9.0", "4.0")
    assert (ours["cold CPU s"], ours["warm CPU s"], ours["bodies compiled cold, warm"]) == ("12.0", "5.0", "11, 0")
    assert ours["step ms"] == "50" and ours["floor / step"] == "0.80"  # of the medians, 40 of 50 ms
    assert (ours["peak MiB"], ours["sent MiB"], ours["loss off by"]) == ("2.0", "1.00", "1e-07")


def test_a_contender_that_failed_is_a_row_with_its_error():
    text = command.report(FOUND, options())
    block = cells(text, command.CONTENDERS["block"])
    assert block.pop("tokens/s") == "failed" and set(block.values()) == {command.CONTENDERS["block"], ""}
    assert text.endswith("- stock, torch.compile of each block: no result after 100 s")
    assert command.ran(FOUND) == ["ours", "eager"]
    assert cells(text, command.CONTENDERS["eager"])["floor / step"] == "1.60"
    assert len(command.plot(FOUND).data) == 3 and list(command.plot(FOUND).data[0].x) == ["ours", "eager"]


@pytest.mark.parametrize(("losses", "fails"), [([2.0, 1.0], False), ([2.0, 1.1], True), ([2.0, float("nan")], True)])
def test_other_losses_than_those_of_one_plain_rank_are_an_error(losses, fails):
    result = command.compared({"losses": losses}, {"losses": [2.0, 1.00001]})
    assert ("error" in result) == fails


def test_losses_are_not_compared_where_plain_pytorch_fails_and_that_is_said():
    """Plain PyTorch has no chunked loss, so it alone may run out of memory on long sequences."""
    measured = found(10.0, floor_ms=30.0)
    del measured["off"]
    result = command.compared(measured, {"error": "OutOfMemoryError: 16 GiB"})
    text = command.report({"ours": [result]}, options())
    assert cells(text, "this trainer")["loss off by"] == "" and "- losses are not compared: plain PyTorch on one rank failed: OutOfMemoryError" in text


def test_the_rank_that_failed_first_is_believed(tmp_path):
    for rank, at in enumerate((7.0, 5.0)):
        (tmp_path / f"error.{rank}.json").write_text(json.dumps({"error": f"rank {rank}", "at": at}))
    assert command.first_error(tmp_path)["error"] == "rank 1"


def test_only_the_table_between_its_markers_is_renewed(tmp_path):
    first, last = pages.markers("bench mesh.tp=2")
    path = tmp_path / "README.md"
    path.write_text(f"above\n{first}\nold\n{last}\nbelow\n")
    pages.renew(path, command.title(options()), "new")
    assert path.read_text() == f"above\n{first}\nnew\n{last}\nbelow\n"


REFUSED = [
    ({"contenders": "ours,jax"}, "--contenders: 'jax' is not one of"),
    ({"rounds": 0}, "must be at least 1"),
    ({"overrides": ["mesh.tp=3"]}, "mesh: tp=3 needs a multiple of 3 ranks, not 2"),
    ({"overrides": ["train.microbatches=2"]}, "train.microbatches: is no option of the benchmark"),
    ({"overrides": ["train.dtype=bfloat16"]}, "train.dtype: is no option of the benchmark"),
    ({"overrides": ["mesh.tpp=2"]}, "mesh.tpp: no such option; did you mean 'tp'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_bad_input_is_refused_before_anything_runs(changes, message):
    with pytest.raises(UserError) as caught:
        command.check(options(**{"overrides": ["mesh.tp=2"], **changes}))
    assert message in str(caught.value)


def test_the_printed_arguments_repeat_the_benchmark():
    assert command.arguments(options())[-1:] == ["mesh.tp=2"] and "--once" not in command.arguments(options())
    assert {"--threads 1", "--once", "--unchecked"} < {*command.arguments(options(threads=1, once=True, unchecked=True))}


def test_a_file_without_markers_is_refused(tmp_path):
    (tmp_path / "README.md").touch()
    with pytest.raises(UserError, match="has no lines <!-- bench mesh.tp=2 -->"):
        command.check(options(write=tmp_path / "README.md"))


@pytest.mark.full
def test_ours_and_stock_compute_the_same_on_two_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    arguments = ["bench", "--ranks=2", "--rounds=2", "--steps=1", "--contenders=ours,eager", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [*arguments, *TINY, "mesh.dp_shard=2"])
    command.main()
    rounds = json.loads((tmp_path / "bench.json").read_text())
    assert [len(rounds[name]) for name in ("ours", "eager")] == [2, 2]
    for result in itertools.chain(*rounds.values()):
        assert "error" not in result and result["off"] < 1e-5 and result["sent_bytes"] > 0 and result["peak_bytes"] > 0
    assert "this trainer" in (tmp_path / "bench.md").read_text() and (tmp_path / "bench.html").exists()


@pytest.mark.full
@pytest.mark.parametrize("more", [[], ["model.tied=true", "passes.cast.param_dtype=bfloat16"]])
def test_a_whole_model_is_compiled_by_stock_as_by_us(more, tmp_path):
    args = options(ranks=1, rounds=1, steps=1, contenders="ours,whole", overrides=[*TINY, *more])
    found = command.measure(args)
    assert all("error" not in rounds[-1] for rounds in found.values()), found


@pytest.mark.full
def test_a_contender_that_cannot_run_says_why(tmp_path):
    args = options(ranks=1, steps=1, overrides=[*TINY, "+optim.groups.mine.names=[norm.weight]"])
    assert "groups of the default job alone" in command.Job("eager", 1, args, tmp_path).all()[0]["error"]


def jobs_of(folder):
    """Return the command lines of processes that name a benchmark's folder."""
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [command for command in commands if str(folder).encode() in command]


@pytest.mark.full
def test_a_contender_that_hangs_is_ended_with_all_its_ranks(tmp_path):
    job = command.Job("eager", 2, options(ranks=2, steps=10**9, overrides=[*TINY, "mesh.dp_shard=2"]), tmp_path, rounds=1)
    assert job.first()["losses"]
    job.timeout_s = 1
    assert job.round(0) == {"error": "no result after 1 s"}
    assert not jobs_of(tmp_path)


def test_a_cold_start_that_hangs_is_ended_too(tmp_path):
    args = options(ranks=2, steps=1, timeout_s=1, overrides=[*TINY, "mesh.dp_shard=2"])
    assert command.Job("eager", 2, args, tmp_path, rounds=0).all() == [{"error": "no result after 1 s"}]
    assert not jobs_of(tmp_path)


@pytest.mark.parametrize("experts", [None, ExpertsConfig(count=4, top_k=2, width=16, balance_loss=0.1)], ids=["dense", "experts"])
def test_the_stock_model_computes_what_ours_does(experts):
    cfg = ModelConfig(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=64, experts=experts)
    ours, stock = Llama(cfg), StockLlama(cfg)
    stock.load_state_dict(ours.state_dict())
    tokens, documents = torch.randint(64, (2, 16)), torch.zeros(2, 16, dtype=torch.int64)
    documents[:, 12:] = PADDING_DOCUMENT
    given = tokens, torch.arange(16).expand(2, -1), documents
    torch.testing.assert_close(stock(*given), ours(*given), rtol=0, atol=1e-6)
