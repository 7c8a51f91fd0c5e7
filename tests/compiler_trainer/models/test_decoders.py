"""Our decoders compute the same in transformers' forms; options that no form has are refused by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, ExpertsConfig, LatentConfig, ModelConfig, RopeScaling, TrainConfig
from compiler_trainer.models.decoders import as_transformers, form_of
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.sampling import Sampling, continued, in_use, one_by_one, why_uncached
from compiler_trainer.models.subject import subject

PLAIN = ModelConfig(dim=24, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=61)
NARROW = replace(PLAIN, norm_eps=1e-6, latent=LatentConfig(kv_rank=12, nope_dim=6, rope_dim=4, v_dim=8))
FEW = ExpertsConfig(count=4, top_k=2, width=20)
SIGMOID = ExpertsConfig(count=8, top_k=3, width=20, shared=2, dense_layers=1, score="sigmoid", groups=4, top_groups=2,
                        scale=2.5, bias_rate=0.1)  # fmt: skip
FORMS = {
    "Llama": PLAIN,
    "Llama, stretched, tied": replace(PLAIN, tied=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8)),
    "Qwen3": replace(PLAIN, qk_norm="learned", head_dim=10),
    "Mixtral": replace(PLAIN, experts=replace(FEW, balance_loss=0.1)),
    "Qwen3Moe": replace(PLAIN, qk_norm="learned", experts=replace(FEW, dense_layers=1, every=2)),
    "Qwen3Moe, shares as they are": replace(PLAIN, qk_norm="learned", tied=True, experts=replace(FEW, normalize=False)),
    "DeepseekV3": replace(NARROW, latent=replace(NARROW.latent, q_rank=10), experts=SIGMOID),
    "DeepseekV3, one group, uncorrected": replace(
        NARROW, experts=replace(SIGMOID, groups=1, top_groups=1, bias_rate=0.0, shared=0, dense_layers=0)
    ),
    "DeepseekV3, no experts": replace(NARROW, tied=True),
}
OF_NONE = {
    "model.qk_norm": replace(PLAIN, qk_norm="plain"),
    "model.norm_eps": replace(NARROW, norm_eps=1e-5),
    "model.nope_every": replace(PLAIN, nope_every=2),
    "model.rope_scaling": replace(NARROW, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8)),
    "model.experts.weigh": replace(PLAIN, experts=replace(FEW, weigh="input")),
    "model.experts.score": replace(PLAIN, experts=replace(FEW, score="sigmoid")),
    "model.experts.shared": replace(PLAIN, qk_norm="learned", experts=replace(FEW, shared=1)),
    "model.experts.dense_layers": replace(PLAIN, experts=replace(FEW, dense_layers=1)),
    "model.experts.every": replace(NARROW, experts=replace(SIGMOID, every=2)),
}


def decoder(cfg: ModelConfig) -> Llama:
    """Return the model with weights and buffers that all differ."""
    torch.manual_seed(0)
    model = Llama(cfg).eval()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(0.1 * torch.randn_like(value))
    return model


@pytest.mark.parametrize("name", FORMS)
def test_a_form_has_the_logits_of_the_decoder(name, tmp_path):
    cfg = FORMS[name]
    ours, tokens = decoder(cfg), torch.randint(0, cfg.vocab_size, (2, 13))
    assert form_of(cfg) == name.split(",")[0]
    as_transformers(cfg, ours).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = ours(tokens, torch.arange(13).expand(2, -1))
        actual = theirs(tokens).logits
    assert type(theirs).__name__ == f"{form_of(cfg)}ForCausalLM"
    assert (actual - expected).abs().max() < 3e-6 * expected.abs().max()


@pytest.mark.parametrize("name", FORMS)
def test_the_likeliest_tokens_are_the_same_with_a_cache(name):
    cfg, how = Config(model=FORMS[name], train=TrainConfig(seq_len=24)), Sampling(30, temperature=0.0)
    trained, ours, prompt = subject(cfg), decoder(FORMS[name]), [5, 60, 7, 7]
    with torch.no_grad():
        for weight in ours.layers.parameters():  # so that a tied head does not just repeat the last token
            weight.mul_(4)
    model, lengths = in_use(cfg, ours, torch.device("cpu")), []
    model.register_forward_pre_hook(lambda m, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    cached = continued(cfg, trained, model, prompt, frozenset(), how)
    assert lengths == [4] + 19 * [1] and len(cached) == 20  # up to the last position
    assert cached == [*islice(one_by_one(trained, ours, prompt, 24, how), 20)] and len({*cached}) > 4


@pytest.mark.parametrize("option", OF_NONE)
def test_what_has_no_form_is_refused_by_its_option(option):
    with pytest.raises(UserError, match=f"{option}: has no equivalent in the forms in which decoders are exported"):
        form_of(OF_NONE[option])
    assert why_uncached(Config(model=OF_NONE[option])).startswith(f"{option}: has no equivalent")


def test_a_form_has_the_memory_of_its_decoder():
    ours = decoder(PLAIN)
    theirs = as_transformers(PLAIN, ours)
    assert theirs.lm_head.weight.data_ptr() == ours.output.weight.data_ptr()
    assert theirs.model.layers[1].mlp.up_proj.weight.data_ptr() == ours.layers[1].feed_forward.w3.weight.data_ptr()


def test_without_transformers_there_is_no_cache(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers (" in why_uncached(Config(model=PLAIN))
