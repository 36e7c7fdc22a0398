"""What `bench kernels` measures: which rows use which adapters, at which ranks and widths. It knows no GPU.

One projection is shrink and expand; its floor is the time that its bytes take: all adapters in use, x and y, each once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slora_ref.ops.tables import Segments

HIDDEN = 4096
FLOOR_BYTES_PER_S = 4.2e12  # an H200's memory, as in the tables that results are compared with
ROWS, RANKS = (8, 32, 64, 128, 256), (8, 16, 32, 64, 128)
ZIPF_ADAPTERS, ZIPF_SEED = 32, 7
PREFILL_SEGMENTS = 16


@dataclass(frozen=True)
class LoraCase:
    """A projection to measure.

    Args:
        case: what makes it different.
        lengths: [adapters] rows of each adapter, neighbours.
        ranks: [adapters] their ranks.
        d_in, d_outs: numbers of a row of x, and of each target's part of a row of y.
        width: numbers of a page.
        dtype: of storage.
        fixed: the launches that a captured graph makes, whatever the adapters; else those that have work.
    """

    case: str
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    d_in: int = HIDDEN
    d_outs: tuple[int, ...] = (HIDDEN,)
    width: int = HIDDEN
    dtype: str = "float16"
    fixed: bool = False

    @property
    def rows(self) -> int:
        """Rows of x."""
        return sum(self.lengths)

    @property
    def shrink_bytes(self) -> int:
        """A of each adapter, and x, each once; 2 bytes a number."""
        return 2 * self.d_in * (sum(self.ranks) * len(self.d_outs) + self.rows)

    @property
    def expand_bytes(self) -> int:
        """B of each adapter, and y, each once."""
        return 2 * sum(self.d_outs) * (sum(self.ranks) + self.rows)

    @property
    def bytes_moved(self) -> int:
        """Weights of each adapter, x and y, each once."""
        return self.shrink_bytes + self.expand_bytes

    @property
    def floor_us(self) -> float:
        """Microseconds that the bytes take."""
        return floor_us(self.bytes_moved)

    def segments(self, first_slot: int) -> Segments:
        """The rows' segments, adapters in the slots from `first_slot`."""
        length = np.array(self.lengths)
        return Segments(first_slot + np.arange(len(length)), np.cumsum(length) - length, length, np.array(self.ranks))

    def describe(self) -> dict[str, object]:
        """The fields of a result that say what was measured."""
        return {
            "operation": "lora",
            "case": self.case,
            "rows": self.rows,
            "adapters": len(self.ranks),
            "rank": max(self.ranks),
            "ranks": sorted(set(self.ranks)),
            "d_in": self.d_in,
            "d_outs": list(self.d_outs),
            "page_width": self.width,
            "dtype": self.dtype,
            "fixed_launches": self.fixed,
            "bytes": self.bytes_moved,
            "floor_us": self.floor_us,
        }


def floor_us(nbytes: int) -> float:
    """Microseconds that the memory takes to move so many bytes."""
    return 1e6 * nbytes / FLOOR_BYTES_PER_S


def distinct(rows: int, rank: int, case: str = "distinct", **shape: object) -> LoraCase:
    """Every row has an adapter of its own."""
    return LoraCase(case, (1,) * rows, (rank,) * rows, **shape)  # type: ignore[arg-type]


def zipf(rows: int, rank: int, **shape: object) -> LoraCase:
    """Adapter i of 32 is drawn with a probability proportional to 1 / (i + 1)."""
    weights = 1 / np.arange(1, ZIPF_ADAPTERS + 1)
    drawn = np.random.default_rng(ZIPF_SEED).choice(ZIPF_ADAPTERS, rows, p=weights / weights.sum())
    lengths = tuple(np.unique(drawn, return_counts=True)[1].tolist())
    return LoraCase("zipf", lengths, (rank,) * len(lengths), **shape)  # type: ignore[arg-type]


def prefill(rank: int, **shape: object) -> LoraCase:
    """4,096 rows in 16 segments of 16 adapters."""
    return LoraCase("prefill", (256,) * PREFILL_SEGMENTS, (rank,) * PREFILL_SEGMENTS, **shape)  # type: ignore[arg-type]


def lora_cases() -> list[LoraCase]:
    """Everything, in the order of the tables."""
    cases = [distinct(rows, rank) for rank in RANKS for rows in ROWS]
    cases += [zipf(rows, rank) for rank in RANKS for rows in ROWS]
    cases += [LoraCase("same", (rows,), (rank,)) for rank in (8, 64) for rows in ROWS]
    cases += [prefill(rank) for rank in RANKS]
    mixed = (1,) * 64, (8, 16, 32, 64) * 16
    cases += [LoraCase("mixed", *mixed), LoraCase("mixed fixed", *mixed, fixed=True)]
    cases += [distinct(64, rank, "distinct fixed", fixed=True) for rank in (8, 64)]
    cases += [distinct(64, rank, "odd rank") for rank in (1, 3, 5, 24, 65)]
    cases += [
        distinct(64, rank, "width", d_in=width, d_outs=(width,), width=width)
        for width in (576, 2048, 5120, 11008)
        for rank in (8, 64)
    ]
    grouped = {"d_outs": (HIDDEN, 1024, 1024), "width": 1024}  # grouped-query attention: four pages a column of A
    cases += [distinct(64, rank, "qkv", d_outs=(HIDDEN,) * 3) for rank in (8, 64)]
    cases += [distinct(64, 16, "qkv grouped", **grouped), prefill(16, **grouped)]
    for case in (distinct(64, 64, dtype="bfloat16"), zipf(256, 64, dtype="bfloat16"), prefill(64, dtype="bfloat16")):
        cases.append(case)
    return cases
