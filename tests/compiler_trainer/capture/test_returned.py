"""The result of a loss function: the loss, metrics, and results that are refused."""

from __future__ import annotations

import re

import pytest
from oracle import EXACT, assert_same, batches, compile_lockstep, llama, llama_loss, train_plainly

from compiler_trainer import UserError


def with_accuracy(model, batch):
    logits = model(batch["tokens"], batch["positions"])
    counted = batch["labels"] != -100
    right = (logits.argmax(-1) == batch["labels"]) & counted
    return llama_loss(model, batch), {"accuracy": right.sum() / counted.sum(), "seen": counted.sum()}


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "microbatches"), [({"dp_shard": 2}, 1), ({"tp": 2}, 2), ({"cp": 2}, 2)], ids=str)
def test_metrics_are_those_of_the_whole_batch_and_the_loss_is_what_is_trained_on(mesh, microbatches):
    model, data = llama(), batches(rows=6)
    expected, state = train_plainly(llama(), llama_loss, data)
    step = compile_lockstep(model, with_accuracy, data[0], mesh, microbatches=microbatches, evaluate=True)
    accuracy, seen = with_accuracy(model, data[0])[1].values()
    first = {"loss": expected[0]["loss"], "accuracy": accuracy.item(), "seen": seen.item() / microbatches}
    assert step.measure(data[0]) == pytest.approx(first, rel=1e-6)
    assert step.metrics == ("accuracy", "seen")
    training = compile_lockstep(llama(), with_accuracy, data[0], mesh, microbatches=microbatches, evaluate=False)
    assert training.metrics == ("accuracy", "seen")
    assert step(data[0], 1e-2) == pytest.approx({**first, "grad_norm": expected[0]["grad_norm"]}, rel=1e-6)
    for batch, lr in zip(data[1:], (3e-2, 2e-2)):
        step(batch, lr)
    assert_same(step.state_dict(), state, EXACT)


FORM = r"return the loss, or \(loss, \{name: scalar\}\) with metrics to log"
REFUSED = [
    (lambda out: (out.sum(), out), rf"returns \(\(\) torch.float64, \(5, 7, 61\) torch.float64\); {FORM}"),
    (lambda out: (out.sum(), {}, out), rf"returns \(.*, dict, .*\); {FORM}"),
    (lambda out: {"loss": out.sum()}, rf"returns dict; {FORM}"),
    (lambda out: None, rf"returns NoneType; {FORM}"),
    (lambda out: (out.sum(), {"logits": out}), r"returns \(5, 7, 61\) torch.float64 as the metric 'logits'; it must be a scalar"),
    (lambda out: (out.sum(), {"half": 0.5}), r"returns float as the metric 'half'; it must be a scalar tensor"),
    (lambda out: (out.sum(), {"lr": out.sum()}), r"returns a metric named 'lr', which is reserved or not a name; choose another"),
    (lambda out: (out, {}), r"returns as the loss \(5, 7, 61\) torch.float64; must be a scalar"),
]


@pytest.mark.parametrize(("returned", "message"), REFUSED)
def test_anything_else_is_refused_in_one_line(returned, message):
    with pytest.raises(UserError, match=rf"^loss_fn: {message}") as refused:
        compile_lockstep(llama(), lambda m, b: returned(m(b["tokens"], b["positions"])), batches()[0], {})
    assert not re.search("\n", str(refused.value))
