"""Bisection: planted bugs are found at the exact node, and the script of each fails until the bug is gone."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from commands import call
from pipelines import pipeline_of
from short_runs import options
from tool_runs import PLAN, case, loss_fn

from compiler_trainer.bisect.case import at_start, on_its_ranks
from compiler_trainer.bisect.find import Finding, bisect
from compiler_trainer.bisect.script import Inexpressible, Text, write
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import passes_on, resolve_auto
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import MeshConfig, OptimConfig, PassesConfig
from compiler_trainer.config.validate import stated
from compiler_trainer.training.anomalies import Lost
from compiler_trainer.training.trainer import train
from passes import rules
from passes.ir import ir
from passes.ir.printer import op_name
from passes.ir.stages import Stage
from passes.ops import reshard
from passes.sharding.convert import _Steps
from passes.sharding.partition import GraphBuilder


def find(**options) -> Finding | None:
    model, batch = case()
    return bisect(model, loss_fn, batch, **options)


TP = {"mesh": {"tp": 2}, "passes": {"shard": {"plan": PLAN, "sequence_parallel": False}}}


def exit_code(path: Path) -> int:
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(path))
    return done.value.code


def found_and_mended(folder: Path, plant: Callable[[pytest.MonkeyPatch], None], **options) -> Finding:
    """Return the finding of a planted bug; its script exits with 1 while the bug is there and with 0 afterwards."""
    path = folder / "repro.py"
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        finding = find(**options)
        assert finding is not None and finding.piece is not None
        write(finding.piece, path, "what went wrong")
        assert exit_code(path) == 1
    assert exit_code(path) == 0
    return finding


def at(finding: Finding) -> tuple[str, str, str, str]:
    """Return kind, pass, operator and module."""
    return finding.kind, finding.pass_name, op_name(finding.node.target), ir.module_path(finding.node)


def nodes_in(finding: Finding) -> int:
    return sum(node.op == "call_function" for node in finding.piece.sketch.graph.nodes)


# ---- planted bugs ----------------------------------------------------------------------------------


def test_a_wrong_rule_is_found_at_its_operator(tmp_path):
    right = rules.RULES["linear"]

    def wrong(node):
        rule = right(node)
        return replace(rule, reduced=dict.fromkeys(rule.reduced, "max"))  # wrong: terms have to be added

    finding = found_and_mended(tmp_path, lambda patch: patch.setitem(rules.RULES, "linear", wrong), **TP)
    assert at(finding) == ("differs", "shard", "linear", "down")
    assert nodes_in(finding) == 1 and finding.mismatch.difference > 0.1
    assert "max(tp)" in str(finding) and ">" in str(finding) and "tool_runs.py:" in str(finding)


def test_a_mask_left_out_is_found_at_the_operator_that_needs_it(tmp_path):
    def plant(patch):
        patch.setattr(GraphBuilder, "fill_padding", lambda self, x, spec, fill, dims=None: x)

    finding = found_and_mended(tmp_path, plant, mesh={"dp_shard": 2})  # three rows on two ranks
    assert at(finding) == ("differs", "shard", "sum.dim_IntList", "")
    assert nodes_in(finding) == 1


@dataclass(frozen=True)
class DropSum(ir.Pass):
    """A pass that drops the first reduction while the bug is planted."""

    name = "drop"
    takes = (Stage.LOCAL,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        for psum in [node for node in program.calls() if node.target is reshard.psum][:drops]:
            psum.replace_all_uses_with(psum.args[0])
            program.graph.erase_node(psum)
        program.module.recompile()
        return program, ir.Report()


drops = 0


def test_a_dropped_reduction_is_found_where_its_terms_are_used(tmp_path):
    pipeline = pipeline_of(passes_on(build(PassesConfig, TP["passes"]), False), model=case()[0])
    forward, *rows = pipeline.rows
    pipeline = replace(pipeline, rows=(replace(forward, passes=(*forward.passes, DropSum())), *rows))
    finding = found_and_mended(
        tmp_path, lambda patch: patch.setattr(sys.modules[__name__], "drops", 1), mesh={"tp": 2}, passes=pipeline
    )
    assert at(finding) == ("differs", "drop", "add.Tensor", "")
    assert "was      %add_tensor = add.Tensor(%embedding_default, %psum_default)" in str(finding)
    assert "is       %add_tensor = add.Tensor(%embedding_default, %linear_default_2)" in str(finding)
    assert nodes_in(finding) == 2  # the node with the terms, and the dropped sum


def test_a_copy_that_is_not_varied_is_illegal_at_its_use(tmp_path):
    right = _Steps.make_replicate

    def wrong(self, target):
        self.has_grad = self.has_grad and "norm" not in self.original.name
        right(self, target)

    finding = found_and_mended(tmp_path, lambda patch: patch.setattr(_Steps, "make_replicate", wrong), mesh={"dp_replicate": 2})
    assert at(finding) == ("illegal", "shard", "rms_norm", "norm") and nodes_in(finding) <= 2


def test_a_wrong_gradient_of_a_boundary_operator_is_found_at_its_call(tmp_path):
    right = reshard.reduce_scatter  # the derivative of `all_gather`

    def plant(patch):
        patch.setattr(reshard, "reduce_scatter", lambda *gradient_and_how: right(*gradient_and_how) / 2)

    finding = found_and_mended(tmp_path, plant, mesh={"dp_shard": 2})
    assert at(finding) == ("differs", "joint", "all_gather", "down")
    assert nodes_in(finding) == 4  # the node, and the loss of its result


# ---- not finite, crash, nothing ----------------------------------------------------------------------


def test_a_model_that_is_not_finite_is_told_from_a_wrong_pass():
    model, batch = case()

    def loss(model, batch):
        return loss_fn(model, batch) + (model(batch["tokens"]) * 0 - 1.0).sqrt().sum()

    finding = bisect(model, loss, batch)
    assert at(finding)[:3] == ("not finite", "capture", "sqrt")
    assert finding.piece is None


def test_an_infinite_mask_is_not_taken_for_the_fault():
    model, batch = case()

    def loss(model, batch):
        x = model(batch["tokens"])
        hidden = torch.where(x > 0, x, -torch.inf).softmax(-1)
        return loss_fn(model, batch) + hidden.sum() * 0 + (x * 0 - 1.0).log().sum()

    finding = bisect(model, loss, batch)
    assert at(finding)[:3] == ("not finite", "capture", "log")


def test_a_crash_names_the_node_and_its_piece_crashes_alike(tmp_path):
    def broken(node):
        raise KeyError("no such factor")

    finding = found_and_mended(tmp_path, lambda patch: patch.setitem(rules.RULES, "tanh", broken), **TP)
    assert finding.kind == "crash" and op_name(finding.node.target) == "tanh"
    assert nodes_in(finding) == 2 and "no such factor" in finding.message  # the node, and a linear layer that reads it


def test_nothing_is_found_where_nothing_is_wrong():
    assert find(**TP) is None


def test_the_microbatch_that_is_not_finite_is_followed():
    model, batch = case()
    batch["wanted"][1] = torch.inf
    lines = []
    finding = bisect(model, loss_fn, batch, microbatches=3, tell=lines.append)
    assert (finding.kind, finding.pass_name) == ("not finite", "capture") and "microbatch 2 of 3 is followed" in lines


@pytest.mark.parametrize(("mesh", "ranks"), [
    (MeshConfig(dp_shard=2, ep=2), 2), (MeshConfig(dp_shard=4, ep=2, tp=2), 8), (MeshConfig(ep=2), 2), (MeshConfig(tp=2), 2)])
def test_ranks_are_those_of_the_mesh(mesh, ranks):
    """The axis `ep` takes its ranks from other axes."""
    cfg = to_config(compose(["model=moe_debug", "cluster=cpu"]))
    cfg = on_its_ranks(replace(resolve_auto(cfg, on_gpu=False), mesh=mesh))
    assert stated(cfg.mesh) == ranks and cfg.mesh.ep == mesh.ep


def test_options_are_bisected_in_fp64_next_to_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = at_start(["model.dim=8", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=2", "cluster=cpu"])
    assert found.cfg.passes.cast.param_dtype is None and found.model.output.weight.dtype == torch.float64


def test_the_command_line_writes_a_script_and_exits_with_1(capsys, tmp_path):
    def broken(node):
        raise KeyError("no such factor")

    small = "model.dim=8 model.n_layers=1 model.n_heads=2 model.n_kv_heads=2 train.seq_len=8 train.global_batch_size=2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rules.RULES, "rms_norm", broken)
        assert call("bisect", *small.split(), "mesh.tp=2", f"run.dir={tmp_path}") == 1
        assert exit_code(tmp_path / "repro.py") == 1
    assert exit_code(tmp_path / "repro.py") == 0
    said, told = capsys.readouterr()
    assert "crash: pass" in said and "%rms_norm" in said and f"python {tmp_path / 'repro.py'}" in said
    needs, *stages = [line.split(" s: ")[1] for line in told.splitlines()]
    held = "every value of all ranks, before and after a pass"
    assert re.fullmatch(rf"needs about 0\.0\d GiB: {held} \(measured on 3 to 20 million parameters\)", needs)
    assert [stage.split(": ")[1] for stage in stages[:2]] == ["capture", "forward, cast"] and stages[-1].endswith(": forward, place")
    count = int(stages[0].split()[2].rstrip(":"))
    assert [stage.split(":")[0] for stage in stages] == [f"{i + 1} of {count}" for i in range(len(stages))]


@pytest.mark.parametrize(("name", "rule"), [("strangers::double", None), ("aten::tanh", "...k -> ...k")])
def test_operators_and_rules_of_the_user_s_have_no_script(name, rule, monkeypatch):
    """A script without them would fail in another way, or not at all."""
    if rule is None:
        torch.library.custom_op(name, lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor").register_fake(torch.empty_like)
    else:
        monkeypatch.setitem(rules.ADDED, name, rule)
    space, operator = name.split("::")
    target = getattr(getattr(torch.ops, space), operator).default
    with pytest.raises(Inexpressible, match="is of a module that a script does not import"):
        Text().of(target)


def test_a_batch_entry_without_sequences_is_refused():
    model, batch = case()
    with pytest.raises(UserError, match=r"batch\['scale'\]: is a scalar; give it an entry for each sequence"):
        bisect(model, loss_fn, batch | {"scale": torch.ones(())})


def test_pipeline_stages_are_refused():
    with pytest.raises(UserError, match="mesh.pp: is 2, but bisect follows a single program"):
        bisect(torch.nn.Linear(2, 2), lambda m, b: m(b["x"]).sum(), {"x": torch.ones(2, 2)}, mesh={"pp": 2})


def test_the_command_line_refuses_an_option_that_does_not_exist(capsys):
    assert call("bisect", "model.dimm=8") == 2
    assert capsys.readouterr().err == "error: model.dimm: no such option; did you mean 'dim'?\n"


def test_the_node_at_which_a_run_lost_its_numbers_is_found_from_its_folder(capsys, tmp_path):
    cfg = options(tmp_path / "run")
    cfg = replace(cfg, optim=OptimConfig(lr=1e30), checkpoint=replace(cfg.checkpoint, interval=1))
    with pytest.raises(Lost, match="at step 2"):
        train(cfg)
    assert call("bisect", tmp_path / "run") == 1
    said = capsys.readouterr().out
    assert "not finite: pass capture of program forward" in said and "at       %" in said
