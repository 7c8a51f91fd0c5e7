"""An interrupted run resumes to the same bits; changed options are refused; damaged checkpoints are skipped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from short_runs import FakeStep, metrics, options, resuming, timeless

from compiler_trainer import checkpoint
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig, ExitCodes, OptimConfig, RunConfig, TrainConfig
from compiler_trainer.training import checkpoints, stop, trainer

KILLED = 3  # the step that is interrupted


@pytest.fixture
def fake(monkeypatch):
    """Train around `FakeStep`."""
    monkeypatch.setattr(trainer, "compile_step", FakeStep)


@pytest.fixture
def whole(fake, tmp_path):
    """Return an undisturbed run, with checkpoints after steps 2, 4 and 6."""
    cfg = options(tmp_path / "whole")
    trainer.train(cfg)
    return cfg


def during(monkeypatch, number, action):
    """Call a function during a step."""
    normal, seen = FakeStep.__call__, []

    def act(self, batch, lr):
        seen.append(lr)
        if len(seen) == number:
            action()
        return normal(self, batch, lr)

    monkeypatch.setattr(FakeStep, "__call__", act)


def folders(run):
    return sorted(p.name for p in Path(run, "checkpoints").glob("step_*"))


def broken(path, name="rank_00000.safetensors"):
    """Flip the last bit of a checkpoint's file."""
    content = bytearray((path / name).read_bytes())
    content[-3] ^= 1
    (path / name).write_bytes(content)


# Early ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_after_the_step_with_a_checkpoint_and_it_goes_on_to_the_same_bits(number, whole, tmp_path, monkeypatch, capsys):
    cfg = options(tmp_path / "cut")
    with monkeypatch.context() as patch:
        during(patch, KILLED, lambda: os.kill(os.getpid(), number))
        with pytest.raises(SystemExit) as ended:
            trainer.train(cfg)
    assert ended.value.code == 3
    message = f"stopped after step 3 of 6 because of {number.name}; resume with: compiler-trainer resume {tmp_path / 'cut'}"
    assert capsys.readouterr().out.splitlines()[-1] == message
    assert folders(cfg.run.dir) == ["step_00000002", "step_00000003"]
    trainer.train(resuming(cfg, "latest"))
    assert timeless(metrics(cfg.run.dir)) == timeless(metrics(whole.run.dir))


@pytest.mark.parametrize(("interval", "when"), [(2, "every 2 steps and after the last"), (6, "after the last step"), (100, "after the last step")])
@pytest.mark.sample(2)
def test_it_is_told_when_checkpoints_are_taken(fake, tmp_path, capsys, interval, when):
    cfg = options(tmp_path / "run")
    trainer.train(replace(cfg, checkpoint=replace(cfg.checkpoint, interval=interval)))
    assert f"\ncheckpoints {when}, through " in capsys.readouterr().out


def test_the_exit_code_and_the_signals_are_options(fake, tmp_path, monkeypatch):
    run = RunConfig(str(tmp_path / "run"), stop_signals=("USR2",), exit_codes=ExitCodes(stopped=85))
    before = signal.getsignal(signal.SIGTERM)
    during(monkeypatch, KILLED, lambda: signal.getsignal(signal.SIGTERM) is before and os.kill(os.getpid(), signal.SIGUSR2))
    with pytest.raises(SystemExit) as ended:
        trainer.train(options(tmp_path / "run", run=run))
    assert ended.value.code == 85


def test_a_signal_in_the_last_step_ends_a_run_that_is_done(fake, tmp_path, monkeypatch):
    during(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer.train(options(tmp_path / "run"))


def test_without_checkpoints_nothing_is_said_to_be_saved(fake, tmp_path, monkeypatch, capsys):
    cfg = options(tmp_path / "run")
    during(monkeypatch, KILLED, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.train(replace(cfg, checkpoint=replace(cfg.checkpoint, interval=None)))
    assert capsys.readouterr().out.splitlines()[-1] == "stopped after step 3 of 6 because of SIGTERM; nothing was saved"


TWICE = """
import os, signal, threading, time, torch
from compiler_trainer.config.schema import RunConfig
from compiler_trainer.training import stop
stop.REPEATED_S = {repeated_s}
with stop.Stop(RunConfig(), 0.0) as watch:
    os.kill(os.getpid(), signal.SIGTERM)
    print(f"{{watch.is_last_step()}} {{watch}}\\n", end="", flush=True)
    time.sleep(0.2)
    matrix = torch.zeros({size}, {size})
    threading.Timer(0.5, os.kill, (os.getpid(), signal.{second})).start()
    matrix @ matrix @ matrix
    print("went on")
"""


FIRST = "SIGTERM: the run ends after the current step; a second signal ends it at once"


def twice(second, repeated_s=60, size=6000):
    code = TWICE.format(second=second, repeated_s=repeated_s, size=size)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout, done.stderr


def test_the_second_signal_ends_the_process_in_the_middle_of_a_kernel():
    message = "error: rank 0 ended at once by a second signal, SIGTERM; nothing was saved after the last checkpoint\n"
    code, out, err = twice("SIGTERM", repeated_s=0.1)
    assert (code, sorted(out.splitlines()), err) == (128 + signal.SIGTERM, [FIRST, "True SIGTERM"], message)


@pytest.mark.parametrize(("second", "repeated_s"), [("SIGTERM", 60), ("SIGINT", 0.1)])
def test_a_signal_that_is_repeated_at_once_is_one_and_so_is_another_as_lsf_sends(second, repeated_s):
    code, out, err = twice(second, repeated_s, size=2500)
    assert (code, sorted(out.splitlines()), err) == (0, [FIRST, "True SIGTERM", "went on"], "")


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "120", "-m", "compiler_trainer"]


@pytest.mark.full
def test_a_signal_to_torchrun_and_its_ranks_alike_saves(tmp_path):
    job = ("model=llama_debug model.dim=64 model.n_layers=1 model.n_heads=4 model.n_kv_heads=2 model.ffn_dim=96 data=synthetic data.documents=60 "
           "train.seq_len=64 train.global_batch_size=256 eval.interval=null lower.backend=eager run.dump_graphs=false mesh.dp_shard=2 "
           f"train.steps=100000 checkpoint.interval=100000 run.dir={tmp_path}/run").split()
    agent = subprocess.Popen([sys.executable, *TORCHRUN, *job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics(tmp_path / "run"):
        time.sleep(0.1)
        assert agent.poll() is None
    ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, ranks)):  # as a scheduler does
        os.kill(pid, signal.SIGTERM)
    output = agent.communicate(timeout=120)[0]
    (saved,) = folders(tmp_path / "run")
    assert f"stopped after step {int(saved.removeprefix('step_'))} of 100000 because of SIGTERM; resume with" in output


AFTER = """
import os, signal, time
from compiler_trainer.config.schema import RunConfig
from compiler_trainer.training import stop
stop.REPEATED_S = 0.5
with stop.Stop(RunConfig(), 0.0) as watch:
    os.kill(os.getpid(), signal.SIGTERM)
    watch.is_last_step()
os.kill(os.getpid(), signal.SIGTERM)
print("passed over\\n", end="", flush=True)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
"""


def test_a_signal_that_is_repeated_while_the_process_ends_does_not_change_its_code():
    done = subprocess.run([sys.executable, "-c", AFTER], capture_output=True, text=True)
    assert sorted(filter(None, done.stdout.splitlines())) == [FIRST, "passed over"] and done.returncode == -signal.SIGTERM


@pytest.fixture
def plain_interrupts():
    """Restore Python's SIGINT handler; ranks launched earlier in this process may have left other handlers."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_when_it_is_over_signals_do_what_they_did_before(plain_interrupts):
    signals = stop.signals_of(RunConfig())
    before = [signal.getsignal(each) for each in signals]
    with stop.Stop(RunConfig(), 0.0) as watch:
        assert not watch.is_last_step()
    assert [signal.getsignal(each) for each in signals] == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_time_limit_ends_after_the_step_in_which_it_passes(fake, tmp_path, monkeypatch, capsys):
    clock = [1000.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: clock[0])
    cfg = options(tmp_path / "run", run=RunConfig(str(tmp_path / "run"), time_limit="1h1m"))
    during(monkeypatch, KILLED, lambda: clock.__setitem__(0, 1000.0 + 3660))
    with pytest.raises(SystemExit):
        trainer.train(cfg)
    assert "stopped after step 3 of 6 because of run.time_limit; resume with" in capsys.readouterr().out
    assert len(metrics(cfg.run.dir)) == 3


@pytest.mark.parametrize(("local", "nodes", "says"), [
    (None, None, "compiler-trainer resume 'my run'"),
    ("2", "1", "torchrun --nproc-per-node 2 -m compiler_trainer resume 'my run'"),
    ("8", "4", "torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc-per-node 8 -m compiler_trainer resume 'my run'"),
])
def test_how_a_run_goes_on_is_said_for_its_ranks(local, nodes, says, monkeypatch):
    for name, value in (("LOCAL_WORLD_SIZE", local), ("GROUP_WORLD_SIZE", nodes)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert stop.how_to_go_on("my run") == says


@pytest.mark.parametrize(("nodes", "says"), [("1", "-n 16"), ("2", "-n 8 --nnodes 2 --node-rank N --master-addr HOST")])
def test_how_a_run_of_launch_goes_on(nodes, says, monkeypatch):
    variables = {"LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": nodes, "COMPILER_TRAINER_MEMBER": "3", "COMPILER_TRAINER_MEMBERS": "16"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert stop.how_to_go_on("my run") == f"compiler-trainer launch {says} resume 'my run'"


# Resuming by name


def test_auto_starts_and_starts_again_and_goes_on(whole, tmp_path, monkeypatch):
    cfg = resuming(options(tmp_path / "run"), "auto")
    with monkeypatch.context() as patch:
        during(patch, 2, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train(cfg)
    assert len(metrics(cfg.run.dir)) == 1 and not folders(cfg.run.dir)
    with monkeypatch.context() as patch:
        during(patch, 4, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train(cfg)
    assert folders(cfg.run.dir) == ["step_00000002"]
    trainer.train(cfg)
    assert timeless(metrics(cfg.run.dir)) == timeless(metrics(whole.run.dir))


@pytest.mark.parametrize("name", ["index.json", "rank_00000.safetensors"])
@pytest.mark.parametrize("resume", ["latest", "auto"])
@pytest.mark.sample(2)
def test_damage_is_passed_over_and_set_aside(resume, name, whole, tmp_path, capsys):
    shutil.rmtree(Path(whole.run.dir, "checkpoints/step_00000006"))
    damaged = Path(whole.run.dir, "checkpoints/step_00000004")
    broken(damaged, name)
    before = timeless(metrics(whole.run.dir))
    capsys.readouterr()
    trainer.train(resuming(whole, resume))
    assert timeless(metrics(whole.run.dir)) == before
    out, output = capsys.readouterr()
    assert f"resuming after step 2, from {Path(whole.run.dir, 'checkpoints/step_00000002')}\n" in out
    assert output.startswith(f"{damaged} is damaged and passed over: {damaged / name}") and output.count("\n") == 1
    assert folders(whole.run.dir) == ["step_00000002", "step_00000004", "step_00000004.damaged", "step_00000006"]
    checkpoint.check(damaged)


def test_where_all_are_damaged_nothing_starts(whole):
    shutil.rmtree(Path(whole.run.dir, "checkpoints/step_00000006"))
    broken(Path(whole.run.dir, "checkpoints/step_00000004"))
    broken(Path(whole.run.dir, "checkpoints/step_00000002"), "index.json")
    with pytest.raises(UserError, match="holds 2 checkpoints, all of them damaged"):
        trainer.train(resuming(whole, "auto"))
    assert folders(whole.run.dir) == ["step_00000002", "step_00000004"]


def test_a_damaged_one_that_is_named_is_refused(whole, tmp_path):
    path = Path(whole.run.dir, "checkpoints/step_00000004")
    broken(path)
    with pytest.raises(checkpoint.Damaged, match="model.w@0 was changed"):
        trainer.train(resuming(options(tmp_path / "other"), path))
    assert not (tmp_path / "other").exists()


def test_what_is_no_checkpoint_but_is_called_so_is_passed_over_and_set_aside(whole, capsys):
    odd = Path(whole.run.dir, "checkpoints/step_00000009")
    os.mkfifo(odd)
    trainer.train(resuming(replace(whole, train=replace(whole.train, steps=8)), "auto"))
    assert f"{odd} is damaged and passed over: {odd}: is not a folder\n" in capsys.readouterr().err
    assert "step_00000008" in folders(whole.run.dir) and "step_00000009.damaged" in folders(whole.run.dir)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("gone")])
@pytest.mark.parametrize("name", ["config.yaml", "report.json", "metrics.jsonl", "graphs", ""])
@pytest.mark.sample(2)
def test_what_is_in_the_place_of_a_runs_file_is_named_before_compiling(make, name, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "compile_step", lambda *args, **kwargs: pytest.fail("compiled"))
    cfg = options(tmp_path / "run")
    if name:
        Path(cfg.run.dir).mkdir()
    make(Path(cfg.run.dir, name))
    with pytest.raises(UserError, match=f"{name}.* (is not a|cannot be written: Too many).*; (move it away|choose another)"):
        trainer.train(resuming(cfg, "auto"))
    assert len([*tmp_path.rglob("*")]) == (2 if name else 1)


# Options that may change


def resumed_with(whole, **groups):
    """Resume after step 4 with some options changed, of which those in `allow` may differ."""
    shutil.rmtree(Path(whole.run.dir, "checkpoints/step_00000006"), ignore_errors=True)
    allow = groups.pop("allow", ())
    return replace(whole, checkpoint=replace(whole.checkpoint, resume="latest", allow=allow), **groups)


def changed(group, **options):
    return lambda cfg: {group: replace(getattr(cfg, group), **options)}


MEANT = {
    "model.norm_eps": changed("model", norm_eps=1e-3),
    "model.n_heads": changed("model", n_heads=4),
    "model.rope_theta": changed("model", rope_theta=5e5),
    "model.attention": changed("model", attention="documents"),
    "optim.betas": changed("optim", betas=(0.5, 0.9)),
    "optim.name": changed("optim", name="sgd"),
    "optim.max_norm": changed("optim", max_norm=None),
    "train.seed": changed("train", seed=1),
    "data.packing": changed("data", packing="fit"),
}


@pytest.mark.parametrize("name", MEANT)
@pytest.mark.sample(2)
def test_what_changes_the_meaning_is_refused_by_name_and_allowed_by_name(name, whole):
    new = MEANT[name](whole)
    with pytest.raises(UserError, match=rf"^{name}: is .* here and .* in .*step_00000004; .*checkpoint.allow=\[{name}\]$"):
        trainer.train(resumed_with(whole, **new))
    trainer.train(resumed_with(whole, allow=(name,), **new))


FREE = {
    "train.steps": changed("train", steps=5),
    "optim.lr": changed("optim", lr=0.5),
    "lr_schedule": changed("lr_schedule", warmup_steps=0),
    "train.microbatches": changed("train", microbatches=2),
    "eval.interval": changed("eval", interval=1),
    "model.name": changed("model", name="mine"),
}


@pytest.mark.parametrize("name", FREE)
@pytest.mark.sample(2)
def test_what_leaves_the_meaning_may_change(name, whole):
    trainer.train(resumed_with(whole, **FREE[name](whole)))


def test_several_differences_are_told_together(whole):
    new = {"train": TrainConfig(steps=6, seq_len=16, global_batch_size=4, seed=3), "optim": OptimConfig(name="sgd", eps=1.0)}
    with pytest.raises(UserError) as caught:
        trainer.train(resumed_with(whole, **new))
    where = Path(whole.run.dir, "checkpoints/step_00000004")
    assert str(caught.value) == (
        f"train.seed: is 3 here and 0 in {where}; optim.name is sgd here and adamw in {where}; optim.eps is 1.0 here "
        f"and 1e-08 in {where}; and 1 more; restore the old value, or resume with "
        "checkpoint.allow=[train.seed,optim.name,optim.eps,optim.max_norm]"
    )
    with pytest.raises(UserError, match="^optim.name: .*optim.eps"):
        trainer.train(resumed_with(whole, allow=("train",), **new))


def test_other_data_is_refused_unless_allowed_and_then_read_from_its_beginning(whole):
    new = {"data": DataConfig(name="synthetic", documents=41)}
    with pytest.raises(UserError, match="^data"):
        trainer.train(resumed_with(whole, **new))
    trainer.train(resumed_with(whole, allow=("data",), **new))
    stored = checkpoint.opened(Path(whole.run.dir, "checkpoints/step_00000006"))
    assert stored.index.data["taken"] == [2 * 4]


def test_a_name_that_allows_nothing_is_refused(whole):
    with pytest.raises(UserError, match="^checkpoint.allow: model.nrom_eps is not an option of this run"):
        trainer.train(resumed_with(whole, allow=("model.nrom_eps",)))


@pytest.mark.parametrize(("state", "says"), [
    (None, "KeyError"),
    ("x", "taken is not a list of 1"),
    ([], "taken is not a list of 1"),
    ([4, 4], "taken is not a list of 1"),
    (["4"], "taken must be integer numbers"),
    ([1.5], "taken must be integer numbers"),
    ([-1], "taken must be integer numbers"),
    ([2**63], "taken must be integer numbers"),
    ([[1]], "taken must be integer numbers"),
])
@pytest.mark.sample(2)
def test_a_state_that_no_loader_reads_is_refused(state, says, whole):
    path = Path(whole.run.dir, "checkpoints/step_00000004")
    contents = json.loads((path / "index.json").read_bytes())["checkpoint"]
    contents["data"] = {"index": 8} if state is None else contents["data"] | {"taken": state}
    text = json.dumps(contents).encode()
    index = checkpoint.index
    (path / "index.json").write_bytes(index.ENVELOPE % (index.sha256(text).encode(), text))
    with pytest.raises(UserError, match=f"step_00000004: does not contain the data's position: .*{says}"):
        trainer.train(resumed_with(whole))


# Failures to write


@pytest.mark.parametrize("option", ["run.dir", "checkpoint.dir"])
def test_a_folder_that_cannot_be_written_is_refused_before_compiling(option, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "compile_step", lambda *args, **kwargs: pytest.fail("compiled"))
    (tmp_path / "file").touch()
    cfg = options(tmp_path / "file/run" if option == "run.dir" else tmp_path / "run")
    if option == "checkpoint.dir":
        cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, dir=str(tmp_path / "file/checkpoints")))
    with pytest.raises(UserError, match=f"^{option}: .*file/.* cannot be written: Not a directory; choose another"):
        trainer.train(cfg)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_save_that_fails_does_not_end_training_unless_it_is_the_last(whole, tmp_path, monkeypatch, capsys):
    save = checkpoints.Saver.write

    def fails_at(*numbers):
        def write(self, path, state):
            if state.step in numbers:
                raise OSError(30, "Read-only file system")
            save(self, path, state)
        return write

    monkeypatch.setattr(checkpoints.Saver, "write", fails_at(4))
    cfg = options(tmp_path / "middle")
    trainer.train(cfg)
    assert timeless(metrics(cfg.run.dir)) == timeless(metrics(whole.run.dir))
    assert folders(cfg.run.dir) == ["step_00000002", "step_00000006"]
    message = f"cannot save {cfg.run.dir}/checkpoints/step_00000004: [Errno 30] Read-only file system"
    assert message in capsys.readouterr().out.splitlines()

    monkeypatch.setattr(checkpoints.Saver, "write", fails_at(6))
    with pytest.raises(checkpoint.SaveError, match="step_00000006: .*Read-only file system"):
        trainer.train(options(tmp_path / "last"))
    assert folders(tmp_path / "last") == ["step_00000002", "step_00000004"]
