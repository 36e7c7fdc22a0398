"""CudaOps: the operations by the CUDA kernels on a GPU. Base products are cuBLAS', accumulated in float32.

Results live in memory that is handed out again every step: a result is good until the next call of the same operation
that makes a result as wide. So a forward pass allocates nothing once the largest step has been seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cupy
import cupyx
import numpy as np

from slora_ref.ops import row_arguments
from slora_ref.ops.cuda_blas import Cublas
from slora_ref.ops.cuda_graph import CudaGraph
from slora_ref.ops.cuda_kernels import CudaKernels
from slora_ref.ops.cuda_loads import CudaLoads
from slora_ref.ops.cuda_ticket import Passed
from slora_ref.ops.launch import Launch
from slora_ref.ops.tape import Tape, Work
from slora_ref.shapes import Array, Float


class CudaOps(CudaLoads):
    """KernelOps on CuPy arrays, on the current device and on the stream that is current when this is made.

    Args:
        dtype, rungs, max_rank, shards: see KernelOps.
        kernels: compiles and launches; default: the project's kernels.
        overlap: messages go beside products, on a stream of their own; else in sequence with all else.
    """

    def __init__(
        self,
        dtype: Any = np.float16,
        rungs: Mapping[str, str] | None = None,
        max_rank: int | None = None,
        kernels: CudaKernels | None = None,
        shards: int = 1,
        overlap: bool = False,
    ) -> None:
        super().__init__(dtype, rungs, max_rank, shards)
        self.kernels, self.cublas = kernels or CudaKernels(), Cublas()
        self.cublas.use_current_stream()
        self.stream, self.side = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
        self.overlaps = overlap
        self.branch_stream = cupy.cuda.Stream(non_blocking=True)
        self._forked, self._joined = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._memory: dict[tuple[str, np.dtype[Any]], Any] = {}
        self._views: dict[tuple[str, tuple[int, ...], Any], Any] = {}
        self._zero_rows = cupy.zeros(0, np.int32)

    def prepare(self, launch: Launch) -> Work:
        """Starts a kernel on the stream that is current now, and returns at once."""
        return self.kernels.prepare(launch)

    def graph(self, tape: Tape) -> CudaGraph:
        """A CUDA graph on this backend's stream."""
        return CudaGraph(self.stream, tape)

    # --- memory ---

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The memory kept for `name`, enlarged when it is too small."""
        view = self._views.get((name, shape, dtype))
        if view is None:
            view = self._views[name, shape, dtype] = self._view(name, shape, np.dtype(dtype))
        return view

    def _view(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        memory, size = self._memory.get((name, dtype)), math.prod(shape)
        if memory is None or memory.size < size:
            self._views.clear()  # or what is too small would stay
            memory = self._memory[name, dtype] = cupy.empty(max(size, 1), dtype)
        return memory[:size].reshape(shape)

    def put(self, name: str, array: Array, dtype: Any) -> Array:
        """Copies a NumPy array into the memory kept for `name`; a CuPy array is returned as it is, if it fits."""
        if isinstance(array, cupy.ndarray):
            return cupy.ascontiguousarray(array, np.dtype(dtype))
        kept: Any = self.empty(f"put_{name}", array.shape, dtype)
        if array.size:
            kept.set(np.ascontiguousarray(array, dtype))
        return kept

    def _zeros(self, rows: int) -> Array:
        """[rows] int32 zeros that nobody writes: the memory is kept, so that a step allocates nothing."""
        if self._zero_rows.size < rows:
            self._zero_rows = cupy.zeros(rows, np.int32)
        return self._zero_rows[:rows]

    def new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Zeros on the GPU."""
        return cupy.zeros(shape, dtype)

    def staging(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Pinned host memory."""
        return cupyx.zeros_pinned(shape, dtype)

    def upload(self, to: Array, staged: Array) -> Passed:
        """Copies on the current stream."""
        stream, ticket = cupy.cuda.get_current_stream(), Passed()
        kind = cupy.cuda.runtime.memcpyHostToDevice
        cupy.cuda.runtime.memcpyAsync(_address(to), staged.ctypes.data, staged.nbytes, kind, stream.ptr)
        ticket.event.record(stream)
        return ticket

    def write(self, to: Array, array: Array) -> None:
        """Copies on the current stream; CUDA takes pageable memory into its own before it returns."""
        target: Any = to
        target.set(array)

    def fetch(self, array: Array) -> Array:
        """Copies on the main stream and waits for it.

        Where rows have gaps, CuPy copies within a `with stream`, at whose end it takes the default stream for the
        current one.
        """
        with self._on(self.stream):
            return cupy.asnumpy(array)

    def download(self, to: Array, array: Array) -> Passed:
        """Copies on the current stream."""
        stream, ticket = cupy.cuda.get_current_stream(), Passed()
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        cupy.cuda.runtime.memcpyAsync(to.ctypes.data, _address(array), to.nbytes, kind, stream.ptr)
        ticket.event.record(stream)
        return ticket

    def use(self) -> None:
        """Makes the main stream current: what CuPy takes for it belongs to a thread, not to an engine."""
        self.stream.use()

    def settle(self) -> None:
        """On the stream that is current now."""
        cupy.cuda.get_current_stream().synchronize()

    def in_branch(self) -> AbstractContextManager[None]:
        """On a stream of its own; a capture of the main stream takes it in, as it begins and ends there."""
        return self._on(self.branch_stream)

    def begin_branch(self) -> None:
        """The branch's stream waits for the main one."""
        self._forked.record(self.stream)
        self.branch_stream.wait_event(self._forked)

    def end_branch(self) -> None:
        """The main stream waits for the branch's."""
        self._joined.record(self.branch_stream)
        self.stream.wait_event(self._joined)

    def from_here(self, work: Work) -> Work:
        """On the stream that is current now."""
        stream = cupy.cuda.get_current_stream()
        if stream == self.stream:
            return work

        def run() -> None:
            if cupy.cuda.get_current_stream() == stream:
                work()
            else:
                with self._on(stream):
                    work()

        return run

    @contextmanager
    def beside(self) -> Iterator[Passed]:
        """On a second stream, which first waits for what the main stream has been given so far."""
        ticket = Passed()
        ticket.event.record(self.stream)
        self.side.wait_event(ticket.event)
        with self._on(self.side):
            ticket.begin()
            yield ticket
            ticket.event.record(self.side)

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Work within goes to this stream, and what follows to the main one.

        CuPy's own `with stream` would forget at its end what `use` had made current.
        """
        stream.use()
        try:
            yield
        finally:
            self.stream.use()

    def angle_table(self, table: Float[Array, "positions half"]) -> Float[Array, "positions half"]:
        """The table on the device, in memory of its own."""
        return cupy.asarray(table, np.float32)

    # --- products ---

    def linear(
        self,
        x: Float[Array, "rows d_in"],
        weight: Float[Array, "d_out d_in"],
        bias: Float[Array, " d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """y = x W^T + bias by cuBLAS; a bias is first copied into every row."""
        y = self.empty(f"linear_{len(weight)}", (len(x), len(weight)), self.dtype)
        if not len(x):
            return y
        if bias is not None:
            self.run("gather_rows", row_arguments.gather_rows(y, bias[None], self._zeros(len(x))))
        self.do("gemm", self.cublas.product(y, x, weight, add=bias is not None))
        return y

    def prepared_products(
        self,
        y: Float[Array, "batch rows columns"],
        x: Float[Array, "batch rows inner"],
        w: Float[Array, "batch inner columns"],
        scale: float = 1.0,
        add: bool = False,
    ) -> Work:
        """A batched product of cuBLAS."""
        return self.cublas.products(y, x, w, scale, add)

    def head(self, x: Float[Array, "rows hidden"], weight: Float[Array, "vocab hidden"]) -> Float[Array, "rows vocab"]:
        """Logits x W^T in float32, by cuBLAS."""
        y = self.empty("logits", (len(x), len(weight)), np.float32)
        if len(x):
            self.do("gemm", self.cublas.product(y, x, weight))
        return y


def _address(array: Any) -> int:
    return int(array.data.ptr)
