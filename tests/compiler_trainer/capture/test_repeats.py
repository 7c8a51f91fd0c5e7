"""Layers without numbered modules are found as repeats in the graph, and passes treat them like other layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from oracle import points, squared_error, trained_alike
from torch import Tensor, nn

from compiler_trainer.capture.capture import capture
from passes.ir import ir

WIDTH = 6


class Block(nn.Module):
    """A residual block with a stack of numbered modules inside that are not layers."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.norm(x)).sigmoid()
        return x + self.mlp(x)


class Ends(nn.Module):
    """An embedding before layers and a head after them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)))


class Named(Ends):
    """Layers that are entries of a ModuleDict."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block() for name in ("first", "second", "third", "fourth")})
        self.double()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class Looped(Ends):
    """One block, called repeatedly."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.double()

    def body(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return x


class Twice(Ends):
    """Two numbered blocks that run twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.double()

    def body(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


class Functional(Ends):
    """Functions of stacked weights and of a list, with a gate computed once; the sum before them is not a layer."""

    def __init__(self):
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3)
        self.each = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(4))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.double()

    def body(self, x: Tensor) -> Tensor:
        x = x + self.shift
        gate = x.mean(-1, keepdim=True).sigmoid()
        for i, weight in enumerate(self.each):
            hidden = F.layer_norm(x, (WIDTH,))
            x = x + torch.tanh(hidden @ self.stacked[i].T) * gate
            x = x + F.linear(x, weight)
        return x


MODELS = {"blocks": Named, "block": Looped, "layers": Twice, "repeat": Functional}


def captured(model: nn.Module) -> ir.Program:
    return capture(model, squared_error, points()[0], torch.device("cpu"))[0]


@pytest.mark.parametrize(("stack", "model"), MODELS.items(), ids=MODELS)
def test_repetitions_are_layers_that_begin_with_their_residual_stream(stack, model):
    program = captured(model())
    result = [str(ir.layer(node) or "") for node in program.calls()]
    order = list(dict.fromkeys(result))
    assert order == ["", *(f"{stack}.{i}" for i in range(4))]  # operators without a layer are only before and after them
    sizes = Counter(result)
    assert len({sizes[layer] for layer in order[1:]}) == 1
    for layer in order[1:]:
        own = [node for node, name in zip(program.calls(), result) if name == layer]
        leaving = [node for node in own if any(user not in own for user in node.users)]
        assert len(leaving) == 1 and leaving[0].target is torch.ops.aten.add.Tensor
    assert not any(result[i] for i, node in enumerate(program.calls()) if ir.source(node).endswith("embed"))


def test_a_parameter_is_of_the_repetition_that_reads_it_and_of_none_if_several_do():
    layers = {input_.name: str(input_.layer or "") for model in MODELS.values() for input_ in captured(model()).inputs}
    assert layers["blocks.third.up.weight"] == "blocks.2"
    assert layers["each.1"] == "repeat.1"
    assert {layers[name] for name in ("stacked", "shift", "block.up.weight", "layers.1.up.weight", "head.weight")} == {""}


class Unlike(Ends):
    """Parallel blocks of one kind, and consecutive blocks of different shapes."""

    def __init__(self):
        super().__init__()
        self.side = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})
        self.wide, self.narrow = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(sum(part(x).tanh() for part in self.side.values()))))


def test_what_is_alike_side_by_side_is_no_stack():
    program = captured(Unlike().double())
    assert not any(map(ir.layer, program.calls()))


class Numbered(Ends):
    """Numbered layers of two alternating kinds: they repeat in pairs, and each is a layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(Block() if i % 2 else nn.Linear(WIDTH, WIDTH) for i in range(4))
        self.double()

    def body(self, x: Tensor) -> Tensor:
        for layer in (*self.first, *self.layers):
            x = layer(x)
        return x


def test_numbered_modules_in_a_row_are_layers_as_they_are():
    result = dict.fromkeys(str(ir.layer(node) or "") for node in captured(Numbered()).calls())
    assert [*result] == ["", "first.0", "first.1", *(f"layers.{i}" for i in range(4))]


@pytest.mark.parametrize(("stack", "model"), MODELS.items(), ids=MODELS)
@pytest.mark.sample(2)
def test_passes_see_the_layers_and_the_model_trains_as_on_one_device(stack, model):
    options = {"remat": {"policy": "full"}, "shard": {"min_shard_elements": 1}}
    step = trained_alike(model(), squared_error, points(), {"dp_shard": 2}, passes=options)
    reports = {record["name"]: record["report"] for record in step.report["passes"]}
    saved = reports["remat"]["counts"]
    assert saved["saved_bytes_after"] < saved["saved_bytes_before"] / 4  # only the inputs of layers
    assert reports["overlap"]["counts"]["with_products_beside_after"] > 0
    if stack == "blocks":  # its layers have their own parameters
        notes = " ".join(reports["bucket"]["notes"])
        assert notes.count("8 all_gather as one") == notes.count("8 reduce_scatter as one") == 4
        assert any(" 3 calls, 55 nodes" in note for note in reports["segment"]["notes"])  # the last one ends in the head
