"""Synthetic adapters: PEFT folders with random weights, for any model. They mean nothing; what they cost is real.

They take the way of every adapter: folder, header, packing, host memory, pool. A and B are never zero and change the
output about as much as the base weights make it, so that a lost or a foreign adapter shows in the answers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from slora_ref.checkpoint.load import block_name
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.errors import ConfigError
from slora_ref.shapes import Array, Float

ALPHA = 16  # lora_alpha of all the paper's adapters
STRENGTH = 0.5  # deviation of s x A B beside that of x W, which is 1
BLOCK = 1 << 24  # normal numbers that are drawn once; every matrix is a piece of them that starts somewhere else
ITEM_BYTES = 2  # float16
WRITERS = 8  # threads


@dataclass(frozen=True)
class AdapterKind:
    """What synthetic adapters look like.

    Args:
        ranks: given out in turn, as in the paper: the first adapter has the first rank.
        targets: of config.TARGETS.
    """

    ranks: tuple[int, ...] = (8,)
    targets: tuple[str, ...] = TARGETS[:4]

    def __post_init__(self) -> None:
        """Raises ConfigError for a rank that is none, or a target that is unknown."""
        if not self.ranks or min(self.ranks) < 1:
            ranks = ", ".join(map(str, self.ranks)) or "none"
            raise ConfigError(f"ranks are {ranks}; give at least one, each at least 1")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            raise ConfigError(f"targets are {', '.join(self.targets) or 'none'}; they can be {', '.join(TARGETS)}")

    def numbers(self, config: ModelConfig, rank: int) -> int:
        """Weights of one adapter."""
        return config.num_layers * rank * sum(sum(config.target_shape(target)) for target in self.targets)

    def folder_bytes(self, config: ModelConfig, count: int) -> int:
        """What `count` folders take on disk."""
        return sum(ITEM_BYTES * self.numbers(config, self.ranks[i % len(self.ranks)]) for i in range(count))


def write_adapters(folder: Path, config: ModelConfig, kind: AdapterKind, count: int, seed: int) -> list[Path]:
    """Writes `count` PEFT folders and returns them.

    Raises:
        ConfigError: the disk has not that much room; nothing was written.
    """
    needed, free = kind.folder_bytes(config, count), shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{count} adapters take {needed / 1e9:,.1f} GB on disk; {folder} has {free / 1e9:,.1f} GB free: lower "
            "--distinct or --ranks, or set TMPDIR to a larger disk"
        )
    normal = np.random.default_rng(seed).standard_normal(BLOCK, dtype=np.float32)

    def write(number: int) -> Path:
        path, rank = folder / f"set-{number:04d}", kind.ranks[number % len(kind.ranks)]
        path.mkdir()
        tensors = _tensors(config, kind, rank, normal, np.random.default_rng((seed, number)))
        save_file(dict(tensors), path / "adapter_model.safetensors", {"format": "pt"})
        (path / "adapter_config.json").write_text(json.dumps(_config(kind, rank)))
        return path

    with ThreadPoolExecutor(WRITERS) as writers:  # rounding and writing let other threads run
        return list(writers.map(write, range(count)))


def _tensors(
    config: ModelConfig, kind: AdapterKind, rank: int, normal: Float[Array, " block"], rng: np.random.Generator
) -> Iterator[tuple[str, Array]]:
    """PEFT's names and matrices: A of deviation 1 / sqrt(d_in), B so that the delta has the STRENGTH."""
    sd = STRENGTH / (ALPHA / rank * rank**0.5)
    for layer in range(config.num_layers):
        for target in kind.targets:
            d_in, d_out = config.target_shape(target)
            name = f"base_model.model.model.layers.{layer}.{block_name(target)}.lora"
            yield f"{name}_A.weight", _piece(normal, (rank, d_in), d_in**-0.5, rng)
            yield f"{name}_B.weight", _piece(normal, (d_out, rank), sd, rng)


def _piece(
    normal: Float[Array, " block"], shape: tuple[int, int], sd: float, rng: np.random.Generator
) -> Float[Array, "_ _"]:
    size = shape[0] * shape[1]
    start = int(rng.integers(0, len(normal)))
    numbers = normal.take(range(start, start + size), mode="wrap") if start + size > len(normal) else normal[start:]
    return (numbers[:size] * np.float32(sd)).astype(np.float16).reshape(shape)


def _config(kind: AdapterKind, rank: int) -> dict[str, object]:
    """adapter_config.json of a plain LoRA adapter."""
    targets: Seq[str] = kind.targets
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random weights",
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
