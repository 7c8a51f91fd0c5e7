"""Simulate how much of its time a large job trains although machines fail: `python -m tools.bench.goodput`.

Failures come at random, independently. A failed step, the steps since the last copy of the state, and the time to
recover are lost. Three ways to recover are compared; all assume that another machine is at hand:

    checkpoint  all processes end, start again, and read the newest checkpoint
    memory      the same, but each machine's state is also in the memory of another one, a few steps old
    elastic     the other ranks go on without the machine from that copy, and take in another one later, between steps

A failure during a recovery begins it again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

HOUR_S = 3600.0
OF_MACHINE = 8  # GPUs
FAILURES = {1024: 7.9, 16384: 1.8}  # hours between failures, by GPUs, as reported by others (docs/measured/goodput.md)


@dataclass(frozen=True)
class Way:
    """A way to recover: seconds to do so, and between copies of the state, each of which stops training for a while.

    If `shrinks`, the job trains without the machine until another one has come after `joins_after_s`, for which it
    stops `recovery_s` once more.
    """

    name: str
    recovery_s: float
    every_s: float
    copy_s: float = 0.0
    shrinks: bool = False
    joins_after_s: float = 0.0


def goodput(way: Way, gpus: int, between_s: float, seconds: float, draw: random.Random) -> float:
    """Return the share of `seconds` that equals training on all GPUs without a failure."""
    now = trained = since_copy = 0.0
    stops: list[float] = []  # when machines that replace others are there
    failure = draw.expovariate(1 / between_s)
    speed = 1.0
    while now < seconds:
        length = min(way.every_s - since_copy, failure - now, min(stops, default=seconds) - now)
        now, trained, since_copy = now + max(length, 0.0), trained + speed * max(length, 0.0), since_copy + length
        if now >= failure:
            trained -= speed * since_copy
            since_copy, now = 0.0, now + way.recovery_s
            while (failure := failure + draw.expovariate(1 / between_s)) < now:
                now = failure + way.recovery_s
            if way.shrinks:
                stops.append(now + way.joins_after_s)
        elif stops and now >= min(stops):
            stops.remove(min(stops))
            now += way.recovery_s
        else:
            since_copy, now = 0.0, now + way.copy_s
        speed = 1 - OF_MACHINE * len(stops) / gpus
    return trained / now


def ways(args: argparse.Namespace, between_s: float) -> Sequence[Way]:
    """Return the ways to recover; checkpoints are taken at the best interval for their cost (Young, 1974)."""
    every_s = (2 * args.checkpoint_s * between_s) ** 0.5
    return (
        Way("checkpoint", args.restart_s, every_s, args.checkpoint_s),
        Way("memory", args.restart_s, args.snapshot_s),
        Way("memory, programs stored", args.stored_s, args.snapshot_s),
        Way("elastic", args.elastic_s, args.snapshot_s, shrinks=True, joins_after_s=args.machine_s),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of goodput by the number of GPUs."""
    parser = argparse.ArgumentParser("python -m tools.bench.goodput", description=(__doc__ or "").splitlines()[0])
    seconds = {
        "restart": (948, "from a failure to the next step, if all processes start again and compile"),
        "stored": (90, "the same with stored programs"),
        "elastic": (32, "the same if the other ranks go on"),
        "checkpoint": (10, "that training stops for a checkpoint"),
        "snapshot": (60, "between copies in memory"),
        "machine": (600, "until another machine has started its ranks"),
    }
    for name, (default, text) in seconds.items():
        parser.add_argument(f"--{name}-s", type=float, default=default, metavar="SECONDS", help=text)
    parser.add_argument("--days", type=float, default=100, help="simulated")
    args = parser.parse_args(arguments)
    print("| GPUs | hours between failures | " + " | ".join(way.name for way in ways(args, 1.0)) + " |")
    print("|---" * (2 + len(ways(args, 1.0))) + "|")
    for gpus, hours in FAILURES.items():
        shares = [
            goodput(way, gpus, hours * HOUR_S, args.days * 24 * HOUR_S, random.Random(0))
            for way in ways(args, hours * HOUR_S)
        ]
        print(f"| {gpus:,} | {hours} | " + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |")


if __name__ == "__main__":
    main()
