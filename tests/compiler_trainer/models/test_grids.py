"""Rows of patches with tables of grids: what transformers derives from a table, and each image alone in attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import vision_utils as theirs

from compiler_trainer.models.by_row import ByRow
from compiler_trainer.models.grids import Grids, attention, fill_table

MERGE, PATCHES = 2, 96
ROWS = [[(1, 4, 6), (1, 8, 4)], [], [(1, 6, 10), (1, 2, 2), (1, 4, 8)]]  # the last one has no patches left


def made(mode):
    table = torch.stack([torch.from_numpy(fill_table(grids, 3, PATCHES, MERGE)) for grids in ROWS])
    return Grids(table, PATCHES, MERGE, mode)


@pytest.fixture
def grids():
    with ByRow(len(ROWS), torch.zeros(len(ROWS), PATCHES, 4)) as mode:
        yield made(mode)


def images(values, row):
    """Return the values [B * P, ...] of a row's images."""
    count = sum(t * h * w for t, h, w in ROWS[row])
    return values.reshape(len(ROWS), PATCHES, *values.shape[1:])[row, :count]


def test_a_table_accounts_for_all_patches(grids):
    assert (grids.counts.sum(1) == PATCHES).all()
    assert grids.table[1].tolist() == [[24, 2, 2], [0, 2, 2], [0, 2, 2], [0, 2, 2]]


@pytest.mark.parametrize("merge", [1, 2])
def test_places_are_those_of_transformers(grids, merge):
    places = grids.get_vision_position_ids(None, merge)
    mode = {"num_grid_per_side": 5, "mode": "bicubic", "align_corners": True, "spatial_merge_size": merge}
    entries, weights = grids.get_vision_interpolation_indices_and_weights(None, **mode)
    for row in (0, 2):
        table = torch.tensor(ROWS[row])
        assert torch.equal(images(places, row), theirs.get_vision_position_ids(table, merge))
        expected = theirs.get_vision_interpolation_indices_and_weights(table, **mode)
        assert torch.equal(images(entries, row), expected[0]) and torch.equal(images(weights, row), expected[1])


def runs_of(borders):
    """Return the number of the run of each patch, from borders [runs + 1]."""
    return torch.repeat_interleave(torch.arange(1, len(borders)), borders.diff())


def test_windows_are_those_of_transformers(grids):
    window = {"spatial_merge_size": MERGE, "window_size": 12, "patch_size": 3}  # of 2 x 2 tokens
    order, windows = grids.get_vision_window_index(None, **window)
    for row in (0, 2):
        expected, borders = theirs.get_vision_window_index(torch.tensor(ROWS[row]), **window)
        mine = order.view(len(ROWS), -1)[row, : len(expected)] - row * PATCHES // MERGE**2
        assert torch.equal(mine, expected)
        assert torch.equal(images(windows.flatten(), row), runs_of(borders.long()))


def test_an_order_of_rows_is_applied_and_undone_by_row(grids):
    order, _ = grids.get_vision_window_index(None, MERGE, 12, 3)
    x = torch.randn(len(ROWS) * PATCHES // MERGE**2, 4, 5)
    assert torch.equal(x[order, :, :], x.gather(0, order.view(-1, 1, 1).expand_as(x)))
    assert torch.equal(x[order][torch.argsort(order), :], x)


def test_frames_attend_within_themselves(grids):
    frames, longest = grids.get_vision_attention_seqlens(None, None)
    assert longest == PATCHES == grids.get_max_seqlen(frames)
    q, k, v = torch.randn(3, 1, 2, len(ROWS) * PATCHES, 4).unbind(0)
    out, _ = attention(nn.Identity(), q, k, v, scaling=0.5, cu_seq_lens_q=frames)
    start = 2 * PATCHES
    for t, h, w in ROWS[2]:
        at = slice(start, start + t * h * w)
        alone = nn.functional.scaled_dot_product_attention(q[:, :, at], k[:, :, at], v[:, :, at], scale=0.5)
        torch.testing.assert_close(out[:, at], alone.transpose(1, 2))
        start += t * h * w
    assert out.isfinite().all()
