"""Assign pipeline stages: each operator of the local forward gets the stage whose ranks run it.

    embedding, layers 0 1 | layers 2 3 | layers 4 5 | layers 6 7, norm, head, loss
    stage 0               | stage 1    | stage 2    | stage 3

Layers stay together and in order. The costliest stage is made as cheap as possible, unless the numbers of layers are
given. If a model has fewer layers than stages, its modules stay together, or it is cut between single operators.
Layers from the first reader of a changing buffer to the operator that changes it stay together where possible.
Operators outside of layers go with the layer before them. Any later stage may read a value of an earlier one (a skip,
an encoder's output), but not the reverse.

A parameter that several stages use is an input for each, `output.weight` and `output.weight@3`: autograd gives each its
own gradient, one term of the total. Operators on this parameter alone, such as a cast or a gather, are repeated in
each. Operators that depend on no parameter (positions, masks, rotary tables) have no stage: each reader's stage
computes them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from passes.cost.accounting import count_flops
from passes.ir import ir
from passes.ir.layer import Layer
from passes.ir.stages import Stage
from passes.trace.abstract_eval import Avals, abstract_eval
from passes.trace.editor import Editor

LARGE = 2**20  # entries of a buffer; operators on a larger one are computed once and their results sent


@dataclass(frozen=True)
class Assign(ir.Pass):
    """Give each operator a pipeline stage, one of `stages`.

    `layers` are the numbers of layers per stage; without them, the costliest stage is made as cheap as possible.
    `stored` maps names to the stages whose ranks already hold this state (parameters, and buffers that change) for
    another program; these stages are kept.
    """

    stages: int = 1
    layers: tuple[int, ...] = ()
    stored: Mapping[str, Sequence[int]] = field(default_factory=dict)
    name = "assign"
    takes = (Stage.LOCAL,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if self.stages == 1:
            return program, ir.Report()
        program = program.copy()
        copy_returned_inputs(program, ctx)
        avals = abstract_eval(program, ctx)
        free, weights = without_parameters(program, avals), of_parameters(program)
        results = {node for node in program.results() if isinstance(node, fx.Node)}  # belong to a stage in any case
        work = [node for node in program.calls() if node in results or node not in free and node not in weights]
        if self.stored:
            notes: tuple[str, ...] = ("the same stages as in training",)
            of_node = stages_of(program, work, self.stored)
        else:
            of_node, notes = self.divide_stages(program, work, avals)
        for node, stage in of_node.items():
            ir.update(node, stage=max([stage, *stages_read(node)]))
        share_buffers(program, ctx)
        inputs, copies = split_parameters(program, work, weights)
        notes += tuple(f"{name}: used in stages {', '.join(map(str, stages))}" for name, stages in copies.items())
        counts = {"stages": self.stages, "copies": len(copies)}
        detail = "; ".join(note for note in notes if note.startswith("stage "))
        effect = ir.Effect("passes.pipeline.stages", self.stages, "stages", detail=detail)
        return replace(program, inputs=inputs), ir.Report(counts, notes, effects=(effect,))

    def divide_stages(
        self, program: ir.Program, work: Sequence[fx.Node], avals: Avals
    ) -> tuple[dict[fx.Node, int], tuple[str, ...]]:
        """Return the stage of each operator, in order, and a note for each stage."""
        candidates = [units for units in groupings(program, work) if len(units) >= self.stages]
        if not self.layers:
            joined = [units for u in candidates if len(units := keep_buffers_together(program, u)) >= self.stages]
            candidates = joined or candidates
        units = candidates[0] if candidates else []
        costs = [1 + sum(count_flops(node, avals) for node in unit) for unit in units]
        counts = self.layers or even(costs, self.stages)
        self.check(counts, len(units))
        of_unit = [stage for stage, count in enumerate(counts) for _ in range(count)]
        notes = tuple(f"stage {k}: {count} of {len(units)} layers" for k, count in enumerate(counts))
        return {node: stage for stage, unit in zip(of_unit, units, strict=True) for node in unit}, notes

    def check(self, counts: Sequence[int], layers: int) -> None:
        """Raise Refused if there are fewer layers than stages, or if the given numbers of layers do not fit."""
        if layers < self.stages:
            problem = "but fewer operators of the model depend on parameters; use a smaller mesh.pp"
            raise ir.Refused("assign", None, f"mesh.pp: {self.stages} stages, {problem}")
        if len(counts) != self.stages or sum(counts) != layers or min(counts) < 1:
            problem = f"{list(counts)} are not {self.stages} numbers of layers, each 1 or more, that add up to {layers}"
            raise ir.Refused("assign", None, f"passes.pipeline.stages: {problem}")


# ---- operators with a stage ---------------------------------------------------------------------------


def copy_returned_inputs(program: ir.Program, ctx: ir.Context) -> None:
    """Let outputs that are inputs, such as a buffer that takes over another, be copies, which belong to a stage."""
    results = program.results()
    for k, node in enumerate(results):
        if isinstance(node, fx.Node) and node.op == "placeholder":
            edit = Editor(ctx, program.graph, program.graph.output_node())
            results[k] = edit.call(torch.ops.aten.clone.default, (node,))
            ir.set_spec(results[k], ir.spec(node))
            ir.update(results[k], phase="forward", layer=None)
    program.graph.output_node().args = (tuple(results),)


def without_parameters(program: ir.Program, avals: Avals) -> set[fx.Node]:
    """Return operators that depend on no parameter, matmul or large buffer: they are cheaper to repeat than to send."""
    inputs = zip(program.placeholders(), program.inputs, strict=True)
    changed = {output.name for output in program.outputs if output.kind == "buffer"}
    bound = {
        node
        for node, i in inputs
        if i.kind in ir.WEIGHTS or i.kind == "buffer" and (i.name in changed or ir.example(node).numel() > LARGE)
    }
    free = set[fx.Node]()
    for node in program.calls():
        if bound.isdisjoint(node.all_input_nodes) and not count_flops(node, avals):
            free.add(node)
        else:
            bound.add(node)
    return free


def of_parameters(program: ir.Program) -> set[fx.Node]:
    """Return operators that read parameters, but neither a batch nor scalars."""
    kinds = {node: item.kind for node, item in zip(program.placeholders(), program.inputs, strict=True)}
    fed = {node for node, kind in kinds.items() if kind in ("batch", "scalar", "layout")}
    reading = {node for node, kind in kinds.items() if kind in ir.WEIGHTS}
    for node in program.calls():
        if not fed.isdisjoint(node.all_input_nodes):
            fed.add(node)
        elif not reading.isdisjoint(node.all_input_nodes):
            reading.add(node)
    return {node for node in reading if node.op == "call_function"}


def stages_of(
    program: ir.Program, work: Sequence[fx.Node], stored: Mapping[str, Sequence[int]]
) -> dict[fx.Node, int]:
    """Return the stage of each operator, in order: each begins at the first reader of state that only it holds."""
    names, in_work = dict[fx.Node, set[str]](), set(work)
    for node, item in zip(program.placeholders(), program.inputs, strict=True):
        names[node] = {item.name} if item.kind in ir.MODEL_STATE else set()
    for node in program.calls():
        names[node] = set() if node in in_work else set().union(*(names[n] for n in node.all_input_nodes))
    stage, by_node = 0, {}
    for node in work:
        for name in (name for n in node.all_input_nodes for name in names[n]):
            stage = min((s for s in stored.get(name, ()) if s >= stage), default=stage)
        by_node[node] = stage
    return by_node


def groupings(program: ir.Program, work: Sequence[fx.Node]) -> Iterator[list[list[fx.Node]]]:
    """Yield the operators grouped by layers, by calls of modules, and one by one."""
    yield units_of(program, work)
    yield [list(group) for _, group in itertools.groupby(work, ir.module_path)]
    yield [[node] for node in work]


def units_of(program: ir.Program, work: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Return the operators of each layer, with those outside of layers after it.

    The first layer also gets those before it.
    """
    units, order = list[list[fx.Node]]([[]]), dict[Layer, int]()
    for node in work:
        if layer := ir.layer(node):
            number = order.setdefault(layer, len(order))
            if number == len(units):
                units.append([])
            units[number].append(node)
        else:
            units[max(0, len(order) - 1)].append(node)
    return units


def keep_buffers_together(program: ir.Program, units: Sequence[list[fx.Node]]) -> list[list[fx.Node]]:
    """Return the groups of operators, those joined between which a stage must not end.

    A changing buffer belongs to the stage that changes it; an earlier stage cannot read it.
    """
    number = {node: k for k, unit in enumerate(units) for node in unit}
    last = list(range(len(units)))  # by group, the last group that shares a buffer with it
    for buffer, new in changing_buffers(program):
        for user in buffer.users:
            if user in number and new in number:
                last[number[user]] = max(last[number[user]], number[new])
    groups, end = list[list[fx.Node]](), -1
    for k, unit in enumerate(units):
        if k > end:
            groups.append([])
        groups[-1].extend(unit)
        end = max(end, last[k])
    return groups


def even(costs: Sequence[int], parts: int) -> tuple[int, ...]:
    """Return the number of neighbours in each part: the costliest part is as cheap as possible, others are even.

    Early parts have the fewest.
    """
    if len(costs) < parts:
        return (len(costs),)
    before = [0, *itertools.accumulate(costs)]
    limit = least_limit(before, parts)
    # best[p][n]: (sum of the parts' squared costs, minus the size of the last part), if p parts share the first n
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for part in range(1, parts + 1):
        row = dict[int, tuple[int, int]]()
        for n in range(part, len(before)):
            within = itertools.takewhile(lambda k, n=n: before[n] - before[n - k] <= limit, range(1, n + 1))
            candidates = (
                (best[-1][n - k][0] + (before[n] - before[n - k]) ** 2, -k) for k in within if n - k in best[-1]
            )
            if (least := min(candidates, default=None)) is not None:
                row[n] = least
        best.append(row)
    counts, remaining = list[int](), len(costs)
    for row in reversed(best[1:]):
        counts.append(-row[remaining][1])
        remaining -= counts[-1]
    return tuple(reversed(counts))


def least_limit(before: Sequence[int], parts: int) -> int:
    """Return the least possible cost of the costliest of `parts` parts; `before` are cumulative costs."""
    low, high = max(b - a for a, b in itertools.pairwise(before)), before[-1]
    while low < high:
        middle = (low + high) // 2
        if fewest_parts(before, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def fewest_parts(before: Sequence[int], limit: int) -> int:
    """Return the least number of parts of which none costs more than `limit`."""
    count, start = 0, 0
    while start < len(before) - 1:
        start = bisect.bisect_right(before, before[start] + limit) - 1
        count += 1
    return count


def stages_read(node: fx.Node) -> Iterable[int]:
    """Return the stages of a node's operands."""
    return (stage for n in node.all_input_nodes if (stage := ir.pipeline_stage(n)) is not None)


# ---- buffers -----------------------------------------------------------------------------------------------


def share_buffers(program: ir.Program, ctx: ir.Context) -> None:
    """Let only one stage read each buffer that changes, the one that changes it; it sends the old value to others.

    The forward of a microbatch changes the buffer, and another microbatch's forward may follow before its own backward.
    """
    for buffer, new in changing_buffers(program):
        stage, readers = ir.pipeline_stage(new), [user for user in buffer.users if user.op != "output"]
        if not readers:
            continue
        if early := [user for user in readers if (s := ir.pipeline_stage(user)) is not None and s < (stage or 0)]:
            problem = f"is read in stage {ir.pipeline_stage(early[0])} and changed in stage {stage}, which comes later"
            name = next(i.name for n, i in zip(program.placeholders(), program.inputs, strict=True) if n is buffer)
            raise ir.Refused("assign", early[0], f"model: buffer {name} {problem}; cut the model elsewhere")
        before = Editor(ctx, program.graph, min(readers), new).call(torch.ops.aten.clone.default, (buffer,))
        ir.set_spec(before, ir.spec(buffer))
        for user in readers:
            user.replace_input_with(buffer, before)


def changing_buffers(program: ir.Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the buffers that the program changes, each with the operator that returns its new value."""
    buffers = {i.name: n for n, i in zip(program.placeholders(), program.inputs, strict=True) if i.kind == "buffer"}
    for new, output in zip(program.results(), program.outputs, strict=True):
        if output.kind == "buffer" and new.op == "call_function":
            yield buffers[output.name], new


# ---- parameters -----------------------------------------------------------------------------------------


def split_parameters(
    program: ir.Program, work: Iterable[fx.Node], weights: set[fx.Node]
) -> tuple[tuple[ir.Input, ...], dict[str, list[int]]]:
    """Give each stage its own copy of the parameters that it uses, and of operators on these alone.

    Return the inputs, and the stages of parameters that have several.
    """
    items = dict(zip(program.placeholders(), program.inputs, strict=True))
    copies = dict[tuple[fx.Node, int], fx.Node]()
    users = dict[str, list[int]]()

    def copy_for(node: fx.Node, stage: int) -> fx.Node:
        is_parameter = node.op == "placeholder" and items[node].kind in ir.WEIGHTS
        if not is_parameter and node not in weights:
            return node
        if (node, stage) not in copies:
            copies[node, stage] = copy_parameter(node, stage) if is_parameter else copy_operator(node, stage)
        return copies[node, stage]

    def copy_parameter(node: fx.Node, stage: int) -> fx.Node:
        users.setdefault(items[node].name, []).append(stage)
        if ir.pipeline_stage(node) is None:
            ir.update(node, stage=stage)
            return node
        with program.graph.inserting_after(node):
            new = program.graph.placeholder(f"{node.name}_{stage}")
        ir.set_record(new, replace(ir.record(node), stage=stage))
        name = items[node].name
        items[new] = replace(items[node], name=f"{name}@{stage}", copy_of=name)
        return new

    def copy_operator(node: fx.Node, stage: int) -> fx.Node:
        operands = {n: copy_for(n, stage) for n in node.all_input_nodes}
        if ir.pipeline_stage(node) is None:
            ir.update(node, stage=stage)
            for old, new in operands.items():
                node.replace_input_with(old, new)
            return node
        with program.graph.inserting_after(node):
            new_node = program.graph.node_copy(node, lambda n: operands.get(n, n))
        ir.update(new_node, stage=stage)
        return new_node

    for node in work:
        stage = ir.pipeline_stage(node)
        assert stage is not None
        for operand in node.all_input_nodes:
            node.replace_input_with(operand, copy_for(operand, stage))
    for node, item in list(items.items()):
        if item.kind in ir.WEIGHTS and ir.pipeline_stage(node) is None:  # without a reader
            copy_parameter(node, 0)
    program.graph.lint()
    ordered = (items[node] for node in program.placeholders())
    inputs = tuple(replace(i, stages=tuple(users.get(i.original, ()))) for i in ordered)
    return inputs, {name: stages for name, stages in users.items() if len(stages) > 1}
