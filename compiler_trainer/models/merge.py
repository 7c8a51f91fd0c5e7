"""Adapters of peft merged into the weights they adapt, and models saved as transformers and peft do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from compiler_trainer.models.folder import library, plain
from compiler_trainer.models.quantized import dequantize_weights


def merged(adapted: Any) -> Any:
    """Return transformers' model with the adapters of peft's added to its weights, which are dequantized first."""
    dequantize_weights(adapted)
    untie_adapted(adapted)
    return adapted.merge_and_unload()


def untie_adapted(adapted: Any) -> None:
    """Give tied layers separate weights if LoRA adapts one of them.

    Merged into the one tensor, the head's adapter would change the embedding too, or the other way round.
    """
    model, owners = plain(adapted), dict[nn.Parameter, list[tuple[nn.Module, str]]]()
    with_terms = [module.base_layer for module in model.modules() if hasattr(module, "lora_A")]
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    for parameter, (_, *others) in owners.items():
        if others and any(module in with_terms for module, _ in owners[parameter]):
            for module, name in others:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            model.config.tie_word_embeddings = False


def save(model: Any, out: Path) -> None:
    """Save a model as transformers or peft do, without progress bars."""
    library("transformers.utils.logging").disable_progress_bar()
    model.save_pretrained(out)
