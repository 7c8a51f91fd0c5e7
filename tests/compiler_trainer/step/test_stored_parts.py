"""A stored program is of the passes, rules and optimizer that were plugged in: none is read after one of these changed."""

from __future__ import annotations

import importlib
import sys
import textwrap
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from oracle import perceptron, points, squared_error

from compiler_trainer.config import targets
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import OptimConfig, PassesConfig
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.made_of import made_of, options_of
from compiler_trainer.step.shelf import Shelf
from compiler_trainer.step.sources import Unkeyed
from passes.lower.store import Store
from passes.program.mesh import Mesh
from passes.rules import ADDED, RULES, add_rule

FILES = {
    "plug_update": """
        from dataclasses import dataclass
        from plug_helper import FACTOR

        @dataclass(frozen=True)
        class Signs:
            rate: float = 1.0
            moments = ()

            def scalars(self, lr, step):
                return (lr * self.rate * FACTOR,)

            def update(self, parameter, gradient, moments, scalars):
                return parameter - scalars[0] * gradient.sign(), ()
        """,
    "plug_helper": "FACTOR = 1.0\n",
    "plug_pass": """
        from dataclasses import dataclass
        from passes.program import ir
        from passes.program.stages import Stage
        import torch

        @dataclass(frozen=True)
        class Scale(ir.Pass):
            by: float = 1.0
            name, takes = "scale", (Stage.CAPTURED,)

            def rewrite(self, program, ctx):
                program = program.copy()
                for node in [n for n in program.calls() if n.target is torch.ops.aten.tanh.default]:
                    with program.graph.inserting_after(node):
                        new = program.graph.call_function(torch.ops.aten.mul.Scalar, (node, self.by))
                    ir.set_value(new, ir.example(node))
                    ir.copy_origin(new, node)
                    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
                program.module.recompile()
                return program, ir.Report()
        """,
    "plug_makers": """
        def rule_of(factor):
            return lambda node: factor

        PLAIN, OTHER, DEFAULT = lambda node: 1, lambda node: 2, lambda node, of=2: 1
        """,
    "plug_rules": """
        from passes.rules import add_rule
        add_rule("plug::one", "...d -> ...d")
        """,
}
EXTRA = {"_target_": "plug_pass.Scale", "by": 2.0}
UPDATE = OptimConfig("custom", _target_="plug_update.Signs")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with parts, imported anew by `key`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(RULES, "plug::one", None)
    monkeypatch.setitem(ADDED, "plug::one", "")
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    yield tmp_path
    forget()


def forget():
    for name in FILES:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def key(passes=None, optim=UPDATE):
    """What the programs of a job are stored under, in a process that has imported nothing of the folder."""
    forget()
    given = options_of(
        passes or PassesConfig(extra=(EXTRA,), rules=("plug_rules",)), optim, Mesh.of({}), "cpu"
    )
    return made_of(perceptron(), squared_error, points()[0], given).key


def test_the_same_parts_have_the_same_key(folder):
    assert key() == key() == key(optim=replace(UPDATE, lr=0.5))


CHANGES = {
    "the optimizer": ("plug_update", "* gradient.sign()", "* gradient"),
    "what the optimizer imports": ("plug_helper", "1.0", "2.0"),
    "the pass": ("plug_pass", "mul.Scalar", "add.Scalar"),
    "a default of the pass": ("plug_pass", "by: float = 1.0", "by: float = 3.0"),
    "the rule": ("plug_rules", '"...d -> ...d"', '"... -> ..."'),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_that_changed_changes_it(what, folder):
    name, old, new = CHANGES[what]
    before, path = key(), folder / f"{name}.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    assert key() != before
    path.write_text(text)
    assert key() == before


@pytest.mark.parametrize(
    "given",
    [
        {"optim": replace(UPDATE, arguments={"rate": 2.0})},
        {"optim": OptimConfig()},
        {"passes": PassesConfig(extra=({**EXTRA, "by": 3.0},), rules=("plug_rules",))},
        {"passes": PassesConfig(extra=(EXTRA, EXTRA), rules=("plug_rules",))},
        {"passes": PassesConfig(rules=("plug_rules",))},
        {"passes": PassesConfig(extra=(EXTRA,))},
    ],
    ids=str,
)
def test_arguments_and_what_is_left_out_change_it(given, folder):
    assert key(**given) != key()


def test_rules_that_were_added_anywhere_are_told_apart(folder, monkeypatch):
    """In a script, say: no file that the model is of adds them."""
    from plug_makers import DEFAULT, OTHER, PLAIN, rule_of

    keys, given = [key()], ["...d -> ...d", "...d -> ...d; linear 0", rule_of(1), rule_of(2), PLAIN, OTHER, DEFAULT]
    for rule in (*given, rule_of(2)):
        monkeypatch.setitem(RULES, "plug::two", None)
        monkeypatch.setitem(ADDED, "plug::two", "")
        add_rule("plug::two", rule)
        keys.append(key())
    assert len(set(keys)) == len(given) + 1 and keys[-1] == keys[4]


def test_a_rule_that_holds_what_has_no_text_leaves_the_program_unstored(folder, monkeypatch):
    from plug_makers import rule_of

    monkeypatch.setitem(ADDED, "plug::two", rule_of(iter([1])))
    with pytest.raises(Unkeyed):
        key()


def losses(shelf, passes, optim):
    """Two losses of a start, and whether it read a stored program."""
    forget()
    step = compile_step(
        perceptron(), squared_error, points()[0], optim=optim, passes=passes, ranks="lockstep", shelf=shelf
    )
    return [step(batch, 0.1)["loss"] for batch in points()], step.report["program"]["read"]


def test_a_start_after_a_change_trains_what_was_asked_for(folder, tmp_path):
    shelf, passes = Shelf(store=Store(tmp_path / "programs")), PassesConfig(extra=(EXTRA,))
    first, again = losses(shelf, passes, UPDATE), losses(shelf, passes, UPDATE)
    assert (first[1], again[1]) == (False, True) and first[0] == again[0]
    seen = [first[0]]
    for name, old, new in (CHANGES["what the optimizer imports"], ("plug_pass", "self.by", "self.by * 2")):
        path = folder / f"{name}.py"
        path.write_text(path.read_text().replace(old, new))
        found, read = losses(shelf, passes, UPDATE)
        assert not read and found not in seen
        seen.append(found)


# Where rules come from


def test_an_installed_package_adds_rules_by_an_entry_point(folder, monkeypatch):
    point = EntryPoint("plugged", "plug_rules", "compiler_trainer.rules")
    monkeypatch.setattr(targets, "entry_points", lambda group: [point] if group == point.group else [])
    assert [module.__name__ for module in targets.import_rules(())] == ["plug_rules"] and ADDED[
        "plug::one"
    ] == "...d -> ...d"
    monkeypatch.setattr(targets, "entry_points", lambda group: [EntryPoint("lost", "plug_lost", group)])
    with pytest.raises(
        UserError, match="^the entry point plug_lost of compiler_trainer.rules: plug_lost cannot be imported"
    ):
        targets.import_rules(())


def test_a_module_of_rules_that_is_lost_is_named():
    with pytest.raises(
        UserError, match="^passes.rules: plug_lost cannot be imported: .*; put its folder on PYTHONPATH"
    ):
        targets.import_rules(("plug_lost",))
