"""What a setting with pipeline stages takes: a first, a middle and a last stage, as they come in the schedule's table.

    compiled     3 stages of 1 layer, and of 2      embedding, layer | layer | layer, head
    continued    16 stages of 7 or 8 layers         each on the line between the two, played as the table says

A task's time and bytes are linear in its layers, and stages in the middle are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compiler_trainer.config.clusters import cluster_of
from compiler_trainer.config.schema import ClusterConfig, Config, ModelConfig
from compiler_trainer.config.tables import build_table
from compiler_trainer.planning import stages
from compiler_trainer.planning.dry import DryStep, compile_dry, stored_bytes
from compiler_trainer.planning.estimate import Estimate
from compiler_trainer.planning.space import Candidate, depth_pattern, replaced
from compiler_trainer.step.given import mesh_of
from compiler_trainer.step.messages import Message, messages
from compiler_trainer.step.turns import turns_of_step
from passes.cost.cluster import Cluster, collective_seconds
from passes.cost.predict import Timeline, predict
from passes.pipeline.assign import even
from passes.pipeline.tables import Table, play
from passes.program.mesh import Mesh
from passes.program.task import BACKWARD, FORWARD, GATHER, INPUTS, SHARE, UPDATE, WEIGHTS, Task

ROLES = 3  # a first, a middle and a last stage
KINDS = (GATHER, FORWARD, BACKWARD, INPUTS, WEIGHTS, SHARE, UPDATE)
TRAINED = FORWARD + BACKWARD + INPUTS + WEIGHTS
OF_STATE = {"model": "parameters", "optim": "optimizer", "gradient": "gradients"}
Figures = dict[tuple[str, ...], float]


def estimates(cfg: Config, candidate: Candidate, clusters: Sequence[ClusterConfig]) -> tuple[Estimate, ...]:
    """What a job takes in a setting on each cluster; raises UserError where a pass refuses it."""
    cfg = candidate.applied(cfg)
    table = build_table(cfg.passes.pipeline, cfg.mesh.pp, cfg.train.microbatches)
    steps = [(count, compile_dry(small, None)) for count, small in few(cfg, table)]
    mesh = mesh_of(cfg.mesh)
    return tuple(Piped(candidate, table, mesh, cluster_of(c), repeated(cfg), steps).estimate() for c in clusters)


def timelines(cfg: Config) -> tuple[int | None, dict[str, Timeline]]:
    """(layers, the timeline of each task) of the larger of the two that are compiled."""
    table = build_table(cfg.passes.pipeline, cfg.mesh.pp, cfg.train.microbatches)
    _, small = few(cfg, table)[-1]
    cluster = cluster_of(cfg.cluster)
    found = {name: predict(*captured, cluster).timeline for name, captured in compile_dry(small, None).programs.items()}
    return layers_of(small), found


def layers_of(cfg: Config) -> int:
    """How many layers the model has; what they are counted in for a model that options do not make is one a stage."""
    return cfg.model.n_layers if isinstance(cfg.model, ModelConfig) else cfg.mesh.pp


def repeated(cfg: Config) -> int:
    """How many layers repeat: dense ones before experts are part of the first stage, as compiled."""
    return layers_of(cfg) - (depth_pattern(cfg.model)[0] if isinstance(cfg.model, ModelConfig) else 0)


def few(cfg: Config, table: Table) -> list[tuple[int, Config]]:
    """The job with few stages, of few layers and of twice as many; as it is where it has no more, or none are told."""
    plain: dict[str, dict[str, Any]] = {"passes": {"verify": "none"}, "run": {"dump_graphs": False}}
    if not isinstance(cfg.model, ModelConfig):
        return [(1, replaced(cfg, plain))]
    count, (first, period) = min(ROLES, table.stages), depth_pattern(cfg.model)
    found = []
    for n in (period, 2 * period):
        schedule = {"schedule": "zero_bubble" if table.is_split else "1f1b", "stages": [first + n, *[n] * (count - 1)]}
        model, mesh = {"n_layers": first + n * count}, {"pp": count}
        passes = plain["passes"] | {"pipeline": schedule}
        found.append((n, replaced(cfg, plain | {"model": model, "mesh": mesh, "passes": passes})))
    return found if found[-1][1].model.n_layers < cfg.model.n_layers else [(1, replaced(cfg, plain))]  # type: ignore[union-attr]


@dataclass(frozen=True)
class Piped:
    """A setting of a job of so many repeated `layers` on a cluster, and its tasks' order; `steps` have few of them."""

    candidate: Candidate
    table: Table
    mesh: Mesh
    cluster: Cluster
    layers: int
    steps: Sequence[tuple[int, DryStep]]

    @property
    def is_whole(self) -> bool:
        """Whether all stages were compiled."""
        return len(self.steps) == 1

    def role(self, stage: int) -> int:
        """The compiled stage that is like a stage: the first, the last, or one in the middle."""
        if self.is_whole or stage == 0:
            return stage
        count = min(ROLES, self.table.stages)
        return count - 1 if stage == self.table.stages - 1 else 1

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many layers each stage has, as `assign` shares them out by FLOPs."""
        if self.is_whole:
            return (1,) * self.table.stages
        (few, low), (more, high) = ((n, step) for n, step in self.steps)
        first, last, middle = 0, min(ROLES, self.table.stages) - 1, 1 % min(ROLES, self.table.stages)
        layer, whole = ((flops(high, middle, k) - flops(low, middle, k)) / (more - few) for k in (FORWARD, TRAINED))
        costs = [round(layer)] * self.layers
        costs[0] += round(flops(low, first) - few * layer)
        costs[-1] += round((flops(low, last, TRAINED) - few * whole) / 3)  # a loss in chunks has its backward in F
        return even(costs, self.table.stages)

    @cached_property
    def figures(self) -> list[dict[int, Figures]]:
        """The figures of each compiled stage, of few layers and of more."""
        return [{role: self.of_stage(step, role) for role in roles(step)} for _, step in self.steps]

    def of_stage(self, step: DryStep, stage: int) -> Figures:
        """Seconds, bytes sent, bytes that the stage's rank keeps, and what its tasks need beside, by task."""
        found: Figures = {}
        read, own = carried_sizes(step, stage), dict[str, int]()
        for kind in KINDS:
            name = str(Task(stage, kind))
            if name not in step.programs:
                continue
            captured, costs = step.programs[name], step.costs(name)
            prediction = predict(*captured, self.cluster)
            timeline = prediction.timeline
            found |= {(kind, "seconds"): timeline.step_s, (kind, "compute"): timeline.compute_s}
            found |= {(kind, "exposed", axis): s for axis, s in timeline.exposed_s.items()}
            found |= {(kind, "sent", *key): float(size) for key, size in prediction.sent_bytes.items()}
            for output in captured.program.outputs:
                if output.kind == "carried" and output.name in read:
                    size, until = read[output.name]
                    found[kind, "until", until] = found.get((kind, "until", until), 0.0) + size
            given = sum(read[i.name][0] for i in captured.program.inputs if i.name in read and i.kind == "carried")
            mine = stored_bytes(captured)
            own |= mine
            found[kind, "beside"] = float(costs["peak_bytes"] - given - sum(mine.values()))
        for name, size in own.items():
            key = ("state", OF_STATE[name.partition(".")[0]])
            found[key] = found.get(key, 0.0) + size
        return found

    def of(self, stage: int) -> Figures:
        """The figures of a stage with all its layers."""
        if stage not in self.continued:
            role, count = self.role(stage), self.counts[stage]
            low = self.figures[0][role]
            if self.is_whole:
                self.continued[stage] = low
            else:
                (few, _), (more, _) = self.steps
                steps, high = (count - few) / (more - few), self.figures[1][role]
                line = {key: value + steps * (high[key] - value) for key, value in low.items() if key in high}
                self.continued[stage] = {key: max(0.0, value) for key, value in line.items()}
        return self.continued[stage]

    @cached_property
    def continued(self) -> dict[int, Figures]:
        """Figures of stages that were asked for."""
        return {}

    # -- the step -------------------------------------------------------------------------------------

    def estimate(self) -> Estimate:
        """Seconds of the step, bytes of the rank that needs most."""
        send = self.send_s()
        timing = play(self.table, lambda task: self.of(task.stage).get((task.kind, "seconds"), 0.0), send)
        around = [self.once(rank, "seconds") for rank in range(self.table.ranks)]
        step_s = timing.length + max(around)
        busiest = max(range(self.table.ranks), key=lambda rank: timing.busy[rank])
        compute = self.total(busiest, "compute")
        exposed = {axis: self.total(busiest, "exposed", axis) for axis in self.axes("exposed")}
        exposed = {axis: s for axis, s in exposed.items() if s > 0}
        exposed["pp"] = max(0.0, step_s - compute - sum(exposed.values()))
        memory, place = max((self.memory(rank) for rank in range(self.table.ranks)), key=lambda m: sum(m[0].values()))
        sent: dict[str, dict[str, float]] = {}
        for axis, link in {key[2:] for key in self.of(0) if key[1:2] == ("sent",)}:
            sent.setdefault(axis, {})[link] = self.total(busiest, "sent", axis, link)
        return Estimate(self.candidate, compute, exposed, memory, step_s, sum(memory.values()), sent, place)

    def axes(self, what: str) -> set[str]:
        """The axes that a figure is known of."""
        return {key[2] for stage in range(self.table.stages) for key in self.of(stage) if key[1:2] == (what,)}

    def total(self, rank: int, *what: str) -> float:
        """A figure of all tasks of a rank in a step."""
        slots = sum(self.of(s.task.stage).get((s.task.kind, *what), 0.0) for s in self.table.rows[rank])
        return slots + self.once(rank, *what)

    def once(self, rank: int, *what: str) -> float:
        """A figure of what a rank does once a step."""
        own = [self.of(stage) for stage, of in enumerate(self.table.rank_of) if of == rank]
        return sum(figures.get((kind, *what), 0.0) for figures in own for kind in (GATHER, SHARE, UPDATE))

    def memory(self, rank: int) -> tuple[dict[str, float], str]:
        """Bytes of a rank at its peak, by kind, and the task in which that is."""
        own = [stage for stage, of in enumerate(self.table.rank_of) if of == rank]
        found: dict[str, float] = {}
        for stage in own:
            for key, size in self.of(stage).items():
                if key[0] == "state" or key[:2] == (GATHER, "until"):
                    kind = key[1] if key[0] == "state" else "gathered weights"
                    found[kind] = found.get(kind, 0.0) + size
        once = [(Task(stage, kind), 0.0) for stage in own for kind in (GATHER, SHARE, UPDATE)]
        task, activations = max((*self.kept_beside(rank), *once), key=lambda each: each[1] + self.beside(each[0]))
        return found | {"activations": activations, "work": self.beside(task)}, f"{task} of rank {rank}"

    def beside(self, task: Task) -> float:
        """Bytes that a task needs beside its inputs."""
        return self.of(task.stage).get((task.kind, "beside"), 0.0)

    def kept_beside(self, rank: int) -> Iterator[tuple[Task, float]]:
        """Each task of a rank, with the bytes that others have made for later ones by then."""
        kept = 0.0
        for (stage, kind), _ in self.table.rows[rank]:
            yield Task(stage, kind), kept
            for key, size in self.of(stage).items():
                if key[1:2] == ("until",) and key[0] != GATHER:
                    kept += size * ((key[0] == kind) - (key[2] == kind))

    def send_s(self) -> float:
        """How long what a stage gives the next one travels."""
        size = max((border["bytes"] for border in self.borders()), default=0)
        between = stages.link(self.mesh, Message(("", 0), 0, 1, 0), self.cluster.gpus_per_node)
        return collective_seconds("shift", size, between, self.cluster.links)

    def borders(self) -> list[dict]:
        """What is sent between the first two stages that were compiled."""
        _, step = self.steps[0]
        programs = {name: captured.program for name, captured in step.programs.items()}
        turns = [turn for turn in turns_of_step(programs, step.table, 1) if turn.program in programs]
        return stages.borders(messages(turns, programs), stages.sizes_of(programs))[:1]


def roles(step: DryStep) -> range:
    """The stages of a compiled step."""
    assert step.table is not None
    return range(step.table.stages)


def flops(step: DryStep, stage: int, kinds: str = FORWARD) -> int:
    """Of some tasks of a stage."""
    names = [name for kind in kinds if (name := str(Task(stage, kind))) in step.programs]
    return sum(sum(step.costs(name)["flops"].values()) for name in names)


def carried_sizes(step: DryStep, stage: int) -> Mapping[str, tuple[int, str]]:
    """What tasks of a stage read of each other, by name: bytes, and the last that reads it."""
    names = [name for kind in KINDS if (name := str(Task(stage, kind))) in step.programs]
    programs = {name: step.programs[name].program for name in names}
    own = {output.name for program in programs.values() for output in program.outputs}
    last = {given.name: name[0] for name, program in programs.items() for given in program.inputs}
    return {name: (size, last[name]) for name, size in stages.sizes_of(programs).items() if name in own}
