"""Ablations: merging (Figure 9), early abort (Figure 10), clusters (Figures 11, 12; paper 7.5, appendix A)."""

from __future__ import annotations

from slora_ref.paper.points import Point, measured
from slora_ref.paper.run import Run
from slora_ref.paper.theirs import pair, table
from slora_ref.simulate.datasheet import POOL_TOKENS

CLUSTERS = (1, 2, 4, 8, 32)


def fig9() -> list[Point]:
    """Merging weights and switching, against computing on the fly."""
    points = []
    for row in table("fig9_merge_a10g"):
        for column in ("512x512", "512x1024", "1024x512", "1024x1024"):
            prompt, output = (int(side) for side in column.split("x"))
            run = Run(
                setting="S2",
                gpu="a10g",
                adapters=int(row["n"]),
                alpha=float(row["alpha"]),
                rate=2.0,
                duration=60.0,
                prompt=(8, prompt),
                output=(8, output),
                system=row["mode"],
            )
            name = f"n={row['n']} alpha={row['alpha']} {column} {row['mode']}"
            points.append(Point(name=name, run=run, theirs=measured({"throughput": row[column]})))
    return points


def fig10() -> list[Point]:
    """FCFS, LCFS and early abort against the burstiness of arrivals."""
    panels = [("fig10_s2_a10g_abort", "S2", "a10g", 200, 2.0), ("fig10_s4_a100_80_abort", "S4", "a100-80", 400, 6.0)]
    points = []
    for source, setting, gpu, adapters, rate in panels:
        for row in table(source):
            for title in ("FCFS", "LCFS", "Abort"):
                columns = {"throughput": "thr", "attainment": "SLO", "satisfaction": "sat"}
                theirs = measured({metric: row[f"{title} {column}"] for metric, column in columns.items()})
                policy, cv = title.lower(), float(row["cv"])
                run = Run(setting=setting, gpu=gpu, adapters=adapters, rate=rate, cv=cv, policy=policy)
                points.append(Point(name=f"{setting} {gpu} cv={row['cv']} {policy}", run=run, theirs=theirs))
    return points


def fig11() -> list[Point]:
    """Clusters against the skew of popularity. The commands say A10G, with its pool; only an A100-40 fits."""
    panels = [("fig11_s2_clusters_alpha", "S2", "a100-40"), ("fig11_s4_clusters_alpha", "S4", "a100-40")]
    return [
        _clusters(row[f"d={d}"], d, setting, gpu, alpha=float(row["alpha"]))
        for source, setting, gpu in panels
        for row in table(source)
        for d in CLUSTERS
    ]


def fig12() -> list[Point]:
    """Clusters against the burstiness of arrivals."""
    return [
        _clusters(row[f"d={d}"], d, "S2", "a10g", cv=float(row["cv"]))
        for row in table("fig12_s2_clusters_cv")
        for d in CLUSTERS
    ]


def _clusters(cell: str, d: int, setting: str, gpu: str, alpha: float = 1.0, cv: float = 1.0) -> Point:
    throughput, attainment = pair(cell)
    run = Run(
        setting=setting,
        gpu=gpu,
        adapters=32,
        rate=2.0,
        duration=120.0,
        alpha=alpha,
        cv=cv,
        policy="clusters",
        clusters=d,
        pool_tokens=POOL_TOKENS["llama-7b", "a10g"] if setting == "S2" else None,
    )
    name = f"{setting} {gpu} alpha={alpha:g} cv={cv:g} d={d}"
    return Point(name=name, run=run, theirs={"throughput": throughput, "attainment": attainment})
