"""What waits for what on a GPU, on one that is none: an engine's answers do not depend on how its streams overlap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from fake_gpu import install
from lone import be_alone, be_alone_on_a_gpu
from serving import assert_right, host_kernels, new_engine, run_to_end, without_shape_checks
from test_branch import ASKS, NAMES, PARAMS

from slora_ref import Engine, SamplingParams
from slora_ref.engine.outputs import Completion

EACH = {name: name for name in NAMES}


@pytest.fixture(autouse=True)
def _no_shape_checks() -> Iterator[None]:
    with without_shape_checks():
        yield


def answers(engine: Engine) -> list[np.ndarray]:
    """The logits of each request, twice: recorded, and repeated."""
    found = []
    for _ in range(2):
        numbers = [engine.add_request(prompt, PARAMS, name) for name, prompt in ASKS]
        done = run_to_end(engine)
        assert not [done[n].error for n in numbers if done[n].error]
        found += [np.array(done[n].logits) for n in numbers]
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("eager", "overlap"), [(True, True), (False, True), (False, False)])
def test_a_shards_streams_may_overlap_as_they_will(
    eager: bool, overlap: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_alone(monkeypatch)
    want = answers(new_engine(EACH, shards=2))
    install(monkeypatch, seed, host_kernels())
    be_alone_on_a_gpu(monkeypatch)
    engine = new_engine(EACH, on="cuda", shards=2, enforce_eager=eager, overlap_lora=overlap)
    monkeypatch.setattr(engine.executor._executor.ops, "settle", lambda: None)  # it is for the driver alone
    got = answers(engine)
    for ours, theirs in zip(got, want, strict=True):
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("forgotten", ["begin_branch", "end_branch"])
def test_a_wait_that_is_forgotten_shows(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    install(monkeypatch, 0, host_kernels())
    be_alone_on_a_gpu(monkeypatch)
    engine = new_engine(EACH, on="cuda", shards=2, overlap_lora=True)
    for name in (forgotten, "settle"):
        monkeypatch.setattr(engine.executor._executor.ops, name, lambda: None)
    with pytest.raises(AssertionError, match="logits are not finite"):  # memory that nobody has written yet holds NaN
        answers(engine)


def serve_beside_loads(page_order: int | None) -> Engine:
    """Requests that come one a step, so that their adapters take turns; each answer is checked."""
    small = {"pool_pages": 1300, "max_adapters": 2, "page_order_seed": page_order}
    engine = new_engine(EACH, on="cuda", loading="background", **small)
    asks, done = 2 * [*ASKS, *ASKS[::-1]], {}
    params = [SamplingParams(max_tokens=1 + place % 3, ignore_eos=True) for place in range(len(asks))]
    for (name, prompt), how in zip(asks, params, strict=True):
        engine.add_request(prompt, how, name)
        done |= {news.request_id: news.completion for news in engine.step() if news.completion}
    done |= run_to_end(engine)
    for number, ((name, _), how) in enumerate(zip(asks, params, strict=True)):
        assert_right(done[number], name, how)
    return engine


@pytest.mark.parametrize(("seed", "page_order"), [(0, 0), (1, None)])
def test_loads_and_steps_may_overlap_as_they_will(
    seed: int, page_order: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU: adapters come and go beside steps that are started before the one before is read.

    Scattered pages are filled by a kernel, neighbouring ones by the copy engine.
    """
    gpu = install(monkeypatch, seed, host_kernels())
    engine = serve_beside_loads(page_order)
    assert engine.prefetcher.counts.evictions > 0
    assert bool(gpu.boxes) == (page_order is None)


def test_a_load_that_does_not_wait_for_the_step_before_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a step may still read the pages that were taken from an adapter."""
    install(monkeypatch, 0, host_kernels())
    monkeypatch.setattr("fake_gpu.Stream.wait_event", lambda *_: None)
    with pytest.raises(AssertionError):
        serve_beside_loads(0)


def test_two_engines_of_a_thread_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own stream, whichever CuPy has as the current one."""
    install(monkeypatch, 0, host_kernels())
    engines = [new_engine(EACH, on="cuda", loading="background", enforce_eager=eager) for eager in (False, True)]
    done: list[dict[int, Completion]] = [{}, {}]
    for engine, (name, prompt) in product(engines, ASKS):
        engine.add_request(prompt, PARAMS, name)
    while any(engine.has_work for engine in engines):
        for engine, ended in zip(engines, done, strict=True):
            ended |= {news.request_id: news.completion for news in engine.step() if news.completion}
    for ended, (number, (name, _)) in product(done, enumerate(ASKS)):
        assert_right(ended[number], name, PARAMS)


def test_a_stream_is_current_again_after_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CuPy's own `with` would go back to the default stream: `use` leaves its stack alone."""
    gpu = install(monkeypatch, 0, host_kernels())
    engine = new_engine(on="cuda", overlap_lora=True)
    ops, seen = engine.executor.ops, []
    with ops.branch():
        work = ops.from_here(lambda: seen.append(gpu.current))
        work()
        assert gpu.current is ops.branch_stream
    work()
    with ops.beside():
        assert gpu.current is ops.side
    assert seen == [ops.branch_stream] * 2 and gpu.current is ops.stream is not gpu.default
