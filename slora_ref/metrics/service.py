"""Service: how well requests were served, in the paper's terms (section 7.1), from one record a request.

A request that was dropped scores 0 in attainment and satisfaction and counts in neither latency nor throughput, as in
the authors' benchmark. It knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import fmean

from slora_ref.metrics.statistics import percentile

SLO_SECONDS = 6.0
STRIP_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What became of one request.

    Args:
        arrival, first_token_at, finished_at: seconds on one clock; None: never.
        adapter: its number; -1: the base model.
        prompt, output: tokens that it brought and that it got.
        completed: whether it was served to its end, not dropped, refused or failed.
    """

    arrival: float
    first_token_at: float | None
    finished_at: float | None
    adapter: int
    prompt: int
    output: int
    completed: bool

    @property
    def latency(self) -> float:
        """Seconds from arrival to the last token, of a completed request."""
        assert self.completed and self.finished_at is not None, "a request that was not served has no latency"
        return self.finished_at - self.arrival

    @property
    def first_token(self) -> float:
        """Seconds from arrival to the first token, of a completed request."""
        assert self.completed and self.first_token_at is not None, "a request that was not served has no first token"
        return self.first_token_at - self.arrival


@dataclass(frozen=True, kw_only=True)
class Service:
    """How a trace was served. Times in seconds; None where no request was completed.

    Args:
        throughput: completed requests a second from the start to the last end, so with the drain.
        throughput_arriving: those completed before the last arrival, a second until then: without the drain.
        throughput_stripped: the authors': without 10 s, and what arrives in 10 s, at either end; None for short runs.
        attainment: share of all requests with the first token in less than the SLO.
        satisfaction: mean over all requests of 1 - (first token / SLO)^2, 0 beyond the SLO.
        time_per_token: mean over requests, from the first token on.
    """

    requests: int
    completed: int
    seconds: float
    throughput: float
    throughput_arriving: float
    throughput_stripped: float | None
    output_tokens_per_s: float
    latency: float | None
    latency_p50: float | None
    latency_p95: float | None
    latency_p99: float | None
    first_token: float | None
    first_token_p50: float | None
    first_token_p95: float | None
    first_token_p99: float | None
    time_per_token: float | None
    attainment: float
    satisfaction: float


def summarize(records: Seq[RequestRecord], slo: float = SLO_SECONDS) -> Service:
    """The numbers of one run that started at time 0.

    Args:
        records: of all requests; at least one.
        slo: limit on the first token, seconds.
    """
    assert records, "no requests, no service"
    done = [record for record in records if record.completed]
    seconds = max((record.finished_at or 0.0 for record in done), default=0.0)
    last_arrival = max(record.arrival for record in records)
    latencies = [record.latency for record in done]
    first_tokens = [record.first_token for record in done]
    in_time = [first for first in first_tokens if first < slo]
    return Service(
        requests=len(records),
        completed=len(done),
        seconds=seconds,
        throughput=_rate(len(done), seconds),
        throughput_arriving=_rate(sum((r.finished_at or 0.0) <= last_arrival for r in done), last_arrival),
        throughput_stripped=_stripped(len(records), len(done), last_arrival, seconds),
        output_tokens_per_s=_rate(sum(record.output for record in done), seconds),
        latency=fmean(latencies) if done else None,
        latency_p50=percentile(latencies, 50),
        latency_p95=percentile(latencies, 95),
        latency_p99=percentile(latencies, 99),
        first_token=fmean(first_tokens) if done else None,
        first_token_p50=percentile(first_tokens, 50),
        first_token_p95=percentile(first_tokens, 95),
        first_token_p99=percentile(first_tokens, 99),
        time_per_token=_time_per_token(done),
        attainment=len(in_time) / len(records),
        satisfaction=sum(1 - (first / slo) ** 2 for first in in_time) / len(records),
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _stripped(requests: int, completed: int, last_arrival: float, seconds: float) -> float | None:
    """The authors' "strip" throughput; the rate of arrivals is what was measured."""
    if seconds <= 2 * STRIP_SECONDS or last_arrival <= 0:
        return None
    cut = 2 * STRIP_SECONDS * requests / last_arrival
    return max(0.0, completed - cut) / (seconds - 2 * STRIP_SECONDS)


def _time_per_token(done: Seq[RequestRecord]) -> float | None:
    """Mean seconds a token after the first; requests of one token have none."""
    times = [(record.latency - record.first_token) / (record.output - 1) for record in done if record.output > 1]
    return fmean(times) if times else None
