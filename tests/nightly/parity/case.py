"""A random case: a model and its options on one line, which is enough to run it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.parity.compare import Outcome, compare
from compiler_trainer.parity.subject import Settings, Subject
from tests.nightly.parity.models import KINDS
from tests.nightly.parity.models.kind import Kind

SMALLEST = {"seed": 0, "rows": 2, "length": 4}  # defaults of the batch


@dataclass(frozen=True)
class Case:
    """A kind of model and its non-default options: sizes, options of the model, and dotted options of training."""

    model: str
    options: tuple[tuple[str, Any], ...] = ()

    def __hash__(self) -> int:
        return hash(str(self))  # options may hold lists

    def __str__(self) -> str:
        shown = (f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in self.options)
        return shlex.join((self.model, *shown))

    @staticmethod
    def parse(line: str) -> Case:
        """Parse a line; raise UserError if its model does not exist."""
        model, *options = shlex.split(line) or [""]
        if model not in KINDS:
            raise UserError("case", f"model {model!r} does not exist; use one of {', '.join(KINDS)}")
        return Case(model, tuple((name, value_of(text)) for name, _, text in (o.partition("=") for o in options)))

    @property
    def kind(self) -> Kind:
        return KINDS[self.model]

    @property
    def named_options(self) -> dict[str, Any]:
        """Return the options by name."""
        return dict(self.options)

    @property
    def mesh(self) -> dict[str, int]:
        return {name.removeprefix("mesh."): size for name, size in self.options if name.startswith("mesh.")}

    def subject(self) -> Subject:
        """Build the model and its batches."""
        options = {name: value for name, value in self.options if "." not in name}
        sizes = {name: options.pop(name, size) for name, size in SMALLEST.items()}
        if unknown := options.keys() - self.kind.space.keys():
            raise UserError("case", f"{self.model} has no option {min(unknown)}; it has {', '.join(self.kind.space)}")
        return self.kind.subject(sizes["seed"], sizes["rows"], sizes["length"], options)

    def settings(self) -> Settings:
        """Return the settings of the training."""
        groups: dict[str, Any] = {}
        for name, value in self.options:
            *path, last = name.split(".")
            at = groups
            for part in path:
                at = at.setdefault(part, {})
            at[last] = value
        optim = {"name": "sgd"} | groups.get("optim", {})
        microbatches = groups.get("train", {}).get("microbatches", 1)
        return Settings(self.mesh, optim, groups.get("passes", {}), microbatches, evaluates="eval" in groups)

    def run(self) -> Outcome:
        """Train the case and compare it with eager PyTorch."""
        return compare(self.subject(), self.settings(), alone=bool(self.named_options.get("dropout")))


def value_of(text: str) -> Any:
    """Parse a JSON value; return any other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def case_of(model: str, options: Mapping[str, Any]) -> Case:
    """Return the case with the non-default ones of some options, with tuples as lists."""
    defaults = {name: values[0] for name, values in KINDS[model].space.items()} | SMALLEST
    changed = {name: value for name, value in options.items() if name not in defaults or defaults[name] != value}
    return Case(model, tuple((name, json.loads(json.dumps(value))) for name, value in changed.items()))
