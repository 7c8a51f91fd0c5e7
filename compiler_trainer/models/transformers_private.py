"""The internals of transformers that are used: how it renames and joins stored tensors, and how it initializes.

Checked with transformers 5.23; pyproject.toml bounds the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn


class Conversion(NamedTuple):
    """How a model has its stored tensors: names to replace, and several tensors as one."""

    renamings: list[Any]
    converters: list[Any]

    def target(self, name: str, model: Any, wanted: Mapping[str, Tensor]) -> tuple[str, str | None]:
        """The module's name of a stored tensor, and the pattern of the converter that takes it, if one does."""
        rename = import_module("transformers.core_model_loading").rename_source_key
        return rename(name, self.renamings, self.converters, model.base_model_prefix, wanted)


def conversion_of(model: Any) -> Conversion:
    """The conversion of a model that transformers built."""
    kind = import_module("transformers.core_model_loading").WeightConverter
    entries = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    return Conversion([e for e in entries if not isinstance(e, kind)], [e for e in entries if isinstance(e, kind)])


def in_order(names: Iterable[str]) -> list[str]:
    """Names of stored tensors as transformers sorts them, numbers by value."""
    return sorted(names, key=import_module("transformers.core_model_loading").dot_natural_key)


def ignored(model: Any) -> list[str]:
    """Patterns of stored names that a model leaves out."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def initialize(model: Any, owner: nn.Module) -> None:
    """Give the parameters of a module of the model the values that they start with."""
    model._init_weights(owner)
