"""Plans with pipeline stages: three compiled stages of few layers tell what a dry run of all of them does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compiler_trainer.config.schema import (
    AUTO,
    CastConfig,
    ClusterConfig,
    Config,
    ExpertsConfig,
    MeshConfig,
    ModelConfig,
    PassesConfig,
    PipelineConfig,
    PlanConfig,
    RematConfig,
    TrainConfig,
)
from compiler_trainer.models.subject import subject
from compiler_trainer.planning.dry import compile_dry, predict_step
from compiler_trainer.planning.piped import Piped, estimates
from compiler_trainer.planning.search import all_forms, one, search
from compiler_trainer.planning.sizes import sizes_of
from compiler_trainer.planning.space import Asked, Candidate, Left, candidates

MODEL = ModelConfig(dim=256, n_layers=12, n_heads=8, n_kv_heads=4, ffn_dim=704, vocab_size=4096)
CAST = CastConfig(param_dtype="bfloat16", reduce_dtype="float32")


def job(schedule: str, **changes) -> Config:
    passes = PassesConfig(CAST, remat=RematConfig("full"), pipeline=PipelineConfig(schedule), verify="none")
    cfg = Config(
        model=MODEL,
        train=TrainConfig(seq_len=512, global_batch_size=32, microbatches=8),
        mesh=MeshConfig(pp=4, dp_shard=2, tp=2),
        passes=passes,
        cluster=ClusterConfig(gpus=16),
    )
    return replace(cfg, **changes)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_few_layers_and_stages_tell_what_all_do(schedule):
    cfg = job(schedule)
    (found,) = estimates(cfg, Candidate(cfg.mesh, cfg.train.microbatches), [cfg.cluster])
    known = predict_step(cfg, compile_dry(cfg, None))
    assert found.step_s == pytest.approx(known["predicted"]["step_ms"] / 1e3, rel=0.01)
    most = max(each["bytes"] for each in known["prediction"]["pipeline"]["memory"])
    assert found.bytes == pytest.approx(most, rel=0.08)
    assert found.place and found.exposed_s["pp"] > 0


@pytest.mark.full
def test_dense_layers_before_experts_are_counted_once(monkeypatch):
    experts = ExpertsConfig(count=4, top_k=2, width=128, dense_layers=1)
    cfg = job("1f1b", model=replace(MODEL, n_layers=13, experts=experts))
    monkeypatch.setattr(Piped, "estimate", lambda made: made)
    (made,) = estimates(cfg, Candidate(cfg.mesh, cfg.train.microbatches), [cfg.cluster])
    assert sum(made.counts) == 12  # the dense one is part of the first stage, as compiled


def test_stages_lie_between_nodes_and_have_microbatches_enough():
    asked = Asked(job("1f1b", cluster=ClusterConfig(gpus=32)), frozenset({"train.global_batch_size"}))
    found = list(candidates(asked, sizes_of(asked.cfg, subject(asked.cfg).module), Left()))
    assert {c.mesh.pp for c in found} == {1, 2, 4}  # of 4 nodes
    assert all(c.microbatches >= c.mesh.pp for c in found)
    assert {c.chunks for c in found if c.mesh.pp > 1} == {1, 2, 4} and {c.chunks for c in found if c.mesh.pp == 1} == {None}


@pytest.mark.full
def test_closed_forms_are_near_what_is_compiled():
    cfg = job("1f1b", cluster=ClusterConfig(gpus=16))
    asked = Asked(cfg, frozenset({"mesh", "train", "passes"}))
    (form,) = all_forms(asked, sizes_of(cfg, subject(cfg).module), Left())
    (real,) = one([asked], form.candidate)
    assert 0.5 < form.step_s / real.step_s < 2 and 0.5 < form.bytes / real.bytes < 2


@pytest.mark.full
def test_a_stated_pipeline_is_kept_and_planned_around():
    cfg = replace(job("1f1b"), mesh=replace(AUTO, pp=2), plan=PlanConfig(compile=1))
    asked = Asked(cfg, frozenset({"mesh.pp", "train.microbatches", "passes"}))
    (plan,) = search([asked], lambda chosen: [one([asked], candidate) for candidate in chosen])
    assert plan.best.candidate.mesh.pp == 2 and plan.best.is_compiled
