"""The ladder: every kernel of kernels_cu, and how many blocks and threads it is launched with. All grids are here.

A grid depends on the number of rows, on shapes and on the largest registered rank (t_columns), never on which adapters
run, so that a captured graph stays right; kernels loop or leave early where there is less to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from slora_ref.errors import KernelError
from slora_ref.ops.launch import Arguments, Grid, Launch

HALVES = ("float16", "bfloat16")
ALL = ("float32", *HALVES)


def _none(sizes: SimpleNamespace) -> int:
    return 0


@dataclass(frozen=True)
class Rung:
    """How a kernel is launched.

    Args:
        threads: in a block.
        grid: blocks in each direction, from the kernel's integer arguments by name.
        shared: bytes of dynamic shared memory, from the same.
        dtypes: of storage that the kernel has; tensor cores have no float32.
        after_start: begins with wait_for_previous(), so it may be launched before the kernel before it has ended.
    """

    threads: int
    grid: Callable[[SimpleNamespace], Grid]
    shared: Callable[[SimpleNamespace], int] = _none
    dtypes: tuple[str, ...] = ALL
    after_start: bool = False


def _blocks(items: int, each: int) -> int:
    return max(1, -(-items // each))


def _outputs(sizes: SimpleNamespace) -> int:
    return int(sizes.d_out0 + sizes.d_out1 + sizes.d_out2)


def _attention_words(sizes: SimpleNamespace) -> int:
    """Scores of a block's threads and a sum for each column of a head."""
    return int(4 * (128 + sizes.head_dim))


RUNGS: Mapping[str, Rung] = {
    "lora_lookup_1_naive": Rung(128, lambda s: (_blocks(s.layers * s.targets * s.entries, 128), 1, 1)),
    "mbgmv_shrink_1_naive": Rung(64, lambda s: (s.rows, s.targets, s.splits)),
    "mbgmv_expand_1_naive": Rung(128, lambda s: (_blocks(_outputs(s), 128), s.rows, 1), after_start=True),
    "mbgmm_shrink_1_naive": Rung(128, lambda s: (s.tile_count, s.targets, s.splits)),
    "mbgmm_expand_1_naive": Rung(128, lambda s: (_blocks(_outputs(s), 128), s.tile_count, 1), after_start=True),
    "paged_attention_decode_1_naive": Rung(128, lambda s: (s.heads, s.rows, s.splits), _attention_words),
    "paged_attention_merge_1_naive": Rung(128, lambda s: (s.heads, s.rows, 1), after_start=True),
    "paged_attention_prefill_1_naive": Rung(128, lambda s: (s.heads, s.tile_count, 1), _attention_words),
    "rope_store_1_naive": Rung(128, lambda s: (s.rows, 1, 1)),
    "rms_norm_1_naive": Rung(128, lambda s: (s.rows, 1, 1), lambda s: 4 * 128),
    "rms_norm_2_vector": Rung(256, lambda s: (s.rows, 1, 1)),
    "silu_mul_1_naive": Rung(128, lambda s: (_blocks(s.ffn, 128), s.rows, 1)),
    "silu_mul_2_vector": Rung(128, lambda s: (_blocks(s.ffn, 128 * 8), s.rows, 1)),
    "argmax_1_naive": Rung(128, lambda s: (s.rows, 1, 1), lambda s: 12 * 128),
    "argmax_2_vector": Rung(512, lambda s: (s.rows, 1, 1)),
    "load_pages_1_naive": Rung(256, lambda s: (min(16, _blocks(s.layers * s.count * s.width, 256)), 1, 1)),
    "load_pages_2_vector": Rung(512, lambda s: (min(16, _blocks(s.layers * s.count * s.width, 512 * 8)), 1, 1)),
}


def operation_of(kernel: str) -> str:
    """mbgmv_shrink_1_naive -> mbgmv_shrink."""
    words = kernel.split("_")
    return "_".join(words[: next(i for i, word in enumerate(words) if word.isdigit())])


def ladder(operation: str, dtype: Any = np.float32) -> list[str]:
    """The kernels of an operation for a dtype, first rung first.

    Raises:
        KernelError: there is none.
    """
    name = np.dtype(dtype).name
    rungs = [kernel for kernel, rung in RUNGS.items() if operation_of(kernel) == operation and name in rung.dtypes]
    if not rungs:
        raise KernelError(f"no kernel of {operation} for {name}; there are {', '.join(RUNGS)}")
    return sorted(rungs, key=lambda kernel: int(kernel.removeprefix(operation + "_").split("_")[0]))


def make_launch(kernel: str, dtype: Any, arguments: Arguments) -> Launch:
    """The launch of `kernel` with these arguments: looks its grid up and computes it.

    Raises:
        KernelError: the kernel is unknown or not made for the dtype.
    """
    rung = RUNGS.get(kernel)
    if rung is None or np.dtype(dtype).name not in rung.dtypes:
        raise KernelError(f"no kernel {kernel} for {np.dtype(dtype).name}; there are {', '.join(RUNGS)}")
    sizes = SimpleNamespace(**{name: int(value) for name, value in arguments.items() if isinstance(value, np.integer)})
    grid = rung.grid(sizes)
    return Launch(kernel, np.dtype(dtype), grid, rung.threads, rung.shared(sizes), arguments, rung.after_start)
