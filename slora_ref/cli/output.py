"""Where the command line writes: lines, a live line on a terminal, and one JSON object as the last line of stdout."""

from __future__ import annotations

import json
import math
import shutil
import sys
from typing import Any

# argparse's type for what `add_subparsers` returns has no public name.
Subparsers = Any


class Screen:
    """Plain lines, and on a terminal one live line that is drawn over.

    Args:
        as_json: lines go to stderr, so that stdout holds the JSON object alone.
    """

    def __init__(self, as_json: bool) -> None:
        self._stream = sys.stderr if as_json else sys.stdout
        self._live = False

    @property
    def is_terminal(self) -> bool:
        """Whether a live line can be drawn."""
        return self._stream.isatty()

    def say(self, line: str) -> None:
        """Prints a line, below the live line if there is one."""
        if self._live:
            print(file=self._stream)
            self._live = False
        print(line, file=self._stream, flush=True)

    def draw(self, line: str) -> None:
        """Draws the live line over the last one."""
        columns = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{line[: columns - 1]}", end="", file=self._stream, flush=True)
        self._live = True


def print_json(fields: dict[str, Any]) -> None:
    """One JSON object on one line of stdout; numbers that JSON cannot hold become null."""
    print(json.dumps(_finite(fields), ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
