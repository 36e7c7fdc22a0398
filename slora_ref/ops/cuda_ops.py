"""CudaOps: the operations by the CUDA kernels on a GPU. Base products are cuBLAS', accumulated in float32.

Results live in memory that is handed out again every step: a result is good until the next call of the same operation
that makes a result as wide. So a forward pass allocates nothing once the largest step has been seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np
from cupy.cuda.device import get_cublas_handle
from cupy_backends.cuda.libs import cublas

from slora_ref.ops.cuda_kernels import CudaKernels
from slora_ref.ops.kernel_ops import KernelOps
from slora_ref.ops.launch import Launch, row_stride
from slora_ref.shapes import Array, Float, Int

CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_FLOAT32 = 68  # CUBLAS_COMPUTE_32F: sums in float32
DEFAULT_ALGORITHM = -1
_ONE, _ZERO = np.array(1, np.float32), np.array(0, np.float32)


class CudaOps(KernelOps):
    """KernelOps on CuPy arrays, on the current device and stream.

    Args:
        dtype, rungs, max_rank: see KernelOps.
        kernels: compiles and launches; default: the project's kernels.
    """

    def __init__(
        self,
        dtype: Any = np.float16,
        rungs: Mapping[str, str] | None = None,
        max_rank: int | None = None,
        kernels: CudaKernels | None = None,
    ) -> None:
        super().__init__(dtype, rungs, max_rank)
        self.kernels = kernels or CudaKernels()
        self._memory: dict[tuple[str, str], Any] = {}

    def launch(self, launch: Launch) -> None:
        """Starts a kernel on the current stream and returns at once."""
        self.kernels.run(launch)

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The memory kept for `name`, enlarged when it is too small."""
        key, size = (name, np.dtype(dtype).name), math.prod(shape)
        memory = self._memory.get(key)
        if memory is None or memory.size < size:
            memory = self._memory[key] = cupy.empty(max(size, 1), np.dtype(dtype))
        return memory[:size].reshape(shape)

    def put(self, name: str, array: Array, dtype: Any) -> Array:
        """Copies a NumPy array into the memory kept for `name`; a CuPy array is returned as it is, if it fits."""
        if isinstance(array, cupy.ndarray):
            return cupy.ascontiguousarray(array, np.dtype(dtype))
        kept: Any = self.empty(f"put_{name}", array.shape, dtype)
        if array.size:
            kept.set(np.ascontiguousarray(array, dtype))
        return kept

    def angle_table(self, table: Float[Array, "positions half"]) -> Float[Array, "positions half"]:
        """The table on the device, in memory of its own."""
        return cupy.asarray(table, np.float32)

    def embed(self, weight: Float[Array, "vocab_rows hidden"], ids: Int[Array, " rows"]) -> Float[Array, "rows hidden"]:
        """The embedding rows of `ids`."""
        out = self.empty(f"embed_{len(weight)}", (len(ids), weight.shape[1]), self.dtype)
        bits = f"uint{8 * self.dtype.itemsize}"  # a copy of bits, whatever the numbers
        cupy.take(weight.view(bits), self.put("ids", ids, np.int64), axis=0, out=out.view(bits))
        return out

    def linear(
        self,
        x: Float[Array, "rows d_in"],
        weight: Float[Array, "d_out d_in"],
        bias: Float[Array, " d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """y = x W^T + bias by cuBLAS, which sees the transposes: y^T = W x^T, its arrays being column by column."""
        (rows, d_in), d_out, kind = x.shape, weight.shape[0], CUDA_TYPES[self.dtype.name]
        y = self.empty(f"linear_{d_out}", (rows, d_out), self.dtype)
        if bias is not None:
            bits = f"uint{8 * self.dtype.itemsize}"
            y.view(bits)[...] = bias.view(bits)
        if not rows:
            return y
        sizes = (cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, d_out, rows, d_in)
        alpha, beta = _ONE.ctypes.data, (_ZERO if bias is None else _ONE).ctypes.data
        places = (alpha, *_matrix(weight, kind), *_matrix(x, kind), beta, *_matrix(y, kind))
        cublas.gemmEx(get_cublas_handle(), *sizes, *places, COMPUTE_FLOAT32, DEFAULT_ALGORITHM)
        return y


def _matrix(array: Any, kind: int) -> tuple[int, int, int]:
    """Address, type and row stride, as cuBLAS takes a matrix."""
    return int(array.data.ptr), kind, int(row_stride(array))
