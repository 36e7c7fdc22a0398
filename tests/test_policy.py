"""Policies: what each answers, the bounds that their docstrings state, and what the scheduler makes of an answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import Rig
from strategies import Ask

from slora_ref.policy import (
    FCFS,
    LCFS,
    AdapterClusters,
    EarlyAbort,
    FairShare,
    OneAdapter,
    Ordering,
    OriginalAdapterClusters,
    OriginalEarlyAbort,
    Policy,
)
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


# --- each policy alone: what it answers for given queues ---


def queue(*adapters: int, since: float = 0.0, prompt: int = 4) -> list[Sequence]:
    """Waiting requests of these adapters, a second apart."""
    return [
        Sequence(i, Request(prompt_ids=(0,) * prompt, arrival=since + i), adapter, 0)
        for i, adapter in enumerate(adapters)
    ]


def start(sequence: Sequence, first_token_at: float | None = None) -> Sequence:
    """The sequence as the scheduler leaves one that it has admitted."""
    sequence.slot, sequence.first_token_at = sequence.number, first_token_at
    return sequence


def numbers(sequences: Seq[Sequence]) -> list[int]:
    return [sequence.number for sequence in sequences]


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FCFS,
    "lcfs": LCFS,
    "abort": EarlyAbort,
    "original abort": OriginalEarlyAbort,
    "clusters": lambda: AdapterClusters(2),
    "original clusters": lambda: OriginalAdapterClusters(2),
    "clusters with abort": lambda: AdapterClusters(2, EarlyAbort()),
    "fair": FairShare,
    "one adapter": OneAdapter,
    "alone": lambda: OneAdapter(joining=False, most_running=3),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@given(data=st.data())
def test_any_policy_names_each_waiting_request_at_most_once(policy: Callable[[], Policy], data: st.DataObject) -> None:
    """And, with nothing running, names somebody or drops somebody: work is never left undone."""
    asked, now = policy(), 0.0
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 12))):
        now += data.draw(st.floats(0, 4))
        waiting.append(Sequence(number, Request(prompt_ids=(0,), arrival=now), data.draw(st.integers(-1, 3)), 0))
        now += data.draw(st.floats(0, 4))
        ordering = asked.order(waiting, running, now)
        named = numbers([*ordering.candidates, *ordering.dropped])
        assert len(set(named)) == len(named) and set(named) <= set(numbers(waiting))
        assert named or running
        taken = ordering.candidates[: data.draw(st.integers(0, 3))]
        running = [s for s in running if data.draw(st.booleans())] + [start(s, now) for s in taken]
        gone = {*numbers(taken), *numbers(ordering.dropped)}
        waiting = [s for s in waiting if s.number not in gone]


def test_last_come_first_served() -> None:
    assert numbers(LCFS().order(queue(0, 1, 2), [], 9.0).candidates) == [2, 1, 0]


def best_service(arrivals: list[float], slots: list[float], reward: Callable[[float], float]) -> float:
    """The most that any choice and order of requests can earn, one in each slot."""
    return max(
        sum(reward(slot - arrival) for slot, arrival in zip(slots, chosen, strict=True))
        for chosen in itertools.permutations(arrivals, len(slots))
    )


CONCAVE: dict[str, Callable[[float], float]] = {
    "satisfaction, not cut off": lambda x: 1 - (x / 6) ** 2,
    "linear": lambda x: -x,
    "cubic": lambda x: -(x**3),
    "kink": lambda x: -max(0.0, x - 3),
}


@pytest.mark.parametrize("reward", CONCAVE.values(), ids=CONCAVE)
@given(data=st.data())
def test_the_newest_in_order_of_arrival_earn_most(reward: Callable[[float], float], data: st.DataObject) -> None:
    """Theorem B.1, by trying every choice and every order."""
    moments = st.lists(st.floats(0, 5), min_size=3, max_size=5)
    arrivals = sorted(data.draw(moments))
    slots = sorted(5 + moment for moment in data.draw(moments)[:3])
    newest = arrivals[-len(slots) :]
    earned = sum(reward(slot - arrival) for slot, arrival in zip(slots, newest, strict=True))
    assert earned >= best_service(arrivals, slots, reward) - 1e-9


def test_the_theorem_fails_for_a_reward_that_is_cut_off() -> None:
    """The counterexample of LCFS's docstring; so early abort must drop the hopeless first."""

    def satisfaction(x: float) -> float:
        return max(0.0, 1 - (x / 6) ** 2)

    arrivals, slots = [-5.0, 0.0], [0.0, 5.0]
    in_order = sum(satisfaction(slot - arrival) for slot, arrival in zip(slots, arrivals, strict=True))
    assert in_order == pytest.approx(2 * 11 / 36)
    assert best_service(arrivals, slots, satisfaction) == 1.0


@pytest.mark.parametrize(("policy", "dropped"), [(EarlyAbort, [0]), (OriginalEarlyAbort, [0, 1])])
def test_early_abort_drops_who_would_be_late(policy: Callable[[], Policy], dropped: list[int]) -> None:
    """At 6.8 s, those of 0 s and 1 s and 2 s have waited 6.8, 5.8 and 4.8 s; the authors add half a second."""
    ordering = policy().order(queue(0, 0, 0), [], 6.8)
    assert numbers(ordering.dropped) == dropped
    assert sorted(numbers(ordering.candidates)) == [n for n in range(3) if n not in dropped]


def test_early_abort_learns_how_long_a_prefill_takes() -> None:
    policy = EarlyAbort()
    first, *rest = queue(0, 0, 0)
    policy.order([first, *rest], [], 3.0)
    start(first, first_token_at=4.5)
    assert numbers(policy.order(rest, [first], 5.6).dropped) == [1]  # 1.5 s more and it has waited for 6.1 s
    assert policy.prefill_seconds == 1.5


def test_early_abort_never_drops_who_has_had_its_first_token() -> None:
    preempted = queue(0)[0]
    preempted.first_token_at = 1.0
    for policy in (EarlyAbort(), OriginalEarlyAbort()):
        assert numbers(policy.order([preempted], [], 100.0).candidates) == [0]


@pytest.mark.parametrize("policy", [EarlyAbort, OriginalEarlyAbort])
def test_early_abort_turns_to_the_newest_while_more_come_than_can_start(policy: Callable[[], Policy]) -> None:
    asked, coming = policy(), iter(queue(*[0] * 10, since=-4.0))
    waiting: list[Sequence] = []
    orders = []
    for step in range(9):
        waiting += itertools.islice(coming, 2)  # two a round for five rounds, then nobody; one starts in each
        candidates = asked.order(waiting, [], 0.01 * step).candidates
        orders.append("newest" if candidates[0].number > candidates[-1].number else "oldest")
        waiting.remove(start(candidates[0], 0.01 * step))
    assert orders[:4] == ["newest"] * 4
    assert orders[-2] == "oldest"  # at the last round only one waits


def test_clusters_keep_to_the_adapters_that_run() -> None:
    waiting = queue(3, 1, -1, 2, 1, 3, 2)
    running = [start(Sequence(99, Request(prompt_ids=(0,)), 1, 0))]
    assert numbers(AdapterClusters(1).order(waiting, running, 0.0).candidates) == [1, 2, 4]
    assert numbers(AdapterClusters(2).order(waiting, running, 0.0).candidates) == [1, 2, 4, 0, 5]
    assert numbers(AdapterClusters(2).order(waiting, [], 0.0).candidates) == [2, 0, 1, 4, 5]


def test_clusters_give_way_to_who_has_waited_long_enough() -> None:
    waiting = queue(3, 1, 1)
    running = [start(Sequence(99, Request(prompt_ids=(0,)), 1, 0))]
    assert numbers(AdapterClusters(1, patience=5.0).order(waiting, running, 5.0).candidates) == [0]


def test_the_authors_clusters_have_no_limit() -> None:
    waiting = queue(3, 1, 2, 1)
    running = [start(Sequence(99 + i, Request(prompt_ids=(0,)), i, 0)) for i in (0, 1)]
    assert numbers(OriginalAdapterClusters(2).order(waiting, running, 0.0).candidates) == [1, 3, 0, 2]
    assert numbers(OriginalAdapterClusters(3).order(waiting, running, 0.0).candidates) == [0, 1, 2, 3]


def test_clusters_keep_the_inner_policys_order_and_drops() -> None:
    waiting = queue(1, 3, 1, 3, 1)
    running = [start(Sequence(99, Request(prompt_ids=(0,)), 3, 0))]
    ordering = OriginalAdapterClusters(1, EarlyAbort()).order(waiting, running, 6.5)
    assert numbers(ordering.dropped) == [0]
    assert numbers(ordering.candidates) == [3, 1, 4, 2]


def test_one_adapter_runs_at_a_time() -> None:
    waiting = queue(1, 2, 2, 1)
    assert numbers(OneAdapter().order(waiting, [], 0.0).candidates) == [0, 3]
    assert numbers(OneAdapter().order(waiting, [start(queue(2)[0])], 0.0).candidates) == [1, 2]
    assert numbers(OneAdapter(joining=False).order(waiting, [start(queue(2)[0])], 0.0).candidates) == []
    assert numbers(OneAdapter(most_running=1).order(waiting, [], 0.0).candidates) == [0]


def test_one_adapter_may_pass_a_bounded_number_of_others() -> None:
    waiting = queue(2, *[1] * 4, 2)
    running = [start(Sequence(99, Request(prompt_ids=(0,)), 2, 0))]
    assert numbers(OneAdapter(most_passed=3).order(waiting, running, 0.0).candidates) == [0]
    assert numbers(OneAdapter(most_passed=4).order(waiting, running, 0.0).candidates) == [0, 5]


def serve(policy: FairShare, waiting: list[Sequence], rounds: int, output: int, room: int = 2) -> list[Sequence]:
    """A stand-in for the engine: `room` at a time run, one token a round; returns who started, in order."""
    running: list[Sequence] = []
    started: list[Sequence] = []
    for now in range(rounds):
        candidates = policy.order(waiting, running, float(now)).candidates if waiting else []
        for sequence in candidates[: room - len(running)]:
            running.append(start(sequence, float(now)))
            waiting.remove(sequence)
            started.append(sequence)
        for sequence in list(running):
            sequence.tokens.append(1)
            if len(sequence.output_ids) == output:
                running.remove(sequence)
                sequence.slot = None
    return started


@given(data=st.data())
def test_the_service_of_backlogged_adapters_differs_by_at_most_twice_the_largest_charge(data: st.DataObject) -> None:
    """One floods the queue and asks for long prompts; all have requests waiting to the end."""
    lengths = {adapter: data.draw(st.integers(1, 8)) for adapter in (-1, 0, 1)}
    output, room = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    weights = {0: data.draw(st.sampled_from([1.0, 2.0]))}
    flood = [1] * 60 + [-1, 0] * 60 if data.draw(st.booleans()) else [1, -1, 0] * 60
    waiting = [
        Sequence(i, Request(prompt_ids=(0,) * lengths[adapter]), adapter, 0) for i, adapter in enumerate(flood)
    ]
    policy = FairShare(weights)
    serve(policy, waiting, 40, output, room)
    assert {s.adapter_id for s in waiting} == {-1, 0, 1}
    largest = max(max(lengths.values()), 2.0 * output * room)
    served = [policy.counters[adapter] for adapter in (-1, 0, 1)]
    assert max(served) - min(served) <= 2 * largest


def test_an_adapter_that_idled_has_saved_up_nothing() -> None:
    policy = FairShare()
    serve(policy, queue(*[1] * 20), 30, 3)
    late = [Sequence(100 + i, Request(prompt_ids=(0,) * 4), i % 2, 0) for i in range(20)]
    started = serve(policy, late, 12, 3)
    assert abs(sum(s.adapter_id == 0 for s in started) - len(started) / 2) <= 1


def test_a_larger_weight_is_a_larger_share() -> None:
    policy = FairShare({0: 3.0})
    started = serve(policy, queue(*[0, 1] * 60), 100, 3)
    shares = [sum(s.adapter_id == adapter for s in started) for adapter in (0, 1)]
    assert shares[0] == pytest.approx(3 * shares[1], abs=4)
