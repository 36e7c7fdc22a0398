"""Which cases the kernels are tested on: what Hypothesis draws, and a few fixed ones that mutants must not survive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernel_cases as cases
from hypothesis import strategies as st
from kernel_cases import LORA, Case, LoraShape

Draw = Any
RANKS = (*range(1, 66), 128)
LENGTHS = (0, 1, 15, 16, 17, 255)
SEEDS = st.integers(0, 2**32 - 1)
GAPS = st.sampled_from((0, 1, 8))
ZIPF = ((0, 31), (1, 9), (-1, 3), (2, 4), (3, 1), (4, 1), (5, 1))


@st.composite
def lora_shapes(draw: Draw) -> LoraShape:
    """Ranks mixed freely, segments all alike, all distinct or skewed, rows without adapter between."""
    targets = draw(st.integers(1, 3))
    rank = st.one_of(st.just(0), st.sampled_from(RANKS))
    ranks = draw(st.lists(st.lists(rank, min_size=targets, max_size=targets), min_size=1, max_size=4))
    adapter = st.integers(-1, len(ranks) - 1)
    segments = draw(
        st.one_of(
            st.lists(st.tuples(adapter, st.sampled_from(LENGTHS)), min_size=1, max_size=4),
            st.lists(st.tuples(adapter, st.just(1)), min_size=1, max_size=24),
            st.just([(adapter % len(ranks) if adapter >= 0 else -1, length) for adapter, length in ZIPF]),
        )
    )
    rows, columns = sum(length for _, length in segments), sum(map(sum, ranks))
    widest = 576 if rows * columns < 2000 else 150  # the naive rungs take their time
    return LoraShape(
        width=draw(st.sampled_from((16, 24, 64, 96, 100, 128, 576))),
        d_in=draw(st.integers(1, widest)),
        d_outs=tuple(draw(st.integers(1, widest)) for _ in range(targets)),
        ranks=ranks,
        segments=segments,
        splits=draw(st.integers(1, 4)),
        gap=draw(GAPS),
        tile=draw(st.sampled_from((1, 16, 64))),
    )


CONTEXTS = st.one_of(st.integers(0, 40), st.sampled_from((1, 15, 16, 17, 255)), st.integers(100, 300))
HEADS = {"kv_heads": st.integers(1, 3), "group": st.sampled_from((1, 2, 4)), "gap": GAPS}
HEAD_DIM = st.sampled_from((16, 20, 32, 64, 80, 128, 256))
SPANS = st.tuples(st.integers(1, 40), CONTEXTS.filter(bool)).map(lambda pair: (min(pair), pair[1]))


Recipe = Callable[[], Case]


def built(function: Callable[..., Case], dtype: str, **drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[Recipe]:
    return st.builds(functools.partial, st.just(function), dtype=st.just(dtype), seed=SEEDS, **drawn)


def drawn_cases(operation: str, dtype: str) -> st.SearchStrategy[Recipe]:
    """What Hypothesis draws for an operation: a case still to be made."""
    small, row_counts = st.integers(1, 5), st.integers(1, 6)
    if operation.startswith(LORA):
        return built(cases.lora_case, dtype, operation=st.just(operation), shape=lora_shapes())
    contexts = st.lists(st.one_of(st.just(-1), CONTEXTS), min_size=1, max_size=4)
    table = {
        "lora_join": lambda: built(
            cases.join_case, dtype, shards=small, splits=small, rows=st.integers(1, 9), targets=st.integers(1, 3)
        ),
        **{
            name: lambda name=name: built(
                cases.peer_case, dtype, operation=st.just(name), chunks=st.integers(1, 1024), shards=st.integers(2, 4)
            )
            for name in ("peer_reduce", "peer_gather")
        },
        "lora_lookup": lambda: built(
            cases.lookup_case, dtype, layers=small, adapters=small, entries=st.integers(1, 40)
        ),
        "pad_adapter": lambda: built(cases.pad_case, dtype, shape=lora_shapes(), of_b=st.booleans()),
        "paged_attention_decode": lambda: built(
            cases.decode_case, dtype, head_dim=HEAD_DIM, contexts=contexts, splits=st.integers(1, 4), **HEADS
        ),
        "paged_attention_merge": lambda: built(
            cases.merge_case, dtype, heads=small, head_dim=HEAD_DIM, contexts=contexts, chunk=st.integers(1, 99)
        ),
        "paged_attention_prefill": lambda: built(
            cases.prefill_case,
            dtype,
            head_dim=HEAD_DIM,
            spans=st.lists(SPANS, min_size=1, max_size=2),
            tile=st.sampled_from((1, 16, 40, 64)),
            **HEADS,
        ),
        "rope_store": lambda: built(
            cases.rope_case, dtype, rows=row_counts, heads=small, kv_heads=small, head_dim=HEAD_DIM, gap=GAPS
        ),
        "rms_norm": lambda: built(
            cases.rms_norm_case,
            dtype,
            rows=row_counts,
            hidden=st.integers(1, 576),
            add=st.booleans(),
            gap=GAPS,
            delta_gap=GAPS,
        ),
        "silu_mul": lambda: built(
            cases.silu_case, dtype, rows=row_counts, ffn=st.integers(3, 576), gap=GAPS, out_gap=GAPS
        ),
        "argmax": lambda: built(cases.argmax_case, dtype, rows=row_counts, vocab=st.integers(1, 999), gap=GAPS),
        "gather_rows": lambda: built(
            cases.gather_case, dtype, rows=row_counts, columns=st.integers(1, 600), gap=GAPS
        ),
        "enter_tokens": lambda: built(
            cases.enter_tokens_case, dtype, rows=st.integers(1, 300), most=st.integers(1, 50), shard=st.integers(0, 2),
            shards=st.just(3),
        ),
        "enter_pages": lambda: built(cases.enter_case, dtype, rows=st.integers(1, 40), positions=st.integers(8, 60)),
        "sample_threshold": lambda: built(
            cases.threshold_case, dtype, rows=small, vocab=st.integers(1, 999), gap=GAPS, ties=st.booleans()
        ),
        "sample_draw": lambda: built(
            cases.draw_case, dtype, rows=small, vocab=st.integers(1, 3000), gap=GAPS, ties=st.booleans()
        ),
        "load_pages": lambda: built(cases.load_case, dtype, layers=small, count=small, width=st.integers(1, 300)),
    }
    return table[operation]()


SMALL_LORA = LoraShape(
    width=64,
    d_in=149,
    d_outs=(96, 40, 33),
    ranks=[[17, 3, 8], [1, 0, 65], [40, 24, 5]],
    segments=[(0, 17), (-1, 2), (1, 1), (2, 5)],
    splits=2,
    gap=3,
)
WIDE_LORA = LoraShape(576, 576, (576,), [[8], [13]], [(0, 3), (1, 1), (0, 30)], 1, 0, 16)
LONG_LORA = LoraShape(4200, 4200, (16,), [[5]], [(0, 2)])  # more of a column than a warp has in flight
CUT_LORA = replace(LONG_LORA, width=520)  # in pages of little more than two warps take at a time
TALL_LORA = LoraShape(16, 16, (16,), [[133]], [(0, 130)], tile=130)  # more rows and ranks than a block takes at a time
MANY_LORA = LoraShape(16, 16, (16, 16), [[5, 3]], [(0, 1)] * 420)  # more pieces of work than blocks
CROWDED_LORA = replace(TALL_LORA, segments=[(0, 40)], gap=3)  # blocks that serve several rows, number by number
PAGED_LORA = LoraShape(96, 1000, (520, 248), [[20, 9]], [(0, 18), (0, 1)], 2)  # several whole pages, and one in part
FEW_LORA = LoraShape(24, 16, (40, 24, 16), [[8, 5, 2], [1, 0, 7]], [(0, 2), (1, 1), (-1, 1)])
STAGED_LORA = replace(PAGED_LORA, ranks=[[40, 100]])  # ranks of other classes; more stages than a ring has


def fixed_cases(operation: str, dtype: str) -> list[Case]:
    """A few small cases with every kind of edge. A mutant is caught if any of them fails."""
    if operation.startswith(LORA):
        shapes = [SMALL_LORA, WIDE_LORA, LONG_LORA, TALL_LORA]
        shapes += [MANY_LORA, PAGED_LORA] if operation.startswith("lora") else [STAGED_LORA]
        if operation == "mbgmv_expand":  # blocks that serve several rows; few ranks, in several pages or splits
            shapes += [MANY_LORA, FEW_LORA, replace(FEW_LORA, width=40, splits=2)]
        shapes += [CROWDED_LORA, CUT_LORA] if operation == "mbgmv_shrink" else []
        return [cases.lora_case(operation, dtype, 1, shape) for shape in shapes]
    table: dict[str, Callable[[], list[Case]]] = {
        **{
            name: lambda name=name: [
                cases.peer_case(dtype, 1, name, chunks=700, shards=3),
                cases.peer_case(dtype, 2, name, chunks=512, shards=2),
                cases.peer_case(dtype, 3, name, chunks=600, shards=3, ended=True),
            ]
            for name in ("peer_reduce", "peer_gather")
        },
        "lora_join": lambda: [cases.join_case(dtype, 1, 3, 2, 7, 3), cases.join_case(dtype, 2, 2, 1, 40, 1)],
        "lora_lookup": lambda: [cases.lookup_case(dtype, 1, 3, 4, 13)],
        "pad_adapter": lambda: [
            cases.pad_case(dtype, 1, shape, of_b)
            for shape in (SMALL_LORA, WIDE_LORA, PAGED_LORA)
            for of_b in (False, True)
        ],
        "paged_attention_decode": lambda: [
            cases.decode_case(dtype, 1, 2, 2, 20, (150, -1, 0, 1, 300), 1, 3),
            cases.decode_case(dtype, 2, 1, 4, 64, (33, 290, -1, 129), 3),
            cases.decode_case(dtype, 3, 2, 1, 256, (140,), 1),
            cases.decode_case(dtype, 4, 1, 1, 32, (35, 60), 1),
            cases.decode_case(dtype, 5, 2, 5, 32, (20, 37), 2),
        ],
        "paged_attention_merge": lambda: [
            cases.merge_case(dtype, 1, 3, 140, (30, -1, 0, 10, 95), 10),
            cases.merge_case(dtype, 2, 2, 20, (350, 12), 10),
        ],
        "paged_attention_prefill": lambda: [
            cases.prefill_case(dtype, 1, 2, 2, 20, ((17, 17), (3, 140)), 3),
            cases.prefill_case(dtype, 2, 1, 4, 64, ((20, 150), (1, 5))),
            cases.prefill_case(dtype, 3, 1, 1, 256, ((2, 300),)),
            cases.prefill_case(dtype, 4, 1, 1, 32, ((3, 9), (5, 50))),
            cases.prefill_case(dtype, 5, 1, 1, 32, ((70, 80),), tile=70),  # more rows than a block takes at a time
        ],
        "rope_store": lambda: [
            cases.rope_case(dtype, 1, 6, 3, 2, 20, 3),
            cases.rope_case(dtype, 2, 5, 4, 2, 128),
            cases.rope_case(dtype, 3, 5, 2, 1, 6),
        ],
        "rms_norm": lambda: [
            cases.rms_norm_case(dtype, 1, 3, 300, True, 5),
            cases.rms_norm_case(dtype, 2, 2, 576, True),
            cases.rms_norm_case(dtype, 3, 2, 77, False),
            cases.rms_norm_case(dtype, 4, 2, 77, True, 3, 11),
            cases.rms_norm_case(dtype, 5, 2, 576, True, 0, 8),
            cases.rms_norm_case(dtype, 6, 2, 2560, False),  # more than a block keeps in registers
        ],
        "silu_mul": lambda: [
            cases.silu_case(dtype, 1, 3, 150, 5),
            cases.silu_case(dtype, 2, 2, 256, 8, 16),
            cases.silu_case(dtype, 3, 2, 256, 0, 1),
            cases.silu_case(dtype, 4, 1, 2000),
        ],
        "argmax": lambda: [
            cases.argmax_case(dtype, 1, 7, 300, 5),
            cases.argmax_case(dtype, 2, 4, 1024),
            cases.argmax_case(dtype, 3, 8, 1021, 3),
        ],
        "gather_rows": lambda: [cases.gather_case(dtype, 1, 5, 300, 3), cases.gather_case(dtype, 2, 3, 512)],
        "enter_tokens": lambda: [
            cases.enter_tokens_case(dtype, 1, 150, 7),
            cases.enter_tokens_case(dtype, 2, 90, 40, shard=1, shards=3),
        ],
        "enter_pages": lambda: [cases.enter_case(dtype, 1, 37, 60), cases.enter_case(dtype, 2, 7, 8)],
        "sample_threshold": lambda: [
            cases.threshold_case(dtype, 1, 7, 1100, 3),
            cases.threshold_case(dtype, 2, 7, 90, 0, True),
            cases.threshold_case(dtype, 3, 6, 70, lost=True),
        ],
        "sample_draw": lambda: [
            cases.draw_case(dtype, 1, 7, 2100, 3),
            cases.draw_case(dtype, 2, 40, 90, 0, True),
            cases.draw_case(dtype, 3, 40, 2100, 0, True),
            cases.draw_case(dtype, 4, 6, 70, lost=True),
        ],
        "load_pages": lambda: [
            cases.load_case(dtype, 1, 3, 5, 101),
            cases.load_case(dtype, 2, 2, 7, 256),
            cases.load_case(dtype, 3, 2, 3, 64, 1),
            cases.load_case(dtype, 4, 9, 40, 360),
        ],
    }
    return table[operation]()
