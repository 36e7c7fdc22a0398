"""What must hold of a scheduler's sequences between steps, as assertions; for Scheduler.check."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slora_ref.pager import PagePool
from slora_ref.prefetch import Prefetcher
from slora_ref.request import BASE_MODEL, Sequence


def check_waiting(waiting: Seq[Sequence]) -> None:
    """They stand in order of arrival and hold nothing."""
    numbers = [sequence.number for sequence in waiting]
    assert numbers == sorted(set(numbers)), "the waiting list lost its order"
    for sequence in waiting:
        assert sequence.slot is None and sequence.computed == 0 and not sequence.finished, sequence.number


def check_running(running: Seq[Sequence], pool: PagePool, prefetcher: Prefetcher, most: int) -> None:
    """At most so many; each has a slot, pages for what is computed, its adapter, and something to compute next."""
    assert len(running) <= most, len(running)
    slots = [sequence.slot for sequence in running]
    assert None not in slots and len(set(slots)) == len(slots), slots
    for sequence in running:
        assert sequence.slot is not None and pool.lengths[sequence.slot] == sequence.computed, sequence.number
        assert sequence.uncomputed >= 1 and sequence.tokens_left and not sequence.finished, sequence.number
        assert sequence.adapter_id == BASE_MODEL or prefetcher.is_resident(sequence.adapter_id), sequence.number


def check_leaving(leaving: Seq[Sequence]) -> None:
    """They hold nothing, and only their last token is missing."""
    for sequence in leaving:
        assert sequence.slot is None and not sequence.finished, sequence.number
        assert sequence.unread and not sequence.tokens_left, sequence.number
