"""KeptSteps on the host backend, and what only a GPU has: memory that is handed out again under a captured graph."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from serving import new_engine

from slora_ref import SamplingParams
from slora_ref.executor import kept as module
from slora_ref.executor.kept import KeptSteps
from slora_ref.ops.host_ops import HostOps
from slora_ref.ops.tape import Graph, Tape


class Steps:
    """Two pieces of work, one reading what the other wrote, by names in a log."""

    def __init__(self, **options: bool) -> None:
        self.ops = HostOps()
        self.kept, self.log, self.graphs = KeptSteps(self.ops, **options), [], []
        self.ops.graph = self._graph  # type: ignore[method-assign]

    def _graph(self, tape: Tape) -> Any:
        log = self.log

        class Logged(Graph):
            def __init__(self) -> None:
                self.tape = tape

            def launch(self) -> None:
                log.append("graph")
                tape.replay()

            def milliseconds(self) -> float:
                return 0.0

        self.graphs.append(tape)
        return Logged()

    def launch(self, name: str) -> np.ndarray:
        """Some work, and an array of its own that it counts in."""
        count = np.zeros(1, np.int64)

        def work() -> None:
            self.log.append(name)
            count[0] += 1

        self.ops.do("rest", work)
        return count

    def step(self, first: str, second: str) -> np.ndarray:
        """As an executor does."""
        whole = self.kept.do_at_once(first, second)
        if whole is not None:
            return whole.result
        before = self.kept.do(first, lambda: self.launch(first))
        return self.kept.do(second, lambda: self.launch(second), after=before).result


def test_a_step_is_launched_then_captured_then_one_call() -> None:
    steps = Steps()
    results = [steps.step("a", "b") for _ in range(3)]
    assert steps.log == ["a", "b", "graph", "a", "b", "graph", "a", "b"]
    assert len(steps.graphs) == 1 and all(result is results[0] for result in results) and results[0][0] == 3


def test_launches_behind_others_are_kept_with_them_alone() -> None:
    """They read the arrays of these; where others are before them, they read other arrays."""
    steps = Steps()
    one, other = steps.step("a", "b"), steps.step("c", "b")
    assert one is not other and not steps.graphs
    assert steps.step("a", "b") is one and steps.step("c", "b") is other and len(steps.graphs) == 2


def test_other_tables_make_all_that_was_kept_void() -> None:
    steps = Steps()
    steps.kept.valid_for((1, 2))
    first = steps.step("a", "b")
    assert steps.step("a", "b") is first
    steps.kept.valid_for((1, 2))
    assert steps.kept.tapes and steps.kept.graphs
    steps.kept.valid_for((1, 3))
    assert not steps.kept.tapes and not steps.kept.graphs
    assert steps.step("a", "b") is not first and steps.log[-2:] == ["a", "b"]


def test_the_graph_that_was_used_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GRAPHS", 2)
    steps = Steps()
    for name in "abacba":
        steps.step(name, "x"), steps.step(name, "x")
    assert list(steps.kept.graphs) == [("b", "x"), ("a", "x")]
    assert len(steps.graphs) == 5, "a when it came, b, c, b again, a again"


@pytest.mark.parametrize(("options", "tapes"), [({"capture": False}, 1), ({"keep": False}, 0)])
def test_eager_steps_are_never_captured(options: dict[str, bool], tapes: int) -> None:
    steps = Steps(**options)
    for _ in range(3):
        steps.step("a", "b")
    assert steps.log == ["a", "b"] * 3 and not steps.kept.graphs and len(steps.kept.tapes) == tapes


PROMPT, PARAMS = [1, 2, 3, 4], SamplingParams(max_tokens=6, ignore_eos=True, keep_logits=True)


def test_only_decode_is_captured_and_eager_is_equal() -> None:
    answers = []
    for eager in (False, True):
        engine = new_engine({"x": "x"}, on="host", enforce_eager=eager)
        answers.append(engine.generate([PROMPT, PROMPT], PARAMS, ["x", None]))
        kept = engine.executor.kept
        assert bool(kept.graphs) != eager
        assert all(not shared for (_, _, _, shared), _ in kept.graphs)
    for graph, launches in zip(*answers, strict=True):
        assert graph.token_ids == launches.token_ids
        assert np.stack(graph.logits).tobytes() == np.stack(launches.logits).tobytes()


def test_one_graph_serves_whichever_adapters_run() -> None:
    engine = new_engine({name: name for name in ("x", "o", "z")}, on="host")
    engine.generate([PROMPT], PARAMS, "x")  # the largest: tables that fit it fit all
    for name in ("x", "o", "z"):
        engine.generate([PROMPT], PARAMS, name)
    assert len(engine.executor.kept.graphs) == 1


@pytest.mark.gpu
def test_memory_of_a_captured_launch_is_not_handed_out_again() -> None:
    """A larger step takes the backend's memory anew; what the graph writes to must not become someone else's."""
    import cupy

    from slora_ref.ops.cuda_memory import use_own_stream
    from slora_ref.ops.cuda_ops import CudaOps

    stream = use_own_stream()
    ops = CudaOps(np.float32)
    assert ops.stream.ptr == stream.ptr
    x, weight = cupy.random.standard_normal((4, 512), np.float32), cupy.ones(512, np.float32)
    with ops.recording() as tape:
        normed = ops.rms_norm(x, weight, 1e-5)
        out = ops.silu_mul(normed)
    want, graph, address, alive = cupy.asnumpy(out), ops.graph(tape), normed.data.ptr, weakref.ref(tape)
    size = normed.size
    del normed, tape
    ops.rms_norm(cupy.zeros((4096, 512), np.float32), weight, 1e-5)
    gc.collect()
    foreign = [cupy.full(size, cupy.nan, np.float32) for _ in range(64)]
    assert alive() is not None and all(array.data.ptr != address for array in foreign)
    out.fill(0)
    graph.launch()
    assert cupy.asnumpy(out).tobytes() == want.tobytes() and want.any()
    assert all(cupy.isnan(array).all() for array in foreign)
    del graph
    gc.collect()
    assert alive() is None
    cupy.cuda.Stream.null.use()


def test_what_is_prepared_and_captured_is_counted() -> None:
    steps = Steps()
    for first, second in ("ab", "ab", "ab", "cb"):
        steps.step(first, second)
    counts = steps.kept.counts
    assert (counts.tapes, counts.graphs) == (4, 1), "a, b behind a, c, b behind c; a with b"
    assert counts.tapes_s > 0 and counts.graphs_s > 0
    before = replace(counts)
    steps.step("c", "b"), steps.step("d", "b")
    since = counts - before
    assert (since.tapes, since.graphs) == (2, 1) and 0 < since.tapes_s < counts.tapes_s
