"""One call or more of every operator in the rule table: dims of 8 and 7, even and uneven over 2, 3 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from versions import needs_scales_by_row

from passes.ops.linear_attention import causal_conv1d, linear_attention

aten = torch.ops.aten
Case = tuple[Callable[..., Any], tuple[Tensor, ...]]  # the call, and its tensor operands

_generator = torch.Generator().manual_seed(1)


def real(*shape: int) -> Tensor:
    """Return standard normal numbers, fp64."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def unit(*shape: int) -> Tensor:
    """Return numbers within (0.1, 0.9), which is inside the domain of every function here."""
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def whole(high: int, *shape: int, low: int = 0) -> Tensor:
    """Return integers in [low, high)."""
    return torch.randint(low, high, shape, generator=_generator)


def truth(*shape: int) -> Tensor:
    """Return random booleans."""
    return torch.rand(shape, generator=_generator) > 0.5


X, Y, Z = real(8, 7), real(8, 7), real(8, 7)
U, V = unit(8, 7), unit(8, 7)
N, M = whole(9, 8, 7, low=1), whole(9, 8, 7, low=1)
A, B = truth(8, 7), truth(8, 7)
TIED = (whole(3, 8, 7)).double()  # maxima that several ranks share


def call(name: str, overload: str = "default") -> Callable[..., Any]:
    """Return an ATen operator."""
    return getattr(getattr(aten, name), overload)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T of small integers, exact in float8, with a scale for each row of both."""
    needs_scales_by_row()
    rows, cols = (torch.arange(1, n + 1, dtype=torch.float32) for n in (a.shape[0], b.shape[0]))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    return aten._scaled_mm.default(a8, b8.t(), rows[:, None], cols[None, :], None, None, torch.float32)


def unary(names: str, x: Tensor) -> dict[str, list[Case]]:
    """Return cases of functions of one tensor."""
    return {name: [(call(name), (x,))] for name in names.split()}


def binary(names: str, overload: str, x: Tensor, y: Tensor) -> dict[str, list[Case]]:
    """Return cases of functions of two tensors: of one shape, and with the second broadcast either way."""
    return {name: [(call(name, overload), (x, other)) for other in (y, y[0], y[:, :1])] for name in names.split()}


def compared(names: str) -> dict[str, list[Case]]:
    """Return cases of comparisons with a tensor and with a number."""
    table = binary(names, "Tensor", N, M)
    return {name: [*cases, (bound(call(name, "Scalar"), 4), (N,))] for name, cases in table.items()}


def bound(op: Callable[..., Any], *more: Any, **options: Any) -> Callable[..., Any]:
    """Return the operator as a function of its tensors, with its other arguments bound."""
    return lambda *operands: op(*operands, *more, **options)


def along(op: Callable[..., Any], *operands: Tensor, **options: Any) -> list[Case]:
    """Return cases of an operator along the first and the last dim."""
    return [(bound(op, d, **options), operands) for d in (0, -1)]


def folded(op: Callable[..., Any], x: Tensor = X, **options: Any) -> list[Case]:
    """Return cases of a reduction of each dim, kept and not, and of both."""
    return [(bound(op, d, keepdim=k, **options), (x,)) for d, k in zip(([0], [-1], [0, 1]), (False, True, False))]


def attend(**options: Any) -> Callable[..., Tensor]:
    """Return SDPA as a function of q, k, v and an optional mask."""
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


def heads(batch: int, n: int, kv: int, t: int = 7, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [b, n, t, e], k and v [b, kv, t, e]."""
    return real(batch, n, t, width), real(batch, kv, t, width), real(batch, kv, t, width)


X3 = real(3, 8, 7)
IDS = whole(7, 3, 8)
LABELS = torch.tensor([0, 3, -100, 6, 2, -100, 5, 1])

POINTWISE: dict[str, list[Case]] = {
    **unary("""abs alias atan ceil celu clone cos cosh elu erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish
        hardtanh isfinite isinf isnan leaky_relu lift_fresh_copy log_sigmoid mish nan_to_num neg ones_like relu relu6 round
        selu sgn sigmoid sign silu sin sinh softplus square tan tanh trunc zeros_like contiguous detach""", X),
    **unary("acos asin lgamma log log10 log1p log2 reciprocal rsqrt sqrt", U),
    **unary("angle asinh i0 special_erfcx", X),
    **unary("atanh digamma erfinv", U),
    "acosh": [(torch.acosh, (U + 1,))],
    "gcd": [(torch.gcd, (N, M))],
    "ldexp": [(torch.ldexp, (X, N))],
    "nextafter": [(lambda x, y: torch.nextafter(x.detach(), y.detach()), (X, Y))],
    **binary("bitwise_left_shift bitwise_right_shift", "Tensor", N, M),
    **binary("__lshift__ __rshift__", "Tensor", N, M),
    **unary("bitwise_not", N),
    **unary("logical_not", A),
    **binary("__and__ __or__ bitwise_and bitwise_or bitwise_xor", "Tensor", N, M),
    **binary("logical_and logical_or logical_xor", "default", A, B),
    **binary("add clamp_max clamp_min copysign div fmod mul remainder rsub sub true_divide xlogy", "Tensor", U, V),
    **binary("atan2 fmax fmin hypot logaddexp maximum minimum", "default", U, V),
    **binary("floor_divide", "default", N, M),
    **compared("eq ge gt le lt ne"),
    "_to_copy": [(bound(call("_to_copy"), dtype=torch.int64), (X,)), (bound(call("_to_copy"), dtype=torch.float64), (N,))],
    "addcdiv": [(bound(torch.addcdiv, value=0.5), (X, Y, U)), (torch.addcdiv, (X, Y[0], U[:, :1]))],
    "addcmul": [(bound(torch.addcmul, value=0.5), (X, Y, U)), (torch.addcmul, (X, Y[0], U[:, :1]))],
    "clamp": [(bound(torch.clamp, -0.5, 0.5), (X,)), (torch.clamp, (X, -U, V))],
    "empty_like": [(lambda x: aten.fill.Scalar(torch.empty_like(x), 2.5), (X,))],
    "fill": [(bound(call("fill", "Scalar"), 2.5), (X,))],
    "full_like": [(bound(torch.full_like, 2.5), (X,))],
    "lerp": [(bound(torch.lerp, 0.3), (X, Y)), (torch.lerp, (X, Y, U)), (torch.lerp, (X, Y[0], U[:, :1]))],
    "masked_fill": [(bound(torch.masked_fill, 2.5), (X, A)), (bound(torch.masked_fill, float("-inf")), (X, A)), (bound(torch.masked_fill, 2.5), (X, A[:, :1])),
                    (torch.masked_fill, (X, A, real()))],
    "pow": [(bound(torch.pow, 2), (X,)), (bound(torch.pow, -1.5), (U,)), (torch.pow, (U, X)), (lambda x: 2.0 ** x, (X,))],
    "threshold": [(bound(F.threshold, 0.1, 20.0), (X,))],
    "to": [(bound(call("to", "dtype"), torch.int64), (X,)), (lambda x, i: x.to(i), (X, N))],
    "where": [(torch.where, (A, X, Y)), (torch.where, (A[:, :1], X, Y[0])), (lambda a, x: torch.where(a, x, 1.5), (A, X))],
}

CONTRACTIONS: dict[str, list[Case]] = {
    "_scaled_mm": [(scaled, (whole(9, 8, 7), whole(9, 5, 7))), (scaled, (whole(9, 7, 8), whole(9, 8, 8)))],
    "_cdist_forward": [(torch.cdist, (X, real(5, 7))), (torch.cdist, (real(2, 1, 5, 7), X3)), (bound(torch.cdist, p=1.0), (X3, X3.roll(1, -1)))],
    "addmm": [(torch.addmm, (real(7), real(8, 6), real(6, 7))),
              (bound(torch.addmm, beta=0.5, alpha=2), (real(8, 7), real(8, 6), real(6, 7)))],
    "bmm": [(torch.bmm, (real(3, 8, 7), real(3, 7, 5)))],
    "dot": [(torch.dot, (real(7), real(7)))],
    "linear": [(F.linear, (X3, real(5, 7))), (F.linear, (X3, real(5, 7), real(5))), (F.linear, (real(7), real(5, 7)))],
    "matmul": [(torch.matmul, (X3, real(7, 5))), (torch.matmul, (real(2, 3, 8, 7), real(3, 7, 5))),
               (torch.matmul, (real(7), X3.mT)), (torch.matmul, (X3, real(7))), (torch.matmul, (real(2, 1, 8, 7), X3.mT))],
    "mm": [(torch.mm, (X, Y.T))],
    "mv": [(torch.mv, (X, real(7)))],
    "outer": [(torch.outer, (real(8), real(7)))],
    "scaled_dot_product_attention": [
        (attend(), heads(3, 8, 8)), (attend(is_causal=True), heads(3, 7, 7)),
        (attend(is_causal=True, enable_gqa=True), heads(3, 8, 4)), (attend(enable_gqa=True, scale=0.3), heads(2, 7, 1)),
        (attend(), (*heads(3, 8, 8), truth(3, 1, 7, 7) | torch.eye(7, dtype=torch.bool))),
        (attend(), (*heads(3, 7, 7), real(7, 7, 7)))],
}

FACTORIES: dict[str, list[Case]] = {
    "arange": [(lambda x: x + torch.arange(7), (X,)), (lambda x: x * torch.arange(8)[:, None], (X,))],
    "empty": [(lambda x: x + aten.fill.Scalar(torch.empty(8, 7, dtype=x.dtype), 2.5), (X,))],
    "eye": [(lambda x: x @ torch.eye(7, dtype=x.dtype), (X,))],
    "full": [(lambda x: x * torch.full((8, 1), 2.5, dtype=x.dtype), (X,))],
    "linspace": [(lambda x: x * torch.linspace(0, 1, 7, dtype=x.dtype), (X,))],
    "ones": [(lambda x: x + torch.ones(7, dtype=x.dtype), (X,))],
    "scalar_tensor": [(lambda x: torch.where(x > 0, x, aten.scalar_tensor.default(2.0, dtype=x.dtype)), (X,))],
    "zeros": [(lambda x: torch.cat([x, torch.zeros(8, 2, dtype=x.dtype)], 1), (X,))],
}

INDEXING: dict[str, list[Case]] = {
    "bucketize": [(torch.bucketize, (X, torch.linspace(-1, 1, 6, dtype=torch.float64))), (bound(torch.bucketize, right=True), (N, torch.arange(1, 8, 2)))],
    "searchsorted": [(torch.searchsorted, (torch.linspace(-1, 1, 6, dtype=torch.float64), X)), (lambda s, x: torch.searchsorted(s.sort(-1)[0], x), (real(8, 5), X)),
                     (lambda s, x: torch.searchsorted(s, x, sorter=s.argsort(-1), side="right"), (real(8, 5), X)), (bound(call("searchsorted", "Scalar"), 0.1), (torch.linspace(-1, 1, 6).double(),))],
    "embedding": [(lambda w, ids: F.embedding(ids, w), (real(7, 5), IDS)), (lambda w, ids: F.embedding(ids, w), (real(8, 7), IDS)),
                  (lambda w, ids: F.embedding(ids, w, padding_idx=2), (real(8, 7), IDS))],
    "gather": [(lambda x, i: x.gather(-1, i), (X, whole(7, 8, 3))), (lambda x, i: x.gather(0, i), (X, whole(8, 5, 7))),
               (lambda x, i: x.gather(1, i), (X, whole(7, 6, 7)))],
    "index": [(lambda x, i: x[i], (X, whole(8, 5))), (lambda x, i: x[:, i], (X, whole(7, 5))), (lambda x, i, j: x[i, j], (X, whole(8, 5), whole(7, 5))),
              (lambda x, i, j: x[:, i, j], (real(3, 8, 7), whole(8, 5, 1), whole(7, 4))), (lambda x, i, j: x[i, :, j], (real(3, 8, 7), whole(3, 5), whole(7, 5)))],
    "index_put": [
        (lambda x, i, v: x.index_put([i], v), (X, torch.tensor([2, 0, 5]), real(3, 7))),
        (lambda x, i, v: aten.index_put.default(x, [None, i], v, True), (X, whole(7, 3), real(8, 1))),
        (lambda x, i, j, v: aten.index_put.default(x, [i, None, j], v), (X3, torch.tensor([2, 0]), torch.tensor([[3], [1]]), real(8))),
    ],
    "slice_scatter": [(lambda x, y: x.slice_scatter(y, 0, 2, 7, 2), (X, real(3, 7))), (lambda x, y: x.slice_scatter(y, -1, 1), (X, real(8, 6)))],
    "scatter": [(lambda x, i, v: x.scatter(1, i, v), (X, whole(7, 8, 1), real(8, 1))), (lambda x, i: x.scatter(0, i, 2.5), (X, whole(8, 1, 7)))],
    "scatter_add": [(lambda x, i, v: x.scatter_add(-1, i, v), (X, whole(7, 8, 3), real(8, 3))), (lambda x, i, v: x.scatter_add(0, i, v), (X, whole(8, 5, 4), real(5, 4)))],
    "index_select": [(lambda x, i: x.index_select(0, i), (X, whole(8, 7))), (lambda x, i: x.index_select(1, i), (X, whole(7, 3)))],
    "cross_entropy_loss": [
        (F.cross_entropy, (X, LABELS)), (bound(F.cross_entropy, reduction="sum"), (X, LABELS)),
        (bound(F.cross_entropy, reduction="none"), (X, LABELS)), (bound(F.cross_entropy, label_smoothing=0.1), (X, LABELS)),
        (lambda x, y: F.cross_entropy(x, y, torch.linspace(0.5, 1, 7, dtype=x.dtype)), (X, LABELS)), (bound(F.cross_entropy, ignore_index=3), (X, LABELS.clamp(min=0))),
        (F.cross_entropy, (real(3, 7, 8), IDS)), (F.cross_entropy, (X, unit(8, 7)))],
}

REDUCTIONS: dict[str, list[Case]] = {
    "all": [(call("all"), (A,)), *along(call("all", "dim"), A), (bound(call("all", "dims"), [0, 1]), (A,))],
    "amax": [*folded(torch.amax), *folded(torch.amax, TIED), *folded(torch.amax, N), *folded(torch.amax, -N)],
    "amin": [*folded(torch.amin), *folded(torch.amin, TIED), *folded(torch.amin, N)],
    "any": [(call("any"), (A,)), *along(call("any", "dim"), A), (bound(call("any", "dims"), [0, 1]), (A,))],
    "argmax": [*along(torch.argmax, X), (torch.argmax, (X,))],
    "argmin": [*along(torch.argmin, X, keepdim=True), (torch.argmin, (X,))],
    "count_nonzero": [(torch.count_nonzero, (TIED,)), (bound(torch.count_nonzero, [1]), (TIED,))],
    "layer_norm": [(bound(F.layer_norm, (7,)), (X3,)), (lambda x, w, b: F.layer_norm(x, (7,), w, b), (X3, real(7), real(7))),
                   (lambda x, w: F.layer_norm(x, (8, 7), w), (X3, X))],
    "linalg_vector_norm": [(torch.linalg.vector_norm, (X,)), *folded(
                           lambda x, d, keepdim: torch.linalg.vector_norm(x, 3, d, keepdim))],
    "histc": [(bound(torch.histc, 9, 0, 8), (N.flatten().double(),)), (bound(torch.histc, 3), (N.flatten().double(),))],
    "logsumexp": folded(torch.logsumexp),
    "max": [(torch.max, (X,)), (torch.max, (X, Y[0])), *along(torch.max, X)],
    "min": [(torch.min, (X,)), (torch.min, (X, Y[0])), *along(torch.min, X, keepdim=True)],
    "mean": [(torch.mean, (X,)), *folded(torch.mean)],
    "prod": [(torch.prod, (X,)), *along(torch.prod, X)],
    "rms_norm": [(bound(F.rms_norm, (7,)), (X3,)), (lambda x, w: F.rms_norm(x, (7,), w, 1e-6), (X3, real(7))),
                 (lambda x, w: F.rms_norm(x, (8, 7), w), (X3, X))],
    "std": [(torch.std, (X,)), *folded(torch.std)],
    "sum": [(torch.sum, (X,)), *folded(torch.sum), *folded(torch.sum, N), (bound(torch.sum, 1), (A,))],
    "var": [(torch.var, (X,)), *folded(torch.var, correction=0)],
    "var_mean": [(torch.var_mean, (X,)), *folded(torch.var_mean, correction=0)],
}

LINE, IMAGE, VOLUME = real(3, 4, 9), real(3, 4, 8, 7), real(2, 4, 6, 5, 4)


def convolved(transposed: bool = False, groups: int = 1, **options: Any) -> Callable[..., Tensor]:
    """Return a convolution with the dims of its weight."""
    return lambda x, w, *bias: getattr(F, f"conv{'_transpose' * transposed}{w.dim() - 2}d")(x, w, *bias, groups=groups, **options)


def with_places(pool: Callable[..., Any], size: int, x: Tensor) -> list[Case]:
    """Return cases of pooling that also returns the places of maxima."""
    return [(lambda x: pool(x, size, return_indices=True), (x,))]


def unpooled(pool: Callable[..., Any], unpool: Callable[..., Tensor], x: Tensor) -> list[Case]:
    """Return cases of unpooling maxima into their places."""
    places = pool(x, 2, return_indices=True)[1]
    return [(lambda y, i: unpool(y, i, 2, output_size=x.shape[2:]), (unit(*places.shape), places))]


def resized(modes: str, x: Tensor, **options: Any) -> list[Case]:
    """Return cases of an image scaled by a factor, and to a size."""
    return [(bound(F.interpolate, mode=mode, **how, **options), (x,)) for mode in modes.split()
            for how in ({"scale_factor": 2.0}, {"size": [5, 6, 3][: x.dim() - 2]})]


def bordered(mode: str, x: Tensor) -> list[Case]:
    """Return cases of an image with a border around it."""
    return [(bound(F.pad, [1, 2, 0, 1, 2, 1][: 2 * (x.dim() - 2)], mode), (x,))]


SPATIAL: dict[str, list[Case]] = {
    "_adaptive_avg_pool2d": [(bound(F.adaptive_avg_pool2d, (3, 2)), (IMAGE,)), (bound(F.adaptive_avg_pool1d, 4), (LINE,))],
    "_adaptive_avg_pool3d": [(bound(F.adaptive_avg_pool3d, (3, 2, 3)), (VOLUME,))],
    "_upsample_bicubic2d_aa": resized("bicubic", IMAGE, antialias=True),
    "_upsample_bilinear2d_aa": resized("bilinear", IMAGE, antialias=True),
    "_upsample_nearest_exact1d": resized("nearest-exact", LINE),
    "_upsample_nearest_exact2d": resized("nearest-exact", IMAGE),
    "_upsample_nearest_exact3d": resized("nearest-exact", VOLUME),
    "adaptive_max_pool2d": with_places(F.adaptive_max_pool2d, 3, IMAGE),
    "adaptive_max_pool3d": with_places(F.adaptive_max_pool3d, 3, VOLUME),
    "avg_pool2d": [(bound(F.avg_pool2d, 3, 2, 1), (IMAGE,)), (bound(F.avg_pool1d, 2), (LINE,)), (bound(F.lp_pool2d, 2, 2), (unit(*IMAGE.shape),)),
                   (bound(F.avg_pool2d, 2), (IMAGE[0],))],
    "avg_pool3d": [(bound(F.avg_pool3d, 2, 1), (VOLUME,)), (bound(F.local_response_norm, 3), (IMAGE,))],
    "col2im": [(bound(F.fold, (4, 5), 2), (real(3, 12, 12),)), (bound(F.fold, (4, 5), 2), (real(8, 12),))],
    "constant_pad_nd": [(bound(F.pad, (1, 2)), (X,)), (bound(F.pad, (0, 0, -1, 2), value=1.5), (X,)), *bordered("constant", IMAGE)],
    "convolution": [
        (convolved(padding="same", dilation=2), (LINE, real(5, 4, 3), real(5))), (convolved(stride=2, padding=1), (IMAGE, real(6, 4, 3, 3))),
        (convolved(padding="valid"), (VOLUME, real(3, 4, 2, 3, 2), real(3))), (convolved(), (IMAGE[0], real(6, 4, 3, 3))),
        (convolved(groups=2), (IMAGE, real(6, 2, 3, 3), real(6))), (convolved(groups=4), (IMAGE, real(4, 1, 3, 3), real(4))),
        (convolved(groups=4, padding="same"), (IMAGE, real(8, 1, 3, 3))),
        (convolved(True, stride=2, output_padding=1), (LINE, real(4, 5, 3), real(5))), (convolved(True, 2, stride=2), (IMAGE, real(4, 3, 2, 2), real(6))),
        (convolved(True), (VOLUME, real(4, 3, 2, 2, 2)))],
    "grid_sampler_2d": [(bound(F.grid_sample, align_corners=False), (IMAGE, unit(3, 5, 2, 2))),
                        (bound(F.grid_sample, padding_mode="border", align_corners=True), (IMAGE, real(3, 2, 4, 2)))],
    "grid_sampler_3d": [(bound(F.grid_sample, align_corners=False), (VOLUME, unit(2, 3, 2, 4, 3)))],
    "group_norm": [(bound(F.group_norm, 2), (IMAGE,)), (lambda x, w, b: F.group_norm(x, 3, w, b), (real(5, 6, 4), real(6), real(6))),
                   (lambda x, w: F.group_norm(x, 7, w), (X[:, :, None], real(7))), (bound(F.group_norm, 2, eps=0.0), (IMAGE,))],
    "im2col": [(bound(F.unfold, 3, padding=1), (IMAGE,)), (bound(F.unfold, 2, stride=2), (IMAGE[0],))],
    "max_pool2d_with_indices": [*with_places(F.max_pool2d, 2, IMAGE), *with_places(F.max_pool1d, 3, LINE), (bound(F.max_pool2d, 3, 1, 1), (IMAGE,))],
    "max_pool3d_with_indices": with_places(F.max_pool3d, 2, VOLUME),
    "max_unpool2d": unpooled(F.max_pool2d, F.max_unpool2d, IMAGE),
    "max_unpool3d": unpooled(F.max_pool3d, F.max_unpool3d, VOLUME),
    "reflection_pad1d": bordered("reflect", LINE),
    "reflection_pad2d": bordered("reflect", IMAGE),
    "reflection_pad3d": bordered("reflect", VOLUME),
    "replication_pad1d": bordered("replicate", LINE),
    "replication_pad2d": bordered("replicate", IMAGE),
    "replication_pad3d": bordered("replicate", VOLUME),
    "unfold": [(bound(call("unfold"), 1, 3, 2), (IMAGE,)), (bound(call("unfold"), -1, 2, 1), (X,))],
    "upsample_bicubic2d": resized("bicubic", IMAGE),
    "upsample_bilinear2d": resized("bilinear", IMAGE, align_corners=True),
    "upsample_linear1d": resized("linear", LINE),
    "upsample_nearest1d": resized("nearest", LINE),
    "upsample_nearest2d": resized("nearest", IMAGE),
    "upsample_nearest3d": resized("nearest", VOLUME),
    "upsample_trilinear3d": resized("trilinear", VOLUME),
}

VIEWS: dict[str, list[Case]] = {
    "_log_softmax": along(call("_log_softmax"), X, half_to_float=False),
    "_softmax": along(call("_softmax"), X, half_to_float=False),
    "_unsafe_view": [(bound(call("_unsafe_view"), [4, 2, 7]), (X,))],
    "_fft_c2c": [(lambda x: torch.fft.fft2(torch.view_as_complex(x)).abs(), (real(3, 8, 7, 2),))],
    "_fft_c2r": [(lambda x: torch.fft.irfft(torch.view_as_complex(x), n=9), (real(3, 8, 2),)), (lambda x, w: torch.fft.irfft2(torch.fft.rfft2(x) * torch.view_as_complex(w), s=(8, 7)), (X3, real(8, 4, 2)))],
    "_fft_r2c": [(lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1)), (X3,)), (lambda x: torch.view_as_real(torch.fft.rfft(x, n=9, norm="ortho")), (X,))],
    "diagonal": [(bound(torch.diagonal, 0, 1, 2), (X3,)), (bound(torch.diagonal, 1, 0, -1), (X3,)), (torch.diagonal, (X,)), (torch.trace, (X,))],
    "cat": [(lambda *x: torch.cat(x, 0), (X, real(3, 7))), (lambda *x: torch.cat(x, -1), (X, Y, real(8, 1)))],
    "cummax": along(torch.cummax, X),
    "cummin": along(torch.cummin, X),
    "kthvalue": [(bound(torch.kthvalue, 2, 0), (X,)), (bound(torch.kthvalue, 3, -1, True), (X,))],
    "median": [(bound(torch.median, 0, True), (X,))],
    "cumprod": along(torch.cumprod, X),
    "cumsum": [*along(torch.cumsum, X), *along(torch.cumsum, N)],
    "view_as_complex": [(lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(x)), (real(8, 7, 2),))],
    "view_as_real": [(lambda x: torch.view_as_real(torch.view_as_complex(x)).sin(), (real(7, 2),))],
    "polar": [(lambda a, b: torch.view_as_real(torch.polar(a, b)), (real(8, 7), real(7)))],
    "complex": [(lambda a, b: torch.view_as_real(torch.complex(a, b)), (real(8, 7), real(8, 7)))],
    "_conj": [(lambda a, b: torch.view_as_real(torch.complex(a, b).conj() * torch.complex(b, a)), (real(8, 7), real(8, 7)))],
    "expand": [(lambda x: x.expand(3, 8, 7), (X,)), (lambda x: x.expand(8, 7, 5), (real(8, 7, 1),)), (lambda x: x.expand(-1, 8), (real(7, 1),))],
    "flatten": [(torch.flatten, (X3,)), (bound(torch.flatten, 0, 1), (X3,)), (bound(torch.flatten, 1, 2), (X3,))],
    "flip": [(bound(torch.flip, [0]), (X,)), (bound(torch.flip, [0, -1]), (X,))],
    "log_softmax": along(torch.log_softmax, X),
    "logcumsumexp": along(torch.logcumsumexp, X),
    "mT": [(call("mT"), (X3,))],
    "moveaxis": [(bound(torch.moveaxis, 0, 2), (X3,))],
    "movedim": [(bound(torch.movedim, (0, 1), (1, 2)), (X3,))],
    "numpy_T": [(call("numpy_T"), (X,))],
    "permute": [(bound(torch.permute, (2, 0, 1)), (X3,))],
    "reshape": [(bound(torch.reshape, (24, 7)), (X3,)), (bound(torch.reshape, (3, 4, 14)), (X3,)), (bound(torch.reshape, (8, 21)), (X3,)),
                (bound(torch.reshape, (5, 3, 2)), (real(6, 5),))],
    "roll": [(bound(torch.roll, 2, 0), (X,)), (bound(torch.roll, (1, -3), (0, 1)), (X,)), (bound(torch.roll, 3), (X,))],
    "select": [(bound(torch.select, 0, 3), (X,)), (bound(torch.select, 1, -1), (X,))],
    "slice": [(lambda x: x[2:7], (X,)), (lambda x: x[:, ::2], (X,)), (lambda x: aten.slice.Tensor(x, 1, 0, 99), (X,)), (lambda x: aten.slice.Tensor(x, 0, 0, 8), (X,))],
    "softmax": along(torch.softmax, X),
    "sort": [*along(torch.sort, X), (lambda x: torch.sort(x, stable=True, dim=0, descending=True), (TIED,))],
    "split": [(bound(torch.split, 3, 0), (X,)), (bound(torch.split, 7, 1), (X,))],
    "split_with_sizes": [(bound(call("split_with_sizes"), [3, 4], 1), (X,))],
    "squeeze": [(torch.squeeze, (real(1, 8, 1, 7),)), (bound(torch.squeeze, 0), (real(1, 8, 7),)), (bound(torch.squeeze, (0, 2)), (real(1, 8, 1),))],
    "stack": [(lambda *x: torch.stack(x), (X, Y)), (lambda *x: torch.stack(x, -1), (X, Y, X))],
    "swapaxes": [(bound(torch.swapaxes, 0, 2), (X3,))],
    "t": [(torch.t, (X,)), (torch.t, (real(7),))],
    "topk": [(bound(torch.topk, 3), (X,)), (bound(torch.topk, 2, 0), (X,))],
    "transpose": [(bound(torch.transpose, 0, 2), (X3,)), (bound(torch.transpose, -1, 1), (X3,))],
    "unbind": [(torch.unbind, (X,)), (bound(torch.unbind, -1), (X,))],
    "unflatten": [(bound(torch.unflatten, 0, (2, -1)), (X,)), (bound(torch.unflatten, 1, (2, 5)), (real(7, 10),))],
    "unsqueeze": [(bound(torch.unsqueeze, 1), (X,))],
    "view": [(lambda x: x.view(6, 4, 7), (X3,)), (lambda x: x.view(-1), (X3,))],
}



def over_time(op: Callable[..., Any], gates: int, states: int, rows_first: bool = False) -> list[Case]:
    """Return a one-layer recurrent network over 2 steps of 7 sequences of 2 features, states given, without biases."""

    def run(x: Tensor, *rest: Tensor) -> Any:
        state = rest[:states] if states > 1 else rest[0]
        return op(x, state, rest[states:], False, 1, 0.0, True, False, rows_first)

    x = real(7, 2, 2) if rows_first else real(2, 7, 2)
    return [(run, (x, *(real(1, 7, 3) for _ in range(states)), real(3 * gates, 2), real(3 * gates, 3)))]


RECURRENT: dict[str, list[Case]] = {
    "gru": over_time(torch.gru, 3, 1),
    "lstm": over_time(torch.lstm, 4, 2, rows_first=True),
    "rnn_relu": over_time(torch.rnn_relu, 1, 1),
    "rnn_tanh": over_time(torch.rnn_tanh, 1, 1),
}

def linear(*options: str) -> Case:
    """Return linear attention of 2 rows, 7 tokens, 4 heads and states of 3 x 2; `options` are further operands."""
    documents = torch.tensor([1, 0, 0, 1, 0, 1, 0]) > 0
    decay = -unit(2, 7, 4, 3) if "by row" in options else -unit(2, 7, 4)
    beta, starts = (unit(2, 7, 4),) if "beta" in options else (), (documents.expand(2, 7),) if "starts" in options else ()

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *rest: Tensor) -> Tensor:
        return linear_attention(q, k, v, decay, rest[0] if beta else None, rest[-1] if starts else None)

    return run, (real(2, 7, 4, 3), real(2, 7, 4, 3), real(2, 7, 4, 2), decay, *beta, *starts)


STARTS = torch.tensor([[1, 0, 0, 1, 1, 0, 0]]) > 0
SEQUENCES: dict[str, list[Case]] = {
    "ct::linear_attention": [linear(), linear("beta", "starts"), linear("by row", "beta"), linear("starts")],
    "ct::causal_conv1d": [
        (lambda x, w: causal_conv1d(x, w, None, None), (real(2, 3, 7), real(3, 4))),
        (lambda x, w, b, s: causal_conv1d(x, w, b, s), (real(1, 3, 7), real(3, 3), real(3), STARTS)),
        (lambda x, w, s: causal_conv1d(x, w, None, s), (real(1, 2, 7), real(2, 1), STARTS)),
    ],
}

CASES: dict[str, list[Case]] = {**POINTWISE, **CONTRACTIONS, **FACTORIES, **INDEXING, **RECURRENT, **REDUCTIONS, **SEQUENCES,
                               **SPATIAL, **VIEWS}
