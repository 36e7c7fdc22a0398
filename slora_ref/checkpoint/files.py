"""The tensor files of a checkpoint folder: one file, or shards with an index that is followed tensor by tensor.

A copy of a tensor in a shard that the index does not name, or a file that it does not mention, changes nothing (a
server once opened the files that the index named and took all that lay in them, so an old copy won). The index cannot
lead out of the folder, and pickles are never opened. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from slora_ref.checkpoint.tensors import FLOAT_TYPES, StoredTensor, read_header, read_tensor
from slora_ref.config.fields import read_json, show
from slora_ref.errors import CheckpointError, UnsupportedModel
from slora_ref.shapes import Array

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class TensorFiles:
    """The tensors of a checkpoint folder by name. A context: files stay open inside it."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when the folder has no safetensors, or an index that cannot be followed."""
        self._places = locate(folder)
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        for file in self._open.values():
            file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there and of a type that can be read."""
        if name not in self._places:
            raise CheckpointError(f"tensor {show(name)} is missing from the checkpoint")
        tensor = self._places[name][1]
        if tensor.dtype not in FLOAT_TYPES:
            raise UnsupportedModel(f"tensor {show(name)} is {tensor.dtype}; supported: {', '.join(FLOAT_TYPES)}")
        return tensor.shape

    def dtype(self, name: str) -> str:
        """The type in which a tensor that can be read is stored."""
        return str(FLOAT_TYPES[self._places[name][1].dtype])

    def merged(self, names: Sequence[str], dtype: np.dtype[Any]) -> Array:
        """The tensors `names` below each other in one new array `[sum of rows, ...]`."""
        shapes = [self.shape(name) for name in names]
        out = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            self._read(name, out[row : row + shape[0]])
            row += shape[0]
        return out

    def _read(self, name: str, out: Array) -> None:
        """Read one tensor into `out`; the file it lies in is opened once."""
        path, tensor = self._places[name]
        try:
            if path not in self._open:
                self._open[path] = path.open("rb")
            read_tensor(self._open[path], tensor, out)
        except (OSError, ValueError) as cause:
            raise CheckpointError(f"tensor {show(name)} in {show(path.name)}: {show(str(cause))}") from None


def locate(folder: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """File and place of every tensor that the folder's single file holds or its index names."""
    if (folder / SINGLE).exists():
        header = read_header(folder / SINGLE, CheckpointError)
        return {name: (folder / SINGLE, tensor) for name, tensor in header.tensors.items()}
    if not (folder / INDEX).exists():
        others = [path.name for pattern in ("*.bin", "*.pt*", "consolidated*") for path in folder.glob(pattern)]
        hint = f"; {show(others[0])} is not read: convert it to {SINGLE}" if others else ""
        raise CheckpointError(f"neither {SINGLE} nor {INDEX} in {show(str(folder))}{hint}")
    names = read_json(folder / INDEX, CheckpointError).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{INDEX}: weight_map is {show(names)}; an object of tensor: file is needed")
    headers = {file: _shard(folder, file) for file in sorted(set(names.values()))}
    missing = [name for name, file in names.items() if name not in headers[file]]
    if missing:
        raise CheckpointError(f"{INDEX} names {show(missing[0])} in {show(names[missing[0]])}, which does not hold it")
    return {name: (folder / file, headers[file][name]) for name, file in names.items()}


def _shard(folder: Path, file: str) -> dict[str, StoredTensor]:
    """The tensors of one shard. A shard's name must be a plain name, so the index cannot lead out of the folder."""
    if file != Path(file).name or file in ("", ".", "..") or "\\" in file or not file.endswith(".safetensors"):
        raise CheckpointError(f"{INDEX} names the file {show(file)}; only *.safetensors in the same folder are read")
    return read_header(folder / file, CheckpointError).tensors
