"""User passes run at their stage, once in each program, and are refused if no position fits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from oracle import NO_DECAY, perceptron, points, squared_error, trained_alike
from pipelines import pipeline_of

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import AccumulateConfig, CastConfig, OptimConfig, PassesConfig
from compiler_trainer.pipeline import Pipeline
from passes.check.runner import check_order
from passes.ir import ir
from passes.ir.stages import Stage
from passes.update.optimizers import SGD


@dataclass(frozen=True)
class Look(ir.Pass):
    """A pass that changes nothing."""

    takes: tuple[Stage, ...] = (Stage.JOINT,)
    after: tuple[str, ...] = ()
    name: str = "look"

    def rewrite(self, program, ctx):
        return program, ir.Report({"nodes": len(program.graph.nodes)})


class Turns(Look):
    """A pass that would change the stage."""

    gives = Stage.STEP


LOOK = {"_target_": "test_extra.Look"}


class Nameless(ir.Pass):
    takes = (Stage.JOINT,)

    def rewrite(self, program, ctx):
        return program, ir.Report()


class Stageless(Nameless):
    name, takes = "stageless", Stage.JOINT  # type: ignore[assignment]


class Careless(Nameless):
    name = "careless"

    def rewrite(self, program, ctx):
        return program


def looking(*stages, after=(), name="look"):
    return {**LOOK, "takes": [{"_target_": "passes.ir.stages.Stage", "_args_": [int(stage)]} for stage in stages], "after": list(after), "name": name}


def build(*extra, microbatches=1, pp=1, once="auto"):
    cfg = PassesConfig(CastConfig(None), extra=extra, accumulate=AccumulateConfig(once, once))
    return pipeline_of(cfg, pp, microbatches=microbatches)


def orders(pipeline: Pipeline) -> dict[str, list[str]]:
    """Return the names of the passes of each program; check their order."""
    steps = {row.name: pipeline.lineage(row.name) for row in pipeline.rows if not row.shared}
    for each in steps.values():
        check_order(each, Stage.CAPTURED)
    return {name: [step.name for step in each] for name, each in steps.items()}


def behind(order: list[str], name: str = "look") -> str | None:
    """Return the pass directly before another one."""
    return order[order.index(name) - 1] if name in order and order.index(name) else None


KINDS = [{}, {"microbatches": 3}, {"microbatches": 3, "once": "step"}, {"microbatches": 4, "pp": 2}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("stage", list(Stage)[:-1], ids=str)
def test_every_stage_has_a_place_in_each_program_at_most_once(kind, stage):
    with_it, without = orders(build(looking(stage), **kind)), orders(build(**kind))
    for name, order in with_it.items():
        assert order.count("look") <= 1
        assert [each for each in order if each != "look"] == without[name]
    trains = [order for name, order in with_it.items() if name != "evaluate"]
    assert any("look" in order for order in trains)
    if stage <= Stage.JOINT:
        assert all("look" in order for order in trains)
    assert ("look" in with_it["evaluate"]) == (stage <= Stage.LOCAL or stage >= Stage.EXPLICIT)


@pytest.mark.parametrize(
    ("stages", "after", "before"),
    [
        ([Stage.JOINT], (), "joint"),
        ([Stage.JOINT], ("remat",), "remat"),
        ([Stage.LOCAL, Stage.JOINT], (), "shard"),
        ([Stage.LOCAL, Stage.JOINT], ("simplify",), "simplify"),
        ([Stage.STEP], (), "optimize"),
        ([Stage.CAPTURED], ("chunk_loss",), "chunk_loss"),
        ([Stage.ORDERED], (), "overlap"),
    ],
)
def test_it_comes_as_early_as_it_may(stages, after, before):
    assert behind(orders(build(looking(*stages, after=after)))["step"]) == before


def test_several_keep_their_order_but_for_what_they_come_after():
    two = [looking(Stage.JOINT, name=name) for name in ("first", "second")]
    order = orders(build(*two))["step"]
    assert order.index("second") == order.index("first") + 1
    order = orders(build(looking(Stage.JOINT, after=("second",), name="first"), two[1]))["step"]
    assert order.index("second") < order.index("first")


@pytest.mark.parametrize("stage", list(Stage)[:-1], ids=str)
def test_a_run_with_a_pass_can_be_evaluated(stage):
    """Check programs without training: passes that none of them has a place for are left out."""
    cfg = PassesConfig(CastConfig(None), extra=(looking(stage),))
    order = orders(pipeline_of(cfg, train=False))["evaluate"]
    assert ("look" in order) == ("look" in orders(build(looking(stage)))["evaluate"])


def test_layers_are_all_there_with_a_pass_of_ones_own():
    assert build().folding is not None and build(LOOK).folding is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (looking(Stage.CAPTURED, after=("remat",)), "^passes.extra: look takes a captured program after remat: there is none"),
        ({"_target_": "test_extra.Turns"}, r"^passes.extra\[0\]: look gives a step program; leave `gives` out"),
        ({"_target_": "collections.Counter"}, r"^passes.extra\[0\]: collections.Counter returned a Counter; return a passes.ir.ir.Pass"),
        ({"_target_": "test_extra.Lost"}, r"^passes.extra\[0\]._target_: test_extra has no Lost$"),
        ({"_target_": "test_extra.Nameless"}, r"^passes.extra\[0\]: test_extra.Nameless has no name; add name = "),
        ({"_target_": "test_extra.Stageless"}, r"^passes.extra\[0\]: test_extra.Stageless takes no stages; add takes = "),
        (looking(Stage.JOINT, after=("simplfy",)), "^passes.extra: look has after = 'simplfy', but no pass is called so; did you mean simplify"),
    ],
)
def test_what_has_no_place_is_refused(extra, message):
    with pytest.raises(UserError, match=message):
        build(extra)


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2, "tp": 2}])
def test_one_that_changes_nothing_changes_no_number_and_is_reported(mesh):
    step = trained_alike(perceptron(), squared_error, points(), mesh, NO_DECAY, passes={"extra": [looking(Stage.STEP)], "verify": "numeric"})
    assert [each["report"]["counts"]["nodes"] > 10 for each in step.report["passes"] if each["name"] == "look"] == [True]


# A user's optimizer


class Plain:
    """An optimizer that is not a dataclass."""

    moments = ()
    scalars = update = None


@dataclass
class Changeable(Plain):
    """An optimizer that is a dataclass, but not frozen."""


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"name": "custom"}, "^optim._target_: is null with optim=custom"),
        ({"_target_": "collections.Counter"}, "^optim._target_: collections.Counter returned an object without `moments`"),
        ({"_target_": "test_extra.Nothing"}, "^optim._target_: .*Nothing"),
        ({"_target_": "test_extra.Changeable"}, r"^optim._target_: Changeable cannot be hashed; declare it as @dataclass\(frozen=True\)$"),
        ({"_target_": "test_extra.Plain", "groups": {"none": {"kinds": ["vector"], "weight_decay": 0.0}}},
         "^optim.groups.none.weight_decay: 0.0, but Plain is no dataclass with a field weight_decay"),
    ],
)  # fmt: skip
def test_what_is_no_optimizer_is_refused(optim, message):

    with pytest.raises(UserError, match=message):
        pipeline_of(optim=optim)


def test_arguments_reach_it():
    optim = OptimConfig("custom", _target_="passes.update.optimizers.SGD", arguments={"momentum": 0.5})
    step = pipeline_of(optim=optim)["step"].passes
    assert next(each for each in step if each.name == "optimize").optimizer == SGD(0.5)


def test_a_rewrite_without_a_report_is_named():
    with pytest.raises(ir.CompileError, match="careless: rewrite returned something else than"):
        trained_alike(perceptron(), squared_error, points(), {}, NO_DECAY, passes={"extra": [{"_target_": "test_extra.Careless"}]})
