"""The update of one parameter: its moments are read, and they and the parameter change in place."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.layout import is_entry
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec
from passes.sharding.random import global_index, uniform_at
from passes.update.appender import Appender
from passes.update.groups import Group
from passes.update.moments import Codec, Format, codec
from passes.update.optimizers import arithmetic, cast, keeps_zeros, real, to_stored_dtype

Added = list[tuple[fx.Node, ir.Input]]  # inputs that an update needs


class Storage(NamedTuple):
    """The storage of state: moments in the format `state`, None for the parameter's dtype.

    Formats of eight bits have a scale per `block`. `stochastic`: updated bf16 parameters are rounded at random.
    """

    state: Format | None = None
    block: int = 256
    stochastic: bool = False


def round_at_random(x: Tensor, step: Tensor, site: int, index: Tensor) -> Tensor:
    """Round f32 to bf16 at random, keeping the mean (as torchao.optim's `bf16_stochastic_round`); NaN stays NaN."""
    draw = (uniform_at(index, step.to(torch.int64), site) * 2**16).to(torch.int32)
    bits = (x.view(torch.int32) + draw) & -(2**16)
    rounded = bits.view(torch.float32).to(torch.bfloat16)
    return torch.where(x.isnan(), x.to(torch.bfloat16), rounded)  # the bits of a NaN might carry over to -0


@dataclass(frozen=True)
class Update:
    """The update of one parameter."""

    storage: Storage
    group: Group
    mesh: Mesh
    input: ir.Input
    dtype: torch.dtype

    @property
    def site(self) -> int:
        """The number that tells its random draws from those of others, whichever program updates it."""
        return zlib.crc32(self.input.name.encode())

    @property
    def spec(self) -> Spec:
        """The placement of parameter and moments."""
        return replace(self.input.spec, replicate=())

    @property
    def codecs(self) -> list[Codec]:
        """The storage of each moment."""
        state, block, _ = self.storage
        kinds = self.group.optimizer.moments
        return [codec(state, m.signed, block, self.dtype, self.spec, self.mesh) for m in kinds]

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return arithmetic(self.dtype)

    def append(
        self,
        append: Appender,
        parameter: fx.Node,
        gradient: fx.Node,
        shared: Sequence[fx.Node],
        step: fx.Node,
        coordinates: Mapping[str, fx.Node],
    ) -> Added:
        """Change the parameter and its moments, entry by entry; `shared` are the gradients' factor and scalars."""

        def update(p: Tensor, g: Tensor, factor: Tensor, *values: Tensor, moments: Sequence[Tensor]) -> Any:
            scalars, placed = values[: len(shared) - 1], values[len(shared) - 1 :]
            g = real(g, self.wide) * factor
            new, moments = self.group.optimizer.update(real(p, self.wide), g, tuple(moments), scalars)
            if self.fills:
                new, *moments = (self.fill(x, placed) for x in (new, *moments))
            return self.round(new, placed), moments

        inputs = (parameter, gradient, *shared, *self.place_operands(step, coordinates))
        new, added = self.advance(append, "update", update, inputs, parameter)
        append.keep(parameter, new)
        return added

    def advance(
        self, append: Appender, name: str, fn: Callable[..., Any], inputs: Sequence[fx.Node], parameter: fx.Node
    ) -> tuple[fx.Node, Added]:
        """Return the value of `fn(*inputs, moments=...)` and write the new moments, which it returns too."""
        codecs = self.codecs
        moment_inputs = [
            self.inputs(append, m.name, c, parameter) for m, c in zip(self.group.optimizer.moments, codecs)
        ]
        nodes = [node for parts in moment_inputs for node, _ in parts]

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            state = iter(values[len(inputs) :])
            moments = [
                real(c.decode([next(state) for _ in parts]), self.wide) for c, parts in zip(codecs, moment_inputs)
            ]
            value, new = fn(*values[: len(inputs)], moments=moments)
            return value, *(part for c, m in zip(codecs, new) for part in c.encode(m))

        key = (name, self.group.optimizer, self.dtype, tuple(codecs), *self.identity())
        value, *state = append.trace(run, *inputs, *nodes, key=key)
        for node, new in zip(nodes, state, strict=True):
            append.keep(node, new)
        return value, [pair for parts in moment_inputs for pair in parts]

    @property
    def at_random(self) -> bool:
        """True if the parameter is rounded at random."""
        return self.storage.stochastic and self.dtype == torch.bfloat16

    @property
    def fills(self) -> bool:
        """True if zeros are written to padding, which the optimizer may change."""
        return self.spec.padded(self.mesh) and not keeps_zeros(self.group.optimizer, self.wide)

    def identity(self) -> tuple[Any, ...]:
        """Return the facts on which a function depends if it rounds at random, or knows padding."""
        return (self.site, self.spec) if self.at_random else (self.spec,) if self.fills else ()

    def place_operands(self, step: fx.Node, coordinates: Mapping[str, fx.Node]) -> tuple[fx.Node, ...]:
        """Return the operands of random rounding and padding: the rank's coordinates and the step."""
        axes = [axis for axis in self.mesh.names if axis in self.spec.sharded]
        return (*(coordinates[axis] for axis in axes), step) if self.at_random or self.fills else ()

    def places(self, operands: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the coordinates among the values of `place_operands`, by axis."""
        return dict(zip([axis for axis in self.mesh.names if axis in self.spec.sharded], operands))

    def fill(self, x: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Return a result of `real` with padding set to 0, by the values of `place_operands`."""
        mask = is_entry(self.spec, self.mesh, self.places(operands), x.device)
        return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), x, 0)

    def round(self, new: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Return the parameter in its own dtype, rounded with the values of `place_operands`."""
        if not self.at_random:
            return to_stored_dtype(new, self.dtype)
        index = global_index(self.spec, self.mesh, self.places(operands), new.device)
        return cast(round_at_random(new, operands[-1], self.site, index), self.dtype)

    def inputs(self, append: Appender, moment: str, storage: Codec, parameter: fx.Node) -> Added:
        """Insert the inputs that store one moment."""
        added = []
        for suffix, shape, dtype, spec in storage.parts(self.spec, self.mesh):
            val = ir.example(parameter).new_empty(shape, dtype=dtype)
            node = append.placeholder(f"{moment}{suffix.replace('.', '_')}_{parameter.name}", val, spec)
            name = f"{moment}{suffix}.{self.input.name}"
            added.append((node, ir.Input(name, "moment", spec, layer=self.input.layer)))
        return added
