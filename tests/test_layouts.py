"""Arguments that are checked once for each layout of arrays: nothing of them depends on which arrays came before."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving import new_engine, without_shape_checks

from slora_ref import SamplingParams
from slora_ref.errors import KernelError
from slora_ref.ops import attention_arguments, launch, lora_arguments, row_arguments
from slora_ref.ops.ladder import make_launch
from slora_ref.ops.layouts import LaidOut


@pytest.fixture(autouse=True)
def _no_shape_checks() -> Iterator[None]:
    """What they refuse would never come to a kernel's own checks."""
    with without_shape_checks():
        yield


def norm(rows: int = 3, hidden: int = 8, dtype: Any = np.float32, **other: Any) -> dict[str, Any]:
    """New arrays for rms_norm, in the order of its parameters."""
    shapes = {"out": (rows, hidden), "x": (rows, hidden), "delta": (rows, hidden), "weight": (hidden,)}
    return {name: np.zeros(shape, dtype) for name, shape in shapes.items()} | {"eps": 1e-5} | other


def made(arrays: dict[str, Any]) -> Any:
    return row_arguments.rms_norm(*arrays.values())


def test_the_next_arrays_of_a_layout_stand_in_the_places_of_the_first() -> None:
    first, second = norm(), norm()
    one, other, fresh = made(first), made(second), row_arguments.rms_norm(**second)
    assert isinstance(other, LaidOut) and other.layout is one.layout and not isinstance(fresh, LaidOut)
    assert list(other) == list(fresh)
    for name, value in fresh.items():
        assert other[name] is value if isinstance(value, np.ndarray) else other[name] == value
        assert type(other[name]) is type(value)
    assert all(one[name] is first[name] for name in ("out", "x", "delta", "weight")), "it is left as it was"
    assert make_launch("rms_norm_1_naive", np.float32, other) == make_launch("rms_norm_1_naive", np.float32, fresh)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 4},
        {"hidden": 16},
        {"dtype": np.float16},
        {"eps": 1e-6},
        {"delta": None},
        {"x": np.zeros((3, 16), np.float32)[:, :8]},
    ],
)
def test_whatever_makes_a_difference_makes_another_layout(change: dict[str, Any]) -> None:
    other, fresh = made(norm(**change)), row_arguments.rms_norm(**norm(**change))
    assert other.layout is not made(norm()).layout
    scalars = [name for name, value in fresh.items() if isinstance(value, np.generic)]
    assert {name: other[name] for name in scalars} == {name: fresh[name] for name in scalars}
    assert (other["delta"] is None) == ("delta" in change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros(8)}, "argument weight: dtype float64, the kernel takes float32; convert it before"),
        ({"out": np.zeros((2, 8), np.float32)}, r"argument out: shape \(2, 8\), the kernel takes \(3, 8\)"),
        ({"delta": np.zeros((3, 16), np.float32)[:, ::2]}, "argument delta: strides .* make it contiguous"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_however_many_fitted_before(
    change: dict[str, Any], message: str
) -> None:
    for _ in range(2):
        made(norm())
        with pytest.raises(KernelError, match=message):
            made(norm(**change))


def test_no_array_is_kept() -> None:
    arrays = norm(rows=5)
    alive = [weakref.ref(value) for value in arrays.values() if isinstance(value, np.ndarray)]
    arguments = made(arrays)
    assert len(alive) == 4 and all(ref() is not None for ref in alive)
    del arrays, arguments
    gc.collect()
    assert not any(ref() is not None for ref in alive)


OF_LAYERS = {"x", "y", "t", "out", "delta", "weight", "qkv", "gate_up", "q", "pages", "page_table", "cos", "sin"}


def test_layers_that_were_prepared_for_one_engine_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of preparing a step, without a clock: what is left are checks of what is launched once a step."""
    checked: Counter[str] = Counter()

    def counting(name: str, *others: Any, **more: Any) -> Any:
        checked[name] += 1
        return launch.check_array(name, *others, **more)

    for module in (row_arguments, lora_arguments, attention_arguments):
        monkeypatch.setattr(module, "check_array", counting)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for _ in range(2):
        checked.clear()
        engine = new_engine({"x": "x", "z": "z"}, on="host")
        engine.generate([[1, 2, 3, 4]] * 3, params, ["x", "z", None])
    assert checked["lora"] and checked["logits"], "what is launched once a step is checked each time"
    assert checked.keys().isdisjoint(OF_LAYERS), checked.keys() & OF_LAYERS
