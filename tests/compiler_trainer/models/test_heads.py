"""Models with another head than the one for next tokens: each loss trains as a plain loop over single documents does."""

from __future__ import annotations

from functools import partial

import folders
import pytest
import torch
from document_rows import documents_in_rows
from oracle import ADAMW, EXACT, LRS, assert_same, compile_lockstep, train_plainly, train_step

from compiler_trainer.config.schema import PASSAGES, ClassifyConfig, EmbedConfig, FolderConfig, RewardConfig
from compiler_trainer.data.packing import digests
from compiler_trainer.models import folder
from compiler_trainer.models.heads import classification_loss, embedding_loss, reward_loss
from compiler_trainer.models.skeleton import fill

ROWS, LENGTH = 4, 14
MESHES = [
    ({}, 1),
    ({"dp_shard": 2}, 1),
    ({"tp": 2}, 2),
    ({"cp": 2}, 1),
    ({"pp": 2}, 2),
    ({"dp_shard": 2, "cp": 2}, 2),
]


def of(kind="llama", labels=(), **options):
    """Return a skeleton in fp64 and its values by name."""
    cfg = FolderConfig(str(folders.folder(kind)), **options)
    module = folder.build(cfg, torch.float64, labels)
    return module, {name: value[()].to(torch.float64) for name, value in folder.initial(folder.stored_values(cfg, module), module, 0)}


def plain(kind="llama", **options):
    """Return the same model with its values."""
    module, values = of(kind, **options)
    return fill(module, values.items())


def pairs(seed=3):
    """Return batches of pairs of uneven lengths; the prompt's tokens are no labels, and the last row only fills the batch."""
    draw = torch.Generator().manual_seed(seed)
    result = []
    for _ in LRS:
        batch, spans = documents_in_rows(draw, [(3, LENGTH // 2, 2)] * ROWS, LENGTH)
        for row, start, end in spans:
            batch["labels"][row, start + 1 : end - 1] = batch["tokens"][row, start + 2 : end]  # the first two are a prompt
        counts = (torch.arange(ROWS) < ROWS - 1).long()
        batch["labels"][counts == 0] = -100
        result.append({**batch, "pairs": counts})
    return result


def classes(count, seed=4):
    """Return batches of texts of uneven lengths, several in a row, each with its class as the label of its last token."""
    draw = torch.Generator().manual_seed(seed)
    for _ in LRS:
        batch, spans = documents_in_rows(draw, [(2, LENGTH // 3, row % 3 + 1) for row in range(ROWS)], LENGTH)
        for row, _, end in spans:
            batch["labels"][row, end - 1] = torch.randint(0, count, (), generator=draw)
        yield batch


def documents_of(batch, count=2):
    """Yield the token ids of the documents of each real row."""
    for row in batch["pairs"].nonzero().flatten():
        yield [batch["tokens"][row][batch["documents"][row] == document][None] for document in range(count)]


def plain_reward(center, model, batch):
    """Return the loss of TRL 1.16, `RewardTrainer.compute_loss`, with transformers' own scores, pair by pair."""
    model.config.pad_token_id = None
    scores = [[model(input_ids=ids).logits[0, 0] for ids in documents] for documents in documents_of(batch)]
    chosen, rejected = (torch.stack(column) for column in zip(*scores))
    margins = batch["margins"][batch["pairs"] > 0] if "margins" in batch else 0
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - margins).mean()
    return loss + center * torch.mean((chosen + rejected) ** 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh, microbatches", MESHES, ids=str)
@pytest.mark.parametrize("center, margins", [(0.0, False), (0.1, True)])
def test_rewards_train_as_those_of_transformers(center, margins, mesh, microbatches):
    data, (module, values) = pairs(), of(head="score")
    if margins:
        data = [batch | {"margins": torch.arange(ROWS) / 3.0} for batch in data]
    metrics, state = train_plainly(plain(head="score"), partial(plain_reward, center), data, ADAMW)
    loss = partial(reward_loss, partial(folder.scores, "positions"), RewardConfig("reward", center=center))
    step = compile_lockstep(module, loss, data[0], mesh, microbatches=microbatches, initial=values.items())
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same({name: result[name] for name in expected}, expected, EXACT)
        assert result["reward_margin"] == pytest.approx(result["reward_chosen"] - result["reward_rejected"])
    assert_same(step.state_dict(), state, EXACT)


def plain_classes(model, batch):
    """Return transformers' own loss, text by text."""
    model.config.pad_token_id = None
    losses = []
    for row, place in (batch["labels"] != -100).nonzero().tolist():
        size = int(batch["positions"][row, place]) + 1
        ids, label = batch["tokens"][row, place + 1 - size : place + 1], batch["labels"][row, place]
        losses.append(model(input_ids=ids[None], labels=label[None]).loss)
    return torch.stack(losses).mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh, microbatches", MESHES, ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_classes_train_as_those_of_transformers(count, mesh, microbatches):
    labels = tuple("abc"[:count])
    data, (module, values) = list(classes(count)), of(head="score", labels=labels)
    metrics, state = train_plainly(plain(head="score", labels=labels), plain_classes, data, ADAMW)
    loss = partial(classification_loss, partial(folder.scores, "positions"), ClassifyConfig("classify"))
    step = compile_lockstep(module, loss, data[0], mesh, microbatches=microbatches, initial=values.items())
    results, expected_share = train_step(step, data), accuracy(plain(head="score", labels=labels), data[0])
    for result, expected in zip(results, metrics, strict=True):
        assert_same({name: result[name] for name in expected}, expected, EXACT)
    assert results[0]["accuracy"] == pytest.approx(expected_share)
    assert_same(step.state_dict(), state, EXACT)


def accuracy(model, batch):
    """Return the share of texts whose class has the highest score."""
    scores = folder.scores("positions", model, batch).argmax(-1)
    has_label = batch["labels"] != -100
    return (scores == batch["labels"])[has_label].double().mean().item()


def passages(count, seed=5, rows=5, length=18):
    """Return batches of queries with one or two passages of uneven lengths; closing tokens have no labels, nor have padding and the last row.

    A record is there twice, and another one has a passage of a third.
    """
    draw = torch.Generator().manual_seed(seed)
    for _ in LRS:
        sizes = torch.randint(2, length // 3 + 1, (rows - 1, count), generator=draw).tolist()
        texts = [[torch.randint(3, 300, (size,), generator=draw) for size in row] for row in sizes]
        texts[1][-1], texts[2] = texts[3][1], texts[0]
        tokens = torch.randint(3, 300, (rows, length), generator=draw)
        labels, positions, documents = torch.full_like(tokens, -100), torch.zeros_like(tokens), torch.full_like(tokens, -1)
        for row, text in enumerate(texts):
            start = 0
            for document, ids in enumerate(text):
                end = start + len(ids)
                tokens[row, start:end], documents[row, start:end], positions[row, start:end] = ids, document, torch.arange(len(ids))
                labels[row, start : end - 1] = ids[1:]
                start = end
        arrays = tokens.numpy(), documents.numpy()
        names = PASSAGES["passages" if count == 2 else "triplets"]
        equal = {name: torch.from_numpy(digests(arrays[0], arrays[1] == i)) for i, name in enumerate(names, 1)}
        pairs = (torch.arange(rows) < rows - 1).long()
        yield {"tokens": tokens, "labels": labels, "positions": positions, "documents": documents, "pairs": pairs, **equal}


def plain_embeddings(count, pooling, model, batch):
    """Return InfoNCE from embeddings that transformers computes text by text, without closing tokens."""
    def embed(ids):
        hidden = model(input_ids=ids[:, :-1]).last_hidden_state[0]
        pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
        return pooled / pooled.norm()

    texts = list(documents_of(batch, count))
    columns = [torch.stack([embed(documents[i]) for documents in texts]) for i in range(count)]
    exponents = (columns[0] @ torch.cat(columns[1:]).T / 0.1).exp()
    passages = [documents[i].tolist() for i in range(1, count) for documents in texts]
    is_same = torch.tensor([[passage == own and i != j for j, passage in enumerate(passages)] for i, own in enumerate(passages[: len(texts)])])
    exponents = exponents.masked_fill(is_same, 0.0)
    return -(exponents.diagonal() / exponents.sum(1)).log().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}, {"dp_shard": 2, "cp": 2}, {"tp": 2}, {"cp": 3}, {"pp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
@pytest.mark.parametrize("count, pooling", [(2, "mean"), (3, "last")])
def test_negatives_are_those_of_the_global_batch(count, pooling, mesh):
    data, (module, values) = list(passages(count)), of("gpt2", head="none")  # whose norms are computed in fp64, too
    metrics, state = train_plainly(plain("gpt2", head="none"), partial(plain_embeddings, count, pooling), data, ADAMW)
    loss = partial(embedding_loss, partial(folder.hidden_states, "positions"), EmbedConfig("embed", pooling=pooling, temperature=0.1))
    step = compile_lockstep(module, loss, data[0], mesh, initial=values.items())
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same({name: result[name] for name in expected}, expected, EXACT)
    assert_same(step.state_dict(), state, EXACT)


@pytest.mark.parametrize(("head", "lines"), [("lm", 0), ("score", 1), ("none", 1)])
def test_a_head_that_is_left_out_is_named(head, lines):
    cfg, remarks = FolderConfig(str(folders.folder("llama")), head=head), []
    folder.stored_values(cfg, folder.build(cfg, None), remarks.append)
    assert len(remarks) == lines and all(line.endswith("whose head is another: lm_head.weight") for line in remarks)
