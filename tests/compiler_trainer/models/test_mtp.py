"""Multi-token prediction: the loss of DeepSeek-V3's paper, the same on every mesh, and nothing of it outside of training."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracle import EXACT, VOCAB, assert_same, batches, compile_lockstep, llama, train_plainly, train_step
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import ExpertsConfig, FolderConfig, LatentConfig, ModelConfig, MtpConfig
from compiler_trainer.config.validate import validate
from compiler_trainer.models import Llama, flops, folder
from compiler_trainer.models.attention import rotary_tables
from compiler_trainer.models.decoders import as_transformers, further_values
from compiler_trainer.models.loss import later_labels, loss_with_further_tokens
from compiler_trainer.models.subject import subject
from compiler_trainer.parity.one_device import looped
from compiler_trainer.runs.export import add_tensors

WEIGHT = 0.3
EXPERTS = ExpertsConfig(6, 2, 5, dense_layers=1, balance_loss=0.01)
loss = partial(loss_with_further_tokens, WEIGHT)


def data_of():
    """Return batches of sequences with documents, the last of a sequence maybe padding."""
    data = batches(rows=4)
    documents = torch.tensor([[0] * 7, [0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, -1, -1]])
    for batch in data:
        batch |= {"documents": documents, "labels": batch["labels"].masked_fill(documents == -1, -100)}
    return data


def by_the_paper(model, batch):
    """Return the loss by equations 21 to 25: layer k has the first T - k tokens of a sequence, and nothing is padded."""
    tokens, labels = batch["tokens"], batch["labels"]
    length, documents, losses = tokens.shape[1], batch["documents"], []
    x = model.tok_embeddings(tokens)
    cos, sin = rotary_tables(model.cfg, batch["positions"])
    for layer in model.layers:
        x, _ = layer(x, cos, sin, None, None)
    x = model.norm(x)
    logits = F.linear(x, model.output.weight)
    main = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for k, module in enumerate(model.mtp, 1):
        x, later, cos, sin = x[:, : length - k], tokens[:, k:], cos[:, : length - k], sin[:, : length - k]
        embedded = model.tok_embeddings(later)
        x = module.projection(torch.cat([module.embedding_norm(embedded), module.state_norm(x)], -1))
        x = module.norm(module.block(x, cos, sin, None, None)[0])
        is_same = documents[:, k:] == documents[:, : length - k]
        logs = F.linear(x, model.output.weight).log_softmax(-1)
        chosen = is_same & (labels[:, k:] != -100)
        losses.append(-logs.gather(-1, labels[:, k:, None].clamp(min=0)).squeeze(-1)[chosen].mean())
    return main, torch.stack(losses).mean()


@pytest.mark.parametrize("layers", [1, 2])
def test_the_loss_is_that_of_the_paper(layers):
    batch, model = data_of()[0], llama(n_layers=2, mtp=MtpConfig(layers))
    main, further = by_the_paper(model, batch)
    total, metrics = loss(model, batch)
    assert metrics["mtp_loss"].item() == pytest.approx(further.item(), rel=1e-12)
    assert total.item() == pytest.approx((main + WEIGHT * further).item(), rel=1e-12)
    assert loss(model.eval(), batch).item() == pytest.approx(main.item(), rel=1e-12)


def test_labels_stay_within_their_document():
    batch = {"labels": torch.tensor([[1, 2, 3, 4, 5]]), "documents": torch.tensor([[0, 0, 0, 1, 1]])}
    assert later_labels(batch, 1).tolist() == [[2, 3, -100, 5, -100]]
    assert later_labels(batch, 2).tolist() == [[3, -100, -100, -100, -100]]


def plain(model, batch):
    return loss(model, batch)[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "microbatches", "sizes"), [
    ({}, 2, {}),
    ({"dp_shard": 2, "tp": 2}, 1, {"experts": EXPERTS}),
    ({"cp": 2, "dp_shard": 2}, 1, {}),
    ({"dp_shard": 2, "ep": 2}, 1, {"experts": EXPERTS}),
    ({"pp": 2}, 2, {}),
    ({"pp": 2, "tp": 2}, 2, {"tied": True}),
], ids=str)
def test_updates_are_those_of_one_device(mesh, microbatches, sizes):
    """Two layers of two kinds: embeddings of later tokens cross ranks of cp, and the last stage embeds, too."""
    model, data = llama(n_layers=2, mtp=MtpConfig(2), **sizes), data_of()
    metrics, state = train_plainly(looped(model), plain, data)
    step = compile_lockstep(model, loss, data[0], mesh, microbatches=microbatches)
    for actual, expected in zip(train_step(step, data), metrics, strict=True):
        assert actual.pop("mtp_loss") > 0
        assert_same(actual, expected, EXACT)
    assert_same(step.state_dict(), state, EXACT)


def test_a_job_trains_it():
    cfg = validate(to_config(compose(["model=moe_debug", "model.mtp.layers=2", "model.mtp.weight=0.1"])), 1)
    trained = subject(cfg)
    assert cfg.model.mtp == MtpConfig(2, 0.1) and len(trained.module.mtp) == 2
    assert {name for name, _ in trained.initial()} >= {"mtp.1.projection.weight", "mtp.0.block.attention.wq.weight"}


def test_it_goes_with_the_default_loss_only():
    cfg = to_config(compose(["model.mtp.layers=1", "loss._target_=a.b"]))
    with pytest.raises(UserError, match="^model.mtp: predicts further tokens, which only the default loss does"):
        validate(cfg, 1)


DEEPSEEK = ModelConfig(
    dim=24, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=40, vocab_size=61, norm_eps=1e-6, mtp=MtpConfig(2),
    latent=LatentConfig(kv_rank=12, nope_dim=6, rope_dim=4, v_dim=8),
    experts=ExpertsConfig(8, 3, 20, shared=2, dense_layers=1, score="sigmoid", groups=4, top_groups=2, scale=2.5),
)  # fmt: skip


@pytest.mark.parametrize(("is_sharded", "bias_rate"), [(False, 0.0), (True, 0.1)])
def test_an_export_has_the_layers_of_transformers(is_sharded, bias_rate, tmp_path, monkeypatch):
    """Files name them as DeepSeek-V3's do; transformers drafts tokens with them (`generate(use_mtp=True)`)."""
    torch.manual_seed(0)
    sizes = replace(DEEPSEEK, experts=replace(DEEPSEEK.experts, bias_rate=bias_rate))
    model = Llama(sizes)
    for value in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction"))):
        value.data.add_(0.1 * torch.randn_like(value))
    theirs = as_transformers(sizes, model)
    assert theirs.config.num_mtp_layers == 2
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if is_sharded else "1GB")
    add_tensors(tmp_path, further_values(sizes, model, theirs))
    cfg = FolderConfig(str(tmp_path))
    assert folder.stored_values(cfg, folder.build(cfg, None))  # which has no such layers
    monkeypatch.setattr(type(theirs), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23]\."])  # 61 in theirs
    main = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    drafts = MtpModel.from_pretrained(main)
    tokens, positions = torch.randint(0, 61, (2, 9)), torch.arange(9).expand(2, 9)
    with torch.no_grad():
        ours = copy.deepcopy(model).train()(tokens, positions)
        x = main(tokens, output_hidden_states=True).hidden_states[-1]
        for k, logits in enumerate(ours.further, 1):
            x = drafts.forward_layer(k - 1, x[:, : 9 - k], positions[:, : 9 - k], None, input_ids=tokens[:, k:])
            torch.testing.assert_close(drafts.shared_head(x), logits[:, : 9 - k], atol=1e-5, rtol=1e-5)


def test_a_decoder_of_another_form_is_exported_without_them():
    model = llama(n_layers=2, mtp=MtpConfig(1))
    theirs = as_transformers(model.cfg, model)
    assert not further_values(model.cfg, model, theirs) and theirs.config.num_hidden_layers == 2


def test_its_work_is_counted():
    """A further layer costs one of the decoder's, a matmul of [2 D, D], three more norms, and the head once more."""
    one, more = llama(n_layers=2), llama(n_layers=2, mtp=MtpConfig(1))
    third = llama(n_layers=3)
    dim = one.cfg.dim
    expected = flops.of_decoder(third.cfg, third, 7) + 6 * (2 * dim * dim + 3 * dim + VOCAB * dim)
    assert flops.of_decoder(more.cfg, more, 7) == expected
