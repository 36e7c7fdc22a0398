"""Cublas: the vendor's matrix products, called below CuPy, which lets none of its own be captured in a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import cupy
import numpy as np

from slora_ref.ops.launch import row_stride

CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_FLOAT32, DEFAULT_ALGORITHM = 68, -1  # CUBLAS_COMPUTE_32F: sums in float32
N, T = 0, 1
ONE, ZERO = np.array(1, np.float32), np.array(0, np.float32)
ONE_AT, ZERO_AT = ONE.ctypes.data, ZERO.ctypes.data
WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends for a Hopper GPU; given, or a captured product may not allocate it
C_TYPES = {"P": ctypes.c_void_p, "i": ctypes.c_int, "q": ctypes.c_longlong}
SIGNATURES = {
    "cublasGemmEx": "P iiiii P Pii Pii P Pii ii",
    "cublasGemmStridedBatchedEx": "P iiiii P Piiq Piiq P Piiq iii",
}
LIBRARIES = ("libcublas.so.13", "libcublas.so.12")


class Cublas:
    """The library that CuPy loads, with a handle of its own.

    Raises:
        RuntimeError: there is no cuBLAS.
    """

    def __init__(self) -> None:
        cupy.matmul(*[cupy.ones((2, 2), np.float32)] * 2)  # loads CuPy's own cuBLAS
        self.library = _library()
        for name, letters in SIGNATURES.items():  # so that numbers are taken as they are
            getattr(self.library, name).argtypes = [C_TYPES[letter] for letter in letters.replace(" ", "")]
        self.handle, self.workspace = ctypes.c_void_p(), cupy.empty(WORKSPACE_BYTES, np.uint8)
        self.call("cublasCreate_v2", ctypes.byref(self.handle))

    def use_current_stream(self) -> None:
        """What follows goes to the stream that CuPy works on."""
        self.call("cublasSetStream_v2", self.handle, ctypes.c_void_p(cupy.cuda.get_current_stream().ptr))
        place = (ctypes.c_void_p(self.workspace.data.ptr), ctypes.c_size_t(WORKSPACE_BYTES))
        self.call("cublasSetWorkspace_v2", self.handle, *place)

    def call(self, function: str, *arguments: Any) -> None:
        """Calls it.

        Raises:
            RuntimeError: the library has no such function, or it fails.
        """
        try:
            failed = getattr(self.library, function)(*arguments)
        except AttributeError:
            raise RuntimeError(f"this cuBLAS has no {function}") from None
        if failed:
            raise RuntimeError(f"{function} fails with status {failed}")

    def product(self, y: Any, x: Any, weight: Any, add: bool = False) -> Callable[[], None]:
        """What computes y = x W^T, or y += x W^T, in whatever types the arrays have; as often as it is called.

        cuBLAS counts columns first, so it sees the transposes: y^T = W x^T.

        Args:
            y: [rows, d_out]; x: [rows, d_in]; weight: [d_out, d_in].
        """
        (rows, d_in), d_out = x.shape, weight.shape[0]
        sizes, factor = (T, N, d_out, rows, d_in), ONE_AT if add else ZERO_AT
        arguments = (*sizes, ONE_AT, *_matrix(weight), *_matrix(x), factor, *_matrix(y))
        return self._prepared("cublasGemmEx", (*arguments, COMPUTE_FLOAT32, DEFAULT_ALGORITHM), keep=(y, x, weight))

    def products(self, y: Any, x: Any, w: Any, scale: float = 1.0, add: bool = False) -> Callable[[], None]:
        """What computes y[b] = scale x[b] w[b], or y[b] += scale x[b] w[b], in one batched product.

        Args:
            y: [batch, rows, columns]; x: [batch, rows, inner]; w: [batch, inner, columns]. In x and w, either of the
                last two axes may be the one whose numbers are neighbours.
        """
        (batch, rows, columns), inner = y.shape, x.shape[2]
        (turn_w, *left), (turn_x, *right), (_, *out) = (_stack(array) for array in (w, x, y))
        factors = np.array(scale, np.float32), np.array(add, np.float32)
        one, kept = (number.ctypes.data for number in factors)
        kind = (batch, COMPUTE_FLOAT32, DEFAULT_ALGORITHM)
        arguments = (turn_w, turn_x, columns, rows, inner, one, *left, *right, kept, *out, *kind)
        return self._prepared("cublasGemmStridedBatchedEx", arguments, keep=(y, x, w, factors))

    def _prepared(self, function: str, arguments: tuple[Any, ...], keep: tuple[Any, ...]) -> Callable[[], None]:
        """A call with its arguments packed, as often as it is called; what they point to is kept with it."""
        return partial(_multiply, getattr(self.library, function), (self.handle, *arguments), keep)


def _multiply(function: Any, arguments: tuple[Any, ...], keep: tuple[Any, ...]) -> None:
    """Starts a product, whose arrays stay where they are as long as this is kept."""
    failed = function(*arguments)
    if failed:
        raise RuntimeError(f"{function.__name__} fails with status {failed}")


def _library() -> Any:
    """cuBLAS, which is loaded already."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"no cuBLAS was found: neither of {', '.join(LIBRARIES)}")


def _matrix(array: Any) -> tuple[Any, ...]:
    """Address, type and row stride, as cuBLAS takes a matrix."""
    return array.data.ptr, _cuda_type(array.dtype), int(row_stride(array))


def _stack(array: Any) -> tuple[Any, ...]:
    """Whether cuBLAS has to turn each matrix; address, type; numbers between its columns, and between the matrices.

    It counts columns first, so what lies row by row here is the transpose to it.
    """
    between, row, column = (stride // array.itemsize for stride in array.strides)
    _, rows, columns = array.shape
    turned = column != 1 and columns > 1
    leading = column if turned else row if rows > 1 else columns
    return T if turned else N, array.data.ptr, _cuda_type(array.dtype), leading, between


@cache
def _cuda_type(dtype: np.dtype[Any]) -> int:
    """Asked for at every product that is prepared, where a dtype's name takes NumPy longer than all else."""
    return CUDA_TYPES[dtype.name]
