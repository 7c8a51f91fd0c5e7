"""The types of options: numbers with bounds, and `_target_` mappings."""

from __future__ import annotations

from typing import Annotated, Any

from compiler_trainer.config.options import Must

Own = dict[str, Any]  # `_target_`, the dotted name of a function or class, and its arguments
Positive = Annotated[int, Must("be at least 1", lambda n: n >= 1)]
Interval = Annotated[int, Must("be at least 1 (null: never)", lambda n: n >= 1)]
Count = Annotated[int, Must("be 0 or more", lambda n: n >= 0)]
AxisSize = Annotated[int, Must("be at least 1, or -1 for the remaining ranks", lambda n: n >= 1 or n == -1)]
PositiveFloat = Annotated[float, Must("be above 0", lambda x: x > 0)]
NonNegativeFloat = Annotated[float, Must("be 0 or more", lambda x: x >= 0)]
Fraction = Annotated[float, Must("be from 0 to 1", lambda x: 0 <= x <= 1)]
ShareOfPeak = Annotated[float, Must("be above 0 and at most 1", lambda x: 0 < x <= 1)]
AtLeastOne = Annotated[float, Must("be 1 or more", lambda x: x >= 1)]
OpenFraction = Annotated[float, Must("be 0 or more and below 1", lambda x: 0 <= x < 1)]
Text = Annotated[str, Must("be at least one character", bool)]
RowLength = Annotated[int, Must("be at least 2, a token and the one it predicts", lambda n: n >= 2)]
MOST_LAYERS = 10_000
Layers = Annotated[int, Must(f"be from 1 to {MOST_LAYERS:,}", lambda n: 1 <= n <= MOST_LAYERS)]
Seed = Annotated[int, Must("be from 0 to 2,147,483,647", lambda n: 0 <= n < 2**31)]
Epsilon = Annotated[float, Must("be above 0 and at most 1", lambda x: 0 < x <= 1)]
RopeBase = Annotated[float, Must("be from 1 to 1e12", lambda x: 1 <= x <= 1e12)]
