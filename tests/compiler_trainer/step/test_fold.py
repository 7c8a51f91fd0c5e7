"""One of many equal layers stands for others while passes run: in the end, the program is the same."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from itertools import groupby

import pytest
import torch
import zoo
from oracle import batches, compile_lockstep, llama, llama_loss, train_step
from torch import fx, nn

from compiler_trainer.config.device import passes_on
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.inspect.dumps import CALLS, load_stages
from compiler_trainer.inspect.glance import peak_line
from compiler_trainer.pipeline import build_pipeline
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.exported import export_once
from compiler_trainer.step.programs import compile_programs
from passes.check.runner import Dumper, run_passes
from passes.ir import ir
from passes.ir.bodies import Body, calls_of, flatten, is_view
from passes.ir.folds import Fold, number_in, renumbered
from passes.ir.layer import Layer
from passes.ir.stages import Stage
from passes.lower import unfold
from passes.lower.unfold import Unfold


def request(model, loss_fn=llama_loss, fold=True, mesh=(), passes=(), optim=(), **fields):
    """Return the request of a model whose equal layers may be folded."""
    return CompileRequest(
        model=model,
        loss_fn=loss_fn,
        batch=fields.pop("batch", batches(1, rows=8)[0]),
        mesh=mesh_of(dict(mesh)),
        passes=passes_on(build(PassesConfig, {**dict(passes), "fold_layers": fold}, "passes"), on_gpu=False),
        optim=build(OptimConfig, dict(optim), "optim"),
        **fields,
    )


def exported(job):
    """Return the captured program of a request, folded if possible."""
    return export_once(job, build_pipeline(job).folding)


def programs(job, observe=None):
    """Return the programs of a step and of evaluation, and the report."""
    made = compile_programs(job, observe=observe)
    return {name: program for name, (program, _) in made.programs.items()}, made.report


def calls(program):
    """Return every call in order: its body, its numbered values, and its role."""
    number = {node: i for i, node in enumerate(program.graph.nodes)}
    keys = {node: node.target.key if isinstance(node.target, Body) else str(node.target) for node in program.calls()}
    operands = (fx.map_arg((n.args, n.kwargs), lambda m: f"%{number[m]}") for n in program.graph.nodes)
    return [(n.op, keys.get(n), str(o), ir.record(n).layer) for n, o in zip(program.graph.nodes, operands)]


def origins(program):
    """Return the number of operators, except views, by layer, role, module and recomputation."""
    nodes = [node for node in flatten(program).calls() if not is_view(node)]
    return Counter((str(n.target), ir.layer(n), ir.role(n), ir.module_path(n), ir.parameter(n)) for n in nodes)


DTYPE = {"param_dtype": "bfloat16"}
EVEN = {"dim": 64, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 64}  # in blocks of 16
CASES = {
    "one rank": dict(n=8),
    "one rank, full, microbatches": dict(n=8, passes={"remat": {"policy": "full"}, "cast": DTYPE}, microbatches=2),
    "one rank, offload": dict(n=12, passes={"remat": {"policy": "offload"}}),
    "one rank, float8": dict(n=12, model=EVEN, passes={"cast": DTYPE | {"float8": "tensorwise", "float8_min_size": 1}}),
    "one rank, loss in chunks": dict(n=8, passes={"chunk_loss": {"chunks": 5}}),
    "one rank, two policies": dict(n=16, passes={"remat": {"policy": "selective", "layers": {"layers.[0-7]": "full"}}}),
    "fsdp": dict(n=12, mesh={"dp_shard": 2}, passes={"remat": {"policy": "selective"}}),
    "fsdp x tp, selective, microbatches": dict(
        n=12, mesh={"dp_shard": 2, "tp": 2}, passes={"remat": {"policy": "selective"}}, microbatches=2
    ),
    "hsdp": dict(n=12, mesh={"dp_replicate": 2, "dp_shard": 2}),
    "cp, bf16, full": dict(n=12, mesh={"cp": 2, "dp_replicate": 2}, passes={"remat": {"policy": "full"}, "cast": DTYPE}),
    "four axes": dict(n=12, mesh={"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}),
    "offload, layers take turns": dict(
        n=18, mesh={"dp_replicate": 2, "cp": 2}, passes={"remat": {"policy": "offload"}}
    ),
    "two policies": dict(n=26, mesh={"dp_shard": 2}, passes={"remat": {"policy": "selective", "layers": {
        "layers.[0-9]": "attention", "layers.1[0-6]": "attention"}}}),
    "float8": dict(n=16, model=EVEN, mesh={"dp_shard": 2, "tp": 2},
                   passes={"cast": DTYPE | {"float8": "tensorwise", "float8_min_size": 1}}),
    "two layers ahead": dict(n=16, mesh={"dp_shard": 2}, passes={"communication": {"prefetch": 2}}),
    "loss in chunks": dict(n=12, mesh={"dp_shard": 2, "tp": 2}, passes={"chunk_loss": {"chunks": 5}}),
    "none ahead": dict(n=12, mesh={"dp_shard": 2}, passes={"communication": {"prefetch": 0}}),
    "eight bits": dict(n=12, model=EVEN, optim={"name": "adamw8bit", "block": 8}),
}


@functools.cache
def compiled(case, fold):
    """Return the programs, the number of layers left out, and the report on each pass."""
    how = dict(CASES[case])
    job = request(llama(how.pop("n"), **how.pop("model", {})), fold=fold, **how)
    result, report = programs(job)
    assert not any("stands for" in note for note in report.notes)
    return result, exported(job).program.folds, report.passes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.full
@pytest.mark.sweep(6)
def test_the_program_is_that_of_all_layers(case):
    (whole, none, _), (folded, fold, _) = compiled(case, False), compiled(case, True)
    assert none == () and [f.left_out >= 1 for f in fold] == [True]
    assert folded.keys() == whole.keys()
    for name, program in whole.items():
        assert folded[name].inputs == program.inputs and folded[name].outputs == program.outputs
        assert calls(folded[name]) == calls(program)
        assert origins(folded[name]) == origins(program)
        assert not folded[name].folds


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_layers_of_others_stand_for_each_other_on_one_rank(name):
    """The first layer has another input than its own."""
    config = {"llama": zoo.tf.LlamaConfig, "qwen3": zoo.tf.Qwen3Config}[name]
    sizes = zoo.COMMON | {"num_hidden_layers": 8, "num_key_value_heads": 2}
    model = zoo.tf.AutoModelForCausalLM.from_config(config(**sizes, use_cache=False))
    _, report = programs(request(model, zoo.loss_fn, batch=zoo.batch(), evaluate=False))
    assert report.notes == [] and "unfold" in {p["name"] for p in report.passes}


@pytest.mark.full
def test_what_a_layer_stands_for_is_counted():
    """After every pass, FLOPs, bytes sent and peak memory are those of all layers."""
    whole, folded = (
        [(p["program"], p["name"], p["accounting"]) for p in compiled("fsdp", fold)[2]] for fold in (False, True)
    )
    for program, step, result in folded:
        (expected,) = [a for p, s, a in whole if (p, s) == (program, "segment" if step == "unfold" else step)]
        assert result | {"peak_node": ""} == expected | {"peak_node": ""}, (program, step)


@pytest.mark.full
def test_it_trains_to_the_bit():
    data = batches(rows=8)
    whole, folded = (
        compile_lockstep(llama(12), llama_loss, data[0], {"dp_shard": 2}, passes={"fold_layers": fold}) for fold in (False, True)
    )
    assert train_step(whole, data) == train_step(folded, data)
    assert whole(data[0]) == folded(data[0])
    for name, value in whole.state_dict().items():
        assert torch.equal(value, folded.state_dict()[name])


@pytest.mark.full
def test_patterns_of_one_policy_do_not_keep_layers_apart():
    layers = {f"layers.{n}": "full" for n in range(14)}
    job = request(llama(16), passes={"remat": {"policy": "selective", "layers": layers}}, evaluate=False)
    assert exported(job).program.folds[0].left_out == 14 - 6
    programs(job)
    with pytest.raises(UserError, match="no layer is named like 'layers.16'"):
        programs(request(llama(16), passes={"remat": {"layers": {"layers.16": "full"}}}, evaluate=False))


@pytest.mark.full
def test_passes_see_few_layers_and_dumps_say_so():
    seen = []
    programs(request(llama(16)), lambda program, record: seen.append((record, program)))
    for stage, run in groupby(seen, key=lambda pair: pair[1].folds):
        for record, program in run:
            layers = {number_in(i.name, "layers") for i in program.inputs if i.kind == "parameter"} - {None}
            assert len(layers) == (7 if stage else 16), record.name
    assert str(*seen[0][1].folds) == "layers.3 stands for layers.3 to layers.12"


@pytest.mark.full
def test_dumps_are_read_with_the_costs_of_all_layers(tmp_path):
    programs(request(llama(12), evaluate=False), Dumper(tmp_path))
    stages = load_stages(tmp_path)
    assert [stage.name for stage in stages][-2:] == list(CALLS)
    for stage in stages[:-2]:
        assert str(*stage.graph.folds) == "layers.3 stands for layers.3 to layers.8"
        assert peak_line(stage)[1] == stage.report["accounting"]["peak_bytes"]


class Residual(nn.Sequential):
    """Layers around which their input goes."""

    def forward(self, x):
        return x + torch.tanh(super().forward(x))


class TwoStacks(nn.Module):
    """Layers that read a picture, and layers that read it with tokens."""

    def __init__(self, n=16):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Residual(nn.Linear(6, 6)) for _ in range(n))
        self.layers = nn.ModuleList(Residual(nn.Linear(6, 9), nn.Linear(9, 6)) for _ in range(n))

    def forward(self, x, picture):
        for block in self.blocks:
            picture = block(picture)
        x = x + picture.mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x)
        return x


def two_stacks(fold, **how):
    """Return a step of two stacks, and the losses of three batches."""
    generator = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(4, 5, 6, generator=generator), "picture": torch.randn(4, 3, 6, generator=generator)}
               for _ in range(3)]
    step = compile_lockstep(TwoStacks(), lambda m, b: m(**b).square().mean(), batches[0], {"dp_shard": 2},
                            passes={"fold_layers": fold, **how})
    return step, [step(batch)["loss"] for batch in batches]


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.sample(1)
def test_two_stacks_are_folded_at_once(policy):
    (whole, expected), (folded, losses) = (two_stacks(fold, remat={"policy": policy}) for fold in (False, True))
    assert losses == expected
    for name, value in whole.state_dict().items():
        assert torch.equal(value, folded.state_dict()[name])
    assert folds_of(folded) == "blocks.5 stands for blocks.5 to blocks.10, layers.5 stands for layers.5 to layers.10"
    of_whole = {(p["program"], p["name"]): p for p in whole.report["passes"]}
    for record in folded.report["passes"]:
        other = of_whole[record["program"], "segment" if record["name"] == "unfold" else record["name"]]
        costs, expected_costs = (r["accounting"] | {"peak_node": ""} for r in (record, other))
        assert costs == expected_costs, (record["program"], record["name"])
    assert of_whole["step", "optimize"]["nodes_after"] > 1.3 * nodes_after_update(folded)


def folds_of(step):
    """Return the layers that stand for others."""
    reports = (record["report"] for record in step.report["passes"] if record["name"] == "unfold")
    return next(effect["detail"] for report in reports for effect in report["effects"])


def nodes_after_update(step):
    """Return the number of nodes of a step with its update."""
    return next(record["nodes_after"] for record in step.report["passes"] if record["name"] == "optimize")


# ---- layers that are not folded ----------------------------------------------------------------------


def left_out(model, loss_fn=llama_loss, **how):
    """Return the folds of twelve layers, of which ten must stay."""
    return exported(request(model, loss_fn, **{"mesh": {"dp_shard": 2}, **how})).program.folds


def odd(change):
    """Return twelve layers of which one differs."""
    model = llama(12)
    change(model.layers[6])
    return model


def frozen(layer):
    layer.attention.wq.weight.requires_grad_(False)


def scaled(layer):
    layer.ffn_norm.eps = 1e-3


def narrower(layer):
    layer.attention.wq.weight = nn.Parameter(layer.attention.wq.weight.float())


@pytest.mark.parametrize("change", [frozen, scaled])
@pytest.mark.full
def test_a_layer_in_the_middle_that_is_other(change):
    assert left_out(llama(12)) and not left_out(odd(change))


def test_a_layer_stored_in_another_dtype():
    assert not left_out(odd(narrower), passes={"cast": {"param_dtype": "bfloat16"}})


@pytest.mark.full
def test_a_layer_that_an_option_names():
    for passes in ({"cast": {"modules": {"layers.6": "float32"}, "param_dtype": "bfloat16"}},
                   {"remat": {"modules": {"layers.6.*": "recompute"}}}, {"shard": {"plan": {"layers.6.attention.wq.weight": {"tp": 0}}}}):
        assert not left_out(llama(12), passes=passes)


@pytest.mark.parametrize("passes", [{"remat": {"policy": "every_n"}}, {"remat": {"policy": "budget", "budget_gib": 1}},
                                    {"verify": "numeric"}, {"segment": {"max_nodes": None}}])
@pytest.mark.sample(2)
def test_options_that_treat_layers_by_number_or_all_at_once(passes):
    assert not left_out(llama(12), passes=passes)


def test_a_value_of_a_layer_in_the_middle_that_others_read():
    class Deep(nn.Module):
        def __init__(self, skip):
            super().__init__()
            self.layers, self.skip = nn.ModuleList(nn.Linear(4, 4) for _ in range(14)), skip

        def forward(self, x):
            outputs = []
            for layer in self.layers:
                x = layer(x).sin()
                outputs.append(x)
            return x + outputs[6] if self.skip else x

    def loss(model, batch):
        return model(batch["positions"].to(torch.float32)[:, :4]).square().mean()

    assert left_out(Deep(False), loss) and not left_out(Deep(True), loss)


class Lent(nn.Linear):
    """A layer that is given the weight to use."""

    def forward(self, x, weight):
        return nn.functional.linear(x, weight, self.bias).sin()


class Borrowing(nn.Module):
    """One of many layers uses the first layer's weight, under the name of its own."""

    def __init__(self, borrower):
        super().__init__()
        self.layers, self.borrower = nn.ModuleList(Lent(4, 4) for _ in range(14)), borrower

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x, self.layers[0 if i == self.borrower else i].weight)
        return x


def test_a_layer_that_reads_what_the_first_one_has():
    def loss(model, batch):
        return model(batch["positions"].to(torch.float32)[:, :4].cos()).square().mean()

    assert left_out(Borrowing(None), loss)
    assert not left_out(Borrowing(7), loss)


def test_layers_called_twice_or_tied():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

        def forward(self, x):
            for layer in (*self.layers, *self.layers):
                x = layer(x).sin()
            return x

    def loss(model, batch):
        return model(batch["positions"].to(torch.float32)[:, :4]).square().mean()

    assert not left_out(Twice(), loss)
    tied = llama(12)
    tied.layers[6].attention.wq.weight = tied.layers[2].attention.wq.weight
    assert not left_out(tied)


def test_layers_that_drop_out():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Residual(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(12))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def loss(model, batch):
        return model(batch["positions"].to(torch.float32)[:, :4]).square().mean()

    assert not left_out(Dropping(), loss)


# ---- layers that differ after passes ------------------------------------------------------------------


@functools.cache
def rolled_up():
    """Return the finished step of one rank before it is unfolded."""
    job = request(llama(12), evaluate=False)
    pipeline, captured = build_pipeline(job), exported(job)
    program, _ = run_passes("step", pipeline.lineage("step"), captured.program, captured.ctx)
    assert program.stage is Stage.SEGMENTED and program.folds
    return program, captured.ctx


def call_of_layer(program, number):
    return next(n for body, c in calls_of(program).items() for n in c if ir.layer(n) == Layer("layers", number))


@pytest.mark.full
def test_a_call_on_something_else_is_refused():
    program, ctx = rolled_up()
    program = program.copy()
    call = call_of_layer(program, 3)
    other = call_of_layer(program, 2)
    operand = next(i for i, n in enumerate(call.args) if n.op == "placeholder" and "layers_3" in n.name)
    call.update_arg(operand, other.args[operand])
    with pytest.raises(ir.LayersDiffer, match="layers.3: its part reads "):
        Unfold()(program, ctx)


@pytest.mark.full
def test_another_body_is_refused():
    program, ctx = rolled_up()
    program = program.copy()
    call = call_of_layer(program, 3)
    call.target = dataclasses.replace(call.target, key="another")
    with pytest.raises(ir.LayersDiffer, match="differs from that of the layers around it"):
        Unfold()(program, ctx)


@pytest.mark.full
def test_what_is_read_outside_of_the_layers_is_refused():
    program, ctx = rolled_up()
    program = program.copy()
    result = next(iter(call_of_layer(program, 3).users))
    program.graph.output_node().args = ((*program.graph.output_node().args[0], result),)
    with pytest.raises(ir.LayersDiffer, match="is read outside of the layers"):
        Unfold()(program, ctx)


@pytest.mark.full
def test_what_cannot_be_repeated_is_compiled_whole(monkeypatch):
    """It is reported, trains the same, and the first attempt dumps nothing."""
    def refuse(self, *layers):
        raise ir.LayersDiffer("unfold", None, "planted")

    seen = []
    monkeypatch.setattr(unfold.Writer, "check_order", refuse)
    result, report = programs(request(llama(12)), lambda program, record: seen.append((program, record)))
    whole, _ = programs(request(llama(12), fold=False))
    assert report.finish()["notes"] == ["layers are not folded: unfold: planted"]
    assert not any(program.folds for program, _ in seen)
    assert [record.name for _, record in seen][:2] == ["capture", "cast"]
    assert len(seen) == len(report.passes)
    for name, program in whole.items():
        assert calls(result[name]) == calls(program)


def test_names():
    assert number_in("layers.3.wq", "layers") == number_in("exp_avg.layers.3", "layers") == 3
    assert number_in("sublayers.3.wq", "layers") is None and number_in("layers.x", "layers") is None
    assert renumbered("exp_avg.layers.3.experts.3.w", "layers", 12) == "exp_avg.layers.12.experts.3.w"
    fold = Fold("layers", 3, 2)
    assert [n for n in range(8) if fold.holds(f"layers.{n}.w")] == [4, 5]
