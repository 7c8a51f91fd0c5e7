"""Our decoder with all its options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compiler_trainer.config.schema import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling
from compiler_trainer.models import Llama
from compiler_trainer.models.loss import TrainingOutputs
from compiler_trainer.parity.one_device import on_one_device
from compiler_trainer.parity.subject import Batch, Terms
from tests.nightly.parity.models.kind import MEANS, Kind, Options, mean_over, token_batch

WIDTH = 12
SPACE: dict[str, tuple[Any, ...]] = {
    "layers": (1, 2, 3),
    "heads": (2, 3, 4, 5),
    "kv_heads": (1, 2, 3),
    "head_dim": (4, 6),
    "ffn": (10, 7, 16),
    "vocab": (13, 17, 16),
    "tied": (False, True),
    "qk_norm": ("none", "learned", "plain"),
    "nope_every": (None, 2),
    "documents": (False, True),
    "latent": (False, True, "queries"),
    "stretched": (False, True),
    "loss": MEANS,
    "labels": ("some", "all", "uneven"),
    "frozen": ((), ("attention",), ("tok_embeddings",), ("norm",)),
}
EXPERTS: dict[str, tuple[Any, ...]] = {
    "experts": (4, 3, 6),
    "top_k": (2, 1),
    "width": (6, 5),
    "shared": (0, 1),
    "dense_layers": (0, 1),
    "score": ("softmax", "sigmoid"),
    "groups": (1, 2),
    "normalize": (True, False),
    "scale": (1.0, 1.7),
    "weigh": ("output", "input"),
    "balance_loss": (0.0, 0.1),
    "bias_rate": (0.0, 0.01),
}


def build(
    layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, frozen: Any, **options: Any
) -> Llama:
    """Build a decoder; `frozen` lists substrings of the names of parameters that are not trained."""
    latent = LatentConfig(5, 4, 2, 3, 6 if options["latent"] == "queries" else None) if options["latent"] else None
    of_experts = {
        "count": options["experts"], "balance_loss": options["balance_loss"], "bias_rate": options["bias_rate"],
        **{name: options[name] for name in ("top_k", "width", "shared", "dense_layers", "score", "groups")},
        **{name: options[name] for name in ("normalize", "scale", "weigh")},
    } if "experts" in options else None  # fmt: skip
    cfg = ModelConfig(
        dim=WIDTH, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, ffn_dim=ffn,
        vocab_size=vocab, tied=options["tied"], qk_norm=options["qk_norm"], nope_every=options["nope_every"], latent=latent,
        rope_scaling=RopeScaling(2.0, 1.0, 4.0, 4) if options["stretched"] else None, rope_theta=100.0,
        attention="documents" if options["documents"] else "causal",
        experts=ExpertsConfig(**of_experts) if of_experts else None,
    )  # fmt: skip
    model = Llama(cfg)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def terms(loss: str, **_: Any) -> Terms:
    def of(model: nn.Module, batch: Batch) -> Any:
        out = model(batch["tokens"], batch["positions"], batch.get("documents"))
        logits, other = (out.logits, out.balance) if isinstance(out, TrainingOutputs) else (out, None)
        return mean_over(logits, batch["labels"], loss), other

    return of


def batch(generator: torch.Generator, rows: int, length: int, documents: bool, vocab: int, **options: Any) -> Batch:
    """Return a batch; with `documents`, each row holds several, and positions restart at each."""
    entries = token_batch(generator, rows, length, **options)
    if documents:
        begins = torch.rand(rows, length, generator=generator) < 0.3
        begins[:, 0] = True
        place = torch.arange(length).expand(rows, length)
        entries["documents"] = begins.cumsum(1)
        entries["positions"] = place - torch.where(begins, place, 0).cummax(1).values
    return entries


def fits(options: Options) -> bool:
    """Return True if heads share keys evenly and the experts divide into the groups."""
    latent, experts = options.get("latent"), options.get("experts")
    if latent and any(name in options for name in ("qk_norm", "kv_heads", "nope_every", "head_dim")):
        return False
    if options.get("heads", 2) % options.get("kv_heads", 1):
        return False
    if "dense_layers" in options and options["dense_layers"] >= options.get("layers", 1):
        return False
    return experts is None or options.get("groups", 1) == 1 or experts % 2 == 0


COMMON: dict[str, Any] = {"eager": on_one_device, "fits": fits}
KINDS = {
    "decoder": Kind("decoder", build, terms, batch, SPACE, **COMMON),
    "experts": Kind("experts", build, terms, batch, SPACE | EXPERTS, **COMMON, muon=False),
}
