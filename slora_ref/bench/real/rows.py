"""The rows of `paper WHAT --device`: a run for real beside the simulator's two answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slora_ref.bench.real.points import EXPERIMENTS, RealPoint
from slora_ref.bench.real.scale import Scale
from slora_ref.bench.real.session import Outcome, RealSession, free_memory, open_real
from slora_ref.bench.real.simulated import simulate
from slora_ref.metrics import percentile

Say = Callable[[str], None]
HEAD = f"{'experiment':13} {'point':40} requests/s  step ms  running  simulated   bound  as slora"


def run_points(experiments: Iterable[str], scale: Scale, say: Say) -> list[dict[str, Any]]:
    """Runs the points of these experiments, each once, in order.

    Raises:
        ConfigError: there is no such device here, or no room.
    """
    rows: list[dict[str, Any]] = []
    say(HEAD)
    with open_real(scale) as session:
        played: dict[RealPoint, Outcome] = {}
        for experiment in experiments:
            for point in EXPERIMENTS[experiment]:
                if point not in played:
                    played[point] = session.run(point)
                    free_memory(scale.device)
                rows.append({"experiment": experiment} | _row(session, point, played))
                say(_line(rows[-1]))
    return rows


def _row(session: RealSession, point: RealPoint, played: Mapping[RealPoint, Outcome]) -> dict[str, Any]:
    scale, outcome = session.scale, played[point]
    firsts = [one.first_token_at - one.arrival for one in outcome.completions if one.first_token_at is not None]
    tokens = sum(len(one.token_ids) for one in outcome.completions)
    return {
        "point": point.name,
        "system": point.system,
        "adapters": point.adapters,
        "adapter_share": point.share,
        "model": scale.model,
        "device": scale.device,
        "ranks": list(scale.kind.ranks),
        "requests": len(outcome.completions),
        "pool_tokens": scale.tight_tokens if point.tight else scale.pool_tokens,
        "seconds": outcome.seconds,
        "steps": len(outcome.running),
        "step_ms": 1e3 * outcome.seconds / len(outcome.running),
        "requests_per_s": outcome.requests_per_s,
        "output_tokens_per_s": tokens / outcome.seconds,
        "first_token_p50_s": percentile(firsts, 50),
        "mean_running": outcome.mean_running,
        "most_running": max(outcome.running),
        "loads": outcome.loads,
        "merges": outcome.merges,
        "first_tokens_as_slora": _agreement(outcome, played.get(_on_the_fly(point))),
    } | _simulated(session, point)


def _on_the_fly(point: RealPoint) -> RealPoint:
    return RealPoint("slora", point.adapters, point.tight)


def _agreement(outcome: Outcome, usual: Outcome | None) -> float | None:
    """Share of requests whose first token is the usual engine's: later ones follow from it, and from rounding."""
    if usual is None:
        return None
    pairs = zip(outcome.completions, usual.completions, strict=True)
    return sum(one.token_ids[0] == other.token_ids[0] for one, other in pairs) / len(usual.completions)


def _simulated(session: RealSession, point: RealPoint) -> dict[str, float | None]:
    """The simulator's requests a second and requests at once, and the most that the data sheet allows."""
    if session.scale.gpu is None:
        return dict.fromkeys(("simulated_requests_per_s", "simulated_running", "bound_requests_per_s"))
    arrivals = session.arrivals(point.adapters)
    (throughput, running), (bound, _) = (simulate(point, session.scale, arrivals, losses) for losses in (True, False))
    return {
        "simulated_requests_per_s": throughput,
        "simulated_running": running,
        "bound_requests_per_s": bound,
    }


def _line(row: Mapping[str, Any]) -> str:
    named = (row["simulated_requests_per_s"], row["bound_requests_per_s"], row["first_tokens_as_slora"])
    simulated, bound, agreement = ("-" if number is None else f"{number:.2f}" for number in named)
    return (
        f"{row['experiment']:13} {row['point']:40} {row['requests_per_s']:10.2f} {row['step_ms']:8.2f} "
        f"{row['mean_running']:8.1f} {simulated:>10} {bound:>7} {agreement:>9}"
    )
