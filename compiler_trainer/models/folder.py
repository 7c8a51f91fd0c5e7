"""A language model in a folder that transformers wrote: the module of its config.json, and its weights.

With another head than the one for next tokens, the module is that of a sequence classification, or has no head.
"""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.config import extras
from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.options import MOST_LAYERS
from compiler_trainer.config.schema import FolderConfig, LoraConfig
from compiler_trainer.models.documents import RESTARTING, inputs_of
from compiler_trainer.models.init import seeded
from compiler_trainer.models.loss import PADDING_DOCUMENT, cross_entropy, widened
from compiler_trainer.models.quantized import FORMATS, originals_in, quantize_weights, quantized_in, weights_of
from compiler_trainer.models.skeleton import EmptyOnMeta, skeleton
from compiler_trainer.models.transformers_private import (
    Conversion,
    absent,
    add_further_layers,
    balance_of_real_tokens,
    conversion_of,
    conversion_of_further_layers,
    further_layers,
    ignored,
    in_order,
    initialize,
)
from compiler_trainer.models.weights import InMxfp4, Joined, Made, Stacked, stored_in, text_alone, with_stacks
from compiler_trainer.recurrences import recurrences_as_operators
from passes.ir.spec import Stored, Value

SHOWN = 3  # tensors named in an error
ROWS = 4096  # compared at a time
FURTHER = "mtp"  # the attribute of a model that holds its layers of multi-token prediction
MAGNITUDE = ".lora_magnitude_vector."  # in the name of a length that DoRA trains
# how peft renames what it adapts, and a head that it trains whole
ADAPTED, INNER = "base_model.model.", re.compile(r"((\.base_layer)+|\.original_module|\.modules_to_save\.default)\.")
ADAPTER = "adapter_config.json"  # peft's, which transformers also reads in the folder of a model
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert, in a name
SEEING = "AutoModelForImageTextToText"  # the class of a vision-language model
CLASSES = {"lm": "AutoModelForCausalLM", "score": "AutoModelForSequenceClassification", "none": "AutoModel"}  # by head
TASKS = {"lm": "CAUSAL_LM", "score": "SEQ_CLS", "none": "FEATURE_EXTRACTION"}  # peft's names
READ_METHOD = "mxfp4"  # a quantization_config.quant_method: experts of gpt-oss
SCORE = "score"  # the head of a sequence classification in transformers' decoders


def library(name: str = "transformers") -> Any:
    """Return the module of that name; raise UserError if it is not installed."""
    for chatty in ("torchao", "torch.utils._pytree"):  # of kernels for other machines, and of torchao's types
        logging.getLogger(chatty).setLevel(logging.ERROR)
    return extras.library(name, "model")


def config_of(cfg: FolderConfig, sees: bool = False) -> Any:
    """Return the config.json of the folder; raise UserError unless it is of a causal language model.

    That is the text model of a vision-language model; with `sees`, the whole config must be of one.
    """
    transformers = library()
    if not Path(cfg.path, "config.json").is_file():
        raise UserError("model.path", f"{cfg.path} holds no config.json; name a folder that transformers wrote")
    if cfg.init == "weights" and Path(cfg.path, ADAPTER).is_file():
        problem = f"{cfg.path} holds an adapter ({ADAPTER}) beside its weights, which would be left out"
        raise UserError("model.path", f"{problem}; merge it into them, or remove its files")
    try:
        config = transformers.AutoConfig.from_pretrained(cfg.path, trust_remote_code=False)
    except Exception as error:  # any kind: the file is at fault
        raise UserError(f"{cfg.path}/config.json", one_line(error)) from error
    if sees and type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        problem = f"{cfg.path} is a {config.model_type}, and transformers has no vision-language model of that type"
        raise UserError("data.images_per_row", f"{problem}; leave it at 0 to train on text")
    whole, config = config, config.get_text_config()
    if not sees and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        problem = f"is of a {config.model_type}, and transformers has no causal language model of that type"
        raise UserError(f"{cfg.path}/config.json", problem)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        if (method := quantization.get("quant_method")) != READ_METHOD:
            problem = f"has weights quantized by {method}, of which only {READ_METHOD} is read"
            raise UserError(f"{cfg.path}/config.json", f"{problem}; use the model in 16 bits")
        del config.quantization_config  # transformers would build modules of its own for it
    if getattr(config, "num_hidden_layers", 0) > MOST_LAYERS:
        problem = f"num_hidden_layers is {config.num_hidden_layers:,}; at most {MOST_LAYERS:,} are built"
        raise UserError(f"{cfg.path}/config.json", problem)
    return whole if sees else config


def text_config_of(cfg: FolderConfig, sees: bool) -> Any:
    """Return the config of the text model of a folder, of a vision-language model if it `sees`."""
    return config_of(cfg, sees).get_text_config()


def build_module(cfg: FolderConfig, labels: tuple[str, ...] = (), sees: bool = False) -> nn.Module:
    """Return the model of the folder, in training mode, with arbitrary weights; with `lora`, inside peft's model.

    A head of scores has one for each of `labels`, or one alone. With `sees` it is the vision-language model.
    """
    transformers = library()
    config = config_of(cfg, sees)
    if cfg.head == "score":
        set_labels(cfg, config, labels)
    try:
        kind = SEEING if sees else CLASSES[cfg.head]
        module = getattr(transformers, kind).from_config(config, dtype=torch.float32)
    except Exception as error:  # any kind: the file is at fault
        problem = f"describes a model that cannot be built: {one_line(error)}"
        raise UserError(f"{cfg.path}/config.json", problem) from error
    if cfg.head == "score" and not hasattr(module, SCORE):
        problem = f"is of a {config.model_type}, whose sequence classification has no layer {SCORE!r}"
        raise UserError("model.path", f"{problem} after its last token; use another model")
    if cfg.mtp is not None:
        add_further(cfg, module)
    return module.train() if cfg.lora is None else adapted(module, cfg.lora, TASKS[cfg.head])


def add_further(cfg: FolderConfig, module: Any) -> None:
    """Add the layers of multi-token prediction to a model; raise UserError if its config.json has none."""
    name = module.config.model_type
    if not getattr(module.config, "num_mtp_layers", None):
        problem = f"trains layers of multi-token prediction, but the {name} in {cfg.path} has none"
        raise UserError("model.mtp", f"{problem} (num_mtp_layers in its config.json); set it to null")
    try:
        add_further_layers(module)
    except Exception as error:  # any kind: transformers cannot build them
        problem = f"transformers cannot build the layers of multi-token prediction of a {name}"
        raise UserError("model.mtp", f"{problem} ({one_line(error)}); set it to null") from error


def set_labels(cfg: FolderConfig, config: Any, labels: tuple[str, ...]) -> None:
    """Set the names of classes, or one label for a reward; raise UserError if the folder's own head has others."""
    named = dict(enumerate(labels or ["LABEL_0"]))
    is_trained = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    generic = {number: f"LABEL_{number}" for number in named}
    if cfg.init == "weights" and is_trained and config.id2label not in (named, generic):
        theirs = ",".join(config.id2label.values())
        problem = f"{list(labels)}, but the head of {cfg.path} has {len(config.id2label)} labels, {theirs}"
        raise UserError("data.labels", f"{problem}; set these, or model.init=random")
    config.id2label, config.label2id = named, {name: number for number, name in named.items()}
    config.problem_type = "single_label_classification" if labels else None


def adapted(module: nn.Module, lora: LoraConfig, task: str = TASKS["lm"]) -> nn.Module:
    """Return the module inside peft's model, which trains low-rank terms, and all of a head of scores."""
    peft = library("peft")
    targets: Any = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets) or None
    options = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=targets,
        task_type=task,
    )
    try:
        with warnings.catch_warnings():  # peft 0.21 uses a name that transformers 5.2 renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            return peft.get_peft_model(module, options).train()
    except ValueError as error:
        if "ParamWrapper" in str(error) and (lora.dropout or lora.dora):
            problem = "peft has neither dropout nor DoRA for the terms of experts and routers, which it adapts here"
            fix = "set model.lora.dropout=0 and model.lora.dora=false, or model.lora.targets to layers of attention"
            raise UserError("model.lora", f"{problem}; {fix}") from error
        raise UserError("model.lora.targets", one_line(error)) from error


def outputs(way: str, model: nn.Module, batch: Mapping[str, Tensor], **options: bool) -> Any:
    """Return the outputs of the model; `way` is how the model learns of documents (`documents.WAYS`)."""
    config = plain(model).config
    inputs = inputs_of(way, config, model, batch)
    with ExitStack() as stack:
        stack.enter_context(recurrences_with_starts(way, batch))
        if getattr(config, "output_router_logits", False):
            is_real = batch["documents"] != PADDING_DOCUMENT
            stack.enter_context(balance_of_real_tokens(plain(model), is_real))
        return model(input_ids=batch["tokens"], use_cache=False, **inputs, **options)


def recurrences_with_starts(way: str, batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Return a context in which recurrences restart at each document, if the model is told of them so."""
    return recurrences_as_operators(batch["positions"] == 0) if way in RESTARTING else nullcontext()


def logits(way: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return logits [B, T, V]."""
    return outputs(way, model, batch).logits


def hidden_states(way: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the hidden states of all tokens after the last layer, [B, T, D]."""
    whole = plain(model)
    base = getattr(whole, whole.base_model_prefix, whole)
    inputs = inputs_of(way, whole.config, model, batch)
    with recurrences_with_starts(way, batch):
        return base(input_ids=batch["tokens"], use_cache=False, **inputs).last_hidden_state


def scores(way: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the scores of all tokens, [B, T, classes]; transformers' own forward has those of the last token."""
    return plain(model).get_submodule(SCORE)(hidden_states(way, model, batch))


OUTPUTS = {"lm": logits, "score": scores, "none": hidden_states}  # by head


def loss_of(way: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the labels, as `cross_entropy`, plus the terms that transformers adds to it."""
    return loss_of_outputs(model, outputs(way, model, batch), batch)


def loss_of_outputs(model: nn.Module, out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a model's outputs as `loss_of`."""
    loss = cross_entropy(out.logits, batch["labels"])
    for weight, term in further_terms(plain(model), out):
        loss = loss + weight * term
    return loss


def further_terms(model: Any, out: Any) -> Iterator[tuple[float, Tensor]]:
    """Yield further terms of the loss with their weights: router balance (`output_router_logits`), Bamba's z-loss."""
    balance = getattr(out, "aux_loss", None)
    if isinstance(balance, Tensor):
        places = itertools.product((model, model.config), ("router_aux_loss_coef", "aux_loss_coef"))
        yield next(float(getattr(place, name)) for place, name in places if hasattr(place, name)), balance
    if getattr(model, "z_loss_coefficient", 0) > 0:
        yield model.z_loss_coefficient, widened(out.logits).logsumexp(-1).square().mean()


# ---- values -------------------------------------------------------------------------------------------


def initial(stored: Mapping[str, Stored] | None, module: nn.Module, seed: int) -> Iterator[tuple[str, Value]]:
    """Yield every parameter and buffer of a skeleton: the folder's value, or one drawn by name if `stored` is None.

    A parameter is drawn when a part of it is first read. Only transformers knows how, so a rank draws all of it or
    nothing. A weight is quantized as a whole, one weight at a time, and of a stack of experts one matrix at a time.
    """
    quantized = quantized_in(module)
    parts = {id(tensor) for weight in quantized.values() for tensor in (*weight.parameters(), *weight.buffers())}

    def value_of(name: str, parameter: Tensor) -> Value:
        """Return the value of a parameter that is not quantized."""
        original = unwrapped(name.removeprefix(ADAPTED))
        if stored is not None and original in stored:
            return stored[original]
        if MAGNITUDE in name:
            return Made(tuple(parameter.shape), torch.float32, cache(partial(lengths, name.partition(MAGNITUDE)[0])))
        draw = cache(partial(drawn, module, name, parameter, seed, constructed))
        return Made(tuple(parameter.shape), torch.float32, draw)

    @cache
    def constructed() -> dict[str, Tensor]:
        """Return the parameters that transformers' constructors fill themselves, by name."""
        with EmptyOnMeta(), seeded(seed, "constructors"):
            model = type(plain(module))(plain(module).config)
        return {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}

    def lengths(path: str) -> Tensor:
        """Return the lengths of a weight for each of the layer's outputs, as DoRA starts with."""
        name, dora = f"{path}.base_layer.weight", module.get_submodule(f"{path}{MAGNITUDE}default")
        if name in quantized:
            weight = FORMATS[quantized[name].format_name].dequantize(state_of(name))
        else:
            weight = value_of(name, module.get_parameter(name))[()]
        return weight.to(torch.float32).norm(dim=0 if dora.fan_in_fan_out else 1)

    @lru_cache(1)
    def state_of(name: str) -> dict[str, Tensor]:
        """Return the state of a quantized weight; the last one is kept, because its tensors are read one by one."""
        value = value_of(name, quantized[name].original[0])
        if isinstance(value, InMxfp4) and quantized[name].format_name == "mxfp4":
            return value.state(slice(None)) | {"like": torch.zeros(0)}
        return quantized[name].state_of(value[()] if isinstance(value, Made) else value)

    def make(name: str, part: str) -> Tensor:
        """Return a tensor of a quantized weight."""
        return state_of(name)[part]

    for name, parameter in module.named_parameters():
        if id(parameter) not in parts:
            yield name, value_of(name, parameter)
    for name, buffer in module.named_buffers():
        original = unwrapped(name.removeprefix(ADAPTED))
        if id(buffer) not in parts:
            yield name, stored[original] if stored is not None and original in stored else buffer
    for name, weight in quantized.items():
        path, _, leaf = name.rpartition(".")
        for part, like in (*weight.named_parameters(), *weight.named_buffers()):
            yield f"{path}.quantized.{leaf}.{part}", Made(tuple(like.shape), like.dtype, partial(make, name, part))


def plain(module: Any) -> Any:
    """Return the model that transformers built, without peft's wrappers."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def stored_values(
    cfg: FolderConfig, module: nn.Module, remark: Callable[[str], None] = lambda line: None
) -> dict[str, Stored] | None:
    """Return the folder's values by the names of parameters (the first name of tied ones) and buffers.

    Returns None with `init` random. `remark` gets a line on heads of another kind, which are left out. Raises UserError
    naming tensors that are missing, unexpected, or of another shape.
    """
    if cfg.init != "weights":
        return None
    model = plain(module)
    folder, expected = Path(cfg.path), expected_of(model)
    stored = text_alone(with_stacks(stored_in(folder)), model.base_model_prefix, expected, remark)
    if count := sum(isinstance(value, InMxfp4) for value in stored.values()):
        use = "their codes are taken as they are" if cfg.quantize == "mxfp4" else "they are dequantized"
        remark(f"{count} stacks of experts of {folder} are stored in mxfp4; {use}")
    available = renamed(model, stored, {alias: meta for alias, (_, meta) in expected.items()})
    values: dict[str, Stored] = {}
    for alias, (name, meta) in expected.items():
        if alias in available:
            value = shaped(available.pop(alias), meta, f"{folder}: {alias}")
            if differ(value, values.setdefault(name, value)):
                problem = f"holds different values for {name} and {alias}, which its config.json ties"
                raise UserError(str(folder), f"{problem}; set tie_word_embeddings=false there")
    missing = [name for name, _ in expected.values() if name not in values]
    heads = heads_of(model) if cfg.head != "lm" else []  # one that is missing is drawn, one of another kind is left out
    refuse(folder, "lacks", unmatched(missing, [*absent(model), *heads]), "the config.json belongs to another model")
    unexpected = unmatched(available, ignored(model))
    others = unmatched(unexpected, heads)
    refuse(folder, "holds", others, "which the model of its config.json does not have")
    if left_out := [name for name in unexpected if name not in others]:
        remark(f"left out of {folder}, whose head is another: {', '.join(left_out)}")
    return values


def heads_of(model: Any) -> list[str]:
    """Return a pattern of the names of heads: those of modules next to the layers, whatever model they belong to."""
    base = getattr(model, model.base_model_prefix, model)
    layers = [model.base_model_prefix, *(name for name, _ in (*base.named_children(), *base.named_parameters()))]
    return [rf"^(?!({'|'.join(map(re.escape, layers))})(\.|$))"]


def expected_of(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return every stored name of a parameter or buffer (tied ones have several) -> its first name, and the tensor.

    Names lack peft's additions, and its own terms are left out.
    """
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    bare = ((unwrapped(name), tensor) for name, tensor in named if ".lora_" not in name)
    return {name: (first.setdefault(id(tensor), name), tensor) for name, tensor in bare}


def differ(a: Stored, b: Stored) -> bool:
    """Return True if two tensors of one shape hold different values; a few rows are read at a time."""
    if a is b:
        return False
    parts = [(slice(at, at + ROWS),) for at in range(0, a.shape[0], ROWS)] if a.shape else [()]
    return any(bool((a[part] != b[part]).any()) for part in parts)


def unmatched(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the different names that no pattern matches."""
    return [name for name in dict.fromkeys(names) if not any(re.search(pattern, name) for pattern in patterns)]


def unwrapped(name: str) -> str:
    """Return the name that a parameter had before peft wrapped its layer; it wraps layers of experts twice."""
    return INNER.sub(".", name)


def refuse(folder: Path, problem: str, names: list[str], hint: str) -> None:
    """Raise UserError naming tensors, if there are any."""
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UserError(str(folder), f"{problem} {', '.join(names[:SHOWN])}{more}; {hint}")


def shaped(value: Stored, meta: Tensor, where: str) -> Stored:
    """Return the value if it has the parameter's shape; raise UserError."""
    if tuple(value.shape) != tuple(meta.shape):
        raise UserError(where, f"has shape {list(value.shape)}, but {list(meta.shape)} in its config.json's model")
    return value


def renamed(model: Any, stored: Mapping[str, Stored], expected: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Return the folder's tensors by the module's names, joined where the module has several as one."""
    if not hasattr(model, FURTHER):
        return converted_by(conversion_of(model), model, stored, expected)
    prefix, of_model = f"{FURTHER}.", {name: stored[name] for name in unmatched(stored, further_layers(model))}
    further = {name: value for name, value in stored.items() if name not in of_model}
    inside = {name.removeprefix(prefix): meta for name, meta in expected.items() if name.startswith(prefix)}
    values = converted_by(conversion_of_further_layers(model), model.get_submodule(FURTHER), further, inside)
    by_name = {f"{prefix}{name}": value for name, value in values.items()}
    return converted_by(conversion_of(model), model, of_model, expected) | by_name


def converted_by(
    conversion: Conversion, model: Any, stored: Mapping[str, Stored], expected: Mapping[str, Tensor]
) -> dict[str, Stored]:
    """Return tensors by the names that a conversion gives them."""
    by_pattern = {pattern: entry for entry in conversion.converters for pattern in entry.source_patterns}
    values: dict[str, Stored] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for name in in_order(stored):
        target, pattern = conversion.target(name, model, expected)
        if pattern is None:
            values[target] = stored[name]
        else:
            parts.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, by_source in parts.items():
        converter = by_pattern[next(iter(by_source))]
        if lacking := lacking_parts(converter.source_patterns, by_source):
            problem = f"is made of several tensors, of which the folder lacks {', '.join(lacking[:SHOWN])}"
            raise UserError(target, f"{problem}; take its files from their source again")
        ordered = {p: [stored[name] for name in by_source[p]] for p in converter.source_patterns}
        values |= converted(converter, target, ordered, model, expected)
    return values


def lacking_parts(patterns: Iterable[str], names: Mapping[str, list[str]]) -> list[str]:
    """Return the names that a folder lacks of tensors to join, such as one matrix of one expert.

    `names` has those that are there, by pattern; each pattern must have one for the same numbers as the others.
    """
    by_pattern = {pattern: {tuple(NUMBER.findall(name)): name for name in group} for pattern, group in names.items()}
    needed = {numbers for group in by_pattern.values() for numbers in group}
    lacking = [pattern for pattern in patterns if pattern not in names]
    for group in by_pattern.values():
        form = NUMBER.sub("{}", next(iter(group.values())))
        lacking += [form.format(*numbers) for numbers in sorted(needed - group.keys())]
    return lacking


def converted(
    converter: Any, target: str, sources: Mapping[str, list[Stored]], model: Any, expected: Mapping[str, Tensor]
) -> dict[str, Stored]:
    """Return the tensors that a transformers converter makes, by name; stacks and joins can be read in slices."""
    kinds = [type(operation).__name__ for operation in converter.operations]
    merged: list[Stored] = [Stacked(tensors) for tensors in sources.values()]
    if kinds == ["MergeModulelist"] and converter.operations[0].dim == 0:
        return {target: merged[0]}
    if kinds == ["MergeModulelist", "Concatenate"] and converter.operations[0].dim == 0:
        return {target: Joined(merged, converter.operations[1].dim)}
    if kinds == ["Concatenate"] and all(len(tensors) == 1 for tensors in sources.values()):
        return {target: Joined([tensor for (tensor,) in sources.values()], converter.operations[0].dim)}

    def make(name: str) -> Tensor:
        """Return all of a tensor, computed by transformers."""
        tensors: Any = {pattern: [part[()] for part in parts] for pattern, parts in sources.items()}
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
                model=model,
                config=model.config,
            )
        results = {full_name(target, pattern, converter.target_patterns): tensor for pattern, tensor in tensors.items()}
        return results[name][0] if isinstance(results[name], list) else results[name]

    names = [full_name(target, pattern, converter.target_patterns) for pattern in converter.target_patterns]
    dtype = next(iter(sources.values()))[0].dtype
    return {name: Made(tuple(expected[name].shape), dtype, partial(make, name)) for name in names if name in expected}


def full_name(target: str, pattern: str, patterns: list[str]) -> str:
    """Return the name of one of several targets, from the name of the first."""
    return target.replace(patterns[0], pattern)


def drawn(
    module: nn.Module, name: str, parameter: Tensor, seed: int, constructed: Callable[[], dict[str, Tensor]]
) -> Tensor:
    """Return the value that transformers gives a parameter first, with random numbers keyed by `seed` and its name.

    A parameter that its initialization leaves as it is has its value in `constructed`, by name.
    """
    path, _, leaf = name.rpartition(".")
    if ".lora_" in name:
        return lora_start(name, parameter, seed)
    owner = module.get_submodule(path)
    with originals_in(owner), nans_in(owner), seeded(seed, path):
        initialize(plain(module), path.removeprefix(ADAPTED))
        value = getattr(owner, leaf).detach()
    if not value.isnan().any():
        return value
    if (original := name.removeprefix(ADAPTED)) in constructed():
        return constructed()[original].to(parameter.dtype)
    raise UserError(name, "transformers gives it no initial value; use model.init=weights")


@contextmanager
def nans_in(owner: nn.Module) -> Iterator[None]:
    """Give a module parameters of NaNs inside the block."""
    parameters = dict(owner.named_parameters(recurse=False))
    for key, p in parameters.items():
        setattr(owner, key, nn.Parameter(torch.full(p.shape, torch.nan), p.requires_grad))
    try:
        yield
    finally:
        for key, p in parameters.items():
            setattr(owner, key, p)


def lora_start(name: str, parameter: Tensor, seed: int) -> Tensor:
    """Return random values for one factor of a term, as peft draws them, and zeros for the other."""
    value = torch.zeros(parameter.shape, dtype=torch.float32)
    with seeded(seed, name):
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(value, a=5**0.5)
        elif ".lora_embedding_B" in name:
            nn.init.normal_(value)
    return value


def quantize(module: nn.Module, format_name: str | None) -> str:
    """Store the frozen linear layers and experts in 4 or 8 bits, except the head (None: leave them); return a line."""
    if format_name is None:
        return ""
    heads = [layer for name, layer in module.named_modules() if f".{SCORE}." in name]
    line = quantize_weights(module, format_name, [plain(module).get_output_embeddings(), *heads])
    of_parameters = library("peft").tuners.lora.ParamWrapper
    for layer in module.modules():
        if isinstance(layer, of_parameters) and layer.parameter_name in weights_of(layer.get_base_layer()):
            layer.__class__ = adding(type(layer))  # type: ignore[arg-type]
    return line


@cache
def adding(kind: type) -> type:
    """Return a subclass of peft's LoRA of a parameter, whose terms are added to a weight that codes stand for."""

    @contextmanager
    def activate(layer: Any, active: list[str]) -> Iterator[None]:
        weight: Any = weights_of(layer.get_base_layer())[layer.parameter_name]
        weight.terms = [layer.get_delta_factors(name) for name in active if name in layer.lora_A]
        try:
            yield
        finally:
            weight.terms = []

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "_activate_lora": activate})


def build(cfg: FolderConfig, dtype: torch.dtype | None, labels: tuple[str, ...] = (), sees: bool = False) -> nn.Module:
    """Return the skeleton of the folder's model."""
    return skeleton(partial(build_module, cfg, labels, sees), dtype)
