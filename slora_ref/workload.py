"""Workloads: who asks for what, and when. The paper's synthetic trace in two readings, and one like its real trace.

`original_trace` draws as the authors' benchmark does, number for number: one Gamma process for all requests, and for
each an adapter. `paper_trace` does what the paper's text says (section 7.1): each adapter has a Gamma process of its
own. The two have the same law only where the coefficient of variance is 1. A workload knows lengths, not texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from slora_ref.errors import ConfigError
from slora_ref.options import check_real, check_whole, is_finite
from slora_ref.request import BASE_MODEL
from slora_ref.shapes import Array, Float, Int

ARENA_ADAPTERS, ARENA_PROMPT, ARENA_OUTPUT, ARENA_LONGEST = 26, 85.0, 165.0, 512
ARENA_SKEW = 0.6  # of the adapters' popularity; the real one is not published


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a trace.

    Args:
        time: seconds from the start of the trace.
        adapter: its number, from 0; BASE_MODEL for none.
        prompt, output: tokens.
    """

    time: float
    adapter: int
    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True)
class SyntheticTrace:
    """The parameters of the paper's synthetic trace (Table 2 and its defaults).

    Args:
        adapters: n; 0 is the base model alone.
        alpha: of the popularity: adapter floor(u n) with u of density alpha u^(alpha - 1), so 1 is uniform and
            smaller is more skewed.
        rate: R, requests a second.
        cv: coefficient of variance of the times between arrivals; 1 is a Poisson process.
        duration: D, seconds.
        prompt, output: [low, high) of the uniform lengths in tokens.
        seed: the authors' is 42.
    """

    adapters: int
    rate: float
    alpha: float = 1.0
    cv: float = 1.0
    duration: float = 300.0
    prompt: tuple[int, int] = (8, 512)
    output: tuple[int, int] = (8, 512)
    seed: int = 42

    def __post_init__(self) -> None:
        """Raises ConfigError for what no trace can be drawn from."""
        check_whole(ConfigError, "adapters", self.adapters, 0)
        check_whole(ConfigError, "seed", self.seed, 0, (1 << 32) - 1)
        for name in ("rate", "alpha", "cv", "duration"):
            value = getattr(self, name)
            check_real(ConfigError, name, value, is_finite(value) and value > 0, "a finite number above 0")
        for name in ("prompt", "output"):
            low, high = getattr(self, name)
            check_whole(ConfigError, f"{name}[0]", low, 1)
            check_whole(ConfigError, f"{name}[1]", high, low + 1)


def original_trace(trace: SyntheticTrace) -> list[Arrival]:
    """The trace of the authors' benchmark, bit for bit: the same generator, seed and order of draws.

    With a large cv the trace that comes out is far from `rate` and `duration`: the last of 600 arrivals at a rate of 2
    comes after 301, 285, 354, 343, 433 s for a cv of 1, 2, 4, 6, 8.
    """
    rng = np.random.RandomState(trace.seed)
    count = int(trace.rate * trace.duration)
    adapters = (rng.power(trace.alpha, count) * trace.adapters).astype(np.int64)
    prompts = rng.randint(*trace.prompt, count)
    outputs = rng.randint(*trace.output, count)
    times = np.cumsum(rng.gamma(1 / (trace.cv * trace.cv), trace.cv * trace.cv / trace.rate, count))
    return _arrivals(times, adapters if trace.adapters else np.full(count, BASE_MODEL), prompts, outputs)


def paper_trace(trace: SyntheticTrace) -> list[Arrival]:
    """The trace as the paper describes it: adapter i sends its own Gamma process of rate R p(i), up to the duration.

    Each process begins at an arrival just before time 0, so with a large cv the first seconds are crowded.
    """
    rng = np.random.default_rng(trace.seed)
    shares = np.diff(np.linspace(0, 1, max(trace.adapters, 1) + 1) ** trace.alpha)
    own = [_gamma_process(rng, trace.rate * share, trace.cv, trace.duration) for share in shares]
    times = np.concatenate(own)
    first = 0 if trace.adapters else BASE_MODEL
    adapters = np.repeat(np.arange(first, first + len(own)), [len(process) for process in own])
    order = np.argsort(times, kind="stable")
    prompts, outputs = (rng.integers(*bounds, len(times)) for bounds in (trace.prompt, trace.output))
    return _arrivals(times[order], adapters[order], prompts, outputs)


def _gamma_process(rng: np.random.Generator, rate: float, cv: float, duration: float) -> Float[Array, " arrivals"]:
    """Arrival times before `duration`; intervals are drawn in batches until it is reached."""
    times = np.zeros(1)
    while times[-1] < duration:
        intervals = rng.gamma(1 / cv**2, cv**2 / rate, 16 + int(rate * duration))
        times = np.concatenate([times, times[-1] + np.cumsum(intervals)])
    return times[1:][times[1:] < duration]


def arena_trace(rate: float, duration: float = 300.0, seed: int = 42) -> list[Arrival]:
    """A stand-in for the paper's real trace (LMSYS Chatbot Arena), which is private.

    26 adapters with Power(0.6) popularity; prompts and outputs exponential, below 512 tokens, with the published means
    of 85 and 165; arrivals at uniform times, stretched so that the last one comes at `duration`, as the authors do.
    """
    SyntheticTrace(adapters=ARENA_ADAPTERS, rate=rate, duration=duration, seed=seed)  # the same checks
    rng = np.random.default_rng(seed)
    count = max(1, int(rate * duration))
    times = np.sort(rng.random(count))
    adapters = (rng.power(ARENA_SKEW, count) * ARENA_ADAPTERS).astype(np.int64)
    prompts, outputs = (_short_exponential(rng, mean, count) for mean in (ARENA_PROMPT, ARENA_OUTPUT))
    return _arrivals(times * (duration / times[-1]), adapters, prompts, outputs)


def _short_exponential(rng: np.random.Generator, mean: float, count: int) -> Int[Array, " count"]:
    """[count] lengths from 1 to ARENA_LONGEST - 1 whose probability falls by one factor a token, with this mean."""
    lengths = np.arange(1, ARENA_LONGEST)
    low, high = 1.0, 1e6  # of the scale; the mean grows with it
    for _ in range(60):
        scale = (low + high) / 2
        weights = np.exp(-lengths / scale)
        low, high = (scale, high) if weights @ lengths / weights.sum() < mean else (low, scale)
    return rng.choice(lengths, count, p=weights / weights.sum())


def _arrivals(
    times: Float[Array, " n"], adapters: Int[Array, " n"], prompts: Int[Array, " n"], outputs: Int[Array, " n"]
) -> list[Arrival]:
    columns = (times.tolist(), adapters.tolist(), prompts.tolist(), outputs.tolist())
    return [Arrival(time=t, adapter=a, prompt=p, output=o) for t, a, p, o in zip(*columns, strict=True)]


def save_trace(path: str | Path, arrivals: Seq[Arrival]) -> None:
    """Writes one JSON object a line; load_trace gives the same trace back, to the last bit."""
    Path(path).write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in arrivals), encoding="utf-8")


def load_trace(path: str | Path) -> list[Arrival]:
    """Reads what save_trace wrote.

    Raises:
        ConfigError: a line is no arrival, or comes before the one above it; with its number.
    """
    arrivals: list[Arrival] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            arrival = Arrival(**json.loads(line))
            check_whole(ConfigError, "adapter", arrival.adapter, BASE_MODEL)
            for name in ("prompt", "output"):
                check_whole(ConfigError, name, getattr(arrival, name), 1)
            earliest = arrivals[-1].time if arrivals else 0.0
            in_order = is_finite(arrival.time) and arrival.time >= earliest
            check_real(ConfigError, "time", arrival.time, in_order, f"finite and not before {earliest}")
        except (ValueError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path}, line {number}: no arrival of a trace: {error}") from None
        arrivals.append(arrival)
    return arrivals
