"""Recurrences of transformers: our operators have its functions' values, graphs one size, and documents stay apart."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
import transformers
from oracle import LRS, NO_DECAY, assert_same, compile_lockstep, train_plainly, train_step

from compiler_trainer import recurrences
from compiler_trainer.capture import capture as capturing
from compiler_trainer.models import folder
from compiler_trainer.models.probes import way_of
from passes.rules.roles import roles

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = LAYERS | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 1, "mamba_d_head": 16, "mamba_expand": 2, "mamba_chunk_size": 8}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4,
          "linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense", "dense"], "num_local_experts": 4,
          "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {  # config, its fields, how the model learns of documents
    "qwen3_5": ("Qwen3_5TextConfig", DELTA | {"head_dim": 8}, "starts"),
    "qwen3_next": ("Qwen3NextConfig", DELTA | EXPERTS | {"head_dim": 8, "mlp_only_layers": [0, 1]}, "starts"),
    "kimi_linear": ("KimiLinearConfig", LAYERS | LATENT, "starts"),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA | {"linear_num_key_heads": 4}, "starts"),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, "starts"),
    "falcon_h1": ("FalconH1Config", MAMBA | {"mamba_d_ssm": 64, "head_dim": 8}, "starts"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", MAMBA | LAYERS | {"shared_intermediate_size": 40, "num_local_experts": 0}, "masks and starts"),
    "nemotron_h": ("NemotronHConfig", {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                                       "ssm_state_size": 6, "n_groups": 2, "chunk_size": 8}, "starts"),
}  # fmt: skip


def config_of(name: str):
    kind, fields, _ = MODELS[name]
    return getattr(transformers, kind)(**SIZES | fields)


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape).requires_grad_()


def of_delta(by_row: bool):
    """Operands of the gated delta rule: with fewer key heads, or with a decay for each row of the state."""
    keys = 4 if by_row else 2
    decay = -F.softplus(real(2, 70, 4, *[8] * by_row)).detach()
    return (real(2, 70, keys, 8), real(2, 70, keys, 8), real(2, 70, 4, 6)), {"g": decay, "beta": torch.rand(2, 70, 4), "use_qk_l2norm_in_kernel": True}


def of_mamba():
    return (real(2, 70, 4, 6), real(2, 70, 4), -torch.rand(4), real(2, 70, 2, 5), real(2, 70, 2, 5)), {
        "chunk_size": 16, "D": real(4), "dt_bias": torch.rand(4), "dt_softplus": True, "dt_limit": (0.0, 1.5)}  # fmt: skip


CALLS = [
    ("qwen3_5", "torch_chunk_gated_delta_rule", partial(of_delta, False)),
    ("olmo_hybrid", "torch_chunk_gated_delta_rule", partial(of_delta, False)),
    ("kimi_linear", "chunk_kimi_delta_attention", partial(of_delta, True)),
    ("mamba2", "mamba2_chunk_scan", of_mamba),
    ("nemotron_h", "mamba2_chunk_scan", of_mamba),
    ("qwen3_5", "causal_conv1d_fn", lambda: ((real(2, 6, 9), real(6, 4)), {"activation": "silu"})),
    ("lfm2", "causal_conv1d_fn", lambda: ((real(2, 6, 9), real(6, 3), real(6)), {})),
]


@pytest.mark.parametrize(("family", "name", "operands"), CALLS, ids=[f"{family} {name}" for family, name, _ in CALLS])
def test_operators_have_the_values_of_transformers_functions(family, name, operands):
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    args, options = operands()
    theirs = getattr(module, name)(*args, **options)
    with recurrences.recurrences_as_operators():
        assert getattr(module, name).__wrapped__, "it is not replaced"
        ours = getattr(module, name)(*args, **options)
    ours, theirs = (y[0] if isinstance(y, tuple) else y for y in (ours, theirs))
    trained = [x for x in args if x.requires_grad]
    gradients = [torch.autograd.grad(y.square().sum(), trained) for y in (ours, theirs)]
    for a, b in zip((ours, *gradients[0]), (theirs, *gradients[1])):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4 * b.detach().abs().max().item())


def test_every_such_function_of_transformers_is_known():
    """A model whose function has another name would be captured as loops over chunks."""
    names = {name for family, name, _ in CALLS}
    assert names == recurrences.FUNCTIONS.keys()
    for family in ("qwen3_5_moe", "glm5_next", "bailing_hybrid", "qwen4_exp", "bamba", "falcon_h1", "zamba2", "inkling", "jamba"):
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        assert vars(module).keys() & names, family


def test_calls_with_a_state_are_transformers_own():
    module = import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    args, options = of_delta(False)
    with recurrences.recurrences_as_operators():
        _, state = module.torch_chunk_gated_delta_rule(*args, **options, output_final_state=True)
    assert state.shape == (2, 4, 8, 6)


def captured(name: str, tokens: int):
    """Return the forward program of a model for one sequence."""

    def loss(model, batch):
        return folder.logits("causal", model, batch).square().mean()

    batch = {"tokens": torch.zeros(1, tokens, dtype=torch.long)}
    return capturing.capture(model_of(name), loss, batch, torch.device("cpu"))[0]


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "nemotron_h"])
def test_a_graph_has_one_size_for_all_lengths(name):
    sizes = [len(list(captured(name, tokens).calls())) for tokens in (128, 1024)]
    assert sizes[0] == sizes[1] < 500


def test_kernels_of_convolutions_are_known_to_optimizers():
    assert roles(captured("qwen3_5", 8))["model.layers.0.linear_attn.conv1d.weight"] == {"convolution"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
def test_documents_stay_apart(name):
    assert way_of("documents", config_of(name), is_our_loss=False) == MODELS[name][2]


def data(tokens: int = 19):
    """Return batches of two rows with three documents each."""
    generator = torch.Generator().manual_seed(1)
    lengths = [[4, 9, 6], [12, 1, 6]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in lengths])

    def one():
        ids = torch.randint(3, 64, (2, tokens), generator=generator)
        return {"tokens": ids, "labels": ids.roll(-1, 1), "positions": positions, "documents": documents}

    return [one() for _ in LRS]


MESHES = [{"cp": 2}, {"cp": 3}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}]


@pytest.mark.sweep(10)
@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), [pytest.param(name, mesh, marks=() if i == k == 0 else pytest.mark.full)
                                            for k, name in enumerate(MODELS) for i, mesh in enumerate(MESHES)], ids=str)  # fmt: skip
def test_packed_documents_train_as_on_one_device(name, mesh):
    """Models compute decays in fp32 themselves, and some round in it."""
    loss = partial(folder.loss_of, MODELS[name][2])
    model = model_of(name).double()
    metrics, state = train_plainly(model, loss, data(), NO_DECAY)
    step = compile_lockstep(model_of(name).double(), loss, data()[0], mesh, NO_DECAY)
    for actual, wanted in zip(train_step(step, data()), metrics, strict=True):
        assert_same(actual, wanted, 1e-5)
    assert_same(step.state_dict(), state, 1e-4)  # AdamW divides by the size of gradients, however small
