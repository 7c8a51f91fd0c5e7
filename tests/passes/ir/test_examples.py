"""Examples in module docstrings match the code."""

import doctest
import importlib
import re
from dataclasses import replace

import pytest
import torch
from small_programs import Small
from torch import nn

from compiler_trainer.capture.capture import capture
from passes.ir.mesh import Mesh
from passes.ir.printer import print_program
from passes.ir.spec import Factor, Spec
from passes.ops.reshard import RESHARD_OPS
from passes.sharding import convert, partition, propagate
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard


@pytest.mark.parametrize("name", ["passes.ir.mesh", "passes.ir.spec", "passes.sharding.atoms"])
def test_sessions_print_what_they_say(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 2 and not failed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def local_text(**mesh: int) -> str:
    """Return the net's local program on a mesh as text."""
    program, ctx = capture(Net(), lambda net, batch: net(batch["x"]).square().sum(), {"x": torch.ones(3, 4)}, torch.device("cpu"))
    program = replace(program, mesh=Mesh.of(mesh))
    for step in (Normalize(), Place(), Shard()):
        program, _ = step(program, ctx)
    return print_program(program)


def test_the_local_program_is_as_shown():
    shown = [line.strip() for line in partition.__doc__.splitlines() if line.strip().startswith("%")]
    text = local_text(dp_shard=2)
    assert len(shown) == 2 and all(f"{line} :" in text for line in shown)
    text += local_text(tp=2)
    placements = re.findall(r"\[[^\]]*\](?: \w+\(\w+\))?", propagate.__doc__)
    assert len(placements) > 6 and all(placement in text for placement in placements)


def placement(text: str) -> Spec:
    """Parse a spec."""
    dims, kind, axis = re.fullmatch(r"\[(.*)\](?: (\w+)\((\w+)\))?", text).groups()
    factors = tuple((Factor(int(size), tuple(axes)),) for size, *axes in (dim.split("@") for dim in dims.split(", ")))
    partial, copies = ((axis, "sum"),) if kind == "sum" else (), (axis,) if kind == "replicate" else ()
    return Spec(factors, partial, copies, fill=0.0)


ROWS = re.findall(r"^    (\[.*?)  +->  (.*?)  +(\w+)$", convert.__doc__, re.MULTILINE)


@pytest.mark.parametrize(("before", "after", "operator"), ROWS, ids=[row[2] for row in ROWS])
def test_conversions_are_as_shown(before, after, operator):
    small = Small(tp=2)
    x = small.input("x", placement(before))
    small.builder.coordinates["tp"] = small.axis_index("tp")
    convert.convert(small.builder, x, placement(before), placement(after), True, None)
    assert [RESHARD_OPS[n.target].name for n in small.builder.graph.nodes if n.target in RESHARD_OPS] == [operator]


def test_conversions_are_shown():
    assert len(ROWS) == 6
