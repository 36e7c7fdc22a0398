"""Where the command line writes: lines, a live line on a terminal, and one JSON object as the last line of stdout."""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slora_ref.demo.watch import ADAPTER_MARK, FREE_MARK, KV_MARK, Draw

# argparse's type for what `add_subparsers` returns has no public name.
Subparsers = Any

PLAIN_MARKS = {KV_MARK: "#", ADAPTER_MARK: "=", FREE_MARK: "."}


class Screen:
    """Plain lines, and on a terminal one live line that is drawn over.

    Args:
        as_json: lines go to stderr, so that stdout holds the JSON object alone.
    """

    def __init__(self, as_json: bool) -> None:
        self._stream = sys.stderr if as_json else sys.stdout
        self._live = False

    @property
    def live(self) -> Draw | None:
        """Draws the live line; None where there is no terminal to draw it on."""
        return self._draw if self._stream.isatty() else None

    def say(self, line: str) -> None:
        """Prints a line in the place of the live line, if there is one."""
        self.clear()
        print(line, file=self._stream, flush=True)

    def clear(self) -> None:
        """Takes the live line away."""
        if self._live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
        self._live = False

    def _draw(self, line: Callable[[int], str]) -> None:
        print(f"\r\x1b[K{line(shutil.get_terminal_size().columns)}", end="", file=self._stream, flush=True)
        self._live = True


def print_json(fields: dict[str, Any]) -> None:
    """One JSON object on one line of stdout, in ASCII; numbers that JSON cannot hold become null."""
    print(json.dumps(_finite(fields)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_anywhere() -> None:
    """From here on stdout takes any text: what its encoding does not have becomes a plain mark or `?`."""
    codecs.register_error("slora_ref.plain", _plain)
    if sys.stdout is None:  # the shell closed it: `>&-`
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  it stays open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="slora_ref.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What codecs ask for: the replacement for the characters that cannot be encoded, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(PLAIN_MARKS.get(character, "?") for character in lost), error.end


def give_up_stdout() -> None:
    """What is still to be written goes nowhere: stdout cannot take it, and Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
