"""Modules and losses of the user's, by dotted name."""

from __future__ import annotations

import pytest
import strangers
import torch
from oracle import EXACT, assert_same, batches, compile_lockstep, train_plainly, train_step

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config
from compiler_trainer.models.loss import loss_of_logits
from compiler_trainer.models.skeleton import fill, skeleton
from compiler_trainer.models.subject import subject

READER = {"_target_": "strangers.Reader", "width": 6, "vocabulary": 61}


def of(model, **options):
    return subject(build(Config, {"model": model, **options}))


def test_the_constructor_draws_the_weights_with_the_seed_of_the_run():
    torch.manual_seed(5)
    expected = strangers.Reader(6, 61)
    actual = dict(of(READER, train={"seed": 5}).initial())
    assert actual.keys() == {"embed.weight", "mix.weight", "mix.bias", "scale", "decays"}
    assert all(torch.equal(actual[name], value) for name, value in expected.state_dict().items() if name in actual)


def test_it_is_built_without_memory_for_its_parameters_and_with_its_buffers():
    module = of(READER).module
    assert all(p.is_meta for p in module.parameters()) and not module.decays.is_meta
    assert module.head.weight is module.embed.weight


def test_a_filled_skeleton_is_the_module():
    torch.manual_seed(0)
    model = strangers.Reader(6, 61)
    values = {**dict(model.named_parameters()), "decays": model.decays + 1}
    filled = fill(skeleton(lambda: strangers.Reader(6, 61)), ((n, v.detach()) for n, v in values.items()))
    assert filled.head.weight is filled.embed.weight
    batch = {name: value for name, value in batches(3)[0].items() if name in ("tokens", "positions")}
    model.decays += 1
    assert torch.equal(filled(**batch), model(**batch))


class Table(torch.nn.Module):
    """A module with a buffer that is filled after `torch.empty`; its logits are in a dict or a list."""

    def __init__(self, form=dict):
        super().__init__()
        self.embed, self.head, self.form = torch.nn.Embedding(61, 4), torch.nn.Linear(4, 61), form
        table = torch.empty(16, 4)
        table[:, ::2], table[:, 1::2] = torch.arange(16)[:, None], 1.0
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens):
        logits = self.head(self.embed(tokens) + self.table[: tokens.shape[1]])
        return {"logits": logits} if self.form is dict else [logits] if self.form is list else {}


def test_a_buffer_that_is_filled_in_place_has_its_values():
    module, real = skeleton(Table, torch.float64), Table()
    assert torch.equal(module.table, real.table) and module.embed.weight.is_meta and "table" not in module.state_dict()


@pytest.mark.parametrize("form", [dict, list])
def test_logits_are_found_in_dicts_and_lists(form):
    model, batch = Table(form), batches()[0]
    expected = torch.nn.functional.cross_entropy(model.head(model.embed(batch["tokens"]) + model.table[: batch["tokens"].shape[1]]).mT, batch["labels"])
    assert torch.equal(loss_of_logits(model, batch), expected)
    assert loss_of_logits(model.double(), batch).dtype == torch.float64


def test_a_model_without_logits_is_refused():
    with pytest.raises(UserError, match="^model: .*returns a dict without logits; return them, or give a loss of your own"):
        compile_lockstep(Table(None), loss_of_logits, batches()[0], {})


def test_it_trains_like_one_device():
    torch.manual_seed(0)

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["tokens"], batch["positions"]).flatten(0, 1),
                                                 batch["labels"].flatten(), ignore_index=-100)
    model, data = strangers.Reader(6, 61).double(), batches()
    _, expected = train_plainly(model, loss, data)
    step = compile_lockstep(model, loss, data[0], {"dp_shard": 2, "tp": 2})
    train_step(step, data)
    assert_same(step.state_dict(), expected, EXACT)


def test_a_loss_of_ones_own_gets_its_arguments():
    scaled, plain = of(READER, loss={"_target_": "strangers.scaled", "by": 3.0}), of(READER)
    model = fill(scaled.module, scaled.initial())
    batch = batches()[0]
    assert float(scaled.loss(model, batch).detach()) == pytest.approx(3 * float(plain.loss(model, batch).detach()))
    assert plain.loss is loss_of_logits


def test_parameters_that_are_not_trained_are_told():
    assert of(READER | {"frozen": True}).frozen == {"model.mix.weight", "model.mix.bias"}


@pytest.mark.parametrize(("options", "says"), [
    ({"model": {"_target_": "strangers.Nothing"}}, r"model._target_: .*Nothing"),
    ({"model": {"_target_": "no_such_package.Model"}}, r"model._target_: .*No module named 'no_such_package'; put the folder of its file on PYTHONPATH"),
    ({"model": READER | {"widht": 3}}, r"model._target_: .*unexpected keyword argument 'widht'"),
    ({"model": {"_target_": "strangers.no_module"}}, r"model._target_: strangers.no_module makes a int, not an nn.Module"),
    ({"model": READER, "loss": {"_target_": "strangers.nothing"}}, r"loss._target_: .*nothing"),
])
def test_what_cannot_be_called_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        of(**options)


def test_a_loss_without_a_name_is_refused():
    with pytest.raises(UserError, match="^loss: {'by': 3} must have a _target_, the dotted name of a function"):
        build(Config, {"loss": {"by": 3}})


def test_more_tokens_than_it_has_rows_are_refused():
    with pytest.raises(UserError, match=r"^batch\['tokens'\]: has numbers below 62, which strangers.py:\d+ looks up in 61 rows"):
        compile_lockstep(strangers.Reader(6, 61), loss_of_logits, batches()[0], {}, below={"tokens": 62})
