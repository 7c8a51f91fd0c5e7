"""The length of a run in steps, epochs or tokens, or until patience ends, and its evaluation by source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from short_runs import FakeStep, metrics, options, resuming
from transformers import AutoModelForCausalLM, MixtralConfig

import compiler_trainer as ct
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import steps_of
from compiler_trainer.config.schema import CheckpointConfig, Config, DataConfig, EvalConfig, TrainConfig, WeightedSource
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.data.loader import Loader
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.folder import loss_of
from compiler_trainer.training import steps, trainer
from compiler_trainer.training.evaluate import by_source, means, validation_batches


@pytest.fixture
def fake(monkeypatch):
    """Replace compilation by a fake step."""
    monkeypatch.setattr(trainer, "compile_step", FakeStep)


# Lengths


@pytest.mark.parametrize(("length", "steps"), [
    ("1epoch", 25), ("2epochs", 50), ("0.5epochs", 13), ("0.001epochs", 1), ("800tokens", 10), ("801tokens", 11), ("1.6Ktokens", 20), ("2Mtokens", 25_000)])
def test_lengths_by_hand(length, steps):
    assert steps_of(length, rows=100, rows_per_step=4, tokens_per_row=20.0) == steps


@pytest.mark.parametrize("text", ["many", "0epochs", "-1epochs", "1e9tokens", "3 epochs", "2Xtokens", "12"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(UserError, match=f"^train.steps: {text} must be a number of steps, or epochs or tokens as 3epochs or 20Btokens"):
        to_config(compose([f"train.steps='{text}'"]))


def test_epochs_take_each_row_so_often(fake, tmp_path):
    train, data = TrainConfig(steps="2epochs", seq_len=64, global_batch_size=1), DataConfig("synthetic", documents=5, eval_fraction=0.0)
    cfg, seen = options(tmp_path / "run", train=train, data=data, eval=EvalConfig(interval=None)), []
    rows = len(build_datasets(cfg.data, 64, 1).train.rows)
    original = Loader.next
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "next", lambda loader: seen.append(loader.rows_taken) or original(loader))
        trainer.train(cfg)
    assert [record["step"] for record in metrics(tmp_path / "run")][-1] == 2 * rows and seen[-1] == (2 * rows - 1,)


@pytest.mark.parametrize("packing", ["cut", "fit"])
def test_a_budget_of_tokens_is_reached_and_by_less_than_two_steps(packing, fake, tmp_path, capsys):
    train, data = TrainConfig(steps="3Ktokens", seq_len=16, global_batch_size=4), DataConfig("synthetic", documents=40, packing=packing)
    trainer.train(options(tmp_path / "run", train=train, data=data))
    last = metrics(tmp_path / "run")[-1]
    assert 3000 - 64 < last["tokens"] < 3000 + 64
    assert f"train.steps=3Ktokens are {last['step']:,} steps\n" in capsys.readouterr().out
    assert f"  steps: {last['step']}\n" in (tmp_path / "run/config.yaml").read_text()


def test_a_budget_of_tokens_is_reached_by_a_mixture_whose_sources_have_other_shares_of_padding(fake, tmp_path):
    for name, text, count in (("long", "x" * 8, 10), ("short", "y" * 3, 2000)):  # 9 of 16 tokens a row, and 16
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n' * count)
    sources = tuple(WeightedSource("text", files=(str(tmp_path / f"{name}.jsonl"),), weight=w) for name, w in (("long", 9), ("short", 1)))
    data = DataConfig("mixture", sources=sources, packing="fit", eval_fraction=0.0)
    train = TrainConfig(steps="3Ktokens", seq_len=16, global_batch_size=4)
    trainer.train(options(tmp_path / "run", train=train, data=data, eval=EvalConfig(interval=None)))
    assert 3000 - 64 < metrics(tmp_path / "run")[-1]["tokens"] < 3000 + 64


def test_what_depends_on_steps_is_checked_once_they_are_known(fake, tmp_path):
    cfg = options(tmp_path / "run", train=TrainConfig(steps="10tokens", seq_len=16, global_batch_size=4))
    with pytest.raises(UserError, match="^lr_schedule.warmup_steps: 2 is more than train.steps=1; change either"):
        trainer.train(cfg)


# Evaluation


def written(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return [WeightedSource(files=(str(folder / f"{name}.txt"),)) for name in texts]


def test_a_validation_set_of_ones_own_is_all_that_is_held_out(tmp_path):
    trained, own = written(tmp_path, a="a" * 900, v="v" * 100)
    cfg = DataConfig(name="text", files=trained.files, validation=(own,))
    result = build_datasets(cfg, 10, 4)
    batches = [batch for _, batch in validation_batches(result.eval, None)]
    tokens = np.concatenate([batch["tokens"][(batch["labels"] != IGNORED_LABEL).any(1)].numpy() for batch in batches])
    assert set(tokens.flatten().tolist()) == {ord("v")} and (tokens == ord("v")).sum() == 100
    assert result.parts[0].train.facts.tokens == 901 and result.parts[0].held_out is None
    assert f"{own.files[0]}: 1 documents, 101 tokens (bytes); validation 101 tokens in 10 rows of 10, " in result.describe(1)
    assert [part["source"] for part in result.report()] == [trained.files[0]]


class ByLetter:
    """A step in which the loss of a batch is the mean of its labels."""

    def measure(self, batch):
        labels = batch["labels"][batch["labels"] != IGNORED_LABEL]
        return {"loss": float(labels.double().mean()), "share": 1.0}

    def weights(self, batch):
        return {}

    def total(self, values):
        return values.sum()


@pytest.mark.parametrize("batches", [1, 3, None])
def test_the_loss_of_each_source_is_that_of_its_rows_and_all_make_the_whole(batches, tmp_path):
    sources = written(tmp_path, a="a" * 1000, b="b" * 500)
    cfg = DataConfig("mixture", sources=tuple(sources), eval_fraction=0.5)
    loader = build_datasets(cfg, 10, 8).eval
    result, labels = means(ByLetter(), validation_batches(loader, batches))
    names = [f"loss/{source.files[0]}" for source in sources]
    assert set(result) == {"loss", "share", *names} and result["share"] == 1.0
    if batches is None:
        expected = [build_datasets(DataConfig(name="text", files=s.files, eval_fraction=0.5), 10, 8).eval for s in sources]
        alone = [means(ByLetter(), validation_batches(own, None)) for own in expected]
        assert [result[name] for name in names] == pytest.approx([loss["loss"] for loss, _ in alone])
        assert labels == sum(count for _, count in alone)
        assert result["loss"] == pytest.approx(sum(loss["loss"] * count for loss, count in alone) / labels)
    else:  # the sequences that a mixture draws
        loader.reset()
        drawn = [loader.next() for _ in range(batches)]
        whole = [labels for batch in drawn for labels in batch["labels"].flatten().tolist() if labels != IGNORED_LABEL]
        assert labels == len(whole) and result["loss"] == pytest.approx(sum(whole) / len(whole))


def test_the_loss_of_a_single_source_has_no_second_name(tmp_path):
    (source,) = written(tmp_path, a="a" * 1000)
    loader = build_datasets(DataConfig(name="text", files=source.files), 10, 8).eval
    assert set(means(ByLetter(), validation_batches(loader, 2))[0]) == {"loss", "share"}


@pytest.mark.parametrize(("batches", "fills", "sizes"), [(None, True, [8, 2]), (None, False, [8]), (4, True, [8, 2]), (1, True, [8])])
def test_each_sample_is_evaluated_once(batches, fills, sizes, tmp_path):
    (source,) = written(tmp_path, a="a" * 198)
    loader = build_datasets(DataConfig(name="text", files=source.files, eval_fraction=0.5), 10, 8).eval
    assert len(loader.rows) == 10
    parts = [numbers.tolist() for _, numbers in by_source(loader, batches, fills)]
    assert list(map(len, parts)) == sizes and len({n for part in parts for n in part}) == sum(sizes)


def own_loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["labels"])


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, n):
        x = torch.randn(4, generator=torch.Generator().manual_seed(n))
        return {"x": x, "labels": x.sum().view(1)}


def evaluated(folder, size, **options):
    """Return the validation loss of 10 rows, in batches of `size`, with a loss that does not ignore labels of -100."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = {"name": "custom", "_target_": Squares, "eval_fraction": 0.2}
    job = ct.Trainer(model, own_loss, data, train={"steps": 1, "global_batch_size": size}, optim={"lr": 0.0}, eval={"interval": 1, "batches": None},
                     lower={"backend": "eager"}, checkpoint={"interval": None}, run={"dir": str(folder), "dump_graphs": False})
    return job.train()


def test_rows_that_fill_a_batch_count_in_no_loss(tmp_path, capsys):
    whole = evaluated(tmp_path / "whole", 5)
    assert "evaluations leave out" not in capsys.readouterr().out
    assert evaluated(tmp_path / "part", 10) == pytest.approx(whole, rel=1e-6)
    part = evaluated(tmp_path / "eight", 8)
    assert "evaluations leave out 2 of 10 samples: they make no full batch" in capsys.readouterr().out
    assert part == pytest.approx(whole, rel=0.5)  # of 8 rows of 10, and not 1,485
    with pytest.raises(UserError, match="^train.global_batch_size: is 12, but a source of validation data has at most 10 samples: a loss"):
        evaluated(tmp_path / "none", 12)


def test_rows_that_fill_a_batch_are_padding_to_routers(tmp_path):
    """They counted in the auxiliary loss of a folder's experts."""
    validation = tuple(written(tmp_path, v="all letters of a text, differently often"))
    cfg = DataConfig("synthetic", documents=40, validation=validation)
    sizes = dict(vocab_size=257, hidden_size=24, intermediate_size=36, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    config = MixtralConfig(**sizes, num_local_experts=3, output_router_logits=True, router_aux_loss_coef=5.0)
    torch.manual_seed(0)
    model, measured = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), []
    for size in (4, 9):
        ((_, batch),) = validation_batches(build_datasets(cfg, 12, size).eval, None)
        assert len(batch["tokens"]) == size
        measured.append(loss_of("positions", model, batch).item())
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)


def test_losses_by_source_are_recorded(fake, tmp_path):
    sources = written(tmp_path, a="a" * 1000, b="b" * 1000)
    trainer.train(options(tmp_path / "run", data=DataConfig("mixture", sources=tuple(sources), eval_fraction=0.2)))
    last = metrics(tmp_path / "run")[-1]
    assert {name for name in last if name.startswith("eval_")} == {"eval_loss", *(f"eval_loss/{s.files[0]}" for s in sources)}


# Early stopping


def losses(monkeypatch, *values):
    """Return the losses of all evaluations."""
    left = iter(values)
    monkeypatch.setattr(steps, "means", lambda step, batches: ({"loss": next(left)}, 1))


PATIENT = EvalConfig(interval=1, batches=1, patience=2)


def test_a_run_ends_where_its_loss_has_not_fallen_for_so_many_evaluations(fake, tmp_path, monkeypatch, capsys):
    losses(monkeypatch, 5.0, 4.0, 4.5, 3.9, 3.9, 4.1, 1.0)
    assert trainer.train(options(tmp_path / "run", steps=20, eval=PATIENT)) == 4.1
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert "ended after step 6 of 20: its validation loss has not fallen for eval.patience=2 evaluations\n" in capsys.readouterr().out
    assert max(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == "step_00000006"


def test_a_run_that_goes_on_counts_on(fake, tmp_path, monkeypatch):
    losses(monkeypatch, 5.0, 4.0, 4.5, 6.0, 1.0)
    cfg = options(tmp_path / "run", steps=3, eval=PATIENT)
    trainer.train(cfg)
    trainer.train(resuming(replace(cfg, train=replace(cfg.train, steps=20)), tmp_path / "run/checkpoints/step_00000003"))
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_patience_without_evaluations_is_refused():
    with pytest.raises(UserError, match="^eval.patience: 3 counts evaluations, and eval.interval=null has none; change either"):
        validate(Config(eval=EvalConfig(interval=None, patience=3)), 1)


@pytest.mark.parametrize(("before", "after", "rows"), [((3, 12), 2, 58), ((20, 40), 4, 60), ((29, 58), 2, 58), ((0, 0), 2, 58), ((15, 60), 2, 60)])
def test_epochs_after_a_resume_with_another_batch_size_count_rows(before, after, rows):
    done, rows_done = before
    steps = steps_of("3epochs", rows=19, rows_per_step=after, tokens_per_row=1.0, done=done, rows_done=rows_done)
    assert rows_done + (steps - done) * after == rows  # 57 or the next multiple


@pytest.mark.parametrize(("first", "second", "reference"), [(4, 2, 58), (2, 4, 60)])
def test_a_run_of_epochs_goes_on_with_another_batch_size(first, second, reference, fake, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 303)  # 19 sequences of 16
    data = DataConfig("text", files=(str(tmp_path / "a.txt"),), eval_fraction=0.0, cache=str(tmp_path / "cache"))
    begun, saved = TrainConfig(steps=12 // first, seq_len=16, global_batch_size=first), CheckpointConfig(interval=1)
    assert len(build_datasets(data, 16, 1).train.rows) == 19
    trainer.train(options(tmp_path / "run", train=begun, data=data, eval=EvalConfig(interval=None), checkpoint=saved))
    resumed = replace(begun, steps="3epochs", global_batch_size=second)
    trainer.train(options(tmp_path / "run", train=resumed, data=data, eval=EvalConfig(interval=None), checkpoint=replace(saved, resume="latest")))
    last = metrics(tmp_path / "run")[-1]["step"]
    assert 12 + (last - 12 // first) * second == reference
