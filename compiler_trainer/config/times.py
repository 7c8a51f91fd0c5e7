"""Times in options."""

from __future__ import annotations

import re

PATTERN = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def is_time(time: str | float) -> bool:
    """Return True for a number of seconds above 0, or hours, minutes and seconds as `2h30m` or `45s`."""
    return seconds(time) > 0


def seconds(time: str | float) -> float:
    """Return the seconds of a time; 0 if it is not one."""
    if isinstance(time, int | float):
        return time
    match = PATTERN.fullmatch(time)
    return sum(int(n or 0) * size for n, size in zip(match.groups(), (3600, 60, 1))) if match else 0
