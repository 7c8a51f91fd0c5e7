"""Runs of passes: order, records, refusals that name the pass, and dumps."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from joint_programs import example, loss_fn
from torch import Tensor, nn

from compiler_trainer.capture.capture import capture
from passes.autograd.joint import Joint
from passes.check.numeric import run
from passes.check.runner import Dumper, PassRecord, check_order, run_passes
from passes.cost.accounting import Traffic
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.printer import print_program
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.sharding.collectives import Collectives
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard
from passes.trace.abstract_eval import abstract_eval

PASSES: tuple[ir.Pass, ...] = (Normalize(), Place(), Shard(), Joint(), Collectives())
NAMES = ["capture", "normalize", "place", "shard", "joint", "collectives"]


@functools.cache
def fresh() -> tuple[ir.Program, ir.Context, dict[str, Tensor]]:
    """Return a captured program of one block, and full values of its inputs."""
    model, batch = example(n_blocks=1)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    return *capture(model, loss_fn, batch, torch.device("cpu")), values


def captured(**mesh: int) -> tuple[ir.Program, ir.Context, dict[str, Tensor]]:
    """Return a copy of the captured program, on a mesh."""
    program, ctx, values = fresh()
    return replace(program.copy(), mesh=Mesh.of(mesh)), ctx, values


@dataclass(frozen=True)
class Fake(ir.Pass):
    """A pass that applies a given rewrite."""

    does: Callable[[ir.Program], ir.Program] = lambda program: program
    name: str = "fake"
    takes: tuple[Stage, ...] = tuple(Stage)
    gives: Stage | None = None

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        return self.does(program), ir.Report()


def refusal(rewrite: Callable[[ir.Program], ir.Program], **options) -> str:
    """Return the error that a captured program raises in a pass."""
    program, ctx, values = captured()
    with pytest.raises(ir.CompileError) as error:
        run_passes("test", [Fake(rewrite)], program, ctx, inputs=values, **options)
    return str(error.value)


# ---- a full run ------------------------------------------------------------------------------------


def test_every_pass_is_recorded_verified_in_numbers_and_observed():
    program, ctx, values = captured(dp_shard=2)
    observed: list[tuple[ir.Program, PassRecord]] = []
    final, records = run_passes("step", PASSES, program, ctx, verify="numeric", inputs=values,
                                observe=lambda *stage: observed.append(stage))
    assert [r.name for r in records] == NAMES and {r.program for r in records} == {"step"}
    assert [record for _, record in observed] == records and observed[-1][0] is final
    assert final.stage is Stage.EXPLICIT
    for before, after in zip(records, records[1:], strict=False):
        assert after.nodes_before == before.nodes_after
    gradients = {f"gradient {name}" for name, kind in ((i.name, i.kind) for i in final.inputs) if kind == "parameter"}
    for record in records:
        assert record.errors.keys() == {"loss loss"} | gradients
        assert max(record.errors.values()) < 1e-5


class Rounded(torch.autograd.Function):
    """Rounds; its author's gradient is 0.7 of the incoming one, its derivative would be zero."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.7


class Rounding(nn.Module):
    """A linear layer with a rounded weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-3, 3, 15).view(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Rounded.apply(self.weight))


def test_the_gradient_of_a_custom_function_is_its_author_s_from_capture_to_the_end():
    model, batch = Rounding(), {"x": torch.arange(20.0).view(4, 5)}

    def square(m, b):
        return m(b["x"]).square().mean()

    program, ctx = capture(model, square, batch, torch.device("cpu"))
    values = {"weight": model.weight.detach(), **batch}
    (expected,) = torch.autograd.grad(square(model, batch), [model.weight])
    assert expected.abs().max() > 1
    torch.testing.assert_close(run(program, ctx, values)["gradient", "weight"].value, expected)
    _, records = run_passes("step", PASSES, replace(program, mesh=Mesh.of({"dp_shard": 2})), ctx, verify="numeric",
                            inputs=values)
    assert [record.name for record in records if "gradient weight" not in record.errors] == ["shard"]
    assert max(max(record.errors.values()) for record in records) < 1e-6


def test_what_draws_random_numbers_is_compared_once_they_are_keyed():
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), {"x": torch.ones(4, 4)}
    program, ctx = capture(model, lambda m, b: m(b["x"]).square().mean(), batch, torch.device("cpu"))
    values = {**dict(model.named_parameters()), **batch, "seed": torch.tensor(3)}
    _, records = run_passes("step", PASSES, replace(program, mesh=Mesh.of({"dp_shard": 2})), ctx, verify="numeric",
                            inputs=values)
    assert [record.name for record in records if record.errors] == ["place", "shard", "joint", "collectives"]


def test_records_hold_what_the_program_will_cost():
    program, ctx, _ = captured(dp_shard=2)
    _, records = run_passes("step", PASSES, program, ctx)
    by_name = {r.name: r for r in records}
    assert by_name["normalize"].accounting.traffic == ()
    joint, expanded = by_name["joint"].accounting, by_name["collectives"].accounting
    parameters = sum(p.numel() for p in example(n_blocks=1)[0].parameters())
    gathered, reduced = (next(t for t in joint.traffic if t.kind == kind) for kind in ("all_gather", "reduce_scatter"))
    assert gathered.calls == reduced.calls == sum(i.kind == "parameter" for i in program.inputs)
    assert parameters * 2 <= gathered.sent_bytes <= parameters * 2 * 1.2  # half of each, in 4 bytes, with padding
    assert joint.traffic == expanded.traffic
    recomputed = 2 * 3 * 4 * 4 * 5  # the backward of attention begins with q @ k again: 3 rows, 4 tokens, 5 wide
    assert joint.flops["backward"] == 2 * joint.flops["forward"] + recomputed


# ---- order -------------------------------------------------------------------------------------------


def test_order_is_checked_when_built():
    check_order(PASSES, Stage.CAPTURED)
    with pytest.raises(ValueError) as error:
        check_order((Normalize(), Shard(), Place()), Stage.CAPTURED)
    assert str(error.value) == "pass 'shard' takes a placed program, not a normalized one: it comes too early"
    with pytest.raises(ValueError, match="pass 'normalize' takes a captured program, not a placed one: it comes too late$"):
        check_order(PASSES, Stage.PLACED)


def test_passes_out_of_order_do_not_run():
    program, ctx, _ = captured()
    with pytest.raises(ValueError, match="pass 'shard' takes"):
        run_passes("step", (Fake(lambda p: pytest.fail("ran")), Shard()), program, ctx)


def test_a_program_is_of_the_stage_that_a_pass_gives():
    program, ctx, _ = captured()
    after, _ = run_passes("step", (Fake(gives=Stage.NORMALIZED),), program, ctx)
    assert after.stage is Stage.NORMALIZED and program.stage is Stage.CAPTURED


# ---- refusals ------------------------------------------------------------------------------------------


def fail(error: Exception) -> Callable[[ir.Program], ir.Program]:
    def rewrite(program: ir.Program) -> ir.Program:
        raise error

    return rewrite


def test_an_exception_names_the_pass():
    assert refusal(fail(KeyError("x"))) == "fake: KeyError: 'x'"


def test_an_exception_names_the_node_that_the_pass_was_at_and_keeps_its_cause():
    def rewrite(program: ir.Program) -> ir.Program:
        for node in program.calls():
            node.target(*range(len(node.args)))  # numbers for tensors
        return program

    program, ctx, _ = captured()
    with pytest.raises(ir.CompileError, match=r"^fake: %\w+ \(joint_programs.py:\d+\) \w+: ") as error:
        run_passes("step", [Fake(rewrite)], program, ctx)
    assert isinstance(error.value.__cause__, (RuntimeError, TypeError))


def test_a_compile_error_is_left_as_it_is():
    program, ctx, _ = captured()
    refusal = ir.Refused("inner", None, "no such thing")
    with pytest.raises(ir.Refused) as raised:
        run_passes("step", [Fake(fail(refusal))], program, ctx)
    assert raised.value is refusal


def scale_the_loss(program: ir.Program) -> ir.Program:
    """Rewrite the program legally in every respect but its value."""
    program = program.copy()
    (loss,) = program.results()
    with program.graph.inserting_after(loss):
        twice = program.graph.call_function(torch.ops.aten.mul.Tensor, (loss, 2.0))
    ir.set_record(twice, ir.record(loss))
    loss.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    return program


def test_a_graph_left_as_it_is_is_not_recomputed_and_its_new_stage_is_checked(monkeypatch):
    program, ctx, _ = captured(tp=2)
    program, _ = run_passes("test", [Normalize(), Place(), Shard(), Joint()], program, ctx)
    calls = []
    monkeypatch.setattr("passes.check.verify.abstract_eval", lambda *arguments: calls.append(arguments) or abstract_eval(*arguments))
    unchanged, again, wrong = Fake(lambda p: p), Fake(lambda p: p), Fake(lambda p: p, gives=Stage.EXPLICIT)
    _, (first, second) = run_passes("test", [unchanged, again], program, ctx)
    assert len(calls) == 1
    assert first.accounting == second.accounting
    with pytest.raises(ir.CompileError, match="is a reshard operator"):
        run_passes("test", [unchanged, wrong], program, ctx)
    changed = Fake(lambda p: replace(p, inputs=(replace(p.inputs[0], spec=Spec.whole((7,))), *p.inputs[1:])))
    with pytest.raises(ir.CompileError, match="is of shape"):
        run_passes("test", [unchanged, changed], program, ctx)


def drop_all(program: ir.Program) -> ir.Program:
    program = program.copy()
    program.graph.output_node().args = ((),)
    for node in reversed(list(program.calls())):
        program.graph.erase_node(node)
    program.module.recompile()
    return replace(program, outputs=())


def test_a_pass_that_drops_everything_is_found():
    assert "loss 'loss', which" in refusal(drop_all) and "is neither returned nor stored" in refusal(drop_all)


def test_wrong_numbers_are_found_where_numbers_are_verified():
    program, ctx, _ = captured()
    run_passes("test", [Fake(scale_the_loss)], program, ctx, verify="spec")
    assert re.match(r"fake: %mul.* loss 'loss' is off by 1 of its largest entry", refusal(scale_the_loss, verify="numeric"))


def record_bf16(program: ir.Program) -> ir.Program:
    program = program.copy()
    linear = next(n for n in program.calls() if n.target is torch.ops.aten.linear.default)
    ir.set_value(linear, ir.example(linear).to(torch.bfloat16))
    return program


@pytest.mark.parametrize("verify", ["spec", "numeric"])
def test_a_wrong_record_is_found_after_the_pass_that_made_it(verify):
    assert re.match(r"fake: %linear \(joint_programs.py:\d+\) records bf16\[.*\], computes f32\[", refusal(record_bf16))
    program, ctx, _ = captured()
    run_passes("test", [Fake(record_bf16)], program, ctx, verify="none")


def change_in_place(program: ir.Program) -> ir.Program:
    next(program.calls()).name = "renamed"
    return program


@pytest.mark.parametrize("rewrite", [change_in_place, lambda p: (p.copy(), change_in_place(p))[0]])
def test_a_pass_that_changes_its_input_is_refused(rewrite):
    assert refusal(rewrite) == "fake: changed the program it was given; a pass rewrites a copy"


def test_numbers_need_inputs():
    program, ctx, _ = captured()
    with pytest.raises(ValueError, match=r"give run_passes\(inputs="):
        run_passes("step", (), program, ctx, verify="numeric")


# ---- dumps ---------------------------------------------------------------------------------------------


ENDINGS = ("txt", "json", "costs.json", "graph.json")


def dump(folder: Path) -> ir.Program:
    program, ctx, _ = captured(dp_shard=2)
    return run_passes("step", PASSES, program, ctx, observe=Dumper(folder))[0]


def test_every_stage_is_written_and_the_text_is_the_same_in_every_run(tmp_path):
    final = dump(tmp_path / "a")
    dump(tmp_path / "b")
    stages = [f"{i:02d}_step_{name}" for i, name in enumerate(NAMES)]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(f"{s}.{end}" for s in stages for end in ENDINGS)
    assert (tmp_path / "a" / f"{stages[-1]}.txt").read_text() == print_program(final)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_a_report_holds_counts_notes_bytes_flops_and_memory(tmp_path):
    dump(tmp_path)
    report = json.loads((tmp_path / "05_step_collectives.json").read_text())
    assert (report["program"], report["name"]) == ("step", "collectives")
    assert report["report"]["counts"]["all_gather"] == 7
    costs = report["accounting"]
    assert {(t["kind"], t["axis"]) for t in costs["traffic"]} == {
        ("all_gather", "dp_shard"), ("all_reduce", "dp_shard"), ("reduce_scatter", "dp_shard")}
    assert set(costs["traffic"][0]) == set(Traffic.__dataclass_fields__)
    assert costs["flops"].keys() == {"forward", "backward"}
    assert 0 < costs["input_bytes"] < costs["peak_bytes"]
    assert re.search(rf"^%{costs['peak_node']} = ", (tmp_path / "05_step_collectives.txt").read_text(), re.M)
    assert any("dp_shard" in note for note in json.loads((tmp_path / "03_step_shard.json").read_text())["report"]["notes"])


@pytest.mark.full
def test_stages_are_artifacts_of_torch_trace(tmp_path):
    tests = Path(__file__).parents[2]
    script = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(tests / 'support')]}; import test_runner as t; " \
             f"from pathlib import Path; t.dump(Path({str(tmp_path / 'graphs')!r}))"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tests.parent, timeout=120,
                   env={**os.environ, "TORCH_TRACE": str(tmp_path / "trace")})
    (log,) = (tmp_path / "trace").iterdir()
    entries = re.findall(r'^V.*?\] (\{"artifact".*\})\n((?:\t.*\n?)*)', log.read_text(), re.M)
    artifacts = {(json.loads(head)["artifact"]["name"], json.loads(head)["artifact"]["encoding"]): payload
                 for head, payload in entries}
    for stage in (f"{i:02d}_step_{name}" for i, name in enumerate(NAMES)):
        text = (tmp_path / "graphs" / f"{stage}.txt").read_text().rstrip("\n")
        assert artifacts[stage, "string"].replace("\t", "").rstrip("\n") == text
        assert json.loads(artifacts[stage, "json"])["name"] == stage.rpartition("_")[2]
    tlparse = Path(sys.executable).parent / "tlparse"
    subprocess.run([tlparse, log, "-o", tmp_path / "parsed", "--no-browser", "--strict"], check=True, timeout=60)
    index = (tmp_path / "parsed/index.html").read_text()
    assert all(f"{i:02d}_step_{name}" in index for i, name in enumerate(NAMES))
