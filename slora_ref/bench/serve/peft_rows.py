"""Rows of `bench serve` with PEFT as the system, in the keys of the engine's own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slora_ref.bench.peft_baseline.process import (
    BaselineFailed,
    PeftModelSpec,
    ServedTrace,
    TraceTask,
    measure_peft,
    versions,
)
from slora_ref.bench.serve.options import ServeOptions
from slora_ref.bench.serve.traffic import draw_traffic
from slora_ref.metrics import percentile
from slora_ref.simulate.datasheet import PEFT_BATCH

MOST = PEFT_BATCH["S1", "a100-80"]  # requests in a batch: the paper's authors' for a 7B model and 80 GB
SETS = 16  # adapters that PEFT holds; with more of them each change of adapter takes it longer
HEAD = "registered requests/s PEFT, batches of one adapter"


def peft_rows(say: Callable[[str], None], options: ServeOptions, limit_s: float) -> list[dict[str, Any]]:
    """The traffic of each number of registered adapters; as much of it as `limit_s` seconds allow.

    Adapters stay on the device: loading them is not in PEFT's time.

    Raises:
        BaselineFailed: PEFT could not run it.
    """
    engine = options.engine_config()
    spec = PeftModelSpec(
        config=options.model_config(),
        kind=options.kind,
        adapters=min(SETS, options.distinct, max(options.registered)),
        device=options.device,
        dtype=engine.dtype,
    )
    most = min(MOST, engine.max_running)
    counts = list(dict.fromkeys(options.registered))
    tasks = [TraceTask(draw_traffic(options, registered), most, limit_s) for registered in counts]
    say(HEAD)
    rows: list[dict[str, Any]] = []
    for registered, run in zip(counts, measure_peft(spec, tasks), strict=True):
        if not run.served:
            raise BaselineFailed(f"PEFT served no request within {limit_s:g} s: give it more seconds")
        rows.append(_row(options, registered, run) | {"max_running": most})
        served = f"{len(run.served):,} of {options.requests:,} requests in {run.seconds:.1f} s"
        say(f"{registered:10,} {rows[-1]['requests_per_s']:10.2f} {served}")
    return rows


def _row(options: ServeOptions, registered: int, run: ServedTrace) -> dict[str, Any]:
    return {
        "system": "peft",
        "versions": versions(),
        "model": options.model,
        "device": options.device,
        "registered": registered,
        "ranks": list(options.kind.ranks),
        "popularity": options.popularity,
        "requests": len(run.served),
        "requests_of_trace": options.requests,
        "rate": options.rate,
        "adapters": len({one.adapter for one in run.served}),
        "shards": 1,
        "batches": run.batches,
        "seconds": run.seconds,
        "requests_per_s": len(run.served) / run.seconds,
        "output_tokens_per_s": sum(one.output for one in run.served) / run.seconds,
        "computed_tokens_per_s": run.computed_tokens / run.seconds,
        "first_token_p50_s": percentile(run.first_token_s, 50),
        "first_token_p99_s": percentile(run.first_token_s, 99),
    }
