"""Lowered programs: Inductor and the interpreter agree, and the interpreter names the node that fails."""

from __future__ import annotations

import weakref

import pytest
import torch
from joint_programs import Tiny
from oracle import NO_DECAY, assert_same, perceptron, points, squared_error, train_plainly

from compiler_trainer import compile_step
from passes.check.simulate import Lockstep
from passes.ir import ir
from passes.ir.record import Origin
from passes.ir.spec import Spec
from passes.lower.backends import lower_eager

aten = torch.ops.aten


def test_inductor_is_eager_and_pytorch():
    model, data = perceptron(dtype=torch.float32), points(dtype=torch.float32)
    compiled, interpreted = (compile_step(model, squared_error, data[0], optim=NO_DECAY, lower={"backend": backend})
                             for backend in ("inductor", "eager"))
    assert compiled.evaluate(data[1]) == pytest.approx(interpreted.evaluate(data[1]), rel=1e-6)
    where = {name: by_rank[0].data_ptr() for name, (_, by_rank) in compiled.tensors().items()}
    result = [(compiled(b, lr), interpreted(b, lr)) for b, lr in zip(data, (1e-2, 3e-2, 2e-2), strict=True)]
    metrics, state = train_plainly(model, squared_error, data, NO_DECAY)
    for (ours, eager), theirs in zip(result, metrics, strict=True):
        assert_same(ours, eager, 1e-6)
        assert_same(ours, theirs, 1e-6)
    assert_same(compiled.state_dict(), interpreted.state_dict(), 1e-6)
    assert_same(compiled.state_dict(), state, 1e-5)
    assert {name: by_rank[0].data_ptr() for name, (_, by_rank) in compiled.tensors().items()} == where


@pytest.mark.parametrize("run", [
    lambda program, ctx, values: lower_eager(program, ctx)(values),
    lambda program, ctx, values: Lockstep(program).run([values]),
], ids=["eager", "lockstep"])
def test_an_error_names_the_node_and_its_source_line(run):
    tiny = Tiny()
    node = tiny.call(aten.neg.default, tiny.input("x", Spec.whole((2, 3))))
    broken = tiny.call(aten.mm.default, tiny.input("y", Spec.whole((2, 2))), node)
    ir.update(broken, origin=Origin("model.py:41"))
    program = tiny.program(broken)
    with pytest.raises(ir.CompileError, match=r"%mm \(model.py:41\).*(RuntimeError)") as caught:
        run(program, tiny.ctx, [torch.ones(2, 3), torch.ones(2, 5)])
    assert caught.value.node is not None and caught.value.node.name == "mm"


def test_an_eager_error_gives_the_shapes_that_were_compiled():
    tiny = Tiny()
    program = tiny.program(tiny.call(aten.neg.default, tiny.input("x", Spec.whole((2, 3)))))
    with pytest.raises(ir.CompileError, match=r"%neg .*aten.neg.default on \[\(2, 3\)\]: RuntimeError"):
        lower_eager(program, tiny.ctx)(["no tensor"])  # type: ignore[list-item]


def test_the_interpreter_keeps_no_input_after_a_call():
    """Check this because tasks of pipeline stages read values that are freed when they end."""
    tiny = Tiny()
    program = tiny.program(tiny.call(aten.neg.default, tiny.input("x", Spec.whole((2, 3)))))
    run, x = lower_eager(program, tiny.ctx), torch.ones(2, 3, dtype=torch.float64)
    alive = weakref.ref(x)
    values = run([x])
    del x
    assert alive() is None and values[0].sum() == -6
