"""A GPU session: options compose, failures and timeouts are recorded, a second call continues, the page is written."""

from __future__ import annotations

import json

import pytest

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.doctor.probes import PROBES
from tools.bench.job import composed
from tools.gpu_day import bodies, command, losses, page, parts, profile, ranks
from tools.gpu_day.command import main
from tools.gpu_day.parts import PARTS, Part
from tools.gpu_day.results import FILE, Result, Session, read
from tools.pages import markers

MEASURED = [part for part in PARTS if part.job]


@pytest.mark.parametrize("part", MEASURED, ids=lambda part: part.name)
def test_options_of_measured_jobs_compose(part):
    cfg = to_config(compose(part.options("cuda")))
    assert cfg.train.seq_len >= 4096
    if part.small is not None:
        assert composed(part.options("cpu"), 1).model.dim == 128


@pytest.mark.parametrize("part", [part for part in PARTS if part.is_for("none")], ids=lambda part: part.name)
def test_jobs_of_an_absent_gpu_compose_and_all_but_offloading_are_predicted(part, tmp_path):
    commands = [found for _, found in part.ahead(tmp_path)]
    for _, *words in commands:
        cfg = build(Config, compose([word for word in words if "=" in word]))
        validate(resolve_auto(cfg, on_gpu=True), 1)
        assert cfg.cluster.name == "h100"
    predicted = any("run.dry=true" in words for words in commands)
    assert predicted == (part.name.startswith(("dense", "experts", "anchor")) and "offloading" not in part.name)


def test_every_feature_of_several_ranks_is_tried_on_one_gpu():
    names = {part.name.partition(" on two ranks")[0] for part in PARTS if part.command[:1] == ("tools.gpu_day.ranks",)}
    assert names == {probe.name for probe in PROBES if probe.mesh}


@pytest.mark.full
def test_a_job_is_compiled_and_predicted_without_a_gpu(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--device", "none", "--only", "dense, CUDA*"]) == 0
    assert capsys.readouterr().out.count("exit 0") == 2


def leave(out, part, rounds):
    folder = part.bench(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(rounds))


@pytest.mark.parametrize(("rounds", "code"), [({"ours": [{"error": "why"}]}, 1), ({"ours": [{}]}, 0)])
def test_a_job_fails_if_our_contender_does(rounds, code, tmp_path, monkeypatch):
    """`tools.bench` exits with 0 whatever contenders do."""
    part = Part("job", 1, (), (), ("train.steps=1",))
    monkeypatch.setattr(command, "run", lambda *args: (leave(tmp_path, part, rounds), Result("job", "", 0))[1])
    monkeypatch.setattr(command, "PARTS", (part,))
    assert main(["--out", str(tmp_path)]) == code


SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"


def test_what_fails_or_takes_too_long_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "STACKS_S", 1)
    some = (
        Part("too long", 0.02, ("timeit", "-n", "1", "-r", "1", SLEEPS), (), alone=False),
        Part("fails", 1, ("json.tool", "nowhere"), (), alone=False),
        Part("for GPUs only", 1, ("this", "never"), None),
        Part("well", 1, ("platform",), ()),
    )
    monkeypatch.setattr(command, "PARTS", some)
    assert main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    results = read(tmp_path / FILE).results
    assert {name: result.code for name, result in results.items()} == {"too long": 124, "fails": 2, "well": 0}
    assert "begun" in results["too long"].output and "No such file" in results["fails"].output
    assert "Fatal Python error: Aborted" in results["too long"].output  # its stack: where it hangs
    assert "1 of 3 parts done" in capsys.readouterr().out

    ran = []
    monkeypatch.setattr(command, "run", lambda name, *args: (ran.append(name), Result(name, "", 0))[1])
    again = tmp_path / "again"
    assert main(["--out", str(again), "--device", "cpu", "--again", str(tmp_path / FILE)]) == 0
    assert sorted(ran) == ["fails", "too long"]


def test_no_part_begins_after_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PARTS", (Part("well", 1, ("platform",), ()),))
    assert main(["--out", str(tmp_path), "--minutes", "0"]) == 1
    assert read(tmp_path / FILE).results["well"].code is None


def test_the_list_says_when_parts_begin(capsys):
    assert main(["--list", "--minutes", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PARTS) and "from minute 0" in lines[0] and "not reached" in lines[-1]
    first = next(line for line in lines if line.startswith("dense, 8B"))
    assert "from minute 3" in first and "tools.bench" in first


def test_the_page_has_results_speeds_next_to_predictions_and_outputs(tmp_path, monkeypatch):
    part = next(part for part in PARTS if part.name.startswith("dense, 8B"))
    fast = [{"tokens_per_s": speed, "peak_bytes": 2**31, "cold_s": 9.0} for speed in (10.0, 30.0, 20.0)]
    rounds = {"ours": fast, "whole": [{"tokens_per_s": 10.0, "peak_bytes": 2**32, "cold_s": 8.0}]}
    session = Session({"GPUs": "1 x A"}, "2026-11-26")
    for result in (Result(part.name, "tools.bench", 0, 9.0, "", rounds), Result("doctor", "d", 124, 150.0, "a stack")):
        session.add(result, tmp_path)
    monkeypatch.setattr(page, "prediction", lambda *_: {"tokens_per_s_per_gpu": 40.0, "mfu": 0.5, "peak_mem_bytes": 2**30})
    path = tmp_path / "gpu.md"
    begin, end = markers(page.GENERATED)
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    page.write([read(tmp_path / FILE)], path)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| dense, 8B in 4 layers | 20 | 10 | 2.00 | 40 | 25.0 | 2.0 | 4.0 | 1.0 | 9 | 8 |" in text
    assert "| doctor | **out of time** | 150 |" in text and "2026-11-26: GPUs 1 x A." in text
    path.write_text(cut := f"before\n{begin}\nafter\n")
    with pytest.raises(ValueError, match="has no lines"):
        page.write([read(tmp_path / FILE)], path)
    assert path.read_text() == cut


def test_two_processes_share_a_device_as_ranks_of_two_machines(capfd):
    """Each is the first rank of its machine, and NCCL takes it for another host."""
    names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NCCL_HOSTID'"
    line = f"import os; os.write(1, ' '.join(os.environ[n] for n in ({names})).encode() + bytes([10]))"  # all at once
    assert ranks.main(["2", "timeit", "-n", "1", "-r", "1", line]) == 0
    said = capfd.readouterr().out
    assert "0 0 2 rank0" in said and "1 0 2 rank1" in said
    assert ranks.main(["2", "json.tool", "nowhere"]) == 2


def test_losses_that_differ_are_wrong(tmp_path, monkeypatch, capsys):
    curves = {"0": [2.0, 1.0], "1": [2.0, 1.001]}
    monkeypatch.setattr(losses, "JOBS", (losses.Job("CPU", (), 0.0, on_cpu=True), losses.Job("GPU", (), 1e-4)))

    class Ended:
        def wait(self):
            return 0

    monkeypatch.setattr(losses, "start", lambda job, folder: Ended())
    monkeypatch.setattr(losses, "losses_of", lambda folder: curves[folder.name])
    assert losses.main(["--out", str(tmp_path)]) == 1
    assert "WRONG  GPU: off by 1.0e-03" in capsys.readouterr().out
    curves["1"] = [2.0, 1.00001]
    assert losses.main(["--out", str(tmp_path)]) == 0


@pytest.mark.full
def test_compiled_bodies_agree_with_their_operators(monkeypatch, capsys):
    monkeypatch.setattr(bodies, "PROBES", [probe for probe in PROBES if probe.name == "compiled"])
    assert bodies.main([]) == 0
    monkeypatch.setattr(bodies, "ALLOWED", -1.0)
    assert bodies.main([]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_trace_is_summed_by_kernel(tmp_path):
    import gzip

    events = [{"cat": "kernel", "name": "mm", "dur": 30.0}, {"cat": "kernel", "name": "mm", "dur": 30.0}, {"cat": "cpu_op", "name": "x"}]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    head, line = profile.longest(tmp_path / "trace.json.gz")
    assert "kernels take 20 us a step" in head and "mm" in line


def test_the_profiled_job_composes():
    validate(resolve_auto(to_config(compose([*parts.PROFILED, *profile.SETTINGS])), on_gpu=True), 1)
