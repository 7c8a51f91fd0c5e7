"""The glossary: words of the documentation, with the code's own texts on placements, operators, passes and stages."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import yaml

from compiler_trainer.inspect.words import PASSES
from passes.ir.mesh import AXES, FLATTENED
from passes.ir.stages import Stage
from passes.ops.reshard import RESHARD_OPS
from tools.pages import table

WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

STATES = {  # as a dump writes it; the state; in spmd_types; in JAX; its meaning
    "[64@tp, 8]": ("shard", "Shard", "varying", "each rank has its own entries"),
    "[64, 8] sum(tp)": ("partial", "Partial", "unreduced", "each rank has a term of the sum"),
    "[64, 8] replicate(tp)": ("replicate", "Replicate", "reduced", "a copy used otherwise on each rank"),
    "[64, 8]": ("invariant", "Invariant", "invariant", "a copy used alike on all ranks"),
}  # fmt: skip

AXIS = {
    "pp": "pipeline stages",
    "dp_replicate": "copies of all state, each with rows of its own",
    "dp_shard": "rows of the batch; parameters, gradients and moments are stored in shards (FSDP)",
    "ep": "the part of `dp_shard` that experts are sharded over",
    "cp": "the sequence (context parallelism)",
    "tp": "heads and features (tensor parallelism)",
}


def page() -> str:
    """Return the page of the glossary."""
    words = [(word, about["meaning"], link(about["more"])) for word, about in WORDS.items()]
    states = [(state, f"`{shown}`", types, jax, meaning) for shown, (state, types, jax, meaning) in STATES.items()]
    operators = [
        (f"`{op.name}`", f"{', '.join(op.takes)} -> {op.gives}", op.kind or "none") for op in RESHARD_OPS.values()
    ]
    axes = [(f"`{axis}`", AXIS[axis]) for axis in AXES]
    axes += [(f"`{name}`", f"{', '.join(f'`{axis}`' for axis in over)} as one") for name, over in FLATTENED.items()]
    return "\n\n".join([
        "# Glossary\n\n`python -m tools.reference` makes this page.",
        table(("word", "meaning", "more"), words),
        "## Placements\n\nOn an axis of the mesh a tensor is one of these. The gradient of replicate is partial,"
        " that of invariant is invariant.",
        table(("state", "in a dump", "spmd_types", "JAX", "meaning"), states),
        "## Reshard operators\n\nAll but `pmax` define their gradient, so the backward's communication is derived.",
        table(("operator", "on its axis", "sends as"), operators),
        "## Axes\n\nOutermost first.",
        table(("axis", "what it shards"), axes),
        "## Passes\n\nIn the order in which they run; [more](../internals/pipeline.md).",
        table(("pass", "what it does"), [(f"`{name}`", meaning) for name, meaning in PASSES.items()]),
        "## Stages of a program\n\nA dump says the stage in its second line.",
        table(("stage", "the program"), stages()),
    ]) + "\n"  # fmt: skip


def link(where: str) -> str:
    """Return a link from the page to another page, or to a file of the code."""
    base = "../" if where.endswith(".md") else "../../"
    name = where.rsplit("/", 1)[1]
    return f"[{name.removesuffix('.md').replace('-', ' ')}]({base}{where})"


def stages() -> list[tuple[str, ...]]:
    """Return each stage with the comment on its line in the code."""
    names_and_comments = re.findall(r"^    ([A-Z]+) = \d+  # (.*)$", inspect.getsource(Stage), re.MULTILINE)
    return [(name.lower(), meaning) for name, meaning in names_and_comments]
