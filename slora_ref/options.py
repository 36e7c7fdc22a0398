"""Checks of option values: of the right kind, within bounds, or an error that names the option, the value and the rule.

Python would take a float for a count and any text for a switch, and fail much later, in the middle of a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from slora_ref.errors import SloraError

MOST = (1 << 31) - 1
"""The largest count: sizes and page ids are 32-bit integers in the kernels."""


def check_whole(error: type[SloraError], name: str, value: Any, low: int, high: int = MOST) -> None:
    """Raises `error` unless `value` is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise error(f"{name} is {value!r:.60}; it must be a whole number, at least {low} and at most {high}")


def check_real(error: type[SloraError], name: str, value: Any, holds: bool, rule: str) -> None:
    """Raises `error` unless `value` is a finite number for which the rule holds."""
    if not is_finite(value) or not holds:
        raise error(f"{name} is {value!r:.60}; it must be {rule}")


def is_finite(value: Any) -> bool:
    """Whether this is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def check_switch(error: type[SloraError], name: str, value: Any) -> None:
    """Raises `error` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} is {value!r:.60}; it must be True or False")


def check_choice(error: type[SloraError], name: str, value: Any, choices: Collection[str]) -> None:
    """Raises `error` unless `value` is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise error(f"{name} is {value!r:.60}; it can be {' or '.join(choices)}")
