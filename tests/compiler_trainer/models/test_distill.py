"""Distillation: a student trains as a plain loop over single documents does, on any mesh, next to its teacher."""

from __future__ import annotations

from functools import partial

import folders
import pytest
import torch
from document_rows import documents_in_rows
from oracle import ADAMW, EXACT, LRS, assert_same, compile_lockstep, train_plainly, train_step

from compiler_trainer.config.schema import DistillConfig, FolderConfig
from compiler_trainer.models import distill, flops, folder
from compiler_trainer.models.skeleton import fill

ROWS, LENGTH = 4, 14


def of(kind):
    """Return a skeleton in fp64 and its values by name."""
    cfg = FolderConfig(str(folders.folder(kind)))
    module = folder.build(cfg, torch.float64)
    return module, {name: value[()].to(torch.float64) for name, value in folder.initial(folder.stored_values(cfg, module), module, 0)}


def both(student="llama", teacher="qwen3"):
    """Return a skeleton of a student with its teacher, and the values of both."""
    (module, values), (other, others) = of(student), of(teacher)
    return distill.with_teacher(module, other), values | dict(distill.named(others.items()))


def texts(seed=3):
    """Return batches of documents of uneven lengths, some tokens of which have labels; the last row has none."""
    draw = torch.Generator().manual_seed(seed)
    for _ in LRS:
        batch, spans = documents_in_rows(draw, [(3, LENGTH // 2, 2)] * ROWS, LENGTH)
        for row, start, end in spans:
            batch["labels"][row, start + 1 : end - 1] = batch["tokens"][row, start + 2 : end]
        batch["labels"][-1] = -100
        yield batch


def plainly(cfg, model, batch):
    """Return the loss, token by token, from probabilities of transformers' own models."""
    divergences, entropies = [], []
    for row in range(ROWS):
        for document in range(2):
            there = batch["documents"][row] == document
            ids, labels = batch["tokens"][row][there][None], batch["labels"][row][there]
            ours = model(input_ids=ids).logits[0]
            with torch.no_grad():
                theirs = model.teacher.model(input_ids=ids).logits[0]
            for i in (labels != -100).nonzero().flatten().tolist():
                p, q = (torch.softmax(x[i] / cfg.temperature, 0) for x in (theirs, ours))
                p, q = (p, q) if cfg.divergence == "forward" else (q, p)
                divergences.append((p * (p / q).log()).sum())
                entropies.append(-torch.softmax(ours[i], 0)[labels[i]].log())
    loss = cfg.temperature**2 * sum(divergences) / len(divergences)
    return (1 - cfg.ce_weight) * loss + cfg.ce_weight * sum(entropies) / len(entropies)


FORWARD, REVERSE = DistillConfig("distill", temperature=2.0), DistillConfig("distill", divergence="reverse", temperature=0.7, ce_weight=0.3)
IN_CHUNKS = [({}, 1), ({"dp_shard": 2}, 2), ({"cp": 2}, 1), ({"tp": 2}, 1), ({"pp": 2, "tp": 2}, 2), ({"dp_shard": 2, "tp": 3}, 1)]
MESHES = [({}, 1), ({"dp_shard": 2}, 1), ({"tp": 2}, 2), ({"cp": 2}, 1), ({"dp_shard": 2, "cp": 2}, 2), ({"dp_replicate": 2, "tp": 2}, 1), ({"pp": 2}, 2)]


CASES = [(*case, 1) for case in MESHES] + [(*case, 3) for case in IN_CHUNKS]


def loss_of(cfg):
    logits = partial(folder.logits, "positions")
    return partial(distill.distillation_loss, logits, logits, cfg)


def in_chunks(step):
    """Return the number of losses that a step computes in chunks."""
    return next(p["report"]["counts"].get("losses", 0) for p in step.report["passes"] if p["name"] == "chunk_loss")


@pytest.mark.sweep(8)
@pytest.mark.full
@pytest.mark.parametrize("mesh, microbatches, chunks", CASES, ids=str)
@pytest.mark.parametrize("cfg", [FORWARD, REVERSE], ids=lambda cfg: cfg.divergence)
def test_a_student_trains_as_the_formula(cfg, mesh, microbatches, chunks):
    data, (module, values) = list(texts()), both()
    metrics, state = train_plainly(fill(both()[0], values.items()), partial(plainly, cfg), data, ADAMW)
    step = compile_lockstep(module, loss_of(cfg), data[0], mesh, microbatches=microbatches, initial=values.items(), passes={"chunk_loss": {"chunks": chunks}})
    assert in_chunks(step) == (0 if chunks == 1 else 1 + (cfg.ce_weight > 0))
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same({name: result[name] for name in expected}, expected, EXACT)
        if cfg.ce_weight:
            assert 0.7 * result["divergence"] + 0.3 * result["cross_entropy"] == pytest.approx(result["loss"])
    assert_same(step.state_dict(), state, EXACT)
    teacher = {name: value for name, value in values.items() if name.startswith(distill.PREFIX)}
    assert_same({name: step.state_dict()[name] for name in teacher if name in state}, {n: v for n, v in teacher.items() if n in state}, 0.0)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma3"])
def test_a_teacher_counts_the_flops_of_a_forward(kind):
    module, _ = of(kind)
    trained = flops.of_folder(module.config, module, 64)
    assert flops.forward_of_folder(module.config, distill.Teacher(module).model, 64) == pytest.approx(trained / 3, rel=1e-6)


def test_a_teacher_stays_in_evaluation_mode():
    module, _ = both()
    module.train()
    assert module.training and module.model.training and not any(part.training for part in module.teacher.modules())
    assert all(p.requires_grad != name.startswith(distill.PREFIX) for name, p in module.named_parameters())
