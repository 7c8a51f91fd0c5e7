"""Report jumps of the loss when they happen."""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 50  # steps
FEWEST = 20  # losses needed before a jump can be reported
DEVIATIONS = 6.0


class Spikes:
    """The losses of the last steps, without spikes."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def message(self, step: int, loss: float) -> str:
        """Return a message if a step's loss is a spike, otherwise an empty string.

        A spike is not added to the usual losses.
        """
        if len(self.losses) >= FEWEST:
            mean, deviation = statistics.fmean(self.losses), statistics.stdev(self.losses)
            if loss > mean + DEVIATIONS * deviation:
                usual_range = f"{mean:.3f} ± {deviation:.3f} of the last {len(self.losses)} steps"
                self.losses.popleft()  # so that a new level becomes usual after a while
                return f"step {step}: the loss jumps to {loss:.3f}, far from {usual_range}"
        self.losses.append(loss)
        return ""
