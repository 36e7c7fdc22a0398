"""Traces: the authors' draws bit for bit, the laws that the docstrings state, and the file that replays one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_ref.errors import ConfigError
from slora_ref.request import BASE_MODEL
from slora_ref.workload import Arrival, SyntheticTrace, arena_trace, load_trace, original_trace, paper_trace, save_trace

TRACES = st.builds(
    SyntheticTrace,
    adapters=st.integers(0, 40),
    rate=st.floats(0.2, 5),
    alpha=st.floats(0.1, 1),
    cv=st.floats(0.5, 8),
    duration=st.floats(5, 60),
    seed=st.integers(0, 2**32 - 1),
)


def authors_draws(trace: SyntheticTrace) -> list[tuple[int, int, int, float]]:
    """The authors' generator, written out again with NumPy's global state as they use it."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(trace.seed)  # noqa: NPY002
    count = int(trace.rate * trace.duration)
    labels = np.random.power(trace.alpha, count)  # noqa: NPY002
    inputs = np.random.randint(trace.prompt[0], trace.prompt[1], count)  # noqa: NPY002
    outputs = np.random.randint(trace.output[0], trace.output[1], count)  # noqa: NPY002
    gaps = np.random.gamma(1 / (trace.cv * trace.cv), trace.cv * trace.cv / trace.rate, count)  # noqa: NPY002
    np.random.set_state(state)  # noqa: NPY002
    tic, drawn = 0.0, []
    for i in range(count):
        tic += gaps[i]
        drawn.append((int(labels[i] * trace.adapters), int(inputs[i]), int(outputs[i]), float(tic)))
    return drawn


@given(trace=TRACES)
def test_the_original_trace_is_the_authors_bit_for_bit(trace: SyntheticTrace) -> None:
    ours = [(a.adapter, a.prompt, a.output, a.time) for a in original_trace(trace)]
    theirs = authors_draws(trace)
    if not trace.adapters:
        theirs = [(BASE_MODEL, *rest) for _, *rest in theirs]
    assert ours == theirs


def test_the_original_trace_with_the_authors_seed() -> None:
    """Against numbers worked out apart from this code: the last arrivals for each cv, and the mean length."""
    traces = [original_trace(SyntheticTrace(adapters=200, rate=2.0, cv=cv)) for cv in (1.0, 2.0, 4.0, 6.0, 8.0)]
    assert [round(trace[-1].time) for trace in traces] == [301, 285, 354, 343, 433]
    assert {len(trace) for trace in traces} == {600}
    assert {(a.prompt, a.output, a.adapter) for a in traces[0]} == {(a.prompt, a.output, a.adapter) for a in traces[4]}
    for name in ("prompt", "output"):
        lengths = [getattr(arrival, name) for arrival in traces[0]]
        assert min(lengths) >= 8 and max(lengths) <= 511 and np.mean(lengths) == pytest.approx(259.5, abs=15)


@pytest.mark.parametrize(("alpha", "share"), [(0.1, 0.589), (0.3, 0.204), (0.6, 0.042), (1.0, 0.005)])
@pytest.mark.parametrize("draw", [original_trace, paper_trace])
def test_the_share_of_the_most_popular_adapter(alpha: float, share: float, draw: Any) -> None:
    trace = draw(SyntheticTrace(adapters=200, rate=20.0, alpha=alpha))
    counts = Counter(arrival.adapter for arrival in trace)
    most = max(counts, key=counts.__getitem__) if alpha < 1 else 0
    assert most == 0
    assert counts[0] / len(trace) == pytest.approx(share, abs=4 * (share / len(trace)) ** 0.5)


@given(trace=TRACES, draw=st.sampled_from([original_trace, paper_trace]))
def test_any_trace_is_in_order_and_within_its_bounds(trace: SyntheticTrace, draw: Any) -> None:
    arrivals = draw(trace)
    times = [arrival.time for arrival in arrivals]
    assert times == sorted(times) and all(time >= 0 for time in times)
    if draw is paper_trace:
        assert all(time < trace.duration for time in times)
    numbers = {arrival.adapter for arrival in arrivals}
    assert numbers <= (set(range(trace.adapters)) or {BASE_MODEL})
    assert all(trace.prompt[0] <= arrival.prompt < trace.prompt[1] for arrival in arrivals)
    assert all(trace.output[0] <= arrival.output < trace.output[1] for arrival in arrivals)
    assert draw(trace) == arrivals


def gaps(trace: list[Arrival], adapter: int | None) -> list[float]:
    """Times between neighbouring arrivals of one adapter, or of all."""
    times = [arrival.time for arrival in trace if adapter in (None, arrival.adapter)]
    return np.diff(times).tolist()


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_the_two_readings_differ_in_whose_arrivals_have_the_cv(cv: float) -> None:
    """Of one adapter's gaps in the paper's reading; of all gaps in the authors'. With cv 1 it is the same."""
    spec = SyntheticTrace(adapters=4, rate=8.0, cv=cv, duration=4_000.0)
    of_one, of_all = gaps(paper_trace(spec), 1), gaps(original_trace(spec), None)
    for measured in (of_one, of_all):
        assert np.std(measured) / np.mean(measured) == pytest.approx(cv, rel=0.12)
    mixed = gaps(paper_trace(spec), None)
    assert (np.std(mixed) / np.mean(mixed) < 0.9 * cv) == (cv > 1)
    assert len(of_all) / 4_000 == pytest.approx(8, rel=0.12)
    assert len(mixed) / 4_000 == pytest.approx(8, rel=0.12)


def test_the_arena_trace_has_the_published_means() -> None:
    trace = arena_trace(rate=50.0, duration=400.0)
    assert len(trace) == 20_000 and trace[-1].time == pytest.approx(400)
    assert np.mean([a.prompt for a in trace]) == pytest.approx(85, rel=0.03)
    assert np.mean([a.output for a in trace]) == pytest.approx(165, rel=0.03)
    assert {a.adapter for a in trace} == set(range(26))
    assert all(1 <= length < 512 for a in trace for length in (a.prompt, a.output))


@given(trace=TRACES)
def test_a_saved_trace_is_the_same_trace(trace: SyntheticTrace, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    save_trace(path, original_trace(trace))
    assert load_trace(path) == original_trace(trace)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"time": 1}',
        '{"time": 1, "adapter": -2, "prompt": 1, "output": 1}',
        '{"time": 1, "adapter": 0, "prompt": 0, "output": 1}',
        '{"time": 0.5, "adapter": 0, "prompt": 1, "output": 1}',
        '{"time": NaN, "adapter": 0, "prompt": 1, "output": 1}',
        '{"time": "1", "adapter": 0, "prompt": 1, "output": 1}',
    ],
)
def test_a_damaged_trace_is_refused_with_the_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0.9, "adapter": -1, "prompt": 1, "output": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2"):
        load_trace(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"adapters": -1},
        {"rate": 0.0},
        {"alpha": 0.0},
        {"cv": float("nan")},
        {"duration": float("inf")},
        {"prompt": (0, 5)},
        {"output": (5, 5)},
        {"seed": -1},
    ],
)
def test_parameters_that_no_trace_can_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SyntheticTrace(**{"adapters": 2, "rate": 1.0, **wrong})
