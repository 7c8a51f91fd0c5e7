"""Run a program of calls: every value is freed at its last use, by the body that uses it last."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.bodies import Body, body_of_call

Executable = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
Kernels = Callable[[list[Tensor]], Sequence[Tensor]]  # a compiled body: empties its argument list
Around = Callable[[str], AbstractContextManager[Any]]  # name of a node -> context that is entered while it runs


@dataclass(frozen=True)
class BodyCall:
    """One call: the values that it reads, by number, those of them that it reads last, and the results that it yields.

    `yields` are pairs: the index of a result, and the number of its value.
    """

    name: str
    run: Kernels
    reads: tuple[int, ...]
    freed: tuple[int, ...]
    yields: tuple[tuple[int, int], ...]


class Calls:
    """The calls of a program in order, on compiled bodies; each within `around` its node's name."""

    around: Around = nullcontext

    def __init__(self, program: ir.Program, compiled: Mapping[Body, Kernels]):
        number = {node: i for i, node in enumerate(program.graph.nodes)}
        steps = steps_of(program)
        never_freed = {*program.graph.output_node().all_input_nodes, *program.placeholders()}
        last = {operand: step for step in steps for operand in step.all_input_nodes}
        self.input_numbers = [number[node] for node in program.placeholders()]
        self.result_numbers = [number[node] for node in program.results()]
        self.calls = []
        for step in steps:
            reads = step.all_input_nodes
            freed = [number[n] for n in reads if last[n] is step and n not in never_freed]
            run = runner_of(step, compiled) if body_of_call(step) else view_runner(step)
            places = tuple(number[n] for n in reads), tuple(freed)
            self.calls.append(BodyCall(step.name, run, *places, yields_of(step, number)))

    def __call__(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the program's results."""
        env = dict(zip(self.input_numbers, values, strict=True))
        self.run(self.calls, env)
        return tuple([env[i] for i in self.result_numbers])

    def run(self, calls: Sequence[BodyCall], env: dict[int, Tensor]) -> None:
        """Run calls on the values in `env`; their results replace the values that they free."""
        for call in calls:
            args = [env[i] for i in call.reads]
            for i in call.freed:
                del env[i]
            with self.around(call.name):
                results = call.run(args)
            for index, i in call.yields:
                env[i] = results[index]
            del results

    def merge(self, calls: Sequence[BodyCall]) -> BodyCall:
        """Merge consecutive calls into one, which yields the values that other calls read."""
        yielded = dict.fromkeys(i for call in calls for _, i in call.yields)
        reads = tuple(dict.fromkeys(i for call in calls for i in call.reads if i not in yielded))
        freed = {i for call in calls for i in call.freed}
        results = [i for i in yielded if i not in freed]

        def run(args: list[Tensor]) -> Sequence[Tensor]:
            env = dict(zip(reads, args, strict=True))
            args.clear()
            self.run(calls, env)
            return [env[i] for i in results]

        name = f"{calls[0].name} to {calls[-1].name}"
        return BodyCall(name, run, reads, tuple(i for i in reads if i in freed), tuple(enumerate(results)))


class AsOne(Calls):
    """A program that another callable runs, as one call."""

    def __init__(self, program: ir.Program, run: Executable):
        count = len(program.inputs)
        self.input_numbers, self.result_numbers = list(range(count)), [count + k for k in range(len(program.outputs))]
        all_of_it = BodyCall(
            "program", empty_arguments(run), tuple(self.input_numbers), (), tuple(enumerate(self.result_numbers))
        )
        self.calls = [all_of_it]


def empty_arguments(run: Executable) -> Kernels:
    """Return a function that empties its argument list before it runs."""

    def kernels(args: list[Tensor]) -> Sequence[Tensor]:
        values = list(args)
        args.clear()
        return run(values)

    return kernels


def steps_of(program: ir.Program) -> list[fx.Node]:
    """Return the nodes that run one after another: calls of bodies, and views that are in none."""
    return [node for node in program.calls() if not is_result(node)]


def is_result(node: fx.Node) -> bool:
    """Return True if a node is one of the values that a call of a body returns."""
    return node.target is operator.getitem and body_of_call(node.args[0]) is not None  # type: ignore[arg-type]


def yields_of(step: fx.Node, number: Mapping[fx.Node, int]) -> tuple[tuple[int, int], ...]:
    """Return the indices of a step's used results, and their numbers."""
    if not body_of_call(step):
        return ((0, number[step]),)
    return tuple((user.args[1], number[user]) for user in step.users)  # type: ignore[misc]


def runner_of(step: fx.Node, compiled: Mapping[Body, Kernels]) -> Kernels:
    """Return the function that runs a call of a body."""
    run = compiled[step.target]  # type: ignore[index]
    return flat_runner(run, [value.shape for value in ir.value(step)]) if step.target.flat else run  # type: ignore


def view_runner(step: fx.Node) -> Kernels:
    """Return the function that runs an operator that is in no body: a view."""

    def run(args: list[Tensor]) -> Sequence[Tensor]:
        values = dict(zip(step.all_input_nodes, args, strict=True))
        operands, kwargs = fx.map_arg((step.args, step.kwargs), values.__getitem__)
        return (step.target(*operands, **kwargs),)  # type: ignore[operator]

    return run


def flat_runner(run: Kernels, shapes: Sequence[torch.Size]) -> Kernels:
    """Adapt a flat body to tensors of some shape: flatten its arguments to 1-D, and give its results their shapes."""

    def on_lines(args: list[Tensor]) -> Sequence[Tensor]:
        lines = [value.view(-1) if value.dim() else value for value in args]
        args.clear()
        return [result.view(shape) for result, shape in zip(run(lines), shapes, strict=True)]

    return on_lines
