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

from passes.ir import ir
from passes.ir.operators import is_view, kind_of
from passes.ir.record import Origin
from passes.ir.slices import reach, weight_nodes
from passes.ir.spec import Spec
from passes.ir.task import BACKWARD, FORWARD, GATHER, INPUTS, OF_RANKS, REDUCE, SHARE, SQUARE, UPDATE, WEIGHTS, Task
from passes.ops import reshard


def cut(program: ir.Program, split: bool = False, gathers: bool = False) -> dict[Task, ir.Program]:
    """Return the tasks of a microbatch, in an order in which they can run; the program's operators have stages.

    With `split`, a backward is two tasks; with `gathers`, gathers of parameters are a task of the step.
    """
    task = tasks_of(program, split)
    if gathers:
        task |= {node: Task(task[node].stage, GATHER) for node in gather_nodes(program) if node in task}
    return split_tasks(program, task)


STATIC = ("frozen", "buffer")  # kinds of state without a gradient


def without_unread_state(program: ir.Program) -> ir.Program:
    """Return the program without the state that it does not read; training keeps what changes."""
    program = program.copy()
    ends = list(zip(program.placeholders(), program.inputs, strict=True))
    unread = [node for node, item in ends if item.kind in STATIC and not node.users]
    for node in unread:
        program.graph.erase_node(node)
    return replace(program, inputs=tuple(item for node, item in ends if node not in unread))


def cut_update(program: ir.Program, rank: int) -> dict[Task, ir.Program]:
    """Return the tasks of a pipeline rank's update, in order."""
    return split_tasks(program, tasks_of_update(program, rank), f"{rank}.")


def cut_gathers(program: ir.Program) -> dict[str, ir.Program]:
    """Return a microbatch without pipeline stages as the gathers of parameters, if there are any, and the rest."""
    once = gather_nodes(program)
    task = {node: Task(0, GATHER if node in once else FORWARD) for node in program.calls()}
    return {
        "gather" if name.kind == GATHER else "accumulate": part for name, part in split_tasks(program, task).items()
    }


def split_tasks(program: ir.Program, task: Mapping[fx.Node, Task], prefix: str = "") -> dict[Task, ir.Program]:
    """Return the program of each task; names of carried values begin with `prefix`."""
    cuts = {name: Cut(program, name, task, prefix) for name in sorted({*task.values()}, key=order_of)}
    carried = {node for name in cuts.values() for node in name.carried}
    check_results(program, task)
    return {name: builder.finish(carried) for name, builder in cuts.items()}


def check_results(program: ir.Program, task: Mapping[fx.Node, Task]) -> None:
    """Raise CompileError if a loss, metric or buffer is computed by no task, because it would be lost."""
    for node, output in zip(program.results(), program.outputs, strict=True):
        if isinstance(node, fx.Node) and node.op == "call_function" and node not in task:
            raise ir.CompileError("cut", node, f"the {output.kind} {output.name!r} is computed by no task")


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
    for node in program.results():  # a constant that is returned belongs to the stage that `assign` gave it
        if isinstance(node, fx.Node) and node.op == "call_function" and node not in stages:
            if (stage := ir.pipeline_stage(node)) is not None:
                stages[node] = stage
    task = {node: Task(stage, BACKWARD if node in late else FORWARD) for node, stage in stages.items()}
    if split:
        waited = awaited_nodes(program, stages, late)
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
    assigned = ir.pipeline_stage(node)
    if ir.phase(node) == "forward" and not ir.is_recomputed(node):
        return stages.get(node.args[0], assigned) if node.target is operator.getitem else assigned  # type: ignore[call-overload]
    stored = [s for n in node.all_input_nodes if n.op == "placeholder" and (s := ir.pipeline_stage(n)) is not None]
    read = [stages[n] for n in node.all_input_nodes if n in stages]
    if stored:
        return max(stored)
    if ir.phase(node) == "optimizer":
        return max(read, default=None)
    return assigned if assigned is not None and read else min(read, default=None)


def gather_nodes(program: ir.Program) -> set[fx.Node]:
    """Return gathers of parameters, and operators on parameters before them: the same for every microbatch."""
    weights, nodes = weight_nodes(program), set[fx.Node]()
    for node in reversed(weights):
        if kind_of(node) == "all_gather" or any(user in nodes for user in node.users):
            nodes.add(node)
    return nodes


def late_nodes(program: ir.Program) -> set[fx.Node]:
    """Return operators of the backward, and those after it that depend on it."""
    late = set[fx.Node]()
    for node in program.calls():
        if ir.phase(node) == "backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def awaited_nodes(program: ir.Program, stages: Mapping[fx.Node, int], late: set[fx.Node]) -> set[fx.Node]:
    """Return operators of the backward on which other stages depend."""
    nodes = set[fx.Node]()
    for node in reversed(list(program.calls())):
        if node in late and node in stages:
            read_by = [user for user in node.users if user in stages]
            if any(user in nodes or stages[user] != stages[node] for user in read_by):
                nodes.add(node)
    return nodes


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

    program: ir.Program
    task: Task
    tasks: Mapping[fx.Node, Task]
    prefix: str = ""
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[fx.Node, ir.Input] = field(default_factory=dict)
    carried: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs_by_node = dict(ends_of(self.program))
        own_nodes = [node for node in self.program.graph.nodes if self.tasks.get(node) == self.task]
        need = self.dependencies(own_nodes)
        if self.task == Task(0, FORWARD):  # it takes inputs without readers
            need |= {n for n, i in self.inputs_by_node.items() if i.kind in ("batch", *STATIC) and not n.users}
        has_layout = not self.program.order.is_plain and self.task.kind != GATHER
        if self.task == Task(0, FORWARD) or has_layout:  # the layout depends on the batch
            need |= {n for n, i in self.inputs_by_node.items() if i.kind == "batch"}
        for node in self.program.graph.nodes:  # inputs first, because placeholders come first in a graph
            if node in need and (node in self.inputs_by_node or self.is_carried(node)):
                self.input(node)
        for node in self.program.graph.nodes:
            if node in need and node not in self.copies:
                self.compute(node)

    def dependencies(self, own_nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the task's operators, their operands, and the operators without a stage on which these depend.

        The buffers that the task changes are among them, even if it does not read them.
        """
        ends = zip(self.program.results(), self.program.outputs, strict=True)
        changed = {o.name for n, o in ends if o.kind == "buffer" and self.tasks.get(n) == self.task}
        buffers = [n for n, i in self.inputs_by_node.items() if i.kind == "buffer" and i.name in changed]
        starts = [*own_nodes, *buffers]
        return set(reach(starts, lambda node: [] if self.is_carried(node) else node.all_input_nodes))

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
        if node in self.inputs_by_node:
            item = self.inputs_by_node[node]
            self.inputs[new] = replace(item, name=item.original, copy_of="") if is_named(item) else item
            return
        ir.update(new, phase="", origin=Origin(), recomputed=False, parameter="")
        self.inputs[new] = ir.Input(self.prefix + node.name, "carried", carried_spec(node))
        self.carried.append(node)

    def check(self, node: fx.Node) -> None:
        """Raise CompileError if the task reads state that ranks of another stage store."""
        stage = ir.pipeline_stage(node)
        if (
            node in self.inputs_by_node
            and stage is not None
            and stage != self.task.stage
            and self.task.kind not in OF_RANKS
        ):
            item = self.inputs_by_node[node]
            raise ir.CompileError("cut", node, f"{item.kind} {item.name!r} is of stage {stage}, {self.task} reads it")

    def compute(self, node: fx.Node) -> None:
        """Copy an operator of the task, or one without a stage, which a backward recomputes."""
        new = self.copies[node] = ir.copy_node(self.graph, node, self.copies)
        is_late = self.task.kind in (BACKWARD, INPUTS, WEIGHTS)
        if self.tasks.get(node) != self.task and is_late and ir.phase(node) == "forward":
            ir.update(new, phase="backward", recomputed=True)

    def finish(self, carried: set[fx.Node]) -> ir.Program:
        """Return the task's program; its outputs are outputs of the uncut program, and values that other tasks read."""
        ends: list[tuple[fx.Node, ir.Output]] = []
        for node, output in zip(self.program.results(), self.program.outputs, strict=True):
            if self.tasks.get(node) == self.task:
                ends.append((self.copies[node], output))
        for node, new in self.copies.items():
            if node in carried and self.tasks[node] == self.task:
                ends.append((new, ir.Output(self.prefix + node.name, "carried", carried_spec(node))))
        self.graph.output(tuple(node for node, _ in ends))
        inputs = tuple(self.inputs[node] for node in self.graph.find_nodes(op="placeholder"))
        outputs = tuple(output for _, output in ends)
        return self.program.with_graph(self.graph, inputs=inputs, outputs=outputs, task=self.task)


def is_named(item: ir.Input) -> bool:
    """Return True if an input has the name of a parameter, buffer or gradient."""
    return item.kind in (*ir.MODEL_STATE, "gradient")


def carried_spec(node: fx.Node) -> Spec:
    """Return the known placement of a carried value; otherwise its local shape, which may differ on every rank."""
    return ir.spec(node) or Spec.whole(tuple(ir.example(node).shape))
