"""Draw random cases.

Options that would only be refused are drawn seldom. Never drawn are options for which two right implementations may
differ: Muon if a matrix may have no gradient (experts that no token chooses), roundings to fp32 if a choice depends on
them (experts, straight-through rounding) or if an optimizer divides them by a gradient's size, and buffers for experts'
rows that may overflow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from passes.ir.mesh import Mesh
from tests.nightly.parity.case import Case, case_of
from tests.nightly.parity.models import KINDS
from tests.nightly.parity.models.kind import Kind

RANKS = 8
STAGES = 4  # most stages of a pipeline
SIZES = (2, 2, 2, 3, 4, 5, 6, 7, 8)
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
FAMILIES = {"decoder": 6, "experts": 4, "plain": 5, "others": 2, "functions": 4, "transformers": 2}  # weights
NO_DECAY = {"kinds": ["vector"], "weight_decay": 0.0}
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.8, "weight_decay": 0.1},
    {"name": "adamw", "betas": [0.8, 0.9], "eps": 1e-6},
    {"name": "adamw", "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2},
    {"name": "muon", "momentum": 0.9, "weight_decay": 0.1, "eps": 1e-6,
     "groups": {"vectors": {"kinds": ["vector"], "optimizer": "adamw", "weight_decay": 0.0}}},
)  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {  # options that need no axis and no kind of model
    "train.microbatches": (2, 3, 4),
    "optim.max_norm": (0.3, 5.0),
    "passes.remat.policy": ("none", "full", "attention", "every_n", "offload"),
    "passes.remat.regather": (False,),
    "passes.chunk_loss.chunks": (2, 3),
    "passes.communication.bucket_mib": (0.0, 0.001),
    "passes.communication.prefetch": (0, 2),
    "passes.segment.max_nodes": (30, None),
    "passes.fold_layers": (False,),
    "passes.shard.min_shard_elements": (50,),
    "passes.cast.param_dtype": ("float32",),
    "passes.cast.reduce_dtype": ("float32",),
}
OF_AXIS: dict[str, dict[str, tuple[Any, ...]]] = {
    "cp": {
        "passes.context.method": ("ring", "all_gather", "ulysses", "hybrid"),
        "passes.context.load_balance": ("head_tail", "blocks", "none"),
        "passes.context.block": (1, 2, 3),
        "passes.context.skip_steps": (False,),
    },
    "dp_shard": {f"passes.accumulate.{what}": ("step", "microbatch") for what in ("gather", "reduce")},
    "pp": {"passes.pipeline.schedule": ("gpipe", "interleaved", "zero_bubble", "zbv")},
    "tp": {"passes.shard.sequence_parallel": (False,)},
    "ep": {"passes.moe.dispatch": ("all_gather", "dropless", "bounded"), "passes.moe.chunks": (2, 3)},
}


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` cases, each drawn from its own number."""
    return (draw_case(random.Random(f"{seed} {number}")) for number in range(count))


def draw_case(draw: random.Random) -> Case:
    """Draw a case."""
    family = draw.choices(list(FAMILIES), list(FAMILIES.values()))[0]
    model = draw.choice([name for name, kind in KINDS.items() if kind.family == family])
    kind = KINDS[model]
    mesh = mesh_for(kind, family, draw)
    optim = dict(draw.choice(OPTIMIZERS if kind.muon else OPTIMIZERS[:-1]))
    if kind.narrow and optim["name"] != "sgd":
        optim = dict(OPTIMIZERS[1])
    if draw.random() < 0.3:
        optim["groups"] = {"vectors": NO_DECAY | {"lr": 0.5}} | optim.get("groups", {})
        if optim["name"] == "muon":
            optim["groups"]["vectors"] = OPTIMIZERS[-1]["groups"]["vectors"] | {"lr": 0.5}
    options = draw_options(OPTIONS, draw)
    if draw.random() < 0.6:  # takes a third of the time; values also show what the verifier would refuse
        options["passes.verify"] = "none"
    for axis in mesh:
        options |= draw_options(OF_AXIS.get(axis, {}), draw, 0.5)
    if options.get("passes.context.load_balance") in ("head_tail", "none"):
        options.pop("passes.context.block", None)  # it would have no effect, and is refused
    of_model = model_options(kind, draw)
    options = without_ambiguity(model, of_model, mesh, optim, options)
    sizes = {"seed": draw.randrange(1000), "length": draw.randint(2, 13)}
    sizes["rows"] = options.get("train.microbatches", 1) * draw.choice((1, 1, 2, 2, 3, 5))
    if "tp" in mesh and draw.random() < 0.4:  # drawn last, so that earlier seeds draw the same cases
        options["passes.communication.async_tp"] = "all"
    if draw.random() < 0.25:
        options["eval.interval"] = 1
    at_once = "pp" not in mesh and options.get("train.microbatches") in (2, 4) and draw.random() < 0.5
    if at_once and mesh.keys() & {"cp", "tp", "ep"}:  # otherwise microbatches send nothing, and it is refused
        options["passes.communication.batch_overlap"] = 2
    return case_of(
        model,
        sizes
        | of_model
        | {f"mesh.{axis}": size for axis, size in mesh.items()}
        | {f"optim.{name}": value for name, value in optim.items()}
        | options,
    )


def draw_options(pool: dict[str, tuple[Any, ...]], draw: random.Random, share: float = 0.18) -> dict[str, Any]:
    """Draw some of the options, each with one of its values."""
    return {name: draw.choice(values) for name, values in pool.items() if draw.random() < share}


def model_options(kind: Kind, draw: random.Random) -> dict[str, Any]:
    """Draw options of a model that fit together, about half of them at their defaults."""
    while True:
        options = {name: draw.choice(values) for name, values in kind.space.items() if draw.random() < 0.5}
        if "function" in kind.space:
            options |= {name: draw.choice(kind.space[name]) for name in ("function", "place")}
        if kind.fits({name: value for name, value in options.items() if value != kind.space[name][0]}):
            return options


def mesh_for(kind: Kind, family: str, draw: random.Random) -> dict[str, int]:
    """Draw axes and sizes whose product is at most `RANKS`; models with experts often get `ep`."""
    axes = [axis for axis in AXES if kind.sequence or axis != "cp"]
    mesh: dict[str, int] = {}
    for axis in draw.sample(axes, min(len(axes), draw.choice((0, 1, 1, 2, 2, 2, 2, 3, 3)))):
        available = RANKS // math.prod(mesh.values())
        if fitting := [size for size in SIZES if size <= min(available, STAGES if axis == "pp" else available)]:
            mesh[axis] = draw.choice(fitting)
    if family == "experts" and draw.random() < 0.7:
        spread = [ep for ep in range(2, RANKS + 1) if is_mesh(mesh | {"ep": ep})]
        mesh |= {"ep": draw.choice(spread)} if spread else {}
    return mesh


def is_mesh(sizes: dict[str, int]) -> bool:
    """Return True if experts can be sharded with these sizes."""
    try:
        return bool(Mesh.of(sizes).experts)
    except ValueError:
        return False


def without_ambiguity(
    model: str, of_model: dict[str, Any], mesh: dict[str, int], optim: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Remove the options that are ambiguous together with the others."""
    kind = KINDS[model]
    rounds = any(name.startswith("passes.cast.") for name in options)
    chooses = kind.family == "experts" or of_model.get("function") == "straight"
    if rounds and (chooses or optim["name"] != "sgd"):
        options = {name: value for name, value in options.items() if not name.startswith("passes.cast.")}
    if options.get("passes.moe.dispatch") not in ("dropless", "bounded"):
        options.pop("passes.moe.chunks", None)  # only rows that are sent come in chunks
    if options.get("passes.moe.dispatch") == "bounded":
        options |= {"passes.moe.capacity_factor": float(math.prod(mesh.values()))}
    if "layers" not in kind.space and options.get("passes.remat.policy") in ("full", "attention", "every_n"):
        del options["passes.remat.policy"]
    if of_model.get("loss", "smoothed") in ("smoothed", "squares"):
        options.pop("passes.chunk_loss.chunks", None)  # these read all logits, but a chunk has only its own
    if options.get("passes.context.load_balance") != "blocks":
        options.pop("passes.context.block", None)
    return options
