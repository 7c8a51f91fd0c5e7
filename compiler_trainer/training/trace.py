"""A trace of a few steps, to be opened in Perfetto, in which collectives carry the graph's names for them.

PyTorch's profiler tells which operator ran and on which shapes, but not for which node nor in which group. Collectives
of one kind and shape run in the graph's order, so the n-th of them is the n-th such node.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.step.ranks import rank
from compiler_trainer.step.step import Step
from passes.program import ir
from passes.program.operators import axis_of, kind_of
from passes.program.torch_private import OpOverload

FILE = "trace.json.gz"
WARM_UP, STEPS = 2, 3  # steps of this process that are left out (the first measures memory), and then recorded

WAITS = ("_c10d_functional::wait_tensor", "ct::arrive")

Key = tuple[str, tuple[int, ...]]  # operator, shape of the first operand


def check(cfg: Config, done: int) -> None:
    """Raise UserError where a run that has `done` steps behind it ends before there is anything to record."""
    if cfg.run.profile and cfg.train.steps - done <= WARM_UP:
        steps = f"train.steps={cfg.train.steps} after step {done}"
        raise UserError("run.profile", f"true with {steps}; the first {WARM_UP} steps are not recorded, take more")


class Trace:
    """Records steps of rank 0 into the run folder, if the options ask for it."""

    def __init__(self, cfg: Config, step: Step, done: int):
        self.path, self.step = Path(cfg.run.dir, FILE), step
        self.first = done + WARM_UP + 1
        self.last = min(self.first + STEPS - 1, cfg.train.steps)
        self.is_on = cfg.run.profile and rank() == 0
        activities = [a for a in supported_activities() if a in (ProfilerActivity.CPU, ProfilerActivity.CUDA)]
        self.profiler = profile(activities=activities, record_shapes=True) if self.is_on else None

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Record what happens inside, which is step `number`."""
        if self.profiler is None or not self.first <= number <= self.last:
            yield
            return
        if number == self.first:
            self.profiler.start()
        with record_function(f"step {number}"):
            yield
        if number == self.last:
            self.profiler.stop()
            self.keep()

    def keep(self) -> None:
        """Write the trace; where a disk does not take it say so, for training goes on."""
        try:
            self.write()
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:  # the profiler cuts a file in silence
            self.path.unlink(missing_ok=True)  # a part is no trace
            why = error.strerror if isinstance(error, OSError) else f"{tempfile.gettempdir()} is full"
            say(f"{self.path} cannot be written ({why}): there is no trace of this run")

    def write(self) -> None:
        """Write the trace, collectives named; raises OSError or JSONDecodeError where there is no room."""
        assert self.profiler is not None
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(raw))
            trace = json.loads(raw.read_text(encoding="utf-8"))
        name_collectives(trace["traceEvents"], nodes_of(self.step))
        with gzip.open(self.path, "wt", encoding="utf-8") as file:
            json.dump(trace, file)


def nodes_of(step: Step) -> list[fx.Node]:
    """The collectives that one step runs and the waits for them, in order."""
    times = {"accumulate": step.microbatches}
    runs = [[compiled.program] * times.get(name, 1) for name, compiled in step.train.items()]
    return [n for programs in runs for program in programs for n in program.calls() if kind_of(n) or is_wait(n)]


def name_collectives(events: Iterable[dict[str, Any]], nodes: Iterable[fx.Node]) -> None:
    """Give events of collectives and waits the kind, the axis and the node as name; others keep theirs."""
    known: dict[Key, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        known[key_of(node)].append(node)
    seen: Counter[Key] = Counter()
    for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: e["ts"]):
        dims = event.get("args", {}).get("Input Dims") or [[]]
        key = event["name"], tuple(dims[0]) if all(isinstance(n, int) for n in dims[0]) else ()
        if found := known.get(key):
            node = found[seen[key] % len(found)]
            seen[key] += 1
            event["args"] |= {"operator": event["name"], "source": ir.source(node), "module": ir.module_path(node)}
            event["name"] = label(node)


def key_of(node: fx.Node) -> Key:
    """What the profiler can tell of a node: its operator, and its first operand's shape if that is one tensor."""
    operand = node.args[0]
    return node.target._schema.name, tuple(ir.value(operand).shape) if ir.is_tensor(operand) else ()  # type: ignore


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return isinstance(node.target, OpOverload) and node.target._schema.name in WAITS


def label(node: fx.Node) -> str:
    """`all_gather tp %all_gather_into_tensor_3`; of a wait, that of what is waited for."""
    if kind_of(node):
        return f"{kind_of(node)} {axis_of(node)} %{node.name}"
    waited = node.args[0]
    while isinstance(waited, fx.Node) and not kind_of(waited):
        waited = waited.args[0]
    return f"wait for {label(waited)}" if isinstance(waited, fx.Node) else f"wait %{node.name}"
