"""The vendor's library on the same projection: weights already gathered, stacked and contiguous, as paging avoids.

Padded: one batched GEMM, every adapter padded to the largest rank and the longest segment. Grouped: cuBLAS' grouped
GEMM, each adapter at its own size. Both compute t = x A in 16 bits, then y += t B, without a scale.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cupy
import numpy as np

from slora_ref.bench.kernels.cases import LoraCase
from slora_ref.ops.cuda_blas import COMPUTE_FLOAT32, CUDA_TYPES, DEFAULT_ALGORITHM, ONE, ZERO, Cublas, N, T


class Padded:
    """Two strided batched GEMMs a target; x and y are padded already."""

    def __init__(self, library: Cublas, case: LoraCase, pool: Any, count: int) -> None:
        self.library, self.case, self.kind, self.count = library, case, CUDA_TYPES[pool.dtype.name], count
        self.batch, self.rank, self.longest = len(case.ranks), max(case.ranks), max(case.lengths)
        size = self.batch * self.rank * (case.d_in * len(case.d_outs) + sum(case.d_outs))
        self.weights = [pool[start : start + size] for start in _starts(pool, size, count)]
        rows = self.batch * self.longest
        copies = min(count, max(1, 2_000_000_000 // (2 * rows * (case.d_in + sum(case.d_outs)))))
        self.x = [_copy(pool, rows * case.d_in) for _ in range(copies)]
        self.y = [_copy(pool, rows * sum(case.d_outs)) for _ in range(copies)]
        self.t = _copy(pool, rows * self.rank)

    def launch_all(self) -> None:
        """Every projection."""
        self.library.use_current_stream()
        for number in range(self.count):
            self._launch(self.weights[number], self.x[number % len(self.x)], self.y[number % len(self.y)])

    def _launch(self, weights: Any, x: Any, y: Any) -> None:
        case, used, column = self.case, 0, 0
        for d_out in case.d_outs:
            a, used = weights[used:], used + self.batch * self.rank * case.d_in
            b, used = weights[used:], used + self.batch * self.rank * d_out
            place = y[column * self.batch * self.longest :]
            self._batched(T, self.rank, self.longest, case.d_in, a, x, self.t, ZERO)
            self._batched(N, d_out, self.longest, self.rank, b, self.t, place, ONE)
            column += d_out

    def _batched(self, trans: int, m: int, n: int, k: int, a: Any, b: Any, c: Any, beta: Any) -> None:
        """Column by column, as cuBLAS sees arrays: c [n, m] (+)= b [n, k] a, a [m, k] or, not turned, [k, m]."""

        def matrix(array: Any, leading: int, stride: int) -> tuple[Any, ...]:
            return ctypes.c_void_p(array.data.ptr), self.kind, leading, ctypes.c_longlong(stride)

        left, right, out = matrix(a, k if trans else m, m * k), matrix(b, k, n * k), matrix(c, m, m * n)
        one, zero_or_one = (ctypes.c_void_p(number.ctypes.data) for number in (ONE, beta))
        tail = (*out, self.batch, COMPUTE_FLOAT32, DEFAULT_ALGORITHM)
        sizes = (self.library.handle, trans, N, m, n, k)
        self.library.call("cublasGemmStridedBatchedEx", *sizes, one, *left, *right, zero_or_one, *tail)


class Grouped:
    """Two grouped GEMMs a target; a group for each adapter."""

    def __init__(self, library: Cublas, case: LoraCase, pool: Any, count: int) -> None:
        self.library, self.case, self.kind = library, case, CUDA_TYPES[pool.dtype.name]
        self.count, self.groups = count, len(case.ranks)
        self._addresses: list[Any] = []
        size = sum(case.ranks) * (case.d_in * len(case.d_outs) + sum(case.d_outs))
        self.starts = _starts(pool, size, count)
        self.memory = pool
        self.x = _copy(pool, count * case.rows * case.d_in).reshape(count, case.rows, -1)
        self.y = _copy(pool, count * case.rows * sum(case.d_outs)).reshape(count, case.rows, -1)
        self.t = _copy(pool, case.rows * max(case.ranks))
        self.calls = [self._call(*both) for number in range(count) for both in self._both(number)]

    def _both(self, number: int) -> list[tuple[Any, ...]]:
        """Sizes and addresses of each call of a projection."""
        case, calls = self.case, []
        lengths, ranks = np.array(case.lengths), np.array(case.ranks)
        first = np.cumsum(lengths) - lengths
        before, used = np.cumsum(ranks) - ranks, self.starts[number]
        x, y = self.x[number], self.y[number]
        t = self.t.data.ptr + 2 * first * max(case.ranks)
        column, full = 0, np.full_like(ranks, case.d_in)
        for d_out in case.d_outs:
            a = self.memory.data.ptr + 2 * (used + before * case.d_in)
            used += int(ranks.sum()) * case.d_in
            b = self.memory.data.ptr + 2 * (used + before * d_out)
            used += int(ranks.sum()) * d_out
            wide, stride = np.full_like(ranks, d_out), np.full_like(ranks, sum(case.d_outs))
            x_at, y_at = x.data.ptr + 2 * first * case.d_in, y.data.ptr + 2 * (first * sum(case.d_outs) + column)
            calls.append((T, ranks, lengths, full, (a, full), (x_at, full), (t, ranks), 0.0))
            calls.append((N, wide, lengths, ranks, (b, wide), (t, ranks), (y_at, stride), 1.0))
            column += d_out
        return calls

    def _call(self, trans: int, m: Any, n: Any, k: Any, a: Any, b: Any, c: Any, beta: float) -> tuple[Any, ...]:
        ints = ctypes.c_int * self.groups
        floats = ctypes.c_float * self.groups

        def whole(values: Any) -> Any:
            return ints(*np.asarray(values).tolist())

        def matrix(place: Any) -> tuple[Any, ...]:
            addresses = cupy.asarray(np.asarray(place[0], np.uint64))
            self._addresses.append(addresses)
            return ctypes.c_void_p(addresses.data.ptr), ctypes.c_int(self.kind), whole(place[1])

        same = whole([trans] * self.groups), whole([N] * self.groups)
        one, add = floats(*[1.0] * self.groups), floats(*[beta] * self.groups)
        arguments = (*same, whole(m), whole(n), whole(k), one, *matrix(a), *matrix(b), add, *matrix(c))
        return (*arguments, ctypes.c_int(self.groups), whole([1] * self.groups), ctypes.c_int(COMPUTE_FLOAT32))

    def launch_all(self) -> None:
        """Every projection."""
        self.library.use_current_stream()
        for arguments in self.calls:
            self.library.call("cublasGemmGroupedBatchedEx", self.library.handle, *arguments)


def _copy(pool: Any, size: int) -> Any:
    """Memory of its own, filled with the pool's numbers: zeros would make a GPU faster than it is."""
    return cupy.resize(pool[: min(size, 1 << 24)].view(np.uint16), size).view(pool.dtype)


def _starts(pool: Any, size: int, count: int) -> list[int]:
    """Where `count` sets of weights begin, as far apart as the pool allows, on 256 bytes."""
    step = max(0, (len(pool) - size) // max(1, count - 1)) // 128 * 128 if count > 1 else 0
    return [number * step for number in range(count)]
