"""The page of faults and the checks that notice them, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tools.faults.fault import Fault

Record = Mapping[str, str]
LOOKERS = ("spec", "numeric", "value", "suite")
HEAD = """# Planted faults and the checks that catch them

`python -m tools.faults` plants each of these faults in a copy of the tree and compiles small models there: faults by
meaning (`tools/faults/table.py`), and faults by syntax, spread evenly over each package (`tools/faults/mutations.py`).

- spec, numeric: `passes.verify=spec` or `numeric` refuses the program, or a pass itself fails. `numeric` includes the
  checks of `spec`.
- value: two steps differ from plain PyTorch's on one device, or cannot run. A fault that changes no value costs time or
  memory, or does nothing in these models; "?" if no model executes the faulty line.
- suite: the first test that fails, those of the fault's package first; "survives" if none does, "-" if none was run.
"""


def page(faults: Sequence[Fault], known: Mapping[str, Record]) -> str:
    """Return totals by package and by check, then a row for each fault, first those that nothing notices."""
    judged = [fault for fault in faults if "value" in known.get(fault.name, {})]
    rows = sorted(judged, key=lambda fault: rank(known[fault.name]))
    head = f"| fault | file | the fault | {' | '.join(LOOKERS)} |"
    lines = [HEAD, f"Of {len(faults)} faults {totals([known[fault.name] for fault in rows])}", ""]
    lines += [*by_room(judged, known), "", *by_check([known[fault.name] for fault in judged]), ""]
    lines += [head, "|" + "---|" * 7]
    for fault in rows:
        cells = [mark(known[fault.name], who) for who in LOOKERS]
        lines.append(f"| {' | '.join([fault.name, f'`{fault.file}`', fault.means, *cells])} |")
    return "\n".join(lines) + "\n"


def by_room(faults: Sequence[Fault], known: Mapping[str, Record]) -> list[str]:
    """Return a table: for each package, the faults by the first check that notices them."""
    counts: dict[str, Counter[str]] = {}
    for fault in sorted(faults, key=lambda fault: fault.room):
        counts.setdefault(fault.room, Counter())[first(known[fault.name])] += 1
    columns = ("spec", "numeric", "value", "nobody", "no model comes by")
    lines = [f"| room | faults | {' | '.join(columns)} |", "|" + "---|" * 7]
    for room, count in counts.items():
        lines.append(f"| {room} | {count.total()} | {' | '.join(str(count[column]) for column in columns)} |")
    return lines


def first(record: Record) -> str:
    """Return the cheapest check that notices a fault."""
    if not record["models"]:
        return "no model comes by"
    return next((who for who in LOOKERS[:3] if record[who]), "nobody")


def by_check(records: Sequence[Record]) -> list[str]:
    """Return a table: the number of faults that each check of `passes/check`, or a pass itself, notices first."""
    answers = [record[who] for record in records if (who := first(record)) in ("spec", "numeric")]
    checks = Counter(text.split(": ")[1] for text in answers)
    rows = [f"| {check} | {count} |" for check, count in checks.most_common()]
    return ["| seen first by | faults |", "|---|---|", *rows]


def rank(record: Record) -> int:
    """Return the visibility of a fault: 0 if not even tests notice it."""
    if record.get("suite", "").startswith("survives"):
        return 0
    return 1 + bool(record["numeric"]) + bool(record["spec"])


def mark(record: Record, who: str) -> str:
    """Return a cell: the model in which a verifier notices the fault, or the test."""
    if who == "suite":
        return record.get(who, "-").replace("::", " ")
    return record[who].split(":")[0] if record["models"] else "?"


def totals(records: Sequence[Record]) -> str:
    """Return a sentence with the number of faults that each check notices."""
    seen = {who: sum(bool(record[who]) for record in records) for who in LOOKERS[:3]}
    suites = [record["suite"] for record in records if "suite" in record]
    survivors = sum(text.startswith("survives") for text in suites)
    return (
        f"{len(records)} were planted: spec sees {seen['spec']}, numeric {seen['numeric']}, "
        f"values differ of {seen['value']}; "
        f"the tests were run for {len(suites)}, of which {survivors} survive."
    )
