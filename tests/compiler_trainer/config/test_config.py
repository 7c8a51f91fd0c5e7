"""Options are checked by type and against each other, unknown ones are refused, and a saved config loads unchanged."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RopeScaling,
    build,
    load,
    save,
)
from compiler_trainer.config.validate import resolve_mesh, validate

MODELS = Path(__file__).parents[3] / "conf" / "model"
EXPERTS = {"count": 8, "top_k": 2, "width": 16}
LATENT = {"kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "v_dim": 6}


def read(path: Path) -> dict[str, Any]:
    """Return a choice of model without hydra's own key."""
    return {key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "defaults"}


def leaves(options: dict[str, Any], option: str = "") -> Iterator[str]:
    """Yield the dotted names of all options."""
    for key, value in options.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{option}{key}.")
        else:
            yield f"{option}{key}"


def nested(option: str, value: Any) -> dict[str, Any]:
    """Return the mapping that sets one dotted option."""
    for key in reversed(option.split(".")):
        value = {key: value}
    return value


def with_value(option: str, value: Any) -> dict[str, Any]:
    """Return all options, one of them set."""
    options = group = dataclasses.asdict(Config())
    *groups, name = option.split(".")
    for key in groups:
        group = group[key]
    group[name] = value
    return options


def published_model(name: str) -> ModelConfig:
    return build(ModelConfig, read(MODELS / f"{name}.yaml"))


FREE_NAMES = "passes.cast.ops."  # keys are patterns, not options
LEAVES = [option for option in leaves(dataclasses.asdict(Config())) if not option.startswith(FREE_NAMES)]


@pytest.mark.parametrize("option", LEAVES)
def test_a_value_of_the_wrong_type_is_refused_at_its_own_option(option):
    with pytest.raises(UserError) as caught:
        build(Config, with_value(option, [object()]))
    assert re.fullmatch(re.escape(option) + r"(\[0\])?", caught.value.place)


@pytest.mark.parametrize("option", LEAVES)
def test_a_misspelt_option_is_refused_with_the_right_one(option):
    with pytest.raises(UserError, match=f"did you mean {option.rpartition('.')[2]!r}") as caught:
        build(Config, nested(option + "x", 1))
    assert caught.value.place == option + "x"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("batas", "betas"), ("gain", None), ("max_nrom", "max_norm"), ("nmae", "name"), ("weight", "weight_decay")],
)
def test_the_nearest_name_is_offered_or_all_of_them(key, nearest):
    with pytest.raises(UserError) as caught:
        build(OptimConfig, {key: 1}, "optim")
    all_names = ", ".join(option.name for option in dataclasses.fields(OptimConfig))
    offered = f"did you mean {nearest!r}?" if nearest else f"there are {all_names}"
    assert str(caught.value) == f"optim.{key}: no such option; {offered}"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("data.eval_fraction", 1.0, "1.0 must be 0 or more and below 1"),
        ("data.files", "a.txt", "'a.txt' is not a list; write [a.txt]"),
        ("mesh.dp_shard", 0, "0 must be at least 1, or -1 for the remaining ranks"),
        ("model", 3, "3 is not a group of options; it has name, dim"),
        ("model.experts", {"count": 8, "top_k": 2}, "is missing and has no default"),
        ("model.experts", {**EXPERTS, "count": 0}, "0 must be at least 1"),
        ("model.experts", {**EXPERTS, "every": 0}, "0 must be at least 1"),
        ("model.experts", {**EXPERTS, "scale": 0}, "0.0 must be above 0"),
        ("model.experts", {**EXPERTS, "bias_rate": -1e-3}, "-0.001 must be 0 or more"),
        ("model.experts", {**EXPERTS, "balance_loss": -1e-3}, "-0.001 must be 0 or more"),
        ("model.experts", {**EXPERTS, "score": "sigmod"}, "'sigmod' is not one of softmax, sigmoid; did you mean 'sigmoid'?"),
        ("model.rope_scaling", {"factor": 8}, "is missing and has no default"),
        ("optim.betas", [0.9], "[0.9] has 1 entries, not 2"),
        ("optim.lr", float("nan"), "nan is not a number"),
        ("optim.lr", "3e-3", "'3e-3' is not a number"),
        ("passes.remat.policy", "ful", "'ful' is not one of none, full, attention, selective, offload, every_n, budget; did you mean 'full'?"),
        ("passes.shard.plan", {"wq": {"tp": "x"}}, "'x' is not a whole number"),
        ("run.dir", 7, "7 is not text; put it in quotes"),
        ("run.dump_graphs", 1, "1 is not true or false"),
        ("train.dtype", "bfloat8", "'bfloat8' is not one of float32, bfloat16; did you mean 'bfloat16'?"),
        ("train.seq_len", 1, "1 must be at least 2"),
        ("train.steps", 10.0, "10.0 is not a whole number; write 10"),
        ("train.steps", True, "True is not a whole number"),
    ],
)
def test_a_bad_value_is_refused_with_the_way_out(option, value, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        build(Config, nested(option, value))
    assert caught.value.place.startswith(option)


def test_a_partial_mapping_keeps_the_other_defaults():
    assert build(OptimConfig, {"name": "sgd", "lr": 1}) == OptimConfig(name="sgd", lr=1.0)
    assert build(OptimConfig, {"betas": [0, 0.5]}).betas == (0.0, 0.5)
    assert build(Config, {"mesh": MeshConfig(tp=2)}).mesh.tp == 2


FILES = {"name": "text", "files": ["a.txt"]}


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"model": {"dim": 100}}, "model.n_heads"),
        ({"model": {"dim": 40}}, "model.n_heads"),  # 5 features per head, which is odd: rotary features come in pairs
        ({"model": {"n_kv_heads": 3}}, "model.n_kv_heads"),
        ({"model": {"head_dim": 33}}, "model.head_dim"),
        ({"model": {"latent": LATENT}}, "model.latent"),  # its heads share no keys
        ({"model": {"latent": LATENT, "n_kv_heads": 8, "head_dim": 32}}, "model.latent"),
        ({"model": {"latent": LATENT, "n_kv_heads": 8, "qk_norm": "plain"}}, "model.latent"),
        ({"model": {"latent": LATENT, "n_kv_heads": 8, "nope_every": 4}}, "model.latent"),
        ({"model": {"latent": {**LATENT, "rope_dim": 7}, "n_kv_heads": 8}}, "model.latent.rope_dim"),
        ({"model": {"experts": {**EXPERTS, "top_k": 9}}}, "model.experts.top_k"),
        ({"model": {"experts": {**EXPERTS, "groups": 4, "top_k": 3}}}, "model.experts.top_k"),  # of 2 experts in the best group
        ({"model": {"experts": {**EXPERTS, "groups": 3}}}, "model.experts.groups"),
        ({"model": {"experts": {**EXPERTS, "groups": 8}}}, "model.experts.groups"),  # of one expert
        ({"model": {"experts": {**EXPERTS, "groups": 2, "top_groups": 3}}}, "model.experts.top_groups"),
        ({"model": {"experts": {**EXPERTS, "top_k": 1}}}, "model.experts.normalize"),
        ({"model": {"experts": {**EXPERTS, "dense_layers": 4}}}, "model.experts.dense_layers"),
        ({"model": {"experts": {**EXPERTS, "dense_layers": 2, "every": 3}}}, "model.experts.dense_layers"),
        ({"data": {"name": "text"}}, "data.files"),
        ({"data": {"files": ["a.txt"]}}, "data.files"),
        ({"train": {"global_batch_size": 6, "microbatches": 4}}, "train.microbatches"),
        ({"optim": {"momentum": 0.9}}, "optim.momentum"),
        ({"train": {"steps": 5}, "lr_schedule": {"warmup_steps": 6}}, "lr_schedule.warmup_steps"),
        ({"train": {"steps": 5}, "lr_schedule": {"warmup_steps": 2, "decay_steps": 4}}, "lr_schedule.decay_steps"),
        ({"optim": {"groups": {"a": {"names": ["x"], "optimizer": "adamw"}}}}, "optim.groups"),
        ({"optim": {"name": "muon", "groups": {"a": {"lr": 0.5}}}}, "optim.groups"),
        ({"data": {"eval_fraction": 0}}, "eval.interval"),
        ({"data": {"text_column": "body"}}, "data.text_column"),
        ({"data": {**FILES, "split": "test"}}, "data.split"),
        ({"data": {**FILES, "documents": 5}}, "data.documents"),
        ({"data": {"name": "synthetic", "document_separator": "\n"}}, "data.document_separator"),
        ({"data": {"name": "tokens", "tokens": "x", "text_column": "body"}}, "data.text_column"),
        ({"data": {"name": "tokens", "tokens": "x", "bad_records": "skip"}}, "data.bad_records"),
        ({"data": {"name": "custom", "_target_": "a.b", "packing": "fit"}}, "data.packing"),
        ({"data": {"name": "mixture", "sources": [FILES, FILES], "text_column": "body"}}, "data.text_column"),
        ({"data": {"name": "mixture", "sources": [FILES, {**FILES, "split": "test"}]}}, "data.sources[1].split"),
        ({"data": {**FILES, "validation": [{**FILES, "configuration": "en"}]}}, "data.validation[0].configuration"),
        ({"run": {"dir": ""}}, "run.dir"),
        ({"checkpoint": {"dir": " "}}, "checkpoint.dir"),
    ],
)
def test_options_that_cannot_hold_together_are_refused(options, option):
    with pytest.raises(UserError) as caught:
        validate(build(Config, options), world_size=1)
    assert caught.value.place == option


def test_an_option_that_a_mixture_does_not_read_is_refused_with_the_place_for_it():
    read = {"sources": [{**FILES, "text_column": "body"}, {"name": "hf_dataset", "path": "a/b", "split": "test", "configuration": "en"}],
            "validation": [{"name": "synthetic", "documents": 5}], "bad_records": "skip", "packing": "fit"}
    assert validate(build(Config, {"data": {"name": "mixture", **read}}), world_size=1)
    with pytest.raises(UserError) as caught:
        validate(build(Config, {"data": {"name": "mixture", **read, "document_separator": "--"}}), world_size=1)
    assert str(caught.value) == "data.document_separator: -- is for data=text, not data=mixture; set it in data.sources"


@pytest.mark.parametrize(
    "model",
    [
        {"dim": 100, "head_dim": 16},
        {"dim": 100, "n_kv_heads": 8, "latent": LATENT},
        {"experts": {**EXPERTS, "top_k": 8}},
        {"experts": {**EXPERTS, "groups": 4, "top_groups": 2, "top_k": 4}},
        {"experts": {**EXPERTS, "top_k": 1, "normalize": False}},
        {"experts": {**EXPERTS, "dense_layers": 2, "every": 2}},
        *(read(path) for path in sorted(MODELS.glob("*.yaml")) if path.stem not in ("hf", "custom")),
    ],
    ids=lambda model: model.get("name"),
)
def test_models_that_can_be_built_are_taken(model):
    cfg = build(Config, {"model": model})
    assert validate(cfg, world_size=1).model == cfg.model


def test_a_batch_need_not_divide_by_the_ranks():
    cfg = validate(build(Config, {"train": {"global_batch_size": 7}}), world_size=4)
    assert cfg.mesh == MeshConfig(dp_shard=4)


@pytest.mark.parametrize("world_size", [1, 2, 6, 8])
def test_a_resolved_mesh_multiplies_to_the_ranks_and_resolves_to_itself(world_size):
    for stated in (MeshConfig(), MeshConfig(dp_replicate=-1, dp_shard=1), MeshConfig(dp_replicate=world_size)):
        mesh = resolve_mesh(stated, world_size)
        assert mesh.dp_replicate * mesh.dp_shard == world_size
        assert resolve_mesh(mesh, world_size) == mesh


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"dp_replicate": 3}, "mesh: dp_replicate=3 needs a multiple of 3 ranks, not 2; change mesh.dp_replicate"),
        ({"dp_shard": 3}, "mesh: dp_shard=3 needs 3 ranks, not 2; change mesh.dp_shard or start 3 ranks"),
        ({"dp_shard": 1}, "mesh: every axis=1 needs 1 ranks, not 2; change mesh.dp_shard"),
        ({"dp_replicate": -1}, "mesh.dp_shard: -1, and so is mesh.dp_replicate; only one axis can take the remaining ranks"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, message):
    with pytest.raises(UserError) as caught:
        resolve_mesh(build(MeshConfig, mesh, "mesh"), world_size=2)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "cfg",
    [
        Config(),
        build(Config, {"model": {"rope_scaling": dataclasses.asdict(RopeScaling(8, 1.0, 4.0, 8192))}}),
        build(Config, {"model": {"experts": EXPERTS, "latent": LATENT}}),
        build(Config, {"passes": {"shard": {"plan": {"layers.*.wq": {"tp": 0}}}, "verify": "none"}}),
        build(Config, {"data": {"name": "text", "files": ["a b.txt", "yes", "1", "é"]}, "optim": {"eps": 1e-12}}),
    ],
)
def test_a_saved_config_loads_equal(cfg, tmp_path):
    save(cfg, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == cfg


@pytest.mark.parametrize("text", ["a: [", "- 1", "train: {stepz: 1}"])
def test_a_file_that_is_no_config_is_refused(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError):
        load(tmp_path / "config.yaml")


def test_what_a_run_wrote_is_refused_by_file_and_option(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {dim: '" + "x" * 100_000 + "'}")
    with pytest.raises(UserError, match=r"config.yaml: model.dim: 'x{199}\.\.\. is not a whole number$"):
        load(path)


def test_a_config_that_was_cut_short_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    save(Config(), path)
    lines = path.read_text().splitlines(keepends=True)
    groups = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    for number in groups:
        path.write_text("".join(lines[:number]))
        with pytest.raises(UserError, match="config.yaml: lacks (.*, )?plan, which a run writes; if it was not cut short"):
            load(path)


def test_a_config_is_written_over_pipes_and_broken_links_and_through_no_link(tmp_path):
    path, other = tmp_path / "config.yaml", tmp_path / "other"
    other.write_text("a: 1")
    config = Config()  # the name of its folder contains the time
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to(path), lambda: path.symlink_to(other)):
        make()
        save(config, path)
        assert load(path) == config and sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "other"]
        path.unlink()
    assert other.read_text() == "a: 1"
    path.mkdir()
    with pytest.raises(UserError, match="config.yaml: cannot be written: Is a directory; move the file of that name away"):
        save(Config(), path)


def test_a_missing_config_is_refused_by_its_path(tmp_path):
    with pytest.raises(UserError, match="No such file") as caught:
        load(tmp_path / "nowhere.yaml")
    assert caught.value.place == str(tmp_path / "nowhere.yaml")


def parameters(m: ModelConfig) -> int:
    """Return the parameters of a Llama, counted by hand: two norms per layer, no biases."""
    head_dim = m.dim // m.n_heads
    attention = m.dim * head_dim * (2 * m.n_heads + 2 * m.n_kv_heads)
    layer = attention + 3 * m.dim * m.ffn_dim + 2 * m.dim
    return (1 if m.tied else 2) * m.vocab_size * m.dim + m.n_layers * layer + m.dim


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3_2_1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_a_published_model_has_its_published_size(name, published):
    model = published_model(name)
    assert parameters(model) == published
    assert model.dim // model.n_heads == (64 if name == "llama3_2_1b" else 128)
    assert validate(Config(model=model), world_size=1).model == model
