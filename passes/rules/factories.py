"""Operators that create tensors: a rank creates its share of equal entries; others are whole, and cut where needed."""

from __future__ import annotations

from torch import fx

from passes.ir.operators import name_of
from passes.rules.base import Rule, RuleMaker, numbered, of_dims, opaque, result_shapes

VALUES = {"zeros": 0.0, "ones": 1.0, "empty": None}


def uniform(node: fx.Node) -> Rule:
    """Make the rule of a tensor of equal entries, of which each rank creates its share."""
    (shape,), name = result_shapes(node), name_of(node)
    fill = VALUES.get(name, node.args[1] if name == "full" else None)
    value = None if fill is None or isinstance(fill, complex) else float(fill)  # type: ignore[arg-type]
    return of_dims(
        node,
        [],
        [numbered(shape)],
        resize=lambda args, local: (list(local), *args[1:]),
        pad_out=lambda fills: value,
        uniform=True,
    )


RULES: dict[str, RuleMaker] = {
    **dict.fromkeys("full zeros ones empty".split(), uniform),
    **dict.fromkeys("arange scalar_tensor eye linspace".split(), opaque),
}
