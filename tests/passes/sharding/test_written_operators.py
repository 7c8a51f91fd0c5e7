"""Operators that `normalize` rewrites: by value, each dim sharded in turn, with a rule for every operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rule_cases import IMAGE, LINE, VOLUME, X, bound, real, unit, whole
from rule_harness import capture, check, sharded

from passes.ir.mesh import Mesh

PAIRS = real(8, 4, 2)


def normed(x, mean, var, training=False, **options):
    """Apply a batch norm with given statistics, which PyTorch itself does not differentiate."""
    return F.batch_norm(x, mean.detach(), var.detach(), training=training, **options)


def attended_twice(q, k, v):
    """Attend in five dims with fewer key heads than ranks: both calls get four dims, and repeated key heads."""
    once = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return once + F.scaled_dot_product_attention(q * 2, k, v, is_causal=True, enable_gqa=True)


WRITTEN = {
    "attention in five dims": [(attended_twice, (real(2, 3, 6, 5, 4), real(2, 3, 2, 5, 4), real(2, 3, 2, 5, 3)))],
    "batch norm": [(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (IMAGE, real(4), real(4))), (bound(F.batch_norm, None, None, training=True), (X,)),
                   (bound(F.batch_norm, None, None, training=True), (LINE,)), (normed, (IMAGE, real(4), unit(4)))],
    "bilinear": [(F.bilinear, (real(8, 3), real(8, 4), real(5, 3, 4), real(5))), (F.bilinear, (real(2, 8, 3), real(2, 8, 4), real(1, 3, 4)))],
    "circular border": [(bound(F.pad, (1, 2), "circular"), (LINE,)), (bound(F.pad, (2, 0, -1, 2), "circular"), (IMAGE,)),
                        (bound(F.pad, (1, 0, 0, 1, 2, 1), "circular"), (VOLUME,))],
    "complex weights": [(lambda x, w: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(w)), (PAIRS, real(4, 2))),
                        (lambda x, w: torch.view_as_real(torch.view_as_complex(x).conj() + torch.view_as_complex(w)), (PAIRS, real(8, 1, 2)))],
    "instance norm": [(lambda x, w, b: F.instance_norm(x, None, None, w, b), (IMAGE, real(4), real(4))), (F.instance_norm, (LINE,))],
    "losses": [(bound(loss, reduction=how), (X, unit(8, 7))) for how in ("mean", "sum")
               for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy_with_logits)],
    "losses of classes": [(lambda x, y: F.nll_loss(x.log_softmax(1), y), (IMAGE, whole(4, 3, 8, 7))),
                          (lambda x, y: F.multi_margin_loss(x, y), (X, whole(7, 8)))],
    "losses of pairs": [(F.cosine_similarity, (X, real(8, 7))), (lambda x, y, z: F.cosine_embedding_loss(x, y, z.sign()), (X, real(8, 7), real(8))),
                        (lambda x, y: F.hinge_embedding_loss(x, y.sign()), (X, real(8, 7))), (F.triplet_margin_loss, (X, real(8, 7), real(8, 7)))],
    "pixels": [(bound(F.pixel_shuffle, 2), (real(3, 8, 3, 5),)), (bound(F.pixel_unshuffle, 2), (real(3, 2, 4, 6),)), (bound(torch.channel_shuffle, 2), (IMAGE,))],
    "pooling into one": [(bound(F.adaptive_avg_pool2d, 1), (IMAGE.to(memory_format=torch.channels_last),)), (bound(F.adaptive_avg_pool1d, 1), (LINE,)),
                         (bound(F.adaptive_avg_pool3d, 1), (VOLUME,))],
    "quantiles": [(bound(torch.quantile, 0.3, 1), (X,)), (bound(torch.nanmean, 1), (X,))],
    "windows in time": [(lambda x: torch.view_as_real(torch.stft(x, 4, 2, window=torch.ones(4).double(), return_complex=True)), (real(5, 16),))],
}


@pytest.mark.parametrize("name", sorted(WRITTEN))
@pytest.mark.sample(2)
def test_as_on_one_device(name: str):
    for fn, tensors in WRITTEN[name]:
        function = capture(fn, tensors, Mesh.of({"tp": 3}))
        for i, x in enumerate(tensors):
            for dim in (d for d, n in enumerate(x.shape) if n > 1):
                report = check(function, {i: sharded(x.shape, dim, fill=None)})
                assert not [note for note in report.notes if "has no rule" in note]
