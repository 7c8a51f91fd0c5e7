"""Train pairs of runs that should, or may not, have the same bits, and report whether they do.

    python -m tests.nightly.bits                                   # prints one line per comparison
    python -m tests.nightly.bits --write docs/measured/bits.md     # also updates the table of the page

The two runs of a comparison differ in one setting. Both take three steps, with a decoder and with one with experts, in
fp32 and with a bf16 cast. Compared are losses, gradient norms, parameters and moments. Exit codes: 0 every promise
holds, 1 one is broken.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiler_trainer import compile_step
from compiler_trainer.parity.compare import difference, wholes
from tests.nightly.parity.case import Case
from tools import pages

SIZES = "rows=4 length=9 seed=3"
MODELS = {"decoder": f"decoder {SIZES} heads=4 kv_heads=2", "experts": f"experts {SIZES}"}
DTYPES = {"fp32": {}, "bf16": {"cast": {"param_dtype": "bfloat16"}}}
MESHES: tuple[dict[str, int], ...] = ({}, {"dp_shard": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2})
Bits = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Setting:
    """The settings of a run, in addition to those that both runs of a comparison share."""

    passes: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] | None = None  # None: the comparison's
    backend: str = "eager"
    reverse: bool = False  # the two microbatches in the other order


@dataclass(frozen=True)
class Gate:
    """A comparison: two settings, whether the same bits are promised, and the meshes to compare them on."""

    name: str
    one: Setting
    other: Setting
    promised: bool = True
    meshes: Sequence[Mapping[str, int]] = MESHES
    layers: int = 2


PLAIN, COMPILED = Setting(), Setting(backend="inductor")
NOT_RECOMPUTED = Setting({"remat": {"policy": "none"}})
NOT_BUCKETED = Setting({"communication": {"bucket_mib": 0, "prefetch": 0}})
ONE: tuple[Mapping[str, int], ...] = ({},)
GATES = (
    Gate("two runs", PLAIN, PLAIN),
    Gate("two runs, compiled", COMPILED, COMPILED, meshes=ONE),
    Gate("segments, and the whole program at once", PLAIN, Setting({"segment": {"max_nodes": None}})),
    Gate("the same, compiled", COMPILED, Setting({"segment": {"max_nodes": None}}, backend="inductor"), False, ONE),
    Gate("layers alike folded into one, and each by itself", PLAIN, Setting({"fold_layers": False}), layers=12),
    Gate("everything recomputed, and nothing", Setting({"remat": {"policy": "full"}}), NOT_RECOMPUTED),
    Gate("activations offloaded, and kept", Setting({"remat": {"policy": "offload"}}), NOT_RECOMPUTED),
    Gate("collectives merged and early, and as they come", PLAIN, NOT_BUCKETED),
    Gate("verified in numbers, and not", Setting({"verify": "spec"}), Setting({"verify": "none"})),
    Gate("two microbatches, and in the other order", PLAIN, Setting(reverse=True), False, ({}, {"dp_shard": 2})),
    Gate("compiled, and eager", COMPILED, PLAIN, promised=False, meshes=ONE),
    Gate("a mesh, and one device", PLAIN, Setting(mesh={}), promised=False, meshes=MESHES[1:]),
)


def train(model: str, dtype: str, mesh: Mapping[str, int], setting: Setting, layers: int, microbatches: int) -> Bits:
    """Return metrics, parameters and optimizer moments, by name, after each step."""
    subject = Case.parse(f"{MODELS[model]} layers={layers}").subject()
    batches = [{name: narrow(value) for name, value in batch.items()} for batch in subject.batches]
    if setting.reverse:
        batches = [{name: torch.cat(value.chunk(2)[::-1]) for name, value in batch.items()} for batch in batches]
    step = compile_step(
        copy.deepcopy(subject.model).float(),
        subject.loss,
        batches[0],
        mesh=mesh if setting.mesh is None else setting.mesh,
        optim={"name": "adamw", "max_norm": 1.0},
        passes={**DTYPES[dtype], **setting.passes},
        lower={"backend": setting.backend},
        microbatches=microbatches,
        ranks="processes" if setting.backend == "inductor" else "lockstep",
        evaluate=False,
    )
    results = []
    for batch in batches:
        metrics = {name: torch.tensor(value) for name, value in step(batch, 1e-2).items()}
        results.append(metrics | {name: value.clone() for name, value in wholes(step).items()})
    return results


def narrow(value: Tensor) -> Tensor:
    """Cast a floating-point tensor to fp32; return other tensors unchanged."""
    return value.float() if value.is_floating_point() else value


def relative_difference(one: Bits, other: Bits) -> float:
    """Return the largest difference of two entries, relative to the value's largest entry; 0 if all bits are equal."""
    pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a]
    return max(0.0 if torch.equal(x, y) else difference(x, y) or sys.float_info.min for x, y in pairs)


def compare_all() -> Iterator[tuple[Gate, str, str, float]]:
    """Yield each comparison with its model and dtype, its mesh, and the relative difference of the two runs."""
    for gate in GATES:
        for model in MODELS:
            for dtype in DTYPES:
                for mesh in gate.meshes:
                    settings = gate.one, gate.other
                    count = 2 if gate.other.reverse else 1
                    runs = [train(model, dtype, mesh, setting, gate.layers, count) for setting in settings]
                    yield gate, f"{model}, {dtype}", " x ".join(f"{a} {n}" for a, n in mesh.items()), relative_difference(*runs)


def table(measurements: Sequence[tuple[Gate, str, str, float]]) -> str:
    """Return a Markdown table: per comparison the promise, pairs, pairs with equal bits, and the worst difference."""
    rows = []
    for gate in GATES:
        errors = [error for g, _, _, error in measurements if g is gate]
        promise, same, worst = "yes" if gate.promised else "no", errors.count(0.0), max(errors, default=0.0)
        rows.append((gate.name, promise, len(errors), same, f"{worst:.0e}" if worst else ""))
    return pages.table(("the two", "promised", "pairs", "same bits", "worst, of a value's largest entry"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all comparisons, print them, update the page if asked, and return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.nightly.bits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="the page whose table to update")
    options = parser.parse_args(arguments)
    measurements = []
    for gate, label, mesh, error in compare_all():
        measurements.append((gate, label, mesh, error))
        print(f"{gate.name}: {label}, {mesh or 'one device'}: {'the same bits' if not error else f'differ by {error:.1e}'}")
    if options.write:
        pages.renew(options.write, "bits", table(measurements))
    return 1 if any(error and gate.promised for gate, _, _, error in measurements) else 0


if __name__ == "__main__":
    sys.exit(main())
