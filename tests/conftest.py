"""What every test shares: shape checks, Hypothesis profiles, and the skip of GPU tests where there is no GPU.

The shape checks wrap the functions and dataclasses of every module that names array dimensions as it is imported, so
this file must come before any import of slora_ref: pytest loads it first. A wrapped call costs 10 us or more, hence not
the modules without arrays, where mypy has seen all there is to see. A test that measures time runs its code in a
subprocess.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

if "slora_ref" in sys.modules:
    raise RuntimeError("slora_ref was imported before tests/conftest.py, so its array shapes would not be checked")


def modules_with_arrays() -> list[str]:
    """The modules of slora_ref that import its array annotations, found without importing them."""
    root = Path(__file__).parents[1]
    sources = [path for path in (root / "slora_ref").rglob("*.py") if "slora_ref.shapes" in path.read_text("utf-8")]
    return [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in sources]


install_import_hook(modules_with_arrays(), "beartype.beartype")

from slora_ref.ops import plan  # noqa: E402  (behind the hook)

AS_SHIPPED = {name: getattr(plan, name) for name in ("TILE_COST", "LEAST_SAVED", "ALONE_BESIDE")}
# the models of tests are small: so their steps reach all kinds of LoRA kernels
plan.TILE_COST, plan.LEAST_SAVED, plan.ALONE_BESIDE = 0, 8, 0


def plan_as_shipped(patch: pytest.MonkeyPatch) -> None:
    """From here on steps are planned as outside of tests."""
    for name, value in AS_SHIPPED.items():
        patch.setattr(plan, name, value)



# `ci` draws the same examples in every run, so a red run can be repeated; --hypothesis-profile thorough is for a night.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile("ci")


@functools.cache
def missing_gpu() -> str:
    """Say why the tests marked `gpu` cannot run here, or return the empty string when they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error}); pip install -e .[cuda12] or .[cuda13]"
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no CUDA device ({error})"
    return "" if devices else "CuPy finds no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` with the reason; pytest counts it and prints it at the end."""
    if item.get_closest_marker("gpu") and (reason := missing_gpu()):
        pytest.skip(reason)
