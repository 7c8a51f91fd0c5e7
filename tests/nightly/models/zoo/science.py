"""Models of proteins, molecules, physics and densities."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, batches, ids, normal, squares
from tests.nightly.models.zoo.media import of_x, other, vectors

VOCAB = 33  # size of fair-esm's alphabet


def residues(generator: torch.Generator) -> Batch:
    """Return ids of amino acids, which begin at 4."""
    return {"x": 4 + ids(generator, 20, 3, 13)}


def folded(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits' distance to a ramp."""
    return squares(model(batch["x"])["logits"])


def atoms(generator: torch.Generator) -> Batch:
    """Return types and positions of atoms."""
    return {"kinds": ids(generator, 9, 3, 8), "places": normal(generator, 3, 8, 3)}


def bound(model: nn.Module, batch: Batch) -> Tensor:
    """Return the distance of features and positions to ramps."""
    features, places = model(batch["kinds"], batch["places"])
    return squares(features) + squares(places)


def graphs(generator: torch.Generator) -> Batch:
    """Return graphs of seven nodes, as dense matrices."""
    edges = torch.rand(3, 7, 7, generator=generator) < 0.4
    return {"x": normal(generator, 3, 7, 6), "edges": (edges | edges.mT).double()}


def linked(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of nodes and edges."""
    return squares(model(batch["x"], batch["edges"]))


def likely(model: nn.Module, batch: Batch) -> Tensor:
    """Return the negative log-likelihood of a model that returns a distribution."""
    return -model().log_prob(batch["x"]).mean()


def likely_too(model: Any, batch: Batch) -> Tensor:
    """Return the negative log-likelihood of a flow of nflows."""
    return -model.log_prob(batch["x"]).mean()


class Dense(nn.Module):
    """Two layers of torch_geometric over dense graphs."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        layer = getattr(import_module("torch_geometric.nn"), kind)
        self.first, self.second = layer(6, 12, **options), layer(12, 5, **options)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x, edges).relu(), edges)


class Equivariant(nn.Module):
    """Two tensor products of e3nn with a gate between them."""

    def __init__(self) -> None:
        super().__init__()
        o3, e3 = import_module("e3nn.o3"), import_module("e3nn.nn")
        self.first = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "6x0e + 2x1o")
        self.gate = e3.Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
        self.last = o3.Linear("4x0e + 2x1o", "3x0e + 1x1o")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x, x[..., 3:7])))


def dense(kind: str, **options: Any) -> Case:
    """Build layers of torch_geometric."""
    torch.manual_seed(0)
    return Case(Dense(kind, **options), linked, batches(graphs))


def equivariant() -> Case:
    """Build layers of e3nn."""
    torch.manual_seed(0)
    return Case(Equivariant(), of_x, batches(vectors(5, 10)))


def coupled() -> Case:
    """Build a flow of masked affine transforms of nflows."""
    flows, transforms = import_module("nflows.flows"), import_module("nflows.transforms")
    torch.manual_seed(0)
    parts = [transforms.MaskedAffineAutoregressiveTransform(features=5, hidden_features=12) for _ in range(2)]
    base = import_module("nflows.distributions").StandardNormal([5])
    return Case(flows.Flow(transforms.CompositeTransform(parts), base), likely_too, batches(vectors(5)))


MODELS: list[Entry] = [
    other("esm2", "fair-esm", "esm", "ESM2", residues, folded, num_layers=2, embed_dim=24, attention_heads=4),
    other("egnn", "egnn-pytorch", "egnn_pytorch", "EGNN_Network", atoms, bound, depth=2, dim=12, num_tokens=9,
          num_positions=8, m_dim=6, norm_coors=True),
    other("fno", "neuraloperator", "neuralop.models", "FNO", vectors(2, 8, 8), of_x, n_modes=(4, 4), in_channels=2,
          out_channels=1, hidden_channels=8, n_layers=2),
    other("zuko_nsf", "zuko", "zuko.flows", "NSF", vectors(4), likely, 4, transforms=2, hidden_features=(12, 12)),
    other("zuko_maf", "zuko", "zuko.flows", "MAF", vectors(4), likely, 4, transforms=2, hidden_features=(12, 12)),
    Entry("nflows_maf", "nflows", coupled),
    Entry("e3nn_gate", "e3nn", equivariant),
    Entry("geometric_gcn", "torch-geometric", lambda: dense("DenseGCNConv")),
    Entry("geometric_gat", "torch-geometric", lambda: dense("DenseGATConv", heads=2, concat=False)),
    Entry("geometric_sage", "torch-geometric", lambda: dense("DenseSAGEConv")),
    other("ncps_cfc", "ncps", "ncps.torch", "CfC", vectors(7, 6), of_x, 6, 10, backbone_units=12, backbone_layers=1),
]  # fmt: skip
