"""Who sees which fault, as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.faults.table import Fault

LOOKERS = ("spec", "numeric", "value", "suite")
HEAD = """# Faults, and who sees them

`python -m tools.faults` plants each of these in a copy of the tree and compiles small models there.

- spec, numeric: `passes.verify=spec` or `numeric` refuses the program, or a pass itself fails. `numeric` checks also
  what `spec` does.
- value: two steps differ from plain PyTorch's on one device, or cannot be run. A fault without it costs time or memory,
  or does nothing in these models; "?" if none of them comes by it.
- suite: the first test that fails, those of the fault's own room first; "survives" if none does, "-" if none was run.
"""


def page(faults: Sequence[Fault], known: Mapping[str, Mapping[str, str]]) -> str:
    """Totals, then a table: what the tests do not see first, then what no verifier sees."""
    judged = [fault for fault in faults if "value" in known.get(fault.name, {})]
    rows = sorted(judged, key=lambda fault: rank(known[fault.name]))
    found = [known[fault.name] for fault in rows]
    head = f"| fault | file | what it means | {' | '.join(LOOKERS)} |"
    lines = [HEAD, f"Of {len(faults)} faults {totals(found)}", "", head, "|" + "---|" * 7]
    for fault, record in zip(rows, found):
        cells = [mark(record, who) for who in LOOKERS]
        lines.append(f"| {' | '.join([fault.name, f'`{fault.file}`', fault.means, *cells])} |")
    return "\n".join(lines) + "\n"


def rank(record: Mapping[str, str]) -> int:
    """How little a fault is seen: 0 if not even by the tests."""
    if record.get("suite", "").startswith("survives"):
        return 0
    return 1 + bool(record["numeric"]) + bool(record["spec"])


def mark(record: Mapping[str, str], who: str) -> str:
    """A cell: the model in which a verifier sees the fault, or the test."""
    if who == "suite":
        return record.get(who, "-").replace("::", " ")
    return record[who].split(":")[0] if record["models"] else "?"


def totals(found: Sequence[Mapping[str, str]]) -> str:
    """How many are seen by whom."""
    seen = {who: sum(bool(record[who]) for record in found) for who in LOOKERS[:3]}
    run = [record["suite"] for record in found if "suite" in record]
    survive = sum(said.startswith("survives") for said in run)
    return (
        f"{len(found)} were planted: spec sees {seen['spec']}, numeric {seen['numeric']}, "
        f"values differ of {seen['value']}; "
        f"the tests were run for {len(run)}, of which {survive} survive."
    )
