"""Capture indexers of transformers' models whose shapes depend on data, with shapes that do not.

Qwen's QSA loops over queries and averages the keys that each sees in blocks; GLM-5-Next keeps as many pools of keys as
a batch fills. Ours select the same keys: blocks are found from the first key that each token sees. Other indexers are
captured as they are. Checked with transformers 5.23.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


class Blocks(NamedTuple):
    """The complete blocks of adjacent keys in each row, at most n.

    `start` int64 [b, n] is a block's first key, `exists` bool [b, n]; `of_key` int64 [b, t] is each key's block, n for
    keys in none.
    """

    start: Tensor
    exists: Tensor
    of_key: Tensor

    def first_entries(self, x: Tensor) -> Tensor:
        """Return the entries [b, n, d] of x [b, t, d] at the first key of each block."""
        return x.gather(1, self.start[..., None].expand(-1, -1, x.shape[-1]))

    def entries(self, x: Tensor, size: int) -> Tensor:
        """Return the entries [b, n, size, d] of x [b, t, d] that are in the blocks."""
        at = (self.start[..., None] + torch.arange(size, device=x.device)).flatten(1)
        return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, (-1, size))


def blocks_of(first: Tensor, size: int) -> Blocks:
    """Return the blocks of `size` keys of the documents that start at `first`, int64 [b, t], which is t for padding."""
    t = first.shape[1]
    at = torch.arange(t, device=first.device)
    if t < size:
        nothing = first[:, :0]
        return Blocks(nothing, nothing.bool(), torch.zeros_like(first))
    last_of_block = F.pad(first[:, size - 1 :], [0, size - 1], value=-1)
    starts = (at >= first) & ((at - first) % size == 0) & (last_of_block == first)
    count = starts.long().cumsum(1)
    numbers = torch.arange(1, t // size + 1, device=first.device).expand(len(first), -1)
    start = torch.searchsorted(count, numbers.contiguous())
    exists, start = start < t, start.clamp(max=t - size)
    number = count - 1
    is_in_block = (number >= 0) & (at < start.gather(1, number.clamp(min=0)) + size)
    return Blocks(start, exists, torch.where(is_in_block, number, t // size))


def qsa(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `Qwen4ExpTextQSAIndexer.forward` for queries that see adjacent keys, as those of a document are."""
    rotate = sys.modules[theirs.__module__].apply_rotary_pos_emb

    @wraps(theirs)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        past_key_values: Any,
    ) -> Tensor:
        """Return the keys that each query selects, bool [b, 1, s, t]."""
        t, size = hidden_states.shape[1], self.compress_ratio
        if attention_mask.shape[-1] != t:  # earlier keys are in the cache
            return theirs(self, hidden_states, position_embeddings, attention_mask, past_key_values)
        heads = self.index_qk_proj(hidden_states).unflatten(-1, (-1, self.index_head_dim))
        queries, keys = heads.split([self.index_n_heads, self.index_kv_heads], 2)
        keys = keys.squeeze(2)
        if past_key_values is not None:
            keys = past_key_values.update_indexer(keys, self.layer_idx)
        visible = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
        at = torch.arange(t, device=visible.device)
        first, count = torch.where(visible, at, t).amin(-1), visible.sum(-1)
        complete_until = first + count // size * size
        tail = visible & (at >= complete_until[..., None])
        if t < size:
            return tail[:, None]
        cos, sin = position_embeddings
        queries = rotate(self.q_layernorm(queries), cos=cos, sin=sin, unsqueeze_dim=2)
        blocks = blocks_of(first, size)
        pooled = self.k_layernorm(blocks.entries(keys, size).float().mean(2).to(keys.dtype))
        cos_of_blocks, sin_of_blocks = (blocks.first_entries(x.expand(len(first), -1, -1)) for x in (cos, sin))
        pooled = rotate(pooled.unsqueeze(2), cos=cos_of_blocks, sin=sin_of_blocks, unsqueeze_dim=2).squeeze(2)
        scores = torch.matmul(queries.float(), pooled.float().transpose(-1, -2).unsqueeze(1))
        scores = scores.relu().sum(2) / math.sqrt(self.index_head_dim)
        start = blocks.start[:, None]
        seen = blocks.exists[:, None] & (start >= first[..., None]) & (start < complete_until[..., None])
        best, chosen = scores.masked_fill(~seen, -math.inf).topk(min(self.block_topk, t // size), -1)
        selected = seen.new_zeros(*seen.shape[:2], t // size + 1).scatter(-1, chosen, best > -math.inf)
        return (tail | selected.gather(-1, blocks.of_key[:, None].expand(-1, t, -1)))[:, None]

    return forward


def pools(theirs: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return `Glm5NextTextIndexer.get_pooled_states` with a place for each pool that a row may have."""

    @wraps(theirs)
    def get_pooled_states(self: Any, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys [b, p, d] of pools, the indices [b, p, k] of their tokens, and bool [b, p]: they exist."""
        t, size = packed_states.shape[1], self.index_kpool
        keys, gates, valid = packed_states.split([self.head_dim, self.head_dim, 1], -1)
        is_valid, at = valid.squeeze(-1).bool(), torch.arange(t, device=keys.device)
        first = torch.where(is_valid, at, t).amin(1, keepdim=True)
        blocks = blocks_of(torch.where(is_valid, first, t), size)
        logits = blocks.entries(gates, size).float() + self.index_kpool_compress_ape.float()
        weights = logits.softmax(2).to(keys.dtype)
        indices = blocks.start[..., None] + torch.arange(size, device=keys.device)
        indices = torch.where(blocks.exists[..., None], indices, -1)
        return (weights * blocks.entries(keys, size)).sum(2), indices, blocks.exists

    return get_pooled_states


SELECT_ACROSS_DOCUMENTS = frozenset({"glm5_next_text"})  # types of models, of those that `probes` cannot try
METHODS = {  # class and method -> our version, given theirs
    ("Qwen4ExpTextQSAIndexer", "forward"): qsa,
    ("Glm5NextTextIndexer", "get_pooled_states"): pools,
}


@contextmanager
def indexers_of_fixed_shapes() -> Iterator[None]:
    """Replace the methods of transformers' indexers by ours inside the block."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    with ExitStack() as stack:
        for module in loaded:
            for (kind, method), ours in METHODS.items():
                if (owner := vars(module).get(kind)) is not None and owner.__module__ == module.__name__:
                    stack.enter_context(patch.object(owner, method, ours(getattr(owner, method))))
        yield
