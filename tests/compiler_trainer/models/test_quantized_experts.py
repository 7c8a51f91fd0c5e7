"""Experts in 4 and 8 bits: as matrices by themselves, split and sent as codes, on every mesh as in eager PyTorch."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import CHATML, write_tokenizer
from commands import call
from mixture import grouped
from oracle import ADAMW, compile_lockstep, train_step, trained_alike
from safetensors.torch import load_file, save_file
from test_quantized import filled
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import ExpertsConfig, FolderConfig, LoraConfig
from compiler_trainer.models import experts as our_experts
from compiler_trainer.models import folder as folders
from compiler_trainer.models.flops import of_weights
from compiler_trainer.models.quantized import FORMATS, dequantize_weights, entries_of, quantize_weights, quantized_in
from compiler_trainer.models.skeleton import fill
from passes.ir import ir
from passes.ir.operators import kind_of, name_of
from passes.memory.recompute import saved_nodes

D, WIDTH = 64, 192


class Mixture(nn.Module):
    """Our experts, frozen, between trained layers; a router chooses two of five."""

    def __init__(self, count=5):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router, self.last = nn.Linear(D, D), nn.Linear(D, count), nn.Linear(D, D)
        self.experts = our_experts.Experts(D, ExpertsConfig(count=count, top_k=2, width=WIDTH)).requires_grad_(False)

    def forward(self, x):
        tokens = F.layer_norm(self.first(x), (D,)).flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        return self.last(F.layer_norm(self.experts(tokens, ids, weights).view(x.shape), (D,)))


def mixture(name, dtype=torch.float64):
    """Return the module with its experts in a format; None: as they are."""
    module = Mixture().to(dtype)
    values = {key: value.detach() for key, value in module.state_dict().items()}
    if name:
        assert quantize_weights(module, name, []) == f"3 of 3 frozen stacks of experts are stored in {name}"
        filled(module, values)
    return module


def error(module, batch):
    return (module(batch["x"]) - batch["y"]).square().mean()


def data(rows=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return [{k: torch.randn(rows, 3, D, dtype=dtype, generator=generator) for k in "xy"} for _ in range(3)]


@pytest.fixture(autouse=True)
def _any_dtype(monkeypatch):
    """Let experts compute in fp64 outside of captures."""
    product = SimpleNamespace(silu=F.silu, grouped_mm=lambda rows, weight, offs: grouped(rows, weight, offs))
    monkeypatch.setattr(our_experts, "F", product)


def compiled(module, mesh, example, **options):
    """Return the step, and its program after each pass, by the pass's name."""
    programs = {}
    step = compile_lockstep(module, error, example, mesh, ADAMW, observe=lambda p, record: programs.setdefault(record.name, p), **options)
    return step, programs


def placements(programs):
    return {entry.name.removeprefix("experts.quantized."): str(entry.spec) for entry in programs["place"].inputs}


# ---- formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_each_matrix_of_a_stack_is_stored_as_one_by_itself(name, is_transposed):
    owner = nn.Module()
    owner.num_experts, owner.is_transposed = 3, is_transposed
    matrices = torch.randn(3, 24, 128, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.1, 1, 30])[:, None, None]
    value = matrices.transpose(1, 2) if is_transposed else matrices
    owner.register_parameter("stack", nn.Parameter(value.clone(), requires_grad=False))
    quantize_weights(owner, name, [])
    filled(owner, {"stack": value})
    expected = torch.stack([FORMATS[name].dequantize(FORMATS[name].quantize(matrix)) for matrix in matrices])
    assert torch.equal(owner.stack, expected.transpose(1, 2) if is_transposed else expected)
    assert owner.stack.shape == value.shape and owner.quantized["stack"].codes.shape[0] == 3


def test_what_is_counted_and_what_stays():
    module = mixture("nf4")
    assert entries_of(module) == entries_of(Mixture()) and of_weights(module, 2) == of_weights(Mixture(), 2)
    expected = {name: weight() for name, weight in quantized_in(module).items()}
    dequantize_weights(module)
    assert type(module.experts) is our_experts.Experts and not quantized_in(module)
    for name, weight in expected.items():
        assert torch.equal(module.get_parameter(name), weight)
    trained = Mixture().requires_grad_(True)
    with pytest.raises(UserError, match="^model.quantize: nf4 fits none of 0 frozen linear layers "):
        quantize_weights(trained, "nf4", [])


def test_stacks_whose_rows_are_no_whole_blocks_stay():
    module = our_experts.Experts(64, ExpertsConfig(count=3, top_k=2, width=80)).requires_grad_(False)
    assert quantize_weights(module, "nf4", []) == "2 of 3 frozen stacks of experts are stored in nf4"
    assert sorted(quantized_in(module)) == ["w1", "w3"]
    with pytest.raises(UserError, match="^model.quantize: nf4 fits none of 3 frozen stacks of experts .*; set it to null$"):
        quantize_weights(our_experts.Experts(80, ExpertsConfig(count=3, top_k=2, width=80)).requires_grad_(False), "nf4", [])


# ---- meshes --------------------------------------------------------------------------------------------

MESHES = [
    {"dp_shard": 2}, {"dp_shard": 3}, {"tp": 2}, {"dp_shard": 2, "ep": 2}, {"dp_shard": 3, "ep": 3}, {"dp_shard": 4, "ep": 2},
    {"dp_shard": 2, "tp": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"cp": 3}, {"dp_replicate": 2, "tp": 3},
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(6)
def test_steps_are_those_of_eager_pytorch(name, mesh):
    trained_alike(mixture(name), error, data(), mesh, ADAMW)


@pytest.mark.parametrize("dispatch", ["all_gather", "dropless"])
def test_tokens_travel_to_experts_whose_codes_stay(dispatch):
    step, programs = compiled(mixture("mxfp4"), {"dp_shard": 4, "ep": 2}, data(8)[0], passes={"moe": {"dispatch": dispatch}})
    placed = placements(programs)
    assert placed["w1.codes"] == "[5@ep, 192@dp_shard, 32]" and placed["w2.scales"] == "[5@ep, 64@dp_shard, 6]"
    (program,) = (entry.program for entry in step.train.values())
    gathers = [n for n in program.calls() if kind_of(n) == "all_gather"]
    packed = [n for n in gathers if ir.example(n).dtype == torch.uint8]
    assert packed and all("dp_shard" in n.args and "ep" not in n.args for n in packed if ir.example(n).dim() == 3)
    products = [n for n in program.calls() if name_of(n) == "ct::grouped_mm"]
    assert {ir.example(n.args[1]).shape[0] for n in products} == {3}  # of the 5, a rank's own
    largest = max(ir.example(n).numel() for n in gathers if ir.example(n).is_floating_point())
    assert largest < D * WIDTH  # no unpacked matrix


def test_an_unpacked_stack_is_not_kept_for_the_backward():
    step, _ = compiled(mixture("nf4"), {"dp_shard": 2}, data()[0])
    (program,) = (entry.program for entry in step.train.values())
    kept = [ir.example(n) for n in saved_nodes(program)]
    assert kept and not [v for v in kept if v.is_floating_point() and v.dim() == 3 and v.shape[0] == 5]


def gathered_bytes(name, mesh):
    """Return the bytes of all gathered tensors of a step that computes in bf16."""
    step, _ = compiled(mixture(name, torch.bfloat16), mesh, data(dtype=torch.bfloat16)[0])
    (program,) = (entry.program for entry in step.train.values())
    return sum(ir.example(n).nbytes for n in program.calls() if kind_of(n) == "all_gather")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "bits"), [("nf4", 4.125), ("mxfp4", 4.25), ("nvfp4", 4.5), ("int8", 8.0)])
def test_gathers_move_packed_bytes(name, bits):
    entries, gathers = 6 * 3 * D * WIDTH, 2  # with one expert of padding; in the forward and again in the backward
    saved = gathered_bytes(None, {"dp_shard": 2}) - gathered_bytes(name, {"dp_shard": 2})
    assert saved == pytest.approx(gathers * entries * (16 - bits) / 8, rel=0.01)


@pytest.mark.parametrize(("name", "columns", "rows"), [
    ("nf4", "[5, 3@tp*64, 32]", "[5, 64, 3@tp*32]"),
    ("nvfp4", "[5, 12@tp*16, 32]", "[5, 64, 12@tp*8]"),
    ("int8", "[5, 192@tp, 64]", "[5, 64, 192@tp]"),
])  # fmt: skip
def test_tensor_parallelism_splits_between_blocks(name, columns, rows):
    _, programs = compiled(mixture(name), {"tp": 2}, data()[0])
    placed = placements(programs)
    assert (placed["w1.codes"], placed["w3.codes"], placed["w2.codes"]) == (columns, columns, rows)


# ---- models of transformers ----------------------------------------------------------------------------

SIZES = dict(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_local_experts=5,
             num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128)  # fmt: skip
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SIZES, intermediate_size=96),
    "gpt_oss": lambda: GptOssConfig(**SIZES, intermediate_size=96, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a function that writes the folder of a kind of model, once, and returns its path."""
    paths = {}

    def write(kind):
        if kind not in paths:
            torch.manual_seed(0)
            paths[kind] = tmp_path_factory.mktemp(kind) / "model"
            AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).save_pretrained(paths[kind])
            write_tokenizer(paths[kind])
            settings = {"chat_template": CHATML, "eos_token": "<|endoftext|>"}
            (paths[kind] / "tokenizer_config.json").write_text(json.dumps(settings))
        return paths[kind]

    return write


def built(path, quantize, dtype=torch.float64, **lora):
    """Return a model with LoRA, the values that it starts with, and remarks on its folder."""
    cfg = FolderConfig(str(path), attention="causal", quantize=quantize, lora=LoraConfig(rank=4, targets=("all-linear",), **lora))
    module, remarks = folders.build(cfg, dtype), []
    stored = folders.stored_values(cfg, module, remarks.append)
    remarks.append(folders.quantize(module, quantize))
    generator = torch.Generator().manual_seed(3)
    initial = {name: value[()] for name, value in folders.initial(stored, module, 0)}
    terms = {n: 0.05 * torch.randn(v.shape, generator=generator) for n, v in initial.items() if ".lora_B." in n}
    return module, initial | terms, remarks


def loss_of_tokens(module, batch):
    logits = folders.logits("causal", module, batch)
    return F.cross_entropy(logits.flatten(0, 1).double(), batch["labels"].flatten())


def token_batches(rows=5, length=9):
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(3, 300, (rows, length), generator=generator)
        yield {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": torch.arange(length).expand(rows, length).contiguous()}


@pytest.mark.parametrize(("kind", "name", "mesh"), [
    ("mixtral", "mxfp4", {"dp_shard": 2, "ep": 2}),
    ("gpt_oss", "mxfp4", {"dp_shard": 2, "tp": 2, "ep": 2}),
    ("mixtral", "nvfp4", {"dp_shard": 3, "tp": 2}),
    ("gpt_oss", "int8", {"dp_shard": 3, "ep": 3}),
])  # fmt: skip
@pytest.mark.full
def test_a_mesh_trains_terms_of_experts_as_one_rank_does(model, kind, name, mesh):
    """peft adapts Mixtral's experts, and of gpt-oss only attention."""
    module, initial, _ = built(model(kind), name)
    batches, results = list(token_batches()), []
    for axes in ({}, mesh):
        step = compile_lockstep(copy.deepcopy(module), loss_of_tokens, batches[0], axes, {"name": "sgd"}, initial=iter(initial.items()))
        results.append(([m["loss"] for m in train_step(step, batches)], step.state_dict()))
    (losses, state), (others, other_state) = results
    assert others == pytest.approx(losses, abs=1e-8)  # routers and norms compute in fp32
    trained = [key for key in state if ".lora_" in key]
    assert any(".experts." in key for key in trained) == (kind == "mixtral")
    for key in trained:
        torch.testing.assert_close(other_state[key], state[key], atol=1e-8, rtol=1e-8)


def test_terms_are_added_to_unpacked_experts_as_peft_adds_them(model):
    module, initial, _ = built(model("mixtral"), "int8", torch.float32)
    fill(module, initial.items())
    reference, plain, _ = built(model("mixtral"), None, torch.float32)
    weights = {name: weight() for name, weight in quantized_in(module).items()}
    fill(reference, (plain | {n: v for n, v in initial.items() if ".lora_" in n} | weights).items())
    batch = next(token_batches())
    ours, expected = (folders.logits("causal", m, batch) for m in (module, reference))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"dora": True}])
def test_terms_of_experts_have_neither_dropout_nor_dora(model, options):
    problem = "^model.lora: peft has neither dropout nor DoRA for the terms of experts and routers, .*; set model.lora.dropout=0 and"
    with pytest.raises(UserError, match=problem):
        built(model("mixtral"), "nf4", **options)


def job(path, run, *options):
    chats = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i + 1}"}] for i in range(40)]
    file = path.parent / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    sizes = ["train.seq_len=64", "train.global_batch_size=4", "train.steps=2", "train.microbatches=1", "lower.backend=eager", "run.dump_graphs=false"]
    files = [f"data.files=[{file}]", f"run.dir={run}"]
    return ["recipe=qlora", f"model.path={path}", "data=text", "data.chat=true", *files, *sizes, *options]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.full
def test_a_job_trains_and_its_merged_export_has_the_values(model, kind, tmp_path, capsys):
    assert call(*job(model(kind), tmp_path / "run", "model.quantize=mxfp4")) == 0
    assert "note: 8 of 9 frozen linear layers and 4 of 4 frozen stacks of experts are stored in mxfp4\n" in capsys.readouterr().out
    assert call("export", tmp_path / "run", tmp_path / "merged", "--merge") == 0
    assert "are equal: " in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").model.layers[1].mlp.experts.down_proj
    matrices = AutoModelForCausalLM.from_pretrained(model(kind)).model.layers[1].mlp.experts.down_proj.detach()
    matrices, merged = (m.transpose(1, 2) if kind == "gpt_oss" else m for m in (matrices, merged.detach()))
    difference = merged - FORMATS["mxfp4"].dequantize(FORMATS["mxfp4"].quantize(matrices))
    ranks = torch.linalg.matrix_rank(difference, rtol=1e-3)
    assert difference.abs().max() == 0 if kind == "gpt_oss" else (ranks > 0).any() and (ranks <= 16).all()


# ---- folders that are stored quantized -----------------------------------------------------------------


@pytest.fixture
def packed(model, tmp_path):
    """Return a folder of a gpt-oss with experts in MXFP4, as it was published, and its blocks and scales."""
    path, generator = tmp_path / "packed", torch.Generator().manual_seed(1)
    path.mkdir()
    tensors, stacks = {}, {}
    for name, value in load_file(model("gpt_oss") / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value
            continue
        experts, inputs, outputs = value.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        stacks[name] = blocks, scales
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((model("gpt_oss") / "config.json").read_text())
    write_config(path, config | {"quantization_config": {"quant_method": "mxfp4"}})
    return path, stacks


def write_config(path, config):
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("name", "use"), [(None, "they are dequantized"), ("int8", "they are dequantized"),
                                           ("mxfp4", "their codes are taken as they are")])  # fmt: skip
def test_experts_in_mxfp4_are_read(packed, name, use):
    path, stacks = packed
    module, initial, remarks = built(path, name, torch.float32)
    assert remarks[0] == f"4 stacks of experts of {path} are stored in mxfp4; {use}"
    fill(module, initial.items())
    for stack, (blocks, scales) in stacks.items():
        owner, _, leaf = stack.rpartition(".")
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        read = getattr(module.base_model.model.get_submodule(owner), leaf).detach()
        torch.testing.assert_close(read.float(), expected, rtol=0, atol=0 if name != "int8" else expected.abs().max() / 250)
        if name == "mxfp4":
            stored = quantized_in(module)[f"base_model.model.{stack}"]
            assert torch.equal(stored.scales, scales) and torch.equal(stored.codes << 4 | stored.codes >> 4, blocks.flatten(2))


def test_one_expert_is_read_at_a_time(packed):
    path, stacks = packed
    stored = folders.stored_values(FolderConfig(str(path)), folders.build(FolderConfig(str(path)), None))
    name, (blocks, scales) = next(iter(stacks.items()))
    whole = convert_moe_packed_tensors(blocks, scales)
    assert stored[name].shape == whole.shape and stored[name].dtype == torch.bfloat16
    assert torch.equal(stored[name][slice(1, 3), slice(5, 40)], whole[1:3, 5:40]) and torch.equal(stored[name][()], whole)


def test_other_quantized_folders_are_refused(packed):
    path, _ = packed
    config = json.loads((path / "config.json").read_text())
    write_config(path, config | {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UserError, match="config.json: has weights quantized by gptq, of which only mxfp4 is read; use the model in 16 bits$"):
        built(path, "mxfp4")


def test_blocks_without_their_scales_are_refused(packed):
    path, stacks = packed
    tensors, name = load_file(path / "model.safetensors"), next(iter(stacks))
    scales = tensors.pop(f"{name}_scales")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"lacks {name}; "):
        built(path, "mxfp4")
    save_file(tensors | {f"{name}_scales": scales[:, :-1].contiguous()}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"{name}_blocks: has shape .*, but {name}_scales has .*; MXFP4 has bytes of shapes "):
        built(path, "mxfp4")


def test_a_stack_that_is_read_in_parts_is_joined_in_parts(model):
    """Mixtral's files have a matrix for each expert and kind, two of which are one parameter."""
    cfg = FolderConfig(str(model("mixtral")))
    stored = folders.stored_values(cfg, folders.build(cfg, None))
    whole = AutoModelForCausalLM.from_pretrained(model("mixtral")).model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(stored["model.layers.0.mlp.experts.gate_up_proj"][(slice(2, 4),)], whole[2:4])
