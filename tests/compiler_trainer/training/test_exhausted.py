"""Failed allocations are distinguished from other errors, and get advice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from compiler_trainer.cli.outcome import trained as trained_here
from compiler_trainer.config.errors import RepeatingError
from compiler_trainer.config.schema import Config
from compiler_trainer.training.failures import failure_of
from passes.ir import ir

ROOT = Path(__file__).resolve().parents[3]
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """Return an error as raised, with a cause."""
    try:
        raise error from cause
    except Exception as found:
        return found


@pytest.mark.parametrize(("error", "asked_bytes"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ..."), 3 * 2**29),
    (RuntimeError(CPU), 4096),
    (MemoryError(), 0),
    (OSError(12, "Cannot allocate memory"), 0),
])
def test_errors_of_allocators_are_told_with_what_was_asked_for(error, asked_bytes):
    result = failure_of(raised(error))
    assert result.asked_bytes == asked_bytes and result.used_bytes > 0
    assert result.where.startswith("test_exhausted.py:") and "raise error from cause" in result.where


def test_the_node_that_failed_is_named():
    node = fx.Graph().placeholder("mm_3")
    result = failure_of(raised(ir.CompileError("eager", node, "mm"), RuntimeError(CPU)))
    assert (result.where, result.asked_bytes) == ("%mm_3", 4096)


@pytest.mark.parametrize("error", [RuntimeError("a shape is wrong"), OSError(28, "No space left"), ValueError("out of memory")])
def test_other_errors_are_none_of_these(error):
    assert failure_of(raised(error)) is None


def test_memory_that_does_not_suffice_for_a_report_is_said_to_be_exhausted_all_the_same(monkeypatch, capsys):
    """CUDA may be out of memory before it has started; the report then needs what there is not."""
    started = torch.AcceleratorError("CUDA error: out of memory\nFor debugging consider ...")
    for name in ("compiler_trainer.training.trainer.train", "compiler_trainer.planning.out_of_memory.describe"):
        monkeypatch.setattr(name, lambda *args: (_ for _ in ()).throw(started))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RepeatingError):
        trained_here(Config(), ())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rank 3 is out of memory"
    assert lines[1].startswith("the allocation was in test_exhausted.py:")
    assert lines[1].endswith("; its report failed, too: CUDA error: out of memory")


LIMIT = """
import resource
import compiler_trainer as ct


class Limit(ct.Callback):
    def on_start(self, run):
        status = open("/proc/self/status").read().splitlines()
        size = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmSize"))
        resource.setrlimit(resource.RLIMIT_AS, (size + (250 << 20), resource.RLIM_INFINITY))
"""
JOB = (
    "model.n_layers=2", "model.dim=64", "train.seq_len=256", "train.global_batch_size=64", "train.steps=1", "data=synthetic",
    "lr_schedule=constant", "checkpoint.interval=null", "eval.interval=null", "lower.backend=eager", "passes.remat.policy=none",
    "train.callbacks=[{_target_:limit.Limit}]",
)  # fmt: skip


def trained(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Take a step in a process whose memory is limited after compilation."""
    (folder / "limit.py").write_text(LIMIT)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "compiler_trainer", *JOB, *overrides]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.full
def test_a_step_that_memory_does_not_hold_is_answered_and_what_is_said_to_fit_does(tmp_path):
    failed = trained(tmp_path, "run.dir=failed")
    output = failed.stderr.splitlines()
    assert failed.returncode == 2 and "Traceback" not in failed.stderr and len(output) < 20
    assert output[0] == "rank 0 is out of memory" and output[-1].startswith("error: out of memory")
    assert re.match(r"measured: [\d.]+ MiB in use in %\w+, [\d.]+ MiB more requested; [\d.]+ MiB is free", output[1])
    assert re.match(r"predicted: a peak of [\d.]+ MiB at %\w+ \(\w+\.py:\d+\) of step; the largest tensors there:", output[2])
    assert any("activations of layers.*" in line for line in output)
    fits = output[output.index("settings that fit, fastest first by prediction:") + 1 : -1]
    assert 1 <= len(fits) <= 3
    done = trained(tmp_path, "run.dir=fits", *fits[0].partition(" (")[0].split())
    assert done.returncode == 0, done.stderr


def test_errors_that_come_from_each_other_are_told_once():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    assert failure_of(first) is None
