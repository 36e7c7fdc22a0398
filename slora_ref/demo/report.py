"""DemoReport: what happened in the demo, as a table for a newcomer and as JSON for a program."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slora_ref.demo.questions import Question
from slora_ref.demo.verify import Verdict
from slora_ref.demo.watch import LEGEND, PoolWatch
from slora_ref.engine import Completion, Engine
from slora_ref.engine.leader import GroupExecutor
from slora_ref.metrics import percentile
from slora_ref.tp.communicator import Counts


@dataclass(frozen=True)
class PoolPeaks:
    """Pages of the pool and the most that were held."""

    pages: int
    peak_kv: int
    peak_adapter: int
    peak_used: int


TASK_BAR = 0.98
"""Share of the answers that must also follow the task's rule: each adapter was trained to 99 %."""
ERROR_BARS = {"float32": 1e-4, "float64": 1e-9, "float16": 0.5, "bfloat16": 2.5}
"""Largest logit error that rounding may leave; a mixed-up adapter makes one of more than 0.1 (tests/test_demo.py). In
half precision it is TOLERANCES of the largest logit, which is near 25: there answers and the task's rule must tell."""
DENSE = """
Each answer was checked against the dense merged model: each request alone, without pages or a batch, in a plain Llama
with its adapter added into the weights, W + s B A, in float64: other code, same mathematics; only rounding differs."""


@dataclass(frozen=True)
class Sent:
    """What one of the shards has sent to the others; as_of_a_ring: see Counts."""

    shards: int
    nbytes: int
    lora_nbytes: int
    as_of_a_ring: bool

    @classmethod
    def of(cls, engine: Engine) -> Sent:
        """By shard 0; nothing, where there are no others."""
        counts = engine.executor.counts if isinstance(engine.executor, GroupExecutor) else Counts()
        return cls(
            engine.scheduler.config.shards, sum(counts.nbytes.values()), counts.lora_nbytes, counts.as_of_a_ring
        )

    def rows(self) -> list[tuple[str, str]]:
        """As the table of a report has it."""
        if self.shards == 1:
            return []
        how = "as a ring would send them" if self.as_of_a_ring else "counted as they were sent"
        share = f"{self.nbytes / 1e6:.1f} MB, {self.lora_nbytes / self.nbytes:.0%} of them LoRA's"
        return [("messages of a shard", f"{share}; {how} ({self.shards} shards)")]


@dataclass(frozen=True)
class DemoReport:
    """Counts, times in seconds, and the largest logit error against the dense model."""

    model: str
    device: str
    dtype: str
    shards: int
    adapters_registered: int
    adapters_used: int
    requests: int
    correct: int
    wrong: int
    task_correct: int
    tokens: int
    steps: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    pool: PoolPeaks
    peak_resident: int
    adapter_waits: int
    adapter_loads: int
    adapter_hits: int
    evictions: int
    preemptions: int
    bytes_loaded: int
    sent: Sent
    max_logit_error: float
    samples: tuple[tuple[str, str, str], ...]
    history: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The fields for a program, without what is only for the eye."""
        fields = asdict(self)
        del fields["samples"], fields["history"]
        return fields

    @property
    def error_bar(self) -> float:
        """The largest logit error allowed."""
        return ERROR_BARS[self.dtype]

    @property
    def failed(self) -> list[str]:
        """The checks that failed; a NaN among the logits fails too."""
        checks = {
            "answers checked": self.wrong == 0,
            "task's rule": self.task_correct >= TASK_BAR * self.requests,
            "largest logit error": self.max_logit_error <= self.error_bar,
        }
        return [name for name, passed in checks.items() if not passed]

    def table(self) -> str:
        """The report as text."""
        lines = ["", "The pool over time", *self.history, LEGEND, ""]
        lines += ["Some answers", f"  {'adapter':<24} {'prompt':>11} answer"]
        lines += [f"  {adapter:<24} {prompt:>11} {answer}" for adapter, prompt, answer in self.samples]
        rows = [*self._check_rows(), *self._pool_rows()]
        width = max(len(label) for label, _ in rows)
        lines += ["", "What happened", *(f"  {label:<{width}}  {value}" for label, value in rows), DENSE]
        lines += ["", f"FAILED: {', '.join(self.failed)}"] if self.failed else []
        return "\n".join(lines)

    def _check_rows(self) -> list[tuple[str, str]]:
        """What was asked and answered, each check with its bar."""
        verdict = "all as the dense merged model answers" if not self.wrong else f"{self.wrong} WRONG"
        first, last = _ms(self.first_token_p50_s), _ms(self.first_token_p99_s)
        return [
            ("adapters registered", f"{self.adapters_registered:,}"),
            ("adapters asked for", f"{self.adapters_used:,}, at most {self.peak_resident} in the pool at once"),
            ("requests", f"{self.requests:,} ({self.requests_per_s:,.0f} a second, in {self.steps:,} steps)"),
            ("answers checked", f"{self.correct:,} right of {self.requests:,}: {verdict} (bar: all)"),
            ("also right by the task's rule", f"{self.task_correct:,} of {self.requests:,} (bar: {TASK_BAR:.0%})"),
            ("largest logit error", f"{self.max_logit_error:.1e} (bar: {self.error_bar:.0e})"),
            ("tokens generated", f"{self.tokens:,} ({self.tokens_per_s:,.0f} a second)"),
            ("first token after", f"{first} (median), {last} (99 of 100)"),
        ]

    def _pool_rows(self) -> list[tuple[str, str]]:
        """What the pool held, and how each request came to its adapter."""
        pool, megabytes = self.pool, self.bytes_loaded / 1e6
        return [
            ("pool", f"{pool.pages:,} pages; at most {pool.peak_used:,} used at once"),
            (
                "most of each kind",
                f"{pool.peak_kv:,} by sequences, {pool.peak_adapter:,} by adapters, each in its fullest step",
            ),
            ("adapter already in the pool", f"for {self.adapter_hits:,} requests"),
            ("waited for their adapter", f"the other {self.adapter_waits:,}; those that wait together share one load"),
            ("adapters loaded", f"{self.adapter_loads:,} times ({megabytes:.1f} MB), evicted {self.evictions:,} times"),
            ("requests preempted", f"{self.preemptions:,}"),
            *self.sent.rows(),
        ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.0f} ms"


def summarize(
    engine: Engine,
    questions: list[Question],
    completions: list[Completion],
    verdicts: list[Verdict],
    watch: PoolWatch,
    seconds: float,
) -> DemoReport:
    """Counts what the run brought."""
    asked = list(zip(questions, completions, verdicts, strict=True))
    first = [done.first_token_at - done.arrival for done in completions if done.first_token_at is not None]
    tokens = sum(len(done.token_ids) for done in completions)
    counts, occupancy = engine.prefetcher.counts, watch.occupancy
    return DemoReport(
        model="toy",
        device=engine.scheduler.config.device,
        dtype=engine.scheduler.config.dtype,
        shards=engine.scheduler.config.shards,
        adapters_registered=len(engine.adapters),
        adapters_used=len({question.adapter for question in questions}),
        requests=len(questions),
        correct=sum(verdict.right for verdict in verdicts),
        wrong=sum(not verdict.right for verdict in verdicts),
        task_correct=sum(verdict.right and done.text == question.rule_answer for question, done, verdict in asked),
        tokens=tokens,
        steps=engine.steps,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        requests_per_s=len(questions) / seconds,
        first_token_p50_s=percentile(first, 50),
        first_token_p99_s=percentile(first, 99),
        pool=PoolPeaks(engine.pool.num_pages, occupancy.peak_kv, occupancy.peak_adapter, occupancy.peak_used),
        peak_resident=max(watch.residents, default=0),
        adapter_waits=len(questions) - counts.hits,
        adapter_loads=counts.loads,
        adapter_hits=counts.hits,
        evictions=counts.evictions,
        preemptions=engine.scheduler.preemptions,
        bytes_loaded=counts.bytes_loaded,
        sent=Sent.of(engine),
        max_logit_error=float(np.max([verdict.logit_error for verdict in verdicts])),  # a NaN stays one
        samples=tuple((question.adapter, question.prompt, done.text) for question, done, _ in asked[:8]),
        history=tuple(watch.history()),
    )
