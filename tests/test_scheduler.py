"""Scheduler, with pool and prefetcher and without a model: who runs, who waits, who gives way, and that all end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rig import Decision, Rig
from strategies import Ask, asks

from slora_ref.errors import RequestError
from slora_ref.request import BASE_MODEL, FinishReason, Sequence

# --- the rules of a step, in any mode ---


def check_step(rig: Rig) -> None:
    """Everything that the last step must obey, whatever came before it."""
    last = rig.last
    check_rows(rig, last)
    check_pauses(rig, last)
    check_preemptions(rig, last)
    check_order_of_admission(rig, last)
    check_nobody_waits_without_need(rig, last)
    check_passing_delays_nobody(rig, last)


def pending(last: Decision, sequence: Sequence) -> int:
    """Tokens of a sequence that waited for the step."""
    return last.known[sequence.number] - last.computed[sequence.number]


def check_rows(rig: Rig, last: Decision) -> None:
    """Each sequence once, at the place where it stopped, within the limits of a step."""
    work = last.step.work
    assert last.step.rows <= rig.config.max_batched_tokens
    assert len({item.sequence.number for item in work}) == len(work) <= rig.config.max_running
    for item in work:
        assert item.start == last.computed[item.sequence.number]
        assert 1 <= item.count <= pending(last, item.sequence)
        assert rig.config.chunked_prefill or item.count == pending(last, item.sequence), "a prompt was cut"


def check_pauses(rig: Rig, last: Decision) -> None:
    """Prefill in order of admission, as much as there is room for; decoding pauses only where the mode says so."""
    counts = {item.sequence.number: item.count for item in last.step.work}
    candidates = [s for s in last.running + last.admitted if s not in last.preempted]
    if not counts:
        alone = rig.config.admission == "expected" and len(candidates) == 1 and rig.prefetcher.loading
        assert not candidates or alone, "nothing runs although something could"
        return
    if last.preempted:
        return  # rows were picked before some gave way
    prefill = [s for s in candidates if pending(last, s) > 1]
    decode = [s for s in candidates if pending(last, s) == 1]
    decoding = [s for s in decode if s.number in counts]
    room = rig.config.max_batched_tokens - len(decoding)
    if decoding != decode:
        assert not decoding and prefill, "some decode while others pause"
        whole = not rig.config.chunked_prefill and pending(last, prefill[0]) + len(decode) > room
        assert rig.config.separate_prefill or whole, "decoding pauses without need"
    if rig.config.separate_prefill:
        assert not (decoding and prefill), "prefill and decode share a step"
    for s in prefill:
        count = min(pending(last, s), room)
        if count < pending(last, s) and not rig.config.chunked_prefill:
            count = room = 0  # nobody overtakes a prompt that must stay whole
        assert counts.get(s.number, 0) == count, "room is left, or a later prompt goes first"
        room -= count


def check_preemptions(rig: Rig, last: Decision) -> None:
    """Only in expected mode, only the newest, never the last one that runs."""
    order = last.running + last.admitted
    count = len(last.preempted)
    assert count == 0 or (rig.config.admission == "expected" and count < len(order))
    assert last.preempted == order[::-1][:count]


def check_order_of_admission(rig: Rig, last: Decision) -> None:
    """First come, first served: passed are only a request whose adapter is on its way, and, by requests of the base
    model, one that waits for a slot of the adapter table.
    """
    assert not last.admitted or last.joins
    for s in last.admitted:
        adapters = set(last.held)
        for earlier in last.waiting[: last.waiting.index(s)]:
            adapters |= {earlier.adapter_id} - {BASE_MODEL}
            no_slot = len(adapters) > rig.pool.max_adapters and s.adapter_id == BASE_MODEL
            passing = earlier not in last.admitted
            assert not passing or no_slot or earlier.adapter_id not in last.resident, (s.number, earlier.number)
            assert not passing or earlier.fetches <= 1, f"{earlier.number} is passed in its second load"


def check_nobody_waits_without_need(rig: Rig, last: Decision) -> None:
    """Who has room to the end beside everybody before it, all of them at full length, is admitted at once."""
    taken, adapters, rows = list(last.running), set(last.held), 0
    for s in last.waiting if last.joins else ():
        taken.append(s)
        adapters |= {s.adapter_id} - {BASE_MODEL}
        rows += last.known[s.number]
        pages = 2 * sum(t.peak_tokens for t in taken) + sum(last.pages[i] for i in adapters)
        full = rows > rig.config.max_batched_tokens and rig.config.separate_prefill
        if len(taken) > rig.config.max_running or len(adapters) > rig.pool.max_adapters or full:
            return
        if pages > rig.pool.num_pages:
            return
        assert s in last.admitted or s.adapter_id not in last.resident, f"{s.number} waits without need"
        if s.fetches > 1 and s not in last.admitted:
            return  # nobody passes it a second time


def check_passing_delays_nobody(rig: Rig, last: Decision) -> None:
    """When all that came before it have ended and its adapter is there, a request starts, whoever passed it.

    (Pages that are being loaded for somebody who went away are in nobody's reckoning; such a load soon ends.)
    """
    if last.joins and last.waiting and rig.config.admission == "max_tokens" and not last.orphans:
        first = last.waiting[0]
        passed = all(s.number > first.number for s in last.running)
        assert not passed or first in last.admitted or first.adapter_id not in last.resident, first.number


# --- any sequence of events ---


@st.composite
def rig_options(draw: st.DrawFn, **fixed: Any) -> dict[str, Any]:
    """What Rig takes, tight enough that everything gets in the way of everything: one long request fills the pool."""
    max_running = draw(st.integers(1, 6))
    drawn = {
        "pages": draw(st.integers(8, 90)),
        "ranks": draw(st.lists(st.sampled_from([1, 2, 5, 8]), max_size=4)),
        "max_running": max_running,
        "max_batched_tokens": max_running + draw(st.sampled_from([1, 2, 3, 5, 9, 20])),
        "admission": draw(st.sampled_from(["max_tokens", "expected"])),
        "chunked_prefill": draw(st.booleans()),
        "separate_prefill": draw(st.booleans()),
        "join_every": draw(st.sampled_from([1, 1, 2, 5])),
        "eviction": draw(st.sampled_from(["lru", "eager", "cost"])),
        "prefetch": draw(st.sampled_from([0, 0, 1, 4])),
        "max_adapters": draw(st.integers(1, 4)),
    }
    return drawn | fixed


def most_steps(rig: Rig) -> int:
    """In this many steps all requests that are alive end, one after the other if need be.

    With `admission = "max_tokens"` each step brings somebody a token, computes a part of somebody's prompt, or waits
    for a load or for the step in which requests may join. With "expected" what was computed may be computed again.
    """
    longest_load = max(rig.loader.polls.values(), default=0)
    loads = longest_load * (2 if rig.config.prefetch else 1)  # one round ahead may hold the room for a request's own
    alone = sum(s.peak_tokens + 2 + loads + rig.config.join_every for s in rig.alive)
    return 1 + alone * (8 if rig.config.admission == "expected" else 1)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, stop and are aborted, adapters are replaced, load slowly or fail, in any order and any mode."""

    @initialize(options=rig_options())
    def start(self, options: dict[str, Any]) -> None:
        self.rig = Rig(**options)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        rig = self.rig
        ask = data.draw(asks(len(rig.ranks)))
        pages = 2 * (ask.prompt + ask.max_tokens - 1 + (0 if ask.adapter is None else rig.ranks[ask.adapter]))
        too_long = ask.prompt + ask.max_tokens - 1 > rig.config.max_batched_tokens and not rig.config.chunked_prefill
        waiting = list(rig.scheduler.waiting)
        if pages > rig.pool.num_pages or too_long:
            with pytest.raises(RequestError):
                rig.ask(ask)
            assert rig.scheduler.waiting == waiting
        else:
            rig.ask(ask)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            check_step(self.rig)

    @precondition(lambda self: self.rig.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A request that waits, runs, was preempted, or whose adapter is being loaded."""
        self.rig.abort(data.draw(st.sampled_from(self.rig.alive)))

    @precondition(lambda self: self.rig.ranks)
    @rule(data=st.data(), polls=st.integers(0, 6), fails=st.sampled_from([False, False, False, True]))
    def plan_loads(self, data: st.DataObject, polls: int, fails: bool) -> None:
        rig = self.rig
        adapter_id = rig.store.lookup(str(data.draw(st.integers(0, len(rig.ranks) - 1)))).adapter_id
        rig.loader.polls[adapter_id] = polls
        (rig.loader.failing.add if fails else rig.loader.failing.discard)(adapter_id)

    @precondition(lambda self: self.rig.ranks)
    @rule(data=st.data(), rank=st.sampled_from([1, 3, 6]))
    def replace_adapter(self, data: st.DataObject, rank: int) -> None:
        self.rig.replace(data.draw(st.integers(0, len(self.rig.ranks) - 1)), rank)

    @invariant()
    def parts_agree(self) -> None:
        self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for _ in range(most_steps(self.rig)):
                if self.rig.alive:
                    self.rig.step()
                    check_step(self.rig)
            self.rig.check_all_is_free()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)


@given(options=rig_options(admission="max_tokens"), wanted=st.lists(asks(4), min_size=1, max_size=30), data=st.data())
def test_a_burst_ends_and_what_was_reserved_is_enough(
    options: dict[str, Any], wanted: list[Ask], data: st.DataObject
) -> None:
    """Class of fault: the pool is full in the middle of a run. Many requests at once, loads of any length."""
    rig = Rig(**options)
    for ask in wanted:
        if ask.adapter is not None and ask.adapter >= len(rig.ranks):
            continue
        try:
            rig.ask(ask)
        except RequestError:
            continue
    for version in rig.store._versions:
        rig.loader.polls[version] = data.draw(st.integers(0, 5))
    for _ in range(most_steps(rig)):
        if rig.alive:
            rig.step()
            check_step(rig)
    rig.check_all_is_free()
    assert all(s.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for s in rig.sequences)
    assert all(len(s.output_ids) == rig.stops_after[s.number] for s in rig.sequences)
    assert all(s.fetches <= 1 for s in rig.sequences), "what was reserved for a waiting request was taken away"


# --- one thing at a time ---


def ran(rig: Rig) -> dict[int, int]:
    """Of the last step, tokens by request number."""
    return {work.sequence.number: work.count for work in rig.last.step.work}


def test_a_request_joins_at_the_next_step_and_decodes_beside_prefill() -> None:
    rig = Rig(100, max_running=4, max_batched_tokens=8)
    rig.ask(Ask(None, 5, 4, 4))
    rig.step()
    assert ran(rig) == {0: 5}
    rig.ask(Ask(None, 3, 2, 2))
    rig.step()
    assert ran(rig) == {0: 1, 1: 3}
    rig.step()
    assert ran(rig) == {0: 1, 1: 1}
    assert [s.number for s in rig.alive] == [0]


def test_a_long_prompt_is_cut_and_never_stops_those_that_decode() -> None:
    rig = Rig(200, max_running=4, max_batched_tokens=6)
    rig.ask(Ask(None, 2, 20, 20))
    rig.step()
    rig.ask(Ask(None, 12, 1, 1))
    rig.ask(Ask(None, 4, 1, 1))
    seen = []
    for _ in range(5):
        rig.step()
        seen.append(ran(rig))
    assert seen == [{0: 1, 1: 5}, {0: 1, 1: 5}, {0: 1, 1: 2, 2: 3}, {0: 1, 2: 1}, {0: 1}]


def test_a_prompt_that_must_stay_whole_waits_for_room_or_stops_the_decoding() -> None:
    rig = Rig(200, max_running=4, max_batched_tokens=8, chunked_prefill=False)
    rig.ask(Ask(None, 2, 6, 6))
    rig.step()
    rig.ask(Ask(None, 8, 1, 1))  # fills a step alone
    rig.ask(Ask(None, 4, 1, 1))
    rig.ask(Ask(None, 4, 1, 1))
    seen = []
    for _ in range(4):
        rig.step()
        seen.append(ran(rig))
    assert seen == [{1: 8}, {0: 1, 2: 4}, {0: 1, 3: 4}, {0: 1}]


def test_separate_prefill_stops_the_decoding() -> None:
    rig = Rig(200, max_running=4, max_batched_tokens=6, separate_prefill=True)
    rig.ask(Ask(None, 2, 6, 6))
    rig.step()
    rig.ask(Ask(None, 9, 2, 2))
    seen = []
    for _ in range(3):
        rig.step()
        seen.append(ran(rig))
    assert seen == [{1: 6}, {1: 3}, {0: 1, 1: 1}]


@pytest.mark.parametrize(("join_every", "joined_at"), [(1, 3), (4, 5), (10, 11)])
def test_requests_join_at_every_so_many_steps(join_every: int, joined_at: int) -> None:
    rig = Rig(100, max_running=4, max_batched_tokens=8, join_every=join_every)
    rig.ask(Ask(None, 1, 20, 20))
    rig.step()
    rig.step()
    late = rig.ask(Ask(None, 1, 3, 3))
    while not late.output_ids:
        rig.step()
    assert rig.steps == joined_at


def test_a_round_in_which_nobody_could_join_is_tried_again_at_the_next_step() -> None:
    rig = Rig(40, max_running=2, max_batched_tokens=8, join_every=4)
    rig.ask(Ask(None, 1, 6, 6))
    rig.ask(Ask(None, 1, 11, 11))
    rig.step()
    waits = rig.ask(Ask(None, 1, 2, 2))
    while waits in rig.scheduler.waiting:
        rig.step()
    assert rig.steps == 7  # the rounds of steps 5 and 6 found no slot; the first request ended in step 6
    late = rig.ask(Ask(None, 1, 2, 2))
    while late in rig.scheduler.waiting:
        rig.step()
    assert rig.steps == 11


@pytest.mark.parametrize(("blocking", "starts"), [(True, [1, 1]), (False, [1, 6])])
def test_a_step_can_wait_for_the_adapters_of_those_that_join(blocking: bool, starts: list[int]) -> None:
    rig = Rig(100, [2], max_running=4, max_batched_tokens=50, blocking_loads=blocking)
    rig.loader.polls = {0: 4}
    both = [rig.ask(Ask(None, 2, 9, 9)), rig.ask(Ask(0, 2, 9, 9))]
    started: dict[int, int] = {}
    while len(started) < 2:
        rig.step()
        started |= {s.number: rig.steps for s in both if s in rig.scheduler.running and s.number not in started}
    assert [started[s.number] for s in both] == starts
    rig.run_to_the_end(20)
    rig.check_all_is_free()


def test_nobody_waits_for_the_joining_step_when_nothing_runs() -> None:
    rig = Rig(100, max_running=4, max_batched_tokens=8, join_every=50)
    rig.ask(Ask(None, 1, 2, 2))
    rig.run_to_the_end(2)
    rig.ask(Ask(None, 1, 2, 2))
    rig.run_to_the_end(2)


def test_at_most_max_running_run() -> None:
    rig = Rig(500, max_running=3, max_batched_tokens=50)
    for _ in range(5):
        rig.ask(Ask(None, 1, 4, 4))
    rig.step()
    assert ran(rig) == {0: 1, 1: 1, 2: 1}


# --- loads ahead of their turn ---


def test_adapters_are_there_when_their_requests_turn_comes() -> None:
    """One runs at a time; behind it, two wait for two adapters, which are loaded meanwhile."""
    rig = Rig(200, [2, 3, 4], max_running=1, max_batched_tokens=8, prefetch=2)
    rig.loader.polls = dict.fromkeys(range(3), 2)
    first, *others = [rig.ask(Ask(adapter, 2, 8, 8)) for adapter in range(3)]
    rig.run_to_the_end(60)
    assert first.adapter_wait_steps > 0
    assert [s.adapter_wait_steps for s in others] == [0, 0]
    assert (rig.prefetcher.counts.loads, rig.prefetcher.counts.loads_ahead, rig.prefetcher.counts.hits) == (3, 2, 2)


def test_without_prefetch_each_waits_for_its_own() -> None:
    rig = Rig(200, [2, 3, 4], max_running=1, max_batched_tokens=8, prefetch=0)
    rig.loader.polls = dict.fromkeys(range(3), 2)
    asked = [rig.ask(Ask(adapter, 2, 8, 8)) for adapter in range(3)]
    rig.run_to_the_end(60)
    assert all(s.adapter_wait_steps > 0 for s in asked)
    assert (rig.prefetcher.counts.loads_ahead, rig.prefetcher.counts.hits) == (0, 0)


def test_loads_ahead_take_no_page_that_the_running_will_need() -> None:
    """Class of fault: prefetched adapters fill the pool, and the next decode finds no page.

    The base model's request will hold 24 of 30 tokens: 12 pages are left, for one adapter of 10 pages, not for two.
    """
    rig = Rig(60, [5, 5, 5], max_running=2, max_batched_tokens=30, prefetch=4)
    long = rig.ask(Ask(None, 4, 21, 21))
    for adapter in range(3):
        rig.ask(Ask(adapter, 10, 10, 10))  # no room beside the first
    while not long.finished:
        rig.step()
        assert rig.prefetcher.resident + rig.prefetcher.loading <= 1
    assert rig.prefetcher.counts.loads_ahead == 1 and rig.prefetcher.counts.evictions == 0
    rig.run_to_the_end(100)
    assert rig.prefetcher.counts.evictions <= 3


def test_a_round_of_loads_ahead_delays_the_head_by_one_round_at_most() -> None:
    """Their pages are nobody's spare room any more; but the next round begins only when the head has had its chance."""
    rig = Rig(40, [5, 5, 5, 5], max_running=4, max_batched_tokens=20, prefetch=1)
    rig.loader.polls = dict.fromkeys(range(4), 3)
    rig.ask(Ask(None, 2, 4, 4))
    head = rig.ask(Ask(0, 8, 8, 8))
    for adapter in range(1, 4):
        rig.ask(Ask(adapter, 8, 8, 8))
    started = None
    for step in range(30):
        rig.step()
        if started is None and head.slot is not None:
            started = step
    assert started is not None and started <= 4 + 2 * 4


def test_the_waiting_of_a_request_for_its_adapter_is_counted_in_steps_and_in_time() -> None:
    """Not the waiting for room before it, nor the steps after it has started; the rig's clock counts steps."""
    rig = Rig(200, [2, 2], max_running=2, max_batched_tokens=30)
    rig.loader.polls = {0: 4, 1: 0}
    slow, quick, base = (rig.ask(Ask(adapter, 2, 3, 3)) for adapter in (0, 1, None))
    rig.run_to_the_end(20)
    assert (slow.adapter_wait_steps, slow.adapter_wait_s) == (5, 5.0)
    assert (quick.adapter_wait_steps, quick.adapter_wait_s) == (1, 1.0)
    assert (base.adapter_wait_steps, base.adapter_wait_s) == (0, 0.0)


# --- refusals ---


def refusal(rig: Rig, ask: Ask) -> str:
    """The message with which the request is refused; nothing has changed."""
    with pytest.raises(RequestError) as refused:
        rig.ask(ask)
    rig.check()
    assert not rig.scheduler.waiting and not rig.prefetcher.loading
    return str(refused.value)


def test_a_request_that_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    rig = Rig(40, [8])
    message = refusal(rig, Ask(None, 20, 2, 2))
    assert "needs 42 pages (42 for 21 tokens, 0 for its adapter), the pool has 40" in message
    message = refusal(rig, Ask(0, 10, 4, 4))
    assert "needs 42 pages (26 for 13 tokens, 16 for its adapter), the pool has 40" in message


def test_a_request_that_just_fits_is_served() -> None:
    """The last token takes no pages: nobody reads it."""
    rig = Rig(40, [8])
    rig.ask(Ask(None, 20, 1, 1))
    rig.ask(Ask(0, 10, 3, 3))
    rig.run_to_the_end(10)
    assert [s.finish_reason for s in rig.sequences] == [FinishReason.LENGTH] * 2


def test_a_prompt_that_can_never_be_computed_whole_is_refused_at_once_with_the_numbers() -> None:
    """After a preemption all its tokens are computed in one step, so the output counts too."""
    rig = Rig(400, max_running=4, max_batched_tokens=8, chunked_prefill=False)
    assert "up to 9 tokens may have to be computed in one step, max_batched_tokens is 8" in refusal(
        rig, Ask(None, 6, 4, 4)
    )
    rig.ask(Ask(None, 6, 3, 3))
    rig.run_to_the_end(4)


# --- memory ---


def test_max_tokens_admits_by_the_peak_over_time_not_by_the_sum() -> None:
    """The first ends before the second is long: 10 + 10 tokens never meet in a pool of 14."""
    rig = Rig(28, max_running=4, max_batched_tokens=20)
    rig.ask(Ask(None, 8, 3, 3))
    rig.ask(Ask(None, 1, 10, 10))
    rig.step()
    assert ran(rig) == {0: 8, 1: 1}
    rig.run_to_the_end(12)
    assert rig.scheduler.preemptions == 0


def test_max_tokens_makes_the_second_wait_where_both_would_be_long_at_once() -> None:
    rig = Rig(28, max_running=4, max_batched_tokens=20)
    rig.ask(Ask(None, 4, 7, 7))
    rig.ask(Ask(None, 1, 10, 10))
    seen = []
    while rig.alive:
        rig.step()
        seen.append(ran(rig))
    assert seen[:4] == [{0: 4}, {0: 1}, {0: 1}, {0: 1, 1: 1}]  # 8 + 1 tokens: from here they fit
    assert rig.scheduler.preemptions == 0


def test_expected_takes_the_risk_and_the_newest_gives_way_and_is_computed_again() -> None:
    rig = Rig(40, max_running=4, max_batched_tokens=30, admission="expected")
    for _ in range(4):
        rig.ask(Ask(None, 1, 12, 1))  # they stop early, so little is expected
    rig.run_to_the_end(10)
    for _ in range(3):
        rig.ask(Ask(None, 4, 12, 12))
    rig.step()
    assert ran(rig) == {4: 4, 5: 4, 6: 4}
    while not rig.last.preempted:
        rig.step()
    assert [s.number for s in rig.last.preempted] == [6]
    newest = rig.sequences[6]
    assert newest.computed == 0 and newest.slot is None and len(newest.output_ids) == 3, "tokens are kept"
    assert ran(rig) == {4: 1, 5: 1}, "the others go on in the same step"
    while newest not in rig.last.admitted:
        rig.step()
    assert ran(rig)[6] == 7, "all its tokens are computed again"
    rig.run_to_the_end(60)
    assert all(len(s.output_ids) == 12 for s in rig.sequences[4:])
    rig.check_all_is_free()


def test_idle_adapters_give_way_before_anybody_is_preempted() -> None:
    rig = Rig(40, [5], max_running=4, max_batched_tokens=30, admission="expected")
    rig.ask(Ask(0, 1, 12, 1))
    rig.run_to_the_end(3)
    assert rig.pool.usage().adapter == 10
    rig.ask(Ask(None, 10, 10, 10))
    rig.run_to_the_end(12)
    assert rig.scheduler.preemptions == 0 and rig.prefetcher.counts.evictions == 1


def test_what_an_early_end_frees_is_used_in_the_next_step() -> None:
    rig = Rig(40, max_running=4, max_batched_tokens=20)
    rig.ask(Ask(None, 10, 10, 2))
    late = rig.ask(Ask(None, 10, 10, 10))
    rig.step()
    rig.step()
    assert late in rig.scheduler.waiting
    rig.step()
    assert ran(rig) == {1: 10}


# --- ends in any state ---


@pytest.mark.parametrize("state", ["waiting", "loading", "in prefill", "decoding", "preempted"])
def test_an_abort_frees_everything_in_any_state(state: str) -> None:
    """Class of fault: what only the finished branch frees leaks when a client goes away (pitfall 28)."""
    options: dict[str, Any] = {"admission": "expected"} if state == "preempted" else {}
    rig = Rig(40, [2, 3], max_running=2, max_batched_tokens=6, **options)
    rig.loader.polls = {0: 4}
    if state == "preempted":
        rig.ask(Ask(None, 1, 1, 1))
        rig.run_to_the_end(2)
        rig.ask(Ask(None, 2, 19, 19))
    victim = rig.ask(Ask(0, 9, 8, 8))
    reached = {
        "waiting": lambda: True,
        "loading": lambda: rig.prefetcher.loading,
        "in prefill": lambda: 0 < victim.computed < 9,
        "decoding": lambda: len(victim.output_ids) == 3,
        "preempted": lambda: victim.preemptions,
    }[state]
    while not reached():
        rig.step()
    rig.abort(victim)
    assert victim.finish_reason is FinishReason.ABORT and victim.slot is None
    rig.run_to_the_end(40)
    rig.check_all_is_free()


def test_nothing_ends_twice() -> None:
    rig = Rig(40)
    sequence = rig.ask(Ask(None, 1, 1, 1))
    rig.run_to_the_end(1)
    with pytest.raises(AssertionError, match="request 0 ended twice"):
        rig.scheduler.finish(sequence, FinishReason.ABORT, 0.0)


def test_a_load_that_fails_ends_the_requests_of_that_adapter_and_no_others() -> None:
    """Class of fault: a bad adapter takes the engine down, or its pages with it (pitfall 29)."""
    rig = Rig(60, [2, 3], max_running=6, max_batched_tokens=20)
    rig.loader.failing = {0}
    for adapter in (0, 1, None, 0):
        rig.ask(Ask(adapter, 2, 3, 3))
    rig.run_to_the_end(10)
    reasons = [s.finish_reason for s in rig.sequences]
    assert reasons == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR]
    assert rig.sequences[0].error == "adapter 0 fails as planned"
    assert rig.prefetcher.counts.failures == 1
    rig.check_all_is_free()


def test_a_removed_adapter_serves_those_that_use_it_and_is_then_forgotten() -> None:
    rig = Rig(60, [2])
    old = rig.ask(Ask(0, 2, 6, 6))
    rig.step()
    rig.step()
    rig.replace(0, 4)
    new = rig.ask(Ask(0, 2, 3, 3))
    assert old.adapter_id != new.adapter_id
    rig.run_to_the_end(12)
    assert [s.finish_reason for s in (old, new)] == [FinishReason.LENGTH] * 2
    assert rig.pool.usage().adapter == 8, "the pages of the new version, and no others"
    with pytest.raises(KeyError):
        rig.store.version(old.adapter_id)


# --- misses ---


@pytest.mark.parametrize("separate", [False, True])
def test_a_miss_delays_that_request_alone(separate: bool) -> None:
    """Class of fault: rows of a request that only waits for its adapter fill the next prefill step for all others."""
    rig = Rig(100, [2], max_running=4, max_batched_tokens=12, separate_prefill=separate)
    rig.loader.polls = {0: 3}
    rig.ask(Ask(0, 11, 2, 2))
    rig.ask(Ask(None, 4, 2, 2))
    rig.step()
    assert ran(rig) == {1: 4}
    rig.run_to_the_end(10)


def test_two_requests_for_one_missing_adapter_load_it_once() -> None:
    rig = Rig(100, [2], max_running=4, max_batched_tokens=12)
    rig.ask(Ask(0, 1, 2, 2))
    rig.ask(Ask(0, 1, 2, 2))
    rig.run_to_the_end(5)
    assert rig.loader.started == [0]
    assert rig.prefetcher.counts.loads == 1 and rig.prefetcher.counts.hits == 0


def test_a_request_whose_adapter_is_there_counts_as_a_hit() -> None:
    rig = Rig(100, [2])
    for _ in range(3):
        rig.ask(Ask(0, 1, 2, 2))
        rig.run_to_the_end(4)
    assert rig.prefetcher.counts.hits == 2 and rig.loader.started == [0]


# --- starvation ---


def test_passing_never_delays_a_request_whose_adapter_is_slow() -> None:
    """Class of fault: a waiting request's place is kept only as if it started at once; those that pass outgrow it.

    The pool holds 120 tokens. The first request comes to hold 59 and its adapter takes as much as 5, so the second, of
    100, may not pass during the load, short as it is now.
    """
    rig = Rig(240, [5], max_running=4, max_batched_tokens=80)
    rig.loader.polls = {0: 60}
    slow = rig.ask(Ask(0, 50, 10, 10))
    long = rig.ask(Ask(None, 1, 100, 100))
    short = rig.ask(Ask(None, 1, 20, 20))  # behind one that may not pass
    rig.step()
    assert long in rig.scheduler.waiting and short in rig.scheduler.waiting
    rig.run_to_the_end(140)
    assert slow.finished_at < 20 < long.finished_at
    assert slow.fetches == 1


def test_passing_is_free_where_there_is_room_for_both() -> None:
    rig = Rig(340, [5], max_running=4, max_batched_tokens=80)
    rig.loader.polls = {0: 60}
    slow = rig.ask(Ask(0, 50, 10, 10))
    rig.ask(Ask(None, 1, 100, 100))
    rig.step()
    assert ran(rig) == {1: 1}
    while not slow.computed:
        rig.step()
    assert rig.steps == 62, "at the first step after its load"
    rig.run_to_the_end(60)


@pytest.mark.parametrize(
    ("admission", "polls", "length"), [("max_tokens", 3, 10), ("expected", 3, 10), ("expected", 8, 2)]
)
def test_a_stream_of_others_does_not_starve_a_request_whose_adapter_is_missing(
    admission: str, polls: int, length: int
) -> None:
    """Class of fault: others pass during a load, grow, evict the adapter before its request fits; and all again.

    With `expected` those that pass run long although short outputs are expected, so the request may not fit when its
    adapter comes. From then on nobody passes it. The bound: it starts when all that run then have ended, 20 steps, and
    its second load.
    """
    rig = Rig(100, [10], max_running=30, max_batched_tokens=64, admission=admission)
    rig.loader.polls = {0: polls}
    for _ in range(300):
        rig.ask(Ask(None, 1, 20, 1))
    rig.run_to_the_end(300)
    start = rig.steps
    waits = rig.ask(Ask(0, length, length, length))
    for _ in range(25):
        rig.ask(Ask(None, 1, 20, 20))
    while not waits.computed:
        rig.ask(Ask(None, 1, 20, 20))
        rig.ask(Ask(None, 1, 20, 20))
        rig.step()
        check_step(rig)
        assert rig.steps - start <= (polls + 2 if admission == "max_tokens" else 20 + polls + 2), "starved"
    assert (rig.scheduler.preemptions > 0) == (admission == "expected")


def test_requests_of_a_loaded_adapter_do_not_overtake_for_ever() -> None:
    """Pitfall 25: one slot, A at every step for 500 steps, one B at step 2.

    The bound: B starts when the As before it have ended, and its load, here of one step.
    """
    rig = Rig(400, [2, 3], max_running=4, max_batched_tokens=16, max_adapters=1)
    b = None
    for step in range(500):
        rig.ask(Ask(0, 2, 3, 3))
        if step == 1:
            b = rig.ask(Ask(1, 2, 3, 3))
        rig.step()
        check_step(rig)
    assert b is not None and b.finished_at is not None
    assert b.finished_at <= 2 * 4 + 3 + 2, "two As of up to 4 steps with their load, then 3 steps of B"
    rig.run_to_the_end(2000)


def test_a_head_that_needs_most_of_the_pool_starts_when_those_before_it_have_ended() -> None:
    """Pitfall 25, the other way round: 90 % of the pool is wanted, and 20 small requests follow."""
    rig = Rig(200, max_running=30, max_batched_tokens=128)
    first = [rig.ask(Ask(None, 5, 15, 15)) for _ in range(4)]
    rig.step()
    head = rig.ask(Ask(None, 60, 31, 31))
    small = [rig.ask(Ask(None, 1, 4, 4)) for _ in range(20)]
    while not head.computed:
        assert not any(s.computed for s in small)
        rig.step()
        check_step(rig)
    assert rig.steps <= 1 + max(s.finished_at or rig.steps for s in first)
    assert any(s.computed for s in small), "in the room that is left"
    rig.run_to_the_end(200)


def test_a_full_table_stops_other_adapters_but_not_the_base_model() -> None:
    """Pitfall 24: two slots; A in the middle of its prefill, B decoding, C waiting, then requests of the base model."""
    rig = Rig(400, [1, 1, 1], max_running=8, max_batched_tokens=9, max_adapters=2)
    rig.ask(Ask(1, 1, 9, 9))
    rig.ask(Ask(0, 30, 4, 4))
    rig.step()
    rig.step()
    c = rig.ask(Ask(2, 1, 2, 2))
    base = rig.ask(Ask(None, 1, 2, 2))
    again = rig.ask(Ask(0, 1, 2, 2))  # its adapter is there, but it would keep the slot from C
    rig.step()
    assert ran(rig) == {0: 1, 1: 7, base.number: 1}
    while not c.computed:
        assert rig.steps < 20 and not again.computed
        rig.step()
        check_step(rig)
        assert len(rig.prefetcher.held) <= 2
    assert rig.steps == 2 + min(s.finished_at or rig.steps for s in rig.sequences[:2]), "a step to load, and it runs"
    rig.run_to_the_end(20)


def test_a_loads_slot_counts_before_its_request_runs() -> None:
    """Pitfall 24: the count covers what runs and what is being loaded."""
    rig = Rig(400, [1, 1, 1], max_running=8, max_batched_tokens=9, max_adapters=2)
    rig.loader.polls = {0: 5, 1: 5}
    for adapter in (0, 1, 2):
        rig.ask(Ask(adapter, 1, 2, 2))
    rig.step()
    assert rig.prefetcher.held == {0, 1}
    rig.run_to_the_end(20)


def test_a_loads_place_among_the_running_is_kept_too() -> None:
    """Class of fault: those that pass take the last places, and the adapter comes for nothing."""
    rig = Rig(400, [2], max_running=2, max_batched_tokens=16)
    rig.loader.polls = {0: 3}
    slow = rig.ask(Ask(0, 2, 2, 2))
    for _ in range(3):
        rig.ask(Ask(None, 1, 30, 30))
    while not slow.computed:
        rig.step()
        assert len(rig.scheduler.running) <= 2
    assert rig.steps == 5
    rig.run_to_the_end(80)


def test_what_starts_now_does_not_lose_its_adapter_to_the_next_ones_load() -> None:
    """Class of fault: between the decision to admit and the pin, the adapter is the oldest idle one."""
    rig = Rig(22, [4, 4, 4], max_running=4, max_batched_tokens=16)
    for adapter in (0, 2):
        rig.ask(Ask(adapter, 1, 1, 1))
        rig.run_to_the_end(3)
    starts, loads = rig.ask(Ask(0, 1, 1, 1)), rig.ask(Ask(1, 1, 1, 1))
    rig.step()
    assert starts.finished and rig.prefetcher.held == {1}
    assert rig.prefetcher.is_resident(0) and not rig.prefetcher.is_resident(2)
    rig.run_to_the_end(3)
    assert loads.fetches == 1


def short_outputs_expected(rig: Rig) -> Rig:
    """Has the rig see one request that stops after one token, so that one is what it expects of the next ones."""
    rig.ask(Ask(None, 1, 9, 1))
    rig.run_to_the_end(1)
    return rig


def test_a_claimed_adapter_stays_until_its_request_may_join() -> None:
    """Class of fault: what is kept for a waiting request is forgotten in the steps in which nobody may join.

    y becomes idle after x was loaded, so x is the older one; but x is claimed.
    """
    rig = Rig(30, [4, 4], max_running=4, max_batched_tokens=12, join_every=8, admission="expected")
    rig.ask(Ask(1, 1, 1, 1))
    rig.run_to_the_end(3)
    rig.ask(Ask(None, 2, 14, 14))
    rig.ask(Ask(1, 1, 3, 3))
    rig.ask(Ask(0, 2, 3, 3))
    while rig.prefetcher.counts.evictions == 0:
        rig.step()
        check_step(rig)
    assert rig.prefetcher.is_resident(0) and not rig.prefetcher.is_resident(1)
    rig.run_to_the_end(40)


def test_a_claimed_adapter_gives_way_before_anybody_is_preempted() -> None:
    """Class of fault: pages that are kept for somebody who may not join yet stop those that run."""
    rig = short_outputs_expected(Rig(20, [4], max_running=4, max_batched_tokens=12, join_every=8, admission="expected"))
    long = rig.ask(Ask(None, 2, 9, 9))
    rig.ask(Ask(0, 2, 2, 2))
    for _ in range(9):
        rig.step()
        check_step(rig)
    assert long.finished and not rig.scheduler.preemptions
    rig.run_to_the_end(20)


def test_the_last_one_that_runs_waits_for_a_load_and_is_not_preempted() -> None:
    """Pages that are being loaded cannot be taken; once they are there, they can."""
    rig = short_outputs_expected(Rig(40, [5], max_running=4, max_batched_tokens=12, admission="expected"))
    rig.loader.polls = {0: 50}
    long = rig.ask(Ask(None, 2, 18, 18))
    rig.ask(Ask(0, 1, 2, 2))
    empty = 0
    while not long.finished:
        rig.step()
        check_step(rig)
        empty += not rig.last.step.work
    assert (empty, long.preemptions) == (1, 0)
    rig.loader.polls = {}
    rig.run_to_the_end(10)


def test_pages_that_are_loaded_for_nobody_are_counted_until_the_load_has_ended() -> None:
    """Class of fault: a client goes away in the middle of its load, and the next request is promised those pages."""
    rig = Rig(52, [8], max_running=4, max_batched_tokens=16)
    rig.loader.polls = {0: 50}
    rig.ask(Ask(None, 1, 5, 5))
    gone = rig.ask(Ask(0, 1, 2, 2))
    rig.step()
    rig.abort(gone)
    late = rig.ask(Ask(None, 12, 8, 8))  # 19 tokens, and the 8 ranks that are being loaded, are more than 26
    rig.run_to_the_end(16)
    assert late.finish_reason is FinishReason.LENGTH and late.finished_at == 6 + 8
    rig.check_all_is_free()


def test_a_prefill_step_is_filled_once() -> None:
    """In separate mode a request does not join, and hold its place, for a step of prefill that is full already."""
    rig = Rig(400, max_running=8, max_batched_tokens=16, separate_prefill=True)
    for _ in range(3):
        rig.ask(Ask(None, 7, 2, 2))
    long = rig.ask(Ask(None, 40, 2, 2))
    rig.step()
    assert [s.number for s in rig.last.admitted] == [0, 1]
    rig.step()
    assert [s.number for s in rig.last.admitted] == [2]
    rig.step()
    assert rig.last.admitted == [long], "one that is longer than a step joins alone"
    rig.run_to_the_end(10)


def test_outputs_that_were_cut_short_from_outside_are_not_expected_of_others() -> None:
    rig = Rig(40, max_running=4, max_batched_tokens=12, admission="expected")
    victim = rig.ask(Ask(None, 1, 12, 12))
    rig.step()
    rig.abort(victim)
    for _ in range(2):
        rig.ask(Ask(None, 1, 12, 12))
    rig.step()
    assert len(rig.last.admitted) == 1, "two of 12 tokens are more than 20"
    rig.run_to_the_end(40)
    assert not rig.scheduler.preemptions
