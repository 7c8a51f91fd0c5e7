"""The role of each operator for the layers, with the reason."""

from __future__ import annotations

import torch
from small_programs import Small, cut
from torch import fx

from passes.communication.layer_starts import ENDS, FIRST, GATHERS, INSIDE, REDUCES, begins_of, kernels_of, roles_of
from passes.ir import ir
from passes.ir.layer import Layer
from passes.ir.stages import Stage
from passes.torch_private import c10d

aten = torch.ops.aten
SIDE = 16


class Layers(Small):
    """A program whose operators have labels."""

    def __init__(self):
        super().__init__(dp_shard=2)
        self.labels: dict[fx.Node, str] = {}
        self.x = self.input("x", cut((SIDE, SIDE)), "batch")

    def do(self, label: str, target, *args, layer: int | None, phase: str = "forward", recomputed: bool = False):
        node = self.call(target, *args, phase=phase)
        ir.update(node, layer=None if layer is None else Layer("layers", layer), recomputed=recomputed)
        self.labels[node] = label
        return node

    def mm(self, label: str, x, w=None, **where):
        return self.do(label, aten.mm.default, x, x if w is None else w, **where)

    def gather(self, layer: int, **where):
        """Start a gather of a weight."""
        shard = self.input(f"w{layer}", cut((SIDE, SIDE), dp_shard=0), "parameter")
        return self.do(f"gather {layer}", c10d.all_gather_into_tensor.default, shard, 2, "dp_shard", layer=layer, **where)

    def reduction(self, x, **where):
        start = self.do("reduce", c10d.all_reduce.default, x, "sum", "dp_shard", **where)
        return self.do("wait", c10d.wait_tensor.default, start, **where)

    def roles(self, *results: fx.Node) -> dict[str, tuple[str, str, str]]:
        """Return, by label, the operator's role, its layer, and the reason."""
        outputs = [("gradient", f"g{i}", node, cut(tuple(ir.example(node).shape))) for i, node in enumerate(results)]
        program = self.program(outputs, Stage.EXPLICIT)
        kernels = kernels_of(program)
        roles = {self.labels[n]: (r.kind, f"{r.phase} {r.layer}", reason) for n, r, reason in roles_of(program, kernels)}
        begins = {self.labels[node]: f"{phase} {layer}" for node, (phase, layer) in begins_of(program, kernels).items()}
        assert begins == {label: place for label, (_, place, reason) in roles.items() if reason is FIRST}
        return roles


def test_a_layer_without_collectives_begins_at_its_first_kernel():
    """Check that the norm belongs to the layer before, with whose sum it shares a kernel."""
    layers = Layers()
    first = layers.do("sum", aten.add.Tensor, layers.mm("mm 0", layers.x, layer=0), layers.x, layer=0)
    last = layers.mm("mm 1", layers.do("norm", aten.neg.default, first, layer=1), layer=1)
    assert layers.roles(layers.do("use", aten.neg.default, layers.mm("head", last, layer=None), layer=None)) == {
        "mm 0": ("own", "forward layers.0", FIRST),
        "sum": ("own", "forward layers.0", INSIDE),
        "norm": ("own", "forward layers.0", INSIDE),
        "mm 1": ("own", "forward layers.1", FIRST),
        "head": ("own", "forward None", FIRST),
        "use": ("own", "forward None", ENDS),
    }  # fmt: skip


def test_a_layer_whose_parameters_are_gathered_begins_at_its_first_operator():
    layers = Layers()
    gathers = [layers.gather(0, phase="forward"), layers.gather(1, phase="forward")]
    here = [layers.do(f"wait {i}", c10d.wait_tensor.default, start, layer=i) for i, start in enumerate(gathers[:1])]
    first = layers.mm("mm 0", layers.x, here[0], layer=0)
    norm = layers.do("norm", aten.neg.default, first, layer=1)
    received = layers.do("wait 1", c10d.wait_tensor.default, gathers[1], layer=1)
    assert layers.roles(layers.mm("mm 1", norm, received, layer=1)) == {
        "gather 0": ("prefetch", "forward layers.0", GATHERS),
        "gather 1": ("prefetch", "forward layers.1", GATHERS),
        "wait 0": ("own", "forward layers.0", FIRST),
        "mm 0": ("own", "forward layers.0", INSIDE),
        "norm": ("own", "forward layers.1", FIRST),
        "wait 1": ("own", "forward layers.1", INSIDE),
        "mm 1": ("own", "forward layers.1", INSIDE),
    }


def test_recomputation_before_a_kernel_belongs_to_its_layer():
    layers, where = Layers(), {"layer": 0, "phase": "backward"}
    again = layers.do("again", aten.neg.default, layers.x, recomputed=True, **where)
    assert layers.roles(layers.mm("mm", again, **where))["again"] == ("own", "backward layers.0", FIRST)


def test_a_gradient_that_is_reduced_in_another_layer_is_late_there_and_updates_come_last():
    layers, where = Layers(), {"phase": "backward"}
    of_weight = layers.mm("dw 1", layers.x, layer=1, **where)
    last = layers.mm("dw 0", layers.x, layer=0, **where)
    first = layers.do("more", aten.neg.default, last, layer=0, **where)
    reduced = layers.reduction(of_weight, layer=1, **where)
    end = layers.mm("dx", first, layer=0, **where)
    update = layers.do("update", aten.neg.default, reduced, layer=1, phase="optimizer")
    roles = layers.roles(update, end)
    assert roles["dw 0"] == ("own", "backward layers.0", FIRST)
    assert roles["reduce"] == roles["wait"] == ("late", "backward layers.1", REDUCES)
    assert roles["dx"] == ("own", "backward layers.0", INSIDE)
    assert roles["update"] == ("update", "optimizer layers.1", ENDS)
