"""Adapter: the weights of one adapter in host memory, as PEFT stored them.

Read only when the adapter is first needed, perhaps hours after it was registered, so everything is checked again: a
folder that has changed or vanished fails the load of this adapter and nothing else. The arrays are read-only: a scale
can not be folded into a copy that is used again after an eviction. The file is read, not mapped; a mapped file that is
cut while it is in use would kill the process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_ref.adapter.header import WEIGHTS, AdapterHeader, HeaderReader, Module
from slora_ref.adapter.rules import module_name
from slora_ref.checkpoint.fingerprint import Fingerprint
from slora_ref.checkpoint.tensors import FLOAT_TYPES, StoredTensor, float_dtype
from slora_ref.config import ModelConfig
from slora_ref.config.fields import show
from slora_ref.errors import AdapterError
from slora_ref.shapes import Array, Float, Num


@dataclass(frozen=True, eq=False)
class Adapter:
    """Weights by (layer, target): `a` is PEFT's lora_A, `b` its lora_B, so that y += scale * (x a.T) b.T."""

    header: AdapterHeader
    a: dict[Module, Float[Array, "rank d_in"]]
    b: dict[Module, Float[Array, "d_out rank"]]


def load_adapter(header: AdapterHeader, config: ModelConfig, dtype: npt.DTypeLike | None = np.float32) -> Adapter:
    """Read the weights in `dtype`, or as they are stored when it is None.

    Raises AdapterError when the folder is not what it was when `header` was read, or holds NaN or infinity, also where
    `dtype` cannot hold a number; and as read_header.
    """
    stored = read_weights(header, HeaderReader(config))
    adapter = stored if dtype is None else convert(stored, float_dtype(dtype))
    check_finite(adapter, stored)
    for matrix in (*adapter.a.values(), *adapter.b.values()):
        matrix.flags.writeable = False
    return adapter


def convert(adapter: Adapter, dtype: np.dtype[Any]) -> Adapter:
    """The weights in another type; what it cannot hold becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        a = {module: matrix.astype(dtype, copy=False) for module, matrix in adapter.a.items()}
        return Adapter(adapter.header, a, {m: matrix.astype(dtype, copy=False) for m, matrix in adapter.b.items()})


def read_weights(header: AdapterHeader, headers: HeaderReader) -> Adapter:
    """The weights as they are stored, read in one piece; NaN and infinity are not looked for.

    Raises:
        AdapterError: the folder is not what it was when `header` was read.
    """
    now, places = headers.inspect(header.path)
    same = now.fingerprint.same_content(header.fingerprint) and np.array_equal(now.ranks, header.ranks)
    if not same or not np.array_equal(now.scales, header.scales):
        raise AdapterError(f"{show(str(header.path))} has changed since it was registered; register it anew")
    data = _read_file(header, now.fingerprint)
    a = {module: _view(data, pair["A"]) for module, pair in places.items()}
    return Adapter(header, a, {module: _view(data, pair["B"]) for module, pair in places.items()})


def check_finite(adapter: Adapter, stored: Adapter) -> None:
    """Raises AdapterError, with the matrix' name, for NaN and infinity; `stored` is the adapter before conversion."""
    for half, found, before in (("lora_A", adapter.a, stored.a), ("lora_B", adapter.b, stored.b)):
        for module, matrix in found.items():
            if not np.isfinite(matrix).all():
                types = f"stored as {before[module].dtype}, wanted as {matrix.dtype}"
                raise AdapterError(f"module {module_name(*module)}.{half}: NaN or infinity ({types})")


def _read_file(header: AdapterHeader, expected: Fingerprint) -> Num[Array, " bytes"]:
    """The whole file of weights. Raises AdapterError when it is not the one expected, before and after."""
    data = np.empty(expected.size, np.uint8)
    try:
        with (header.path / WEIGHTS).open("rb") as file:
            read = file.readinto(data.data)
            status = os.fstat(file.fileno())
    except OSError as cause:
        raise AdapterError(f"{show(str(header.path))}: {WEIGHTS} cannot be read: {cause.strerror}") from None
    after = status.st_mtime_ns, status.st_size, status.st_ino
    if read != expected.size or after != (expected.modified_ns, expected.size, expected.inode):
        raise AdapterError(f"{show(str(header.path))} changes while it is read")
    return data


def _view(data: Num[Array, " bytes"], tensor: StoredTensor) -> Array:
    """One matrix in the bytes of its file."""
    piece = data[tensor.offset : tensor.offset + tensor.nbytes]
    return piece.view(FLOAT_TYPES[tensor.dtype]).reshape(tensor.shape)
