"""Write what is known of the architectures as a Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date

import torch
import transformers

from tests.nightly.architectures.judge import DOCUMENTS, HALF, MESHES, NAMES, NEAR, Record
from tests.nightly.architectures.tiny import year
from tests.nightly.models.page import VERDICTS, reasons

NO_EXPERTS = "no experts"  # in the reason of a refusal that is of the mesh, not of the model
HEAD = f"""# Architectures of transformers

All causal language models of the installed transformers that take tokens alone, the newest first, each trained with
`model.path` a folder with a small config of its type: random weights, a layer of each kind, three steps of AdamW on
rows with several documents. Losses, gradients (as moments), parameters and buffers are compared with those of
transformers' own code in eager PyTorch on one device, in fp64. A model of your own is compared in the same way by
`compiler-trainer check-model`.

```sh
python -m tests.nightly.architectures --jobs 2 --write docs/measured/architectures.md
```

- documents: how documents in one row are kept apart, such that the logits of each are those that it has alone: by
  positions that start again, by masks, or by states of recurrences that start again. If there is no way, a run needs
  `model.attention=causal`, with which a row is one text, and the other columns are of that.
- {", ".join(f"{name} ({' '.join(options)})" for name, options in MESHES.items() if name != HALF)}: the largest
  difference, over the largest entry of its tensor. 1e-10 is allowed, and 2e-05 if the model computes parts in fp32;
  after the first step up to 1e-06 and 1e-03, if eager PyTorch's own result changes by half as much with the last bit of
  its weights, as AdamW divides small gradients by their size.
- bf16: dp_shard 2 x tp 2 with `passes.cast.param_dtype=bfloat16`: the relative difference of the loss and the gradient
  norm from those in fp64; {NEAR:.0e} is allowed, and twice what a rounding of each weight to bf16 changes, if that is more.
- year: of the copyright in the source of the type. unbuilt: transformers builds no small model from its defaults.
"""


def page(kinds: Sequence[str], known: Mapping[tuple[str, str], Record]) -> str:
    """Return totals, the table, and reasons."""
    judged = [kind for kind in kinds if any((kind, name) in known for name in NAMES)]
    known = {key: shown(record) for key, record in known.items() if key[0] in judged}
    hours = sum(record.get("seconds", 0.0) for record in known.values()) / 3600
    when = f"{date.today():%Y-%m-%d}, transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}"
    lines = [HEAD, f"{when}: {len(judged)} architectures, {hours:.1f} hours of one process.", "", *totals(known), ""]
    lines += [f"| architecture | year | {' | '.join(NAMES)} |", "|---|---|" + "---|" * len(NAMES)]
    lines += [f"| {kind} | {year(kind) or ''} | {' | '.join(cells(kind, known))} |" for kind in judged]
    return "\n".join([*lines, *reasons([(kind, NAMES) for kind in judged], known)]) + "\n"


def shown(record: Record) -> Record:
    """Return a record as the page shows it: experts that a model does not have are not the model's fault."""
    return record | {"verdict": "none"} if NO_EXPERTS in record["why"] else record


def totals(known: Mapping[tuple[str, str], Record]) -> Iterator[str]:
    """Yield the verdict counts by column."""
    yield f"| | {' | '.join(VERDICTS)} |"
    yield "|---|" + "---|" * len(VERDICTS)
    for name in NAMES:
        count = Counter(record["verdict"] for (_, on), record in known.items() if on == name)
        yield f"| {name} | {' | '.join(str(count[verdict]) for verdict in VERDICTS)} |"


def cells(kind: str, known: Mapping[tuple[str, str], Record]) -> Iterator[str]:
    """Yield what the table shows of a type."""
    for name in NAMES:
        record = known.get((kind, name), {"verdict": "none"})
        if record["verdict"] == "right":
            yield record["way"] if name == DOCUMENTS else f"{record['error']:.0e}"
        else:
            yield "" if record["verdict"] == "none" else record["verdict"]
