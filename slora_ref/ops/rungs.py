"""The ladder: every kernel of kernels_cu, and how many blocks and threads it is launched with. All grids are here.

A grid depends on the number of rows, on shapes and on the largest registered rank (t_columns), never on which adapters
run, so that a captured graph stays right; kernels loop or leave early where there is less to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from slora_ref.ops import grids
from slora_ref.ops import lora_grids as lora
from slora_ref.ops.grids import blocks as _blocks
from slora_ref.ops.launch import Grid

HALVES = ("float16", "bfloat16")
ALL = ("float32", *HALVES)


Sized = Callable[[SimpleNamespace], int]  # from a kernel's integer arguments by name, and `nums`: numbers in 16 bytes


@dataclass(frozen=True)
class Rung:
    """How a kernel is launched.

    Args:
        threads: in a block; a number, or a function of the kernel's sizes.
        grid: blocks in each direction, from the kernel's sizes.
        shared: bytes of dynamic shared memory; a number, or from the sizes.
        dtypes: of storage that the kernel has; tensor cores have no float32.
        after_start: begins with wait_for_previous(), so it may be launched before the kernel before it has ended.
        suits: the sizes for which it is the fastest, where those are not all; it is right for all.
    """

    threads: int | Sized
    grid: Callable[[SimpleNamespace], Grid]
    shared: int | Sized = 0
    dtypes: tuple[str, ...] = ALL
    after_start: bool = False
    suits: Callable[[SimpleNamespace], bool] | None = None


RING = 96 << 10  # bytes of shared memory of the tensor core rungs: two blocks on a multiprocessor


RUNGS: Mapping[str, Rung] = {
    "lora_lookup_1_naive": Rung(128, lambda s: (_blocks(s.layers * s.targets * s.entries, 128), 1, 1)),
    "lora_join_1_naive": Rung(
        128, lambda s: (_blocks(s.targets * s.t_columns, 128), s.rows, s.splits), 0, ("float32",), after_start=True
    ),
    "peer_reduce_1_push": Rung(512, lambda s: (_blocks(s.chunks, 512), 1, 1), after_start=True),
    "peer_gather_1_push": Rung(512, lambda s: (_blocks(s.chunks, 512), 1, 1), dtypes=("float32",), after_start=True),
    "mbgmv_shrink_1_naive": Rung(64, lambda s: (s.rows, s.targets, s.splits)),
    "mbgmv_expand_1_naive": Rung(128, lambda s: (_blocks(lora.outputs(s), 128), s.rows, 1), after_start=True),
    "mbgmv_shrink_2_warp": Rung(128, lambda s: (_blocks(s.t_columns, 4), s.rows, s.targets * s.splits)),
    "mbgmv_expand_2_vector": Rung(
        128, lambda s: (lora.runs(s, 128), s.rows, 1), lambda s: 4 * s.t_columns, after_start=True
    ),
    "mbgmv_shrink_3_in_flight": Rung(
        128,
        lambda s: (
            _blocks(s.t_columns, 4 * lora.warp_columns(s)),
            lora.row_blocks(s, 4 * lora.warp_columns(s), 4),
            s.targets * s.splits,
        ),
        0,
        HALVES,
        after_start=True,
    ),
    "mbgmv_shrink_4_tensor_cores": Rung(
        256,
        lambda s: (_blocks(s.t_columns, 8), lora.row_blocks(s, 8, 2), s.targets * s.splits),
        0,
        HALVES,
        after_start=True,
        suits=lambda s: lora.warp_columns(s) == 1,
    ),
    "mbgmv_expand_3_in_flight": Rung(
        128,
        lambda s: (lora.runs(s, lora.expand_lanes(s)), min(s.rows, lora.MOST_BESIDE), 1),
        lambda s: 4 * (s.t_columns + 64),
        HALVES,
        after_start=True,
    ),
    "mbgmv_expand_4_lean": Rung(
        128,
        lambda s: (lora.runs(s, 128), min(s.rows, lora.MOST_BESIDE), 1),
        0,
        HALVES,
        after_start=True,
        suits=lora.is_lean,
    ),
    "mbgmm_shrink_1_naive": Rung(128, lambda s: (s.tile_count, s.targets, s.splits)),
    "mbgmm_expand_1_naive": Rung(128, lambda s: (_blocks(lora.outputs(s), 128), s.tile_count, 1), after_start=True),
    "mbgmm_shrink_2_rows": Rung(128, lambda s: (s.tile_count, s.targets, s.splits)),
    "mbgmm_expand_2_rows": Rung(128, lambda s: (_blocks(lora.outputs(s), 128), s.tile_count, 1), after_start=True),
    "mbgmm_shrink_3_tensor_cores": Rung(
        256,
        lambda s: (s.splits, lora.shrink_blocks(s), lora.tile_blocks(s, s.splits * lora.shrink_blocks(s), 384)),
        0,
        HALVES,
        after_start=True,
    ),
    "mbgmm_shrink_4_staged": Rung(
        256,
        lambda s: (lora.tile_blocks(s, s.splits * s.targets, 256), s.targets, s.splits),
        RING,
        HALVES,
        after_start=True,
        suits=lambda s: s.rows > 512,
    ),
    "mbgmm_expand_3_tensor_cores": Rung(
        256, lambda s: (lora.runs(s, 32), lora.tile_blocks(s, lora.runs(s, 32), 1024), 1), 0, HALVES, after_start=True
    ),
    "mbgmm_expand_4_staged": Rung(
        256,
        lambda s: (lora.runs(s, 128), lora.tile_blocks(s, lora.runs(s, 128), 512), 1),
        RING,
        HALVES,
        after_start=True,
        suits=lambda s: s.rows > 512,
    ),
    "lora_shrink_1_together": Rung(
        128,
        lambda s: lora.together(s, s.splits * s.targets * _blocks(s.t_columns, 16), 3),
        0,
        HALVES,
        after_start=True,
    ),
    "lora_expand_1_together": Rung(
        128, lambda s: lora.together(s, lora.runs(s, 32), 3), lambda s: 4 * (s.t_columns + 64), HALVES, after_start=True
    ),
    "lora_expand_2_slabs": Rung(
        128, lambda s: lora.together(s, lora.runs(s, 32), 5), lambda s: 4 * (s.t_columns + 64), HALVES, after_start=True
    ),
    "pad_adapter_1_copy": Rung(128, lambda s: (s.columns, s.targets, s.entries)),
    "paged_attention_decode_1_naive": Rung(128, lambda s: (s.heads, s.rows, s.splits), grids.attention_words),
    "paged_attention_decode_2_vector": Rung(
        256, lambda s: (s.heads, s.rows, s.splits), lambda s: 4 * 8 * s.head_dim, suits=grids.fits_registers
    ),
    "paged_attention_decode_3_in_flight": Rung(
        256,
        lambda s: (grids.decode_blocks(s), s.rows, s.splits),
        lambda s: 4 * 8 * 256 * grids.shared_by(s),
        HALVES,
        after_start=True,
        suits=grids.fits_registers,
    ),
    "paged_attention_merge_1_naive": Rung(128, lambda s: (s.heads, s.rows, 1), after_start=True),
    "paged_attention_merge_2_warp": Rung(128, lambda s: (_blocks(s.heads, 4), s.rows, 1), after_start=True),
    "paged_attention_prefill_1_naive": Rung(128, lambda s: (s.heads, s.tile_count, 1), grids.attention_words),
    "paged_attention_prefill_2_rows": Rung(
        128, lambda s: (s.heads, s.tile_count, 1), grids.staged_rows, suits=grids.fits_registers
    ),
    "paged_attention_prefill_3_tensor_cores": Rung(
        128,
        lambda s: (s.heads, lora.tile_blocks(s, s.heads, 8192), 1),
        48 << 10,
        HALVES,
        after_start=True,
        suits=grids.fits_registers,
    ),
    "rope_store_1_naive": Rung(128, lambda s: (s.rows, 1, 1)),
    "rope_store_2_vector": Rung(128, lambda s: (_blocks(grids.pieces(s), 128), s.rows, 1), after_start=True),
    "rms_norm_1_naive": Rung(128, lambda s: (s.rows, 1, 1), lambda s: 4 * 128),
    "rms_norm_2_vector": Rung(256, lambda s: (s.rows, 1, 1)),
    "rms_norm_3_registers": Rung(grids.norm_threads, lambda s: (s.rows, 1, 1), after_start=True),
    "silu_mul_1_naive": Rung(128, lambda s: (_blocks(s.ffn, 128), s.rows, 1)),
    "silu_mul_2_vector": Rung(128, lambda s: (_blocks(s.ffn, 128 * 8), s.rows, 1)),
    "gather_rows_1_naive": Rung(256, lambda s: (_blocks(s.columns, 256), s.rows, 1)),
    "enter_tokens_1_naive": Rung(128, lambda s: (_blocks(s.rows, 128), 1, 1), dtypes=("float32",)),
    "enter_pages_1_naive": Rung(128, lambda s: (_blocks(s.rows, 128), 1, 1), dtypes=("float32",)),
    "sample_threshold_1_bisection": Rung(1024, lambda s: (s.rows, 1, 1), dtypes=("float32",)),
    "sample_draw_1_philox": Rung(1024, lambda s: (s.rows, 1, 1), dtypes=("float32",)),
    "argmax_1_naive": Rung(128, lambda s: (s.rows, 1, 1), lambda s: 12 * 128),
    "argmax_2_vector": Rung(512, lambda s: (s.rows, 1, 1)),
    "argmax_3_in_flight": Rung(512, lambda s: (s.rows, 1, 1)),
    "load_pages_1_naive": Rung(256, lambda s: (min(16, _blocks(s.layers * s.count * s.width, 256)), 1, 1)),
    "load_pages_2_vector": Rung(512, lambda s: (min(16, _blocks(s.layers * s.count * s.width, 512 * 8)), 1, 1)),
    "load_pages_3_whole_pages": Rung(
        512, lambda s: (min(16, _blocks(s.layers * s.count * s.width, 512 * 8)), 1, 1), after_start=True
    ),
}
