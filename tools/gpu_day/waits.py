"""Check that the host never waits for the GPU in the launch of a step: `python -m tools.gpu_day.waits`.

PyTorch raises an error if the host would wait for the device. The first steps are left out, because they tune kernels,
pin memory and load libraries. Exit codes: 0 no launch waits, 1 one does.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

import torch

from compiler_trainer.doctor.probes import PROBES, Probe, compiled, job
from compiler_trainer.parity.of_config import subject_of

WARM_UP, CHECKED = 4, 3  # steps; CUDA graphs are recorded in the third


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the jobs of one rank; print the line that waits, if there is one."""
    parser = argparse.ArgumentParser("python -m tools.gpu_day.waits")
    parser.add_argument("--only", default="", help="jobs whose names contain this")
    only = parser.parse_args(arguments).only
    failed = 0
    for probe in PROBES:
        if not probe.mesh and only in probe.name and "lower.backend=eager" not in probe.options:
            problem = problem_of(probe)
            failed += bool(problem)
            print(f"{'WAITS' if problem else 'free '}  {probe.name}: {problem}", flush=True)
    return 1 if failed else 0


def problem_of(probe: Probe) -> str:
    """Return the error and its traceback if the host waits in a launch of a probe's step; empty if it does not."""
    cfg = job(probe, 1)
    subject = subject_of(cfg)
    step = compiled(cfg, subject)
    for _ in range(WARM_UP):
        step.launch(subject.batches[0], 1e-3)
    try:
        if step.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        results = [step.launch(subject.batches[0], 1e-3) for _ in range(CHECKED)]
    except RuntimeError as error:
        return f"{error}\n{''.join(traceback.format_tb(error.__traceback__)[-6:])}"
    finally:
        if step.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return "" if all(torch.isfinite(torch.tensor(each.read()["loss"])) for each in results) else "the loss is lost"


if __name__ == "__main__":
    sys.exit(main())
