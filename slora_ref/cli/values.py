"""Values of options that are more than one word: lists with commas between."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers such as 64,32,16,8."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be whole numbers with commas between") from None


def words(text: str) -> tuple[str, ...]:
    """Words such as q_proj,v_proj."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def by_default(values: Iterable[object]) -> str:
    """For a help text: the default of such an option, as it would be typed."""
    return f"(default: {','.join(map(str, values))})"
