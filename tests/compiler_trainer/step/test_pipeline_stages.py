"""Pipeline stages train like eager PyTorch on one device, in fp64, for every cut and with other sharding."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.loss import loss_fn
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.messages import messages
from compiler_trainer.step.step import programs_of
from compiler_trainer.step.turns import turns_of_step
from passes.ir import ir
from tests.nightly.parity.case import Case
from tests.nightly.parity.record import run_case
from tests.support.sweeps import in_turn

STAGES = (2, 3, 4, 8)
BESIDE = (
    "",
    "mesh.dp_shard=2",
    "mesh.tp=2",
    "mesh.cp=2",
    "mesh.dp_replicate=2",
    "mesh.dp_shard=2 mesh.tp=2",
    "mesh.dp_shard=2 mesh.ep=2",
)
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "zbv")
WHAT = {
    "plain": "decoder layers={even}",
    "tied": "decoder layers={even} tied=true",
    "skips": "skips layers={even}",
    "experts": "experts layers={even} balance_loss=0.1",
    "uneven labels": "decoder layers={even} labels=uneven",
    "microbatches": "decoder layers={even} train.microbatches=5",
    "layers that do not divide": "decoder layers={odd}",
}
COMMON = "optim.name=sgd optim.momentum=0.8 optim.max_norm=0.3 length=7"


@pytest.mark.sweep(16)
@pytest.mark.sample(1)
@pytest.mark.parametrize(("stages", "beside", "schedule", "what"), in_turn(STAGES, BESIDE, SCHEDULES, WHAT))
def test_stages_train_as_one_device(stages, beside, schedule, what):
    if "ep" in beside and what != "experts":
        what, model = "experts", WHAT["experts"]
    else:
        model = WHAT[what]
    chunks = 1 if schedule in ("1f1b", "zero_bubble") else 2
    microbatches = 5 if what == "microbatches" else 3
    model = model.format(even=stages * chunks, odd=stages * chunks + 1)
    options = f"mesh.pp={stages} {beside} passes.pipeline.schedule={schedule} {COMMON} rows={2 * microbatches}"
    options += "" if "microbatches" in model else f" train.microbatches={microbatches}"
    outcome = run_case(Case.parse(f"{model} {options}")).outcome
    assert outcome.verdict == "right", f"{model} {options}: {outcome}"


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_stages_alone_are_the_step_to_the_bit(schedule):
    losses = {pp: step_losses(pp, schedule) for pp in (1, 4)}
    assert losses[4] == losses[1]


def step_losses(pp: int, schedule: str):
    step, batch = decoder(pp, {"schedule": schedule})
    result = [step(batch) for _ in range(3)]
    return result, {name: value.tolist() for name, value in step.state_dict().items()}, step.evaluate(batch)


def decoder(pp: int, pipeline: dict):
    torch.manual_seed(0)
    model = Llama(ModelConfig(dim=32, n_layers=5, n_heads=4, n_kv_heads=2, ffn_dim=48))
    batch = {key: torch.randint(0, 250, (8, 12)) for key in ("tokens", "labels")}
    batch["positions"] = torch.arange(12).expand(8, 12).contiguous()
    batch["documents"] = torch.zeros_like(batch["positions"])
    passes = {"pipeline": pipeline, "fold_layers": False}
    how = {"mesh": {"pp": pp}, "microbatches": 4, "optim": {"max_norm": 0.1}, "passes": passes}
    return compile_step(model, loss_fn, batch, ranks="lockstep", **how), batch


@pytest.mark.full
def test_the_report_of_stages_is_written_as_json():
    step, _ = decoder(2, {"schedule": "gpipe"})
    assert json.loads(json.dumps(step.report))["pipeline"]["schedule"] == "gpipe"


@pytest.mark.full
def test_only_the_residual_stream_its_gradient_and_the_norm_are_sent():
    step, _ = decoder(4, {})
    programs = programs_of(step.train)
    sent = list(messages(turns_of_step(programs, step.schedule, 4), programs))
    of_batch = [message for message in sent if message.key[1] is not None]
    there, back = [(s, s + 1) for s in range(3)], [(s + 1, s) for s in range(3)]
    assert Counter((m.source, m.to) for m in of_batch) == dict.fromkeys(there + back, 4)
    like = {i.name: ir.example(n) for p in programs.values() for n, i in zip(p.placeholders(), p.inputs)}
    assert {tuple(like[m.key[0]].shape) for m in of_batch} == {(2, 12, 32)}
    rest = [(m.source, m.to, m.key[0]) for m in sent if m.key[1] is None]
    assert rest == [(s, s + 1, f"square@{s}") for s in range(3)] + [(3, rank, "square") for rank in range(3)]


@pytest.mark.full
def test_stages_have_the_layers_that_are_told():
    step, _ = decoder(2, {"stages": [1, 4]})
    names = {name for name, state in step.state.items() if state.stages == (1,)}
    assert {f"model.layers.{n}.attention.wq.weight" for n in (1, 2, 3, 4)} <= names
    assert step.state["model.layers.0.attention.wq.weight"].stages == (0,)
    with pytest.raises(UserError, match=r"passes.pipeline.stages: \[2, 2\] are not 2 numbers of layers.*add up to 5"):
        decoder(2, {"stages": [2, 2]})


def test_more_stages_than_operators_are_refused():
    with pytest.raises(UserError, match="mesh.pp: 8 stages, but fewer operators"):
        compile_step(
            torch.nn.Linear(3, 1, bias=False), lambda m, b: m(b["x"]).sum(), {"x": torch.ones(2, 3)}, mesh={"pp": 8},
            ranks="lockstep", passes={"pipeline": {"schedule": "gpipe"}},
        )  # fmt: skip


def test_a_first_rank_without_trained_parameters_starts_the_norm_at_zero():
    outcome = run_case(Case.parse("teacher mesh.pp=2 mesh.tp=2 rows=1 length=1 eval.interval=1")).outcome
    assert outcome.verdict == "right", outcome


def test_stages_are_cut_where_no_buffer_is_read_before_the_stage_that_changes_it():
    outcome = run_case(Case.parse("teacher rows=3 mesh.pp=4")).outcome
    assert outcome.verdict == "right", outcome


def test_a_buffer_that_a_later_stage_changes_is_refused():
    outcome = run_case(Case.parse("teacher rows=3 mesh.pp=4 mesh.tp=2")).outcome
    assert outcome.verdict == "refused" and "which comes later" in str(outcome)


def test_a_gradient_that_parameters_of_two_stages_share_reaches_both():
    """Biases of a parallel residual share a gradient; attention's is on the first stage, the MLP's on the second."""
    options = "mesh.pp=2 mesh.tp=2 optim.name=sgd passes.shard.sequence_parallel=false"
    outcome = run_case(Case.parse(f"gpt_neox seed=374 length=5 {options}")).outcome
    assert outcome.verdict == "right", outcome


def test_a_tied_weight_is_added_up_as_each_stage_has_it():
    """The first stage has terms of its gradient, and the last, which has all tokens, has shards."""
    outcome = run_case(Case.parse("reader mesh.cp=2 mesh.pp=2 rows=1 length=2")).outcome
    assert outcome.verdict == "right", outcome
