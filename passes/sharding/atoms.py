"""Refine a rule's factors until every shard of an operand consists of whole factors (atoms).

A rule of `[b, t*d]` knows two factors in its second dim, 6 and 8. If an operand splits these 48 entries into 3 shards
of 16, the factor `t` is cut in two: its atoms are 3, which `tp` shards, and 2.

    >>> rule = Rule(((("b",), ("t", "d")),), ((("b",), ("t",), ("d",)),), {"b": 4, "t": 6, "d": 8})
    >>> atoms = refine(rule, [((Factor(4),), (Factor(3, ("tp",)), Factor(16)))], [0], Mesh.of({"tp": 3}))
    >>> atoms.operands[0], atoms.sizes
    ((('b',), ('t.#0', 't.#1', 'd')), {'b': 4, 't.#0': 3, 't.#1': 2, 'd': 8})
    >>> print(*atoms.factors[0][1])
    3@tp 2 8

If there are no common factors, as for 6 x 4 and 4 x 6, the operand is gathered first.

    >>> common_sizes([4, 6], [8, 3]), common_sizes([4, 6], [6, 4])
    ([4, 2, 3], None)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.ir.mesh import Mesh
from passes.ir.order import PLAIN, Order
from passes.ir.spec import Dim, Factor
from passes.rules.base import Names, Rule

Cuts = dict[str, int]  # mesh axis -> dim of a value that it shards


def boundaries(sizes: Iterable[int]) -> list[int]:
    """Return the products of the minor sizes at each cut: [4, 2, 3] -> [6, 3]."""
    cuts, product = [], 1
    for size in reversed(list(sizes)):
        product *= size
        cuts.append(product)
    return list(reversed(cuts))[1:]


def common_sizes(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """Return the coarsest sizes that refine both lists (of equal product); None if there are none or a size is 0."""
    if 0 in a:
        return None
    cuts = sorted({math.prod(a), *boundaries(a), *boundaries(b), 1}, reverse=True)
    if any(major % minor for major, minor in zip(cuts, cuts[1:])):
        return None
    return [major // minor for major, minor in zip(cuts, cuts[1:])]


def split_factor(factor: Factor, sizes: Sequence[int], mesh: Mesh) -> list[Factor] | None:
    """Split a factor into `sizes`, major to minor, with the same layout on every rank; None if this cuts a shard."""
    if len(sizes) == 1:
        return [factor]
    pieces, axes = [], list(factor.axes)
    for size in sizes:
        piece_axes, remaining = [], size
        while axes and remaining % factor.pieces(axes[0], mesh) == 0 and remaining > 1:
            remaining //= mesh[axes[0]]
            piece_axes.append(axes.pop(0))
        pieces.append(replace(factor, size=size, axes=tuple(piece_axes), label=""))
        if axes and remaining > 1:
            return None
    if axes:
        return None
    pieces[0] = replace(pieces[0], label=factor.label)
    return pieces


def split_dim(dim: Dim, sizes: Sequence[int], mesh: Mesh) -> tuple[Factor, ...] | None:
    """Split a dim into factors of the given sizes; None if this cuts a shard."""
    pieces: list[Factor] = []
    remaining = list(sizes)
    for factor in dim:
        factor_sizes, product = [], 1
        while product < factor.size:
            factor_sizes.append(remaining.pop(0))
            product *= factor_sizes[-1]
        split = split_factor(factor, factor_sizes, mesh) if factor_sizes else []
        if split is None:
            return None
        pieces += split
    return tuple(pieces)


def merge_dim(dim: Iterable[Factor], mesh: Mesh) -> Dim:
    """Join adjacent factors if the layout stays the same and no label is lost."""
    merged: list[Factor] = []
    for factor in dim:
        last = merged[-1] if merged else None
        if last and not factor.axes and not factor.label and not last.padded(mesh) and not last.label:
            merged[-1] = replace(last, size=last.size * factor.size)
        elif last and not last.axes and not last.label and last.size == 1:
            merged[-1] = factor
        elif factor.size > 1 or not merged:
            merged.append(factor)
    return tuple(merged)


@dataclass(frozen=True)
class Atoms:
    """A rule whose factors are refined so that every operand's shards consist of whole atoms.

    `operands[i][d]` and `results[i][d]` name the atoms of a dim. `factors[i][d]` are the operand's factors over these
    atoms; None if its shards cut an atom (it has to be gathered first).
    """

    rule: Rule
    operands: tuple[tuple[Names, ...], ...]
    results: tuple[tuple[Names, ...], ...]
    sizes: Mapping[str, int]
    factors: tuple[tuple[tuple[Factor, ...] | None, ...], ...]

    @property
    def order(self) -> Order:
        """The order of the chunks in the dims that `cp` shards."""
        flat = (f for dims in self.factors for factors in dims for f in factors or ())
        return next((f.order for f in flat if not f.order.is_plain), PLAIN)

    def origin(self, atom: str) -> str:
        """Return the rule's factor that contains the atom."""
        return atom.split(".#")[0]


def atom_of(atoms: Atoms, dim: int, axis: str) -> str | None:
    """Return the atom by which an axis can shard a dim of the first result, as an operand or a rank's share has it."""
    names = atoms.results[0][dim]
    if len(names) != 1 or not atoms.rule.may_shard(atoms.origin(names[0]), axis):
        return None
    is_read = any(names[0] in part for dims in atoms.operands for part in dims)
    return names[0] if is_read or atoms.rule.uniform else None


def place_by_rule(atoms: Atoms, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Return the axes of the atoms that the operator places itself (`Rule.place`)."""
    if atoms.rule.place is None:
        return {}
    pairs = zip(atoms.operands, atoms.factors)
    placements = [
        {n: f for names, fs in zip(dims, factors) for n, f in zip(names, fs or ())} for dims, factors in pairs
    ]
    axes = atoms.rule.place(placements, mesh)
    return {a: axes[key] for a in atoms.sizes for key in (atoms.origin(a), a) if key in axes}


def override_axes(
    axes: Mapping[str, tuple[str, ...]], placed: Mapping[str, tuple[str, ...]], mesh: Mesh
) -> dict[str, tuple[str, ...]]:
    """Return the axes of all atoms: `placed` takes precedence, and removes its axes from all other atoms."""
    placed_axes = {a for names in placed.values() for name in names for a in mesh.over(name)}
    others = {atom: tuple(x for x in names if placed_axes.isdisjoint(mesh.over(x))) for atom, names in axes.items()}
    return others | dict(placed)


def refine(rule: Rule, specs: Sequence[Sequence[Dim]], order: Sequence[int], mesh: Mesh) -> Atoms:
    """Split the rule's factors as the operands' specs do; if operands disagree, those earlier in `order` win."""
    parts: dict[str, list[int]] = {name: [size] for name, size in rule.sizes.items()}
    for i in order:
        for names, dim in zip(rule.operands[i], specs[i], strict=True):
            rule_sizes = [size for name in names for size in parts[name]]
            spec_sizes = [f.size for f in dim if f.size > 1]
            cut = common_sizes([s for s in rule_sizes if s > 1], spec_sizes) if rule_sizes and spec_sizes else None
            if cut is not None:
                _assign_sizes(parts, names, cut)
    atoms = {
        name: tuple(f"{name}.#{k}" for k in range(len(sizes))) if len(sizes) > 1 else (name,)
        for name, sizes in parts.items()
    }
    sizes = {atom: size for name in parts for atom, size in zip(atoms[name], parts[name])}

    def over(dims: Sequence[Names]) -> tuple[Names, ...]:
        return tuple(tuple(atom for name in names for atom in atoms[name]) for names in dims)

    operands = tuple(over(dims) for dims in rule.operands)
    factors = tuple(
        tuple(_factors_over(dim, names, sizes, mesh) for names, dim in zip(dims, spec, strict=True))
        for dims, spec in zip(operands, specs, strict=True)
    )
    return Atoms(rule, operands, tuple(over(dims) for dims in rule.results), sizes, factors)


def _assign_sizes(parts: dict[str, list[int]], names: Names, cut: list[int]) -> None:
    cut = list(cut)
    for name in names:
        total, pieces, product = math.prod(parts[name]), [], 1
        while product < total:
            pieces.append(cut.pop(0))
            product *= pieces[-1]
        parts[name] = pieces or [1]


def _factors_over(dim: Dim, names: Names, sizes: Mapping[str, int], mesh: Mesh) -> tuple[Factor, ...] | None:
    atom_sizes = [sizes[name] for name in names]
    if not atom_sizes:
        return ()
    trimmed = tuple(f for f in dim if f.size > 1) or dim[:1]
    if common_sizes([w for w in atom_sizes if w > 1], [f.size for f in trimmed if f.size > 1]) != [
        w for w in atom_sizes if w > 1
    ]:
        return None
    pieces = split_dim(trimmed, [w for w in atom_sizes if w > 1], mesh)
    if pieces is None:
        return None
    supply = iter(pieces)
    return tuple(next(supply) if w > 1 else Factor(1) for w in atom_sizes)
