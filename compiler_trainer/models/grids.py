"""Images of any sizes in one graph: a row of a batch has patches, and a table of the grids that its images fill.

The towers of Qwen's vision-language models, and of others that follow them, take the patches of all images as one
sequence, and a table with (frames, height, width) of each image, in patches. transformers derives from the table, in
Python, where each patch is and which patches see each other. Inside `Grids.by_row`, these functions of transformers are
replaced by ones that compute the same in the graph, so that the table is data like the patches:

    a row      patches [P, F], and a table [N, 3]; the counts of the table's patches add up to P
    position   of a patch: its row and column, from its number within its image
    sees       the patches of the same frame, or window: a run of equal numbers, and so attention by interval
    windows    are adjacent after a reordering of each row's patches

Patches that no image has fill up a row: they are an image of frames of one token each, which no token reads. The model
itself is told that each row has one image with all patches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from compiler_trainer.models.by_row import ByRow
from compiler_trainer.models.transformers_private import axis_taps, register_attention

TABLE = "image_grid_thw"  # transformers' name of the table
TYPES = frozenset(  # of models whose results are right, by value: tests/nightly/models/zoo/grids.py
    """qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen4_exp glm_ocr exaone4_5 cohere_compass
    cosmos3_omni glm5_next glm4v glm4v_moe glm46v""".split()
)
ATTENTION = "flash_by_row"  # transformers gives borders to attention whose name has "flash", and cuts for others


def fill_table(grids: Sequence[Sequence[int]], entries: int, patches: int, merge: int) -> NDArray[np.int64]:
    """Return the table [entries + 1, 3] of a row: its images, an image of the patches that they leave, and empty ones.

    `merge` x `merge` patches are a token.
    """
    left = patches - sum(int(np.prod(grid)) for grid in grids)
    rest = [(left // merge**2, merge, merge), *[(0, merge, merge)] * (entries - len(grids))]
    return np.array([*grids, *rest], np.int64)


@dataclass(frozen=True)
class Grids:
    """The patches of a batch: `table` [B, N, 3] for rows of `patches`; `merge` x `merge` patches are a token."""

    table: Tensor
    patches: int
    merge: int
    mode: ByRow

    @property
    def rows(self) -> int:
        """The rows of the batch."""
        return len(self.table)

    @property
    def as_one_image(self) -> Tensor:
        """The table of a batch whose rows have one image each, [B, 3]."""
        return torch.tensor([[1, self.patches // self.merge, self.merge]] * self.rows)

    @cached_property
    def counts(self) -> Tensor:
        """The patches of each image, [B, N]."""
        return self.table.prod(-1)

    @cached_property
    def image(self) -> Tensor:
        """The number of each patch's image, [B, P]."""
        return image_at(self.counts, torch.arange(self.patches, device=self.table.device).expand(self.rows, -1))

    def of_image(self, values: Tensor) -> Tensor:
        """Return the values [B, N] of images at their patches, [B, P]."""
        return values.gather(1, self.image)

    @cached_property
    def sides(self) -> tuple[Tensor, Tensor]:
        """The height and width of each patch's image, [B, P]."""
        return self.of_image(self.table[..., 1]), self.of_image(self.table[..., 2])

    @cached_property
    def within_frame(self) -> Tensor:
        """The number of each patch within its frame, [B, P]."""
        height, width = self.sides
        number = torch.arange(self.patches, device=self.table.device) - self.of_image(starts(self.counts))
        return number % (height * width)

    def places(self, merge: int) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each patch, [B, P], if patches are in blocks of `merge` x `merge`."""
        _, width = self.sides
        block, inner = self.within_frame // merge**2, self.within_frame % merge**2
        across = width // merge
        return block // across * merge + inner // merge, block % across * merge + inner % merge

    @cached_property
    def frames(self) -> Tensor:
        """The number of each patch's frame in its row, [B, P]."""
        return (self.within_frame == 0).long().cumsum(1)

    # ---- what transformers derives from a table -------------------------------------------------------------------

    def get_vision_position_ids(
        self, grid_thw: Tensor, spatial_merge_size: int, include_temporal: bool = False, kwargs: Any = None
    ) -> Tensor:
        """Return the row and the column of each patch, [B * P, 2]."""
        assert not include_temporal
        return torch.stack(self.places(spatial_merge_size), -1).flatten(0, 1)

    def get_vision_attention_seqlens(
        self, grid_thw: Tensor, config: Any, merge_temporal: bool = False, kwargs: Any = None
    ) -> tuple[Tensor, int]:
        """Return the numbers of frames, for `attention` to take in place of borders."""
        return self.frames, self.patches

    def get_max_seqlen(self, cu_seqlens: Tensor, *args: Any, **kwargs: Any) -> int:
        """Return a length that is at least that of all runs."""
        return self.patches

    def get_vision_interpolation_indices_and_weights(
        self,
        grid_thw: Tensor,
        num_grid_per_side: int,
        mode: str = "bilinear",
        align_corners: bool = False,
        spatial_merge_size: int = 1,
        padding: str = "border",
        kwargs: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return entries of a square table of positions for each patch, and their weights, [B * P, taps] both."""
        side, parts = num_grid_per_side, []
        for place, size in zip(self.places(spatial_merge_size), self.sides):
            parts.append(axis_taps(place.flatten(), size.flatten(), side, mode, align_corners, padding))
        (rows, of_rows), (columns, of_columns) = parts
        entries = rows[:, :, None] * side + columns[:, None, :]
        return entries.flatten(1), (of_rows[:, :, None] * of_columns[:, None, :]).flatten(1)

    def get_vision_window_index(
        self, grid_thw: Tensor, spatial_merge_size: int, window_size: int, patch_size: int, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return an order of tokens in which those of a window are adjacent, and the numbers of the windows.

        The order is [B * P / merge**2], of numbers within a row; windows are at the edges cut off.
        """
        area, side = self.merge**2, window_size // spatial_merge_size // patch_size
        row, column, height, width, number = (
            x[:, ::area] // size
            for x, size in zip(
                (*self.places(self.merge), *self.sides, self.within_frame),
                (self.merge, self.merge, self.merge, self.merge, area),
            )
        )
        first = torch.arange(self.patches // area, device=self.table.device) - number  # token of the frame
        above, left = row // side * side, column // side * side
        high, wide = (height - above).clamp(max=side), (width - left).clamp(max=side)
        place = first + above * width + left * high + (row - above) * wide + column - left
        order = place.argsort(1)
        is_first = ((row == above) & (column == left)).gather(1, order)
        begins = F.pad(is_first.unsqueeze(-1), (0, area - 1))
        return self.mode.ordered(order), begins.flatten(1).long().cumsum(1)

    def with_positions(self, module: Any, embeddings: Tensor, *borders: Any) -> Tensor:
        """Return embeddings [B * P, D] of GLM-4V plus those of their positions, interpolated in fp32."""
        table, mode = module.position_embedding.weight, module.interpolated_method
        taps = self.get_vision_interpolation_indices_and_weights(
            self.table, math.isqrt(len(table)), mode, spatial_merge_size=self.merge
        )
        entries, weights = (x.unbind(1) for x in taps)
        wide = table.float()
        values = (weight.unsqueeze(1) * F.embedding(entry, wide) for entry, weight in zip(entries, weights))
        return embeddings + reduce(torch.add, values).to(table.dtype)

    @contextmanager
    def by_row(self, model: Any) -> Iterator[None]:
        """A context in which a model of `TYPES` takes these grids, whatever table it is given."""
        register_attention(ATTENTION, attention)
        kind, modules = type(model.config.vision_config), list(model.modules())
        configs: dict[int, Any] = {id(c): c for m in modules if isinstance(c := getattr(m, "config", None), kind)}
        with ExitStack() as stack:
            for module in {sys.modules[type(m).__module__] for m in modules}:
                for name in FUNCTIONS & vars(module).keys():
                    stack.enter_context(patch.object(module, name, getattr(self, name)))
            for module in modules:
                if hasattr(module, "interpolated_method"):
                    stack.enter_context(patch.object(module, "forward", partial(self.with_positions, module)))
            for config in configs.values():
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = ATTENTION
            yield


FUNCTIONS = {name for name in vars(Grids) if name.startswith("get_")}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, B * P, H, D] of q, k, v [1, H, B * P, D] within runs, whose numbers are [B, P]."""
    runs = cu_seq_lens_q
    q, k, v = (x[0].unflatten(1, runs.shape).transpose(0, 1) for x in (query, key, value))
    sees = runs[:, None, :, None] == runs[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k, v, sees, dropout, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1).unsqueeze(0), None


def image_at(counts: Tensor, number: Tensor) -> Tensor:
    """Return which image of a row the entry of that number belongs to, [B, T]; N after all. `counts` is [B, N]."""
    return torch.searchsorted(counts.cumsum(1), number.contiguous(), right=True)


def starts(counts: Tensor) -> Tensor:
    """Return the sums of the counts before each, [B, N]."""
    return counts.cumsum(1) - counts


def turning_positions(table: Tensor, merge: int, is_image: Tensor, positions: Tensor) -> Tensor:
    """Return positions [4, B, T] of rotary embeddings in time, height and width (Qwen2-VL, arXiv:2409.12191).

    The first of the four are `positions` [B, T], those of the tokens in their documents. An image of h x w tokens takes
    max(h, w) positions in time. `table` [B, N, 3] has the grids of a row's images, in the order of its tokens.
    """
    height, width = table[..., 1] // merge, table[..., 2] // merge
    counts = table.prod(-1) // merge**2
    saved = (counts - torch.maximum(height, width)) * (counts > 0)
    seen = is_image.cumsum(1) - is_image.long()  # image tokens before each token
    image = image_at(counts, seen)
    before = F.pad(saved.cumsum(1), (1, 0)).gather(1, image)
    first = torch.arange(positions.shape[1], device=positions.device) - positions
    start = positions - (before - before.gather(1, first))  # within the document
    at = (seen - F.pad(starts(counts), (0, 1)).gather(1, image)) * is_image
    across = F.pad(width, (0, 1), value=1).gather(1, image)
    start = start - at
    return torch.stack([positions, start, start + at // across, start + at % across])
