"""The fitted constants: written by `python -m slora_ref.paper.fit`, read by every run."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from slora_ref.simulate.roofline import Constants

FILE = "constants.json"


def fitted_constants() -> Constants:
    """The committed values."""
    text = (resources.files("slora_ref.paper") / FILE).read_text(encoding="utf-8")
    return Constants(**json.loads(text)["constants"])


def how_fitted() -> dict[str, object]:
    """How the committed values came about."""
    text = (resources.files("slora_ref.paper") / FILE).read_text(encoding="utf-8")
    return {name: value for name, value in json.loads(text).items() if name != "constants"}


def write_constants(constants: Constants, about: dict[str, object]) -> None:
    """Commits new values, beside how they came about."""
    fields = {"constants": asdict(constants), **about}
    Path(__file__).with_name(FILE).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
