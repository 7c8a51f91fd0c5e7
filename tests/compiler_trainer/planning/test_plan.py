"""Plans: the choices, closed forms compared with compiled programs, and the output."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import signal
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from browser import cut, opened
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from compiler_trainer.cli import app, outcome
from compiler_trainer.cli.verbs.plan import question, varied_values
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import cluster_of, device_name, for_predicting
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF
from compiler_trainer.config.jobs import with_files
from compiler_trainer.config.schema import (
    AUTO,
    CastConfig,
    ClusterConfig,
    Config,
    ExpertsConfig,
    FolderConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    PassesConfig,
    PlanConfig,
    TrainConfig,
)
from compiler_trainer.models.subject import subject
from compiler_trainer.pipeline import build_pipeline
from compiler_trainer.planning import answer, auto, compiled, plan, plan_page
from compiler_trainer.planning.compiled import mixtures
from compiler_trainer.planning.dry import FUSED, cluster_table, compile_dry, dry_run, predict_step, request_of
from compiler_trainer.planning.estimate import Estimate, Rank, kept_bytes
from compiler_trainer.planning.plan import by_program
from compiler_trainer.planning.search import all_forms, compile_in_parallel, compile_one, room, search
from compiler_trainer.planning.space import (
    POLICIES,
    Candidate,
    First,
    PlanRequest,
    candidates,
    replace_nested,
    sizes_of,
)
from passes.ir.ir import CompileError
from passes.ir.layer import within

SMALL = ModelConfig(dim=512, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=1408, vocab_size=8192)
JOB = Config(
    model=SMALL,
    train=TrainConfig(global_batch_size=16, seq_len=1024),
    passes=PassesConfig(cast=CastConfig(param_dtype="bfloat16", reduce_dtype="float32")),
    cluster=ClusterConfig(gpus=8),
    plan=PlanConfig(compile=2),
)


def sizes(cfg: Config):
    return sizes_of(cfg, subject(cfg).module)


def every(request: PlanRequest) -> list[Candidate]:
    return list(candidates(request, sizes(request.cfg), Counter()))


@pytest.fixture(scope="module")
def found():
    """Return a plan, compiled in this process."""
    request = PlanRequest(JOB)
    return search(request, lambda chosen: [compile_one([request], candidate) for candidate in chosen])


def test_a_model_is_captured_once_for_settings_of_one_shape(monkeypatch):
    counted, export_once = [], compiled.export_once
    monkeypatch.setattr(compiled, "captures", {})
    monkeypatch.setattr(compiled, "export_once", lambda *request: counted.append(request) or export_once(*request))
    small = {"n_layers": 2, "dim": 64, "ffn_dim": 64, "vocab_size": 64}
    for mesh, microbatches in (({"dp_shard": 8}, 1), ({"dp_shard": 4, "tp": 2}, 1), ({"dp_shard": 8}, 2)):
        options = {"model": small, "train": {"seq_len": 8, "microbatches": microbatches}, "mesh": mesh}
        request = request_of(cfg := replace_nested(JOB, options), subject(cfg))
        compiled.captured(cfg, request, build_pipeline(request).folding)
    assert len(counted) == 2


# ---- choices --------------------------------------------------------------------------------------------


def test_meshes_are_all_factorizations_and_batches_divide():
    chosen = every(PlanRequest(JOB))
    meshes = {(c.mesh.dp_replicate, c.mesh.dp_shard, c.mesh.cp, c.mesh.tp) for c in chosen}
    assert meshes == {sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8}
    assert all(16 % (c.mesh.dp_replicate * c.mesh.dp_shard * c.microbatches) == 0 for c in chosen)
    assert {c.recompute for c in chosen} == set(POLICIES)
    assert {c.method for c in chosen if c.mesh.cp > 1} == {"ring", "all_gather", "ulysses", "hybrid"}
    assert not any(c.float8 for c in chosen)
    assert len(set(chosen)) == len(chosen)


def test_what_is_stated_is_kept():
    cfg = replace(JOB, mesh=MeshConfig(tp=2), train=replace(JOB.train, microbatches=2))
    chosen = every(PlanRequest(cfg, frozenset({"mesh.tp", "train.microbatches", "passes.remat.policy", "passes.cast"})))
    assert {(c.mesh.tp, c.microbatches, c.recompute) for c in chosen} == {(2, 2, "as given")}


def test_a_batch_that_does_not_divide_is_counted():
    left = Counter()
    chosen = list(candidates(PlanRequest(replace(JOB, train=replace(JOB.train, global_batch_size=4))), sizes(JOB), left))
    assert max(c.mesh.dp_replicate * c.mesh.dp_shard for c in chosen) == 4
    assert sum(left.values()) == 4  # 8 data ranks


def test_float8_is_for_who_allows_it_and_experts_spread():
    cfg = replace(JOB, plan=PlanConfig(float8=True))
    assert {c.float8 for c in every(PlanRequest(cfg))} == {True, False}
    assert {c.float8 for c in every(PlanRequest(replace_nested(cfg, {"passes": {"cast": {"param_dtype": None}}})))} == {False}
    mixture = replace(JOB, model=replace(SMALL, experts=ExpertsConfig(count=4, top_k=2, width=64)))
    assert {c.mesh.ep for c in every(PlanRequest(mixture)) if c.mesh.tp == c.mesh.cp == 1} == {1, 2, 4}


def test_rows_that_bounded_experts_are_sent_are_kept_by_each_layer():
    mesh = MeshConfig(dp_shard=8, ep=4)
    mixture = replace(JOB, model=replace(SMALL, experts=ExpertsConfig(count=4, top_k=2, width=64)))
    held = []
    for dispatch in ("all_gather", "bounded"):
        cfg = replace_nested(mixture, {"passes": {"moe": {"dispatch": dispatch}}})
        rank = Rank(cfg, sizes(cfg), cluster_of(cfg.cluster), mesh, 1, False)
        held.append(kept_bytes(rank, Candidate(mesh, 1, "full"), "full"))
    tokens, choices, features, others = 2048, 2, 512, 3 / 4
    assert held[1] - held[0] == 1.25 * others * tokens * choices * features * 2


def test_a_setting_sets_what_it_says():
    candidate = Candidate(MeshConfig(dp_shard=2, tp=2), 2, "attention", True, False, "auto", True)
    cfg = candidate.applied(JOB)
    assert (cfg.mesh.tp, cfg.train.microbatches, cfg.passes.cast.float8) == (2, 2, "tensorwise")
    assert cfg.passes.remat.regather is False and cfg.passes.remat.ops["all_gather"] == "recompute"
    assert cfg.passes.remat.policy == "attention" and cfg.train.seq_len == 1024


def test_first_layers_are_named_in_tens():
    names = tuple(f"model.layers.{i}" for i in range(126))
    assert First(3, "full", names).patterns() == {"model.layers.[012]": "full"}
    patterns = First(107, "full", names).patterns()
    assert len(patterns) == 11 and [n for n in names if any(within(n, p) for p in patterns)] == list(names[:107])


def test_a_source_may_be_of_something_else_than_a_figure():
    cfg = to_config(compose(["cluster=h100", "+cluster.sources.links=iperf", "cluster.sources.hbm_gib=here"]))
    cells = [list(column.cells) for column in cluster_table(cfg).columns]
    assert ("links", "", "iperf") in zip(*cells) and ("hbm_gib", "80", "here") in zip(*cells)


# ---- closed forms and graphs ----------------------------------------------------------------------------

SETTINGS = [
    Candidate(MeshConfig(dp_shard=8), 1, "none"),
    Candidate(MeshConfig(dp_shard=8), 1, "full"),
    Candidate(MeshConfig(dp_shard=4, tp=2), 1, "selective"),
    Candidate(MeshConfig(dp_shard=1, tp=8), 1, "none"),
]
LARGE = ModelConfig(dim=4096, n_layers=4, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=32768)


@pytest.mark.full
@pytest.mark.parametrize("what", ["step_s", "bytes"])
def test_closed_forms_order_settings_as_graphs_do(what):
    cfg = replace(JOB, model=LARGE, train=TrainConfig(global_batch_size=16, seq_len=4096))
    forms = {e.candidate: e for e in all_forms(PlanRequest(cfg), sizes(cfg))}
    close = []
    for candidate in SETTINGS:
        real = getattr(graphs(cfg, candidate), what)
        close.append((real, getattr(forms[candidate], what)))
    assert [form for _, form in sorted(close)] == sorted(form for _, form in close)
    assert all(form == pytest.approx(real, rel=0.3) for real, form in close)


GRAPHS: dict[Candidate, object] = {}


def graphs(cfg, candidate):
    if candidate not in GRAPHS:
        (GRAPHS[candidate],) = compiled.estimate(cfg, candidate, [cfg.cluster])
    return GRAPHS[candidate]


@pytest.mark.full
@pytest.mark.parametrize("candidate", [SETTINGS[0], replace(SETTINGS[1], microbatches=2)], ids=str)
def test_lora_has_no_gradients_and_moments_of_frozen_parameters(candidate, tmp_path):
    sizes_of_model = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaConfig(vocab_size=8192, num_key_value_heads=4, **sizes_of_model).save_pretrained(tmp_path)
    model = FolderConfig(str(tmp_path), init="random", lora=LoraConfig(rank=8))
    cfg = replace(JOB, model=model)
    (form,) = (e for e in all_forms(PlanRequest(cfg), sizes(cfg)) if e.candidate == candidate)
    (real,) = compiled.estimate(cfg, candidate, [cfg.cluster])
    assert form.memory["parameters"] == pytest.approx(real.memory["buffers"] + real.memory["parameters"], rel=0.01)
    assert form.least_bytes <= real.bytes == pytest.approx(form.bytes, rel=0.25)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [MeshConfig(dp_shard=8), pytest.param(MeshConfig(dp_shard=4, pp=2), marks=pytest.mark.full)])
def test_averages_of_weights_need_memory(mesh):
    cfg = replace(JOB, train=replace(JOB.train, microbatches=2), mesh=mesh)
    with_averages = replace_nested(cfg, {"train": {"ema": 0.99}})
    plain, averaged = (compiled.estimate(c, Candidate(mesh, 2, "full"), [c.cluster])[0] for c in (cfg, with_averages))
    count = sizes(cfg).entries / 8
    assert averaged.bytes - plain.bytes == averaged.memory["averages"] == pytest.approx(4 * count, rel=0.5 * (mesh.pp - 1) + 1e-3)
    forms = [all_forms(PlanRequest(c, frozenset({"mesh", "train", "passes"})), sizes(c))[0] for c in (cfg, with_averages)]
    assert forms[1].bytes - forms[0].bytes == forms[1].least_bytes - forms[0].least_bytes == pytest.approx(4 * count)


KINDS = {
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 2000}, (True, 1, 4)),  # `wte`, tied
    "gpt_neox": ({"num_attention_heads": 4}, (False, 1, 4)),  # the head is `embed_out`
    "lfm2": ({"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}, (True, 1, 4)),
    "gemma4_text": ({"num_attention_heads": 4, "hidden_size_per_layer_input": 0}, (True, 1, 4)),  # unlike layers
    "mamba": ({"state_size": 8}, (True, 1, 0)),  # no attention
    "mixtral": ({"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 5}, (False, 5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_read_from_modules_not_names(kind, tmp_path):
    options, (is_tied, experts, heads) = KINDS[kind]
    usual = {} if kind == "gpt2" else {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 2000}
    config = AutoConfig.for_model(kind, **usual, **options)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    found = sizes_of(replace(JOB, model=FolderConfig(str(tmp_path))), module)
    assert (found.is_tied, found.expert_count, found.heads.queries) == (is_tied, experts, heads)
    assert (found.head_entries, found.vocabulary, found.dim, found.layers) == (128_000, 2000, 64, 2)


def test_a_gather_of_large_parameters_is_a_few_calls():
    """Buckets merge parameters and never divide one: a dry run of this setting predicts 52.2 s, of which 1 s waits for FSDP."""
    cfg = for_predicting(to_config(compose(["recipe=llama3_405b", "cluster=h100", "cluster.gpus=512"])))
    mesh = MeshConfig(dp_shard=128, cp=4)
    stated = frozenset({"mesh", "train", "passes"})
    request = PlanRequest(replace(cfg, mesh=mesh, train=replace(cfg.train, microbatches=4)), stated)
    (form,) = all_forms(request, sizes(cfg))
    assert 0.8 < form.step_s / 52.2 < 1.2


@pytest.mark.full
@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(MeshConfig(dp_shard=8), 1, "selective"),
        pytest.param(Candidate(MeshConfig(dp_shard=4, tp=2), 1, "none"), marks=pytest.mark.full),
        pytest.param(
            Candidate(MeshConfig(dp_replicate=2, dp_shard=2, cp=2), 2, "full", method="ring"),
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda candidate: candidate.axes(),
)
def test_an_estimate_is_the_prediction_of_a_dry_run(candidate):
    deep = replace(JOB, model=replace(SMALL, n_layers=14))
    (found,) = compiled.estimate(deep, candidate, [deep.cluster])
    cfg = replace_nested(candidate.applied(deep), {"passes": {"verify": "none"}})
    whole = predict_step(cfg, compile_dry(cfg, None))
    assert 1e3 * found.step_s == pytest.approx(whole["predicted"]["step_ms"], rel=1e-9)
    memory = whole["prediction"]["memory"]
    fused = {FUSED: memory["beside"][FUSED]} if memory["beside"][FUSED] else {}
    assert found.bytes == memory["bytes"] + sum(fused.values()) and found.memory == memory["kinds"] | fused
    assert found.sent == whole["prediction"]["sent_bytes"]


@pytest.mark.parametrize(
    "mesh", [MeshConfig(dp_shard=8), pytest.param(MeshConfig(dp_shard=2, cp=2, tp=2), marks=pytest.mark.full)]
)
@pytest.mark.full
def test_between_two_recomputations_time_and_memory_are_on_a_line(mesh, tmp_path):
    cluster = replace(JOB.cluster, launch_us=0.0)
    deep = replace(JOB, model=replace(SMALL, n_layers=8), cluster=cluster)
    ends = [
        compiled.estimate(deep, Candidate(mesh, 1, recompute, method="ring"), [cluster])[0]
        for recompute in ("selective", "full")
    ]
    light, heavy = (end.bytes for end in ends)
    limit = heavy + 0.6 * (light - heavy)
    (found,) = mixtures(ends, limit, sizes(deep).names)
    candidate = found.estimate.candidate
    assert candidate.first.layers == 4 and candidate.recomputes() == "full in the first 4, else selective"
    run = {"run": {"dir": str(tmp_path), "dump_graphs": False, "dry": True}}
    whole = dry_run(replace_nested(candidate.applied(deep), run))
    assert 1e3 * found.estimate.step_s == pytest.approx(whole["predicted"]["step_ms"], rel=0.005)
    written = whole["predicted"]["peak_mem_bytes"] + whole["prediction"]["memory"]["beside"][FUSED]
    assert found.estimate.bytes == pytest.approx(written, rel=0.01)
    assert written <= found.estimate.bytes <= limit


def test_a_model_is_captured_with_few_layers_unless_options_or_periods_tell_them_apart():
    def few(model: ModelConfig, **passes) -> int | None:
        cfg = replace_nested(JOB, {"model": {}, "mesh": {"dp_shard": 8}, "passes": passes})
        request = request_of(cfg := replace(cfg, model=model), subject(cfg))
        return compiled.few_layers(cfg, request, build_pipeline(request).folding)

    deep, experts = replace(SMALL, n_layers=27), ExpertsConfig(count=4, top_k=1, width=64)
    count = few(deep)
    assert count < 27 and few(replace(deep, experts=replace(experts, dense_layers=1))) == count + 1
    assert few(replace(deep, n_layers=count)) is None and few(replace(deep, nope_every=4)) is None
    assert few(deep, remat={"layers": {"layers.3": "full"}}) is None
    assert few(deep, remat={"layers": {"layers.*": "full"}}) == count


@pytest.mark.full
def test_the_least_bytes_are_a_lower_bound(found):
    least = {form.candidate: form.least_bytes for form in found.forms}
    compiled_ones = [e for e in (*found.ranked, *found.too_large) if e.candidate in least]
    assert compiled_ones and all(0 < least[e.candidate] <= e.bytes for e in compiled_ones)


@pytest.mark.sweep(8)
@pytest.mark.full
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("candidate", [*SETTINGS, Candidate(MeshConfig(dp_replicate=2, dp_shard=2, cp=2), 2, "full", method="ring")], ids=str)
def test_no_setting_needs_less_than_the_lower_bound(candidate, optimizer, max_norm):
    cfg = replace(JOB, optim=replace(JOB.optim, name=optimizer, max_norm=max_norm), model=replace(SMALL, n_layers=8))
    (form,) = (e for e in all_forms(PlanRequest(cfg), sizes(cfg)) if e.candidate == candidate)
    (real,) = compiled.estimate(cfg, candidate, [cfg.cluster])
    assert form.least_bytes <= real.bytes


# ---- the answer -----------------------------------------------------------------------------------------


def test_the_best_is_the_fastest_that_fits(found):
    assert found.ranked == sorted(found.ranked, key=lambda e: e.step_s)
    assert all(e.is_compiled and e.bytes <= room(found.request) for e in found.ranked)
    assert len(found.ranked) + len(found.too_large) == 2


def test_a_plan_as_json_says_why_others_lost(found):
    told = json.loads(json.dumps(answer.as_json(found)))
    assert told["ranked"][0]["options"]["mesh"] == answer.as_json(found)["ranked"][0]["options"]["mesh"]
    assert all("slower" in other["why"] or "GiB" in other["why"] for other in told["others"])


def test_the_page_holds_the_plan(found, tmp_path):
    plan_page.write(found, tmp_path)
    text = (tmp_path / plan_page.FILE).read_text()
    for said in (answer.title(found), found.best.candidate.axes(), "Why the others are slower", "timeline"):
        assert said in text


def test_bars_are_the_time_that_steps_lose():
    waits = {"pp": 0.25, "experts": 0.125, "another": 0.0625}
    least = Estimate(Candidate(MeshConfig(tp=2)), 0.375, {}, {}, 0.375, 1.0)
    bars = plan_page.bars([Estimate(Candidate(MeshConfig(pp=2)), 0.5, waits, {}, 1.0, 1.0), least])
    assert {bar.name: bar.x for bar in bars} == {
        "more computing": (125, 0), "other stages (pp)": (250, 0), "rows of experts (ep)": (125, 0),
        "another": (62.5, 0), "launches": (62.5, 0),
    }  # fmt: skip


@pytest.mark.parametrize(("width", "scheme"), [(800, "light"), (800, "dark"), (1400, "dark")])
@pytest.mark.sample(1)
def test_nothing_of_the_page_is_cut(browser, found, tmp_path, width, scheme):
    plan_page.write(found, tmp_path)
    shown = opened(browser, tmp_path / plan_page.FILE, width, scheme)
    assert shown.locator(".js-plotly-plot").count() >= 3
    assert cut(shown) == [] and shown.errors == []


def test_the_job_file_of_a_plan_makes_the_planned_job(found, tmp_path, monkeypatch):
    stated = ["model=llama_debug", "model.n_layers=6", "cluster=cpu", "train.global_batch_size=16", "run.dir=x"]
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    (tmp_path / "mine.yaml").write_text(answer.job_file(found, stated, groups))
    got = []
    monkeypatch.setattr(app, "outcome", got.append)
    best = found.best.candidate
    steps = str(best.mesh.dp_replicate * best.mesh.dp_shard * best.mesh.cp * best.mesh.tp)
    monkeypatch.setattr(app, "ranks", lambda: int(steps))
    monkeypatch.setattr("sys.argv", ["compiler-trainer", f"{tmp_path}/mine.yaml", "train.steps=7", "data.tokenizer=bytes"])
    app.main()
    (cfg,) = got
    assert cfg.mesh == best.mesh and cfg.train.microbatches == best.microbatches
    assert (cfg.cluster.name, cfg.model.n_layers, cfg.train.steps, cfg.run.dir == "x") == ("cpu", 6, 7, False)
    assert cfg.passes.remat.policy == best.applied(JOB).passes.remat.policy


def test_the_plan_of_a_job_file_can_be_loaded(found, tmp_path):
    given = tmp_path / "given.yaml"
    given.write_text("defaults: [finetune, {override /cluster: h100}]\ntrain: {seq_len: 64}\nrun: {dir: x}\nmodel: {path: FOLDER}\n")
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    (tmp_path / "plan.yaml").write_text(answer.job_file(found, with_files([str(given), "train.seed=3"]), groups))
    cfg = to_config(compose([f"{tmp_path}/plan.yaml"]))
    assert (cfg.model.path, cfg.cluster.name, cfg.train.seq_len, cfg.train.seed, cfg.run.dir == "x") == ("FOLDER", "h100", 64, 3, False)
    assert cfg.mesh == found.best.candidate.mesh


def test_suggested_options_can_be_pasted():
    remat = {"policy": "budget", "budget_gib": 20.0}
    cfg = for_predicting(to_config(compose(["cluster=h100", "run.dir=x", *(f"passes.remat.{name}={value}" for name, value in remat.items())])))
    first = First(12, "full", tuple(f"layers.{i}" for i in range(32)))
    other = Candidate(MeshConfig(dp_shard=4, tp=2), 2, "none", True, first=first).applied(cfg)
    changes = shlex.split(" ".join(auto.differing(other, cfg)))
    assert "passes.remat.budget_gib=null" in changes
    pasted = for_predicting(to_config(compose(["cluster=h100", "run.dir=x", *(f"passes.remat.{k}={v}" for k, v in remat.items()), *changes])))
    assert pasted == other


# ---- refusals -------------------------------------------------------------------------------------------


def test_without_gpus_there_is_no_plan():
    with pytest.raises(UserError, match="cluster.gpus: is not set.*cluster.gpus=8"):
        PlanRequest(replace(JOB, cluster=ClusterConfig())).gpus  # noqa: B018


def test_what_cannot_fit_is_refused_with_how_much_and_what_to_do():
    cfg = replace(JOB, model=replace(LARGE, n_layers=32), cluster=ClusterConfig(gpus=1, hbm_gib=20.0))
    with pytest.raises(UserError, match=r"nothing fits: the least is .* GiB .* GiB too few; plan for more GPUs"):
        search(PlanRequest(cfg), lambda chosen: [compile_one([PlanRequest(cfg)], candidate) for candidate in chosen])


def test_one_value_for_which_nothing_fits_leaves_the_other_plans(tmp_path, monkeypatch, capsys):
    @contextmanager
    def here(jobs):
        yield lambda chosen: [compile_one(jobs, candidate) for candidate in chosen]

    monkeypatch.setattr(plan, "compile_in_parallel", here)
    stated = ["cluster=h100", "cluster.gpus=1", "train.global_batch_size=4", "plan.compile=1", f"run.dir={tmp_path}/plans"]
    questions = [question(stated, stated, {"model": name}) for name in ("llama3_70b", "llama_debug")]
    large, small = plan.plan_all(questions)
    assert isinstance(large.plan, UserError) and small.plan.best and "nothing fits" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "plans").iterdir()) == ["1", "plan.html"]
    assert "nothing fits" in (tmp_path / "plans/plan.html").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="nothing fits"):
        plan.plan_all([questions[0]._replace(cfg=replace_nested(questions[0].cfg, {"run": {"dir": "other"}}))])


def test_a_pass_that_fails_is_a_refusal_of_the_setting(monkeypatch):
    def fails(cfg, candidate, clusters):
        raise CompileError("bucket", None, "KeyError: 'x'\nof two lines")

    monkeypatch.setattr(compiled, "estimate", fails)
    assert compile_one([PlanRequest(JOB)], SETTINGS[0]) == "bucket: KeyError: 'x' of two lines"


def test_a_killed_compiler_is_named_with_its_option(monkeypatch):
    monkeypatch.setattr(compiled, "estimate", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    request = PlanRequest(JOB)
    with compile_in_parallel([request]) as compile_all, pytest.raises(UserError, match=r"^plan.processes: \d processes compiled"):
        compile_all(SETTINGS[:1])


def test_a_batch_that_no_mesh_can_share_is_refused():
    cfg = replace(JOB, mesh=MeshConfig(dp_shard=8), train=replace(JOB.train, global_batch_size=4))
    with pytest.raises(UserError, match="train.global_batch_size: leaves no possible setting"):
        search(PlanRequest(cfg, frozenset({"mesh"})), lambda chosen: [])


@pytest.mark.parametrize("given, said", [("a=1", "--vary: a=1 is one value")])
def test_vary_takes_several_values(given, said):
    with pytest.raises(UserError, match=said):
        varied_values([given])
    assert varied_values(["a.b=1,2", "c=x,y"]) == [
        {"a.b": 1, "c": "x"},
        {"a.b": 1, "c": "y"},
        {"a.b": 2, "c": "x"},
        {"a.b": 2, "c": "y"},
    ]
    assert varied_values([]) == [{}]
    values = [values["train.ema"] for values in varied_values(["train.ema=null,0.9"])]
    assert [question([], [], {"train.ema": value, "cluster": "h100"}).cfg.train.ema for value in values] == [None, 0.9]
    assert question([], [], varied_values(["mesh={tp:2},{cp:2}"])[0] | {"cluster": "h100"}).cfg.mesh.tp == 2


def test_jobs_that_differ_in_the_links_share_their_programs():
    slow = replace(JOB, cluster=replace(JOB.cluster, inter_gb_s=10.0))
    longer = replace(JOB, train=replace(JOB.train, seq_len=2048))
    assert by_program([PlanRequest(JOB), PlanRequest(slow), PlanRequest(longer)]) == [[0, 1], [2]]


# ---- at the start of a job ------------------------------------------------------------------------------


def test_mesh_auto_is_a_plan_of_the_mesh_alone(capsys):
    cfg = replace(JOB, mesh=AUTO, run=replace(JOB.run, dry=True), plan=PlanConfig(compile=2))
    settled = auto.choose_automatic(cfg)
    assert settled.mesh != AUTO and replace(settled, mesh=AUTO) == cfg
    assert "mesh=auto: " in capsys.readouterr().out
    assert auto.choose_automatic(replace(cfg, cluster=ClusterConfig(gpus=1))).mesh == MeshConfig(dp_shard=1)


def test_a_slow_mesh_is_remarked_on():
    slow = replace(JOB, cluster=replace(JOB.cluster, device=device_name()), model=LARGE, mesh=MeshConfig(dp_shard=1, tp=8), train=TrainConfig(global_batch_size=16, seq_len=4096))
    trained = subject(slow)
    assert "faster on h100" in auto.remark(slow, trained) and "mesh=auto" in auto.remark(slow, trained)
    for fine in (
        replace(slow, mesh=MeshConfig(dp_shard=8)),
        replace(slow, plan=PlanConfig(suggest=False)),
        replace(slow, mesh=MeshConfig(dp_shard=1)),
    ):
        assert "faster" not in auto.remark(fine, trained)
    crowded = replace(slow, mesh=MeshConfig(dp_shard=8), train=replace(slow.train, global_batch_size=1024))
    assert "note: this is predicted not to fit on h100: about" in auto.remark(crowded, trained)
    assert "this fits: train.microbatches=" in auto.remark(crowded, trained)
    assert not outcome.remark(JOB, subject(JOB))
