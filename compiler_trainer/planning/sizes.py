"""The sizes of a model that closed forms need, read from the shapes of its parameters; nothing is captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from compiler_trainer.config.schema import Config, FolderConfig, ModelConfig
from compiler_trainer.models.attention import head_dims
from compiler_trainer.models.folder import config_of
from compiler_trainer.models.place import folder_of
from passes.program.layer import layer_names, layer_of


@dataclass(frozen=True)
class Heads:
    """The attention of a layer: query heads, key heads, features of a key and of a value; 0 heads if unknown."""

    queries: int = 0
    keys: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model for closed forms: `layers` layers like their mean, embedding tables, and a head.

    Entries are counts of numbers. A layer multiplies each token with `active_entries`, `last_matmul_entries` of them in
    its last matmul, and stores `dense` and `experts`. Its matmuls have `input_features` and `output_features` a token.
    """

    names: tuple[str, ...]  # of layers, in order
    dim: int
    active_entries: float
    last_matmul_entries: float
    dense: float
    experts: float
    expert_count: int
    routed: float  # experts that a token is sent to
    matmuls: float  # of a layer
    output_features: float
    input_features: float
    vocabulary: int
    embedding_entries: int
    head_entries: int
    is_tied: bool
    stored_bytes: int  # of all parameters
    trained_entries: int
    heads: Heads

    @property
    def layers(self) -> int:
        """The number of layers; a model without any counts as one layer."""
        return max(1, len(self.names))

    @property
    def entries(self) -> float:
        """The number of trained entries."""
        return (
            self.layers * (self.dense + self.experts)
            + self.embedding_entries
            + (0 if self.is_tied else self.head_entries)
        )


def sizes_of(cfg: Config, module: nn.Module) -> Sizes:
    """Return the sizes of the model that `cfg` trains."""
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    layers_of_model = layer_names(name.rpartition(".")[0] for name in shapes)
    layers = {name: str(layer) for name in shapes if (layer := layer_of(name, layers_of_model))}
    inside = {name: shapes[name] for name in layers}
    names = tuple(dict.fromkeys(layers.values()))
    count = max(1, len(names))
    routed = routed_rows(cfg)
    total, last = totals(inside, layers, routed)
    outside = {name: shape for name, shape in shapes.items() if name not in inside and len(shape) > 1}
    is_table = {tuple(table.shape) for table in tables}
    looked_up = sum(table.numel() for table in tables)
    heads = [shape for name, shape in outside.items() if "embed" not in name]
    head = max(heads or is_table or {(1, 1)}, key=lambda shape: shape[0])
    return Sizes(
        names=names,
        dim=head[1],
        active_entries=total["used"] / count,
        last_matmul_entries=last / count,
        dense=total["dense"] / count,
        experts=total["experts"] / count,
        expert_count=max([shape[0] for shape in inside.values() if len(shape) == 3], default=1),
        routed=routed,
        matmuls=max(1.0, total["products"] / count),
        output_features=total["made"] / count,
        input_features=total["read"] / count,
        vocabulary=head[0],
        embedding_entries=looked_up,
        head_entries=head[0] * head[1],
        is_tied=not heads and bool(tables),
        stored_bytes=sum(p.nbytes for p in module.parameters()),
        trained_entries=sum(p.numel() for p in module.parameters() if p.requires_grad),
        heads=heads_of(cfg),
    )


def totals(
    inside: Mapping[str, tuple[int, ...]], layers: Mapping[str, str], routed: float
) -> tuple[dict[str, float], float]:
    """Return (sums over all layers, sum over layers of the entries that a token uses of a layer's last matrix)."""
    total = dict.fromkeys(("used", "dense", "experts", "products", "made", "read"), 0.0)
    last: dict[str, float] = {}
    for name, shape in inside.items():
        entries = 1
        for size in shape:
            entries *= size
        total["experts" if len(shape) == 3 else "dense"] += entries
        if len(shape) < 2:
            continue
        rows = routed if len(shape) == 3 else 1.0
        outputs, read = (shape[2], shape[1]) if len(shape) == 3 else (shape[0], shape[1])
        total["products"] += 1
        total["used"] += rows * outputs * read
        total["made"] += rows * outputs
        total["read"] += rows * read
        last[layers[name]] = rows * outputs * read
    return total, sum(last.values())


def routed_rows(cfg: Config) -> float:
    """Return the number of experts that a token is sent to; 1 without experts."""
    if isinstance(cfg.model, ModelConfig):
        return float(cfg.model.experts.top_k) if cfg.model.experts else 1.0
    if isinstance(cfg.model, FolderConfig):
        return float(getattr(config_of(folder_of(cfg)), "num_experts_per_tok", None) or 1)
    return 1.0


def heads_of(cfg: Config) -> Heads:
    """Return the attention of a layer as the options or a config.json state it."""
    if isinstance(cfg.model, ModelConfig):
        return Heads(cfg.model.n_heads, cfg.model.n_kv_heads, *head_dims(cfg.model))
    if isinstance(cfg.model, FolderConfig):
        config: Any = config_of(folder_of(cfg))
        queries = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // queries
        return Heads(queries, getattr(config, "num_key_value_heads", None) or queries, dim, dim)
    return Heads()
