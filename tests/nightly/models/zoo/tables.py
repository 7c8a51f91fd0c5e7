"""Models of table columns and of click prediction."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, batches, normal, squares
from tests.nightly.models.zoo.media import of_x, other, vectors

CATEGORIES = (5, 7, 3)
TAB: dict[str, Any] = {"categories": CATEGORIES, "num_continuous": 4, "dim": 16, "depth": 2, "heads": 4, "dim_head": 6}
RTDL: dict[str, Any] = {"n_cont_features": 4, "cat_cardinalities": list(CATEGORIES), "d_out": 2, "n_blocks": 2}
RTDL |= {"d_block": 16, "attention_n_heads": 4, "attention_dropout": 0.0, "ffn_d_hidden": 24, "ffn_dropout": 0.0}
RTDL |= {"ffn_d_hidden_multiplier": None, "residual_dropout": 0.0}


def columns(generator: torch.Generator) -> Batch:
    """Return three categories and four numbers."""
    drawn = [torch.randint(0, n, (3,), generator=generator) for n in CATEGORIES]
    return {"categories": torch.stack(drawn, 1), "numbers": normal(generator, 3, 4)}


def categories_first(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of categories and numbers."""
    return squares(model(batch["categories"], batch["numbers"]))


def numbers_first(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of numbers and categories."""
    return squares(model(batch["numbers"], batch["categories"]))


def many() -> Case:
    """Build a TabM with four members."""
    kind = import_module("tabm").TabM
    torch.manual_seed(0)
    model = kind.make(n_num_features=4, cat_cardinalities=list(CATEGORIES), d_out=2, k=4, n_blocks=2, d_block=16,
                      dropout=0.0)
    return Case(model, numbers_first, batches(columns))


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model whose second output is a penalty."""
    output, penalty = model(batch["x"])
    return squares(output) - 1e-3 * penalty


def clicked(generator: torch.Generator) -> Batch:
    """Return a user, an item, the user's earlier items (0: none), and a number."""
    ids = {name: torch.randint(1, 9, (3,), generator=generator) for name in ("user", "item")}
    seen = torch.randint(0, 9, (3, 6), generator=generator)
    return ids | {"seen": seen, "age": normal(generator, 3)}


def ranked(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean square of the predictions, as if nobody clicked."""
    return model(batch).square().mean()


def ranker(kind: str, **options: Any) -> Case:
    """Build a ranker of torch-rechub; the options name its features."""
    features = import_module("torch_rechub.basic.features")
    sparse = {name: features.SparseFeature(name, 9, 6) for name in ("user", "item")}
    seen = features.SequenceFeature("seen", 9, 6, pooling="concat", shared_with="item", padding_idx=0)
    known = {**sparse, "seen": seen, "age": features.DenseFeature("age")}
    arguments = {key: [known[n] for n in value] if key.endswith("features") else value for key, value in options.items()}
    torch.manual_seed(0)
    return Case(getattr(import_module("torch_rechub.models.ranking"), kind)(**arguments), ranked, batches(clicked))


def clicks(name: str, kind: str, **options: Any) -> Entry:
    """A ranker of torch-rechub."""
    return Entry(f"rechub_{name}", "torch-rechub", partial(ranker, kind, **options))


MLP: dict[str, Any] = {"dims": [12, 6], "dropout": 0.0}
MODELS: list[Entry] = [
    other("ft_transformer", "tab-transformer-pytorch", "tab_transformer_pytorch", "FTTransformer", columns,
          categories_first, **TAB),
    other("tab_transformer", "tab-transformer-pytorch", "tab_transformer_pytorch", "TabTransformer", columns,
          categories_first, **TAB, mlp_act=nn.ReLU()),
    other("rtdl_ft_transformer", "rtdl_revisiting_models", "rtdl_revisiting_models", "FTTransformer", columns,
          numbers_first, **RTDL),
    other("rtdl_resnet", "rtdl_revisiting_models", "rtdl_revisiting_models", "ResNet", vectors(6), of_x, d_in=6,
          d_out=3, n_blocks=2, d_block=16, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0),
    Entry("tabm", "tabm", many),
    other("tabnet", "pytorch-tabnet", "pytorch_tabnet.tab_network", "TabNetNoEmbeddings", vectors(6), penalised, 6, 3,
          virtual_batch_size=8, mask_type="entmax"),
    clicks("dcn", "DCN", features=["user", "item", "age"], n_cross_layers=2, mlp_params=MLP),
    clicks("deepfm", "DeepFM", deep_features=["user", "item", "age"], fm_features=["user", "item"], mlp_params=MLP),
    clicks("din", "DIN", features=["user"], history_features=["seen"], target_features=["item"], mlp_params=MLP,
           attention_mlp_params={"dims": [8, 4]}),
    clicks("widedeep", "WideDeep", wide_features=["user", "item"], deep_features=["user", "age"], mlp_params=MLP),
]  # fmt: skip
