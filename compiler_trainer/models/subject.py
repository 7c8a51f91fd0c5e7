"""The model that a run trains: one of our decoders, a folder that transformers wrote, or a user's module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import (
    Config,
    DistillationConfig,
    FolderConfig,
    GrpoConfig,
    HeadLossConfig,
    KtoConfig,
    ModelConfig,
    Own,
    PreferenceConfig,
    RolloutConfig,
)
from compiler_trainer.config.targets import name_of
from compiler_trainer.models import distill, flops, folder, further, llama, user, vision
from compiler_trainer.models.grpo import grpo_loss
from compiler_trainer.models.heads import LOSSES
from compiler_trainer.models.init import initial_parameters
from compiler_trainer.models.loss import LossFn, logits_of, loss_fn, loss_of_logits, loss_with_further_tokens, outputs
from compiler_trainer.models.place import folder_of, teacher_of
from compiler_trainer.models.preference import judged_loss, preference_loss
from compiler_trainer.models.probes import remark_on, way_of
from compiler_trainer.models.processor import processor_of
from passes.ir.spec import Value


@dataclass(frozen=True)
class Subject:
    """A model to train: a module whose parameters take no memory, its loss, and the source of its initial values.

    `initial` yields the names and values of parameters and buffers; `logits` computes [B, T, V], or the outputs of
    another head (`model.head`), for a batch with a module that has values; `flops_per_token` gives the FLOPs of a token
    in a sequence of T tokens. `vocab_size` is None if only the module knows it. A model that `has_weights` was trained
    before. `remarks` are lines for the start of a run. `teacher` has the names, in a checkpoint, of a teacher's
    parameters and buffers, which are part of the module but in no checkpoint.
    """

    name: str
    module: nn.Module
    loss: LossFn
    logits: Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
    initial: Callable[[], Iterable[tuple[str, Value]]]
    flops_per_token: Callable[[int], int]
    vocab_size: int | None = None
    has_weights: bool = False
    remarks: tuple[str, ...] = ()
    teacher: frozenset[str] = frozenset()

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that are not trained, and all of the teacher, by their names in a checkpoint."""
        names = (name for name, p in self.module.named_parameters() if not p.requires_grad)
        return self.teacher | {f"model.{name}" for name in names}


def named(model: Any) -> str:
    """Return the name of a model from its options."""
    return name_of(model) if isinstance(model, Mapping) else getattr(model, "path", model.name)


def model_of(cfg: Config) -> Subject:
    """Return the model of `cfg` with the loss of its kind, next-token cross-entropy; raise UserError as `subject`."""
    dtype: torch.dtype = getattr(torch, cfg.train.dtype)
    if isinstance(cfg.model, ModelConfig):
        return of_decoder(cfg.model, dtype, cfg.train.seed)
    if isinstance(cfg.model, FolderConfig):
        of_kind = of_seeing_folder if cfg.sees else of_folder
        return of_kind(folder_of(cfg), cfg, dtype)
    return of_ones_own(cfg.model, dtype, cfg.train.seed)


def subject(cfg: Config) -> Subject:
    """Return the model that `cfg` trains, with parameters of `train.dtype`; raise UserError if it cannot be built."""
    base = model_of(cfg)
    if isinstance(cfg.loss, PreferenceConfig | RolloutConfig | DistillationConfig | HeadLossConfig):
        check_no_balance(base.module, cfg.loss.name)
    if isinstance(cfg.loss, KtoConfig) and cfg.data.records == "answers":
        return replace(base, loss=partial(judged_loss, base.logits, cfg.loss))
    if isinstance(cfg.loss, PreferenceConfig):
        return replace(base, loss=partial(preference_loss, base.logits, cfg.loss))
    if isinstance(cfg.loss, GrpoConfig):
        return replace(base, loss=partial(grpo_loss, base.logits, cfg.loss))
    if isinstance(cfg.loss, HeadLossConfig):
        return replace(base, loss=partial(LOSSES[cfg.loss.name], base.logits, cfg.loss))
    if isinstance(cfg.loss, DistillationConfig):
        return with_teacher(base, cfg)
    return replace(base, loss=user.loss_of(cfg.loss)) if cfg.loss else base


def with_teacher(base: Subject, cfg: Config) -> Subject:
    """Return the model with the teacher of `loss.teacher` inside; raise UserError if their vocabularies differ."""
    assert isinstance(cfg.loss, DistillationConfig)
    options, name = teacher_of(cfg), cfg.loss.teacher
    try:
        as_model = replace(cfg, model=replace(options, path=name))
        teacher = of_folder(options, as_model, getattr(torch, cfg.train.dtype))
    except UserError as error:
        place = "loss.teacher" if error.place == "model.path" else error.place
        raise UserError(place, error.message) from error
    sizes = base.vocab_size or 0, teacher.vocab_size or 0
    distill.check_vocabulary(Path(folder_of(cfg).path), Path(options.path), sizes, name)
    module, config = distill.with_teacher(base.module, teacher.module), folder.plain(teacher.module).config
    return replace(
        base,
        name=f"{base.name}, with the teacher {teacher.name}",
        module=module,
        loss=partial(distill.distillation_loss, base.logits, teacher.logits, cfg.loss),
        initial=lambda: chain(base.initial(), distill.named(teacher.initial())),
        flops_per_token=lambda length: (
            base.flops_per_token(length) + flops.forward_of_folder(config, teacher.module, length)
        ),
        remarks=(*base.remarks, *teacher.remarks),
        teacher=frozenset(f"model.{name}" for name in distill.state_names(module)),
    )


def check_no_balance(module: nn.Module, loss: str) -> None:
    """Raise UserError if the config of a folder asks for an auxiliary loss, which built-in losses do not have."""
    if getattr(getattr(folder.plain(module), "config", None), "output_router_logits", False):
        problem = f"{loss} has no auxiliary loss for routers, but output_router_logits of the model's config.json asks"
        raise UserError("loss", f"{problem} for one; set it to false")


def of_decoder(cfg: ModelConfig, dtype: torch.dtype, seed: int) -> Subject:
    """Return one of our own decoders, with weights drawn by name."""
    try:
        module = llama.build(cfg, dtype)
    except RuntimeError as error:  # sizes beyond any address space
        raise UserError("model", f"cannot be built: {str(error).splitlines()[0]}") from error
    return Subject(
        name=cfg.name,
        module=module,
        loss=partial(loss_with_further_tokens, cfg.mtp.weight) if cfg.mtp else loss_fn,
        logits=plain_logits,
        initial=lambda: initial_parameters(module, seed, dtype),
        flops_per_token=partial(flops.of_decoder, cfg, module),
        vocab_size=cfg.vocab_size,
    )


def of_folder(model: FolderConfig, cfg: Config, dtype: torch.dtype, sees: bool = False) -> Subject:
    """Return the language model of a local folder that transformers wrote; with `sees`, around a vision tower.

    A head of scores has `data.labels`.
    """
    module = folder.build(model, dtype, cfg.data.labels, sees)
    remarks: list[str] = []
    config, stored = folder.plain(module).config, folder.stored_values(model, module, remarks.append)
    quantized = folder.quantize(module, model.quantize)
    text = config.get_text_config()
    way = way_of(model.attention, text, not cfg.loss)
    return Subject(
        name=f"{config.model_type} in {cfg.model.path}",  # type: ignore[union-attr]
        module=module,
        loss=partial(further.loss_of, way, model.mtp.weight) if model.mtp else partial(folder.loss_of, way),
        logits=partial(folder.OUTPUTS[model.head], way),
        initial=lambda: folder.initial(stored, module, cfg.train.seed),
        flops_per_token=partial(flops.of_folder, text, module),
        vocab_size=text.vocab_size,
        has_weights=stored is not None,
        remarks=tuple(filter(None, [*remarks, remark_on(way, text), quantized])),
    )


def of_seeing_folder(model: FolderConfig, cfg: Config, dtype: torch.dtype) -> Subject:
    """Return the vision-language model of a local folder, with the images of its own processor."""
    base = of_folder(model, cfg, dtype, sees=True)
    view = vision.view_of(folder.plain(base.module), processor_of(model.path, cfg.data.image_size))
    way = way_of(model.attention, folder.plain(base.module).config.get_text_config())
    return replace(base, loss=partial(vision.loss_of, view, way), logits=partial(vision.logits, view, way))


def of_ones_own(options: Own, dtype: torch.dtype, seed: int) -> Subject:
    """Return a user's module."""
    module = user.build(options, dtype)
    return Subject(
        name=name_of(options),
        module=module,
        loss=loss_of_logits,
        logits=plain_logits,
        initial=lambda: user.initial(options, seed),
        flops_per_token=lambda seq_len: flops.of_weights(module),
    )


def plain_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a model's logits for tokens, and for the other batch entries that its `forward` names."""
    return logits_of(outputs(model, batch))
