"""Equal layers are traced once; layers that differ in layout, dtype or placement share nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compiler_trainer.capture.capture import capture
from passes.autograd.joint import Joint
from passes.check.runner import run_passes
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.precision.float8 import Float8
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard
from passes.torch_private import FakeTensorMode, OpOverload
from passes.trace import abstract_eval
from passes.trace import trace as tracing
from passes.trace.editor import Editor, own_memory
from passes.trace.functions import define, function_of
from passes.trace.trace import trace

WIDTH = 32
TP_PLAN = {"layers.*.up.weight": {"tp": 0}, "layers.*.down.weight": {"tp": 1}}


class Layer(nn.Module):
    """Two matmuls of one shape, which tensor parallelism places as columns and as rows."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Layers of the given hidden sizes."""

    def __init__(self, hidden: tuple[int, ...]):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, hidden))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(*hidden: int) -> tuple[ir.Program, ir.Context]:
    """Return the local program of float8 layers on four ranks."""
    batch = {"x": torch.randn(4, 16, WIDTH)}
    program, ctx = capture(
        Model(hidden), lambda model, batch: F.mse_loss(model(batch["x"]), batch["x"]), batch, torch.device("cpu")
    )
    passes = (Normalize(), Place(TP_PLAN), Float8("tensorwise", head=True), Shard())
    return run_passes("forward", passes, replace(program, mesh=Mesh.of({"dp_shard": 2, "tp": 2})), ctx)[0], ctx


def products(program: ir.Program) -> list[OpOverload]:
    """Return the operators that float8 layers call, in order."""
    return [n.target for n in program.calls() if "float8_linear" in str(n.target)]


def test_products_of_one_shape_share_an_operator_only_if_placed_alike():
    first, _, up, down, up_again, down_again = products(sharded(WIDTH, WIDTH, WIDTH)[0])
    assert (up, down) == (up_again, down_again)
    assert len({first, up, down}) == 3  # for the batch, by columns, by rows: three placements


def test_products_of_other_shapes_share_no_operator():
    assert len(set(products(sharded(WIDTH, 2 * WIDTH)[0]))) == 4


def test_a_float8_layer_is_one_operator_of_the_captured_graph():
    program = sharded(WIDTH)[0]
    assert not any(function_of(node) for node in program.calls())


def test_more_layers_are_not_more_traces(monkeypatch):
    def traces(layers: int) -> int:
        calls, make = [], tracing.Tape
        with monkeypatch.context() as patched:
            patched.setattr(tracing, "Tape", lambda *args: calls.append(args) or make(*args))
            run_passes("step", (Joint(),), *sharded(*[WIDTH] * layers))
        return len(calls)

    assert traces(4) == traces(2)


def test_more_layers_are_not_more_questions_nor_is_the_same_program_in_another_context(monkeypatch):
    cache = {}
    monkeypatch.setattr(abstract_eval, "_answers", cache)

    def count_calls(layers: int) -> int:
        program, ctx = sharded(*[WIDTH] * layers)
        run_passes("step", (Joint(),), program, ctx)
        return len(cache)

    assert 0 < count_calls(3) == count_calls(3) == count_calls(4)


def test_copies_of_a_traced_body_have_memory_of_their_own():
    ctx = ir.Context(FakeTensorMode())

    def body(x: Tensor) -> Tensor:
        y = x * 2
        return y.view(torch.int32).t()

    with ctx.fake_mode:
        values = [torch.empty(3, 4)]
    graph, outer = trace(body, values, ctx), fx.Graph()
    x = outer.placeholder("x")
    ir.set_value(x, values[0])
    first, second = (Editor(ctx, outer).graft(graph, [x])[0] for _ in range(2))
    for nodes in (first, second):
        own_memory(nodes, ctx)
    for first_node, second_node in zip(first, second):
        a, b = ir.example(first_node), ir.example(second_node)
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert a.untyped_storage() is ir.example(first[0]).untyped_storage() is not b.untyped_storage()


@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.float64), (4, torch.float32)])
def test_shapes_of_an_operator_are_found_once_a_layout(rows, dtype):
    calls = []

    def body(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(x)
        return (x.t(),)

    op = define("local", "transposed", body, 1, 1)
    with FakeTensorMode() as mode:
        operands = [mode.from_tensor(t) for t in (torch.empty(2, 3), torch.empty(2, 3), torch.empty(rows, 3, dtype=dtype))]
        results = [op(x) for x in operands]
    assert len(calls) == 2
    assert [(r.shape, r.dtype) for r in results] == [(x.t().shape, x.dtype) for x in operands]
    assert all(r.is_contiguous() for r in results)
