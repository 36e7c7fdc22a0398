"""The rows of `bench serve` and `bench load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slora_ref.bench.decode.cases import BYTES_PER_S
from slora_ref.bench.machine import link_gb_s, matmul_tflops
from slora_ref.bench.serve.options import ServeOptions
from slora_ref.bench.serve.peft_rows import peft_rows
from slora_ref.bench.serve.session import Run, open_session
from slora_ref.metrics import percentile

Say = Callable[[str], None]
SERVE_HEAD = "registered requests/s of first by bytes waits p99   hits  loads prepared"
LOAD_HEAD = "registered policy  loads        MB   GB/s  hidden waits p99   hits"


def bench_serve(
    say: Say, options: ServeOptions, after_run: Callable[[Run], None] = lambda run: None
) -> list[dict[str, Any]]:
    """Throughput by number of registered adapters.

    `loss_by_bytes` is what the adapters' own bytes explain: the share of throughput that is lost against the first row
    if its steps take as much longer as the device needs to read the adapters that this row read more.

    PEFT's rows come last, though it serves first: see its package. Their floor is that of the same traffic.

    Args:
        after_run: takes each run, for a picture.

    Raises:
        BaselineFailed: PEFT could not serve it.
    """
    peft = [] if options.peft is None else peft_rows(say, options, options.peft)
    on_gpu = options.device == "cuda"
    tflops, link = matmul_tflops() if on_gpu else None, link_gb_s(on_gpu)
    rows: list[dict[str, Any]] = []
    say(SERVE_HEAD)
    with open_session(options, tflops) as session:
        first: Run | None = None
        for registered in options.registered:
            run = session.run(registered, options.eviction[0])
            first = first or run
            after_run(run)
            rows.append(_serve_row(options, run, first, link))
            say(_serve_line(rows[-1]))
    floors = {row["registered"]: row["floor_requests_per_s"] for row in rows}
    return rows + [row | {"floor_requests_per_s": floors[row["registered"]]} for row in peft]


def bench_load(say: Say, options: ServeOptions) -> list[dict[str, Any]]:
    """Loads by eviction policy and number of registered adapters, on the same traffic."""
    rows = []
    say(LOAD_HEAD)
    link = link_gb_s(options.device == "cuda")
    with open_session(options) as session:
        for registered in options.registered:
            for eviction in options.eviction:
                rows.append(_common(options, session.run(registered, eviction), eviction, link))
                say(_load_line(rows[-1]))
    return rows


def _common(options: ServeOptions, run: Run, eviction: str, link: float) -> dict[str, Any]:
    """What both measurements say of a run."""
    counts, waits = run.counts, [one.adapter_wait_steps for one in run.completions]
    return {
        "model": options.model,
        "device": options.device,
        "registered": run.registered,
        "ranks": list(options.kind.ranks),
        "popularity": options.popularity,
        "requests": len(run.completions),
        "rate": options.rate,
        "policy": eviction,
        "loads": counts.loads,
        "loads_ahead": counts.loads_ahead,
        "bytes": counts.bytes_loaded,
        "evictions": counts.evictions,
        "hit_rate": counts.hits / len(run.completions),
        "waiting_steps_p99": percentile(waits, 99),
        "waiting_p99_s": percentile([one.adapter_wait_s for one in run.completions], 99),
        "stalled_s": counts.stalled_s,
        "load_s": run.load_s,
        "gb_s": counts.bytes_loaded / run.load_s / 1e9 if run.load_s else None,
        "link_gb_s": link,
        "hidden_fraction": max(0.0, 1 - counts.stalled_s / run.load_s) if run.load_s else None,
        "reads": run.reads,
        "bytes_read": run.bytes_read,
        "register_s": run.register_s,
        "seconds": run.seconds,
        "steps": len(run.meter.started),
        "rows_a_step": run.meter.rows / len(run.meter.started),
        "idle_fraction": None if run.device_s is None else max(0.0, 1 - run.device_s / run.seconds),
        "prepared_tapes": run.prepared.tapes,
        "prepared_s": run.prepared.tapes_s,
        "captured_graphs": run.prepared.graphs,
        "captured_s": run.prepared.graphs_s,
        "max_running": options.engine_config().max_running,
        "max_batched_tokens": options.engine_config().max_batched_tokens,
        "join_every": options.join_every,
    }


def _serve_row(options: ServeOptions, run: Run, first: Run, link: float) -> dict[str, Any]:
    tokens = sum(len(one.token_ids) for one in run.completions)
    firsts = [one.first_token_at - one.arrival for one in run.completions if one.first_token_at is not None]
    extra_s = (run.meter.adapter_bytes - first.meter.adapter_bytes) / BYTES_PER_S
    on_gpu = options.device == "cuda"
    return _common(options, run, options.eviction[0], link) | {
        "system": "slora_ref",
        "adapters": len({one.adapter for one in run.completions} - {None}),
        "distinct": options.distinct,
        "own_copies": options.own_copies,
        "shards": options.shards,
        "requests_per_s": run.requests_per_s,
        "output_tokens_per_s": tokens / run.seconds,
        "first_token_p50_s": percentile(firsts, 50),
        "first_token_p99_s": percentile(firsts, 99),
        "floor_requests_per_s": len(run.completions) / run.meter.floor_s if on_gpu else None,
        "adapter_bytes_of_steps": run.meter.adapter_bytes,
        "of_first": run.requests_per_s / first.requests_per_s,
        "loss_by_bytes": extra_s / (first.seconds + extra_s) if on_gpu else None,
    }


def _serve_line(row: dict[str, Any]) -> str:
    explained = "-" if row["loss_by_bytes"] is None else f"{1 - row['loss_by_bytes']:.3f}"
    return (
        f"{row['registered']:10,} {row['requests_per_s']:10.2f} {row['of_first']:8.3f} {explained:>8} "
        f"{row['waiting_steps_p99']:9.1f} {row['hit_rate']:6.1%} {row['loads']:6,} "
        f"{row['prepared_s']:7.2f}s"
    )


def _load_line(row: dict[str, Any]) -> str:
    gb_s, hidden = (row[name] for name in ("gb_s", "hidden_fraction"))
    return (
        f"{row['registered']:10,} {row['policy']:>6} {row['loads']:6,} {row['bytes'] / 1e6:9,.1f} "
        f"{'-' if gb_s is None else f'{gb_s:.2f}':>6} {'-' if hidden is None else f'{hidden:.1%}':>7} "
        f"{row['waiting_steps_p99']:9.1f} {row['hit_rate']:6.1%}"
    )
