"""The inverse short-time Fourier transform in operators that do not read values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Do `torch.istft` without its check that windows cover all samples; uncovered samples become NaN."""
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    real = input.new_empty(0).real.dtype
    shape = torch.ones(width, dtype=real, device=input.device) if window is None else window
    shape = F.pad(shape, ((n_fft - width) // 2, n_fft - width - (n_fft - width) // 2))
    spectra = input.movedim(-2, -1)  # [..., frames, frequencies]
    frames, norm = spectra.shape[-2], "ortho" if normalized else "backward"
    inverse = torch.fft.ifft if return_complex else torch.fft.irfft  # irfft takes only half of the frequencies
    samples = inverse(spectra, n_fft, norm=norm)
    start, total = n_fft // 2 if center else 0, n_fft + hop * (frames - 1)
    end = total - start if length is None else start + length
    overlapped_sum = overlap_add(samples * shape, hop)[..., start:end]
    weight = overlap_add((shape * shape.conj()).expand(frames, n_fft), hop)[start:end]
    return F.pad(overlapped_sum / weight, (0, max(end - total, 0)))


def overlap_add(frames: Tensor, hop: int) -> Tensor:
    """Return the sum of frames [..., t, n] at distances of `hop` samples: [..., n + hop (t - 1)]."""
    count, width = frames.shape[-2:]
    parts = -(-width // hop)
    pieces = F.pad(frames, (0, parts * hop - width)).unflatten(-1, (parts, hop))
    shifted = (F.pad(pieces[..., k, :], (0, 0, k, parts - 1 - k)) for k in range(parts))
    return sum(shifted, torch.zeros((), dtype=frames.dtype)).flatten(-2)[..., : width + hop * (count - 1)]
