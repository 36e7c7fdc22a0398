"""Rows of `bench decode` with PEFT as the system, in the keys of the engine's own rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from slora_ref.bench.decode.cases import DecodeCase, DecodeOptions
from slora_ref.bench.peft_baseline.process import PeftModelSpec, StepTask, measure_peft, versions
from slora_ref.config.presets import preset

HEAD = f"{'':>5} {'batch':>5} {'adapters':>8} {'step':>7} {'floor':>6}  ms"


def peft_rows(say: Callable[[str], None], options: DecodeOptions, device: str = "cuda") -> list[dict[str, Any]]:
    """Every case of the options.

    Raises:
        BaselineFailed: PEFT could not run them.
    """
    cases = options.cases()
    most = max(1, *(case.adapters for case in cases))
    spec = PeftModelSpec(
        config=preset(options.model), kind=options.kind, adapters=most, device=device, dtype=options.dtype
    )
    say(HEAD)
    rows: list[dict[str, Any]] = []
    tasks = [StepTask(case.batch, case.adapters, case.context) for case in cases]
    for case, step_ms in zip(cases, measure_peft(spec, tasks), strict=True):
        rows.append(_row(options, case, step_ms))
        say(f"{'peft':>5} {case.batch:5} {case.adapters:8} {step_ms:7.2f} {rows[-1]['floor_ms']:6.2f}")
    return rows


def _row(options: DecodeOptions, case: DecodeCase, step_ms: float) -> dict[str, Any]:
    return {
        "system": "peft",
        "versions": versions(),
        **options.describe(case),
        "mode": "eager",
        "step_ms": step_ms,
        "floor_ms": case.floor_ms(math.inf),  # of the bytes alone, as the engine's
    }
