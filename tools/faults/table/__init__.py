"""The faults: one line each of the passes as it should not be, by the room they are in."""

from __future__ import annotations

from tools.faults.fault import Fault
from tools.faults.table import (
    autograd,
    communication,
    context,
    lower,
    memory,
    pipeline,
    precision,
    program,
    rules,
    sharding,
    update,
)

ROOMS = (program, rules, precision, sharding, context, autograd, memory, update, communication, pipeline, lower)
FAULTS = tuple(fault for room in ROOMS for fault in room.FAULTS)

__all__ = ["FAULTS", "Fault"]
