"""HostOps: the operations by the CUDA kernels, run on the CPU through g++. For tests, and to step through a kernel.

Slow, and exact in what it refuses: see kernels_cu/README.md. Base products are NumPy's, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from slora_ref.ops.host_kernels import HostKernels
from slora_ref.ops.kernel_ops import KernelOps
from slora_ref.ops.launch import Launch
from slora_ref.ops.stacks import multiply_stacks
from slora_ref.ops.tape import Replayed, Tape, Work
from slora_ref.ops.ticket import Ticket
from slora_ref.shapes import Array, Float


class Done(Ticket):
    """For what was done at once."""

    @property
    def done(self) -> bool:
        """It has."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    def begin(self) -> None:
        """Nothing is measured."""

    def seconds(self) -> float:
        """Not measured: the host build is no model of a device's speed."""
        return 0.0

    def seconds_since(self, earlier: Ticket) -> float:
        """Not measured."""
        return 0.0


class HostOps(KernelOps):
    """KernelOps on NumPy arrays.

    Args:
        dtype, rungs, max_rank, shards: see KernelOps.
        kernels: compiles and runs; default: the project's kernels, with the usual cache.
        order, seed: in which the threads of a block run, see HostKernels.run.
        overlap: as on a GPU; but here what is said first is done first.
    """

    def __init__(
        self,
        dtype: Any = np.float32,
        rungs: Mapping[str, str] | None = None,
        max_rank: int | None = None,
        kernels: HostKernels | None = None,
        order: str = "forward",
        seed: int = 0,
        shards: int = 1,
        overlap: bool = False,
    ) -> None:
        super().__init__(dtype, rungs, max_rank, shards)
        self.overlaps = overlap
        self.kernels, self.order, self.seed = kernels or HostKernels(), order, seed

    def prepare(self, launch: Launch) -> Work:
        """Runs a kernel to its end."""
        return partial(self.kernels.run, launch, self.order, self.seed)

    def graph(self, tape: Tape) -> Replayed:
        """The tape itself."""
        return Replayed(tape)

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array, filled with 0xFF bytes: NaN, so that a number that no kernel wrote shows."""
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        return array

    def put(self, name: str, array: Array, dtype: Any) -> Array:
        """The array itself where it fits, else a converted copy."""
        return np.ascontiguousarray(array, dtype)

    def new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Zeros."""
        return np.zeros(shape, dtype)

    def staging(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array like any other."""
        return np.zeros(shape, dtype)

    def readable(self, array: Array) -> Array:
        """Itself."""
        return array

    def upload(self, to: Array, staged: Array) -> Done:
        """A copy."""
        to[...] = staged
        return Done()

    def write(self, to: Array, array: Array) -> None:
        """A copy."""
        to[...] = array

    def fetch(self, array: Array) -> Array:
        """A copy, since the memory of a result may be used again."""
        return np.array(array)

    def download(self, to: Array, array: Array) -> Done:
        """A copy."""
        to[...] = array
        return Done()

    @contextmanager
    def in_branch(self) -> Iterator[None]:
        """One after the other, as everything is here."""
        yield

    def begin_branch(self) -> None:
        """There is nothing to wait for; the tape shows where the branch begins."""

    def end_branch(self) -> None:
        """And where it ends."""

    def from_here(self, work: Work) -> Work:
        """There is one place."""
        return work

    def settle(self) -> None:
        """All is done when it is started."""

    def use(self) -> None:
        """There is nothing but the host."""

    @contextmanager
    def beside(self) -> Iterator[Done]:
        """At once."""
        yield Done()

    def angle_table(self, table: Float[Array, "positions half"]) -> Float[Array, "positions half"]:
        """The table in float32, whatever the storage."""
        return np.ascontiguousarray(table, np.float32)

    def linear(
        self,
        x: Float[Array, "rows d_in"],
        weight: Float[Array, "d_out d_in"],
        bias: Float[Array, " d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """y = x W^T + bias, in float32 and rounded once, as a GPU's library does."""
        return self._product(x, weight, bias, self.dtype)

    def head(self, x: Float[Array, "rows hidden"], weight: Float[Array, "vocab hidden"]) -> Float[Array, "rows vocab"]:
        """Logits x W^T in float32."""
        return self._product(x, weight, None, np.float32)

    def prepared_products(
        self,
        y: Float[Array, "batch rows columns"],
        x: Float[Array, "batch rows inner"],
        w: Float[Array, "batch inner columns"],
        scale: float = 1.0,
        add: bool = False,
    ) -> Work:
        """NumPy's, in float32 and rounded once."""
        return partial(multiply_stacks, y, x, w, scale, add)

    def _product(self, x: Array, weight: Array, bias: Array | None, dtype: Any) -> Array:
        out = self.empty("product", (len(x), len(weight)), dtype)

        def multiply() -> None:
            y = x.astype(np.float32) @ weight.astype(np.float32).T
            out[...] = y if bias is None else y + bias.astype(np.float32)

        self.do("gemm", multiply)
        return out
