"""Throughput and latency against number of adapters and rate: Tables 3 to 5, Figures 5 to 7 (paper 7.2, 7.3)."""

from __future__ import annotations

from slora_ref.paper.points import Point, measured
from slora_ref.paper.run import Run
from slora_ref.paper.theirs import Row, table
from slora_ref.simulate.datasheet import BMM_TOKENS, NO_UNIFY_TOKENS

SYSTEMS = {"slora": "S-LoRA", "no-unify": "no-unify", "bmm": "bmm"}
"""Our names and the authors' columns."""

TABLE3_RATE, TABLE3_SECONDS = 10.0, 120.0


def _pool(system: str, setting: str, gpu: str, adapters: int) -> int | None:
    """The pool that the authors typed for a baseline; None: the setting's own."""
    sizes = {"no-unify": NO_UNIFY_TOKENS, "bmm": BMM_TOKENS}.get(system, {}).get((setting, gpu), {})
    fitting = [tokens for least, tokens in sizes.items() if adapters >= least]
    return fitting[-1] if fitting else None


def _points(row: Row, setting: str, gpu: str, adapters: int, rate: float, columns: dict[str, str]) -> list[Point]:
    """One row of a file with columns for each system."""
    points = []
    for system, title in SYSTEMS.items():
        theirs = measured({metric: row[f"{title} {column}"] for metric, column in columns.items()})
        pool = _pool(system, setting, gpu, adapters)
        run = Run(setting=setting, gpu=gpu, adapters=adapters, rate=rate, system=system, pool_tokens=pool)
        if theirs:
            points.append(Point(name=f"{setting} {gpu} n={adapters} R={rate:g} {system}", run=run, theirs=theirs))
    return points


def fig5() -> list[Point]:
    """Throughput and latency against the number of adapters, with both ablations."""
    panels = [
        ("fig5_s1_a10g", "S1", "a10g", 2.0),
        ("fig5_s2_a10g", "S2", "a10g", 2.0),
        ("fig5_s4_a100_40", "S4", "a100-40", 2.0),
        ("fig5_s2_a100_80", "S2", "a100-80", 10.0),
        ("fig5_s4_a100_80", "S4", "a100-80", 6.0),
    ]
    columns = {"throughput": "thr", "latency": "lat"}
    return [
        point
        for source, setting, gpu, rate in panels
        for row in table(source)
        for point in _points(row, setting, gpu, int(row["num_adapters"]), rate, columns)
    ]


def fig6() -> list[Point]:
    """Throughput, first token and attainment against the rate."""
    panels = [("fig6_s2_a10g", "S2", "a10g", 200), ("fig6_s4_a100_80", "S4", "a100-80", 400)]
    points = []
    for source, setting, gpu, adapters in panels:
        for row in table(source):
            columns = {"throughput": "thr", "first_token": "TTFT", "attainment": "SLO"}
            points += _points(row, setting, gpu, adapters, float(row["req_rate"]), columns)
    return [_without_placeholders(point) for point in points]


def _without_placeholders(point: Point) -> Point:
    """Of S4's bmm only the throughput was measured; its other numbers are placeholders."""
    if point.run.setting == "S4" and point.run.system == "bmm":
        theirs = {"throughput": point.theirs["throughput"]}
        return Point(name=point.name, run=point.run, theirs=theirs, note="first token and attainment are placeholders")
    return point


def fig7() -> list[Point]:
    """The real trace, which is private: a stand-in with its means."""
    points = []
    for row in table("fig7_s2_a10g"):
        for system, title in SYSTEMS.items():
            columns = {"throughput": "thr", "first_token": "TTFT", "attainment": "SLO"}
            theirs = measured({metric: row[f"{title} {column}"] for metric, column in columns.items()})
            rate = float(row["req_rate"])
            pool = _pool(system, "S2", "a10g", 26)
            run = Run(
                setting="S2", gpu="a10g", adapters=26, rate=rate, system=system, pool_tokens=pool, trace="arena"
            )
            if theirs:
                name = f"S2 a10g arena R={rate:g} {system}"
                points.append(Point(name=name, run=run, theirs=theirs, note="a stand-in for the private trace"))
    return points


def table3() -> list[Point]:
    """S-LoRA, vLLM-packed and PEFT on an A100-80."""
    first_tokens = {(row["setting"], row["n"]): row for row in table("table3_first_token")}
    points = []
    for row in table("table3_a100_80"):
        extra = first_tokens.get((row["setting"], row["n"]), {})
        for system, column in (("slora", "slora"), ("packed", "vllm_packed"), ("peft", "peft")):
            cells = {"throughput": row[column]}
            if system == "slora" and extra:
                cells |= {"first_token": extra["TTFT"], "attainment": extra["SLO"]}
            theirs = measured(cells)
            run = _table3_run(row["setting"], int(row["n"]), system)
            if theirs:
                points.append(Point(name=f"{row['setting']} a100-80 n={row['n']} {system}", run=run, theirs=theirs))
    return points


def _table3_run(setting: str, adapters: int, system: str) -> Run:
    """R = 10 for 120 s; but S4 with 1,000 adapters is the run of 300 s with R = 6, and PEFT's on S4 have R = 6."""
    longer = setting == "S4" and adapters == 1000
    rate = 6.0 if longer or (setting, system) == ("S4", "peft") else TABLE3_RATE
    seconds = 300.0 if longer else TABLE3_SECONDS
    return Run(setting=setting, gpu="a100-80", adapters=adapters, rate=rate, duration=seconds, system=system)


def table4() -> list[Point]:
    """PEFT against the number of adapters."""
    return [_peft(row, int(row["num_adapters"]), 2.0) for row in table("table4_peft_s1_a10g")]


def table5() -> list[Point]:
    """PEFT against the rate."""
    return [_peft(row, 200, float(row["req_rate"])) for row in table("table5_peft_s1_a10g")]


def _peft(row: Row, adapters: int, rate: float) -> Point:
    cells = {"throughput": row["thr req/s"], "latency": row["avg latency s"], "first_token": row["TTFT s"]}
    run = Run(setting="S1", gpu="a10g", adapters=adapters, rate=rate, system="peft")
    return Point(name=f"S1 a10g n={adapters} R={rate:g} peft", run=run, theirs=measured(cells))
