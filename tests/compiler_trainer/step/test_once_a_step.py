"""Gathering parameters or reducing gradients once per step trains like doing so for each microbatch."""

from __future__ import annotations

import pytest
import torch

from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.loss import loss_fn
from compiler_trainer.step.compile import compile_step
from passes.ir import ir
from passes.ir.operators import kind_of
from tests.nightly.parity.case import Case
from tests.nightly.parity.record import run_case

COMMON = "layers=2 rows=6 length=7 train.microbatches=3 optim.max_norm=0.3"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case",
    [
        "decoder mesh.dp_shard=3 mesh.tp=2 tied=true passes.accumulate.gather=step passes.accumulate.reduce=step",
        "decoder mesh.dp_replicate=2 mesh.dp_shard=2 mesh.cp=2 passes.accumulate.reduce=step",
        "decoder mesh.dp_shard=2 mesh.tp=2 passes.shard.min_shard_elements=2000 passes.accumulate.reduce=step",
        "experts mesh.dp_shard=2 mesh.ep=2 balance_loss=0.1 passes.accumulate.gather=step passes.accumulate.reduce=step",
        "decoder mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 tied=true passes.accumulate.reduce=microbatch",
        "decoder mesh.pp=2 mesh.dp_shard=2 passes.accumulate.gather=microbatch",
    ],
)
def test_what_is_done_once_trains_as_one_device(case):
    outcome = run_case(Case.parse(f"{case} {COMMON}")).outcome
    assert outcome.verdict == "right", f"{case}: {outcome}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("gather", ["step", "microbatch"])
@pytest.mark.parametrize("reduce", ["step", "microbatch"])
def test_evaluation_is_that_of_one_device(gather, reduce):
    """Evaluation does not take part in the once-per-step work of training."""
    torch.manual_seed(0)
    model = Llama(ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48)).double()
    tokens = torch.randint(0, 256, (4, 13))
    same = {"positions": torch.arange(12).expand(4, 12), "documents": torch.zeros(4, 12, dtype=torch.int64)}
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), **same}
    passes = {"accumulate": {"gather": gather, "reduce": reduce}, "fold_layers": False}
    step = compile_step(model, loss_fn, batch, ranks="lockstep", mesh={"dp_shard": 2}, microbatches=2, passes=passes)
    step(batch)
    model.load_state_dict(step.state_dict())
    assert step.evaluate(batch) == pytest.approx(loss_fn(model, batch).item(), rel=1e-6)


@pytest.mark.full
def test_parameters_are_gathered_and_gradients_reduced_once():
    often, once = programs("microbatch"), programs("step")
    assert collectives(often["accumulate"]) == {"all_gather", "reduce_scatter"}
    assert collectives(once["accumulate"]) == set()
    assert collectives(once["gather"]) == {"all_gather"}
    assert "reduce_scatter" in collectives(once["apply"])


def test_an_accumulator_holds_the_terms_of_a_rank():
    once = programs("step")["accumulate"]
    specs = {i.name: i.spec for i in once.inputs if i.kind == "gradient"}
    assert {spec.partial for spec in specs.values()} == {(("dp_shard", "sum"),)}
    assert not any(spec.sharded for spec in specs.values())


def test_terms_are_added_up_in_the_dtype_of_the_gradient():
    once = programs("step", cast={"param_dtype": "bfloat16"})["accumulate"]
    totals = [n for n, i in zip(once.placeholders(), once.inputs, strict=True) if i.kind == "gradient"]
    assert totals and {ir.example(node).dtype for node in totals} == {torch.float32}


def programs(when: str, **options) -> dict[str, ir.Program]:
    """Return the scheduled programs of a small decoder on two ranks."""
    model = Llama(ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48))
    batch = {key: torch.zeros(4, 12, dtype=torch.int64) for key in ("tokens", "labels", "positions", "documents")}
    result = {}

    def observe(program, record):
        if record.name == "bucket":
            result[record.program] = program

    passes = {"accumulate": {"gather": when, "reduce": when}, "fold_layers": False, **options}
    how = {"mesh": {"dp_shard": 2}, "microbatches": 2, "passes": passes, "evaluate": False}
    compile_step(model, loss_fn, batch, ranks="lockstep", observe=observe, **how)
    return result


def collectives(program: ir.Program) -> set[str]:
    """Return the kinds of communication of weights and gradients, without the sums of the loss."""
    return {kind for node in program.calls() if (kind := kind_of(node)) and ir.example(node).dim()}
