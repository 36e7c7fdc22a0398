"""PackedCall: a launch as the driver takes it. It knows no CuPy.

The call is cuLaunchKernelEx, for which CuPy has none: on sm_90 a kernel that begins with wait_for_previous() may start
before the kernel before it has ended (programmatic dependent launch).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from slora_ref.ops.launch import Arguments, Launch, is_array

SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
WORD = 8  # bytes, of an address, and at least of a scalar


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number and a union of 64 bytes, of which one int is used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def launch_config(launch: Launch, stream: int, early: bool) -> ctypes.Structure:
    """The launch's sizes and stream, and the one attribute that CuPy cannot give it."""
    return _Config(
        grid=launch.grid,
        block=(launch.threads, 1, 1),
        shared=launch.shared,
        stream=stream,
        attributes=ctypes.pointer(_Attribute(id=SERIALIZATION, value=1)),
        count=int(early),
    )


class PackedCall:
    """A call of the driver for launches that differ in nothing but the addresses of their arrays.

    The driver wants an array of pointers to the arguments. Here both are one block: a word for each pointer, then a
    word for each argument.

    Args:
        call: takes that array, and None.
        arguments: of one such launch; addresses are not kept.

    Attributes:
        call: as given.
        arrays: the names of those that are arrays.
    """

    def __init__(self, call: Callable[..., int], arguments: Arguments) -> None:
        self.arrays = [name for name, value in arguments.items() if is_array(value)]
        names, count = list(arguments), len(arguments)
        self.call, self._places = call, [names.index(name) for name in self.arrays]
        self._words = [0 if value is None or is_array(value) else _word(value) for value in arguments.values()]
        self._pack, self._bytes = struct.Struct(f"={2 * count}Q").pack_into, WORD * count
        self._new_block: Callable[[], Any] = ctypes.c_char * (2 * self._bytes)

    def block(self, addresses: Seq[int]) -> Any:
        """What the call takes for arrays at these addresses, as often as it is called."""
        words, block = self._words.copy(), self._new_block()
        for place, address in zip(self._places, addresses, strict=True):
            words[place] = address
        start = ctypes.addressof(block) + self._bytes
        self._pack(block, 0, *range(start, start + self._bytes, WORD), *words)
        return block


def _word(scalar: np.generic) -> int:
    """Its bytes as a number."""
    return int.from_bytes(scalar.tobytes(), "little")
