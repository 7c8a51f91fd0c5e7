"""Operators that make a tensor from nothing: the same on every rank, cut where a share of it is met."""

from __future__ import annotations

from passes.rules.base import RuleMaker, opaque


def rules() -> dict[str, RuleMaker]:
    """Operator name -> rule, for factories."""
    return dict.fromkeys("arange full zeros ones empty scalar_tensor eye linspace".split(), opaque)
