"""Compare each compiled region of the doctor's jobs with its operators in sequence: `python -m tools.gpu_day.bodies`.

Inputs are random. Free device memory is filled with NaN first, to show entries that a kernel leaves unwritten. Exit
codes: 0 all agree, 1 one does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from compiler_trainer.bisect.values import distance, largest
from compiler_trainer.config.schema import Config
from compiler_trainer.doctor.probes import PROBES, Probe, compiled, job
from compiler_trainer.parity.of_config import subject_of
from compiler_trainer.step.ranks import local_device
from passes.ir import ir
from passes.ir.bodies import Body, calls_of
from passes.lower.inductor import compile_bodies
from passes.trace.abstract_eval import Layout, laid_out

ALLOWED, IN_HALF = 1e-4, 0.5  # in half precision operators round values that kernels do not: only gross errors show
SPOILED_BYTES = 64 << 20


class Operators(fx.Interpreter):
    """Runs a region's operators in sequence, with results laid out as in the graph."""

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        return laid_out(result, ir.value(node)) if node.op == "call_function" else result


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the regions of all jobs of one rank; print those that differ and a count."""
    parser = argparse.ArgumentParser("python -m tools.gpu_day.bodies")
    parser.parse_args(arguments)
    compared: set[str] = set()
    wrong = 0
    for probe in PROBES:
        if probe.mesh or "lower.backend=eager" in probe.options or "lower.cudagraphs=true" in probe.options:
            continue
        bodies = [body for body in bodies_of(probe) if body.key not in compared]
        compared |= {body.key for body in bodies}
        kernels = compile_bodies(bodies, ir.Context(None))
        for body in bodies:
            torch.manual_seed(0)
            values = [value_like(ir.example(node)) for node in body.graph.nodes if node.op == "placeholder"]
            for problem in differences(body, kernels[body], values):
                wrong += 1
                print(f"WRONG  {probe.name}: {body.name}: {problem}\n{body.graph}", flush=True)
        print(f"{probe.name}: {len(bodies)} further bodies", flush=True)
    print(f"{len(compared)} bodies compared, {wrong} results wrong")
    return 1 if wrong else 0


def bodies_of(probe: Probe) -> list[Body]:
    """Return the compiled regions of the training programs of a probe's job."""
    cfg: Config = job(probe, 1)
    step = compiled(cfg, subject_of(cfg))
    return list({body: None for program in step.train.values() for body in calls_of(program.finished)})


def value_like(example: Tensor) -> Tensor:
    """Return a random tensor in an example's layout; integers are zero, which is a valid index."""
    value = Layout.of(example).empty()
    return value.normal_() if value.is_floating_point() and value.dtype.itemsize > 1 else value.zero_()


def differences(body: Body, kernels: object, values: Sequence[Tensor]) -> Iterator[str]:
    """Yield the differences between a compiled region and its operators: results, and inputs written in place."""
    operands = [copied(value) for value in values]
    expected = Operators(fx.GraphModule(torch.nn.Module(), body.graph)).run(*operands, enable_io_processing=False)
    written = [copied(value) for value in values]
    spoil(values)
    lines = [v.view(-1) if body.flat and v.dim() else v for v in written]
    outputs = kernels(list(lines))  # type: ignore[operator]
    results = zip(expected, (x.view(w.shape) for x, w in zip(outputs, expected, strict=True)), strict=True)
    dtypes = {ir.example(node).dtype for node in body.graph.nodes if ir.is_tensor(node)}
    allowed = ALLOWED if all(dtype.itemsize >= 4 or not dtype.is_floating_point for dtype in dtypes) else IN_HALF
    pairs = [("result", *pair) for pair in results] + [("input", *pair) for pair in zip(operands, written, strict=True)]
    for number, (kind, right, actual) in enumerate(pairs):
        if not right.is_floating_point() and right.dim() == 0:
            continue  # the seed of attention without dropout, which nobody writes
        off = difference(right, actual)
        if off > allowed:
            yield f"{kind} {number} {right.dtype}{list(right.shape)} is off by {off:.1e}"


def copied(value: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return Layout.of(value).empty().copy_(value)


def spoil(values: Sequence[Tensor]) -> None:
    """Fill memory that the next allocations get with NaN."""
    device = values[0].device if values else local_device()
    blocks = [torch.full((SPOILED_BYTES >> 12,), float("nan"), device=device) for _ in range(64)]
    blocks += [torch.full((size,), float("nan"), device=device) for size in (64, 256, 4096, 16384) for _ in range(64)]
    del blocks


def difference(right: Tensor, actual: Tensor) -> float:
    """Return the largest difference over the largest entry; infinite if one is NaN and the other is not."""
    return float(distance(right, actual).max()) / max(largest(right), 1e-30) if right.numel() else 0.0


if __name__ == "__main__":
    sys.exit(main())
