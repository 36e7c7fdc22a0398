"""What `bench kernels` measures besides LoRA and attention: the operations on rows, and loading an adapter's pages.

Each launch has arrays of its own, as many sets as move several times the cache's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from slora_ref.bench.kernels.cases import FLOOR_BYTES_PER_S, HIDDEN
from slora_ref.bench.kernels.lora import MOST_LAUNCHES, ROTATED_BYTES, to_bits, to_float64
from slora_ref.ops import attention_arguments, row_arguments
from slora_ref.ops.launch import Arguments

FFN, VOCAB, HEADS, HEAD_DIM, POSITIONS = 11008, 32000, 32, 128, 4096  # Llama-7B's
LAYERS, ADAPTER_PAGES = 32, 64  # of an adapter of rank 8 on q, k, v and o


@dataclass(frozen=True)
class RowCase:
    """One launch to measure.

    Args:
        operation: of the kernels.
        rows: of the step.
        bytes_moved: what is read and what is written, each once.
        make: the arguments of a launch, drawn from a generator.
        check: max |error| / max |reference| of a launch's results: from its arguments before and after.
        dtype: that the kernel is compiled for.
        most: launches in a graph, where their arrays are large.
    """

    operation: str
    rows: int
    bytes_moved: int
    make: Callable[[Any], Arguments]
    check: Callable[[Arguments, Arguments], float]
    dtype: str = "float16"
    most: int = MOST_LAUNCHES

    @property
    def floor_us(self) -> float:
        """Microseconds that the bytes take."""
        return 1e6 * self.bytes_moved / FLOOR_BYTES_PER_S

    @property
    def count(self) -> int:
        """Launches in a graph."""
        return min(self.most, -(-ROTATED_BYTES // self.bytes_moved))

    def describe(self) -> dict[str, object]:
        """The fields of a result that say what was measured."""
        sizes = {"rows": self.rows, "bytes": self.bytes_moved, "floor_us": self.floor_us}
        return {"operation": self.operation, "case": "decode", "dtype": self.dtype, **sizes}


def row_cases() -> list[RowCase]:
    """The operations of a decode step of 64 rows in Llama-7B, and two of a prefill of 4,096."""
    return [norm(64), norm(4096), silu(64), silu(4096), rope(64), rope(4096), largest(64), largest(1)]


def draw(random: Any, *shape: int) -> Any:
    """Normal numbers in float16."""
    return to_bits(random.standard_normal(shape, dtype=np.float32), np.float16).view(np.float16)


def exact(right: Any) -> float:
    """The error of a result that is no number: 0 or 1."""
    return 0.0 if bool(right) else 1.0


def difference(got: Any, want: Any) -> float:
    """max |error| / max |reference|."""
    return float(cupy.abs(to_float64(got) - want).max() / cupy.abs(want).max())


def norm(rows: int) -> RowCase:
    """rms_norm with the residual's addition."""

    def make(random: Any) -> Arguments:
        x, delta, weight = draw(random, rows, HIDDEN), draw(random, rows, HIDDEN), draw(random, HIDDEN)
        return row_arguments.rms_norm(cupy.empty_like(x), x, delta, weight, 1e-5)

    def check(before: Arguments, after: Arguments) -> float:
        x = to_float64((before["x"] + before["delta"]).astype(np.float16))
        want = x / cupy.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * to_float64(before["weight"])
        return max(difference(after["x"], x), difference(after["out"], want))

    return RowCase("rms_norm", rows, 2 * HIDDEN * (4 * rows + 1), make, check)


def silu(rows: int) -> RowCase:
    """silu_mul."""

    def make(random: Any) -> Arguments:
        return row_arguments.silu_mul(cupy.empty((rows, FFN), np.float16), draw(random, rows, 2 * FFN))

    def check(before: Arguments, after: Arguments) -> float:
        gate, up = to_float64(before["gate_up"][:, :FFN]), to_float64(before["gate_up"][:, FFN:])
        return difference(after["out"], gate / (1 + cupy.exp(-gate)) * up)

    return RowCase("silu_mul", rows, 2 * 3 * FFN * rows, make, check)


def rope(rows: int) -> RowCase:
    """rope_store; all pages of a launch are its own."""
    width = HEADS * HEAD_DIM

    def make(random: Any) -> Arguments:
        pages, qkv = cupy.empty((2 * rows, width), np.float16), draw(random, rows, 3 * width)
        angle = random.random((POSITIONS, HEAD_DIM // 2), dtype=np.float32)
        ids = cupy.asarray(np.random.default_rng(5).permutation(2 * rows).astype(np.int32))
        positions = cupy.arange(rows, dtype=np.int32) % POSITIONS
        angles = (cupy.cos(angle), cupy.sin(angle))
        return attention_arguments.rope_store(qkv, pages, *angles, positions, ids[:rows], ids[rows:])

    def check(before: Arguments, after: Arguments) -> float:
        qkv = to_float64(before["qkv"]).reshape(rows, 3 * HEADS, HEAD_DIM)
        low, high = cupy.split(qkv[:, : 2 * HEADS], 2, axis=2)
        cos, sin = (before[name][before["positions"]].astype(np.float64)[:, None] for name in ("cos", "sin"))
        turned = cupy.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)
        wants = turned[:, :HEADS], turned[:, HEADS:], qkv[:, 2 * HEADS :]
        pages, q = after["pages"], after["qkv"][:, :width]
        gots = q, pages[before["k_pages"]], pages[before["v_pages"]]
        return max(difference(got, want.reshape(rows, -1)) for got, want in zip(gots, wants, strict=True))

    moved = 2 * 2 * 3 * width * rows + 2 * 4 * HEAD_DIM // 2 * min(rows, POSITIONS)
    return RowCase("rope_store", rows, moved, make, check)


def largest(rows: int) -> RowCase:
    """argmax over a vocabulary."""

    def make(random: Any) -> Arguments:
        token, finite = (cupy.empty(rows, np.int32) for _ in range(2))
        return row_arguments.argmax(token, finite, draw(random, rows, VOCAB))

    def check(before: Arguments, after: Arguments) -> float:
        right = (after["token"] == before["logits"].argmax(axis=1)).all() and (after["finite"] == 1).all()
        return 0.0 if right else 1.0

    return RowCase("argmax", rows, 2 * VOCAB * rows, make, check)


class RowLaunches:
    """The launches of a case: each with arguments of its own."""

    def __init__(self, case: RowCase, run: Callable[[str, Arguments], None]) -> None:
        random = cupy.random.default_rng(6)
        self.case, self.run, self.arguments = case, run, [case.make(random) for _ in range(case.count)]

    def launch_all(self) -> None:
        """Every launch, one after the other."""
        for arguments in self.arguments:
            self.run(self.case.operation, arguments)

    def error_of(self, replay: Callable[[], None]) -> float:
        """The error of the last launch's results in one run of `replay`."""
        last = self.arguments[-1]
        before = {name: value.copy() if isinstance(value, cupy.ndarray) else value for name, value in last.items()}
        replay()
        return self.case.check(before, last)
