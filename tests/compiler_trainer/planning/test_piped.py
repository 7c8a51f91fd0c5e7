"""Plans with pipeline stages: similar stages are compiled once, with the result of a dry run of all of them."""

from __future__ import annotations

from collections import Counter
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
from compiler_trainer.planning import compiled
from compiler_trainer.planning.dry import compile_dry, predict_step
from compiler_trainer.planning.piped import few_stages
from compiler_trainer.planning.search import all_forms, compile_one, search
from compiler_trainer.planning.space import PlanRequest, candidates, sizes_of

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
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "zbv"])
def test_few_stages_tell_what_all_do(schedule):
    cfg = job(schedule, mesh=MeshConfig(pp=5, dp_shard=2), model=replace(MODEL, n_layers=20))
    found = compiled.compile_setting(cfg)
    known = compile_dry(cfg, None)
    assert found.schedule == known.schedule and sorted(found.programs) == sorted(known.programs)
    assert len({program.graph for program, _ in found.programs.values()}) < len(known.programs)
    few, all_stages = predict_step(cfg, found), predict_step(cfg, known)
    assert few["predicted"]["step_ms"] == pytest.approx(all_stages["predicted"]["step_ms"], rel=1e-6)
    assert few["predicted"]["peak_mem_bytes"] == all_stages["predicted"]["peak_mem_bytes"]
    assert few["prediction"]["sent_bytes"] == all_stages["prediction"]["sent_bytes"]


def test_ranks_with_as_many_layers_are_alike():
    few = few_stages(job("1f1b", mesh=MeshConfig(pp=6, dp_shard=2)))  # 12 layers and a head
    assert len(few.ranks) == 6 and few.ranks[0] == 0 and few.ranks[-1] == few.cfg.mesh.pp - 1
    assert few.stages == few.ranks and few.cfg.model.n_layers == sum(few.cfg.passes.pipeline.stages)
    assert few_stages(job("1f1b", mesh=MeshConfig(pp=2))) is None and few_stages(job("1f1b", mesh=MeshConfig())) is None
    chunks = few_stages(job("interleaved", mesh=MeshConfig(pp=8), model=replace(MODEL, n_layers=32)))
    assert chunks.stages == (*chunks.ranks, *(chunks.cfg.mesh.pp + rank for rank in chunks.ranks))
    back = few_stages(job("zbv", mesh=MeshConfig(pp=8), model=replace(MODEL, n_layers=32)))
    assert back.stages == (*back.ranks, *(2 * back.cfg.mesh.pp - 1 - rank for rank in reversed(back.ranks)))


@pytest.mark.full
def test_dense_layers_before_experts_are_in_the_first_stage():
    experts = ExpertsConfig(count=4, top_k=2, width=128, dense_layers=1)
    cfg = job("1f1b", model=replace(MODEL, n_layers=16, experts=experts), mesh=MeshConfig(pp=4, dp_shard=2))
    found, known = (predict_step(cfg, step) for step in (compiled.compile_setting(cfg), compile_dry(cfg, None)))
    assert found["predicted"]["step_ms"] == pytest.approx(known["predicted"]["step_ms"], rel=0.02)


def test_stages_lie_between_nodes_and_have_microbatches_enough():
    request = PlanRequest(job("1f1b", cluster=ClusterConfig(gpus=32)), frozenset({"train.global_batch_size"}))
    found = list(candidates(request, sizes_of(request.cfg, subject(request.cfg).module), Counter()))
    assert {c.mesh.pp for c in found} == {1, 2, 4}  # of 4 nodes
    assert all(c.microbatches >= c.mesh.pp for c in found)
    assert {c.chunks for c in found if c.mesh.pp > 1} == {1, 2, 4} and {c.chunks for c in found if c.mesh.pp == 1} == {None}


@pytest.mark.full
def test_closed_forms_are_near_what_is_compiled():
    cfg = job("1f1b", cluster=ClusterConfig(gpus=16))
    wide = replace(cfg.model, dim=2048, n_heads=16, n_kv_heads=8, ffn_dim=5632)  # a narrow model waits for launches, which forms omit
    cfg = replace(cfg, model=wide, train=replace(cfg.train, seq_len=4096))
    request = PlanRequest(cfg, frozenset({"mesh", "train", "passes"}))
    (form,) = all_forms(request, sizes_of(cfg, subject(cfg).module))
    (real,) = compile_one([request], form.candidate)
    assert 0.85 < form.step_s / real.step_s < 1.15 and 0.9 < form.bytes / real.bytes < 1.1  # 1.05 and 0.996


@pytest.mark.full
def test_a_stated_pipeline_is_kept_and_planned_around():
    cfg = replace(job("1f1b"), mesh=replace(AUTO, pp=2), plan=PlanConfig(compile=1))
    request = PlanRequest(cfg, frozenset({"mesh.pp", "train.microbatches", "passes"}))
    plan = search(request, lambda chosen: [compile_one([request], candidate) for candidate in chosen])
    assert plan.best.candidate.mesh.pp == 2 and plan.best.is_compiled
