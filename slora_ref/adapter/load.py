"""Adapter: the weights of one adapter in host memory, as PEFT stored them.

Read only when the adapter is first needed, perhaps hours after it was registered, so everything is checked again: a
folder that has changed or vanished fails the load of this adapter and nothing else. The arrays are read-only: a scale
can not be folded into a copy that is used again after an eviction. The file is read, not mapped; a mapped file that is
cut while it is in use would kill the process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from slora_ref.adapter.header import WEIGHTS, AdapterHeader, Module, inspect_folder
from slora_ref.adapter.rules import module_name
from slora_ref.checkpoint.tensors import FLOAT_TYPES, StoredTensor, fingerprint, float_dtype, read_tensor
from slora_ref.config import ModelConfig
from slora_ref.config.fields import show
from slora_ref.errors import AdapterError
from slora_ref.shapes import Array, Float


@dataclass(frozen=True, eq=False)
class Adapter:
    """Weights by (layer, target): `a` is PEFT's lora_A, `b` its lora_B, so that y += scale * (x a.T) b.T."""

    header: AdapterHeader
    a: dict[Module, Float[Array, "rank d_in"]]
    b: dict[Module, Float[Array, "d_out rank"]]


def load_adapter(header: AdapterHeader, config: ModelConfig, dtype: npt.DTypeLike | None = np.float32) -> Adapter:
    """Read the weights in `dtype`, or as they are stored when it is None.

    Raises AdapterError when the folder is not what it was when `header` was read, or holds NaN or infinity; and as
    read_header.
    """
    now, halves = inspect_folder(header.path, config)
    same = now.fingerprint == header.fingerprint and np.array_equal(now.ranks, header.ranks)
    if not same or not np.array_equal(now.scales, header.scales):
        raise AdapterError(f"{show(str(header.path))} has changed since it was registered; register it anew")
    a: dict[Module, Array] = {}
    b: dict[Module, Array] = {}
    try:
        with (header.path / WEIGHTS).open("rb") as file:
            if fingerprint(os.fstat(file.fileno())) != header.fingerprint:
                raise AdapterError(f"{show(str(header.path))} changes while it is read")
            for module, pair in halves.items():
                name = module_name(*module)
                a[module] = _matrix(file, pair["A"], dtype, f"{name}.lora_A")
                b[module] = _matrix(file, pair["B"], dtype, f"{name}.lora_B")
    except OSError as cause:
        raise AdapterError(f"{show(str(header.path))}: {WEIGHTS} cannot be read: {cause.strerror}") from None
    return Adapter(header, a, b)


def _matrix(file: BinaryIO, tensor: StoredTensor, dtype: npt.DTypeLike | None, name: str) -> Array:
    """One matrix, read-only. Raises AdapterError, with its name, for NaN, infinity or an early end."""
    out = np.empty(tensor.shape, FLOAT_TYPES[tensor.dtype] if dtype is None else float_dtype(dtype))
    try:
        read_tensor(file, tensor, out)
    except ValueError as cause:
        raise AdapterError(f"module {name}: {cause}") from None
    out.flags.writeable = False
    return out
