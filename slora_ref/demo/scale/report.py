"""ScaleReport: what happened, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

from slora_ref.bench import machine_facts
from slora_ref.demo.report import PoolPeaks, Sent
from slora_ref.demo.scale.check import TOLERANCE, Checked
from slora_ref.demo.scale.options import SLO_SECONDS, ScaleOptions
from slora_ref.demo.watch import LEGEND, PoolWatch
from slora_ref.engine import Completion, Engine
from slora_ref.metrics import percentile


@dataclass(frozen=True)
class ScaleReport:
    """Counts, times in seconds, and how near the sample came to the dense model.

    Args:
        first_ready_s: from the start of the process to the first token of any request; start_s: its parts.
        kernels_cached: nothing had to be compiled for that; None: not on a GPU.
        task_correct: None: synthetic adapters have no task.
        max_logit_error: largest difference of a logit in the sample; max_relative_error: beside the largest logit.
        slo_attainment: share of requests whose first token came within the paper's 6 s.
        load_gb_s: rate of the launches that load adapters.
    """

    model: str
    device: str
    dtype: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    adapters_registered: int
    adapters_distinct: int
    adapters_used: int
    requests: int
    finished: int
    rate: float | None
    tokens: int
    steps: int
    seconds: float
    first_ready_s: float
    start_s: dict[str, float]
    kernels_cached: bool | None
    tokens_per_s: float
    requests_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    total_p50_s: float | None
    total_p99_s: float | None
    slo_attainment: float
    pool: PoolPeaks
    pool_gb: float
    peak_resident: int
    peak_running: int
    adapter_loads: int
    adapter_hits: int
    evictions: int
    preemptions: int
    bytes_loaded: int
    load_gb_s: float | None
    sent: Sent
    history: tuple[str, ...]
    checked: int = 0
    correct: int = 0
    wrong: int = 0
    task_correct: None = None
    decided_tokens: int = 0
    adapter_tokens: int = 0
    checked_tokens: int = 0
    max_logit_error: float = 0.0
    max_relative_error: float = 0.0

    def with_checks(self, checked: Seq[Checked]) -> ScaleReport:
        """The same run, and what its sample showed."""
        return replace(
            self,
            checked=len(checked),
            correct=sum(each.right for each in checked),
            wrong=sum(not each.right for each in checked),
            decided_tokens=sum(each.decided for each in checked),
            adapter_tokens=sum(each.by_adapter for each in checked),
            checked_tokens=sum(each.tokens for each in checked),
            max_logit_error=max((each.error for each in checked), default=0.0),
            max_relative_error=max((each.error / each.largest for each in checked), default=0.0),
        )

    def as_json(self) -> dict[str, Any]:
        """The fields for a program, and the machine that they were measured on."""
        fields = asdict(self)
        del fields["history"]
        return fields | {"machine": machine_facts(gpu=self.device == "cuda")}

    @property
    def failed(self) -> list[str]:
        """The checks that failed."""
        checks = {
            "requests finished": self.finished == self.requests,
            "answers checked": self.wrong == 0,
            "adapters change the answers": not self.checked or self.adapter_tokens > 0,
            "largest logit error": self.max_relative_error <= TOLERANCE[self.dtype],
        }
        return [name for name, passed in checks.items() if not passed]

    def table(self) -> str:
        """The report as text."""
        rows = [*self._what_was_asked(), *self._how_fast(), *self._what_the_pool_held()]
        width = max(len(label) for label, _ in rows)
        lines = ["", "The pool over time", *self.history, LEGEND, "", "What happened"]
        lines += [f"  {label:<{width}}  {value}" for label, value in rows]
        lines += ["", f"FAILED: {', '.join(self.failed)}"] if self.failed else []
        return "\n".join(lines)

    def _what_was_asked(self) -> list[tuple[str, str]]:
        ranks, bar = ", ".join(map(str, self.ranks)), TOLERANCE[self.dtype]
        return [
            ("model", f"{self.model}, {self.dtype}, on {self.device}"),
            ("adapters registered", f"{self.adapters_registered:,} of rank {ranks}; {self.adapters_distinct} distinct"),
            ("adapters asked for", f"{self.adapters_used:,}, at most {self.peak_resident} in the pool at once"),
            ("requests", f"{self.requests:,}, of which {self.finished:,} finished; {self.peak_running} ran at once"),
            ("answers checked", f"{self.correct} right of {self.checked}, against dense merged weights (bar: all)"),
            (
                "tokens checked",
                f"{self.checked_tokens:,}; {self.decided_tokens:,} beyond doubt; {self.adapter_tokens:,} that the base "
                "model would not say",
            ),
            ("largest logit error", f"{self.max_relative_error:.2%} of the largest logit (bar: {bar:.2%})"),
        ]

    def _how_fast(self) -> list[tuple[str, str]]:
        kernels = {True: "kept from before", False: "compiled now", None: "not a GPU's"}[self.kernels_cached]
        return [
            ("process start to first token", f"{self.first_ready_s:.1f} s, kernels {kernels}"),
            ("throughput", f"{self.requests_per_s:.2f} requests/s, {self.tokens_per_s:,.0f} output tokens/s"),
            ("first token after", f"{_s(self.first_token_p50_s)} (median), {_s(self.first_token_p99_s)} (99 of 100)"),
            ("answer complete after", f"{_s(self.total_p50_s)} (median), {_s(self.total_p99_s)} (99 of 100)"),
            (f"first token within {SLO_SECONDS:g} s", f"{self.slo_attainment:.1%} of requests"),
        ]

    def _what_the_pool_held(self) -> list[tuple[str, str]]:
        pool = self.pool
        rate = "" if self.load_gb_s is None else f", {self.load_gb_s:.1f} GB/s"
        loaded = f"{self.adapter_loads:,} times ({self.bytes_loaded / 1e9:.1f} GB{rate})"
        return [
            ("pool", f"{pool.pages:,} pages, {self.pool_gb:.1f} GB; at most {pool.peak_used:,} pages used at once"),
            ("most of each kind", f"{pool.peak_kv:,} by sequences, {pool.peak_adapter:,} by adapters"),
            ("adapter already in the pool", f"for {self.adapter_hits:,} requests"),
            ("adapters loaded", f"{loaded}, evicted {self.evictions:,} times"),
            ("requests preempted", f"{self.preemptions:,}"),
            *self.sent.rows(),
        ]


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def summarize(
    engine: Engine,
    options: ScaleOptions,
    completions: Seq[Completion],
    watch: PoolWatch,
    seconds: float,
    start: dict[str, float],
    kernels_cached: bool | None,
) -> ScaleReport:
    """Counts what the run brought; nothing is checked yet."""
    first = [done.first_token_at - done.arrival for done in completions if done.first_token_at is not None]
    total = [done.finished_at - done.arrival for done in completions]
    tokens, counts = sum(len(done.token_ids) for done in completions), engine.prefetcher.counts
    occupancy, loading = watch.occupancy, engine.prefetcher.loader.seconds
    return ScaleReport(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        ranks=options.kind.ranks,
        targets=options.kind.targets,
        adapters_registered=len(engine.adapters),
        adapters_distinct=options.sets,
        adapters_used=len({done.adapter for done in completions}),
        requests=len(completions),
        finished=sum(done.error is None for done in completions),
        rate=options.rate,
        tokens=tokens,
        steps=len(watch.residents),
        seconds=seconds,
        first_ready_s=sum(start.values()),
        start_s=start,
        kernels_cached=kernels_cached,
        tokens_per_s=tokens / seconds,
        requests_per_s=len(completions) / seconds,
        first_token_p50_s=percentile(first, 50),
        first_token_p99_s=percentile(first, 99),
        total_p50_s=percentile(total, 50),
        total_p99_s=percentile(total, 99),
        slo_attainment=sum(each < SLO_SECONDS for each in first) / len(completions),
        pool=PoolPeaks(engine.pool.num_pages, occupancy.peak_kv, occupancy.peak_adapter, occupancy.peak_used),
        pool_gb=engine.pool.num_pages * engine.pool.page_bytes / 1e9,
        peak_resident=max(watch.residents, default=0),
        peak_running=max(watch.running, default=0),
        adapter_loads=counts.loads,
        adapter_hits=counts.hits,
        evictions=counts.evictions,
        preemptions=engine.scheduler.preemptions,
        bytes_loaded=counts.bytes_loaded,
        load_gb_s=counts.bytes_loaded / loading / 1e9 if loading else None,
        sent=Sent.of(engine),
        history=tuple(watch.history()),
    )
