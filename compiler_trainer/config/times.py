"""Times in options."""

from __future__ import annotations

import re

PATTERN = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def is_time(given: str | float) -> bool:
    """Return True for a number of seconds above 0, or hours, minutes and seconds as `2h30m` or `45s`."""
    return seconds(given) > 0


def seconds(given: str | float) -> float:
    """Return the seconds of a time; 0 if it is not one."""
    if isinstance(given, int | float):
        return given
    found = PATTERN.fullmatch(given)
    return sum(int(n or 0) * size for n, size in zip(found.groups(), (3600, 60, 1))) if found else 0
