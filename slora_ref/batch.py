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
from slora_ref.request import Sequence
from slora_ref.shapes import Array, Int
from slora_ref.step import Work


@dataclass(frozen=True)
class Batch:
    """The index arrays of one step.

    Args:
        token_ids, positions: [rows] token and place in its sequence; a token below 0 is a placeholder: -1 - i for the
            i-th sample of the step before.
        k_pages, v_pages: [rows] pages that receive the row's key and value; -1: do not store.
        segments: rows by adapter.
        spans: rows by sequence.
        logit_rows: [logits] rows whose logits are wanted.
        sampled: [samples] which of those logits a token is sampled from.
        wants_logits: whether a request reads the logits themselves.
    """

    token_ids: Int[Array, " rows"]
    positions: Int[Array, " rows"]
    k_pages: Int[Array, " rows"]
    v_pages: Int[Array, " rows"]
    segments: Segments
    spans: Spans
    logit_rows: Int[Array, " logits"]
    sampled: Int[Array, " samples"]
    wants_logits: bool = True

    @classmethod
    def build(cls, work: Seq[Work], pool: PagePool) -> Batch:
        """Allocates the step's pages and lays out its rows.

        Args:
            work: as `arrange` orders it.

        Raises:
            OutOfPages: the pool has too few free pages; nothing changed.
        """
        sequences = [item.sequence for item in work]
        slots = _array([_slot(sequence) for sequence in sequences])
        adapters = _array([pool.adapter_slot(sequence.adapter_id) for sequence in sequences])
        starts, counts = _array([item.start for item in work]), _array([item.count for item in work])
        samples = starts + counts == _array([len(sequence.tokens) for sequence in sequences])
        keeps_logits = _array([sequence.request.params.keep_logits for sequence in sequences])
        logits = np.where(keeps_logits, counts, samples)
        row_ends = np.cumsum(counts)
        row_starts = row_ends - counts
        row_slots = np.repeat(slots, counts)
        positions = np.arange(len(row_slots)) + np.repeat(starts - row_starts, counts)
        k_pages, v_pages = pool.extend(row_slots, positions)
        return cls(
            token_ids=_array(_tokens(work)),
            positions=positions,
            k_pages=k_pages,
            v_pages=v_pages,
            segments=_segments(adapters, row_starts, row_ends, pool.adapters.page_rank),
            spans=Spans(slots, row_starts, counts, starts + counts),
            logit_rows=np.arange(logits.sum()) + np.repeat(row_ends - np.cumsum(logits), logits),
            sampled=(np.cumsum(logits) - 1)[samples],
            wants_logits=any(sequence.request.params.reads_logits for sequence in sequences),
        )


def arrange(work: Seq[Work]) -> list[Work]:
    """The step's work with sequences of one adapter side by side, base model first; else in the given order."""
    return sorted(work, key=lambda item: item.sequence.adapter_id)


def _array(values: list[int]) -> Int[Array, " n"]:
    return np.array(values, dtype=np.int64)


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, f"request {sequence.number} runs without a slot"
    return sequence.slot


def _tokens(work: Seq[Work]) -> list[int]:
    """The tokens of all rows, in order."""
    tokens: list[int] = []
    for item in work:
        tokens += item.sequence.tokens[item.start : item.start + item.count]
    return tokens


def _segments(
    adapters: Int[Array, " spans"],
    row_starts: Int[Array, " spans"],
    row_ends: Int[Array, " spans"],
    page_rank: Int[Array, "adapter_slots targets"],
) -> Segments:
    """Merges neighbouring spans of one adapter slot."""
    changes = np.ones(len(adapters), np.bool_)
    changes[1:] = adapters[1:] != adapters[:-1]
    first = np.flatnonzero(changes)
    last = np.append(first, len(adapters))[1:] - 1
    start = row_starts[first]
    slots = adapters[first]
    rank = np.where(slots >= 0, page_rank[slots].max(axis=1, initial=0), 0)
    return Segments(slots, start, row_ends[last] - start, rank)
