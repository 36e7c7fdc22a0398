"""Launch: one kernel with its grid and its arguments, checked; the same object runs on the GPU and through g++.

It knows the names, types and layouts of arguments, and no backend. Which kernels there are is in ops/rungs.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from slora_ref.errors import KernelError

Grid = tuple[int, int, int]
Arguments = dict[str, Any]  # by name, in the kernel's order: arrays, None for an absent one, or NumPy scalars
Sizes = tuple[tuple[str, int], ...]  # a kernel's integer arguments, with their names
INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """What a backend needs to start a kernel.

    Args:
        kernel: stem of the .cu file, and name of the function in it.
        dtype: of the numbers in storage; the kernel is compiled for it.
        grid, threads: blocks in each direction, and threads in a block.
        shared: bytes of dynamic shared memory.
        arguments: all that the kernel takes.
        after_start: may start when the kernel before it allows so (programmatic dependent launch), where there is such.
    """

    kernel: str
    dtype: np.dtype[Any]
    grid: Grid
    threads: int
    shared: int
    arguments: Arguments
    after_start: bool = False


def check_array(name: str, array: Any, dtype: Any, shape: tuple[int | None, ...], strided: bool = False) -> Any:
    """Returns `array` if a kernel can take it.

    Args:
        shape: what each dimension must be; None: anything.
        strided: rows may lie further apart than their length; within a row, numbers are always neighbours.

    Raises:
        KernelError: another dtype, shape or layout; the message names the argument.
    """
    if array.dtype != dtype:
        raise KernelError(
            f"argument {name}: dtype {array.dtype}, the kernel takes {np.dtype(dtype)}; convert it before"
        )
    sizes, strides, itemsize = array.shape, array.strides, array.dtype.itemsize
    if len(sizes) != len(shape) or any(want is not None and want != n for n, want in zip(sizes, shape, strict=True)):
        wanted = tuple("any" if want is None else want for want in shape)
        raise KernelError(f"argument {name}: shape {tuple(sizes)}, the kernel takes {wanted}")
    if max(sizes, default=0) > INT_MAX:
        raise KernelError(f"argument {name}: shape {tuple(sizes)} exceeds the kernel's 32-bit sizes")
    if 0 in sizes:
        return array
    expected = itemsize
    for axis in range(len(shape) - 1, strided - 1, -1):
        if sizes[axis] > 1 and strides[axis] != expected:
            raise KernelError(f"argument {name}: strides {strides} of shape {tuple(sizes)}; make it contiguous")
        expected *= sizes[axis]
    if strided and sizes[0] > 1 and (strides[0] < expected or strides[0] % itemsize):
        raise KernelError(f"argument {name}: strides {strides} of shape {tuple(sizes)}: rows overlap")
    return array


def is_array(value: Any) -> bool:
    """Whether an argument is one; else it is absent, or a scalar."""
    return value is not None and not isinstance(value, np.generic)


def sizes_of(arguments: Arguments) -> Sizes:
    """A kernel's integer arguments, with their names."""
    return tuple([(name, int(value)) for name, value in arguments.items() if isinstance(value, np.integer)])


def row_stride(array: Any) -> np.int32:
    """Numbers from one row to the next."""
    rows, *inner = array.shape
    return np.int32(array.strides[0] // array.dtype.itemsize if rows > 1 else math.prod(inner))


def extent_bytes(array: Any) -> int:
    """Bytes from the first number to the end of the last, gaps between rows included."""
    if not array.size:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    return int(last + array.dtype.itemsize)
