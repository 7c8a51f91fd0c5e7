"""A plan as text and numbers: the table, `plan.json` and the job file of the best setting; or a table of plans."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rich.table import Table

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import write_atomically
from compiler_trainer.config.jobs import TABLES
from compiler_trainer.config.options import flat
from compiler_trainer.config.schema import Config
from compiler_trainer.models.subject import named
from compiler_trainer.planning.dry import error_bar
from compiler_trainer.planning.estimate import Estimate
from compiler_trainer.planning.search import GIB, Plan, room
from compiler_trainer.training.speed import compute_dtype

JOB, JSON = "plan.yaml", "plan.json"
SHOWN = 12  # rows of a table
BYTES = 4 * 257  # vocabularies from this size on are not for bytes
HIDDEN = ("plan", "run", "cluster.gpus", "hydra")  # options that a job file does not repeat
AXIS = {"dp_shard": "fsdp", "experts": "ep", "experts_tp": "ep"}  # one name for axes of one purpose
NAMES = {  # causes of waiting
    "fsdp": "parameters and gradients (dp_shard, cp)",
    "dp_replicate": "gradients of replicas (dp_replicate)",
    "tp": "activations (tp)",
    "cp": "keys and values (cp)",
    "ep": "rows of experts (ep)",
    "pp": "other stages (pp)",
}
HEADINGS = ("", "mesh", "microbatches", "recomputation", "attention", "tokens/s/GPU", "MFU", "GiB", "bound by")


def title(plan: Plan) -> str:
    """Return the job's title: `llama3_8b on 8 GPUs of h100`."""
    cfg = plan.request.cfg
    return f"{named(cfg.model)} on {plan.request.gpus:,} GPUs of {cfg.cluster.name}"


def job(plan: Plan) -> str:
    """Return the batch: `16 sequences of 8,192 tokens a step`."""
    train = plan.request.cfg.train
    return f"{train.global_batch_size:,} sequences of {train.seq_len:,} tokens a step"


def setting_counts(plan: Plan) -> str:
    """Return the number of settings, by closed form and compiled."""
    compiled = sum(estimate.candidate.first is None for estimate in (*plan.ranked, *plan.too_large))
    return f"{plan.count:,} settings in closed form, the best {compiled} compiled"


def row(plan: Plan, number: int | str, estimate: Estimate) -> tuple[str, ...]:
    """Return the cells of a table's row."""
    candidate = estimate.candidate
    method = candidate.method if candidate.mesh.cp > 1 else ""
    precision = ", float8" if candidate.float8 and len(float8_values(plan)) > 1 else ""
    speed, mfu = f"{plan.tokens_per_s(estimate):,.0f}", f"{plan.mfu(estimate):.1%}"
    recomputation, size = candidate.recomputes() + precision, f"{estimate.bytes / GIB:.3g}"
    return (
        str(number),
        candidate.axes(),
        str(candidate.microbatches),
        recomputation,
        method,
        speed,
        mfu,
        size,
        bound(estimate),
    )


def bound(estimate: Estimate) -> str:
    """Return the share of a step spent computing, and the axis that it waits for longest."""
    computing = f"computing {estimate.compute_s / estimate.step_s:.0%}"
    waits = {axis: s for axis, s in estimate.exposed_s.items() if s > 0.01 * estimate.step_s}
    if not waits:
        return computing
    axis = max(waits, key=lambda a: waits[a])
    return f"{computing}, {axis} {waits[axis] / estimate.step_s:.0%}"


def float8_values(plan: Plan) -> set[bool]:
    """Return the values of float8 among the compiled settings."""
    return {estimate.candidate.float8 for estimate in (*plan.ranked, *plan.too_large)}


def computed_in(plan: Plan) -> str:
    """Return the precision: `, in bfloat16`."""
    eight = " and float8" if float8_values(plan) == {True} else ""
    return f", in {compute_dtype(plan.request.cfg)}{eight}"


def table(plan: Plan) -> Table:
    """Return a table of the compiled settings that fit, fastest first."""
    caption = "\n".join(filter(None, (setting_counts(plan) + computed_in(plan), error_bar(plan.request.cfg))))
    rows = Table(*HEADINGS, title=f"{title(plan)}: {job(plan)}", caption=caption)
    for number, estimate in enumerate(plan.ranked[:SHOWN], 1):
        rows.add_row(*row(plan, number, estimate))
    return rows


# ---- reasons against other settings -------------------------------------------------------------------


def reason_against(plan: Plan, other: Estimate, best: Estimate) -> str:
    """Return the reason why a setting is not the best: missing memory, or the largest extra time."""
    if other.bytes > room(plan.request):
        kind = max(other.memory, key=lambda k: other.memory[k] - best.memory.get(k, 0.0))
        size = f"{other.memory[kind] / GIB:,.1f} GiB of {kind}"
        return f"needs {other.bytes / GIB:,.1f} GiB of {room(plan.request) / GIB:,.1f}: {size}"
    best_waits, waits = waits_by_name(best.exposed_s), waits_by_name(other.exposed_s)
    extra_s = {name: s - best_waits.get(name, 0.0) for name, s in waits.items()}
    extra_s["computing"] = other.compute_s - best.compute_s
    name = max(extra_s, key=lambda n: extra_s[n])
    slower = f"{other.step_s / best.step_s - 1:.1%} slower"
    if name == "computing":
        return f"{slower}: computes {1e3 * extra_s[name]:,.0f} ms longer"
    sent = sum(sum(links.values()) for axis, links in other.sent.items() if AXIS.get(axis, axis) == name)
    cause = f" for {sent / 1e9:,.1f} GB that a rank sends" if sent else ""
    return f"{slower}: waits {1e3 * extra_s[name]:,.0f} ms more for {NAMES.get(name, name)}{cause}"


def waits_by_name(exposed: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of waiting, summed by one name an axis."""
    total: dict[str, float] = {}
    for axis, s in exposed.items():
        name = AXIS.get(axis, axis).partition(".")[0]
        total[name] = total.get(name, 0.0) + s
    return total


def others_with_reasons(plan: Plan, count: int = 40) -> list[tuple[Estimate, str]]:
    """Return the best setting of each other mesh with the reason why it is not the best.

    Compiled settings are compared with the compiled best, closed forms with its closed form.
    """
    best = plan.best
    best_form = next((e for e in plan.forms if e.candidate == best.candidate), best)
    meshes, reasons = {best.candidate.mesh}, list[tuple[Estimate, str]]()
    fitting = [e for e in plan.forms if e.bytes <= room(plan.request)]
    for estimate in (*plan.ranked, *plan.too_large, *fitting, *plan.forms):
        if estimate.candidate.mesh not in meshes:
            meshes.add(estimate.candidate.mesh)
            reasons.append((estimate, reason_against(plan, estimate, best if estimate.is_compiled else best_form)))
    return reasons[:count]


# ---- files --------------------------------------------------------------------------------------------


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a JSON object."""

    def of(estimate: Estimate) -> dict[str, Any]:
        return {
            "options": estimate.candidate.options(),
            "step_ms": 1e3 * estimate.step_s,
            "tokens_per_s_per_gpu": plan.tokens_per_s(estimate),
            "mfu": plan.mfu(estimate),
            "compute_ms": 1e3 * estimate.compute_s,
            "exposed_ms": {axis: 1e3 * s for axis, s in estimate.exposed_s.items()},
            "sent_bytes": {axis: dict(links) for axis, links in estimate.sent.items()},
            "peak_mem_bytes": round(estimate.bytes),
            "memory": {kind: round(size) for kind, size in estimate.memory.items()},
            "compiled": estimate.is_compiled,
        }

    return {
        "job": f"{title(plan)}: {job(plan)}",
        "gpus": plan.request.gpus,
        "memory_bytes": round(room(plan.request)),
        "error": error_bar(plan.request.cfg),
        "settings": plan.count,
        "left_out": plan.left,
        "ranked": [of(estimate) for estimate in plan.ranked],
        "too_large": [of(estimate) for estimate in plan.too_large],
        "refused": {f"{c.axes()}, {c.recomputes()}": reason for c, reason in plan.refused.items()},
        "others": [{**of(estimate), "why": reason} for estimate, reason in others_with_reasons(plan)],
    }


def job_file(plan: Plan, overrides: Sequence[str], groups: Iterable[str]) -> str:
    """Return a job file that trains the best setting: stated and chosen options, the prediction as comments."""
    choices, stated = stated_options(overrides, set(groups))
    best = plan.best
    update_options = OmegaConf.create(update(plan.request.cfg))  # the prediction holds only for this update
    options = OmegaConf.merge(update_options, OmegaConf.create(stated), OmegaConf.create(best.candidate.options()))
    mapping: Any = OmegaConf.to_container(options)
    dotted = {group: flat({group: mapping.pop(group)}, TABLES) for group in choices if group in mapping}
    body = choices | {name: value for options in dotted.values() for name, value in options.items()} | mapping
    waits = ", ".join(f"{axis} {1e3 * s:,.0f} ms" for axis, s in best.exposed_s.items() if s > 1e-3 * best.step_s)
    lines = [
        f"{title(plan)}: {job(plan)}.",
        f"Predicted: {plan.tokens_per_s(best):,.0f} tokens/s/GPU, MFU {plan.mfu(best):.1%}, "
        f"{1e3 * best.step_s:,.0f} ms a step, {best.bytes / GIB:.3g} GiB a GPU.",
        f"Waits: {waits or 'none'}. The best of {setting_counts(plan)}.",
        f"Start it on {plan.request.gpus:,} ranks: compiler-trainer THIS_FILE. State text and tokenizer yourself;",
        "optimizer, schedule and length are those of the plan.",
    ]
    head = "".join(f"# {line}\n" for line in lines)
    return head + yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=110)


def update(cfg: Config) -> dict[str, Any]:
    """Return the options of the update and of the batch, as the plan assumes them."""
    steps = {"steps": cfg.train.steps, "seq_len": cfg.train.seq_len, "global_batch_size": cfg.train.global_batch_size}
    options = {
        "optim": dataclasses.asdict(cfg.optim),
        "lr_schedule": dataclasses.asdict(cfg.lr_schedule),
        "train": steps,
    }
    vocabulary = getattr(cfg.model, "vocab_size", 0)
    return options | ({"data": {"tokenizer": ""}} if cfg.data.tokenizer == "bytes" and vocabulary >= BYTES else {})


def stated_options(overrides: Sequence[str], groups: set[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (choices of groups, options) for the overrides of a command line."""
    choices: dict[str, str] = {}
    options = OmegaConf.create()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.get_key_element().lstrip("+~")
        if key in groups:
            choices[key] = str(override.value())
        elif not any(f"{key}.".startswith(f"{hidden}.") for hidden in HIDDEN):
            OmegaConf.update(options, key, override.value(), force_add=True)
    plain: Any = OmegaConf.to_container(options)
    return choices, plain


def write(plan: Plan, text: str, folder: Path) -> None:
    """Write `plan.json` and the job file into a run folder."""
    write_atomically(folder / JSON, json.dumps(as_json(plan), indent=1) + "\n")
    write_atomically(folder / JOB, text)


# ---- several plans -------------------------------------------------------------------------------------


class Varied(NamedTuple):
    """A plan, or the error that nothing fits, and its values of the varied options."""

    values: dict[str, Any]
    plan: Plan | UserError

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table's row: the values, and the best setting."""
        values = map(str, self.values.values())
        if isinstance(self.plan, UserError):
            return (*values, self.plan.message, *[""] * (len(HEADINGS) - 2))
        return (*values, *row(self.plan, "", self.plan.best)[1:])


def found_plans(varied: Iterable[Varied]) -> list[tuple[dict[str, Any], Plan]]:
    """Return the values and plans of those for which a setting fits."""
    return [(values, plan) for values, plan in varied if not isinstance(plan, UserError)]


def vary_table(varied: Sequence[Varied]) -> Table:
    """Return a table with the best setting of each plan, a row each."""
    table = Table(*varied[0].values, *HEADINGS[1:], title=title(found_plans(varied)[0][1]))
    for variant in varied:
        table.add_row(*variant.row())
    return table
