"""Programs as text: a program that was read prints like the original, with the same layouts."""

from __future__ import annotations

import json

import pytest
import torch
from torch import fx, nn

from compiler_trainer.config.schema import ExpertsConfig, ModelConfig
from compiler_trainer.models.llama import Llama
from compiler_trainer.models.loss import loss_fn
from compiler_trainer.step.compile import compile_step
from passes.ir import ir
from passes.ir.bodies import Body, flatten, same_layout
from passes.ir.layer import Layer, Role
from passes.ir.printer import print_program
from passes.ir.record import FIELDS, BodyNode, NodeRecord, Origin, differences
from passes.ir.saved import Unreadable, Unwritable, read, to_text
from passes.ir.spec import Spec
from passes.torch_private import LazyGraphModule, OpOverload

SMALL = ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=32)
ROWS = torch.zeros(4, 16, dtype=torch.int64)
BATCH = {"tokens": ROWS, "labels": ROWS, "positions": torch.arange(16).expand(4, 16).contiguous(), "documents": ROWS}
JOBS = {
    "one rank": ({}, {}, 1),
    "fsdp x tp": ({}, {"dp_shard": 2, "tp": 2}, 1),
    "documents over cp, counted": ({"attention": "documents"}, {"cp": 2}, 2),
    "experts": ({"experts": ExpertsConfig(count=4, top_k=2, width=8)}, {"dp_shard": 2, "ep": 2}, 1),
}


def operators_in(programs) -> set[OpOverload]:
    """Return all operators that programs call, also in their bodies."""
    calls = [node.target for program in programs for node in program.calls()]
    inner = [node.target for target in calls if isinstance(target, Body) for node in target.graph.nodes]
    return {target for target in (*calls, *inner) if isinstance(target, OpOverload)}


def programs(job):
    changes, mesh, microbatches = JOBS[job]
    model = Llama(ModelConfig(**vars(SMALL) | changes))
    step = compile_step(model, loss_fn, BATCH, mesh=mesh, microbatches=microbatches, ranks="lockstep")
    return {name: part.finished for name, part in (step.train | step.evaluation).items()}


RECORD = NodeRecord(
    value=(torch.ones(2, 3).t(), 2, None),
    spec=Spec.whole((3, 2)),
    stands_for="mm",
    phase="backward",
    layer=Layer("layers", 3),
    role=Role("late", "backward", Layer("layers", 2), "layers.2.w"),
    recomputed=True,
    checkpoint="checkpoint.0",
    parameter="layers.3.w",
    stage=1,
    microbatch=2,
    origin=Origin("model.py:41", ("", "layers.3")),
    body_nodes=(BodyNode("mm_3", NodeRecord(torch.ones(2), phase="backward", layer=None)),),
)


@pytest.mark.parametrize("record", [RECORD, NodeRecord()])
def test_every_field_of_a_record_is_read_as_it_was_written(record):
    """A new field of records needs a value above."""
    assert [name for name in FIELDS if getattr(RECORD, name) == getattr(NodeRecord(), name)] == []
    graph = fx.Graph()
    ir.set_record(graph.placeholder("x"), record)
    graph.output(())
    inputs = (ir.Input("x", "batch", Spec.whole((2,))),)
    program = read(to_text({"step": ir.Program(LazyGraphModule(nn.Module(), graph), inputs, ())}))["step"]
    (node,) = program.placeholders()
    assert differences(record, ir.record(node), same_layout) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("job", JOBS)
def test_what_is_read_is_what_was_written(job):
    before = programs(job)
    text = to_text(before)
    after = read(text)
    assert list(after) == list(before) and to_text(after) == text
    for name, program in before.items():
        assert print_program(after[name]) == print_program(program)
        assert print_program(flatten(after[name])) == print_program(flatten(program))
        for old, new in zip(program.graph.nodes, after[name].graph.nodes, strict=True):
            assert not differences(ir.record(old), ir.record(new), same_layout)
        assert [(i.kind, i.roles, i.runs, i.value is None) for i in after[name].inputs] == [
            (i.kind, i.roles, i.runs, i.value is None) for i in program.inputs
        ]
    assert operators_in(after.values()) == operators_in(before.values())


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.abs() * 0.5

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Embedding(32, 8)
        self.table = torch.arange(6.0).reshape(2, 3).t()[:, 1]

    def forward(self, tokens):
        return Halved.apply(self.look(tokens)) * self.table.sum()


def test_constants_keep_their_values():
    step = compile_step(Net(), lambda model, batch: model(batch["tokens"]).mean(), {"tokens": ROWS}, ranks="lockstep")
    try:
        after = read(to_text({"step": step.train["step"].finished}))["step"]
    except Unwritable as error:
        assert "every process defines again" in str(error)
        return
    for old, new in zip(step.train["step"].finished.inputs, after.inputs, strict=True):
        assert (old.value is None) == (new.value is None)
        assert old.value is None or torch.equal(old.value, new.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [("aten.mm.default", "aten.mm.nothing"), ("aten.mm.default", "os.system.x"), ("operator.getitem", "operator.call")],
)
def test_a_text_of_what_there_is_not_is_refused(old, new):
    text = to_text(programs("one rank"))
    assert old in text
    with pytest.raises(Unreadable):
        read(text.replace(old, new))


def test_what_is_read_is_never_run():
    """Names lead only to operators, listed functions, dtypes and layouts."""
    text = json.loads(to_text(programs("one rank")))
    targets = {node[2] for body in text["bodies"] for node in body[4] if node[1] == "call_function"}
    assert targets and all(isinstance(target, str) for target in targets)
    assert all(isinstance(op, OpOverload) for op in operators_in(read(json.dumps(text)).values()))
    text["tables"]["layouts"][0][3] = "load"
    with pytest.raises(Unreadable, match="not a dtype, layout or memory format"):
        read(json.dumps(text))
