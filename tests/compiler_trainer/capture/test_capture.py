"""The capture keeps a model's tensors by name, the origins of its operators, and its missing gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    NO_DECAY,
    assert_same,
    batches,
    compile_lockstep,
    llama,
    llama_loss,
    perceptron,
    points,
    squared_error,
    train_plainly,
    train_step,
)
from torch import nn

from compiler_trainer import UserError
from compiler_trainer.capture.capture import capture
from passes.ir import ir
from passes.ir.printer import print_program

CPU = torch.device("cpu")


def captured(model, loss_fn, batch, **options) -> ir.Program:
    program, _ = capture(model, loss_fn, batch, CPU, **options)
    return program


def names(program: ir.Program, kind: str) -> list[str]:
    return [i.name for i in program.inputs if i.kind == kind]


def test_inputs_are_named_as_in_the_model_and_the_batch():
    model = perceptron(nn.BatchNorm1d(7))
    program = captured(model, squared_error, points()[0])
    assert sorted(names(program, "parameter")) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert sorted(names(program, "buffer")) == sorted(n for n, _ in model.named_buffers())
    assert names(program, "frozen") == ["frozen"]
    assert names(program, "batch") == ["x", "y"]
    assert {(o.name, o.kind) for o in program.outputs} == {("loss", "loss"), *((n, "buffer") for n, _ in
                                                                               model.named_buffers())}


class Tied(nn.Module):
    """A head that is the embedding, under a second name."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def next_token(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["x"].roll(1))


def test_tied_weights_become_one_input_and_train_as_one():
    torch.manual_seed(0)
    model, data = Tied().double(), [{"x": torch.tensor([0, 3, 1, 4, 1])}] * 3
    assert names(captured(model, next_token, data[0]), "parameter") == ["embed.weight"]
    step = compile_lockstep(model, next_token, data[0], {"dp_shard": 2}, NO_DECAY)
    metrics, state = train_plainly(model, next_token, data, NO_DECAY)
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same(result, expected, 1e-10)
    assert_same(step.state_dict(), dict.fromkeys(("embed.weight", "head.weight"), state["head.weight"]), 1e-10)
    copy.deepcopy(model).load_state_dict(step.state_dict())


def test_operators_know_their_module_and_source_line():
    program = captured(llama(n_layers=2), llama_loss, batches()[0])
    linears = [n for n in program.calls() if n.target is torch.ops.aten.linear.default]
    paths = [ir.module_path(n) for n in linears]
    assert "layers.0.attention.wq" in paths and "layers.1.feed_forward.w2" in paths
    wq = linears[paths.index("layers.1.attention.wq")]
    assert ir.source(wq).startswith("attention.py:")


def test_origins_survive_to_the_backward_of_the_final_program():
    step = compile_lockstep(llama(), llama_loss, batches()[0], {"dp_shard": 2})
    calls = list(step.train["step"].program.calls())
    result = {(ir.phase(n), ir.module_path(n)) for n in calls if n.target is torch.ops.aten.mm.default
             or "linear" in str(n.target)}
    assert ("backward", "layers.0.feed_forward.w1") in result
    scatters = [n for n in calls if "reduce_scatter" in str(n.target)]
    assert scatters and all(ir.source(n) for n in scatters)


class Cut(nn.Module):
    """A model in which half of the features pass through a detached region."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.how == "detach":
            return self.down(h.tanh().detach() + h)
        if self.how == "no_grad":
            with torch.no_grad():
                first = h.tanh() * 2
            return self.down(first + h)
        with torch.no_grad():
            first = h.tanh()
            with torch.enable_grad():
                second = h.sigmoid()
        return self.down(first + second)


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}], ids=str)
@pytest.mark.parametrize("how", ["detach", "no_grad", "enable_grad"])
@pytest.mark.sample(2)
def test_what_has_no_gradient_in_the_model_has_none_in_the_step(how, mesh):
    torch.manual_seed(0)
    model, data = Cut(how).double(), points()
    metrics, state = train_plainly(model, squared_error, data, NO_DECAY)
    step = compile_lockstep(model, squared_error, data[0], mesh, NO_DECAY)
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same(result, expected, 1e-10)
    assert_same(step.state_dict(), state, 1e-10)


class Taught(nn.Module):
    """A student that learns from a frozen teacher."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        with torch.no_grad():
            expected = self.teacher(x).tanh()
        return self.student(x) - expected


def test_operators_of_a_no_grad_region_know_their_line_and_module():
    program = captured(Taught().double(), lambda m, b: m(b["x"]).square().mean(), points()[0])
    linears = [node for node in program.calls() if node.target is torch.ops.aten.linear.default]
    (bent,) = (node for node in program.calls() if node.target is torch.ops.aten.tanh.default)
    assert sorted(map(ir.module_path, linears)) == ["student", "teacher"]
    assert ir.source(bent).startswith("test_capture.py:")


class Double(torch.autograd.Function):
    """The identity, with a gradient that is not its derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Double.apply(self.up(x))


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}], ids=str)
def test_a_custom_gradient_is_kept(mesh):
    torch.manual_seed(0)
    model, data = WithFunction().double(), points()
    metrics, _ = train_plainly(model, squared_error, data, NO_DECAY)
    step = compile_lockstep(model, squared_error, data[0], mesh, NO_DECAY)
    assert_same(step(data[0]), metrics[0], 1e-10)


def test_a_second_capture_has_the_same_names():
    texts = [print_program(captured(WithFunction(), squared_error, points(dtype=torch.float32)[0])) for _ in range(2)]
    assert texts[0] == texts[1] and "fn.Double_0" in texts[0]


def test_the_loss_has_a_source_line():
    program = captured(perceptron(), squared_error, points()[0])
    assert {ir.source(n).split(":")[0] for n in program.calls()} == {"oracle.py"}


def test_the_captured_dtype_is_the_one_asked_for():
    program = captured(llama(), llama_loss, batches()[0], dtype=torch.bfloat16)
    nodes = zip(program.placeholders(), program.inputs, strict=True)
    assert {ir.example(n).dtype for n, i in nodes if i.kind == "parameter"} == {torch.bfloat16}


@pytest.mark.parametrize(("loss_fn", "batch", "says"), [
    (squared_error, points()[0] | {"x": [1.0]}, r"batch\['x'\]: is a list; every entry must be a tensor"),
    (lambda m, b: m(b["x"]), points()[0], r"loss_fn: returns \(5, 3\) torch.float64; must be a scalar"),
    (lambda m, b: m(b["x"]).argmax(), points()[0], r"loss_fn: returns \(\) torch.int64; must be a scalar"),
    (lambda m, b: m(b["x"]).sum() if b["x"].sum() > 0 else m(b["x"]).mean(), points()[0],
     r"model: test_capture.py:\d+ branches on a value; .* use torch.where"),
    (lambda m, b: m(b["x"])[b["x"][:, 0] > 0].sum(), points()[0],
     r"model: test_capture.py:\d+ has a shape that depends on data"),
    (lambda m, b: m(b["x"]).sum() * b["x"].sum().item(), points()[0],
     r"model: test_capture.py:\d+ reads a value into Python"),
    (lambda m, b: m(b["x"]).view(3, 1000).sum(), points()[0], r"model: test_capture.py:\d+ RuntimeError: shape '\[3, 1000\]'"),
], ids=["entry", "shape", "dtype", "branch", "data-dependent shape", "item", "fails"])
def test_what_cannot_be_captured_is_refused(loss_fn, batch, says):
    with pytest.raises(UserError, match=says):
        captured(perceptron(), loss_fn, batch)


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
                         ids=["no_grad", "inference_mode", "autocast"])
def test_a_shape_that_depends_on_data_is_refused_inside_a_region(region):
    def loss_fn(model, batch):
        y = model(batch["x"])
        with region():
            return y.sum() + batch["x"][:, batch["x"][0] > 0].sum()

    with pytest.raises(UserError, match=r"model: test_capture.py:\d+ has a shape that depends on data"):
        captured(perceptron(), loss_fn, points()[0])


class Hooking(nn.Module):
    """A model that doubles a gradient by a hook."""

    def forward(self, x):
        y = x * 1
        y.register_hook(lambda g: 2 * g)
        return y


def test_a_hook_is_refused():
    with pytest.raises(UserError, match=r"test_capture.py:\d+ hooks a gradient"):
        compile_lockstep(perceptron(Hooking()), squared_error, points()[0], {}, NO_DECAY)


class Branching(nn.Module):
    """A model that branches on a value."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_nothing_but_the_error_is_said_of_what_cannot_be_captured(capfd):
    with pytest.raises(UserError, match=r"test_capture.py:\d+ branches on a value"):
        compile_lockstep(perceptron(Branching()), squared_error, points()[0], {}, NO_DECAY)
    assert capfd.readouterr() == ("", "")


class Drawing(nn.Module):
    """A model that draws from its own generator."""

    def forward(self, x):
        return x + torch.rand(x.shape, generator=torch.Generator(), dtype=x.dtype)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(UserError, match=r"neither a tensor nor a number|test_capture.py:\d+ .*Generator"):
        compile_lockstep(perceptron(Drawing()), squared_error, points()[0], {}, NO_DECAY)


class Decayed(nn.Module):
    """A model in which a buffer keeps its dtype and becomes the next layer's operand."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("decay", torch.linspace(0.5, 0.9, 5))

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype) * self.decay)


def test_a_product_of_two_dtypes_is_refused_by_its_line():
    with pytest.raises(UserError, match=r"test_capture.py:\d+ multiplies float32 by bfloat16.*; cast one, for example x.to\(weight.dtype\)"):
        captured(Decayed(), squared_error, points(dtype=torch.float32)[0], dtype=torch.bfloat16)
    captured(Decayed(), squared_error, points(dtype=torch.float32)[0])
