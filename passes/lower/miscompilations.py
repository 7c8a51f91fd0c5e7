"""Known miscompilations of PyTorch's compiler that our programs can meet, and the options that avoid them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from passes.torch_private import VERSION

Version = tuple[int, ...]  # major and minor number


class Miscompilation(NamedTuple):
    """A defect of Inductor in the PyTorch versions from `first` up to, not including, `fixed` (None: not fixed yet).

    `options` are Inductor's options that avoid it.
    """

    problem: str
    link: str
    first: Version
    fixed: Version | None
    options: dict[str, bool]

    def affects(self, version: Version) -> bool:
        """Return True if a PyTorch version has the defect."""
        return self.first <= version and (self.fixed is None or version < self.fixed)


KNOWN = (
    Miscompilation(
        "a reduction that is stored into a view of a concatenation, as gradients into a bucket, is left out on GPUs",
        "https://github.com/pytorch/pytorch/issues/193061",
        (2, 10),
        (2, 14),
        {"triton.mix_order_reduction": False},
    ),
)


def workaround_options(version: Version = VERSION, known: Iterable[Miscompilation] = KNOWN) -> dict[str, bool]:
    """Return Inductor's options that avoid the miscompilations of a PyTorch version."""
    return {name: value for defect in known if defect.affects(version) for name, value in defect.options.items()}
