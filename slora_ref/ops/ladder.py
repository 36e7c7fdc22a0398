"""Ladders: which rung serves a launch, and with which grid, looked up in ops/rungs.py.

A step of a large model prepares hundreds of launches, of which only the addresses differ from layer to layer: what
depends on names and sizes alone is worked out once.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from slora_ref.errors import KernelError
from slora_ref.ops.launch import Arguments, Grid, Launch, Sizes, sizes_of
from slora_ref.ops.layouts import LaidOut
from slora_ref.ops.rungs import RUNGS

MOST_SIZES = 4096  # that are remembered


@cache
def operation_of(kernel: str) -> str:
    """mbgmv_shrink_1_naive -> mbgmv_shrink."""
    words = kernel.split("_")
    return "_".join(words[: next(i for i, word in enumerate(words) if word.isdigit())])


def ladder(operation: str, dtype: Any = np.float32) -> list[str]:
    """The kernels of an operation for a dtype, first rung first.

    Raises:
        KernelError: there is none.
    """
    rungs = _rungs_of(operation, np.dtype(dtype).name)
    if not rungs:
        raise KernelError(f"no kernel of {operation} for {np.dtype(dtype).name}; there are {', '.join(RUNGS)}")
    return list(rungs)


def has_kernel(operation: str, dtype: Any) -> bool:
    """Whether an operation has a kernel for a dtype."""
    return bool(_rungs_of(operation, np.dtype(dtype).name))


@cache
def _rungs_of(operation: str, dtype: str) -> tuple[str, ...]:
    """The ladder, or nothing. Asked for at every launch that is prepared."""
    rungs = [kernel for kernel, rung in RUNGS.items() if operation_of(kernel) == operation and dtype in rung.dtypes]
    return tuple(sorted(rungs, key=lambda kernel: int(kernel.removeprefix(operation + "_").split("_")[0])))


def fastest(operation: str, dtype: Any, arguments: Arguments) -> str:
    """The last rung of the ladder that suits the sizes; those depend on the number of rows alone, so a bucket has one.

    Raises:
        KernelError: there is none.
    """
    return _fastest(operation, np.dtype(dtype), _sizes(arguments))


@lru_cache(MOST_SIZES)
def _fastest(operation: str, dtype: np.dtype[Any], sizes: Sizes) -> str:
    suits = {name: RUNGS[name].suits for name in ladder(operation, dtype)}
    return [name for name, test in suits.items() if test is None or test(_named(sizes, dtype))][-1]


def usable(dtype: Any) -> list[tuple[str, str]]:
    """Every kernel that `fastest` may choose for storage of this dtype, with the dtype that it is compiled for.

    Logits and integers are float32's business, whatever the storage has.
    """
    found, storage = [], np.dtype(dtype).name
    for operation in dict.fromkeys(map(operation_of, RUNGS)):
        kinds = [kind for kind in (storage, "float32") if has_kernel(operation, kind)]
        for kind in kinds[-1:] if operation == "argmax" else kinds[:1]:
            names = ladder(operation, kind)
            always = max(place for place, name in enumerate(names) if RUNGS[name].suits is None)
            found += [(name, kind) for name in names[always:]]
    return found


def _sizes(arguments: Arguments) -> Sizes:
    """See sizes_of."""
    return arguments.layout.sizes if isinstance(arguments, LaidOut) else sizes_of(arguments)


def _named(sizes: Sizes, dtype: np.dtype[Any]) -> SimpleNamespace:
    """Sizes by name, and `nums`, the numbers in 16 bytes."""
    return SimpleNamespace(**dict(sizes), nums=16 // dtype.itemsize)


def make_launch(kernel: str, dtype: Any, arguments: Arguments) -> Launch:
    """The launch of `kernel` with these arguments: looks its grid up and computes it.

    Raises:
        KernelError: the kernel is unknown or not made for the dtype.
    """
    kind = np.dtype(dtype)
    grid, threads, shared, after_start = _geometry(kernel, kind, _sizes(arguments))
    return Launch(kernel, kind, grid, threads, shared, arguments, after_start)


@lru_cache(MOST_SIZES)
def _geometry(kernel: str, dtype: np.dtype[Any], sizes: Sizes) -> tuple[Grid, int, int, bool]:
    """What of a launch depends on sizes alone; the same for all layers of a model."""
    rung = RUNGS.get(kernel)
    if rung is None or dtype.name not in rung.dtypes:
        raise KernelError(f"no kernel {kernel} for {dtype.name}; there are {', '.join(RUNGS)}")
    named = _named(sizes, dtype)
    threads, shared = (size if isinstance(size, int) else size(named) for size in (rung.threads, rung.shared))
    return rung.grid(named), threads, shared, rung.after_start
