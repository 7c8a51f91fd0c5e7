"""Replace FlexAttention by plain operators: its mask function becomes a mask, its score function operators on scores.

    flex_attention(q, k, v, score_mod, block_mask)   ->   scaled_dot_product_attention(q, k, v, mask)

A function of (b, h, i, j) runs once on broadcasting index tensors, [B, 1, 1, 1] to [1, 1, 1, T]. Look-ups by these
indices themselves in captured tensors become views: `documents[b, i]` is `documents[:, None, :, None]`, sharded as the
documents are. Without a score function the result is SDPA, which every method of context parallelism supports, with a
backward on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from compiler_trainer.config.errors import UserError
from passes.idioms.masks import constant_true
from passes.ir import ir
from passes.trace.editor import Editor, laid_out_as

aten = torch.ops.aten
FLEX = torch.ops.higher_order.flex_attention
ENTRY_BY_ENTRY = {  # besides operators that PyTorch marks as pointwise
    getattr(aten, name)
    for name in (
        *("_to_copy", "to", "type_as", "clone", "alias", "detach", "contiguous", "lift_fresh_copy"),
        *("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"),
        *("__and__", "__or__", "floor_divide", "where", "isclose"),
    )
}


class Broadcast(fx.Interpreter):
    """An interpreter that runs a mask or score function once, on index tensors over all positions.

    The first inputs of the function, `varying` of them, differ by position.
    """

    def __init__(self, module: fx.GraphModule, indices: tuple[Tensor, ...], varying: int, place: str):
        super().__init__(module)
        self.extra_traceback = False
        self.place, self.sizes = place, [index.numel() for index in indices]
        self.index_dims = {id(index): d for d, index in enumerate(indices)}
        self.varying = set(module.graph.find_nodes(op="placeholder")[:varying])

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; raises UserError if it would combine values of several positions, as a sum would."""
        if n.op == "call_function" and not self.varying.isdisjoint(n.all_input_nodes):
            if not self.is_entry_by_entry(n):
                raise UserError(
                    "model",
                    f"{self.place}: a mask or score function of flex_attention calls {n.target} on values that differ "
                    "by position; use comparisons, arithmetic and look-ups such as ids[b, i] instead",
                )
            self.varying.add(n)
        return super().run_node(n)

    def is_entry_by_entry(self, n: fx.Node) -> bool:
        """Return True if an operator on values of all positions does what it does on those of one."""
        if n.target in (aten.index.Tensor, aten.isin.Tensor_Tensor):
            table, by = n.args[:2] if n.target is aten.index.Tensor else n.args[1::-1]
            whole = n.target is not aten.index.Tensor or len(by) == self.env[table].dim() and None not in by  # type: ignore
            return table not in self.varying and whole
        pointwise = torch.Tag.pointwise in getattr(n.target, "tags", ())
        return pointwise or getattr(n.target, "overloadpacket", None) in ENTRY_BY_ENTRY

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """Call an operator; a look-up by the index tensors themselves becomes a view."""
        if target is aten.index.Tensor:
            x, dims = args[0], [self.index_dims.get(id(index), -1) for index in args[1]]
            if len(dims) == x.dim() and -1 not in dims and len(set(dims)) == len(dims):
                sizes = [self.sizes[d] for d in dims]
                if all(n >= size for n, size in zip(x.shape, sizes)):
                    return self.as_view(x if list(x.shape) == sizes else x[tuple(map(slice, sizes))], dims)
        return super().call_function(target, args, kwargs)

    def as_view(self, x: Tensor, dims: list[int]) -> Tensor:
        """Return a table of which each dim is looked up by the index of `dims`, in the dims of all indices."""
        order = sorted(range(len(dims)), key=dims.__getitem__)
        return x.permute(order).reshape([self.sizes[d] if d in dims else 1 for d in range(4)])


def grid(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return broadcasting index tensors of batch, head, query and key."""
    shapes = ([-1 if d == k else 1 for k in range(4)] for d in range(4))
    return tuple(torch.arange(n, device=device).view(shape) for n, shape in zip(sizes, shapes))


def is_causal(mask: fx.GraphModule) -> bool:
    """Return True if a mask function is exactly `i >= j`."""
    _, _, i, j, *_ = mask.graph.find_nodes(op="placeholder")
    result = unwrap(mask.graph.output_node().args[0])
    return isinstance(result, fx.Node) and result.target is aten.ge.Tensor and result.args == (i, j)


def sees_all(mask: fx.GraphModule) -> bool:
    """Return True if a mask function is True everywhere."""
    result = unwrap(mask.graph.output_node().args[0])
    return isinstance(result, fx.Node) and constant_true(result)


def changes_nothing(score: fx.GraphModule) -> bool:
    """Return True if a score function returns the score unchanged."""
    score_input, result = score.graph.find_nodes(op="placeholder")[0], score.graph.output_node().args[0]
    return result is score_input or result == (score_input,) or result == [score_input]


def unwrap(result: Any) -> Any:
    """Return the result of a function that may return a tuple of one."""
    return result[0] if isinstance(result, (tuple, list)) else result


def write_out(module: fx.GraphModule) -> int:
    """Replace each FlexAttention of a captured graph, and return their number."""
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and n.target is FLEX]
    masks: dict[Any, fx.Node] = {}
    for node in nodes:
        for part in list(node.users):
            if not part.users:
                module.graph.erase_node(part)
        if any(part.args[1] != 0 for part in node.users):
            raise UserError(
                "model", f"{ir.source(node)}: flex_attention returns its log-sum-exp; only its result is supported"
            )
        replace(module, node, masks)
    if nodes:
        module.graph.eliminate_dead_code()
        module.recompile()
    return len(nodes)


def replace(module: fx.GraphModule, node: fx.Node, masks: dict[Any, fx.Node]) -> None:
    """Replace one call by operators; calls with the same mask share it in `masks`."""
    args: Any = node.args
    q, k, v, score_mod, block_mask, scale, _, score_captured, mask_captured = args
    score_fn, mask_fn = getattr(module, score_mod.target), getattr(module, block_mask[-1].target)
    (b, h, s, _), (_, _, t, _) = ir.example(q).shape, ir.example(k).shape
    index, device = (b, h, s, t), ir.example(q).device
    example = ir.value(node)[0]
    plain = changes_nothing(score_fn)
    ctx = ir.Context(ir.example(node.args[0]).fake_mode)  # type: ignore[attr-defined,arg-type]
    causal = plain and s == t and is_causal(mask_fn)

    def mask(*captured: Any) -> Tensor:
        at = grid(index, device)
        result = unwrap(Broadcast(mask_fn, at, 4, ir.source(node)).run(*at, *captured))
        return result.expand(*result.shape[:2], s, t)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *captured: Any) -> Tensor:
        if plain:
            grouped = h != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        else:
            out = score_attention(q, k, v, mask, score_fn, scale, captured, ir.source(node))
        return laid_out_as(example, out)

    mask_node, edit = None, Editor.before(node, ctx)
    if not causal and not sees_all(mask_fn):
        key = (mask_fn.code, tuple(mask_captured), index)
        mask_node = masks[key] = masks.get(key) or edit.trace(mask, *mask_captured, key=mask)
    out = edit.trace(attention, q, k, v, mask_node, *score_captured, key=attention)
    for part in list(node.users):
        part.replace_all_uses_with(out)
        module.graph.erase_node(part)
    module.graph.erase_node(node)


def score_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    score_fn: fx.GraphModule,
    scale: float,
    captured: Sequence[Any],
    place: str,
) -> Tensor:
    """Return the attention of q[b, h, s, e], k[b, g, t, e], v[b, g, t, f] as [b, h, s, f].

    A query that sees no key gets zeros.
    """
    (b, h, s, _), (_, g, t, _) = q.shape, k.shape
    index = grid((b, h, s, t), q.device)
    k, v = (x.repeat_interleave(h // g, 1) if h != g else x for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = unwrap(Broadcast(score_fn, index, 5, place).run(scores, *index, *captured))
    if mask is None:
        return scores.softmax(-1).to(v.dtype) @ v
    scores = torch.where(mask, scores, -math.inf)
    sees_any = mask.any(-1, keepdim=True)
    scores = torch.where(sees_any, scores, 0.0)
    return torch.where(sees_any, scores.softmax(-1).to(v.dtype) @ v, 0.0)
