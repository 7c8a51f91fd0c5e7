"""A loss that jumps, said when it happens."""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 50  # steps
FEWEST = 20  # before which nothing counts as usual
DEVIATIONS = 6.0


class Spikes:
    """Knows the losses of the last steps."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def said(self, step: int, loss: float) -> str:
        """What to say of a step's loss, which is from then on one of those before; empty where it is a usual one.

        A spike is not counted among the usual ones.
        """
        if len(self.losses) >= FEWEST:
            mean, deviation = statistics.fmean(self.losses), statistics.stdev(self.losses)
            if loss > mean + DEVIATIONS * deviation:
                usual = f"{mean:.3f} ± {deviation:.3f}, of the {len(self.losses)} steps before"
                self.losses.popleft()  # so that a new level becomes the usual one after a while
                return f"step {step}: the loss jumps to {loss:.3f}, far from {usual}"
        self.losses.append(loss)
        return ""
