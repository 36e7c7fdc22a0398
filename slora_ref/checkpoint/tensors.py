"""Tensors in a safetensors file: where each lies, and reading one into memory that is already there.

The header is read and checked here rather than by the safetensors library because three things are needed that its
reader does not give: a limit on the header's size before it is parsed (a stranger's file must not take gigabytes), the
place of each tensor (so that a merged buffer is filled piece by piece), and a check that costs well under a millisecond
(10,000 adapters are registered by their headers alone). Data is read, not mapped: a mapped file that is cut while it is
used kills the process. Knows neither models nor adapters.
"""

from __future__ import annotations

import json
import math
import os
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from slora_ref.checkpoint.fingerprint import Fingerprint, take_fingerprint
from slora_ref.config.fields import show
from slora_ref.errors import ConfigError, SloraError
from slora_ref.shapes import Array, Float, Num

LENGTH_BYTES = 8  # the length of the header, before it
MAX_HEADER_BYTES = 4 << 20  # 1,000 tensors need 0.2 MB
MAX_DIMENSIONS = 8
CHUNK = 1 << 20  # elements that are read and converted at once
FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


def _no_constant(name: str) -> None:
    """NaN and Infinity are no JSON, though Python reads them."""
    raise ValueError(f"{name} is not JSON")


STRICT_JSON = json.JSONDecoder(parse_constant=_no_constant)


class StoredTensor(NamedTuple):
    """One tensor of a file: its dtype as the file names it, its shape, its first byte in the file and its size."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """All tensors of a file, and the fingerprint by which a change of the file is noticed."""

    tensors: dict[str, StoredTensor]
    fingerprint: Fingerprint


def float_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """float32, float16 or bfloat16 as a NumPy dtype, from a name or a dtype; float64 too, for oracles."""
    chosen = FLOAT_TYPES["BF16"] if dtype == "bfloat16" else np.dtype(dtype)
    if chosen not in (*FLOAT_TYPES.values(), np.float64):
        raise ConfigError(f"weights of type {chosen} are not supported; choose float32, float16 or bfloat16")
    return chosen


def read_header(path: Path, error: type[SloraError]) -> Header:
    """The header of a safetensors file, checked: regions of the right size that tile the rest of the file exactly.

    Raises `error`, naming the file, when it is missing, truncated, oversized, or not safetensors.
    """
    text, fingerprint = read_header_text(path, error)
    return Header(parse_header(path, text, fingerprint.size, error), fingerprint)


def read_header_text(path: Path, error: type[SloraError]) -> tuple[bytes, Fingerprint]:
    """The header as it stands in the file, not parsed yet, and the file's fingerprint. Raises `error`."""
    try:
        if not path.is_file():
            raise error(f"no file {show(path.name)} in {show(str(path.parent))}")
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise error(f"{_name(path)}: a header of {length} bytes in a file of {size}; truncated?")
            text = file.read(length)
            return text, take_fingerprint(file.fileno(), prefix + text)
    except (OSError, ValueError) as cause:
        raise error(f"{_name(path)}: the header cannot be read: {show(str(cause))}") from None


def parse_header(path: Path, text: bytes, size: int, error: type[SloraError]) -> dict[str, StoredTensor]:
    """The tensors that a header names, in a file of `size` bytes. Raises `error`; the path is only for its message."""
    try:
        entries = STRICT_JSON.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{_name(path)}: the header cannot be read: {show(str(cause))}") from None
    if not isinstance(entries, dict):
        raise error(f"{_name(path)}: the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise error(f"{_name(path)}: __metadata__ is {show(metadata)}; an object of texts is needed")
    start = LENGTH_BYTES + len(text)
    try:
        tensors = {name: _stored(name, entry, start) for name, entry in entries.items()}
        _check_tiling(tensors, start, size)
    except ValueError as cause:
        raise error(f"{_name(path)}: {cause}") from None
    return tensors


def read_tensor(file: BinaryIO, tensor: StoredTensor, out: Array) -> None:
    """Read `tensor` into `out` (any float dtype, contiguous, as many elements), 1 Mi elements at a time.

    Raises ValueError when the file ends early, or when a number is not finite in out's dtype.
    """
    flat = out.reshape(-1)
    assert np.shares_memory(flat, out) or not out.size, "out must be contiguous, or a copy would be filled"
    file.seek(tensor.offset)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        numbers = np.fromfile(file, FLOAT_TYPES[tensor.dtype], part.size)
        if numbers.size != part.size:
            raise ValueError("the file ends inside its data")
        with np.errstate(over="ignore", invalid="ignore"):
            part[...] = numbers
        if not np.isfinite(part).all():
            raise ValueError(f"NaN or infinity (stored as {tensor.dtype}, wanted as {part.dtype})")


def as_bits(numbers: Num[Array, " *shape"]) -> Num[Array, " *shape"]:
    """The same memory as unsigned integers."""
    return numbers.view(f"u{numbers.itemsize}")


def all_finite(numbers: Float[Array, " *shape"]) -> bool:
    """Whether there is neither NaN nor infinity: a number whose exponent is all ones. Thrice as fast as np.isfinite."""
    exponent = as_bits(np.array(np.inf, numbers.dtype))
    flat = as_bits(numbers.reshape(-1))
    return all(((flat[i : i + CHUNK] & exponent) != exponent).all() for i in range(0, flat.size, CHUNK))


def _name(path: Path) -> str:
    """The last two parts of a path, for messages."""
    return show("/".join(path.parts[-2:]))


def _stored(name: str, entry: object, data_start: int) -> StoredTensor:
    """One checked entry of a header. Raises ValueError."""
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {show(name)} has no description")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {show(name)} is of unknown type {show(dtype)}")
    if not (isinstance(shape, list) and isinstance(span, list) and len(span) == 2 and len(shape) <= MAX_DIMENSIONS):
        raise ValueError(f"tensor {show(name)} has shape {show(shape)} at {show(span)}; two short lists are needed")
    numbers = shape + span
    if set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise ValueError(f"tensor {show(name)} has shape {show(shape)} at {show(span)}; whole numbers are needed")
    nbytes = ITEM_BYTES[dtype] * math.prod(shape)
    if span[1] - span[0] != nbytes:
        raise ValueError(f"tensor {show(name)} of shape {show(shape)} takes {show(nbytes)} bytes, not {show(span)}")
    return StoredTensor(dtype, tuple(shape), data_start + span[0], nbytes)


def _check_tiling(tensors: dict[str, StoredTensor], start: int, end: int) -> None:
    """The regions follow each other from `start` to `end`: no hole, no overlap (a name given twice leaves a hole)."""
    for tensor in sorted(tensors.values(), key=itemgetter(2, 3)):  # by offset; an empty one before its neighbour
        if tensor.offset != start:
            raise ValueError(f"tensor data at byte {tensor.offset}, expected at {start}; damaged")
        start += tensor.nbytes
    if start != end:
        raise ValueError(f"{end - start} bytes too {'many' if end > start else 'few'}; truncated or damaged")
