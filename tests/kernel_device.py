"""The arrays of a case on a GPU and back, gaps between rows included. Imported only where there is CuPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from kernel_cases import has_gaps


def on_device(arguments: dict[str, Any], run: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Copies the arrays to the device, runs, and copies them back."""
    device = {name: to_device(value) for name, value in arguments.items()}
    run(device)
    return {name: to_host(value, arguments[name]) for name, value in device.items()}


def to_device(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if not has_gaps(value):
        return cupy.asarray(value)
    return cupy.asarray(value.base)[..., : value.shape[-1]]


def to_host(value: Any, before: Any) -> Any:
    if not isinstance(value, cupy.ndarray):
        return value
    if not has_gaps(before):
        return cupy.asnumpy(value)
    return cupy.asnumpy(value.base)[..., : value.shape[-1]]
