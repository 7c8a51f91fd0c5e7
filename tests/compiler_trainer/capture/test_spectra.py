"""The inverse short-time Fourier transform equals PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from compiler_trainer.capture.spectra import istft

CASES = [
    {"n_fft": 8},
    {"n_fft": 9, "hop_length": 4, "normalized": True},
    {"n_fft": 8, "win_length": 6, "hop_length": 3, "length": 17},
    {"n_fft": 8, "hop_length": 2, "length": 40},
    {"n_fft": 8, "hop_length": 2, "onesided": False},
    {"n_fft": 8, "hop_length": 2, "center": False},
    {"n_fft": 8, "hop_length": 2, "onesided": False, "return_complex": True},
]


@pytest.mark.filterwarnings("ignore:The length of signal")
@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_it_is_that_of_pytorch(how, lead):
    generator = torch.Generator().manual_seed(0)
    bins = how["n_fft"] if how.get("onesided") is False else how["n_fft"] // 2 + 1
    spectra = torch.randn(*lead, bins, 11, dtype=torch.complex128, generator=generator)
    window = torch.hann_window(how.get("win_length", how["n_fft"]), dtype=torch.float64) + 0.1
    torch.testing.assert_close(istft(spectra, window=window, **how), torch.istft(spectra, window=window, **how))
