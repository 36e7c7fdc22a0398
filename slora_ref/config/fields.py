"""Reading a JSON file that a stranger wrote, field by field.

Every value that enters the project through config.json, generation_config.json, adapter_config.json or an index passes
through here, so a wrong type, a NaN, a 40-digit integer or a file of brackets becomes one line that names the field. It
knows nothing of models: what the fields mean is said where they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slora_ref.errors import SloraError

MAX_JSON_BYTES = 4 << 20
SHOWN_CHARACTERS = 80


def show(value: object) -> str:
    """`value` as text fit for a one-line message: escaped, and cut after 80 characters."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def read_json(path: Path, error: type[SloraError], limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises `error` when it is missing, not a regular file, larger than `limit` bytes, not JSON, or not an object.
    """
    return parse_json(path, read_text(path, error, limit), error)


def read_text(path: Path, error: type[SloraError], limit: int = MAX_JSON_BYTES) -> bytes:
    """What stands in `path`, not parsed yet. Raises `error` when it is missing, not a regular file, or too large."""
    try:
        if not path.is_file():
            where = show(str(path.parent)) + ("" if path.parent.is_dir() else ", which is no folder")
            raise error(f"no file {path.name} in {where}")
        size = path.stat().st_size
        if size > limit:
            raise error(f"{show(str(path))} is {size} bytes; the limit is {limit}")
        return path.read_bytes()
    except (OSError, ValueError) as cause:
        raise error(f"{show(str(path))} cannot be read: {show(str(cause))}") from None


def parse_json(path: Path, text: bytes, error: type[SloraError]) -> dict[str, Any]:
    """The JSON object in a text. Raises `error` when there is none; the path is only for its message."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise error(f"{show(str(path))} cannot be read as JSON: {show(str(cause))}") from None
    if not isinstance(value, dict):
        raise error(f"{show(str(path))} holds {show(value)} where an object {{...}} is needed")
    return value


class Fields:
    """One JSON object with typed reads; a null counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], source: str, error: type[SloraError]) -> None:
        self.values = values
        self.source = source
        self.error = error

    def refuse(self, name: str, wanted: str) -> SloraError:
        """The error for a field that is not `wanted`; the caller raises it."""
        return self.error(f"{self.source}: {show(name)[1:-1]} is {show(self.values.get(name))}; {wanted}")

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """The integer field `name` in low..high; a missing one without a default is refused."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high} is needed")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """The number `name` in low..high (so no NaN); a missing one without a default is refused."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.refuse(name, f"a number from {low:g} to {high:g} is needed")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """The boolean field `name`; 0, 1 and texts are refused, since they may mean anything."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false is needed")
        return value

    def text(self, name: str, default: str = "") -> str:
        """The text field `name`."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "a text is needed")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """The field `name` as token ids: one id, a list of ids, or nothing when absent."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
            raise self.refuse(name, "a token id (0 or more) or a list of them is needed")
        return tuple(ids)
