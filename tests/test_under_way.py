"""Steps read late: the answers of steps read at once, whatever ends a request; nothing is lost when a step fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from serving import (
    ADAPTERS,
    adapter_folder,
    assert_all_free,
    assert_right,
    new_engine,
    run_to_end,
    without_shape_checks,
)

from slora_ref import Completion, Engine, EngineConfig, FinishReason, SamplingParams
from slora_ref.batch import Batch
from slora_ref.errors import ConfigError
from slora_ref.executor import Executor, StartedStep, StepResult
from slora_ref.sampler import Sampling

ON = pytest.mark.parametrize("on", ["cpu", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
EACH = {name: name for name in ADAPTERS}
NAMES = [None, *ADAPTERS]
SMALL = [None, "y", "o", "qv"]
PROMPT = [3, 4, 5, 6]
PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def _no_shape_checks() -> Iterator[None]:
    with without_shape_checks():
        yield


MODES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_running": 1},
    "64 at a time": {"max_running": 64, "max_batched_tokens": 200},
    "chunks of prompts": {"max_running": 8, "max_batched_tokens": 9},
    "whole prompts": {"chunked_prefill": False, "max_batched_tokens": 45},
    "prefill apart": {"separate_prefill": True, "max_batched_tokens": 20},
    "joining every third step": {"join_every": 3},
    "preempted": {"pool_pages": 110, "admission": "expected"},
    "one adapter at a time": {"max_adapters": 1, "eviction": "eager"},
}


Asked = tuple[list[int], SamplingParams, str | None]


def random_requests(count: int, most_tokens: int, names: list[str | None], reads_logits: bool) -> list[Asked]:
    """Greedy and drawn; ended by max_tokens, by the model's end tokens, and by every seventh token there is."""
    rng, asked = random.Random(count), []
    for number in range(count):
        params = SamplingParams(
            max_tokens=rng.randint(1, most_tokens),
            temperature=rng.choice([0.0, 0.0, 1.2]),
            top_k=rng.choice([0, 30]),
            seed=number,
            stop_token_ids=rng.choice([(), tuple(range(0, 97, 7))]),
            ignore_eos=rng.random() < 0.5,
            logprobs=1 if reads_logits and not number % 5 else None,
        )
        prompt = [rng.randrange(95) for _ in range(rng.choice([1, 2, 5, 12]))]
        asked.append((prompt, params, names[number % len(names)]))
    return asked


def answers(engine: Engine, asked: list[Asked]) -> list[Completion]:
    """Served together and checked against the dense model."""
    for _ in range(50):
        engine.scheduler.forecast.observe(1)  # who expects, admits too many
    done = engine.generate(*map(list, zip(*asked, strict=True)))
    for completion, (_, params, name) in zip(done, asked, strict=True):
        assert_right(completion, name, params)
    assert_all_free(engine)
    return done


ON_HOST = ["one at a time", "64 at a time", "chunks of prompts"]
PLACES = [
    *[("cpu", mode) for mode in MODES],
    *[("host", mode) for mode in ON_HOST],
    *[pytest.param("cuda", mode, marks=pytest.mark.gpu) for mode in MODES],
]


@pytest.mark.parametrize(("on", "mode"), PLACES)
def test_answers_read_late_are_those_read_at_once(on: str, mode: str) -> None:
    quick, names = on == "host", SMALL if mode == "preempted" else NAMES
    count = 64 if mode == "64 at a time" else 8 if quick else 70
    most = {"preempted": 20}.get(mode, 3 if quick else 9)
    asked = random_requests(count, most, names, reads_logits=mode == "prefill apart")
    late = new_engine(EACH, on=on, async_scheduling=True, **MODES[mode])
    at_once = new_engine(EACH, on=on, async_scheduling=False, **MODES[mode])
    for one, other in zip(answers(late, asked), answers(at_once, asked), strict=True):
        assert (one.token_ids, one.finish_reason, one.text) == (other.token_ids, other.finish_reason, other.text)
        assert [list(each) for each in one.logprobs] == [list(each) for each in other.logprobs]
    assert late.steps >= at_once.steps
    assert (late.scheduler.preemptions > 0) == (mode == "preempted")


def test_a_stop_string_ends_the_text_though_the_next_step_runs() -> None:
    at_once, late = (new_engine(EACH, async_scheduling=late) for late in (False, True))
    whole = at_once.generate(["abc"], replace(PLAIN, max_tokens=12), "qv")[0]
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=(whole.text[4:6],))
    (want,), (got,) = (engine.generate(["abc"], params, "qv") for engine in (at_once, late))
    assert got.text == want.text and got.token_ids == want.token_ids
    assert got.finish_reason is FinishReason.STOP
    assert late.steps == len(got.token_ids) + 1, "a step for nothing"
    assert "".join(piece.text for piece in late.stream("abc", params, "qv")) == want.text
    assert_all_free(late)


# --- the order of things ---


class Diary:
    """Writes down what an executor is asked for, and fails where a test wants it."""

    def __init__(self, inner: Executor, fail_start: int | None = None, fail_read: int | None = None) -> None:
        self.inner, self.fail_start, self.fail_read = inner, fail_start, fail_read
        self.error: BaseException = RuntimeError("as planned")
        self.said: list[str] = []
        self.placeholders = 0

    def start(self, batch: Batch, sampling: Sampling) -> StartedStep:
        number = sum(word.startswith("start") for word in self.said)
        self.said.append(f"start {number}")
        self.placeholders += int((batch.token_ids < 0).sum())
        step = self.inner.start(batch, sampling)
        if number == self.fail_start:
            raise self.error
        return Noted(self, number, step)


class Noted:
    """A step that says when it is read."""

    def __init__(self, diary: Diary, number: int, step: StartedStep) -> None:
        self.diary, self.number, self.step = diary, number, step

    def read(self) -> StepResult:
        self.diary.said.append(f"read {self.number}")
        if self.number == self.diary.fail_read:
            raise self.diary.error
        return self.step.read()


def test_each_step_is_started_before_the_one_before_is_read() -> None:
    engine = new_engine(EACH, async_scheduling=True)
    engine.executor = diary = Diary(engine.executor)
    done = engine.generate([PROMPT], PLAIN, "x")[0]
    assert_right(done, "x", PLAIN)
    starts = [f"start {i + 1} read {i}" for i in range(5)]
    assert " ".join(diary.said) == " ".join(["start 0", *starts, "read 5"])
    assert diary.placeholders == 5
    diary.said.clear()
    engine.generate([PROMPT], replace(PLAIN, logprobs=0), "x")
    assert diary.said == [f"{what} {i}" for i in range(6) for what in ("start", "read")], "who reads logits, waits"


def test_by_default_only_a_gpu_is_read_late() -> None:
    assert EngineConfig().async_scheduling is False
    assert EngineConfig(device="cuda").async_scheduling is True
    assert EngineConfig(device="cuda", shards=2).async_scheduling is True
    assert EngineConfig(shards=2).async_scheduling is False
    with pytest.raises(ConfigError, match="async_scheduling"):
        EngineConfig(async_scheduling=2)  # type: ignore[arg-type]


def test_who_gets_the_last_token_lets_go_before_it_is_read() -> None:
    """So the pages and the place in the batch are there for the next one, as if the token had been read at once."""
    engine = new_engine(EACH, async_scheduling=True, max_running=1)
    first, second = (engine.add_request(PROMPT, replace(PLAIN, max_tokens=1)) for _ in range(2))
    assert engine.step() == []
    assert [sequence.number for sequence in engine.scheduler.leaving] == [first]
    assert engine.pool.usage().kv == 0
    assert engine.step()[-1].completion.finish_reason is FinishReason.LENGTH
    assert [sequence.number for sequence in engine.scheduler.leaving] == [second]
    engine.check()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_abort_drops_what_is_under_way(steps: int) -> None:
    engine = new_engine(EACH, async_scheduling=True)
    engine.generate([PROMPT] * 2, PLAIN, ["x", "y"])  # brings both adapters
    gone, stays = (engine.add_request(PROMPT, PLAIN, name) for name in ("x", "y"))
    for _ in range(steps):
        engine.step()
    assert engine.abort(gone)
    assert engine.remove_adapter("x") == 0
    engine.add_adapter("x", adapter_folder("z"))
    other = engine.add_request(PROMPT, PLAIN, "x")  # perhaps into the pages of the one that is gone
    done = run_to_end(engine)
    assert len(done[gone].token_ids) == steps - 1
    assert min(done[gone].token_ids, default=0) >= 0, "a placeholder"
    assert_right(done[stays], "y", PLAIN)
    assert_right(done[other], "z", PLAIN)
    assert_all_free(engine)


# --- steps that fail ---


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("where", ["start", "read"])
def test_a_step_that_fails_ends_its_requests_alone(where: str, at: int) -> None:
    engine = new_engine(EACH, async_scheduling=True, max_running=2)
    engine.generate([PROMPT], PLAIN, "o")  # brings the adapter, so that the first step has two requests
    engine.executor = Diary(engine.executor, **{f"fail_{where}": at})
    numbers = [engine.add_request(PROMPT, PLAIN, name) for name in (None, "o", "qv", "y")]
    done = run_to_end(engine)
    failed = [number for number in numbers if done[number].finish_reason is FinishReason.ERROR]
    assert failed == numbers[:2]
    for number in numbers:
        if number in failed:
            assert "as planned" in done[number].error
            assert len(done[number].token_ids) <= at
            assert min(done[number].token_ids, default=0) >= 0, "a placeholder"
        else:
            assert_right(done[number], done[number].adapter, PLAIN)
    assert_all_free(engine)


def test_what_a_failed_step_has_left_of_the_samples_is_not_fed_back() -> None:
    """Prefill apart: one that has been sampled is not in the step that fails, and knows its token before the next."""
    engine = new_engine(EACH, async_scheduling=True, separate_prefill=True)
    runs = engine.add_request(PROMPT, PLAIN)
    engine.step()
    engine.executor = Diary(engine.executor, fail_start=0)
    fails = engine.add_request(PROMPT[::-1], PLAIN)
    done = run_to_end(engine)
    assert done[fails].finish_reason is FinishReason.ERROR
    assert_right(done[runs], None, PLAIN)


@pytest.mark.parametrize("where", ["start", "read"])
def test_an_interrupt_leaves_an_engine_that_serves_on(where: str) -> None:
    engine = new_engine(EACH, async_scheduling=True)
    inner = engine.executor
    engine.executor = diary = Diary(inner, **{f"fail_{where}": 2})
    diary.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT] * 3, PLAIN, ["x", "y", "o"])
    engine.check()
    assert not engine.has_work
    engine.executor = inner
    for name in ("x", None):
        assert_right(engine.generate([PROMPT], PLAIN, name)[0], name, PLAIN)
    assert_all_free(engine)


def test_after_an_interrupt_whoever_was_not_in_the_step_goes_on_with_its_own_token() -> None:
    """Prefill apart: what the interrupted step has left of the samples must not be fed back."""
    engine = new_engine(EACH, async_scheduling=True, separate_prefill=True)
    runs = engine.add_request(PROMPT, PLAIN)
    engine.step()
    engine.executor = diary = Diary(engine.executor, fail_start=0)
    diary.error = KeyboardInterrupt()
    fails = engine.add_request(PROMPT[::-1], PLAIN)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    done = run_to_end(engine)
    assert done[fails].finish_reason is FinishReason.ERROR
    assert_right(done[runs], None, PLAIN)


def test_an_interrupt_between_the_tokens_of_a_step_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that was never taken in must not leave its place to the one that is read after it."""
    engine = new_engine(EACH, async_scheduling=True)
    engine.generate([PROMPT], PLAIN, "x")
    first, second = (engine.add_request(PROMPT, PLAIN, name) for name in (None, "x"))
    engine.step()
    later = engine.add_request(PROMPT, PLAIN)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._live[first], "take", _interrupt)
        engine.step()
    engine.check()
    done = run_to_end(engine)
    assert [done[number].finish_reason for number in (first, second)] == [FinishReason.ERROR] * 2
    assert_right(done[later], None, PLAIN)
    assert_all_free(engine)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@ON
def test_an_interrupt_before_a_step_of_logits_leaves_nothing_unread(on: str) -> None:
    """Not all logits of that step are sampled from, so its samples cannot be fed back by number."""
    engine = new_engine(EACH, on=on, async_scheduling=True)
    engine.add_request(PROMPT, PLAIN)
    engine.step()
    under_way, diary = engine._under_way[0], Diary(engine.executor, fail_read=0)
    diary.error = KeyboardInterrupt()
    engine._under_way[0] = replace(under_way, step=Noted(diary, 0, under_way.step))
    asked = (PROMPT, replace(PLAIN, keep_logits=True)), (PROMPT[::-1], PLAIN)
    numbers = [engine.add_request(*each) for each in asked]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    done = run_to_end(engine)
    for number, (_, params) in zip(numbers, asked, strict=True):
        assert_right(done[number], None, params)


@ON
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_not_fed_back(on: str, temperature: float) -> None:
    """Of logits that are all NaN no token is the likeliest; neither the sampler nor the row that follows must look it
    up, though nothing lies behind the last row of a full bucket.
    """
    params = replace(PLAIN, temperature=temperature, top_k=2, top_p=0.9, seed=1)
    engine = new_engine(EACH, on=on, async_scheduling=True)
    if on == "cuda":
        engine.executor.model.weights.embed[96] = float("nan")
    else:
        engine.executor.model.weights.embed[96] = np.nan
    *others, bad = engine.generate([[1, 2, 3]] * 3 + [[96, 1, 2]], params, [None, "x", "x", "x"])
    assert "not finite" in bad.error and bad.token_ids == ()
    for completion, name in zip(others, [None, "x", "x"], strict=True):
        assert_right(completion, name, params)
