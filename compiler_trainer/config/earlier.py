"""Options that earlier versions wrote. Removed options are ignored, unless stored numbers depend on them."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from compiler_trainer.config.options import Unknown, build

T = TypeVar("T")
# Options that decide what the numbers in a checkpoint mean.
MEANING = ("model", "loss", "optim", "data.packing", "data.eval_fraction", "train.seed", "train.seq_len", "train.dtype")
ANY: Any = ...  # any value
# (removed option, its value) -> (option of now, its value); None: the value is today's only behaviour.
RENAMED: Mapping[tuple[str, Any], tuple[str, Any] | None] = {
    ("eval.interval", 0): ("eval.interval", None),
    ("train.replica_check.interval", 0): ("train.replica_check.interval", None),
    ("run.pace_interval", 0): ("run.pace_interval", None),
    ("checkpoint.keep_every", 0): ("checkpoint.keep_every", None),
    ("checkpoint.enabled", False): ("checkpoint.interval", None),
    ("checkpoint.enabled", True): None,
    ("passes.segment.enabled", False): ("passes.segment.max_nodes", None),
    ("passes.segment.enabled", True): None,
    ("passes.verify", "off"): ("passes.verify", "none"),
    ("lr_schedule.warmup_fraction", ANY): ("lr_schedule.warmup_ratio", ANY),
    ("lr_schedule.decay_fraction", ANY): ("lr_schedule.decay_ratio", ANY),
    ("passes.roll", ANY): ("passes.fold_layers", ANY),
    ("passes.schedule.bucket_mib", ANY): ("passes.communication.bucket_mib", ANY),
    ("passes.schedule.ahead", ANY): ("passes.communication.prefetch", ANY),
}
REMOVED_ENTRIES: Mapping[str, tuple[str, ...]] = {"plan.recompute": ("every_second",)}  # entries of lists


def load_options(cls: type[T], written: Any, where: str) -> T:
    """Return options that this version or an earlier one wrote to `where`, as `cls`.

    Raises UserError if one of them means something else now.
    """
    options = renamed(copy.deepcopy(written))
    for name, entry in removed_entries(options):
        tell(f"{where}: {name}: {entry} is no longer a choice and is ignored")
    while True:
        try:
            return build(cls, options)
        except Unknown as error:
            if is_in(error.place, MEANING) or not remove(options, error.place):
                raise
            tell(f"{where}: {error.place} is no longer an option and is ignored")


def renamed(options: Any) -> Any:
    """Return options under their current names."""
    for (name, value), new in RENAMED.items():
        group, _, last = name.rpartition(".")
        entries = inside(options, group)
        if not isinstance(entries, dict) or last not in entries or not is_same(entries[last], value):
            continue
        old_value = entries.pop(last)
        if not entries:  # the group is empty now
            remove(options, group)
        if new is not None:
            set_inside(options, new[0], old_value if new[1] is ANY else new[1])
    return options


def removed_entries(options: Any) -> Iterator[tuple[str, str]]:
    """Remove the entries of lists that no longer exist; yield each with its option."""
    for name, removed in REMOVED_ENTRIES.items():
        entries = inside(options, name)
        for entry in removed:
            if isinstance(entries, list) and entry in entries:
                entries.remove(entry)
                yield name, entry


def is_same(actual: Any, value: Any) -> bool:
    """Return True if `actual` is `value`, of the same type: 0 is not False."""
    return value is ANY or actual == value and type(actual) is type(value)


def set_inside(options: Any, name: str, value: Any) -> None:
    """Set an option by its dotted name; create missing groups."""
    *groups, last = name.split(".")
    for group in groups:
        options = options.setdefault(group, {})
    options[last] = value


def remove(options: Any, name: str) -> bool:
    """Remove an option; return True if it existed."""
    group, _, last = name.rpartition(".")
    entries = inside(options, group)
    if not isinstance(entries, dict) or last not in entries:
        return False
    del entries[last]
    return True


def inside(options: Any, group: str) -> Any:
    """Return the options in a dotted group, None if there is no such group."""
    for part in group.split(".") if group else ():
        options = options.get(part) if isinstance(options, dict) else None
    return options


def is_in(name: str, groups: tuple[str, ...]) -> bool:
    """Return True if an option is one of `groups`, or in one of them."""
    return any(name == group or name.startswith(f"{group}.") for group in groups)


@functools.cache
def tell(message: str) -> None:
    """Print a line once per process, on one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
