"""Batch: the index arrays of a step, checked row by row against the sequences they were made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config

from slora_ref.batch import Batch, arrange
from slora_ref.config import TARGETS
from slora_ref.errors import OutOfPages
from slora_ref.pager import AdapterShape, PageLayout, PagePool
from slora_ref.request import BASE_MODEL, Request, SamplingParams, Sequence
from slora_ref.step import Work

LAYOUT = PageLayout(tiny_config())


@dataclass(frozen=True)
class Part:
    """What one sequence brings to a step: its adapter, and its tokens before, in, and after the step."""

    adapter_id: int
    before: int
    count: int
    after: int = 0
    keep_logits: bool = False


def new_pool(pages: int = 4000, shuffle_seed: int | None = 0) -> PagePool:
    return PagePool(LAYOUT, pages, 32, 200, 8, dtype=None, shuffle_seed=shuffle_seed)


def prepare(parts: list[Part], pool: PagePool) -> list[Work]:
    """A running sequence for each part, with its earlier tokens in pages; numbers and tokens tell them apart."""
    work = []
    for number, part in enumerate(parts):
        tokens = [(100 * number + place) % 97 for place in range(part.before + part.count + part.after)]
        request = Request(prompt_ids=tuple(tokens), params=SamplingParams(keep_logits=part.keep_logits))
        sequence = Sequence(number, request, part.adapter_id, seed=number, slot=pool.open_sequence())
        if part.before:
            pool.extend(np.full(part.before, sequence.slot), np.arange(part.before))
        sequence.computed = part.before
        work.append(Work(sequence, part.before, part.count))
    return work


def open_adapters(pool: PagePool, ids: list[int]) -> None:
    for adapter_id in ids:
        ranks = np.full((LAYOUT.num_layers, len(TARGETS)), 2, np.int32)
        pool.open_adapter(adapter_id, AdapterShape(ranks, ranks.astype(np.float32)))


def check_rows(batch: Batch, work: list[Work], pool: PagePool) -> None:
    """Every array of the batch says of every row what the sequences say."""
    rows = [(item, item.start + i) for item in work for i in range(item.count)]
    assert batch.token_ids.tolist() == [item.sequence.tokens[position] for item, position in rows]
    assert batch.positions.tolist() == [position for _, position in rows]
    for row, (item, position) in enumerate(rows):
        table = pool.sequence_pages[item.sequence.slot]
        assert table[:, position].tolist() == [batch.k_pages[row], batch.v_pages[row]]
    pages = np.concatenate([batch.k_pages, batch.v_pages])
    assert len(set(pages.tolist())) == 2 * len(rows), "two rows share a page"
    check_spans(batch, work)
    check_segments(batch, [pool.adapter_slot(item.sequence.adapter_id) for item, _ in rows])
    keeps = [item.sequence.request.params.keep_logits for item, _ in rows]
    last = [position == len(item.sequence.tokens) - 1 for item, position in rows]
    wanted = [row for row in range(len(rows)) if keeps[row] or last[row]]
    assert batch.logit_rows.tolist() == wanted
    assert batch.logit_rows[batch.sampled].tolist() == [row for row in wanted if last[row]]


def check_spans(batch: Batch, work: list[Work]) -> None:
    spans, row = batch.spans, 0
    assert spans.slot.tolist() == [item.sequence.slot for item in work]
    for i, item in enumerate(work):
        assert (spans.start[i], spans.length[i]) == (row, item.count)
        assert spans.context[i] == item.start + item.count
        row += item.count


def check_segments(batch: Batch, slots: list[int]) -> None:
    """Disjoint, in order, no row twice or never, each row under its own adapter, no two of one adapter."""
    segments, row = batch.segments, 0
    for adapter, start, length in zip(segments.adapter, segments.start, segments.length, strict=True):
        assert start == row
        assert length > 0
        assert slots[start : start + length] == [adapter] * int(length)
        row += int(length)
    assert row == len(slots)
    assert len(set(segments.adapter.tolist())) == len(segments.adapter), "one adapter in two segments"


parts_of_a_step = st.builds(
    Part,
    adapter_id=st.integers(BASE_MODEL, 3),
    before=st.integers(0, 40),
    count=st.integers(1, 17),
    after=st.sampled_from((0, 0, 5)),
    keep_logits=st.booleans(),
)


@given(parts=st.lists(parts_of_a_step, min_size=1, max_size=9), shuffle_seed=st.integers(0, 100))
def test_every_row_is_where_its_sequence_says(parts: list[Part], shuffle_seed: int) -> None:
    pool = new_pool(shuffle_seed=shuffle_seed)
    open_adapters(pool, [2, 0, 3, 1])  # slots are not ids
    work = arrange(prepare(parts, pool))
    batch = Batch.build(work, pool)
    check_rows(batch, work, pool)
    pool.check()


@pytest.mark.parametrize("counts", [(1,) * 7, (5,) * 7, (17, 1, 5, 1, 17, 1, 5), (1, 17, 1, 1, 1, 17, 1)])
def test_segments_do_not_overlap_when_adapters_interleave_and_the_middle_ones_finish(counts: tuple[int, ...]) -> None:
    """A,B,A,-,C,-,A; then without those in the middle: the fault was a list of segments that outlived its rows."""
    a, b, c = 7, 5, 6
    pool = new_pool()
    open_adapters(pool, [b, c, a])
    order = [a, b, a, BASE_MODEL, c, BASE_MODEL, a]
    work = prepare([Part(adapter, 3, count, 9) for adapter, count in zip(order, counts, strict=True)], pool)
    batch = Batch.build(arrange(work), pool)
    check_rows(batch, arrange(work), pool)
    assert sorted(batch.segments.adapter.tolist()) == sorted(map(pool.adapter_slot, {*order}))
    assert batch.segments.length.sum() == sum(counts)
    rest = [work[i] for i in (0, 2, 5, 6)]
    for item in (work[1], work[3], work[4]):
        pool.close_sequence(item.sequence.slot)
    pool.close_adapter(b)
    pool.close_adapter(c)
    after = arrange([Work(item.sequence, item.start + item.count, 1) for item in rest])
    batch = Batch.build(after, pool)
    check_rows(batch, after, pool)
    assert sorted(batch.segments.length.tolist()) == [1, 3]


def test_sequences_of_one_adapter_are_neighbours_and_otherwise_keep_their_order() -> None:
    pool = new_pool()
    open_adapters(pool, [0, 1])
    work = prepare([Part(1, 0, 2), Part(BASE_MODEL, 0, 2), Part(0, 0, 2), Part(1, 0, 2), Part(BASE_MODEL, 0, 2)], pool)
    assert [item.sequence.number for item in arrange(work)] == [1, 4, 2, 0, 3]


def test_a_chunk_that_ends_before_the_last_token_samples_nothing() -> None:
    pool = new_pool()
    work = prepare([Part(BASE_MODEL, 0, 4, after=1), Part(BASE_MODEL, 2, 3), Part(BASE_MODEL, 0, 2, 3, True)], pool)
    batch = Batch.build(work, pool)
    assert batch.logit_rows.tolist() == [6, 7, 8]
    assert batch.sampled.tolist() == [0]


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    pool = new_pool(pages=20)
    work = prepare([Part(BASE_MODEL, 3, 2), Part(BASE_MODEL, 3, 3)], pool)
    before = pool.sequence_pages.copy(), pool.lengths.copy(), pool.free_pages
    with pytest.raises(OutOfPages, match="10 pages needed, 8 free"):
        Batch.build(work, pool)
    assert (pool.sequence_pages == before[0]).all()
    assert (pool.lengths == before[1]).all()
    assert pool.free_pages == before[2]
    pool.check()
