"""Throughput on several GPUs: Figure 8 (paper 7.4): all, without the adapters' messages, and the base model alone."""

from __future__ import annotations

from slora_ref.paper.points import Point
from slora_ref.paper.run import Run
from slora_ref.paper.theirs import table

SETTING = {"30B": "S5", "70B": "S6"}
COLUMNS = {"slora": "slora", "no-lora-messages": "without_lora_communication", "base": "base_only"}
RATE, SECONDS = 10.0, 120.0
"""Of the trace: not on record, and taken from table 3; more than any of these systems can serve."""


def fig8() -> list[Point]:
    """2 and 4 GPUs, 10 and 100 adapters. The base model's trace has no adapters, whatever their number."""
    return [
        Point(
            name=f"{SETTING[row['model']]} {row['gpu'].lower()} gpus={row['gpus']} n={row['n']} {name}",
            run=Run(
                setting=SETTING[row["model"]],
                gpu=row["gpu"].lower(),
                adapters=0 if name == "base" else int(row["n"]),
                rate=RATE,
                duration=SECONDS,
                system="slora" if name == "base" else name,
                shards=int(row["gpus"]),
            ),
            theirs={"throughput": float(row[column])},
        )
        for row in table("fig8_tensor_parallel")
        for name, column in COLUMNS.items()
    ]
