"""What `bench kernels` says of a result, on the CPU: NumPy stands in for CuPy, and g++ for NVRTC."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from slora_ref.ops.host_kernels import HostKernels
from slora_ref.ops.ladder import fastest, has_kernel, make_launch, operation_of
from slora_ref.ops.rungs import RUNGS

PACKAGE = "slora_ref.bench.kernels"
OUTPUT = {"lora_lookup": "lora", "lora_join": "t", "enter_pages": "sequence_pages", "gather_rows": "out"}
OUTPUT |= {"sample_threshold": "keep", "sample_draw": "token", "enter_tokens": "token_ids"}
OUTPUT |= {"peer_reduce": "x", "peer_gather": "gathered"}
OF_BASELINES = {"pad_adapter"}  # timed with the baseline that needs it


def with_cupy() -> list[str]:
    """The modules that have been imported with it, or with what stands in for it."""
    return [name for name in sys.modules if name.startswith((PACKAGE, "slora_ref.ops.cuda_"))]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the kernels that run once a step, with fewer layers and tokens; nobody else sees it so."""
    for name in with_cupy():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", np)
    module = importlib.import_module(f"{PACKAGE}.step")
    for name, value in {"LAYERS": 3, "VOCAB": 2000}.items():
        monkeypatch.setattr(module, name, value)
    yield module
    for name in with_cupy():
        del sys.modules[name]


def test_a_right_result_has_no_error_and_a_wrong_one_has(step: Any) -> None:
    kernels, random = HostKernels(), np.random.default_rng(1)
    for case in step.step_cases(6):
        before = case.make(random)
        after = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in before.items()}
        kernels.run(make_launch(fastest(case.operation, case.dtype, after), case.dtype, after))
        assert case.check(before, after) == 0, case.operation
        output = after[OUTPUT[case.operation]]
        output[...] = output[::-1] if case.operation == "gather_rows" else 1
        assert case.check(before, after) == 1, case.operation


def test_every_operation_is_measured(step: Any) -> None:
    ladder, rows, attention = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("ladder", "rows", "others"))
    halves = {f"{kind}_{half}" for kind in ladder.LADDERS for half in ("shrink", "expand")}
    others = {case.operation for case in (*rows.row_cases(), *step.step_cases(1))}
    measured = halves | others | set(attention.ATTENTION_LADDERS.values()) | {"load_pages"}
    assert measured == {operation_of(kernel) for kernel in RUNGS} - OF_BASELINES
    assert all(has_kernel(case.operation, case.dtype) for case in step.step_cases(1))
