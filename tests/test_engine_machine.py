"""The whole engine at random, against the dense model: requests, aborts, adapters that come, go, fail and change names.

A tiny pool, so that adapters are evicted and sequences preempted all the time; every completion is compared with
Reference, one request at a time, merged weights. After every step the parts check themselves, free pages hold NaN, and
at the end everything is as at the start.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from serving import (
    ADAPTERS,
    CONFIG,
    adapter_folder,
    adapter_id,
    assert_all_free,
    assert_tokens,
    delay_loads,
    image_bytes,
    new_engine,
    without_shape_checks,
)

from slora_ref import Completion, Engine, FinishReason, RequestOutput, SamplingParams
from slora_ref.batch import Batch
from slora_ref.errors import AdapterError, RequestError, UnknownAdapter
from slora_ref.executor import Executor, StartedStep
from slora_ref.sampler import Sampling

NAMES = "abcd"
MODES = ["max_tokens", "expected"]
SMALL = [weights for weights in ADAPTERS if weights != "x"]  # x alone would fill the pools drawn here
PATIENCE = 60
"""Steps without a word from an engine that has work: more, and it is stuck. (Slow loads take 6, prefills 15.)"""


@pytest.fixture(autouse=True, scope="module")
def _no_shape_checks() -> Iterator[None]:
    with without_shape_checks():
        yield


@dataclass
class Story:
    """One request and all that was told of it."""

    adapter_id: int
    weights: str | None
    params: SamplingParams
    pieces: list[RequestOutput] = field(default_factory=list)
    aborted: bool = False

    def end(self) -> Completion | None:
        """The completion, once it is there; all tokens and texts came before it, once and in order."""
        if not self.pieces or not self.pieces[-1].finished:
            return None
        done = self.pieces[-1].completion
        assert [piece.finished for piece in self.pieces] == [False] * (len(self.pieces) - 1) + [True]
        assert tuple(token for piece in self.pieces for token in piece.token_ids) == done.token_ids
        assert "".join(piece.text for piece in self.pieces) == done.text
        return done


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    """Every mode of the scheduler but for admission; pools of two or three adapters and as many requests."""
    max_running, chunked = draw(st.sampled_from([4, 5, 3, 2, 1])), draw(st.booleans())
    rows = draw(st.integers(max_running + 1, max_running + 14)) if chunked else draw(st.integers(22, 40))
    return {
        "pool_pages": draw(st.integers(36, 110)),
        "max_running": max_running,
        "max_batched_tokens": rows,
        "max_adapters": draw(st.integers(1, 3)),
        "chunked_prefill": chunked,
        "separate_prefill": draw(st.booleans()),
        "join_every": draw(st.sampled_from([1, 1, 3])),
        "eviction": draw(st.sampled_from(["lru", "eager"])),
        "host_bytes": draw(st.sampled_from([image_bytes(*SMALL), 1 << 20])),
        "page_order_seed": draw(st.integers(0, 9)),
        "async_scheduling": draw(st.booleans()),
    }


@dataclass(frozen=True)
class Ask:
    """A request to come."""

    name: str | None
    prompt: list[int]
    params: SamplingParams


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Prompt and output of a dozen tokens at most; greedy and sampled, with and without what may be asked for."""
    name = draw(st.sampled_from([None, *NAMES, *NAMES]))
    length, rng = draw(st.integers(1, 14)), random.Random(draw(st.integers(0, 99)))
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 12)),
        temperature=rng.choice([0.0, 0.0, 0.9]),
        top_k=rng.choice([0, 20]),
        seed=rng.randrange(100),
        stop_token_ids=rng.choice([(), (), tuple(range(0, 97, 7))]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 2]),
        keep_logits=rng.random() < 0.7,
    )
    return Ask(name, [rng.randrange(97) for _ in range(length)], params)


class EngineMachine(RuleBasedStateMachine):
    """What an engine should do, as a few dictionaries beside it."""

    covered: ClassVar[Counter[str]] = Counter()

    def __init__(self, admission: str, on: str = "cpu") -> None:
        super().__init__()
        self.admission, self.on = admission, on
        self.engine: Engine | None = None
        self.names: dict[str, str] = {}  # registered name -> weights
        self.stories: dict[int, Story] = {}
        self.may_fail: set[int] = set()  # adapter ids whose loads were ever planned to fail
        self.steps = self.quiet = self.preempted_unread = 0

    @initialize(
        options=engine_options(),
        weights=st.lists(st.sampled_from(SMALL), min_size=4, max_size=4),
        polls=st.integers(0, 6),
    )
    def build(self, options: dict[str, Any], weights: list[str], polls: int) -> None:
        self.engine = new_engine(on=self.on, admission=self.admission, **options)
        self.config = self.engine.scheduler.config
        self.loader = delay_loads(self.engine)
        for name, chosen in zip(NAMES, weights, strict=True):
            self.add_adapter(name, chosen, polls)
        for _ in range(100):
            self.engine.scheduler.forecast.observe(1)  # as if all so far had been short: who expects, admits too many

    # --- adapters ---

    def add_adapter(self, name: str, weights: str, polls: int) -> None:
        if name in self.names:
            with pytest.raises(AdapterError, match="already registered"):
                self.engine.add_adapter(name, adapter_folder(weights))
            return
        self.engine.add_adapter(name, adapter_folder(weights))
        self.names[name] = weights
        self.loader.polls[adapter_id(self.engine, name)] = polls

    @rule(name=st.sampled_from(NAMES), weights=st.sampled_from(SMALL), polls=st.integers(0, 4))
    def add_or_replace_adapter(self, name: str, weights: str, polls: int) -> None:
        """The same name for other weights, whatever the old ones are doing."""
        if name in self.names and polls:
            self.remove_adapter(name)
        self.add_adapter(name, weights, polls)

    @rule(name=st.sampled_from(NAMES))
    def remove_adapter(self, name: str) -> None:
        if name not in self.names:
            with pytest.raises(UnknownAdapter):
                self.engine.remove_adapter(name)
            return
        version = self.engine.store.lookup(name)
        self.covered["removed in use"] += version.users > 0
        self.covered["removed while loading"] += version.adapter_id in self.engine.prefetcher._loading
        self.engine.remove_adapter(name)
        del self.names[name]
        self.check()

    @precondition(lambda self: self.engine.prefetcher.loading)
    @rule(abort=st.booleans())
    def remove_what_is_loading(self, abort: bool) -> None:
        """With or without those who wait for it."""
        loading = self.engine.prefetcher._loading.keys()
        for name in [name for name in self.names if adapter_id(self.engine, name) in loading]:
            users = [number for number, story in self.stories.items() if story.adapter_id in loading]
            for number in users if abort else ():
                self.stories[number].aborted |= self.engine.abort(number)
            self.remove_adapter(name)

    @rule(name=st.sampled_from(NAMES), polls=st.integers(0, 6), fails=st.sampled_from([False, False, True]))
    def plan_loads(self, name: str, polls: int, fails: bool) -> None:
        """From now on loads of this adapter take so long, and fail or not."""
        if name not in self.names:
            return
        number = adapter_id(self.engine, name)
        self.loader.polls[number] = polls
        (self.loader.failing.add if fails else self.loader.failing.discard)(number)
        self.may_fail |= self.loader.failing

    # --- requests ---

    @rule(asked=st.lists(asks(), min_size=1, max_size=5))
    def add_requests(self, asked: list[Ask]) -> None:
        for ask in asked:
            self.add_request(ask.name, ask.prompt, ask.params)

    def add_request(self, name: str | None, prompt: list[int], params: SamplingParams) -> None:
        if name is not None and name not in self.names:
            with pytest.raises(UnknownAdapter):
                self.engine.add_request(prompt, params, name)
            return
        pages = 0 if name is None else self.engine.store.lookup(name).pages
        peak = len(prompt) + params.max_tokens - 1
        too_large = 2 * peak + pages > self.config.pool_pages
        too_wide = not self.config.chunked_prefill and peak > self.config.max_batched_tokens
        if too_large or too_wide:
            with pytest.raises(RequestError):
                self.engine.add_request(prompt, params, name)
            return
        if self.config.async_scheduling and len(self.stories) % 8:
            params = replace(params, keep_logits=False, logprobs=None)  # who reads logits, has the step read at once
        number = self.engine.add_request(prompt, params, name)
        version = -1 if name is None else adapter_id(self.engine, name)
        self.stories[number] = Story(version, self.names.get(name), params)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(place=st.integers(0, 9))
    def abort_running(self, place: int) -> None:
        running = self.engine.scheduler.running
        self.abort(running[place % len(running)].number)

    @precondition(lambda self: len(self.engine.scheduler.waiting) > 2)
    @rule(place=st.integers(0, 9))
    def abort_waiting(self, place: int) -> None:
        waiting = self.engine.scheduler.waiting
        self.abort(waiting[place % len(waiting)].number)

    def abort(self, number: int) -> None:
        self.covered["aborted running"] += self.engine._live[number].sequence.slot is not None
        assert self.engine.abort(number)
        assert not self.engine.abort(number)
        self.stories[number].aborted = True
        self.check()

    @rule(count=st.integers(8, 20))
    def many_steps(self, count: int) -> None:
        self.step(count)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.steps += 1
            unread = [sequence for sequence in self.engine.scheduler.running if sequence.unread]
            news = self.engine.step()
            self.preempted_unread += sum(one in self.engine.scheduler.waiting for one in unread)
            self.quiet = 0 if news or not self.engine.has_work else self.quiet + 1
            for piece in news:
                self.stories[piece.request_id].pieces.append(piece)
                if piece.finished:
                    self.judge(self.stories[piece.request_id])
            self.check()

    # --- what must hold ---

    def judge(self, story: Story) -> None:
        """A request ended as it should, and said what the dense model says."""
        done = story.end()
        self.covered[done.finish_reason.value] += 1
        assert_tokens(done, story.weights, story.params)
        assert (done.finish_reason is FinishReason.ABORT) == story.aborted
        if done.finish_reason is FinishReason.ERROR:
            assert "as planned" in done.error
            assert story.adapter_id in self.may_fail or "step failed" in done.error
        elif not story.aborted:
            ends = (*story.params.stop_token_ids, *(() if story.params.ignore_eos else CONFIG.eos_token_ids))
            stopped = done.token_ids[-1] in ends
            assert done.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(done.token_ids) == story.params.max_tokens
            assert not set(done.token_ids[:-1]) & set(ends)
        wants = story.params.logprobs is not None
        assert len(done.logprobs) == (len(done.token_ids) if wants else 0)

    def check(self) -> None:
        engine = self.engine
        engine.check()
        self.covered["two adapters in a step"] += len({s.adapter_id for s in engine.scheduler.running}) > 1
        if self.config.async_scheduling:
            dropped = [item.sequence.finished for step in engine._under_way for item in step.work]
            self.covered["steps under way"] += len(engine._under_way)
            self.covered["rows for nothing"] += sum(dropped)
            self.covered["let go before the last token was read"] += len(engine.scheduler.leaving)
        alive = [live.sequence for live in engine._live.values()]
        users = Counter(sequence.adapter_id for sequence in alive if sequence.adapter_id >= 0)
        assert users == {i: version.users for i, version in engine.store._versions.items() if version.users}
        assert engine.pool.usage().kv == 2 * sum(sequence.computed for sequence in alive)
        assert sorted(engine.adapters) == sorted(self.names)
        assert engine.prefetcher.resident + engine.prefetcher.loading <= self.config.max_adapters

    def teardown(self) -> None:
        if self.engine is None:
            return
        while self.engine.has_work:
            assert self.quiet < PATIENCE, f"stuck with {sorted(self.engine._live)}"
            self.step(1)
        assert all(story.end() is not None for story in self.stories.values()), "a request without an end"
        assert_all_free(self.engine)
        if self.admission == "expected":
            self.covered["preemptions"] += self.engine.scheduler.preemptions
        else:
            assert self.engine.scheduler.preemptions == 0
        self.covered["evictions"] += self.engine.prefetcher.counts.evictions
        self.covered["failures"] += self.engine.prefetcher.counts.failures


def assert_came_everywhere(covered: Counter[str]) -> None:
    never = [what for what, count in covered.items() if not count]
    assert not never, f"never came to {never}, and would not notice faults there"


@pytest.mark.parametrize("admission", MODES)
def test_any_history_of_the_engine_is_right(admission: str) -> None:
    EngineMachine.covered.clear()
    run_state_machine_as_test(lambda: EngineMachine(admission), settings=settings(stateful_step_count=40))
    assert_came_everywhere(EngineMachine.covered)


# --- a long life ---


class Flaky:
    """Runs the model; one step in a hundred fails."""

    def __init__(self, inner: Executor, rng: random.Random) -> None:
        self.inner, self.rng, self.failures = inner, rng, 0

    def start(self, batch: Batch, sampling: Sampling) -> StartedStep:
        if self.rng.random() < 0.01:
            self.failures += 1
            raise RuntimeError("as planned")
        return self.inner.start(batch, sampling)


def random_ask(rng: random.Random) -> Ask:
    params = SamplingParams(
        max_tokens=rng.randint(1, 16),
        temperature=rng.choice([0.0, 0.0, 0.9]),
        seed=rng.randrange(1 << 64),
        stop_token_ids=rng.choice([(), (), (), tuple(range(0, 97, 7))]),
        keep_logits=rng.random() < 0.3,
    )
    prompt = [rng.randrange(97) for _ in range(rng.randint(1, 14))]
    return Ask(rng.choice([None, *NAMES, *NAMES]), prompt, params)


def live(machine: EngineMachine, rng: random.Random, steps: int) -> None:
    """Steps, and between them whatever clients and operators do."""
    end = machine.steps + steps
    while machine.steps < end:
        what = rng.random()
        if what < 0.5 and len(machine.engine._live) < 12:
            ask = random_ask(rng)
            machine.add_request(ask.name, ask.prompt, ask.params)
        elif what < 0.53 and machine.engine._live:
            machine.abort(rng.choice(sorted(machine.engine._live)))
        elif what < 0.56:
            machine.add_or_replace_adapter(rng.choice(NAMES), rng.choice(SMALL), rng.randrange(5))
        elif what < 0.58:
            machine.remove_adapter(rng.choice(NAMES))
        elif what < 0.59:
            machine.remove_what_is_loading(rng.random() < 0.5)
        elif what < 0.62:
            machine.plan_loads(rng.choice(NAMES), rng.randrange(6), rng.random() < 0.2)
        machine.step(rng.choice([0, 1, 1, 1, 4]))


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
@pytest.mark.parametrize("admission", MODES)
def test_thousands_of_steps_end_with_the_pages_of_the_start(admission: str, late: bool) -> None:
    """Aborts, failing steps, failing and slow loads, removals and names used again: 10,000 steps in all."""
    EngineMachine.covered.clear()
    machine, rng = EngineMachine(admission), random.Random(f"{admission} {late}")
    options = {"pool_pages": 110, "max_running": 5, "max_batched_tokens": 12, "max_adapters": 3}
    options |= {"host_bytes": image_bytes(*SMALL), "async_scheduling": late}
    machine.build(options, SMALL[:4], polls=1)
    machine.engine.executor = Flaky(machine.engine.executor, rng)
    live(machine, rng, 2500)
    machine.teardown()
    assert machine.engine.executor.failures > 10
    assert (machine.preempted_unread > 10) == (late and admission == "expected")
    assert_came_everywhere(machine.covered)
