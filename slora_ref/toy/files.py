"""Where the toy model's files are, and their checksums.

model/              config.json, model.safetensors, tokenizer.json, ...: a Llama checkpoint as transformers saves it
adapters/<task>/    adapter_config.json, adapter_model.safetensors: a LoRA folder as PEFT saves it
accuracy.json       what evaluate.py measured on exactly these files; ACCURACY.md is the same, to be read
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class ToyFiles:
    """The files under one root, so that training again can write beside the shipped ones instead of over them."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def accuracy(self) -> Path:
        return self.root / "accuracy.json"

    @property
    def report(self) -> Path:
        return self.root / "ACCURACY.md"

    def adapter(self, task: str) -> Path:
        """The PEFT folder of one task."""
        return self.adapters / task

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file of the model and the adapters, by path below the root."""
        found = sorted(path for folder in (self.model, self.adapters) for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}

    def size(self, folder: Path) -> int:
        """Bytes of all files in `folder`."""
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


SHIPPED: Final = ToyFiles(Path(__file__).resolve().parent)
MODEL_FOLDER: Final = SHIPPED.model
ADAPTERS_FOLDER: Final = SHIPPED.adapters
