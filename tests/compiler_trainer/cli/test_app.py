"""The command line up to the trainer, which is replaced: composed options, refusals, leftover files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiler_trainer.cli import app, ends
from compiler_trainer.cli.command import main
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF
from compiler_trainer.config.options import seconds
from compiler_trainer.config.schema import OPS, Config, GroupConfig, LrScheduleConfig, OptimConfig, TrainConfig
from compiler_trainer.sweep import point

FILES = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]
CHOICES = [(group, name) for group, name in FILES if group != "recipe"]
AS_MODULE = ["-m", "compiler_trainer"]
GROUPS = [group.name for group in dataclasses.fields(Config)]


class Trainer:
    """A replacement of the trainer that keeps the configs it is called with."""

    def __init__(self):
        self.configs: list[Config] = []
        self.error: Exception | None = None

    def train(self, cfg: Config) -> float:
        if self.error:
            raise self.error
        self.configs.append(cfg)
        return 1.0


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    trainer = Trainer()
    monkeypatch.setattr(app, "outcome", trainer.train)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    return trainer


NO_DECAY = {"no_decay": GroupConfig(kinds=("vector", "other"), weight_decay=0.0)}


@pytest.fixture
def command(monkeypatch, trainer):
    """Return a function that runs the command line and returns the configs that reached the trainer."""

    def run(*arguments: str) -> list[Config]:
        monkeypatch.setattr(sys, "argv", ["compiler-trainer", *arguments])
        main()
        return trainer.configs

    return run


def test_the_default_job_is_the_defaults_and_three_recipes(command):
    (cfg,) = command()
    recipes = {
        "optim": OptimConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0, groups=NO_DECAY),
        "lr_schedule": LrScheduleConfig("cosine", warmup_ratio=0.1, min_ratio=0.1),
        "mesh": dataclasses.replace(Config().mesh, dp_shard=1),
        "train": TrainConfig(steps=400, global_batch_size=4),
        "run": cfg.run,
    }
    assert cfg == dataclasses.replace(Config(), **recipes)


DOCUMENTS = "model.attention=documents"
PAIRS = ("data=text", "data.files=[a]", "data.tokenizer=T", "data.chat=true", "data.pairs=true", DOCUMENTS)

OF_FOLDER = ("model=hf", "model.path=folder")
ROLLOUTS = (
    "data=prompts", "loss=grpo", "data.prompts=[a.jsonl]", "rewards=[my.right]", "data.eval_fraction=0", "eval.interval=null",
    "train.global_batch_size=8", DOCUMENTS,
)  # fmt: skip


@pytest.mark.parametrize(("group", "choice"), CHOICES)
@pytest.mark.sample(4)
def test_every_choice_trains_under_its_own_name(command, group, choice):
    needed = {
        "text": "data.files=[a.txt]",
        "mixture": "data.sources=[{files:[a.txt],weight:2},{files:[b.txt]}]",
        "hf_dataset": "data.path=folder",
        "tokens": "data.tokens=folder",
        "hf": "model.path=folder",
        **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "cpo", "kto"), PAIRS),
        **dict.fromkeys(("prompts", "grpo"), ROLLOUTS),
        "reward": (*OF_FOLDER, *PAIRS, "model.head=score"),
        "classify": (*OF_FOLDER, *PAIRS[:3], "model.head=score", "data.records=classes", "data.labels=[a,b]"),
        "embed": (*OF_FOLDER, *PAIRS[:3], "model.head=none", "data.records=passages"),
        "distill": (*OF_FOLDER, *PAIRS[:4], "loss.teacher=other"),
        "gkd": (*OF_FOLDER, "data=prompts", "data.prompts=[a.jsonl]", "loss.teacher=other", *ROLLOUTS[4:]),
        "custom": f"{group}._target_=my.Own",
    }
    further = needed.get(choice, ())
    own = f"{group}={choice}"
    (cfg,) = command(own, *(option for option in ([further] if isinstance(further, str) else further) if option != own))
    chosen = getattr(cfg, group)
    if choice == "cross_entropy":
        assert chosen == {}
    elif group == "model" and choice == "custom":
        assert chosen == {"_target_": "my.Own"}
    else:
        assert chosen.name == choice and (choice != "custom" or chosen._target_ == "my.Own")


def test_a_recipe_sets_several_groups_and_what_is_said_beside_it_counts(command):
    (cfg,) = command("recipe=llama3_8b", "data.tokenizer=TOK", "train.steps=9000", "optim.lr=1e-5")
    assert (cfg.model.name, cfg.train.seq_len, cfg.train.steps, cfg.optim.lr) == ("llama3_8b", 8192, 9000, 1e-5)
    assert cfg.passes.cast.param_dtype == "auto" and cfg.lr_schedule.warmup(9000) == 60


def test_every_folder_of_choices_is_a_group():
    assert {group for group, _ in CHOICES} <= set(GROUPS)


@pytest.mark.parametrize("steps", [1, 9, 400])
@pytest.mark.sample(2)
def test_warm_up_is_a_tenth_of_any_run(command, steps):
    (cfg,) = command(f"train.steps={steps}")
    assert cfg.lr_schedule.warmup_steps is None and cfg.lr_schedule.warmup(cfg.train.steps) == steps // 10


def test_a_plan_can_be_given_on_the_command_line(command):
    (cfg,) = command("passes.shard.plan={layers.0.wq:{tp:0}}")
    assert cfg.passes.shard.plan == {"layers.0.wq": {"tp": 0}}


TABLES = [
    ("passes.cast.ops={gelu:float32}", lambda c: c.passes.cast.ops, {**OPS, "gelu": "float32"}),
    ("passes.cast.modules={*norm*:float32}", lambda c: c.passes.cast.modules, {"*norm*": "float32"}),
    ("passes.remat.ops={all_gather:recompute}", lambda c: c.passes.remat.ops, {"all_gather": "recompute"}),
    ("passes.remat.ops.all_gather=recompute", lambda c: c.passes.remat.ops, {"all_gather": "recompute"}),
    ("passes.remat.modules={layers.3:save}", lambda c: c.passes.remat.modules, {"layers.3": "save"}),
]


@pytest.mark.parametrize(("argument", "table", "expected"), TABLES, ids=[t[0] for t in TABLES])
@pytest.mark.sample(2)
def test_a_table_takes_entries_on_the_command_line(command, argument, table, expected):
    (cfg,) = command(argument)
    assert table(cfg) == expected


@pytest.mark.parametrize(("text", "expected"), [("2h30m", 9000), ("45s", 45), ("90m", 5400), ("90", 90), ("0.5", 0.5)])
@pytest.mark.sample(2)
def test_a_time_is_hours_minutes_and_seconds_or_seconds(command, text, expected):
    (cfg,) = command(f"run.time_limit={text}")
    assert seconds(cfg.run.time_limit) == expected


@pytest.mark.full
def test_a_sweep_runs_each_point_in_its_own_subfolder(command, tmp_path):
    configs = command("-m", "passes.remat.policy=none,full", "optim.lr=0.1,0.2", "run.dir=sweep")
    assert [(c.passes.remat.policy, c.optim.lr) for c in configs] == [
        ("none", 0.1),
        ("none", 0.2),
        ("full", 0.1),
        ("full", 0.2),
    ]
    assert [c.run.dir for c in configs] == ["sweep/0", "sweep/1", "sweep/2", "sweep/3"]
    files = {"multirun.yaml", "sweep.parquet", "sweep.csv", "sweep.html"}
    assert {p.name for p in (tmp_path / "sweep").iterdir()} == {"0", "1", "2", "3"} | files


def test_a_sweep_over_names_with_umlauts(command):
    cfgs = command("-m", "data.files=[größe.txt],[ü.txt]", "data=text", "train.seq_len=16")
    assert [cfg.data.files for cfg in cfgs] == [("größe.txt",), ("ü.txt",)]


@pytest.mark.full
def test_a_sweep_over_a_range_and_over_files_of_choices(command):
    configs = command("-m", "train.seed=range(2)", "lr_schedule=glob(co*)", "run.dir=sweep")
    assert [(c.train.seed, c.lr_schedule.name) for c in configs] == [
        (0, "constant"),
        (0, "cosine"),
        (1, "constant"),
        (1, "cosine"),
    ]


@pytest.mark.full
def test_other_ranks_of_a_sweep_leave_its_folder_to_rank_0(command, monkeypatch, tmp_path):
    monkeypatch.setattr(app, "is_first", lambda: False)
    monkeypatch.setattr(app, "ranks", lambda: 2)
    monkeypatch.setattr(point, "rank", lambda: 1)
    configs = command("-m", "mesh.dp_replicate=1,2", "run.dir=sweep")
    assert [(c.run.dir, c.mesh.dp_replicate) for c in configs] == [("sweep/0", 1), ("sweep/1", 2)]
    assert not list(tmp_path.iterdir())


REFUSED = [
    (["modle=x"], "modle: no such option; did you mean 'model'?"),
    (["mesh.tpp=2"], "mesh.tpp: no such option; did you mean 'tp'?"),
    (["mesh.tp.x=2"], "mesh.tp.x: no such option; mesh.tp is a single value: write mesh.tp=VALUE"),
    (["mesh=2"], "mesh: 2 is not a group of options; it has pp, dp_replicate, dp_shard, cp, tp, ep; write mesh.OPTION=VALUE"),
    (["mesh.dp_shard=3"], "mesh: dp_shard=3 needs 3 ranks, not 1; change mesh.dp_shard or start 3 ranks"),
    (["mesh.ep=2"], "mesh.ep: size is 2, experts are spread over the ranks of other axes; there is one rank"),
    (["+optim.lrr=2"], "optim.lrr: no such option; did you mean 'lr'?"),
    (["optim=adamv"], "optim: 'adamv' is not one of adamw, adamw8bit, adamwfp8, custom, muon, sgd; did you mean 'adamw'?"),
    (["optim.lr=abc"], "optim.lr: 'abc' is not a number"),
    (["train.steps=abc"], "train.steps: abc must be a number of steps, or epochs or tokens as 3epochs or 20Btokens"),
    (["train.steps=${nowhere}"], "train.steps: Interpolation key 'nowhere' not found"),
    (["data=text", 'data.files=[""]', "data.document_separator=''"], "data.document_separator:  must be at least one character"),
    (["data.packing=best"], "data.packing: 'best' is not one of auto, cut, fit"),
    (["train.seq_len=-1"], "train.seq_len: -1 must be at least 2, a token and the one it predicts"),
    (["run.time_limit=soon"], "run.time_limit: soon is not a time; give seconds, or hours, minutes and seconds as 2h30m, 90m or 45s"),
    (["run.time_limit=0"], "run.time_limit: 0.0 is not a time; give seconds, or hours, minutes and seconds as 2h30m, 90m or 45s"),
    (["checkpoint.keep_best=1", "checkpoint.interval=75"], "checkpoint.keep_best: 1 needs an evaluation with every checkpoint; set eval.interval to a divisor of checkpoint.interval=75, or checkpoint.keep_best=0"),
    (["checkpoint.keep_best=1", "eval.interval=null"], "checkpoint.keep_best: 1 needs an evaluation with every checkpoint; set eval.interval to a divisor of checkpoint.interval=500, or checkpoint.keep_best=0"),
    (["run.dir=???"], "run.dir: must be given, as run.dir=VALUE; compiler-trainer --help run.dir describes it"),
    (["data=mixture", "data.sources=[{fils:[a.txt]}]"], "data.sources[0].fils: no such option; did you mean 'files'?"),
    (["-m", "optim.lr=1,abc"], "optim.lr: 'abc' is not a number"),
    (["-m", "optim=sgd,adamv"], "optim: 'adamv' is not one of adamw, adamw8bit, adamwfp8, custom, muon, sgd; did you mean 'adamw'?"),
    (["-m", "mesh.dp_shard=1,2"], "mesh: dp_shard=2 needs 2 ranks, not 1; change mesh.dp_shard or start 2 ranks"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
@pytest.mark.sample(4)
def test_bad_input_gets_one_line_and_exit_2_and_leaves_nothing(command, trainer, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        command(*arguments)
    assert exit.value.code == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")
    assert not trainer.configs and not list(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ["model=[", "model", "a b=3", "optim.lr=1,2", "~nowhere", "optim=null"])
def test_what_hydra_cannot_read_gets_one_line(command, capsys, argument):
    with pytest.raises(SystemExit) as exit:
        command(argument)
    out, err = capsys.readouterr()
    assert (exit.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")


def test_a_broken_file_of_choices_gets_one_line(command, tmp_path, capsys):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("name: [")
    with pytest.raises(SystemExit) as exit:
        command("--config-dir", str(tmp_path), "optim=mine")
    assert exit.value.code == 2
    assert "mine.yaml" in capsys.readouterr().err


def test_input_the_trainer_refuses_exits_with_2(command, trainer, capsys):
    trainer.error = UserError("data.files", "nowhere.txt is missing")
    with pytest.raises(SystemExit) as exit:
        command()
    assert exit.value.code == 2
    assert capsys.readouterr().err == "error: data.files: nowhere.txt is missing\n"


def test_another_rank_speaks_after_rank_0_had_the_time_to(command, trainer, monkeypatch, capsys):
    slept = []
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append((seconds, capsys.readouterr().err)))
    trainer.error = UserError("data.files", "nowhere.txt is missing")
    with pytest.raises(SystemExit) as exit:
        command()
    assert exit.value.code == 2
    assert slept == [(ends.GRACE_S, "")]
    assert capsys.readouterr().err == "error: data.files: nowhere.txt is missing\n"


@pytest.mark.parametrize("error", [RuntimeError("broken"), ValueError("broken")], ids=repr)
def test_any_other_error_keeps_its_traceback_and_exits_with_1(command, trainer, capsys, error):
    trainer.error = error
    with pytest.raises(SystemExit) as exit:
        command()
    assert exit.value.code == 1
    assert f"{type(error).__name__}: broken" in capsys.readouterr().err


def start(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a real Python process in `folder` to its end."""
    env = {**os.environ, "PYTHONPATH": str(CONF.parent)}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)


def test_as_a_module_it_exits_with_2(tmp_path):
    done = start([*AS_MODULE, "modle=x"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: modle: no such option; did you mean 'model'?\n"
    assert not list(tmp_path.iterdir())


def test_on_two_ranks_it_is_said_once(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *AS_MODULE, "mesh.dp_shard=3"]
    done = start(launch, tmp_path)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: mesh: dp_shard=3 needs 3 ranks, not 2; change mesh.dp_shard or start 3 ranks"]
    assert done.returncode != 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["", "nowhere/"])
def test_the_first_error_is_written_where_torchrun_reads_it(folder, command, trainer, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{folder}error.json"))
    trainer.error = UserError("data.files", "nowhere.txt is missing")
    with pytest.raises(SystemExit) as exit:
        command()
    assert exit.value.code == 2 and capsys.readouterr().err == "error: data.files: nowhere.txt is missing\n"
    if not folder:
        written = json.loads((tmp_path / "error.json").read_text())
        assert written["message"]["message"] == "UserError: data.files: nowhere.txt is missing"
