"""Cut the program of a microbatch into tasks: each stage's forward and backward become separate programs.

    stage 0   F: tokens -> mul_3, ...kept                    B: gradient of mul_3, kept -> accumulators
    stage 1   F: mul_3 -> loss, ...kept                      B: kept -> gradient of mul_3, accumulators

A backward may be two tasks: I computes the gradients that other stages need, W the rest, for which no task waits. A
value that another task reads is carried: an output of its task, and an input, by the same name, of its readers. Between
tasks of one stage it stays in place; to other stages it is sent, once. Operators without a stage are repeated in each
task that reads them, and so are views.

    rank 0    G: reduced gradients, terms that others need   R: the running squared norm       U: the new parameters

The update of all stages of a rank is up to three tasks, because other ranks wait for terms of gradients, and for the
squared norm.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from passes.program import ir, reshard
from passes.program.operators import is_view, kind_of
from passes.program.record import Origin
from passes.program.spec import Spec
from passes.program.task import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUTS,
    OF_RANKS,
    REDUCE,
    SHARE,
    SQUARE,
    UPDATE,
    WEIGHTS,
    Task,
)
from passes.program.weights import weight_nodes


def cut(program: ir.Program, split: bool = False, gathers: bool = False) -> dict[Task, ir.Program]:
    """Return the tasks of a microbatch, in an order in which they can run; the program's operators have stages.

    With `split`, a backward is two tasks; with `gathers`, gathers of parameters are a task of the step.
    """
    task = tasks_of(program, split)
    if gathers:
        task |= {node: Task(task[node].stage, GATHER) for node in gathered(program) if node in task}
    return apart(program, task)


def without_unread_buffers(program: ir.Program) -> ir.Program:
    """Return the program without the buffers that it does not read; training keeps those that change."""
    program = program.copy()
    ends = list(zip(program.placeholders(), program.inputs, strict=True))
    unread = [node for node, given in ends if given.kind == "buffer" and not node.users]
    for node in unread:
        program.graph.erase_node(node)
    return replace(program, inputs=tuple(given for node, given in ends if node not in unread))


def cut_update(program: ir.Program, rank: int) -> dict[Task, ir.Program]:
    """Return the tasks of a pipeline rank's update, in order."""
    return apart(program, tasks_of_update(program, rank), f"{rank}.")


def cut_gathers(program: ir.Program) -> dict[str, ir.Program]:
    """Return a microbatch without pipeline stages as the gathers of parameters, if there are any, and the rest."""
    once = gathered(program)
    task = {node: Task(0, GATHER if node in once else FORWARD) for node in program.calls()}
    return {"gather" if each.kind == GATHER else "accumulate": found for each, found in apart(program, task).items()}


def apart(program: ir.Program, task: Mapping[fx.Node, Task], prefix: str = "") -> dict[Task, ir.Program]:
    """Return the program of each task; names of carried values begin with `prefix`."""
    cuts = {each: Cut(program, each, task, prefix) for each in sorted({*task.values()}, key=order_of)}
    carried = {node for each in cuts.values() for node in each.carried}
    return {each: made.finish(carried) for each, made in cuts.items()}


KINDS = (GATHER, FORWARD, BACKWARD, INPUTS, WEIGHTS, SHARE, REDUCE, UPDATE)


def order_of(task: Task) -> tuple[int, int, int]:
    """Return the sort key: gathers and forwards from first to last stage, backwards from last to first, updates."""
    kind = KINDS.index(task.kind)
    return (0 if kind < 2 else 1 if kind < 5 else 2, -task.stage if 1 < kind < 5 else task.stage, kind)


# ---- tasks of operators ---------------------------------------------------------------------------------


def tasks_of(program: ir.Program, split: bool) -> dict[fx.Node, Task]:
    """Return the task of each operator that belongs to a stage."""
    stages, late = dict[fx.Node, int](), late_nodes(program)
    for node in program.calls():
        stage = stage_of(node, stages)
        if stage is not None:
            stages[node] = stage
    task = {node: Task(stage, BACKWARD if node in late else FORWARD) for node, stage in stages.items()}
    if split:
        waited = waited_for(program, stages, late)
        for node in late & task.keys():
            task[node] = Task(stages[node], INPUTS if node in waited else WEIGHTS)
    for node in task:
        if node.target is operator.getitem and node.args[0] in task:  # items stay with their tuple
            task[node] = task[node.args[0]]
    return task


def stage_of(node: fx.Node, stages: Mapping[fx.Node, int]) -> int | None:
    """Return the stage of an operator: that which stores its operands, even if a gradient belongs to another stage.

    Otherwise it is the operator's own stage, or, if it has none (a sum of gradients), that of its operands. An operator
    without operands has no stage: each task that needs the constant makes it.
    """
    if not node.all_input_nodes:
        return None
    own = ir.pipeline_stage(node)
    if ir.phase(node) == "forward" and not ir.is_recomputed(node):
        return stages.get(node.args[0], own) if node.target is operator.getitem else own  # type: ignore[call-overload]
    held = [s for n in node.all_input_nodes if n.op == "placeholder" and (s := ir.pipeline_stage(n)) is not None]
    read = [stages[n] for n in node.all_input_nodes if n in stages]
    if held:
        return max(held)
    if ir.phase(node) == "optimizer":
        return max(read, default=None)
    return own if own is not None and read else min(read, default=None)


def gathered(program: ir.Program) -> set[fx.Node]:
    """Return gathers of parameters, and operators on parameters before them: the same for every microbatch."""
    weights, found = weight_nodes(program), set[fx.Node]()
    for node in reversed(weights):
        if kind_of(node) == "all_gather" or any(user in found for user in node.users):
            found.add(node)
    return found


def late_nodes(program: ir.Program) -> set[fx.Node]:
    """Return operators of the backward, and those after it that depend on it."""
    late = set[fx.Node]()
    for node in program.calls():
        if ir.phase(node) == "backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def waited_for(program: ir.Program, stages: Mapping[fx.Node, int], late: set[fx.Node]) -> set[fx.Node]:
    """Return operators of the backward on which other stages depend."""
    found = set[fx.Node]()
    for node in reversed(list(program.calls())):
        if node in late and node in stages:
            read_by = [user for user in node.users if user in stages]
            if any(user in found or stages[user] != stages[node] for user in read_by):
                found.add(node)
    return found


def tasks_of_update(program: ir.Program, rank: int) -> dict[fx.Node, Task]:
    """Return the task of each operator of a rank's update: values for other ranks as early as possible, others late."""
    kinds = {n: 1 + (i.name == SQUARE) for n, i in ends_of(program) if i.kind == "carried"}
    earliest = dict[fx.Node, int]()
    for node in program.calls():
        earliest[node] = max([0, *(earliest.get(n, kinds.get(n, 0)) for n in node.all_input_nodes)])
    needed = {n for n, o in zip(program.results(), program.outputs, strict=True) if o.kind == "carried"}
    level = dict[fx.Node, int]()
    for node in reversed(list(program.calls())):
        if node in needed:
            needed.update(node.all_input_nodes)
            level[node] = earliest[node]
        else:
            level[node] = min((level[user] for user in node.users if user in level), default=2)
    return {node: Task(rank, OF_RANKS[at]) for node, at in level.items()}


def ends_of(program: ir.Program) -> Iterable[tuple[fx.Node, ir.Input]]:
    """Return placeholders with their inputs."""
    return zip(program.placeholders(), program.inputs, strict=True)


# ---- the program of a task --------------------------------------------------------------------------------


@dataclass
class Cut:
    """The program of one task while it is built; `carried` are the nodes of other tasks that it reads."""

    whole: ir.Program
    task: Task
    tasks: Mapping[fx.Node, Task]
    prefix: str = ""
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[fx.Node, ir.Input] = field(default_factory=dict)
    carried: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given = dict(ends_of(self.whole))
        own = [node for node in self.whole.graph.nodes if self.tasks.get(node) == self.task]
        need = self.needed(own)
        if self.task == Task(0, FORWARD):  # it takes inputs without readers
            need |= {n for n, i in self.given.items() if i.kind in ("batch", "buffer") and not n.users}
        is_dealt = not self.whole.order.is_plain and self.task.kind != GATHER
        if self.task == Task(0, FORWARD) or is_dealt:  # the layout depends on the batch
            need |= {n for n, i in self.given.items() if i.kind == "batch"}
        for node in self.whole.graph.nodes:  # inputs first, because placeholders come first in a graph
            if node in need and (node in self.given or self.is_carried(node)):
                self.input(node)
        for node in self.whole.graph.nodes:
            if node in need and node not in self.copies:
                self.compute(node)

    def needed(self, own: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the task's operators, their operands, and the operators without a stage on which these depend."""
        found, waiting = set[fx.Node](), list(own)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [] if self.is_carried(node) else node.all_input_nodes
        return found

    def is_carried(self, node: fx.Node) -> bool:
        """Return True if a node is another task's.

        A node that does nothing, such as a view, is made where it is read.
        """
        moves_nothing = is_view(node) or node.target is reshard.invariant_to_replicate
        return self.tasks.get(node, self.task) != self.task and not moves_nothing

    def input(self, node: fx.Node) -> None:
        """Insert an input of the task: one of the uncut program, or a carried value."""
        new = self.copies[node] = self.graph.placeholder(node.name)
        ir.set_record(new, ir.record(node))
        self.check(node)
        if node in self.given:
            given = self.given[node]
            self.inputs[new] = replace(given, name=given.original, copy_of="") if named(given) else given
            return
        ir.update(new, phase="", origin=Origin(), recomputed=False, parameter="")
        self.inputs[new] = ir.Input(self.prefix + node.name, "carried", carried_spec(node))
        self.carried.append(node)

    def check(self, node: fx.Node) -> None:
        """Raise CompileError if the task reads state that ranks of another stage store."""
        stage = ir.pipeline_stage(node)
        if node in self.given and stage is not None and stage != self.task.stage and self.task.kind not in OF_RANKS:
            given = self.given[node]
            raise ir.CompileError("cut", node, f"{given.kind} {given.name!r} is of stage {stage}, {self.task} reads it")

    def compute(self, node: fx.Node) -> None:
        """Copy an operator of the task, or one without a stage, which a backward recomputes."""
        new = self.copies[node] = ir.copy_node(self.graph, node, self.copies)
        is_late = self.task.kind in (BACKWARD, INPUTS, WEIGHTS)
        if self.tasks.get(node) != self.task and is_late and ir.phase(node) == "forward":
            ir.update(new, phase="backward", recomputed=True)

    def finish(self, carried: set[fx.Node]) -> ir.Program:
        """Return the task's program; its outputs are outputs of the uncut program, and values that other tasks read."""
        ends: list[tuple[fx.Node, ir.Output]] = []
        for node, output in zip(self.whole.results(), self.whole.outputs, strict=True):
            if self.tasks.get(node) == self.task:
                ends.append((self.copies[node], output))
        for node, new in self.copies.items():
            if node in carried and self.tasks[node] == self.task:
                ends.append((new, ir.Output(self.prefix + node.name, "carried", carried_spec(node))))
        self.graph.output(tuple(node for node, _ in ends))
        inputs = tuple(self.inputs[node] for node in self.graph.find_nodes(op="placeholder"))
        outputs = tuple(output for _, output in ends)
        return self.whole.with_graph(self.graph, inputs=inputs, outputs=outputs, task=self.task)


def named(given: ir.Input) -> bool:
    """Return True if an input has the name of a parameter, buffer or gradient."""
    return given.kind in ("parameter", "buffer", "gradient")


def carried_spec(node: fx.Node) -> Spec:
    """Return the known placement of a carried value; otherwise its local shape, which may differ on every rank."""
    return ir.spec(node) or Spec.whole(tuple(ir.example(node).shape))
