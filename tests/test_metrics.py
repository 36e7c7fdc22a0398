"""Metrics: the paper's definitions against records that can be counted by hand, and intervals that hold the mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_ref.metrics import Occupancy, RequestRecord, bootstrap_interval, percentile, summarize
from slora_ref.pager import PoolUsage


def record(arrival: float, first: float, end: float, output: int = 5, completed: bool = True) -> RequestRecord:
    return RequestRecord(
        arrival=arrival,
        first_token_at=arrival + first,
        finished_at=arrival + end,
        adapter=0,
        prompt=7,
        output=output,
        completed=completed,
    )


def dropped(arrival: float) -> RequestRecord:
    """A request that early abort gave up: it ended without a token."""
    return RequestRecord(
        arrival=arrival, first_token_at=None, finished_at=arrival + 5.5, adapter=0, prompt=7, output=0, completed=False
    )


def test_a_run_that_can_be_counted_by_hand() -> None:
    records = [record(0.0, 3.0, 8.0), record(10.0, 6.0, 10.0, output=1), record(20.0, 9.0, 12.0), dropped(30.0)]
    service = summarize(records)
    assert (service.requests, service.completed, service.seconds) == (4, 3, 32.0)
    assert service.throughput == 3 / 32
    assert service.throughput_arriving == 2 / 30
    assert service.output_tokens_per_s == 11 / 32
    assert service.latency == 10.0 and service.latency_p50 == 10.0
    assert service.first_token == 6.0 and service.first_token_p99 == pytest.approx(8.94)
    assert service.attainment == 1 / 4  # 6 s are not less than 6 s; the dropped one counts as missed
    assert service.satisfaction == pytest.approx((1 - 0.25) / 4)
    assert service.time_per_token == pytest.approx((5 / 4 + 3 / 4) / 2)
    assert service.throughput_stripped == 3 * (1 - 80 / 90) / 12


def test_a_run_in_which_nobody_was_served() -> None:
    service = summarize([dropped(1.0), dropped(2.0)])
    assert service.completed == 0 and service.throughput == 0 and service.attainment == service.satisfaction == 0
    assert service.latency is None and service.first_token_p50 is None and service.time_per_token is None


RECORDS = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 20), st.floats(0, 20), st.integers(1, 9), st.booleans()), min_size=1
).map(lambda rows: [record(a, f, f + rest, o, done) for a, f, rest, o, done in rows])


@given(records=RECORDS, slo=st.floats(0.1, 30))
def test_any_run_keeps_the_order_of_its_numbers(records: list[RequestRecord], slo: float) -> None:
    service = summarize(records, slo)
    assert 0 <= service.satisfaction <= service.attainment <= service.completed / service.requests <= 1
    if service.latency is not None:
        assert service.first_token is not None and service.first_token <= service.latency + 1e-9
        quantiles = [service.latency_p50, service.latency_p95, service.latency_p99]
        assert quantiles == sorted(q for q in quantiles if q is not None)
        assert max(quantiles, default=None) is not None
    assert service.throughput == pytest.approx(service.completed / service.seconds if service.seconds else 0.0)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), percent=st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == float(np.percentile(values, percent))
    assert percentile([], percent) is None


def test_a_bootstrap_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        low, high = bootstrap_interval(rng.exponential(3.0, 12).tolist(), level=0.9, resamples=400)
        assert low <= high
        held += low <= 3.0 <= high
    assert 0.78 <= held / 200 <= 0.95  # the percentile bootstrap is somewhat narrow for few and skewed values


def test_one_run_has_an_interval_of_no_width() -> None:
    assert bootstrap_interval([2.5]) == (2.5, 2.5)
    assert bootstrap_interval([1.0, 2.0, 4.0]) == bootstrap_interval([1.0, 2.0, 4.0])


def test_occupancy_is_what_was_sampled() -> None:
    occupancy = Occupancy()
    assert occupancy.peak_used == 0 and occupancy.mean_share("kv") == 0.0
    occupancy.sample(PoolUsage(kv=2, adapter=6, free=2))
    occupancy.sample(PoolUsage(kv=6, adapter=0, free=4))
    assert (occupancy.peak_kv, occupancy.peak_adapter, occupancy.peak_used) == (6, 6, 8)
    assert occupancy.mean_share("kv") == pytest.approx(0.4) and occupancy.mean_share("free") == pytest.approx(0.3)
