"""Models of folders that transformers wrote: module, weights, reads and refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial

import folders
import peft
import pytest
import torch
from oracle import assert_same, compile_lockstep, train_plainly, train_step
from safetensors.torch import load_file, save_file
from sweeps import quick
from transformers import ApertusConfig, AutoConfig, AutoModelForCausalLM, MambaConfig

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, FolderConfig, LoraConfig
from compiler_trainer.models import flops, weights
from compiler_trainer.models import folder as models_of_folders
from compiler_trainer.models.shrunk import shrunk
from compiler_trainer.models.subject import subject

MESH = {"dp_shard": 2, "tp": 2}
SGD = {"name": "sgd", "momentum": 0.9}
LOSSES, WEIGHTS = 2e-6, 2e-6  # norms and the router compute in fp32, whatever the model's dtype
LORA = LoraConfig(rank=3, targets=("all-linear",))


def values_of(cfg, module, seed=0):
    """Return the initial values of a skeleton, by name."""
    return models_of_folders.initial(models_of_folders.stored_values(cfg, module), module, seed)


def of(kind: str, **options) -> FolderConfig:
    return FolderConfig(str(folders.folder(kind)), **options)


def batches(count: int = 3, length: int = 13):
    """Return sequences of two documents each."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.cat((torch.arange(5), torch.arange(length - 5))).expand(3, length).contiguous()
    for _ in range(count):
        tokens = torch.randint(3, 300, (3, length), generator=generator)
        yield {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": positions}


def in_fp64(cfg: FolderConfig):
    """Return the skeleton in fp64, its values, and its loss."""
    module = models_of_folders.build(cfg, torch.float64)
    return module, values_of(cfg, module), partial(models_of_folders.loss_of, cfg.attention)


def exactly(loss):
    """Return a loss whose cross-entropy is in the dtype of the logits."""
    def in_fp64(attention, model, batch):
        logits = models_of_folders.logits(attention, model, batch)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return partial(in_fp64, *loss.args)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "attention"), quick([*((kind, "documents") for kind in folders.CONFIGS), ("llama", "causal")], 2, 4, 5))
def test_a_folder_trains_as_what_transformers_loads_of_it(kind, attention):
    module, initial, loss = in_fp64(of(kind, attention=attention))
    data, loss = list(batches()), exactly(loss)
    reference = folders.loaded(folders.folder(kind))
    metrics, final = train_plainly(reference, loss, data, SGD)
    step = compile_lockstep(module, loss, data[0], MESH, SGD, initial=initial)
    assert [m["loss"] for m in train_step(step, data)] == pytest.approx([m["loss"] for m in metrics], abs=LOSSES)
    actual, tied = step.state_dict(), {"lm_head.weight"} & set(getattr(reference, "all_tied_weights_keys", ()))
    expected = {name: value for name, value in final.items() if name not in tied}
    assert_same({name: actual[name] for name in expected}, expected, WEIGHTS)


def test_documents_do_not_see_each_other_and_a_causal_row_is_one_text():
    model, batch = folders.loaded(folders.folder("llama")), next(batches())
    changed = batch | {"tokens": batch["tokens"].clone()}
    changed["tokens"][:, 0] += 1
    for way, reaches in (("positions", False), ("causal", True)):
        first, second = (models_of_folders.logits(way, model, b)[:, 5:] for b in (batch, changed))
        assert (first != second).any() == reaches


@pytest.mark.parametrize("kind", folders.CONFIGS)
def test_every_weight_is_the_folders_own(kind):
    module = models_of_folders.build(of(kind), None)
    assert all(p.is_meta for p in module.parameters())
    expected = dict(folders.loaded(folders.folder(kind), torch.float32).named_parameters())
    actual = {name: value[()] for name, value in values_of(of(kind), module)}
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert actual.keys() - expected.keys() == dict(module.named_buffers()).keys()


def with_old_buffers(path):
    """Add a computed buffer, rounded, under its name and under the name it had in each layer."""
    frequencies = torch.ones(3, dtype=torch.bfloat16)
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
    changed(path, lambda tensors: tensors.update({name: frequencies.clone() for name in [*names, "model.rotary_emb.inv_freq"]}))


def with_one_file(path):
    """Add a single file with other weights than those of the index."""
    folders.model("llama").save_pretrained(path / "one")
    (path / "one/model.safetensors").rename(path / "model.safetensors")


def with_an_old_index(path):
    with_one_file(path)
    for file in path.glob("model-*.safetensors"):
        file.unlink()


@pytest.mark.parametrize("change", [with_old_buffers, with_one_file, with_an_old_index])
def test_a_folder_that_others_wrote_is_read_as_transformers_reads_it(broken, change):
    change(broken)
    assert_loaded(broken)


def assert_loaded(path):
    """Compare the values of a folder with those that transformers loads."""
    cfg, loaded = FolderConfig(str(path)), folders.loaded(path, torch.float32)
    values = {name: value[()] for name, value in values_of(cfg, models_of_folders.build(cfg, None))}
    expected = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    assert values.keys() == expected.keys() and all(torch.equal(values[name], value) for name, value in expected.items())


def test_names_that_a_renaming_would_spoil_and_missing_buffers(tmp_path):
    small = shrunk(AutoConfig.for_model("deepseek_v4"))
    AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(tmp_path)
    assert_loaded(tmp_path)
    changed(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("gate.bias")])
    assert "lacks model.layers.3.mlp.gate.e_score_correction_bias" in refused(tmp_path)


@pytest.mark.full
def test_a_rank_reads_no_more_than_it_owns(monkeypatch):
    read = []
    def reading(self, index):
        value = whole_of(self, index)
        read.append(value.numel())
        return value
    whole_of = weights.InFile.__getitem__
    monkeypatch.setattr(weights.InFile, "__getitem__", reading)
    module, initial, loss = in_fp64(of("mixtral"))
    step = compile_lockstep(module, loss, next(batches()), MESH, initial=initial)
    owned = sum(t.numel() for name, s in step.state.items() if name.startswith("model.") for t in s.local.values())
    assert sum(read) <= owned


def test_peft_builds_without_a_warning(recwarn):
    subject(Config(model=of("llama", lora=LORA)))
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.full
def test_peft_adds_its_terms_and_trains_nothing_else():
    module, initial, loss = in_fp64(of("llama", lora=LORA))
    initial, data, loss = list(initial), list(batches()), exactly(loss)
    reference = peft.get_peft_model(folders.loaded(folders.folder("llama")), peft.LoraConfig(
        r=3, lora_alpha=16, task_type="CAUSAL_LM", target_modules="all-linear")).double().train()
    with torch.no_grad():
        for name, value in initial:
            if ".lora_" in name:
                reference.get_parameter(name).copy_(value[()])
    before = {name: p.clone() for name, p in reference.named_parameters() if not p.requires_grad}
    metrics, final = train_plainly(reference, loss, data, SGD)
    step = compile_lockstep(module, loss, data[0], MESH, SGD, initial=initial)
    assert [m["loss"] for m in train_step(step, data)] == pytest.approx([m["loss"] for m in metrics], abs=LOSSES)
    state = step.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert_same({name: state[name] for name in final if ".lora_" in name},
                {name: value for name, value in final.items() if ".lora_" in name}, WEIGHTS)
    assert sum(value.abs().sum() for name, value in state.items() if ".lora_B." in name) > 0


def test_terms_start_as_those_of_peft():
    cfg = of("llama", lora=LoraConfig(rank=50, targets=("embed_tokens", "q_proj")))
    values = dict(values_of(cfg, models_of_folders.build(cfg, None)))
    for name, expected in models_of_folders.build_module(cfg).named_parameters():
        if ".lora_" in name:
            assert torch.allclose(values[name][()].std(), expected.std(), rtol=0.1), name


def test_random_weights_depend_on_names_alone():
    cfg = of("qwen3", init="random")
    build = partial(models_of_folders.build, cfg, None)
    draws = [{name: value[()] for name, value in values_of(cfg, build(), seed)} for seed in (3, 3, 4)]
    weight = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(draws[0][weight], draws[1][weight]) and not torch.equal(draws[0][weight], draws[2][weight])
    assert draws[0][weight].std() == pytest.approx(0.02, rel=0.1)
    assert (draws[0]["model.norm.weight"] == 1).all()


APERTUS = ApertusConfig(
    vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)


@pytest.mark.parametrize("config", [
    folders.CONFIGS["gpt2"](),
    MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, state_size=8, initializer_range=0.1),
    APERTUS,
], ids=lambda c: c.model_type)  # fmt: skip
def test_random_weights_are_as_large_as_those_of_transformers(tmp_path, config):
    """Some are set by the module around the one that has them, and some by constructors alone."""
    config.save_pretrained(tmp_path)
    cfg = FolderConfig(str(tmp_path), init="random")
    values = dict(values_of(cfg, models_of_folders.build(cfg, None)))
    for name, expected in AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters():
        value = values[name][()]
        assert torch.allclose(value.square().mean(), expected.square().mean(), rtol=0.3 if value.numel() > 200 else 0.9), name


def test_a_weight_that_transformers_does_not_initialize_is_named(monkeypatch):
    monkeypatch.setattr(models_of_folders, "initialize", lambda *_: None)
    values = dict(values_of(cfg := of("qwen3", init="random"), models_of_folders.build(cfg, None)))
    assert (values["model.norm.weight"][()] == 1).all()
    with pytest.raises(UserError, match="up_proj.weight: transformers gives it no initial value; use model.init=weights"):
        values["model.layers.1.mlp.up_proj.weight"][()]


def test_weights_that_constructors_draw_depend_on_the_seed_alone(monkeypatch, tmp_path):
    APERTUS.save_pretrained(tmp_path)
    cfg, name = FolderConfig(str(tmp_path), init="random"), "model.layers.0.mlp.act_fn.alpha_p"
    monkeypatch.setattr(torch, "expm1", torch.rand_like)  # in the constructor of its activations
    build = partial(models_of_folders.build, cfg, None)
    first, again, other = (dict(values_of(cfg, build(), seed))[name][()] for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_random_weights_are_drawn_once_and_only_if_they_are_read(monkeypatch):
    cfg, drawn = of("qwen3", init="random"), []
    draw = models_of_folders.drawn
    monkeypatch.setattr(models_of_folders, "drawn", lambda *args: drawn.append(args[1]) or draw(*args))
    for name, value in values_of(cfg, models_of_folders.build(cfg, None)):
        if "layers.1." in name:
            assert torch.equal(value[:1], value[()][:1])
    assert drawn and all("layers.1." in name for name in drawn) and len(drawn) == len(set(drawn))


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path):
    """Return a copy of the Llama folder, to be broken."""
    return shutil.copytree(folders.folder("llama"), tmp_path / "folder")


def refused(path, **options):
    cfg = FolderConfig(str(path), **options)
    with pytest.raises(UserError) as error:
        list(values_of(cfg, models_of_folders.build(cfg, None)))
    return str(error.value)


def changed(path, change):
    """Change the tensors of the first file."""
    file = sorted(path.glob("*.safetensors"))[0]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert refused(tmp_path) == f"model.path: {tmp_path} holds no config.json; name a folder that transformers wrote"


def test_a_config_of_no_language_model_is_refused(broken):
    (broken / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert "and transformers has no causal language model of" in refused(broken)


def test_an_adapter_beside_the_weights_is_refused(broken):
    (broken / "adapter_config.json").write_text("{}")
    assert "holds an adapter (adapter_config.json) beside its weights, which would be left out; merge it" in refused(broken)
    assert models_of_folders.build(FolderConfig(str(broken), init="random"), None) is not None


@pytest.mark.parametrize(("lacking", "says"), [
    (["experts.1.w3.weight"], "lacks model.layers.1.block_sparse_moe.experts.1.w3.weight;"),
    (["experts.2.w1.weight", "experts.0.w3.weight"],
     "lacks model.layers.1.block_sparse_moe.experts.2.w1.weight, model.layers.1.block_sparse_moe.experts.0.w3.weight;"),
    (["w3.weight"], r"lacks .experts.*.w3.weight;"),
])
def test_matrices_of_experts_that_are_missing_are_refused_by_name(tmp_path, lacking, says):
    broken = shutil.copytree(folders.folder("mixtral"), tmp_path / "folder")
    for file in broken.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({n: t for n, t in tensors.items() if "layers.1." not in n or not n.endswith(tuple(lacking))}, file)
    assert says in refused(broken) and refused(broken).startswith("model.layers.1.mlp.experts.gate_up_proj: is made of several")


def test_matrices_of_experts_of_another_shape_are_refused(tmp_path):
    broken = shutil.copytree(folders.folder("mixtral"), tmp_path / "folder")
    for file in broken.glob("*.safetensors"):
        save_file({n: t[:, :-1].contiguous() if "w3" in n else t for n, t in load_file(file).items()}, file)
    assert refused(broken).startswith("model.path: has tensors of shapes [3, 24] and [3, 23], which do not join")


def test_a_missing_file_is_refused(broken):
    file = sorted(broken.glob("*.safetensors"))[1]
    file.unlink()
    assert refused(broken).startswith(f"{file}: no such file")


def test_a_file_cut_short_is_refused(broken):
    file = sorted(broken.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-8])
    assert refused(broken).startswith(f"{file}: is not a safetensors file")


def test_a_missing_tensor_is_refused(broken):
    changed(broken, lambda tensors: tensors.pop(max(tensors)))
    assert "lacks " in refused(broken)


def test_a_tensor_too_many_is_refused(broken):
    changed(broken, lambda tensors: tensors.update(stray=torch.zeros(2)))
    assert "holds stray; which the model of its config.json does not have" in refused(broken)


def test_a_tensor_of_another_shape_is_refused(broken):
    def cut(tensors):
        name = max(tensors, key=lambda name: tensors[name].dim())
        tensors[name] = tensors[name][:-1].contiguous()
    changed(broken, cut)
    assert "has shape [" in refused(broken)


def test_different_values_of_tied_weights_are_refused(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    problem = "holds different values for model.embed_tokens.weight and lm_head.weight, which its config.json ties"
    assert refused(broken) == f"{broken}: {problem}; set tie_word_embeddings=false there"
    tensors = {name: value for file in broken.glob("*.safetensors") for name, value in load_file(file).items()}
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, broken / "model.safetensors")
    assert_loaded(broken)


def test_layers_that_are_not_there_get_no_terms(broken):
    assert refused(broken, lora=replace(LORA, targets=("nothing",))).startswith("model.lora.targets: ")


# ---- slices -------------------------------------------------------------------------------------------


def test_slices_of_several_tensors_are_those_of_the_whole(tmp_path):
    tensors = {f"t{i}": torch.randn(4, 6) for i in range(6)}
    save_file(tensors, tmp_path / weights.ONE_FILE)
    stored = weights.stored_in(tmp_path)
    halves = [weights.Stacked([stored[f"t{i}"] for i in part]) for part in ((0, 1, 2), (3, 4, 5))]
    joined = weights.Joined(halves, 1)
    full = torch.cat([torch.stack([tensors[f"t{i}"] for i in part]) for part in ((0, 1, 2), (3, 4, 5))], 1)
    assert joined.shape == full.shape and torch.equal(joined[()], full)
    for first in range(8):
        for last in range(first + 1, 9):
            index = (slice(1, 3), slice(first, last), slice(2, 5))
            assert torch.equal(joined[index], full[index])


def test_a_subject_of_a_folder_has_its_sizes():
    model = subject(Config(model=of("llama")))
    assert model.vocab_size == 300 and model.frozen == frozenset()
    layer = 24 * 24 * 2 + 2 * 24 * 12 + 3 * 24 * 36 + 2 * 24
    assert model.flops_per_token(8) == 6 * (2 * layer + 24 + 300 * 24) + 12 * 2 * 4 * 6 * 8


@pytest.mark.parametrize(("kind", "options", "expected"), [
    ("llama", {}, 2 * 8 * 8),
    ("gpt2", {}, 2 * 8 * 8),
    ("deepseek_v3", {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8}, 2 * 12 * 8),
    ("gemma3_text", {"sliding_window": 5, "head_dim": 6, "layer_types": ["sliding_attention", "full_attention"]}, 6 * (5 + 8)),
    ("qwen3_next", {"head_dim": 6, "layer_types": ["linear_attention", "full_attention"]}, 6 * 8),
])
def test_flops_of_attention_are_those_of_its_heads_and_kinds(kind, options, expected):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model(kind, **sizes, **options)
    assert flops.of_folder(config, torch.nn.Linear(2, 2), 8) - flops.of_weights(torch.nn.Linear(2, 2)) == 12 * 4 * expected
