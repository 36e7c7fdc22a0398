"""What a launch refuses, the grids' independence of the batch's content, and the plan of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernel_cases as cases
import numpy as np
import pytest
from conftest import plan_as_shipped
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import LoraShape
from kernel_shapes import SMALL_LORA, fixed_cases

from slora_ref.errors import KernelError
from slora_ref.ops import Segments, Spans, lora_arguments, plan
from slora_ref.ops.kernel_source import dtype_macro
from slora_ref.ops.ladder import fastest, ladder, make_launch, operation_of
from slora_ref.ops.launch import check_array
from slora_ref.ops.rungs import RUNGS


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), np.float64), "argument x: dtype float64, the kernel takes float32"),
        (np.zeros((3, 5), np.float32), r"argument x: shape \(3, 5\), the kernel takes \('any', 4\)"),
        (np.zeros(4, np.float32), r"argument x: shape \(4,\)"),
        (np.zeros((4, 3), np.float32).T, "argument x: strides .* make it contiguous"),
        (np.zeros((3, 8), np.float32)[:, ::2], "argument x: strides"),
        (np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (3, 4), (8, 4)), "rows overlap"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_name(array: np.ndarray, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        check_array("x", array, np.float32, (None, 4), strided=True)


def test_gaps_between_rows_are_accepted_where_a_stride_is_passed() -> None:
    wide = np.zeros((3, 9), np.float32)[:, :4]
    assert check_array("x", wide, np.float32, (3, 4), strided=True) is wide
    with pytest.raises(KernelError, match="contiguous"):
        check_array("x", wide, np.float32, (3, 4))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda a: a.astype(np.float64)),
        ("t", lambda a: a[..., ::2]),
        ("t", lambda a: a.astype(np.float16)),
        ("lora", lambda a: a.astype(np.int64)),
        ("pages", lambda a: a.T),
    ],
)
def test_a_lora_launch_names_the_argument_that_does_not_fit(name: str, change: Any) -> None:
    case = cases.lora_case("mbgmv_shrink", "float16", 0, SMALL_LORA)
    arrays = {key: case.arguments[key] for key in ("t", "x", "pages", "page_table", "lora")}
    lora_arguments.mbgmv_shrink(**arrays)
    with pytest.raises(KernelError, match=f"argument {name}: "):
        lora_arguments.mbgmv_shrink(**arrays | {name: change(arrays[name])})


def test_an_unknown_kernel_or_dtype_is_refused_with_the_choice() -> None:
    with pytest.raises(KernelError, match="no kernel mbgmv_shrink_9_magic for float16; there are lora_lookup_1_naive"):
        make_launch("mbgmv_shrink_9_magic", np.float16, {})
    with pytest.raises(KernelError, match="no kernel of convolution"):
        ladder("convolution")
    with pytest.raises(KernelError, match="kernels store float32, float16, bfloat16, not float64"):
        dtype_macro(np.float64)


@pytest.mark.parametrize("operation", sorted({operation_of(kernel) for kernel in RUNGS}))
def test_all_rungs_of_an_operation_are_launched_with_the_same_arguments(operation: str) -> None:
    dtypes = {dtype for kernel, rung in RUNGS.items() if operation_of(kernel) == operation for dtype in rung.dtypes}
    for dtype in dtypes & {"float32", "float16"}:
        arguments = fixed_cases(operation, dtype)[0].arguments
        for kernel in ladder(operation, dtype):
            launch = make_launch(kernel, dtype, arguments)
            assert min(launch.grid) > 0
            assert 0 < launch.threads <= 1024
            assert 0 <= launch.shared <= 96 << 10


RANKS = np.array([2000, 2000, 1])  # of adapter % 3: segments of several rows share in any step, or in large ones alone
SEGMENTS = st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 70)), max_size=12)


LEAN = LoraShape(512, 16, (512, 256), [[8, 3]], [(0, 2)])


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        (LEAN, "mbgmv_expand_4_lean"),
        (replace(LEAN, ranks=[[9, 3]]), "mbgmv_expand_3_in_flight"),
        (replace(LEAN, width=256), "mbgmv_expand_3_in_flight"),
        (replace(LEAN, splits=2), "mbgmv_expand_3_in_flight"),
        (replace(LEAN, gap=3), "mbgmv_expand_3_in_flight"),
    ],
    ids=["few ranks", "more", "two pages", "two splits", "odd stride"],
)
def test_few_ranks_of_whole_chunks_in_one_page_have_an_expand_of_their_own(shape: LoraShape, kernel: str) -> None:
    case = cases.lora_case("mbgmv_expand", "float16", 1, shape)
    assert fastest("mbgmv_expand", case.dtype, case.arguments) == kernel


@pytest.mark.parametrize(("d_in", "rank", "rung"), [(512, 8, 4), (512, 16, 3), (2048, 16, 3), (2056, 64, 4)])
def test_a_warp_takes_several_short_columns_of_a_large_rank_without_tensor_cores(
    d_in: int, rank: int, rung: int
) -> None:
    case = cases.lora_case("mbgmv_shrink", "float16", 1, LoraShape(d_in, d_in, (16,), [[rank]], [(0, 2)]))
    assert fastest("mbgmv_shrink", case.dtype, case.arguments).startswith(f"mbgmv_shrink_{rung}_")


def segments_of(pairs: list[tuple[int, int]]) -> Segments:
    lengths = np.array([length for _, length in pairs], np.int64)
    adapters = np.array([adapter for adapter, _ in pairs], np.int64)
    return Segments(adapters, np.cumsum(lengths) - lengths, lengths, np.where(adapters < 0, 0, RANKS[adapters % 3]))


def rows_by_kernel(segments: Segments, rows: int) -> tuple[list[int], list[int]]:
    """The rows with an adapter that are served one by one, and those that share."""
    shared = np.repeat(plan.uses_mbgmm(segments, rows), segments.length)
    used = np.repeat(segments.adapter >= 0, segments.length)
    return np.flatnonzero(used & ~shared).tolist(), np.flatnonzero(used & shared).tolist()


MODES = {"together": st.booleans(), "fixed": st.booleans()}


@given(pairs=SEGMENTS, padding=st.integers(0, 5), **MODES)
def test_a_plan_serves_each_row_once_and_base_rows_never(
    pairs: list[tuple[int, int]], padding: int, together: bool, fixed: bool
) -> None:
    owners = np.array([adapter for adapter, length in pairs for _ in range(length)] + [-1] * padding)
    made = plan.plan_lora(segments_of(pairs), len(owners), together, fixed)
    served = made.row_slots.astype(np.int64)
    for (first, count), slot in zip(made.tiles.tolist(), made.tile_slots.tolist(), strict=True):
        assert (count == 0) == (slot == -1)
        assert count <= plan.tile_rows(len(owners))
        assert (served[first : first + count] == -1).all(), "a row is served twice"
        served[first : first + count] = slot
    assert (served == owners).all()
    tall, used = made.counts
    assert ((made.tile_slots >= 0) == (np.arange(len(made.tiles)) < used)).all(), "unused entries come last"
    alone, _ = rows_by_kernel(segments_of(pairs), len(owners))
    in_tiles = made.tiles[tall:used]
    assert sorted(in_tiles[:, 0]) == (alone if made.kernels == ("lora",) else [])
    assert (in_tiles[:, 1] == 1).all(), "only the first row of a tile that is not MBGMM's would be served"


@given(pairs=SEGMENTS, together=st.booleans())
def test_kernels_without_work_are_left_out_unless_launches_are_fixed(pairs: Any, together: bool) -> None:
    rows = sum(length for _, length in pairs)
    single, shared = rows_by_kernel(segments_of(pairs), rows)
    one_launch = together and rows <= plan.TOGETHER_UP_TO
    made = plan.plan_lora(segments_of(pairs), rows, together)
    wanted = tuple(name for name, needed in (("mbgmv", single), ("mbgmm", shared)) if needed)
    assert made.kernels == (("lora",) if one_launch and shared else wanted)
    fixed = plan.plan_lora(segments_of(pairs), rows, together, fixed=True)
    assert fixed.kernels == (("lora",) if one_launch else ("mbgmv", "mbgmm"))


@pytest.mark.parametrize(
    ("lengths", "rank", "tall"),
    [
        ([48] * 5, 8, 5),  # each saves 47 reads of rank 8: more than its tile and the launch cost
        ([1] * 210 + [2] * 15, 8, 0),  # pairs save less than their tiles cost
        ([1] * 210 + [2] * 15, 64, 0),  # at rank 64, too
        ([3] * 40, 64, 40),
        ([3] * 40 + [1] * 100, 64, 0),  # 100 rows that are alone would lose more in such a launch
        ([200] + [1] * 200, 8, 1),
        ([213] * 3 + [1] * 250, 8, 3),  # beyond TOGETHER_UP_TO rows those have a launch of their own
        ([63], 8, 0),
        ([64] * 2, 8, 2),
    ],
)
def test_rows_share_an_adapter_where_that_saves_more_than_it_costs(
    lengths: list[int], rank: int, tall: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_as_shipped(monkeypatch)
    segments = replace(segments_of(list(enumerate(lengths))), rank=np.full(len(lengths), rank))
    shares = plan.uses_mbgmm(segments, sum(lengths))
    assert shares.sum() == tall and (not tall or segments.length[shares].min() > 1)
    made = plan.plan_lora(segments, sum(lengths))
    assert (made.row_slots >= 0).sum() == sum(lengths) - segments.length[shares].sum()


@given(pairs=SEGMENTS, padding=st.integers(0, 600))
def test_rows_that_are_alone_never_make_others_share(pairs: list[tuple[int, int]], padding: int) -> None:
    """Nor does a base row: what shares with them shares without them, and a longer segment shares if a shorter does."""
    with pytest.MonkeyPatch.context() as patch:
        plan_as_shipped(patch)
        check_who_shares(pairs, padding)


def check_who_shares(pairs: list[tuple[int, int]], padding: int) -> None:
    segments = segments_of(pairs)
    rows = int(segments.length.sum()) + padding
    shares = plan.uses_mbgmm(segments, rows)
    assert not shares[(segments.adapter < 0) | (segments.length < 2)].any()
    least = (segments.length * segments.rank - segments.rank)[shares].min(initial=2**62)
    others = segments.length * segments.rank - segments.rank
    assert not shares.any() or shares[others >= least].all()
    without = plan.uses_mbgmm(segments_of([pair for pair, tall in zip(pairs, shares, strict=True) if tall]), rows)
    assert without.all()


@given(one=SEGMENTS, other=SEGMENTS, **MODES)
def test_the_size_of_a_plan_depends_on_the_number_of_rows_alone(
    one: Any, other: Any, together: bool, fixed: bool
) -> None:
    """So a captured graph fits: its grids are computed from these sizes."""
    rows = [sum(length for _, length in pairs) for pairs in (one, other)]
    plans = [plan.plan_lora(segments_of(pairs), max(rows), together, fixed) for pairs in (one, other)]
    assert not fixed or plans[0].kernels == plans[1].kernels
    assert plans[0].tiles.shape == plans[1].tiles.shape
    assert plans[0].row_slots.shape == plans[1].row_slots.shape


@given(
    pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=8), seed=st.integers(0, 99)
)
def test_an_attention_plan_shows_each_row_its_tokens(pairs: list[tuple[int, int]], seed: int) -> None:
    lengths = np.array([length for length, _ in pairs], np.int64)
    contexts = lengths + np.array([cached for _, cached in pairs], np.int64)
    slots = np.random.default_rng(seed).permutation(len(pairs))
    spans = Spans(slots, np.cumsum(lengths) - lengths, lengths, contexts)
    want = [(slot, c - n + i + 1) for slot, n, c in zip(slots, lengths, contexts, strict=True) for i in range(n)]
    made = plan.plan_attention(spans, int(lengths.sum()))
    got: list[Any] = [tuple(query) if query[0] >= 0 else None for query in made.queries.tolist()]
    for row, count, slot, visible in made.tiles.tolist():
        assert got[row : row + count] == [None] * count, "a row is served twice"
        got[row : row + count] = [(slot, visible + i) for i in range(count)]
    assert got == want
    assert made.single == (lengths == 1).any()
    assert made.shared == (lengths > 1).any()
