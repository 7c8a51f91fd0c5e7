"""Pages generated from the code are current, and the table of support is right."""

from __future__ import annotations

import re
import shlex

import pytest
from doc_pages import ROOT

from compiler_trainer.cli.table import VERBS
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.validate import validate
from compiler_trainer.inspect import words
from passes.ir.mesh import AXES
from passes.ir.stages import Stage
from passes.ops.reshard import RESHARD_OPS
from tools import glossary, reference

NAMED = re.compile(r'^class \w+\(ir\.Pass\):.*?^    name = "(\w+)"', re.MULTILINE | re.DOTALL)
FEATURES = [feature for group in reference.FEATURES.values() for feature in group]


def test_the_page_of_options_is_current():
    assert (ROOT / "docs/reference/options.md").read_text() == reference.options(), "run python -m tools.reference"


def test_the_glossary_is_current_and_knows_every_pass_operator_axis_and_stage():
    text = (ROOT / "docs/reference/glossary.md").read_text()
    assert text == glossary.page(), "run python -m tools.reference"
    known = [*words.PASSES, *(op.name for op in RESHARD_OPS.values()), *AXES, *(str(stage) for stage in Stage)]
    assert not [name for name in known if not re.search(rf"^\| `?{name}`? \|", text, re.MULTILINE)]
    assert list(glossary.WORDS) == sorted(glossary.WORDS, key=str.lower)


def test_every_pass_has_words():
    names = {name for path in (ROOT / "passes").rglob("*.py") for name in NAMED.findall(path.read_text())}
    assert len(names) > 20 and names < words.PASSES.keys() | {"capture", "apply"}


def test_the_table_of_support_is_current():
    text = (ROOT / "README.md").read_text()
    assert reference.support() in text and reference.renewed(text) == text, "run python -m tools.reference"


def test_the_page_of_commands_has_every_verb():
    rows = re.findall(r"^\| `([a-z][a-z-]*)[ `]", (ROOT / "docs/reference/commands.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(VERBS)


def validated(options: str):
    cfg = to_config(compose(shlex.split(options)))
    ranks = cfg.mesh.pp * cfg.mesh.dp_replicate * max(1, cfg.mesh.dp_shard) * cfg.mesh.cp * cfg.mesh.tp * cfg.mesh.ep
    return validate(cfg, ranks)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_a_feature_that_is_named_has_options_and_a_test(feature):
    validated(feature.options)
    assert "def test_" in (ROOT / feature.test).read_text()


@pytest.mark.parametrize("feature", reference.MISSING, ids=lambda f: f.name)
def test_what_is_not_supported_is_refused(feature):
    with pytest.raises(UserError):
        validated(feature.options)
