"""Random numbers keyed by global index: the same bits on every mesh, and in a recomputation.

    dropout(x, 0.1)   ->   where(uniform(x, seed, 3) >= 0.1, x / 0.9, 0)

`uniform` hashes (seed, site, index of the entry in the full tensor). `seed` is an input of the step; `site` counts the
random operators of the graph. On a shard the indices are computed from the rank's coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from passes.ir.layout import entries
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec
from passes.rules import add_rule
from passes.rules.base import Rule, tensor_operands
from passes.rules.pointwise import rule as pointwise_rule
from passes.trace.builder import Builder

aten = torch.ops.aten
LOW = 0xFFFFFFFF
MOST = 2**31 - 1  # largest signed 32-bit integer
SALT = 0x27D4EB2F  # odd and below 2**31, so that products of 32-bit words stay within int64


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit words held in int64, bijectively (two multiply-xorshift rounds, all products below 2**63)."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & LOW
    return x ^ (x >> 16)


def uniform_at(index: Tensor, seed: Tensor, site: int) -> Tensor:
    """Draw fp32 numbers in [0, 1) for int64 global indices and a 0-d int64 seed."""
    key = mix((seed & LOW) ^ mix((seed >> 32) ^ torch.full_like(seed, (site + 1) * SALT & LOW)))
    word = mix(mix((index & LOW) ^ key) ^ (index >> 32))
    return (word >> 8).to(torch.float32) / 2.0**24


def _uniform(x: Tensor, seed: Tensor, site: int) -> Tensor:
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    return uniform_at(index, seed, site)


torch.library.custom_op(
    "ct::uniform", _uniform, mutates_args=(), schema=torch.library.infer_schema(_uniform, mutates_args=())
).register_fake(_uniform)
uniform = torch.ops.ct.uniform.default


def dropout(x: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """Zero entries with probability `p` and scale the others by 1 / (1 - p)."""
    return torch.where(uniform(x, seed, site) >= p, x / (1 - p), 0.0) if p < 1 else torch.zeros_like(x)


def _rule(node: fx.Node) -> Rule:
    x, seed = tensor_operands(node)
    like = pointwise_rule(node)
    return Rule((like.operands[0], ()), like.results, like.sizes, emit=_emit)


def _emit(builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]) -> fx.Node:
    """Draw the rank's own entries from the hashes of their indices in the full tensor."""
    _, seed = operands
    sharded = (axis for axis in builder.mesh.names if axis in specs[0].sharded)
    names = dict.fromkeys([*sharded, *(name for dim in specs[0].dims for f in dim for name in f.reads())])

    def draw(seed: Tensor, *places: Tensor) -> Tensor:
        index = global_index(specs[0], builder.mesh, dict(zip(names, places)), seed.device)
        return uniform_at(index, seed, node.args[2])

    return builder.trace(draw, seed, *(builder.coordinates[name] for name in names))


def global_index(spec: Spec, mesh: Mesh, places: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return each local entry's index in the full tensor (also for padding), int64 of the local shape.

    `places` are the rank's coordinates on the sharding axes, 0-d int64, and the block table.
    """
    factors = [f for dim in spec.dims for f in dim]
    local = [f.local(mesh) for f in factors]
    total = torch.zeros([1] * len(local), dtype=torch.int64, device=device)
    strides = [math.prod(factor.size for factor in factors[k + 1 :]) for k in range(len(factors))]
    is_wide = sum((count - 1) * stride for count, stride in zip(local, strides)) > MOST
    for k, (factor, stride) in enumerate(zip(factors, strides)):
        index, _ = entries(factor, mesh, places, device)
        if is_wide:
            index = index & LOW  # no longer an index, which Inductor would compute in 32 bits (PyTorch issue 175966)
        total = total + (index * stride).view([-1 if j == k else 1 for j in range(len(local))])
    return total.reshape(spec.local_shape(mesh))


add_rule("ct::uniform", _rule)
