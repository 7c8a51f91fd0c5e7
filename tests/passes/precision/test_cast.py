"""Precision in the graph: the dtype of each operator, and no cast that undoes another."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    NO_DECAY,
    VOCAB,
    batches,
    compile_lockstep,
    llama,
    llama_loss,
    perceptron,
    points,
    squared_error,
    train_step,
    trained_alike,
)
from torch import Tensor, nn

from compiler_trainer import UserError
from compiler_trainer.capture.capture import capture
from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models import Llama
from passes.ir import ir
from passes.ir.operators import name_of
from passes.ops import reshard
from passes.precision.cast import COPY, Cast, is_cast
from passes.precision.sensitive import OPS

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
CPU = torch.device("cpu")
WIDE = {pattern: F32 for pattern in OPS}


class Net(nn.Module):
    """A model with a norm, a matmul, two softmaxes in a row, and a pair of casts by its author."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.RMSNorm(6, eps=1e-5), nn.Linear(6, 6, bias=False)
        self.down = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).softmax(-1).softmax(-1)
        return self.down(y.float().to(y.dtype))


class Quantized(nn.Module):
    """Fake quantization: values are rounded to a dtype of eight bits."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(x.dtype)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def cast(dtype: torch.dtype | None = BF16, stored: torch.dtype = F32, **options) -> tuple[ir.Program, ir.Report]:
    """Return `Net` captured in one dtype, with its parameters stored in another."""
    batch = {"x": torch.randn(4, 6, dtype=dtype), "y": torch.zeros(4, dtype=torch.int64)}
    model = Net()
    program, ctx = capture(model, loss_fn, batch, CPU, dtype)
    return Cast({name: stored for name, _ in model.named_parameters()}, **options)(program, ctx)


def dtypes(program: ir.Program, name: str) -> list[torch.dtype]:
    result = [n for n in program.calls() if hasattr(n.target, "_schema") and name_of(n) == name]
    return [ir.example(n.args[0]).dtype for n in result]


def casts(program: ir.Program) -> int:
    return sum(is_cast(n) for n in program.calls())


def test_operators_of_the_table_compute_in_their_dtype_and_the_rest_in_the_captured_one():
    program, _ = cast(ops=WIDE)
    assert dtypes(program, "linear") == [BF16, BF16]
    assert dtypes(program, "rms_norm") == [BF16]
    assert dtypes(program, "softmax") == [F32, F32]
    assert dtypes(program, "cross_entropy_loss") == [F32]
    assert ir.example(program.results()[0]).dtype == F32  # a loss is not rounded to bf16


def test_no_cast_undoes_another():
    program, report = cast(ops=WIDE)
    for node in filter(is_cast, program.calls()):
        assert not is_cast(node.args[0]), node
    # 3 parameters, into the first softmax, out of the second, into the loss
    assert casts(program) == 6
    assert report.counts["removed"] >= 2


def test_a_cast_of_the_authors_that_rounds_is_kept():
    class Rounds(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).to(BF16).to(F32))

    batch = {"x": torch.randn(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    program, ctx = capture(Rounds(), loss_fn, batch, CPU)
    result, _ = Cast(ops=WIDE)(program, ctx)
    assert casts(result) == 2


@pytest.mark.parametrize("use", [lambda x, n: x * n.view(1), lambda x, n: torch.cat([x[:, 1:], n.expand(4, 1)], 1)])
def test_a_number_that_tensors_use_keeps_the_compute_dtype(use):
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x.to(self.up.weight.dtype))
            return self.down(use(x, torch.logsumexp(x.flatten(), 0)))

    batch = {"x": torch.randn(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    exact, rounded = (
        compile_lockstep(Scaled(), loss_fn, batch, {}, passes={"cast": {"param_dtype": dtype}})(batch)["loss"]
        for dtype in ("float32", "bfloat16")
    )
    assert exact != rounded and abs(exact - rounded) < 0.02


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_round_trip_through_float8_rounds(dtype):
    model = perceptron(Quantized(dtype))
    trained_alike(model, squared_error, points(), {"tp": 2}, NO_DECAY)


def test_a_loss_of_several_terms_is_not_rounded():
    class Terms(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).logsumexp((0, 1)) / 3 + self.down(x).logsumexp((0, 1))

    program, ctx = capture(Terms(), lambda model, batch: model(batch["x"]), {"x": torch.randn(4, 6, dtype=BF16)}, CPU, BF16)
    result, _ = Cast(ops=WIDE)(program, ctx)
    assert ir.example(result.results()[0]).dtype == F32
    assert {ir.example(n).dtype for n in result.calls() if ir.example(n).dim() == 0} == {F32}


def test_nothing_is_narrowed_by_the_table():
    program, _ = cast(F64, F64, ops=WIDE)
    assert casts(program) == 2 and set(dtypes(program, "softmax")) == {F64}  # the author's two casts


def test_a_module_has_a_dtype_of_its_own():
    program, _ = cast(modules={"up": F32}, ops={})
    assert dtypes(program, "linear") == [F32, BF16]
    weight = next(n for n, i in zip(program.placeholders(), program.inputs) if i.name == "up.weight")
    (user,) = weight.users  # the master itself: it is not rounded on the way
    assert name_of(user) == "linear"


def test_what_the_model_hands_to_the_loss_has_the_output_dtype():
    program, _ = cast(ops={}, output=F32)
    assert dtypes(program, "cross_entropy_loss") == [F32] and dtypes(program, "linear") == [BF16, BF16]


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(ir.Refused, match=r"passes.cast.modules: no module is named like 'upp\.\*'"):
        cast(modules={"upp.*": F32})


def test_an_operator_that_is_not_there_is_refused():
    with pytest.raises(ir.Refused, match="passes.cast.ops: no operator is named like 'softmaxx'"):
        cast(ops={"softmaxx": F32})


def test_the_report_tables_what_computes_in_which_dtype():
    _, report = cast(ops=WIDE)
    assert "linear computes in bf16: 2" in report.notes and "softmax computes in f32: 2" in report.notes
    assert report.counts["f32 -> bf16"] >= 3


def test_a_dtype_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="'float12' is not one of float32, bfloat16"):
        compile_lockstep(llama(), llama_loss, batches()[0], {}, passes={"cast": {"modules": {"layers": "float12"}}})


MESHES = [{}, {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}]
POLICIES = ["none", "selective", "full", "every_n", "offload"]
PRECISIONS = {
    "fp32": {},
    "mixed": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "modules": {"layers.1": "float32"}},
    "rowwise": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "float8": "rowwise"},
    "tensorwise": {"float8": "tensorwise", "float8_skip": ["layers.0"]},
}


def wide_llama() -> nn.Module:
    """Return a Llama whose matrices fit float8."""
    torch.manual_seed(0)
    cfg = ModelConfig(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=VOCAB)
    return Llama(cfg)


@functools.cache
def trained(mesh: tuple[tuple[str, int], ...], precision: str, policy: str) -> list[dict[str, float]]:
    """Return the metrics of three steps."""
    passes = {"cast": PRECISIONS[precision], "remat": {"policy": policy}}
    step = compile_lockstep(wide_llama(), llama_loss, batches()[0], dict(mesh), passes=passes)
    assert {t.dtype for t in step.state_dict().values()} == {F32}
    return train_step(step, batches())


def check_composition(mesh: dict[str, int], precision: str, policy: str) -> None:
    """Check that recomputation changes no bit, and mesh and precision only rounding."""
    key = tuple(mesh.items())
    result, alone, exact = trained(key, precision, policy), trained((), precision, "none"), trained((), "fp32", "none")
    assert result == trained(key, precision, "none")
    for a, b, c in zip(result, alone, exact, strict=True):
        assert abs(a["loss"] - b["loss"]) < (1e-5 if precision in ("fp32", "tensorwise") else 1e-2)
        assert abs(a["loss"] - c["loss"]) < 0.05 and (a != c or precision == "fp32")


@pytest.mark.sweep(20)
@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_precision_and_policy_composes_on_every_mesh(mesh, precision, policy):
    check_composition(mesh, precision, policy)


@pytest.mark.full
def test_wire_bytes_of_gathers_are_halved_by_bf16():
    def gathered(cast):
        step = compile_lockstep(llama(2, F32), llama_loss, batches()[0], {"dp_shard": 2}, passes={"cast": cast})
        traffic = [t for p in step.report["passes"] if p["program"] == "step" for t in p["accounting"]["traffic"]]
        return next(t["sent_bytes"] for t in reversed(traffic) if t["kind"] == "all_gather")

    assert 2 * gathered({"param_dtype": "bfloat16"}) == gathered({})


def test_gradients_of_gathered_weights_are_added_in_the_reduce_dtype():
    programs = {}
    compile_lockstep(llama(dtype=torch.float32), llama_loss, batches()[0], {"dp_shard": 2},
                     passes={"cast": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
                     observe=lambda program, record: programs.setdefault(record.name, program))
    reduced = [n for n in programs["joint"].calls() if n.target is reshard.reduce_scatter]
    assert reduced and {ir.example(n.args[0]).dtype for n in reduced} == {torch.bfloat16}
    assert {n.args[-1] for n in reduced} == {torch.float32}


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
def test_sums_over_several_axes_are_not_rounded_in_between(mesh):
    programs = {}
    compile_lockstep(llama(dtype=torch.float32), llama_loss, batches()[0], mesh,
                     passes={"cast": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
                     observe=lambda program, record: programs.setdefault(record.name, program))
    program = programs["reassociate"]
    for node, output in zip(program.results(), program.outputs, strict=True):
        if output.kind == "gradient":
            assert ir.example(node).dtype == F32 and node.target is reshard.reduce_scatter, output.name
    assert any(o.spec.partial for o in program.outputs if o.kind == "gradient")  # the other axis: once, in the update


def test_a_tensor_has_one_dtype_and_the_graph_holds_it():
    """Check that state, program and report agree on the dtype of a parameter."""
    step = compile_lockstep(llama(1, F32), llama_loss, batches()[0], {"dp_shard": 2},
                            passes={"cast": {"param_dtype": "bfloat16"}})
    program = step.train["step"].program
    for node, item in zip(program.placeholders(), program.inputs, strict=True):
        if item.kind == "parameter":
            stored = step.state[f"model.{item.name}"].local
            assert {t.dtype for t in stored.values()} == {ir.example(node).dtype} == {F32}
    assert any(n.target is COPY for n in program.calls())
