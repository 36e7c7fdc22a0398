"""HostOps: the operations by the CUDA kernels, run on the CPU through g++. For tests, and to step through a kernel.

Slow, and exact in what it refuses: see kernels_cu/README.md. Base products are NumPy's, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slora_ref.ops.host_kernels import HostKernels
from slora_ref.ops.kernel_ops import KernelOps
from slora_ref.ops.launch import Launch
from slora_ref.shapes import Array, Float, Int


class HostOps(KernelOps):
    """KernelOps on NumPy arrays.

    Args:
        dtype, rungs, max_rank: see KernelOps.
        kernels: compiles and runs; default: the project's kernels, with the usual cache.
        order, seed: in which the threads of a block run, see HostKernels.run.
    """

    def __init__(
        self,
        dtype: Any = np.float32,
        rungs: Mapping[str, str] | None = None,
        max_rank: int | None = None,
        kernels: HostKernels | None = None,
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        super().__init__(dtype, rungs, max_rank)
        self.kernels, self.order, self.seed = kernels or HostKernels(), order, seed

    def launch(self, launch: Launch) -> None:
        """Runs a kernel to its end."""
        self.kernels.run(launch, self.order, self.seed)

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array, filled with 0xFF bytes: NaN, so that a number that no kernel wrote shows."""
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        return array

    def put(self, name: str, array: Array, dtype: Any) -> Array:
        """The array itself where it fits, else a converted copy."""
        return np.ascontiguousarray(array, dtype)

    def angle_table(self, table: Float[Array, "positions half"]) -> Float[Array, "positions half"]:
        """The table in float32, whatever the storage."""
        return np.ascontiguousarray(table, np.float32)

    def embed(self, weight: Float[Array, "vocab_rows hidden"], ids: Int[Array, " rows"]) -> Float[Array, "rows hidden"]:
        """The embedding rows of `ids`."""
        return np.ascontiguousarray(weight[ids])

    def linear(
        self,
        x: Float[Array, "rows d_in"],
        weight: Float[Array, "d_out d_in"],
        bias: Float[Array, " d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """y = x W^T + bias, in float32 and rounded once, as a GPU's library does."""
        y = x.astype(np.float32) @ weight.astype(np.float32).T
        return (y if bias is None else y + bias.astype(np.float32)).astype(self.dtype)
