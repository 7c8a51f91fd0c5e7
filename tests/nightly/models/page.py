"""Write the verdicts of all models and meshes as a Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from tests.nightly.models.case import MESHES, Entry
from tests.nightly.models.judge import AS_PLAIN, EXACT, HALF, NOISE, ROUNDED, SINGLE, Record

FEW = 0.1  # share of all models; a mesh with fewer gets its own table
VERDICTS = ("right", "refused", "wrong", "crash", "time-out", "unbuilt")
HEAD = f"""# Models of others

`python -m tests.nightly.models --write docs/measured/models.md` trains each of these models, with random weights and tiny
sizes, for two AdamW steps on each mesh, all ranks in one process. It compares the results with a plain loop of eager
PyTorch on one device, in fp64.

- right: loss, gradient norm, all parameters and buffers agree after each step to {EXACT:.0e}, absolutely or
  relatively; to {ROUNDED:.0e} if the model itself computes parts in fp32 ("r"), to {SINGLE:.0e} if PyTorch or the
  model does not support fp64 ("s"). In bf16 (`passes.cast.param_dtype`, and floating-point tensors of batches) loss
  and gradient norm agree to {HALF:.0e} with those of the plain model, or are at most twice as far off as eager
  PyTorch's with the whole model in bf16 ("h": batch norm over three samples, gradients in the thousands). A percentage
  means right: it is the share of its parameters that a rank stores.
- wrong: the results do not agree. refused: an error that names a field, a node or a line of the model. crash: any other
  error. time-out: over the time limit. unbuilt: the model or its plain training fails, or its library is missing.
- gathered: operators whose activations are gathered although an axis of the data shards them, so that every
  rank does all of their work. The numbers are right, at the cost of one device.

Batches have three samples, and most sequences thirteen tokens, so that shards have padding. Models run in train mode
without dropout; {NOISE} times normal noise is added to all parameters, because many libraries start with zeros.
Empty cells were not run.
"""


def page(table: Sequence[Entry], known: Mapping[tuple[str, str], Record]) -> str:
    """Return totals, libraries, the table, and reasons."""
    judged = [entry for entry in table if any((entry.name, mesh) in known for mesh in entry.meshes)]
    names = {entry.name for entry in judged}
    known = {key: record for key, record in known.items() if key[0] in names}
    count = Counter(mesh for _, mesh in known)
    usual = [mesh for mesh in MESHES if count[mesh] > FEW * len(judged)]
    seldom = [mesh for mesh in MESHES if 0 < count[mesh] <= FEW * len(judged)]
    lines = [HEAD, *totals(judged, known), "", *libraries(judged), "", *verdicts(judged, known, usual)]
    if seldom:
        entries = [entry for entry in judged if any((entry.name, mesh) in known for mesh in seldom)]
        lines += ["", "Meshes on which few were run:", "", *verdicts(entries, known, seldom)]
    return "\n".join([*lines, *reasons([(entry.name, entry.meshes) for entry in judged], known)]) + "\n"


def verdicts(judged: Sequence[Entry], known: Mapping[tuple[str, str], Record], meshes: Sequence[str]) -> list[str]:
    """Return the table with one row per model."""
    lines = [f"| model | library | {' | '.join(meshes)} | gathered |", "|---|---|" + "---|" * (len(meshes) + 1)]
    for entry in judged:
        cells = [cell(known.get((entry.name, mesh))) for mesh in meshes]
        lines.append(f"| {entry.name} | {entry.library} | {' | '.join(cells)} | {operators(entry, known)} |")
    return lines


def totals(judged: Sequence[Entry], known: Mapping[tuple[str, str], Record]) -> list[str]:
    """Return the number of models and libraries, and the verdict counts per mesh."""
    count = {mesh: Counter(r["verdict"] for (_, on), r in known.items() if on == mesh) for mesh in MESHES}
    lines = [f"{len(judged)} models of {len({entry.library for entry in judged})} libraries:", ""]
    lines += [f"| mesh | {' | '.join(VERDICTS)} |", "|---|" + "---|" * len(VERDICTS)]
    return lines + [f"| {mesh} | {' | '.join(str(count[mesh][v]) for v in VERDICTS)} |" for mesh in MESHES]


def libraries(judged: Sequence[Entry]) -> list[str]:
    """Return the libraries with versions as a pip command."""
    names = sorted({entry.library for entry in judged})
    pins = [f"{name}=={number}" for name in names if (number := installed(name))]
    note = "Their requirements conflict: install their dependencies first, then each with `--no-deps`."
    return ["    pip install " + " ".join(pins), "", note]


def installed(library: str) -> str:
    """Return a library's version, or "" if it is not installed."""
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return ""


def cell(record: Record | None) -> str:
    """Return a verdict; for a right one, the share of parameters that a rank stores."""
    if record is None:
        return ""
    if record["verdict"] != "right":
        return record["verdict"]
    marks = {EXACT: "", ROUNDED: " r", SINGLE: " s", HALF: "", AS_PLAIN: " h"}
    return f"{record['share']:.0%}{marks[record['tolerance']]}"


def operators(entry: Entry, known: Mapping[tuple[str, str], Record]) -> str:
    """Return the operators whose operands are gathered on any mesh."""
    records = (known.get((entry.name, mesh), {}) for mesh in entry.meshes)
    return ", ".join(sorted({name for record in records for name in record.get("gathered", ())}))


def reasons(judged: Iterable[tuple[str, Sequence[str]]], known: Mapping[tuple[str, str], Record]) -> list[str]:
    """Return the reasons of verdicts other than right on the meshes of models: a row per reason, with its models."""
    models: dict[tuple[str, str], dict[str, None]] = {}
    for name, meshes in judged:
        for mesh in meshes:
            record = known.get((name, mesh))
            if record and record["verdict"] in VERDICTS[1:]:
                key = record["verdict"], record["why"].replace("|", "\\|")
                models.setdefault(key, {})[name] = None
    rows = [f"| {verdict} | {why} | {', '.join(names)} |" for (verdict, why), names in sorted(models.items())]
    return ["", "## Why not", "", "| verdict | reason | where |", "|---|---|---|", *rows] if rows else []
