"""Operators that create tensors: computed in full on every rank, and cut where a shard is needed."""

from __future__ import annotations

from passes.rules.base import RuleMaker, opaque


def rules() -> dict[str, RuleMaker]:
    """Return operator name -> rule, for factories."""
    return dict.fromkeys("arange full zeros ones empty scalar_tensor eye linspace".split(), opaque)
