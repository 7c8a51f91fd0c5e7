"""A plan as text and numbers: the table, `plan.json`, and the recipe that trains the best setting."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rich.table import Table

from compiler_trainer.config.files import put
from compiler_trainer.config.schema import Config
from compiler_trainer.models.subject import named
from compiler_trainer.planning.error import error_bar
from compiler_trainer.planning.estimate import Estimate
from compiler_trainer.planning.search import GIB, Plan, room
from compiler_trainer.training.speed import computes_in

RECIPE, JSON = "plan.yaml", "plan.json"
SHOWN = 12  # rows of a table
BYTES = 4 * 257  # vocabularies from this size on are not for bytes
HIDDEN = ("plan", "run", "recipe", "cluster.gpus", "hydra")  # options that a recipe does not repeat
AXIS = {"dp_shard": "fsdp"}  # one name for the axes that shard parameters
NAMES = {  # causes of waiting
    "fsdp": "parameters and gradients (dp_shard, cp)",
    "dp_replicate": "gradients of replicas (dp_replicate)",
    "tp": "activations (tp)",
    "cp": "keys and values (cp)",
    "ep": "rows of experts (ep)",
}
HEADINGS = ("", "mesh", "microbatches", "recomputation", "attention", "tokens/s/GPU", "MFU", "GiB", "bound by")


def title(plan: Plan) -> str:
    """Return the job's title: `llama3_8b on 8 GPUs of h100`."""
    cfg = plan.asked.cfg
    return f"{named(cfg.model)} on {plan.asked.gpus:,} GPUs of {cfg.cluster.name}"


def job(plan: Plan) -> str:
    """Return the batch: `16 sequences of 8,192 tokens a step`."""
    train = plan.asked.cfg.train
    return f"{train.global_batch_size:,} sequences of {train.seq_len:,} tokens a step"


def counted(plan: Plan) -> str:
    """Return the number of settings, by closed form and compiled."""
    compiled = sum(one.candidate.first is None for one in (*plan.ranked, *plan.too_large))
    return f"{plan.count:,} settings in closed form, the best {compiled} compiled"


def row(plan: Plan, number: int | str, found: Estimate) -> tuple[str, ...]:
    """Return the cells of a table's row."""
    candidate = found.candidate
    method = candidate.method if candidate.mesh.cp > 1 else ""
    precision = ", float8" if candidate.float8 and len(products(plan)) > 1 else ""
    speed, share = f"{plan.tokens_per_s(found):,.0f}", f"{plan.mfu(found):.1%}"
    kept, size = candidate.recomputes() + precision, f"{found.bytes / GIB:.3g}"
    return (str(number), candidate.axes(), str(candidate.microbatches), kept, method, speed, share, size, bound(found))


def bound(found: Estimate) -> str:
    """Return the share of a step spent computing, and the axis that it waits for longest."""
    computing = f"computing {found.compute_s / found.step_s:.0%}"
    waits = {axis: s for axis, s in found.exposed_s.items() if s > 0.01 * found.step_s}
    if not waits:
        return computing
    axis = max(waits, key=lambda a: waits[a])
    return f"{computing}, {axis} {waits[axis] / found.step_s:.0%}"


def products(plan: Plan) -> set[bool]:
    """Return the values of float8 among the compiled settings."""
    return {one.candidate.float8 for one in (*plan.ranked, *plan.too_large)}


def computed_in(plan: Plan) -> str:
    """Return the precision: `, in bfloat16`."""
    eight = " and float8" if products(plan) == {True} else ""
    return f", in {computes_in(plan.asked.cfg)}{eight}"


def table(plan: Plan) -> Table:
    """Return a table of the compiled settings that fit, fastest first."""
    caption = "\n".join(filter(None, (counted(plan) + computed_in(plan), error_bar(plan.asked.cfg))))
    found = Table(*HEADINGS, title=f"{title(plan)}: {job(plan)}", caption=caption)
    for number, one in enumerate(plan.ranked[:SHOWN], 1):
        found.add_row(*row(plan, number, one))
    return found


# ---- reasons against other settings -------------------------------------------------------------------


def why(plan: Plan, other: Estimate, best: Estimate) -> str:
    """Return the reason why a setting is not the best: missing memory, or the largest extra time."""
    if other.bytes > room(plan.asked):
        kind = max(other.memory, key=lambda k: other.memory[k] - best.memory.get(k, 0.0))
        size = f"{other.memory[kind] / GIB:,.1f} GiB of {kind}"
        return f"needs {other.bytes / GIB:,.1f} GiB of {room(plan.asked) / GIB:,.1f}: {size}"
    mine, its = by_name(best.exposed_s), by_name(other.exposed_s)
    more = {name: s - mine.get(name, 0.0) for name, s in its.items()}
    more["computing"] = other.compute_s - best.compute_s
    name = max(more, key=lambda n: more[n])
    slower = f"{other.step_s / best.step_s - 1:.1%} slower"
    if name == "computing":
        return f"{slower}: computes {1e3 * more[name]:,.0f} ms longer"
    sent = sum(sum(links.values()) for axis, links in other.sent.items() if AXIS.get(axis, axis) == name)
    what = f" for {sent / 1e9:,.1f} GB that a rank sends" if sent else ""
    return f"{slower}: waits {1e3 * more[name]:,.0f} ms more for {NAMES.get(name, name)}{what}"


def by_name(exposed: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of waiting, summed by one name an axis."""
    found: dict[str, float] = {}
    for axis, s in exposed.items():
        name = AXIS.get(axis, axis).partition(".")[0]
        found[name] = found.get(name, 0.0) + s
    return found


def losers(plan: Plan, count: int = 40) -> list[tuple[Estimate, str]]:
    """Return the best setting of each other mesh with the reason why it is not the best.

    Compiled settings are compared with the compiled best, closed forms with its closed form.
    """
    best = plan.best
    form = next((e for e in plan.forms if e.candidate == best.candidate), best)
    seen, found = {best.candidate.mesh}, list[tuple[Estimate, str]]()
    fitting = [e for e in plan.forms if e.bytes <= room(plan.asked)]
    for one in (*plan.ranked, *plan.too_large, *fitting, *plan.forms):
        if one.candidate.mesh not in seen:
            seen.add(one.candidate.mesh)
            found.append((one, why(plan, one, best if one.is_compiled else form)))
    return found[:count]


# ---- files --------------------------------------------------------------------------------------------


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a JSON object."""

    def of(found: Estimate) -> dict[str, Any]:
        return {
            "options": found.candidate.options(),
            "step_ms": 1e3 * found.step_s,
            "tokens_per_s_per_gpu": plan.tokens_per_s(found),
            "mfu": plan.mfu(found),
            "compute_ms": 1e3 * found.compute_s,
            "exposed_ms": {axis: 1e3 * s for axis, s in found.exposed_s.items()},
            "sent_bytes": {axis: dict(links) for axis, links in found.sent.items()},
            "peak_mem_bytes": round(found.bytes),
            "memory": {kind: round(size) for kind, size in found.memory.items()},
            "compiled": found.is_compiled,
        }

    return {
        "job": f"{title(plan)}: {job(plan)}",
        "gpus": plan.asked.gpus,
        "memory_bytes": round(room(plan.asked)),
        "error": error_bar(plan.asked.cfg),
        "settings": plan.count,
        "left_out": plan.left,
        "ranked": [of(found) for found in plan.ranked],
        "too_large": [of(found) for found in plan.too_large],
        "refused": {f"{c.axes()}, {c.recomputes()}": said for c, said in plan.refused.items()},
        "others": [{**of(found), "why": said} for found, said in losers(plan)],
    }


def recipe(plan: Plan, overrides: Sequence[str], groups: Iterable[str]) -> str:
    """Return a recipe that trains the best setting: stated and chosen options, the prediction as comments."""
    chosen, stated = stated_options(overrides, set(groups))
    best = plan.best
    planned_for = OmegaConf.create(update(plan.asked.cfg))  # the prediction holds only for this update
    options = OmegaConf.merge(planned_for, OmegaConf.create(stated), OmegaConf.create(best.candidate.options()))
    body = yaml.safe_dump(OmegaConf.to_container(options), sort_keys=False, default_flow_style=None, width=110)
    defaults = "".join(f"  - {line}\n" for line in chosen)
    waits = ", ".join(f"{axis} {1e3 * s:,.0f} ms" for axis, s in best.exposed_s.items() if s > 1e-3 * best.step_s)
    lines = [
        f"{title(plan)}: {job(plan)}.",
        f"Predicted: {plan.tokens_per_s(best):,.0f} tokens/s/GPU, MFU {plan.mfu(best):.1%}, "
        f"{1e3 * best.step_s:,.0f} ms a step, {best.bytes / GIB:.3g} GiB a GPU.",
        f"Waits: {waits or 'none'}. The best of {counted(plan)}.",
        f"Start it on {plan.asked.gpus:,} ranks with recipe=THIS_FILE. Text and tokenizer are yours to say; optimizer,",
        "schedule and length are those that it was planned for.",
    ]
    head = "".join(f"# {line}\n" for line in lines)
    return f"# @package _global_\n{head}" + (f"defaults:\n{defaults}" if defaults else "") + body


def update(cfg: Config) -> dict[str, Any]:
    """Return the options of the update and of the batch, as the plan assumes them."""
    steps = {"steps": cfg.train.steps, "seq_len": cfg.train.seq_len, "global_batch_size": cfg.train.global_batch_size}
    own = {"optim": dataclasses.asdict(cfg.optim), "lr_schedule": dataclasses.asdict(cfg.lr_schedule), "train": steps}
    vocabulary = getattr(cfg.model, "vocab_size", 0)
    return own | ({"data": {"tokenizer": ""}} if cfg.data.tokenizer == "bytes" and vocabulary >= BYTES else {})


def stated_options(overrides: Sequence[str], groups: set[str]) -> tuple[list[str], dict[str, Any]]:
    """Return (lines of a defaults list, options) for the overrides of a command line."""
    lines: list[str] = []
    options = OmegaConf.create()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.get_key_element().lstrip("+~")
        if key == "recipe":
            lines.insert(0, str(override.value()))
        elif key in groups:
            lines.append(f"override /{key}: {override.value()}")
        elif not any(f"{key}.".startswith(f"{hidden}.") for hidden in HIDDEN):
            OmegaConf.update(options, key, override.value(), force_add=True)
    plain = OmegaConf.to_container(options)
    assert isinstance(plain, dict)
    return lines, {str(key): value for key, value in plain.items()}


def write(plan: Plan, text: str, folder: Path) -> None:
    """Write `plan.json` and the recipe into a run folder."""
    put(folder / JSON, json.dumps(as_json(plan), indent=1) + "\n")
    put(folder / RECIPE, text)
