"""Our Llama equals transformers', has the published sizes, and has the properties of a decoder."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from compiler_trainer import models
from compiler_trainer.config.schema import ModelConfig, RopeScaling
from compiler_trainer.models.attention import rotary_tables
from passes.torch_private import FakeTensorMode

TINY = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=61)
LLAMA31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
STRETCHED = dataclasses.replace(TINY, dim=256, n_heads=4, rope_theta=500_000.0, rope_scaling=LLAMA31, tied=True)

HF_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers": "model.layers",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "output": "lm_head",
}


def materialized(cfg, seed=0):
    """Return a model with random weights, none of them 1 (the norms' initial value)."""
    model = models.build(cfg).to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5, 0.2) if parameter.dim() == 1 else parameter.normal_(0.0, 0.2)
    return model


def tokens_and_positions(cfg, batch=2, seq_len=13):
    tokens = torch.randint(cfg.vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(seq_len).expand(batch, -1).contiguous()


def hf_config(cfg):
    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling:
        scaling = dataclasses.asdict(cfg.rope_scaling)
        original = scaling.pop("original_max_position")
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}
    return LlamaConfig(
        hidden_size=cfg.dim,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        intermediate_size=cfg.ffn_dim,
        vocab_size=cfg.vocab_size,
        rms_norm_eps=cfg.norm_eps,
        rope_parameters=rope,
        max_position_embeddings=131_072,
        tie_word_embeddings=cfg.tied,
    )


def hf_name(name):
    if name == "norm.weight":
        return "model.norm.weight"
    for ours, theirs in HF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("cfg", [TINY, STRETCHED], ids=["untied", "llama3.1 tied"])
def test_logits_equal_those_of_transformers(cfg):
    ours, theirs = materialized(cfg), LlamaForCausalLM(hf_config(cfg)).eval()
    weights = {hf_name(name): value for name, value in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert missing == (["lm_head.weight"] if cfg.tied else []) and not unexpected
    tokens, positions = tokens_and_positions(cfg)
    torch.testing.assert_close(
        ours(tokens, positions), theirs(tokens, position_ids=positions).logits, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("cfg", [TINY, STRETCHED], ids=["plain", "llama3.1"])
def test_rotary_tables_equal_those_of_transformers(cfg):
    positions = torch.tensor([[0, 1, 2, 0, 1, 8191, 8192, 131_071]])
    cos, sin = rotary_tables(cfg, positions)
    their_cos, their_sin = LlamaRotaryEmbedding(hf_config(cfg))(torch.empty(0), positions)
    # One unit in the last place of a frequency is 131_071 * 2**-24 = 8e-3 radians at the last position.
    for ours, theirs in ((cos, their_cos), (sin, their_sin)):
        ours = torch.cat((ours, ours), -1).squeeze(2)
        torch.testing.assert_close(ours[:, :5], theirs[:, :5], atol=1e-6, rtol=0)
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)


def test_changing_a_token_leaves_earlier_logits_alone():
    model = materialized(TINY)
    tokens, positions = tokens_and_positions(TINY)
    before = model(tokens, positions)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % TINY.vocab_size
    after = model(changed, positions)
    torch.testing.assert_close(after[:, :7], before[:, :7], atol=0, rtol=0)
    assert (after[:, 7:] - before[:, 7:]).abs().amax(-1).min() > 1e-4


def test_only_distances_between_positions_matter():
    model = materialized(TINY)
    tokens, positions = tokens_and_positions(TINY)
    logits = model(tokens, positions)
    torch.testing.assert_close(model(tokens, positions + 100), logits, atol=1e-4, rtol=1e-4)
    assert (model(tokens, positions * 2) - logits).abs().max() > 1e-2


def test_shared_heads_equal_repeated_heads():
    grouped, full = materialized(TINY), models.build(dataclasses.replace(TINY, n_kv_heads=4)).to_empty(device="cpu")
    repeats = TINY.n_heads // TINY.n_kv_heads
    weights = {}
    for name, value in grouped.state_dict().items():
        heads = value.unflatten(0, (TINY.n_kv_heads, -1)) if name.endswith(("wk.weight", "wv.weight")) else None
        weights[name] = value if heads is None else heads.repeat_interleave(repeats, 0).flatten(0, 1)
    full.load_state_dict(weights)
    batch = tokens_and_positions(TINY)
    torch.testing.assert_close(grouped(*batch), full(*batch), atol=1e-5, rtol=1e-5)


SIZES = {  # parameters of the published checkpoints
    "3.2 1B": (ModelConfig("1b", 2048, 16, 32, 8, 8192, 128_256, tied=True), 1_235_814_400),
    "3 8B": (ModelConfig("8b", 4096, 32, 32, 8, 14_336, 128_256), 8_030_261_248),
    "3 70B": (ModelConfig("70b", 8192, 80, 64, 8, 28_672, 128_256), 70_553_706_496),
    "3.1 405B": (ModelConfig("405b", 16_384, 126, 128, 8, 53_248, 128_256), 405_853_388_800),
}


@pytest.mark.parametrize(("cfg", "published"), SIZES.values(), ids=SIZES.keys())
def test_parameter_count_is_the_published_one(cfg, published):
    model = models.build(cfg)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == published
    assert not list(model.buffers())


def test_loss_is_the_mean_over_labels_that_count():
    model = materialized(TINY)
    tokens, positions = tokens_and_positions(TINY)
    labels = tokens.roll(-1, 1)
    labels[0, 5:], labels[1, 0] = -100, -100
    log_p = F.log_softmax(model(tokens, positions).double(), -1)
    counted = [-log_p[b, t, labels[b, t]] for b in range(2) for t in range(13) if labels[b, t] != -100]
    loss = models.loss_fn(model, {"tokens": tokens, "labels": labels, "positions": positions})
    assert len(counted) == 5 + 12
    torch.testing.assert_close(loss.double(), torch.stack(counted).mean(), atol=1e-6, rtol=1e-6)


def drawn_values(cfg, seed=3, dtype=torch.float32):
    """Return the full initial values of a model, by name."""
    return {name: value[()] for name, value in models.initial_parameters(models.build(cfg), seed, dtype)}


def test_initial_values_follow_the_scheme():
    cfg = dataclasses.replace(TINY, dim=256, ffn_dim=512, n_layers=8)
    for name, value in drawn_values(cfg).items():
        if "norm" in name:
            assert value.eq(1).all(), name
            continue
        std = 0.02 / 4 if name.endswith(("wo.weight", "w2.weight")) else 0.02  # sqrt(2 * 8) = 4
        assert abs(value.std() / std - 1) < 0.03 and abs(value.mean()) < std / 20, name


def test_initial_values_depend_on_seed_and_name_alone():
    first = drawn_values(TINY)
    torch.manual_seed(99)  # the global generator has no effect
    for name, value in drawn_values(dataclasses.replace(TINY, n_layers=1)).items():
        scale = 2**0.5 if name.endswith(("wo.weight", "w2.weight")) else 1.0
        torch.testing.assert_close(value, first[name] * scale)
    other = drawn_values(TINY, seed=4)
    drawn = [name for name in first if "norm" not in name]
    assert all(not torch.equal(first[name], other[name]) for name in drawn)
    assert len({first[name].flatten()[0].item() for name in drawn}) == len(drawn)


def test_initial_values_are_cast_last_and_come_once_a_parameter():
    cfg = dataclasses.replace(TINY, tied=True)
    full, half = drawn_values(cfg), drawn_values(cfg, dtype=torch.bfloat16)
    assert list(full) == [name for name, _ in models.build(cfg).named_parameters()] and "output.weight" not in full
    for name, value in half.items():
        assert torch.equal(value, full[name].bfloat16())


class WithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return models.loss_fn(self.model, batch)


def test_capture_keeps_operators_whole():
    with FakeTensorMode():
        model = models.Llama(TINY)
        batch = {name: torch.zeros(2, 13, dtype=torch.int64) for name in ("tokens", "labels", "positions")}
    graph = torch.export.export(WithLoss(model), (batch,)).graph
    calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert calls.count("aten.linear.default") == 7 * TINY.n_layers + 1
    assert calls.count("aten.scaled_dot_product_attention.default") == TINY.n_layers
    assert calls.count("aten.rms_norm.default") == 2 * TINY.n_layers + 1
    assert calls.count("aten.embedding.default") == calls.count("aten.cross_entropy_loss.default") == 1
    assert not {"aten.reshape.default", "aten.mm.default", "aten.contiguous.default"} & set(calls)
