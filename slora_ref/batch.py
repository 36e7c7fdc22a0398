"""Batch: one step as integer arrays, all that the model needs to know of it.

Rows of one adapter are neighbours (a segment), and within them the rows of one sequence (a span); decode, shared decode
and prefill are one idea. It knows tokens and slots, but no sampling parameters and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from slora_ref.ops.tables import Segments, Spans
from slora_ref.pager import PagePool
from slora_ref.shapes import Array, Int
from slora_ref.step import Work


@dataclass(frozen=True)
class Batch:
    """The index arrays of one step.

    Args:
        token_ids, positions: [rows] token and place in its sequence.
        k_pages, v_pages: [rows] pages that receive the row's key and value; -1: do not store.
        segments: rows by adapter.
        spans: rows by sequence.
        logit_rows: [logits] rows whose logits are wanted.
        sampled: [samples] which of those logits a token is sampled from.
    """

    token_ids: Int[Array, " rows"]
    positions: Int[Array, " rows"]
    k_pages: Int[Array, " rows"]
    v_pages: Int[Array, " rows"]
    segments: Segments
    spans: Spans
    logit_rows: Int[Array, " logits"]
    sampled: Int[Array, " samples"]

    @classmethod
    def build(cls, work: Seq[Work], pool: PagePool) -> Batch:
        """Allocates the step's pages and lays out its rows.

        Args:
            work: as `arrange` orders it.

        Raises:
            OutOfPages: the pool has too few free pages; nothing changed.
        """
        slots, starts, counts, logits = _columns(
            [(_slot(item), item.start, item.count, item.logit_rows) for item in work], columns=4
        )
        row_ends = np.cumsum(counts)
        row_starts = row_ends - counts
        row_slots = np.repeat(slots, counts)
        positions = np.arange(len(row_slots)) + np.repeat(starts - row_starts, counts)
        k_pages, v_pages = pool.extend(row_slots, positions)
        samples = np.array([item.samples for item in work], dtype=np.bool_)
        return cls(
            token_ids=np.array(
                [t for w in work for t in w.sequence.tokens[w.start : w.start + w.count]], dtype=np.int64
            ),
            positions=positions,
            k_pages=k_pages,
            v_pages=v_pages,
            segments=_segments([pool.adapter_slot(item.sequence.adapter_id) for item in work], row_starts, row_ends),
            spans=Spans(slots, row_starts, counts, starts + counts),
            logit_rows=np.arange(logits.sum()) + np.repeat(row_ends - np.cumsum(logits), logits),
            sampled=(np.cumsum(logits) - 1)[samples],
        )


def arrange(work: Seq[Work], pool: PagePool) -> list[Work]:
    """The step's work with sequences of one adapter side by side, base model first; else in the given order."""
    return sorted(work, key=lambda item: pool.adapter_slot(item.sequence.adapter_id))


def _slot(item: Work) -> int:
    assert item.sequence.slot is not None, f"request {item.sequence.number} runs without a slot"
    return item.sequence.slot


def _columns(rows: list[tuple[int, ...]], columns: int) -> Int[Array, "columns rows"]:
    return np.array(rows, dtype=np.int64).reshape(-1, columns).T


def _segments(adapters: list[int], row_starts: Int[Array, " spans"], row_ends: Int[Array, " spans"]) -> Segments:
    """Merges neighbouring spans of one adapter slot."""
    adapter = np.array(adapters, dtype=np.int64)
    first = np.flatnonzero(np.diff(adapter, prepend=-2))
    last = np.append(first[1:], len(adapter)) - 1
    start = row_starts[first]
    return Segments(adapter[first], start, row_ends[last] - start)
