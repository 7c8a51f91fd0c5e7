"""The life of a parameter from its dumps: every gather, use, reduction and update, and none of another parameter."""

from __future__ import annotations

from collections import Counter

import pytest
from commands import call
from tool_runs import run_folder

from compiler_trainer.config.errors import UserError
from compiler_trainer.inspect import parameter
from compiler_trainer.inspect.dumps import load


def events(name: str, **options) -> list[tuple[str, str]]:
    """Return the events and their details, in order."""
    run = load(run_folder(**options))
    return [(e.what, e.detail) for stage in parameter.chosen(run) for e in parameter.life(stage, name)]


@pytest.mark.parametrize(
    ("name", "stored", "gathered"),
    [
        ("down.weight", "[6@dp_shard, 5@tp], 72 bytes a rank", "over dp_shard to f64[6, 3] [6, 5@tp] replicate(dp_shard)"),
        ("norm.weight", "[6@dp_shard], 24 bytes a rank", "over dp_shard to f64[6] [6] replicate(dp_shard)"),
    ],
)
def test_a_sharded_weight_is_gathered_twice_and_its_gradient_reduced_once(name, stored, gathered):
    use = "by mm" if name == "down.weight" else "by mul.Tensor"
    again = [("gathered again", gathered), ("used in the backward", use)]
    producer = "by mm" if name == "down.weight" else "by sum.dim_IntList"
    assert events(name) == [
        ("stored", stored),
        ("gathered", gathered),
        ("used", use),
        *([("gradient computed", producer), *again] if name == "down.weight" else [*again, ("gradient computed", producer)]),
        ("gradient reduced", "by reduce_scatter over dp_shard in f64"),
        ("updated", "by copy_"),
    ]


@pytest.mark.parametrize("name", ["embed.weight", "up.weight", "down.weight"])
@pytest.mark.sample(2)
def test_reductions_of_activations_over_tp_are_no_reductions_of_a_gradient(name):
    over = [detail for event, detail in events(name, max_norm=1.0) if event == "gradient reduced"]
    assert over == ["by reduce_scatter over dp_shard in f64"]


def test_every_event_is_at_the_line_it_names():
    run = load(run_folder())
    (stage,) = parameter.chosen(run)
    lines = stage.text.splitlines()
    for event in parameter.life(stage, "up.weight"):
        assert lines[event.node.line - 1].startswith(f"%{event.node.name} = ")


def test_each_gradient_is_reduced_by_a_collective_of_its_own():
    (stage,) = parameter.chosen(load(run_folder()))
    reduced = Counter(
        e.node.name
        for name in ("embed.weight", "norm.weight", "up.weight", "gate.weight", "down.weight")
        for e in parameter.life(stage, name)
        if e.what == "gradient reduced" and "dp_shard" in e.detail
    )
    assert len(reduced) == 5 and set(reduced.values()) == {1}


def test_a_cast_is_told():
    bf16_events = events("up.weight", tp=1, param_dtype="bfloat16")
    assert ("gathered", "cast to bf16, over dp_shard to bf16[5, 6] [5, 6] replicate(dp_shard)") in bf16_events


def test_a_pattern_names_each_and_one_that_matches_none_the_nearest():
    run = load(run_folder())
    assert parameter.parameters(run, "*ate.weight") == ["gate.weight"]
    assert len(parameter.parameters(run, "*")) == 5
    with pytest.raises(UserError, match="did you mean 'down.weight'"):
        parameter.parameters(run, "donw.weight")


def test_the_command_line(capsys, tmp_path):
    assert call("inspect", run_folder(), "--parameter", "gate.weight") == 0
    assert "gradient reduced" in capsys.readouterr().out
    assert call("inspect", tmp_path / "none", "--parameter", "gate.weight") == 2
    assert capsys.readouterr().err.startswith("error: ")
