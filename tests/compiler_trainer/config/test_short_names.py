"""Options that stand for others: the same job as with the others, in files, on command lines and in Python."""

from __future__ import annotations

import dataclasses

import pytest
from commands import call

from compiler_trainer.api import composed
from compiler_trainer.config import short_names
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, FolderConfig
from compiler_trainer.config.validate import validate

BF16 = ["passes.cast.param_dtype=bfloat16", "passes.cast.reduce_dtype=float32"]
SAME = {
    "train.precision=bf16": BF16,
    "train.precision=fp32": ["passes.cast.param_dtype=float32", "passes.cast.reduce_dtype=float32"],
    "train.precision=fp8": [*BF16, "passes.cast.float8=rowwise"],
    "train.precision=null": [],
    "train.activation_checkpointing=none": ["passes.remat.policy=none"],
    "train.activation_checkpointing=selective": ["passes.remat.policy=selective"],
    "train.activation_checkpointing=full": ["passes.remat.policy=full"],
    "train.activation_checkpointing=auto": ["passes.remat.policy=budget"],
    "model=some/folder": ["model=hf", "model.path=some/folder"],
    "model=s3://bucket/folder": ["model=hf", "model.path=s3://bucket/folder"],
    "run.loggers=[wandb,mlflow]": ["run.loggers=[{_target_:compiler_trainer.WandB},{_target_:compiler_trainer.MLflow}]"],
}  # fmt: skip


def of(*overrides: str) -> Config:
    """Return a job, without its run folder, whose name has the time."""
    return in_no_folder(to_config(compose(overrides)))


def in_no_folder(cfg: Config) -> Config:
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dir="x"))


def test_all_are_tried():
    assert {f"{name}={choice}" for name in short_names.CHOICES for choice in short_names.choices(name)} <= SAME.keys()


@pytest.mark.parametrize("short", SAME)
def test_it_is_the_job_of_the_options_that_it_stands_for(short, tmp_path):
    name, _, value = short.partition("=")
    (tmp_path / "job.yaml").write_text(f"{name}: {value}\n")
    assert of(short) == of(f"{tmp_path}/job.yaml") == of(*SAME[short])


def test_it_wins_over_a_recipe_and_over_a_job_file(tmp_path):
    recipe = ["recipe=llama3_405b", "data.tokenizer=TOK"]
    assert of(*recipe).passes.remat.policy == "full"
    assert of(*recipe, "train.activation_checkpointing=none").passes.remat.policy == "none"
    (tmp_path / "job.yaml").write_text("passes.remat: {policy: full}\ntrain.precision: fp32\n")
    cfg = of(f"{tmp_path}/job.yaml", "train.activation_checkpointing=none", "train.precision=bf16")
    assert cfg.passes.remat.policy == "none" and cfg.passes.cast.param_dtype == "bfloat16"


def test_a_folder_goes_with_a_recipe(tmp_path):
    model = of("recipe=lora", f"model={tmp_path}").model
    assert isinstance(model, FolderConfig) and model.path == str(tmp_path) and model.lora is not None


@pytest.mark.parametrize(("overrides", "message"), [
    (["train.precision=bf16", "passes.cast.param_dtype=float32"], "train.precision: stands for .*; leave out train.precision or passes.cast.param_dtype"),
    (["train.precision=half"], "train.precision: 'half' is not one of bf16, fp32, fp8"),
    (["train.precison=bf16"], "train.precison: no such option; did you mean 'precision'?"),
    (["precision=bf16"], "precision: no such option; mixed precision is train.precision=bf16"),
    (["train.activation_checkpointing=full", "passes.remat.policy=none"], "leave out train.activation_checkpointing or passes.remat.policy"),
    (["train.batch_per_rank=2", "train.microbatches=1"], "train.batch_per_rank: stands for train.microbatches; leave out"),
    (["train.batch_per_rank=2", "mesh=auto"], "train.batch_per_rank: goes with a mesh, and this one is planned"),
    (["run.loggers=[neptune]"], "run.loggers: 'neptune' is not one of wandb, mlflow"),
    (["model=nowhere"], "model: 'nowhere' is not one of .*; model=FOLDER loads"),
])  # fmt: skip
def test_a_conflict_and_a_slip_are_refused(overrides, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        to_config(compose(overrides))


def test_a_job_file_with_a_batch_per_rank_and_other_microbatches_is_refused(tmp_path):
    (tmp_path / "job.yaml").write_text("train.batch_per_rank: 2\n")
    with pytest.raises(UserError, match="^train.batch_per_rank: decides, and so does train.microbatches=4; leave out one"):
        of(f"{tmp_path}/job.yaml", "train.microbatches=4")


@pytest.mark.parametrize(("mesh", "ranks", "microbatches"), [
    ([], 1, 8), ([], 4, 2), (["mesh.tp=2"], 4, 4), (["mesh.cp=2", "mesh.dp_replicate=2"], 8, 2), (["recipe=finetune", "model.path=x"], 8, 1),
])  # fmt: skip
def test_the_batch_of_a_rank_decides_on_microbatches(mesh, ranks, microbatches):
    cfg = validate(of(*mesh, "train.batch_per_rank=2", "train.global_batch_size=16"), ranks)
    assert (cfg.train.microbatches, cfg.train.batch_per_rank) == (microbatches, None)
    assert validate(cfg, ranks) == cfg


def test_a_batch_that_does_not_divide_is_refused():
    message = "train.batch_per_rank: 3 on each rank are 6 at once, which does not divide train.global_batch_size=16"
    with pytest.raises(UserError, match=message):
        validate(of("train.batch_per_rank=3", "train.global_batch_size=16"), 2)


def test_automatic_checkpointing_takes_the_memory_of_the_cluster():
    cfg = resolve_auto(of("train.activation_checkpointing=auto", "cluster=h100"), on_gpu=True)
    assert cfg.passes.remat.budget_gib == pytest.approx((80 - 0.6 - 0.4) / 1.1, abs=1e-3)
    with pytest.raises(UserError, match="passes.remat.budget_gib: null is the memory of a GPU of the cluster, and none"):
        from compiler_trainer.config.cluster import AUTO_CLUSTER
        from compiler_trainer.config.device import with_budget

        with_budget(of("passes.remat.policy=budget").passes, AUTO_CLUSTER)


def test_python_takes_them():
    cfg = composed({"train": {"precision": "bf16", "steps": 3}, "model": "a/b"})
    assert in_no_folder(cfg) == of(*BF16, "train.steps=3", "model=a/b")
    with pytest.raises(UserError, match="leave out train.precision or passes.cast.param_dtype"):
        composed({"train": {"precision": "bf16"}, "passes": {"cast": {"param_dtype": "float32"}}})


@pytest.mark.full
def test_a_sweep_over_them(tmp_path, capfd):
    """Hydra chooses, so each point is composed of one of the choices."""
    points = ["train.precision=bf16,fp32", "train.steps=1", "data=synthetic", "lower.backend=eager", "checkpoint.interval=null"]
    assert not call("-m", *points, "eval.interval=null", "data.eval_fraction=0", f"run.dir={tmp_path}/sweep")
    folders = sorted((tmp_path / "sweep").glob("[01]/config.yaml"))
    dtypes = [path.read_text().partition("param_dtype: ")[2].partition("\n")[0] for path in folders]
    assert dtypes == ["bfloat16", "float32"]
    assert "train.precision" in capfd.readouterr().out


def test_hydra_chooses_the_points_of_a_sweep():
    assert short_names.replaced(["train.precision=bf16,fp32", "train.steps=1"]) == ["+train/precision=bf16,fp32", "train.steps=1"]


def test_help_has_them(capfd):
    assert not call("--help", "train.precision")
    shown = " ".join(capfd.readouterr().out.split())
    assert "takes bf16 | fp32 | fp8" in shown and "stands for passes.cast.float8" in shown
    assert not call("--help", "activation_checkpointing")
    assert "train.activation_checkpointing=null" in capfd.readouterr().out
