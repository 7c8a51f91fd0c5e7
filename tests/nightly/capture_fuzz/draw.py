"""Random bodies of `forward`: a few lines of Python over values of one shape, with nested regions.

    v1 = torch.tanh(self.a(v0))
    with torch.no_grad():
        v2 = v1.float()
        self.seen.mul_(0.9).add_(v2.mean(0))
    v3 = self.b(v1) * v2

A body is a tree: a node is a line, or a header with the body indented below it. Lines may fail in eager PyTorch, for
example if autograd needs a value that was overwritten; the comparison skips such bodies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ARITHMETIC = (
    "{new} = torch.tanh(self.a({x}))",
    "{new} = self.b({x}) + {y}",
    "{new} = {x} * self.scale",
    "{new} = {x} + {y}",
    "{new} = {x} * {y}",
    "{new} = torch.relu({x})",
    "{new} = {x}.softmax(-1) + self.seen",
    "{new} = ({x} @ {y}.mT) @ {x} * 0.1",
    "{new} = torch.zeros_like({x})",
    "{new} = {x}.clone()",
    "{new} = torch.where({y} > 0, {x}, {y}.to({x}.dtype))",
)
UNCHANGED = (  # these often return the operand itself
    "{new} = {x}.float()",
    "{new} = {x}.to({y}.dtype)",
    "{new} = {x}.to('cpu')",
    "{new} = {x}.to({y})",
    "{new} = {x}.type_as({y})",
    "{new} = {x}.type({x}.dtype)",
    "{new} = {x}.contiguous()",
    "{new} = {x}.flatten(0, 0)",
    "{new} = {x}.expand_as({x})",
    "{new} = {x}.reshape({x}.shape)",
    "{new} = {x}.view_as({x})",
    "{new} = {x}.sum_to_size({x}.shape)",
    "{new} = {x}.resolve_conj()",
    "{new} = F.dropout({x}, 0.5, False)",
    "{new} = self.same({x})",
    "{new} = {x}",
    "{new} = {x}.bfloat16()",
    "{new} = {x}.to(self.scale.dtype)",
    "{new} = torch.atleast_2d({x})",
)
VIEWS = (
    "{new} = {x}.mT.mT",
    "{new} = {x}[:, :]",
    "{new} = {x}.unsqueeze(0)[0]",
    "{new} = {x}.view(-1).view({x}.shape)",
    "{new} = {x}.chunk(2)[0].repeat(2, 1)",
    "{new} = torch.cat({x}.split(2), 0)",
    "{new} = {x}.detach()",
    "{new} = {x}.data.clone()",
    "{new} = {x}.detach().clone()",
    "{new} = {x}.detach().requires_grad_()",
)
WRITES = (
    "{x}.mul_(0.5)",
    "{x}.add_({y})",
    "{x}.copy_({y})",
    "{x}[:, 1] = {y}[:, 0]",
    "{x}[:, 1:].mul_(2)",
    "{x}.view(-1)[2:7].add_(0.5)",
    "{x}.clamp_(-0.5, 0.5)",
    "{x}.masked_fill_({y} > 0.3, 0.25)",
    "{x}[{y} > 0.3] = 0.1",
    "{x}.detach().mul_(0.5)",
    "{new} = with_data({x}.clone(), {y})",
    "{new} = with_halved_data({x}.clone())",
    "{x} *= 0.7",
    "{new} = {x}.mul_(1.5)",
    "self.seen.mul_(0.9).add_({x}.mean(0))",
    "self.seen.copy_({x}.detach().abs().mean(0))",
    "self.seen.data.mul_(0.9).add_({x}.mean(0))",
)
CALLS = (
    "{new} = Doubled.apply({x})",
    "{new} = Product.apply({x}, self.scale)",
    "{new} = Swish.apply({x})",
    "{new} = Matmul.apply({x}, self.a.weight)",
    "{new} = Halved.apply({x})",
    "{new} = self.quietly({x})",
    # Operands are copies, because eager PyTorch recomputes from their later entries; a reentrant checkpoint needs a gradient.
    "{new} = checkpoint(lambda v: torch.tanh(self.b(v)), {x} * self.scale, use_reentrant={flag})",
    "{new} = checkpoint(lambda v, w: v.float() * w.detach(), {x}.clone(), {y}.clone(), use_reentrant=False)",
    "{new} = checkpoint(self.quietly, {x}.clone(), use_reentrant=False) + {y}",
)
HOOKS = (
    "{x}.register_hook(lambda gradient: gradient * 2)",
    "torch.autograd.graph.register_multi_grad_hook([{x}], lambda gradients: None)",
)
REGIONS = (
    "with torch.no_grad():",
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.inference_mode():",
    "with torch.set_grad_enabled({flag}):",
    "with torch.autocast('cpu', torch.bfloat16):",
    "with torch.autocast('cpu', enabled=False):",
)
SWITCHES = ("torch.set_grad_enabled({flag})",)  # regions that last until the next one begins
KINDS = (
    (ARITHMETIC, 8), (UNCHANGED, 6), (VIEWS, 4), (WRITES, 5), (CALLS, 3), (HOOKS, 0.1), (SWITCHES, 0.4), (REGIONS, 5)
)  # fmt: skip
DEEPEST = 3


@dataclass(frozen=True)
class Line:
    """A statement, or the header of a region with its lines."""

    text: str
    inside: tuple[Line, ...] = ()

    def shown(self, indent: str) -> str:
        """Return the source with an indent."""
        return "\n".join([indent + self.text, *(line.shown(indent + "    ") for line in self.inside)])


@dataclass(frozen=True)
class Case:
    """A body of `forward`, and the dtype of its model."""

    number: str
    dtype: str
    body: tuple[Line, ...]

    def source(self) -> str:
        """Return the source of the function `forward(self, v0)`."""
        lines = "\n".join(line.shown("    ") for line in self.body)
        return f"def forward(self, v0):\n{lines}\n    return {ends(self.body)}\n"


def ends(body: Sequence[Line]) -> str:
    """Return the expression that sums the last values of a body."""
    names = sorted({f"v{i}" for line in body for i in assigned(line)} | {"v0"}, key=lambda name: int(name[1:]))
    return " + ".join(f"{name}.float()" for name in names[-4:])


def assigned(line: Line) -> list[int]:
    """Return the numbers of the values that a line assigns."""
    first = line.text.split(" = ")[0]
    numbers = [int(first[1:])] if first[0] == "v" and first[1:].isdigit() else []
    return numbers + [i for inner in line.inside for i in assigned(inner)]


def case(seed: int, number: int) -> Case:
    """Draw the case of a number."""
    draw = random.Random(f"{seed} {number}")
    lines = Drawing(draw).lines(draw.randint(4, 10))
    return Case(f"{seed}:{number}", draw.choice(("float32", "bfloat16")), lines)


class Drawing:
    """The state of a drawing: the random source and the number of values assigned so far."""

    def __init__(self, draw: random.Random):
        self.draw, self.count = draw, 0

    def lines(self, count: int, around: tuple[str, ...] = ()) -> tuple[Line, ...]:
        """Draw `count` statements inside the regions `around`; a region counts as one."""
        return tuple(self.line(around) for _ in range(count))

    def line(self, around: tuple[str, ...]) -> Line:
        """Draw a statement; no custom-function call inside `inference_mode`, whose `enable_grad` affects only them."""
        left_out = [REGIONS] * (len(around) == DEEPEST) + [CALLS] * ("with torch.inference_mode():" in around)
        kinds = [(texts, weight) for texts, weight in KINDS if texts not in left_out]
        texts = self.draw.choices([texts for texts, _ in kinds], [weight for _, weight in kinds])[0]
        text = self.draw.choice(texts)
        x, y = (self.draw.randint(max(0, self.count - 4), self.count) for _ in range(2))
        flag = self.draw.random() < 0.5
        if texts is REGIONS:
            return Line(text.format(flag=flag), self.lines(self.draw.randint(1, 4), (*around, text)))
        if "{new}" in text:
            self.count += 1
        return Line(text.format(new=f"v{self.count}", x=f"v{x}", y=f"v{y}", flag=flag))
