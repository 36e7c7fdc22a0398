"""The folders that a command line can name: a path, or `toy` for the model inside slora_ref."""

from __future__ import annotations

from pathlib import Path

from slora_ref.toy import MODEL_FOLDER

TOY = "toy"


def model_folder(name: str) -> Path:
    """The folder that --model names."""
    return MODEL_FOLDER if name == TOY else Path(name)
