"""Policies: FCFS alone, and what the scheduler makes of any policy's answer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import Rig
from strategies import Ask

from slora_ref.policy import FCFS, Ordering
from slora_ref.request import FinishReason, Request, Sequence


class Scripted:
    """A policy that answers what a test wants, and keeps what it was asked."""

    def __init__(self, answer: Callable[[Seq[Sequence]], Ordering]) -> None:
        self.answer = answer
        self.asked: list[tuple[list[int], list[int], float]] = []

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        self.asked.append(([s.number for s in waiting], [s.number for s in running], now))
        return self.answer(waiting)


@given(numbers=st.lists(st.integers(0, 1000), unique=True, max_size=20).map(sorted), now=st.floats(0, 1e6))
def test_first_come_first_served(numbers: list[int], now: float) -> None:
    waiting = [Sequence(number, Request(prompt_ids=(0,)), -1, 0) for number in numbers]
    ordering = FCFS().order(waiting, [], now)
    assert list(ordering.candidates) == waiting and not ordering.dropped


def test_a_policy_is_asked_with_the_waiting_in_order_of_arrival_the_running_and_the_time() -> None:
    policy = Scripted(lambda waiting: Ordering(list(reversed(waiting))))
    rig = Rig(100, policy=policy, max_running=2, max_batched_tokens=8)
    for _ in range(3):
        rig.ask(Ask(None, 1, 5, 5))
    rig.step()
    rig.step()
    assert policy.asked == [([0, 1, 2], [], 1.0), ([0], [2, 1], 2.0)]


def test_the_scheduler_admits_in_the_policys_order_up_to_the_first_that_does_not_fit() -> None:
    """A policy's order is its promise about starvation, so nothing smaller slips past the one that it puts first."""
    rig = Rig(40, policy=Scripted(lambda waiting: Ordering(list(reversed(waiting)))), max_batched_tokens=200)
    small, large, last = (rig.ask(Ask(None, prompt, 5, 5)) for prompt in (1, 12, 5))
    rig.step()
    assert rig.last.admitted == [last]
    assert {small, large} == set(rig.scheduler.waiting)
    rig.run_to_the_end(20)


@pytest.mark.parametrize("copies", [False, True])
def test_what_a_policy_drops_is_ended_and_never_runs(copies: bool) -> None:
    """Also while its adapter is being loaded; and whether or not the policy leaves it among the candidates."""
    tired: list[int] = []

    def drop(waiting: Seq[Sequence]) -> Ordering:
        dropped = [s for s in waiting if s.number in tired]
        return Ordering([s for s in waiting if s not in dropped] if copies else waiting, dropped)

    rig = Rig(100, [2], policy=Scripted(drop), max_batched_tokens=200)
    rig.loader.polls = {0: 3}
    loading, stays = rig.ask(Ask(0, 2, 5, 5)), rig.ask(Ask(None, 2, 5, 5))
    rig.step()
    late = rig.ask(Ask(None, 2, 5, 5))
    tired += [loading.number, late.number]
    rig.step()
    for sequence in (loading, late):
        assert sequence.finish_reason is FinishReason.ABORT and sequence.finished_at == 2.0
        assert sequence.error == "dropped by the policy: it could not start in time"
        assert not sequence.output_ids
    rig.run_to_the_end(10)
    assert stays.finish_reason is FinishReason.LENGTH
    rig.check_all_is_free()


def test_a_preempted_request_stands_where_it_arrived() -> None:
    policy = Scripted(Ordering)
    rig = Rig(40, policy=policy, max_running=4, max_batched_tokens=30, admission="expected")
    rig.ask(Ask(None, 1, 20, 1))
    rig.run_to_the_end(2)
    for _ in range(3):
        rig.ask(Ask(None, 4, 12, 12))
    while not rig.scheduler.preemptions:
        rig.step()
        rig.ask(Ask(None, 12, 8, 8))
    rig.step()
    waiting = policy.asked[-1][0]
    assert waiting[0] == 3 and waiting == sorted(waiting) and len(waiting) > 2
