"""Names that earlier versions gave to tensors in checkpoints, and the names that they have now."""

from __future__ import annotations

import dataclasses

from compiler_trainer.checkpoint.index import Index

# The state of a quantized layer's weight was stored as X.codes and others, which are now X.quantized.weight.codes.
STATE = {
    "nf4": ("codes", "scales", "factors", "mean", "table"),
    "mxfp4": ("codes", "scales", "table"),
    "nvfp4": ("codes", "scales", "factor", "table", "floats"),
    "int8": ("codes", "rows"),
}


def names_now(index: Index) -> dict[str, str]:
    """Return the present name of each tensor that has one, by its name in the checkpoint.

    `like`, a scalar that had only a dtype to say, has none.
    """
    state = STATE.get(index.config.get("model", {}).get("quantize"), ())
    names = {}
    for name in index.tensors:
        path, _, last = name.rpartition(".")
        if ".quantized." not in name:
            names[name] = f"{path}.quantized.weight.{last}" if last in state else name
        elif last != "like":
            names[name] = name
    return names


def with_names_now(index: Index) -> Index:
    """Return the index of a checkpoint by present names."""
    return dataclasses.replace(index, tensors={now: index.tensors[name] for name, now in names_now(index).items()})
