"""Export of a run's weights into a folder for transformers and peft, or for any reader of safetensors."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import Tensor, nn

from compiler_trainer.config.errors import RunError, UserError, one_line
from compiler_trainer.config.files import ends_of_answers
from compiler_trainer.config.schema import Config, EmbedConfig, FolderConfig, ModelConfig
from compiler_trainer.data.tokenizers import tokenizer_here, tokenizer_of
from compiler_trainer.models.decoders import as_transformers, form_of, further_values, has_form_of_further
from compiler_trainer.models.float8 import FLOAT8, to_float8
from compiler_trainer.models.folder import CLASSES, SEEING, library, plain, unmatched
from compiler_trainer.models.gguf.architectures import architecture_of, is_read
from compiler_trainer.models.gguf.file import TYPES, is_gguf, write_gguf
from compiler_trainer.models.merge import merged, save
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.transformers_private import further_layers, without_further_layers
from compiler_trainer.models.weights import INDEX, ONE_FILE, stored_in
from compiler_trainer.runs.check_export import check_export_alone, config_of_run
from compiler_trainer.runs.saved import trained_model
from compiler_trainer.widths import DtypeOf, cast_parameters

DTYPES: dict[str, torch.dtype | None] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    FLOAT8: None,  # written from weights in train.dtype
}
GENERATION, TEMPLATES = "generation_config.json", "additional_chat_templates"
NOT_COPIED = frozenset((".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".md"))
TELLS_OF_WEIGHTS = ("config.json", "model.safetensors.index", "pytorch_model.bin.index", "adapter_config")
TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab.", "merges.")  # names begin so
ANSWER = "forty-two"
FURTHER = "model-mtp.safetensors"
LEFT_OUT = "; without the layers of multi-token prediction, which transformers has for DeepSeek-V3 with experts only"
POOLING = {"mean": "mean_tokens", "last": "lasttoken"}  # names of sentence-transformers
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # next to a tokenizer.json
END = "<|endoftext|>"  # a byte tokenizer's end of document


def export(cfg: Config, out: Path, dtype: str | None, merge: bool, averaged: bool = False, check: bool = False) -> str:
    """Write the newest checkpoint of a run as a folder, or as a file OUT.gguf; return a sentence on how to load it.

    `dtype` is the dtype of the weights, one of `DTYPES` or, in a GGUF file, of its `TYPES` (None: `train.dtype`). For a
    model with LoRA only the adapters are written or, with `merge`, the model with the adapters merged. `averaged`
    weights are those of `train.ema`. The folder or file appears once it is complete and, with `check`, gives a few
    tokens the trainer's log-probabilities. Raises UserError if a model has no such form, and RunError if the
    log-probabilities differ.
    """
    if out.exists() and (is_gguf(out) or not out.is_dir() or any(out.iterdir())):
        raise UserError(str(out), "exists already; name a new or an empty folder")
    check_options(cfg, out, dtype, merge)
    _, module = trained_model(cfg, averaged)
    target = out.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        partial = Path(scratch, "export")
        partial.mkdir()
        sentence = write(cfg, module, partial, None if is_gguf(out) else DTYPES.get(dtype or ""), merge)
        del module  # the check needs memory of its own
        folder = partial
        if dtype == FLOAT8:
            to_float8(folder)
            sentence = f"serve it with vLLM: vllm serve {partial}"
        if is_gguf(out):
            partial = Path(scratch, target.name)
            write_gguf(folder, partial, dtype or cfg.train.dtype, target.stem)
            sentence = f"run it with llama.cpp: llama-cli -m {partial}"
        if isinstance(cfg.model, FolderConfig) and cfg.model.quantize and not merge:
            sentence += f"; not checked, because it was trained on weights in {cfg.model.quantize}"
        elif check and is_gguf(out) and not is_read(config_of_run(cfg).model_type):
            sentence += f"{check_few(cfg, folder, averaged)}; a folder was checked, transformers does not read the file"
        elif check and isinstance(cfg.model, FolderConfig | ModelConfig):
            sentence += check_few(cfg, partial, averaged)
        partial.replace(target)
    return sentence.replace(str(partial), str(out))


def check_options(cfg: Config, out: Path, dtype: str | None, merge: bool) -> None:
    """Raise UserError if a run has no export of this form, before its weights are read."""
    if isinstance(cfg.model, ModelConfig):
        form_of(cfg.model)
    has_adapters = isinstance(cfg.model, FolderConfig) and cfg.model.lora is not None
    if merge and not has_adapters:
        raise UserError("--merge", "needs a model with model.lora; this one has nothing to merge")
    types = TYPES if is_gguf(out) else DTYPES
    if dtype is not None and dtype not in types:
        kind, other = ("GGUF files", "a folder") if is_gguf(out) else ("folders", "a file OUT.gguf")
        raise UserError("--dtype", f"{dtype} is no type of {kind}; choose one of {', '.join(types)}, or name {other}")
    if not is_gguf(out) and dtype != FLOAT8:
        return
    form = "GGUF" if is_gguf(out) else "float8"
    if has_adapters and not merge:
        raise UserError(str(out), f"{form} is for whole models, and this run has adapters; add --merge")
    if not isinstance(cfg.model, FolderConfig | ModelConfig) or cfg.head != "lm" or cfg.sees:
        raise UserError(str(out), f"{form} is written for causal language models alone; export a folder, not in float8")
    import_module("gguf" if is_gguf(out) else "compressed_tensors")  # extras
    if is_gguf(out):
        architecture_of("model", config_of_run(cfg).to_dict())


def check_few(cfg: Config, folder: Path, averaged: bool) -> str:
    """Return a sentence on the difference of an export; raise RunError if its log-probabilities differ."""
    is_same, sentence = check_export_alone(cfg, folder, averaged)
    if not is_same:
        fix = "nothing is written; check unusual parts of the model, or skip the check with --no-check"
        raise RunError(f"the export computes something different from the trainer: {sentence}; {fix}")
    return f"; {sentence}"


def write(cfg: Config, module: Any, out: Path, dtype: torch.dtype | None, merge: bool) -> str:
    """Write a module with the weights of a run; return a sentence on how to load it."""
    if isinstance(cfg.model, FolderConfig):
        write_folder(cfg, module, out, dtype, merge)
        if not is_models_tokenizer(cfg):
            write_tokenizer(cfg, out)
            name_end(out, tokenizer_of(cfg.data).end_of_document)
        stops = stop_at_turns(out) if cfg.data.chat and cfg.model.head == "lm" else ""
        if cfg.model.lora and not merge:
            labels = f", of a model with num_labels={plain(module).num_labels}" if cfg.model.head == "score" else ""
            return f"load it with peft's PeftModel.from_pretrained(model, {str(out)!r}){labels}{stops}"
        kind = SEEING if cfg.sees else CLASSES[cfg.model.head]
        return f"{loaded_by_transformers(out, kind)}{stops}"
    if isinstance(cfg.model, ModelConfig):
        model = as_transformers(cfg.model, module)
        model.config.max_position_embeddings = cfg.train.seq_len  # the model was not trained on longer ones
        end = tokenizer_of(cfg.data).end_of_document
        model.config.eos_token_id = model.generation_config.eos_token_id = end
        dtype_of = cast_parameters(model, dtype)
        save(model, out)
        add_tensors(out, further_values(cfg.model, module, model), dtype_of)
        write_tokenizer(cfg, out)
        name_end(out, end)
        left_out = "" if cfg.model.mtp is None or has_form_of_further(cfg.model) else LEFT_OUT
        return f"{loaded_by_transformers(out, CLASSES['lm'])}{left_out}"
    shutil.copy(Path(cfg.run.dir, "config.yaml"), out / "config.yaml")
    cast_parameters(module, dtype)
    save_file({name: value.contiguous() for name, value in untied(module).items()}, out / ONE_FILE)
    return f"load it with model.load_state_dict(safetensors.torch.load_file({str(out / ONE_FILE)!r}))"


def add_tensors(out: Path, tensors: Mapping[str, Tensor], dtype_of: DtypeOf = lambda name, value: value.dtype) -> None:
    """Write further tensors into a folder that transformers wrote; in a folder with an index, as one more file."""
    index = out / INDEX
    if not tensors:
        return
    tensors = {name: value.to(dtype_of(name, value)).contiguous() for name, value in tensors.items()}
    if index.is_file():
        save_file(tensors, out / FURTHER, {"format": "pt"})
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["weight_map"] |= dict.fromkeys(tensors, FURTHER)
        index.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    else:
        save_file(load_file(out / ONE_FILE) | tensors, out / ONE_FILE, {"format": "pt"})


def loaded_by_transformers(out: Path, name: str) -> str:
    """Return a sentence on loading such a folder with a class of transformers."""
    return f"load it with transformers' {name}.from_pretrained({str(out)!r})"


def write_folder(cfg: Config, module: Any, out: Path, dtype: torch.dtype | None, merge: bool) -> None:
    """Write a folder like the model's own; for LoRA only the adapters, or all weights with the adapters merged."""
    assert isinstance(cfg.model, FolderConfig)
    configured_path, local_path = cfg.model.path, folder_of(cfg).path
    if cfg.model.lora:
        base = str(Path(configured_path).resolve()) if local_path == configured_path else configured_path
        module.peft_config["default"].base_model_name_or_path = base
    if merge:
        module = merged(module)
    if cfg.model.head == "score":
        set_padding(cfg, plain(module).config)
    if isinstance(cfg.loss, EmbedConfig) and (merge or not cfg.model.lora):
        write_pooling(cfg.loss, plain(module).config.hidden_size, cfg.train.seq_len, out)
    further = further_tensors(cfg.model, module, Path(local_path)) if merge or not cfg.model.lora else {}
    dtype_of = cast_parameters(module, dtype)
    save(module, out)
    add_tensors(out, further, dtype_of)
    (out / GENERATION).unlink(missing_ok=True)  # save_pretrained made it from config.json
    for file in sorted(Path(local_path).rglob("*")):
        name = file.relative_to(local_path)
        is_kept = is_models_tokenizer(cfg) or not is_of_tokenizer(name)
        if file.is_file() and is_copied(name) and is_kept and not (out / name).exists():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copy(file, out / name)


def further_tensors(cfg: FolderConfig, module: Any, base: Path) -> dict[str, Tensor]:
    """Return the layers of multi-token prediction as files have them, and take them off the module.

    Those that were not trained are those of the model that training started from, if it has any.
    """
    model = plain(module)
    if cfg.mtp is not None:
        return without_further_layers(model)
    if cfg.head != "lm" or cfg.init != "weights":
        return {}
    stored = stored_in(base)
    others = set(unmatched(stored, further_layers(model)))
    return {name: value[()] for name, value in stored.items() if name not in others}


def write_pooling(loss: EmbedConfig, features: int, seq_len: int, out: Path) -> None:
    """Write the files by which sentence-transformers makes embeddings from the hidden states of a folder's model."""
    pooling = {"word_embedding_dimension": features, f"pooling_mode_{POOLING[loss.pooling]}": True}
    if loss.pooling != "mean":
        pooling["pooling_mode_mean_tokens"] = False  # its default
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    files = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": seq_len, "do_lower_case": False},
        "1_Pooling/config.json": pooling,
    }
    for name in ("1_Pooling", "2_Normalize"):
        (out / name).mkdir()
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def set_padding(cfg: Config, config: Any) -> None:
    """Leave out a config's padding token if the texts that are scored end with it; give one to others that have none.

    transformers scores the last token that is no padding: in a text that ends so, it would be another than in training.
    """
    settings = tokenizer_of(cfg.data).settings
    ends = {settings.end_of_document, *settings.stops} if cfg.data.chat else set(settings.ending)
    if config.pad_token_id is None and settings.end_of_document not in ends:
        config.pad_token_id = settings.end_of_document
    if config.pad_token_id in ends:
        config.pad_token_id = None


def is_copied(name: Path) -> bool:
    """Return True if an export copies a file of the model's folder: all but weights, their indexes and the config."""
    is_top_level = len(name.parts) == 1 or name.parts[0] == TEMPLATES and len(name.parts) == 2
    return is_top_level and name.suffix not in NOT_COPIED and not name.name.startswith((".", *TELLS_OF_WEIGHTS))


def is_models_tokenizer(cfg: Config) -> bool:
    """Return True if `data.tokenizer` is the one in the model's folder."""
    assert isinstance(cfg.model, FolderConfig)
    file = Path(cfg.data.tokenizer)
    return file.name == "tokenizer.json" and file.parent.resolve() == Path(cfg.model.path).resolve()


def is_of_tokenizer(name: Path) -> bool:
    """Return True for a tokenizer's files: vocabulary, configuration, chat templates."""
    return name.parts[0] == TEMPLATES or name.suffix in (".model", ".tiktoken") or name.name.startswith(TOKENIZER)


def stop_at_turns(out: Path) -> str:
    """Add the token that ends a chat answer to the tokens at which generation stops.

    Return the text to append to the sentence on the export.
    """
    stops = sorted(ends_of_answers(out))
    try:
        end = end_of_turn(out)
    except Exception as error:  # the folder's tokenizer may raise anything
        message = one_line(error)
        return (
            f"; transformers does not write chats with its tokenizer ({message}): generation stops at {stops} as before"
        )
    if end is None or end in stops:
        return ""
    path = out / GENERATION
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(settings | {"eos_token_id": [*stops, end]}, indent=2) + "\n", encoding="utf-8")
    return f"; {GENERATION} has token {end}, which ends an answer, as one more eos_token_id"


def end_of_turn(out: Path) -> int | None:
    """Return the first added token that a folder's chat template writes after an answer; None if there is none."""
    tokenizer = library().AutoTokenizer.from_pretrained(out)
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ANSWER}]
    after_answer = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(ANSWER)[2]
    ids = tokenizer(after_answer, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in tokenizer.added_tokens_decoder), None)


def untied(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module; tied tensors are under both names, each with its own memory."""
    pointers: set[int] = set()
    state = {}
    for name, value in module.state_dict().items():
        state[name] = value.clone() if value.data_ptr() in pointers else value
        pointers.add(value.data_ptr())
    return state


def write_tokenizer(cfg: Config, out: Path) -> None:
    """Write the tokenizer of the run and its chat template; a byte tokenizer in the form of a tokenizer.json."""
    if cfg.data.tokenizer != "bytes":
        tokenizer_file = Path(tokenizer_here(cfg.data))
        files = {"tokenizer.json": tokenizer_file, **{name: tokenizer_file.with_name(name) for name in BESIDE}}
        for name, file in files.items():
            if file.is_file() and not (out / name).exists():
                shutil.copy(file, out / name)
        return
    symbols = byte_symbols()
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(out / "tokenizer.json"))


def name_end(out: Path, end: int) -> None:
    """Write the token that ends a document into a tokenizer_config.json, unless there is one."""
    path = out / "tokenizer_config.json"
    if not path.exists():
        token = Tokenizer.from_file(str(out / "tokenizer.json")).id_to_token(end)
        path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}, indent=2) + "\n")


def byte_symbols() -> list[str]:
    """Return the character for each byte in a tokenizer.json: itself if it prints, otherwise one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
