"""Captured operators and inputs have the layer that they belong to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compiler_trainer.capture.capture import capture
from passes.ir import ir
from passes.ir.layer import layer_names, layer_of

PATHS = ["", "norm", "layers.0.wq", "layers.1.wq", "layers.1.experts.0", "layers.1.experts.1", "head.0"]


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("", ""),
        ("head.0", ""),  # a number without siblings
        ("layers", ""),
        ("layers.0.wq", "layers.0"),
        ("layers.1.experts.0", "layers.1"),  # the outermost counts
        ("layers.2.wq", ""),
    ],
)
def test_a_layer_is_a_numbered_child_with_siblings(path, layer):
    assert str(layer_of(path, layer_names(PATHS)) or "") == layer


def captured(model: nn.Module) -> ir.Program:
    torch.manual_seed(0)
    return capture(model, lambda m, b: m(b["x"]).square().mean(), {"x": torch.randn(3, 4)}, torch.device("cpu"))[0]


def layers(program: ir.Program) -> list[str]:
    """Return operators with their layers, in order."""
    return [f"{node.name} {ir.layer(node) or '-'}" for node in program.calls()]


def inputs(program: ir.Program) -> dict[str, str]:
    return {input_.name: str(input_.layer or "-") for input_ in program.inputs if input_.kind != "batch"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stacks(nn.Module):
    """An encoder, a decoder that reads its output in every layer, and an expert that both stacks share."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.shared, self.unused = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decoder[1].extra = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = block(memory)
        memory = self.shared(memory)
        for block in self.decoder:
            x = block(x) * memory
        return x


def test_stacks_of_an_encoder_and_a_decoder_are_two():
    program = captured(Stacks())
    assert layers(program) == [
        "linear encoder.0", "tanh encoder.0", "linear_1 encoder.0", "add encoder.0",
        "linear_2 encoder.1", "tanh_1 encoder.1", "linear_3 encoder.1", "add_1 encoder.1", "linear_4 -",
        "linear_5 decoder.0", "tanh_2 decoder.0", "linear_6 decoder.0", "add_2 decoder.0", "mul -",
        "linear_7 decoder.1", "tanh_3 decoder.1", "linear_8 decoder.1", "add_3 decoder.1", "mul_1 -",
        "square -", "mean -",
    ]  # fmt: skip
    result = inputs(program)
    assert (result["encoder.1.up.weight"], result["decoder.0.down.weight"]) == ("encoder.1", "decoder.0")
    assert (result["shared.weight"], result["unused.weight"]) == ("-", "-")
    assert result["decoder.1.extra.weight"] == "decoder.1"  # nothing reads it


class Parts(nn.Module):
    """Layers of which only the parts are modules, scaled by parameters; the last calls a part of the first."""

    def __init__(self):
        super().__init__()
        shapes = {"up": (4, 6), "down": (6, 4)}
        parts = [{name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()} for _ in range(2)]
        self.layers = nn.ModuleList(map(nn.ModuleDict, parts))
        self.scale, self.tied = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0]["up"](x) * self.scale.exp() * self.tied.sum()
        x = x + self.layers[0]["down"](hidden)
        x = x + self.layers[1]["down"](self.layers[1]["up"](x))
        return x * self.tied.sum()


def test_what_stands_between_parts_of_a_layer_is_of_it_and_so_is_a_weight_that_it_alone_reads():
    program = captured(Parts())
    assert layers(program) == [
        "linear layers.0", "exp layers.0", "mul layers.0", "sum_1 layers.0", "mul_1 layers.0", "linear_1 layers.0",
        "add -", "linear_2 layers.1", "linear_3 layers.1", "add_1 -", "sum_2 -", "mul_2 -", "square -", "mean -",
    ]  # fmt: skip
    assert inputs(program)["scale"] == "layers.0"
    assert inputs(program)["tied"] == "-"  # an operator outside of layers reads it too


class Calls(nn.Module):
    """A layer that calls a part of the previous one."""

    def __init__(self, first: nn.Module | None = None):
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        self.others = [first] if first is not None else []

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0].up(self.up(x)) if self.others else self.up(x)


class Borrowing(nn.Module):
    def __init__(self):
        super().__init__()
        first = Calls()
        self.layers = nn.ModuleList([first, Calls(first)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_part_of_another_layer_is_of_the_layer_that_calls_it_and_its_weight_of_none():
    program = captured(Borrowing())
    assert layers(program)[:3] == ["linear layers.0", "linear_1 layers.1", "linear_2 layers.1"]
    assert inputs(program) == {"layers.0.up.weight": "-", "layers.1.up.weight": "layers.1"}
