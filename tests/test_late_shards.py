"""Steps of shards that are told and started before the one before is read: every shard samples the same tokens.

Shards are threads here, in NumPy or by the kernels' host build, or one of two on a GPU that is none. What goes wrong
while a step is under way ends its requests, or the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_gpu import install
from lone import be_alone, be_alone_on_a_gpu
from serving import ADAPTERS, assert_all_free, assert_right, host_kernels, new_engine, without_shape_checks
from test_shards import DEADLINE, assert_no_processes, assert_no_threads, kernel_engine, process_engine
from test_under_way import PLAIN, PROMPT, Diary, answers, random_requests

from slora_ref import Engine, SamplingParams
from slora_ref.batch import Batch
from slora_ref.engine.follower import Follower
from slora_ref.engine.orders import Order
from slora_ref.errors import ShardLost
from slora_ref.executor import KernelExecutor, ModelExecutor
from slora_ref.request import FinishReason
from slora_ref.sampler import Sampling

EACH = {name: name for name in ADAPTERS}
NAMES = [None, *ADAPTERS]
SMALL = {"pool_pages": 1300, "max_adapters": 3}  # so that adapters come and go


@pytest.fixture(autouse=True)
def _no_shape_checks() -> Iterator[None]:
    with without_shape_checks():
        yield


# --- the same answers ---


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_answer_late_as_they_do_at_once(shards: int) -> None:
    """Greedy and drawn, cut prompts, with log-probabilities between; adapters come and go beside steps under way."""
    asked = random_requests(40, 9, NAMES, reads_logits=True)
    options: dict[str, Any] = {"shards": shards, "max_batched_tokens": 9, **SMALL}
    late, at_once = (new_engine(EACH, async_scheduling=late, **options) for late in (True, False))
    late.executor = diary = Diary(late.executor)
    for one, other in zip(answers(late, asked), answers(at_once, asked), strict=True):
        assert (one.token_ids, one.finish_reason, one.text) == (other.token_ids, other.finish_reason, other.text)
    assert diary.placeholders > 0 and late.prefetcher.counts.evictions > 0


def test_shards_on_kernels_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept and repeated launches: what is entered in place of placeholders is this shard's row, each time anew."""
    engine = kernel_engine(monkeypatch, ADAPTERS, shards=2, async_scheduling=True, **SMALL)
    engine.executor = diary = Diary(engine.executor)
    answers(engine, random_requests(20, 6, NAMES, reads_logits=False))
    assert diary.placeholders > 20


@pytest.mark.parametrize("seed", range(2))
def test_a_shard_on_a_gpu_answers_late(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU, and as on the CPU at once; whichever way its streams overlap, with a step under way."""
    params = [SamplingParams(max_tokens=6, temperature=heat, seed=3, ignore_eos=True) for heat in (0.0, 1.2)]
    found = []
    for on in ("cpu", "late cpu", "cuda"):
        be_alone(monkeypatch)
        if on == "cuda":
            install(monkeypatch, seed, host_kernels())
            be_alone_on_a_gpu(monkeypatch)
        engine = new_engine(EACH, on=on.split()[-1], shards=2, async_scheduling=on != "cpu", **SMALL)
        asks = [([*range(3, 9 + i)], params[i % 2], name) for i, name in enumerate([*NAMES, *NAMES])]
        found.append([done.token_ids for done in engine.generate(*map(list, zip(*asks, strict=True)))])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("on_kernels", [False, True])
def test_every_shard_samples_the_same_tokens(on_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each of them would enter in place of a placeholder, after each step."""
    kind, samples = (KernelExecutor, "_samples") if on_kernels else (ModelExecutor, "_sampled")
    seen: dict[str, list[bytes]] = {}
    names = ("start", "follow") if on_kernels else ("start",)  # which in NumPy both are
    before = {name: getattr(kind, name) for name in names}

    def noted(name: str) -> Any:
        def run(self: Any, batch: Batch, sampling: Sampling) -> Any:
            step = before[name](self, batch, sampling)
            left = np.array(getattr(self, samples))
            left = left[:, batch.sampled] if on_kernels else left
            seen.setdefault(threading.current_thread().name, []).append(left.tobytes())
            return step

        return run

    for name in before:
        monkeypatch.setattr(kind, name, noted(name))
    options: dict[str, Any] = {"shards": 4, "async_scheduling": True}
    engine = kernel_engine(monkeypatch, ADAPTERS, **options) if on_kernels else new_engine(EACH, **options)
    drawn = [SamplingParams(max_tokens=6, temperature=1.5, top_k=20, top_p=0.95, seed=i) for i in range(3)]
    engine.generate([PROMPT] * 6, [*drawn, PLAIN, PLAIN, PLAIN], [*ADAPTERS])
    del engine
    assert_no_threads()
    leader, *followers = seen.values()
    assert len(followers) == 3 and len(set(leader)) > 4
    assert all(follower == leader for follower in followers)


# --- the order of things, and what goes wrong ---


def late_engine(**options: Any) -> Engine:
    return new_engine(EACH, async_scheduling=True, **{"shards": 2, **options})


def with_a_step_under_way(engine: Engine) -> int:
    """A request of an adapter that is there already, in the middle of its answer."""
    engine.generate([PROMPT], PLAIN, "x")
    number = engine.add_request(PROMPT, PLAIN, "x")
    engine.step()
    engine.step()
    assert engine._under_way
    return number


def test_a_step_is_told_before_the_one_before_is_read() -> None:
    engine = late_engine()
    engine.executor = diary = Diary(engine.executor)
    assert_right(engine.generate([PROMPT], PLAIN, "x")[0], "x", PLAIN)
    starts = [f"start {i + 1} read {i}" for i in range(5)]
    assert " ".join(diary.said) == " ".join(["start 0", *starts, "read 5"])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_who_interrupts_the_wait_for_a_step_leaves_the_group_alone(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests end. But an error of the device ends the group: what is left there, nobody knows."""
    engine = late_engine()
    reads = []

    class Failing:
        def __init__(self, step: Any) -> None:
            self.step = step

        def read(self) -> Any:
            reads.append(self)
            if len(reads) == 3:
                raise kind("as planned")
            return self.step.read()

    inner = engine.executor._executor
    monkeypatch.setattr(engine.executor, "_executor", _Wrapped(inner, Failing))
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT] * 2, PLAIN, ["x", "z"])
        assert_right(engine.generate([PROMPT], PLAIN, "x")[0], "x", PLAIN)
        assert_all_free(engine)
    else:
        failed = engine.generate([PROMPT] * 2, PLAIN, ["x", "z"])
        assert all("as planned" in (done.error or "") for done in failed)
        with pytest.raises(ShardLost, match="as planned"):
            engine.generate([PROMPT], PLAIN)


class _Wrapped:
    """An executor whose steps are wrapped."""

    def __init__(self, inner: Any, wrap: Any) -> None:
        self.inner, self.wrap = inner, wrap

    def start(self, batch: Batch, sampling: Sampling) -> Any:
        return self.wrap(self.inner.start(batch, sampling))


def test_an_interrupt_of_a_start_is_what_the_caller_hears_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the step before it is under way, and cannot be read any more."""
    engine = late_engine()
    with_a_step_under_way(engine)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.executor._executor, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine._under_way
    assert_no_threads()


def test_a_follower_that_fails_with_a_step_under_way_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Follower, order: Order) -> None:
        raise MemoryError("no room")

    engine = late_engine()
    number, started = with_a_step_under_way(engine), time.monotonic()
    monkeypatch.setattr(Follower, "run", run)
    with pytest.raises(ShardLost, match=r"shard 1 failed: MemoryError\('no room'\)"):
        while True:
            engine.step()
    engine.check()
    news = {news.request_id: news.completion for news in engine.step() if news.completion}
    assert news[number].finish_reason is FinishReason.ERROR
    assert time.monotonic() - started < DEADLINE
    assert_no_threads()


def test_a_process_that_dies_with_a_step_under_way_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, communicator = process_engine(monkeypatch, 2, async_scheduling=True)
    with_a_step_under_way(engine)
    communicator._processes[0].kill()
    started = time.monotonic()
    with pytest.raises(ShardLost, match=r"shard 1 has ended with exit code -9|closed its link"):
        while True:
            engine.step()
            engine.add_request([5], PLAIN)
    assert time.monotonic() - started < DEADLINE
    assert_no_processes(communicator)


def test_followers_wait_for_their_steps_before_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 0's device still needs theirs, though nobody reads the step."""
    waited: list[str] = []
    monkeypatch.setattr(ModelExecutor, "wait", lambda _: waited.append(threading.current_thread().name))
    engine = late_engine(shards=4)
    with_a_step_under_way(engine)
    assert not waited
    del engine
    assert_no_threads()
    assert sorted(waited) == ["shard-1", "shard-2", "shard-3"]
