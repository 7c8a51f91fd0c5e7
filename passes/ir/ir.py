"""The program that passes rewrite: an FX graph of plain tensors, and a description of each input and output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx

from passes.ir.folds import Fold
from passes.ir.layer import Layer, Role
from passes.ir.mesh import Mesh
from passes.ir.order import PLAIN, Order
from passes.ir.record import UNSET, record, set_record, update
from passes.ir.record import copy_origin as copy_origin
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.ir.task import Task
from passes.torch_private import LazyGraphModule

InputKind = Literal[
    "parameter", "frozen", "buffer", "constant", "batch", "coordinate", "layout",
    "moment", "gradient", "scalar", "carried",
]
WEIGHTS = ("parameter", "frozen")  # kinds of inputs that are parameters: trained ones, and those without a gradient
MODEL_STATE = (*WEIGHTS, "buffer")  # kinds of inputs that are tensors of the model
OutputKind = Literal["loss", "gradient", "buffer", "metric", "rows", "count", "carried"]


@dataclass(frozen=True)
class Parts:
    """The matrices of one weight: its dim `dim` (-1 or -2) is `outer` x sum(sizes) x `inner`, each size is a matrix."""

    dim: int
    outer: int
    sizes: tuple[int, ...]
    inner: int


@dataclass(frozen=True)
class Input:
    """A placeholder of a program.

    A program may have an input for each stage that uses a parameter, or for each microbatch of a batch entry: all but
    the first are copies, under names of their own.

    Attributes:
        name: the model's own (`layers.0.wq.weight`), the batch key, the axis or the scalar.
        kind: the kind of value. A `layout` is computed from each batch on the host: the blocks of it that ranks hold.
            A `carried` input is a value of another task of the step.
        spec: its placement.
        value: of a constant, which it names: a tensor that the model holds as neither parameter nor buffer, or creates
            from Python numbers.
        roles: the uses of a parameter (`passes/rules/roles.py`).
        parts: the matrices of which a parameter consists, if several.
        runs: True if equal entries of a batch input must be adjacent along its last dim, such as document ids.
        count: computes a scalar.
        layer: the layer of a parameter or buffer, and of its moments and total; None if it has none or several.
        stages: the pipeline stages that use a parameter.
        microbatch: the number of the microbatch of a batch input or seed.
        restored: True for a buffer that changes before it is known whether the step is skipped, and then gets its value
            back.
        copy_of: the name of the first of several inputs for one thing.
    """

    name: str
    kind: InputKind
    spec: Spec
    value: Tensor | None = field(default=None, compare=False, repr=False)
    roles: frozenset[str] = frozenset()
    parts: Parts | None = None
    runs: bool = False
    count: Count | None = field(default=None, compare=False, repr=False)
    layer: Layer | None = None
    stages: tuple[int, ...] = ()
    microbatch: int = 0
    restored: bool = False
    copy_of: str = ""

    @property
    def original(self) -> str:
        """The model's own name, the batch key or the scalar that this is an input for."""
        return self.copy_of or self.name


@dataclass(frozen=True)
class Output:
    """A returned value: the loss, a metric, a count, the gradient of a parameter, a buffer's new value.

    Over several microbatches, metrics are averaged and counts are added.

    Attributes:
        name: the parameter, the buffer or the metric.
        kind: the kind of value.
        spec: its placement.
        count: the name of the input that divides all terms of a loss or metric, if they have the same one.
    """

    name: str
    kind: OutputKind
    spec: Spec
    count: str = ""


@dataclass(frozen=True)
class Program:
    """A graph whose placeholders are `inputs` and whose returned tuple is `outputs`, in order.

    Attributes:
        module: the graph, of plain tensors.
        inputs: descriptions of the placeholders.
        outputs: descriptions of the returned values.
        mesh: the sizes of the axes.
        stage: the progress from the captured model to compilation.
        folds: the layers that stand for several, one of a stack.
        bounds: a one-device program from a batch to the first and the last key that each query sees, a pair for each
            distinct interval attention; it is set if a sequence is sharded and documents decide.
        task: the part of a step with pipeline stages that it computes.
        evaluates: True if it takes no part in training.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    mesh: Mesh = Mesh()
    stage: Stage = Stage.CAPTURED
    folds: tuple[Fold, ...] = ()
    bounds: Program | None = field(default=None, compare=False, repr=False)
    task: Task | None = None
    evaluates: bool = False

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.module.graph

    @property
    def order(self) -> Order:
        """The order in which the ranks of `cp` hold the batch's sequence."""
        orders = (input_.spec.order for input_ in self.inputs)
        return next((order for order in orders if not order.is_plain), PLAIN)

    def placeholders(self) -> list[fx.Node]:
        """Return the placeholder nodes, in the order of `inputs`."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def results(self) -> list[Any]:
        """Return the returned nodes, in the order of `outputs`."""
        return list(self.graph.output_node().args[0])

    def calls(self) -> Iterator[fx.Node]:
        """Iterate over the operator nodes, in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def layers(self, layer: Layer | None) -> int:
        """Return the number of layers that a `layer` stands for, or 1."""
        return 1 + sum(fold.left_out for fold in self.folds if fold.number_of(layer) == fold.number)

    def times(self, node: fx.Node) -> int:
        """Return the number of layers that the layer of the operator `node` stands for, or 1."""
        return self.layers(layer(node)) if self.folds else 1

    def count(self, nodes: Iterable[fx.Node]) -> int:
        """Return the number of operators that `nodes` are in the program with all its layers."""
        return sum(map(self.times, nodes))

    @property
    def has_backward(self) -> bool:
        """Return True for a training program; an evaluation is only a forward."""
        differentiated = Stage.JOINT <= self.stage < Stage.EXPLICIT
        return differentiated or any(phase(node) != "forward" for node in self.calls())

    def copy(self) -> Program:
        """Return the same program over a graph of its own, safe to mutate (values in meta are shared)."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            copies[node] = copy_node(graph, node, copies)
        return self.with_graph(graph)

    def with_graph(self, graph: fx.Graph, **changes: Any) -> Program:
        """Return this program over another `graph`, and with the fields of `changes`."""
        return replace(self, module=LazyGraphModule(self.module, graph), **changes)


@dataclass(frozen=True)
class Count:
    """A number known before a step runs: the sum of the results of `program` over the samples of all microbatches.

    The program is that of one microbatch. Its result has the entries of each sample together and in order, and they
    depend on this sample alone.
    """

    program: Program
    microbatches: int

    @property
    def names(self) -> list[str]:
        """The counted entries of a batch."""
        return [input_.name for input_ in self.program.inputs]

    def of(self, samples: Mapping[str, Tensor]) -> Tensor:
        """Return the count over any number of samples, int64[] or fp64[]; `samples` are the entries called `names`."""
        size = self.program.inputs[0].spec.shape[0]
        values = [samples[name] for name in self.names]
        counts = [torch.zeros((), dtype=torch.int64, device=values[0].device)]  # of no samples
        for first in range(0, len(values[0]), size):
            parts = [value[first : first + size] for value in values]
            count = len(parts[0])
            terms = self.program.module(*(torch.cat([p, p[:1].expand(size - count, *p.shape[1:])]) for p in parts))[0]
            dtype = torch.float64 if terms.is_floating_point() else torch.int64
            counts.append(terms.reshape(size, -1)[:count].sum(dtype=dtype))
        return torch.stack(counts[1:] or counts).sum()


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node, with its record, to the graph's insertion point; its operands become their copies.

    Operands are set afterwards because `Graph.create_node` searches its operands for symbolic numbers.
    """
    new = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    new.args = fx.map_arg(node.args, copies.__getitem__)
    if node.kwargs:
        new.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
    set_record(new, record(node))
    return new


@dataclass(frozen=True)
class Reshard:
    """A change of placement: its node in the input program, its reason, and a rank's bytes sent in the forward.

    `collectives` are the nodes of the returned program that send them.
    """

    node: str
    source: str
    before: str
    after: str
    reason: str
    sent_bytes: int
    collectives: tuple[str, ...]

    def __str__(self) -> str:
        cost = f", {self.sent_bytes:,} bytes sent" if self.sent_bytes else ""
        return f"%{self.node} ({self.source}): {self.before} -> {self.after}: {self.reason}{cost}"


@dataclass(frozen=True)
class Effect:
    """The effect of an option on a step, shown to the user when the job starts.

    Attributes:
        option: the dotted name of the option.
        done: the number of things done.
        things: their name, such as "linear layers in float8".
        total: the number of things that there are, if it is known.
        detail: more about them.
        unmet: the reason why nothing was done although the option asks for it, and the fix; empty if 0 is right.
    """

    option: str
    done: int
    things: str
    total: int | None = None
    detail: str = ""
    unmet: str = ""

    def __str__(self) -> str:
        total = "" if self.total is None else f" of {self.total:,}"
        return f"{self.option}: {self.done:,}{total} {self.things}{'; ' * bool(self.detail)}{self.detail}"

    def plus(self, other: Effect) -> Effect:
        """Return the effect on two programs of a step together; details of the first are kept."""
        total = None if self.total is None or other.total is None else self.total + other.total
        return replace(self, done=self.done + other.done, total=total, unmet=self.unmet or other.unmet)


@dataclass(frozen=True)
class Report:
    """The outcome of a pass.

    Attributes:
        counts: numbers of rewrites, by kind.
        notes: lines that name nodes and reasons.
        reshards: changes of placement.
        bodies: those of custom functions, global and local: the verifier compares them like the program.
        remarks: lines that are shown to the user when the job starts.
        effects: effects of options, which are shown there, too.
    """

    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    bodies: tuple[tuple[Program, Program], ...] = field(default=(), compare=False, repr=False)
    remarks: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True)
class Context:
    """The context of passes next to the program: the fake mode of its values, and caches of operators.

    Attributes:
        fake_mode: the mode in which values of nodes are computed, without data.
        traced: the graphs of operators' definitions.
        answers: the results of custom operators (`abstract_eval.py`).
        operators: operators that passes defined for this program, by their purpose.
    """

    fake_mode: Any
    traced: dict[Any, fx.Graph] = field(default_factory=dict, compare=False, repr=False)
    answers: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    operators: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


class Pass(ABC):
    """A rewrite without side effects: it returns a new program and a report.

    Attributes:
        name: its name in reports, dumps and options.
        takes: stages of the programs that it rewrites.
        gives: the stage of its result; None: the same.
        after: names of passes that must not come later.
        keeps: True if all returned and stored values stay equal, up to algebra; this is verified.
    """

    name: ClassVar[str]
    takes: ClassVar[tuple[Stage, ...]]
    gives: ClassVar[Stage | None] = None
    after: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[bool] = False

    def __call__(self, program: Program, ctx: Context) -> tuple[Program, Report]:
        """Return the program after the pass, at the stage that it gives, and the report."""
        result = self.rewrite(program, ctx)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Report)):
            raise CompileError(self.name, None, "rewrite returned something else than (Program, Report)")
        after, report = result
        stage = program.stage if self.gives is None else self.gives
        return after if after.stage is stage else replace(after, stage=stage), report

    @abstractmethod
    def rewrite(self, program: Program, ctx: Context) -> tuple[Program, Report]:
        """Rewrite a copy of the `program`, with the values and caches of `ctx`; raise `Refused` if that is impossible.

        If there is nothing to do, return the given program.
        """


class CompileError(Exception):
    """A program that cannot be rewritten as requested: names the pass, the node, its source line and the fix.

    Args:
        pass_name: the name of the pass.
        node: the node at fault, whose line of the model's code is named; None if there is none.
        message: the problem and the fix.
    """

    def __init__(self, pass_name: str, node: fx.Node | None, message: str):
        line = source(node) if node is not None else ""
        place = "" if node is None else f"%{node.name} ({line}) " if line else f"%{node.name} "
        super().__init__(f"{pass_name}: {place}{message}")
        self.pass_name, self.node, self.message, self.located = pass_name, node, message, place + message


class Refused(CompileError):
    """A model or an option that a pass does not support: the user has to change it; it is no defect of the pass."""


class LayersDiffer(CompileError):
    """The result of passes for a layer cannot be repeated for the layers that it stands for."""


@contextmanager
def at(node: fx.Node) -> Iterator[None]:
    """Make an error raised inside name this node, unless it names a line of the model."""
    try:
        yield
    except CompileError as error:
        if error.node is not None and source(error.node):
            raise
        raise type(error)(error.pass_name, node, error.message) from error


# ---- typed access to the record of a node: the other fields are `record(node).role` and so on -------


def value(node: fx.Node) -> Any:
    """Return the fake tensor (or tuple of them, or number) that the `node` computes: its shape, dtype and device."""
    return record(node).value


def set_value(node: fx.Node, val: Any) -> None:
    """Set the fake value that the `node` computes to `val`."""
    update(node, value=val)


def is_tensor(node: Any) -> bool:
    """Return True for a `node` that computes one tensor."""
    return isinstance(node, fx.Node) and isinstance(record(node).value, Tensor)


def spec(node: fx.Node) -> Spec | None:
    """Return the placement of the `node`, or None if unknown."""
    return record(node).spec


def set_spec(node: fx.Node, placement: Spec | None) -> None:
    """Set the `placement` of the `node`."""
    update(node, spec=placement)


def stands_for(node: fx.Node) -> str:
    """Return the name of the global node whose placed value this local node holds; empty if there is none."""
    return record(node).stands_for


PHASES = ("forward", "backward", "optimizer")


def has_no_phase(node: fx.Node) -> bool:
    """Return True for an operator without a phase of the step."""
    return node.op == "call_function" and record(node).phase not in PHASES


def phase(node: fx.Node) -> str:
    """Return the phase of the step that the operator `node` is in, one of `PHASES`; inputs are in the forward."""
    if node.op != "call_function":
        return "forward"
    name = record(node).phase
    assert name, f"%{node.name} has no phase"
    return name


def has_no_layer(node: fx.Node) -> bool:
    """Return True for an operator whose record says neither its layer nor that it is outside of layers."""
    return node.op == "call_function" and record(node).layer is UNSET


def layer(node: fx.Node) -> Layer | None:
    """Return the layer of the operator `node` (in an update, the parameter's); None outside of layers."""
    if node.op != "call_function":
        return None
    layer_or_unset = record(node).layer
    assert layer_or_unset is not UNSET, f"%{node.name} has no layer"
    return layer_or_unset


def role(node: fx.Node) -> Role:
    """Return the role of an operator in its layer, known from `overlap` on."""
    role_or_none = record(node).role
    assert role_or_none is not None, f"%{node.name} has no role"
    return role_or_none


def is_recomputed(node: fx.Node) -> bool:
    """Return True if the backward recomputes a value of the forward here."""
    return record(node).recomputed


def parameter(node: fx.Node) -> str:
    """Return the parameter whose update the node is part of, or an empty string."""
    return record(node).parameter


def pipeline_stage(node: fx.Node) -> int | None:
    """Return the pipeline stage whose ranks compute the node; None if it is computed wherever it is read."""
    return record(node).stage


def source(node: fx.Node) -> str:
    """Return `file.py:line` of the model's or the loss's code that made the `node`, or an empty string."""
    return record(node).origin.line


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the module whose forward made the node, e.g. `layers.3.attention`."""
    return record(node).origin.module


def example(node: fx.Node) -> Tensor:
    """Return the fake tensor of the `node`; raise TypeError if it computes something else."""
    val = value(node)
    if not isinstance(val, torch.Tensor):
        raise TypeError(f"%{node.name} computes {type(val).__name__}, not a tensor")
    return val


def may_have_gradient(node: fx.Node) -> bool:
    """Return True if the node computes real or complex numbers."""
    return example(node).is_floating_point() or example(node).is_complex()
