"""Every operation of every backend against a float64 oracle that spells out its definition.

The oracles share no code with slora_ref: they hold dense matrices, and this file lays them out in pages by the words of
AdapterTables' docstring alone (gaps in the table, B before A, pages in random order, NaN wherever nothing was written).
Bounds come from the number of terms, see `rounding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slora_ref.config import TARGETS
from slora_ref.ops import LORA_GROUPS, AdapterTables, LoraGroup, NumpyOps, Ops, Segments, Spans
from slora_ref.ops.host_ops import HostOps

U = 2.0**-24  # half the distance between 1 and the next float32
LAYERS = 2
SEGMENT_LENGTHS = (0, 1, 15, 16, 17, 255)
RANKS = (*range(1, 66), 128)
FEW_RANKS = (1, 2, 3, 4, 7, 8, 12, 16, 20, 32, 33, 64, 128)
GROUPS = {group.name: group for group in LORA_GROUPS}


@dataclass(frozen=True)
class Backend:
    """One implementation of the operations, and how arrays get to its device and back (always as copies).

    `ops` makes the operations for a dtype of storage; sums are in float32 whatever it is. `plain_t` says that what
    lora_shrink returns is x A itself, one column after the other, as NumpyOps specifies it; kernels have their own t.
    A slow backend gets fewer ranks and at most `most_rows` rows; test_kernels.py has the rest.
    """

    name: str
    ops: Callable[[Any], Ops]
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]
    plain_t: bool
    ranks: tuple[int, ...] = RANKS
    most_rows: int = 100_000

    def put(self, value: Any) -> Any:
        """An array, or every array of a dataclass, on the device."""
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self.put(getattr(value, f.name)) for f in fields(value)})
        return self.to_device(value)


BACKENDS = [
    Backend("numpy", lambda dtype: NumpyOps(np.float32), np.array, np.asarray, plain_t=True),
    Backend("host", lambda dtype: HostOps(dtype), np.array, np.asarray, False, FEW_RANKS, most_rows=90),
]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def normal(rng: np.random.Generator, *shape: int, sd: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * sd).astype(np.float32)


def assert_within(got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> None:
    excess = np.abs(got.astype(np.float64) - want) - bound
    assert (excess <= 0).all(), (
        f"error {np.abs(got - want).max():.3g} exceeds the bound at {np.argwhere(~(excess <= 0))}"
    )


# --- LoRA ---


@dataclass(frozen=True)
class Dense:
    """One adapter as matrices: A [d_in, r], B [r, d_out] and scale of each (layer, target) that it has."""

    a: dict[tuple[int, int], np.ndarray]
    b: dict[tuple[int, int], np.ndarray]
    scale: dict[tuple[int, int], float]

    def rank(self, layer: int, target: int) -> int:
        return self.a[layer, target].shape[1] if (layer, target) in self.a else 0

    def page_rank(self, target: int) -> int:
        return max(self.rank(layer, target) for layer in range(LAYERS))


@dataclass(frozen=True)
class Lora:
    """A group's adapters, laid out in pages, and the rows that use them."""

    group: LoraGroup
    d_in: int
    d_outs: tuple[int, ...]
    adapters: dict[int, Dense]  # by slot
    pages: np.ndarray  # [layers, pages, width]
    tables: AdapterTables
    segments: Segments
    x: np.ndarray
    y: np.ndarray

    def owners(self) -> list[int]:
        """The adapter slot of each row."""
        pairs = zip(self.segments.adapter.tolist(), self.segments.length.tolist(), strict=True)
        return [slot for slot, length in pairs for _ in range(length)]


def random_adapter(
    rng: np.random.Generator, group: LoraGroup, d_in: int, d_outs: Sequence[int], ranks: dict[tuple[int, int], int]
) -> Dense:
    widths = dict(zip(group.targets, d_outs, strict=True))
    a = {key: normal(rng, d_in, rank, sd=0.3) for key, rank in ranks.items() if rank}
    b = {key: normal(rng, rank, widths[key[1]], sd=0.3) for key, rank in ranks.items() if rank}
    return Dense(a, b, {key: float(np.float32(rng.uniform(0.25, 4))) for key in a})


def pieces(size: int, width: int) -> int:
    return -(-size // width)


def lay_out(
    rng: np.random.Generator, group: LoraGroup, d_in: int, d_outs: Sequence[int], adapters: dict[int, Dense], width: int
) -> tuple[np.ndarray, AdapterTables]:
    """Pages and tables of `adapters`, in a layout of this test's own making."""
    entries: dict[int, list[tuple[str, int, int, int]]] = {}  # slot -> (half, target, vector, piece) of each entry
    starts: dict[tuple[str, int, int], int] = {}
    for slot, adapter in adapters.items():
        table = [("gap", -1, 0, 0)] * int(rng.integers(0, 3))
        for half in ("b", "a"):
            for target in group.targets:
                size = d_in if half == "a" else d_outs[group.targets.index(target)]
                starts[half, slot, target] = len(table)
                table += [
                    (half, target, vector, piece)
                    for vector in range(adapter.page_rank(target))
                    for piece in range(pieces(size, width))
                ]
            table += [("gap", -1, 0, 0)] * int(half == "b")  # the As of a group are neighbours, and its Bs
        entries[slot] = table
    slots = max(adapters, default=0) + 1 + int(rng.integers(0, 2))  # the last one, -1 to Python, may be taken
    tables = AdapterTables.empty(slots, LAYERS, max(map(len, entries.values()), default=0) + 1)
    used = sum(entry[0] != "gap" for table in entries.values() for entry in table)
    order = iter(rng.permutation(used + 7).tolist())
    pages = np.full((LAYERS, used + 7, width), np.nan, np.float32)
    for slot, adapter in adapters.items():
        for place, (half, target, vector, piece) in enumerate(entries[slot]):
            if half == "gap":
                continue
            page = tables.pages[slot, place] = next(order)
            for layer in range(LAYERS):
                pages[layer, page] = 0
                if vector < adapter.rank(layer, target):
                    matrix = adapter.a[layer, target].T if half == "a" else adapter.b[layer, target]
                    part = matrix[vector, piece * width : (piece + 1) * width]
                    pages[layer, page, : len(part)] = part
        for target in group.targets:
            tables.a_start[slot, target] = starts["a", slot, target]
            tables.b_start[slot, target] = starts["b", slot, target]
            tables.page_rank[slot, target] = adapter.page_rank(target)
            for layer in range(LAYERS):
                tables.rank[slot, layer, target] = adapter.rank(layer, target)
                tables.scale[slot, layer, target] = adapter.scale.get((layer, target), 0.0)
        for target in set(range(len(TARGETS))) - set(group.targets):  # other groups' business
            tables.page_rank[slot, target] = 200
            tables.rank[slot, :, target] = 200
        tables.a_page_rank[slot], tables.a_rank[slot] = tables.page_rank[slot], tables.rank[slot]
    return pages, tables


def lora_case(
    seed: int,
    group: LoraGroup,
    width: int,
    d_in: int,
    d_outs: Sequence[int],
    ranks: Sequence[dict[tuple[int, int], int]],
    segments: Sequence[tuple[int, int]],
) -> Lora:
    """Adapters of these `ranks`; `segments` are (index into ranks or -1, length)."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(len(ranks) + 2)[: len(ranks)].tolist()
    adapters = {slot: random_adapter(rng, group, d_in, d_outs, rank) for slot, rank in zip(slots, ranks, strict=True)}
    pages, tables = lay_out(rng, group, d_in, d_outs, adapters, width)
    lengths = np.array([length for _, length in segments], np.int64)
    chosen = np.array([slots[index] if index >= 0 else -1 for index, _ in segments], np.int64)
    rank = tables.page_rank[chosen].max(axis=1) * (chosen >= 0)
    parts = Segments(chosen, np.cumsum(lengths) - lengths, lengths, rank)
    rows = int(lengths.sum())
    x, y = normal(rng, rows, d_in), normal(rng, rows, sum(d_outs))
    return Lora(group, d_in, tuple(d_outs), adapters, pages, tables, parts, x, y)


def rounding(terms: int) -> float:
    """Relative to the sum of the terms' sizes: what float32 may lose in a sum of so many, in any order.

    Roundings are as good as random, so they add up like the square root (Higham and Mary 2019); 4 is the confidence.
    """
    return 4 * (terms + 4) ** 0.5 * U


def lora_oracle(case: Lora, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """y + s (x A) B in float64, a segment and a target at a time; and the bound on a float32 result's error."""
    y, bound = case.y.astype(np.float64), np.abs(case.y) * 4.0 * U
    parts = (case.segments.adapter, case.segments.start, case.segments.length)
    for slot, start, length in zip(*(part.tolist() for part in parts), strict=True):
        rows, column = slice(start, start + length), 0
        x = case.x[rows].astype(np.float64)
        for target, d_out in zip(case.group.targets, case.d_outs, strict=True):
            if slot >= 0 and (layer, target) in case.adapters[slot].a:
                adapter, columns = case.adapters[slot], slice(column, column + d_out)
                a, b = adapter.a[layer, target].astype(np.float64), adapter.b[layer, target].astype(np.float64)
                scale = adapter.scale[layer, target]
                y[rows, columns] += scale * np.einsum("nr,ro->no", np.einsum("ni,ir->nr", x, a), b)
                bound[rows, columns] += rounding(sum(a.shape)) * scale * (np.abs(x) @ np.abs(a) @ np.abs(b))
            column += d_out
    return y, bound


def run_lora(backend: Backend, case: Lora, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """t and the new y of the backend."""
    ops, tables, segments = backend.ops(case.pages.dtype), backend.put(case.tables), backend.put(case.segments)
    pages, x, y = backend.put(case.pages[layer]), backend.put(case.x), backend.put(case.y)
    t = ops.lora_shrink(x, pages, tables, segments, case.group, layer)
    ops.lora_expand(y, t, pages, tables, segments, case.group, layer, case.d_outs)
    return backend.to_host(t), backend.to_host(y)


def assert_lora_matches(backend: Backend, case: Lora) -> None:
    """Both layers match the oracle; rows without a delta keep their bits; the deltas are no rounding error."""
    for layer in range(LAYERS):
        want, bound = lora_oracle(case, layer)
        t, y = run_lora(backend, case, layer)
        assert_within(y, want, bound)
        untouched = want == case.y
        assert (y[untouched].view(np.int32) == case.y[untouched].view(np.int32)).all(), "a base row was touched"
        if not untouched.all():
            assert np.median(np.abs(want - case.y)[~untouched] / bound[~untouched]) > 100, "the check could not fail"
        for row, slot in enumerate(case.owners()) if backend.plain_t else ():
            assert_shrunk(case, layer, row, slot, t[row])


def assert_shrunk(case: Lora, layer: int, row: int, slot: int, t: np.ndarray) -> None:
    """The row's t holds x A of target after target, each in as many columns as the adapter has pages for."""
    column, x = 0, case.x[row].astype(np.float64)
    for target in case.group.targets if slot >= 0 else ():
        if (layer, target) in case.adapters[slot].a:
            a = case.adapters[slot].a[layer, target].astype(np.float64)
            assert_within(t[column : column + a.shape[1]], x @ a, rounding(len(a)) * (np.abs(x) @ np.abs(a)))
        column += case.adapters[slot].page_rank(target)


@st.composite
def lora_cases(draw: st.DrawFn) -> Lora:
    group = draw(st.sampled_from(LORA_GROUPS))
    width = draw(st.sampled_from((16, 24, 64, 128)))
    d_in = draw(st.integers(1, 150))
    d_outs = [draw(st.integers(1, 150)) for _ in group.targets]
    rank = st.one_of(st.just(0), st.sampled_from(RANKS))
    keys = [(layer, target) for layer in range(LAYERS) for target in group.targets]
    ranks = draw(st.lists(st.fixed_dictionaries(dict.fromkeys(keys, rank)), min_size=1, max_size=4))
    segment = st.tuples(st.integers(-1, len(ranks) - 1), st.sampled_from(SEGMENT_LENGTHS))
    segments = draw(st.lists(segment, min_size=1, max_size=5))
    return lora_case(draw(st.integers(0, 2**32 - 1)), group, width, d_in, d_outs, ranks, segments)


def first_rows(case: Lora, most: int) -> Lora:
    """The case without the rows beyond `most`."""
    length = np.clip(most - case.segments.start, 0, case.segments.length)
    return replace(case, x=case.x[:most], y=case.y[:most], segments=replace(case.segments, length=length))


@given(case=lora_cases())
@settings(max_examples=60)
def test_lora_matches_the_definition_whatever_the_shapes(backend: Backend, case: Lora) -> None:
    assert_lora_matches(backend, first_rows(case, backend.most_rows))


def uniform_ranks(group: LoraGroup, rank: int) -> dict[tuple[int, int], int]:
    return {(layer, target): rank for layer in range(LAYERS) for target in group.targets}


@pytest.mark.parametrize("name", GROUPS)
def test_all_ranks_in_one_batch_with_skewed_segments(backend: Backend, name: str) -> None:
    group, count = GROUPS[name], len(backend.ranks)
    lengths = (1, 17, 0, 15, 2, 16)
    segments = [(index, lengths[index % len(lengths)]) for index in range(count)]
    segments.insert(7, (-1, 5))
    segments.insert(count // 2, (3, min(255, backend.most_rows)))  # one long segment among many short ones
    d_outs = (64, 32, 32)[: len(group.targets)]
    ranks = [uniform_ranks(group, rank) for rank in backend.ranks]
    assert_lora_matches(backend, lora_case(1, group, 32, 64, d_outs, ranks, segments))


@pytest.mark.parametrize(("d_in", "d_out"), [(4096, 4096), (4096, 11008), (11008, 4096)])
def test_lora_at_the_widths_of_a_real_model(backend: Backend, d_in: int, d_out: int) -> None:
    group = GROUPS["o"]
    ranks = [uniform_ranks(group, rank) for rank in (1, 8, 33)]
    assert_lora_matches(backend, lora_case(2, group, 4096, d_in, (d_out,), ranks, [(2, 3), (-1, 1), (0, 1), (1, 2)]))


@pytest.mark.parametrize("odd", [0, 31, 63])
def test_one_row_among_63_others(backend: Backend, odd: int) -> None:
    """A segment of one row, before, within and behind long ones: offsets are those of the segments, not of 16s."""
    group = GROUPS["qkv"]
    segments = [(0, odd), (1, 1), (0, 63 - odd)]
    ranks = [uniform_ranks(group, 16), uniform_ranks(group, 33)]
    assert_lora_matches(backend, lora_case(3, group, 32, 64, (64, 32, 32), ranks, segments))


def test_a_step_of_the_base_model_alone_is_untouched(backend: Backend) -> None:
    case = lora_case(4, GROUPS["qkv"], 32, 64, (64, 32, 32), [uniform_ranks(GROUPS["qkv"], 8)], [(-1, 9)])
    _, y = run_lora(backend, case, 0)
    assert (y.view(np.int32) == case.y.view(np.int32)).all()
    assert_lora_matches(backend, lora_case(4, GROUPS["o"], 32, 64, (64,), [], [(-1, 3)]))  # no adapter is resident


def test_lora_does_not_depend_on_how_a_segment_is_cut(backend: Backend) -> None:
    """Two segments of one adapter side by side are as good as one."""
    group = GROUPS["gate_up"]
    whole = lora_case(5, group, 32, 64, (96, 96), [uniform_ranks(group, 16)], [(0, 34)])
    lengths = np.array([1, 16, 17], np.int64)
    slot = int(whole.segments.adapter[0])
    starts = np.array([0, 1, 17], np.int64)
    cut = replace(whole, segments=Segments(np.full(3, slot, np.int64), starts, lengths, np.full(3, 16, np.int64)))
    assert_lora_matches(backend, cut)
    _, bound = lora_oracle(whole, 1)
    assert_within(run_lora(backend, cut, 1)[1], run_lora(backend, whole, 1)[1].astype(np.float64), 2 * bound)


def test_lora_does_not_depend_on_the_order_of_pages(backend: Backend) -> None:
    group = GROUPS["down"]
    case = lora_case(6, group, 32, 96, (64,), [uniform_ranks(group, 5), uniform_ranks(group, 16)], [(0, 3), (1, 17)])
    order = np.random.default_rng(7).permutation(case.pages.shape[1])
    shuffled = np.empty_like(case.pages)
    shuffled[:, order] = case.pages
    moved = np.where(case.tables.pages >= 0, order[case.tables.pages], -1).astype(np.int32)
    other = replace(case, pages=shuffled, tables=replace(case.tables, pages=moved))
    assert (run_lora(backend, case, 0)[1] == run_lora(backend, other, 0)[1]).all()
    with np.errstate(invalid="ignore"):  # the opposite: pages moved, table not
        lost = run_lora(backend, replace(case, pages=shuffled), 0)[1]
    assert not np.array_equal(lost, run_lora(backend, case, 0)[1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_intermediate_does_not_overflow_half_precision(backend: Backend, dtype: Any) -> None:
    """x A may exceed what float16 holds (65504) though the delta does not: 8 * 4 * 4096 = 131072, times B = 1e-5."""
    group, key = GROUPS["o"], (0, GROUPS["o"].targets[0])
    case = lora_case(8, group, 64, 4096, (64,), [{key: 1}], [(0, 1)])
    small = dtype(1e-5)
    slot = int(case.segments.adapter[0])
    dense = Dense({key: np.full((4096, 1), 4, dtype)}, {key: np.full((1, 64), small, dtype)}, {key: 1.0})
    pages, tables = lay_out(np.random.default_rng(9), group, 4096, (64,), {slot: dense}, 64)
    case = replace(case, x=np.full((1, 4096), 8, dtype), y=np.ones((1, 64), dtype), pages=pages.astype(dtype))
    t, y = run_lora(backend, replace(case, tables=tables), 0)
    assert not backend.plain_t or t[0, 0] == 131072
    assert y == pytest.approx(1 + 131072 * float(small), rel=2e-3)
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.float16(131072)), "the case does not overflow"


# --- embedding, base products, norms, activation ---

SHAPES = {"seed": st.integers(0, 2**32 - 1), "rows": st.integers(1, 70), "width": st.integers(1, 200)}


@given(**SHAPES, d_out=st.integers(1, 200), bias=st.booleans())
@settings(max_examples=40)
def test_linear(backend: Backend, seed: int, rows: int, width: int, d_out: int, bias: bool) -> None:
    rng = np.random.default_rng(seed)
    x, weight, b = normal(rng, rows, width), normal(rng, d_out, width), normal(rng, d_out)
    got = backend.ops(np.float32).linear(backend.put(x), backend.put(weight), backend.put(b) if bias else None)
    want = np.einsum("ri,oi->ro", x.astype(np.float64), weight.astype(np.float64)) + (b if bias else 0)
    size = np.abs(x) @ np.abs(weight).T + np.abs(b)
    assert_within(backend.to_host(got), want, rounding(width) * size)


def test_embed_copies_the_rows(backend: Backend) -> None:
    weight = normal(np.random.default_rng(0), 97, 64)
    ids = np.array([96, 0, 0, 41])
    assert (backend.to_host(backend.ops(np.float32).embed(backend.put(weight), backend.put(ids))) == weight[ids]).all()


@given(**SHAPES, size=st.sampled_from((1e-4, 1.0, 1e4)), eps=st.sampled_from((1e-5, 1e-6)))
@settings(max_examples=40)
def test_rms_norm(backend: Backend, seed: int, rows: int, width: int, size: float, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x, weight = normal(rng, rows, width, sd=size), normal(rng, width)
    x[0] = 0  # a row of zeros is no division by zero
    got = backend.to_host(backend.ops(np.float32).rms_norm(backend.put(x), backend.put(weight), eps))
    want = np.empty((rows, width))
    for row in range(rows):
        values = [float(value) for value in x[row]]
        mean = sum(value * value for value in values) / width
        want[row] = [value / (mean + eps) ** 0.5 * float(w) for value, w in zip(values, weight, strict=True)]
    assert_within(got, want, (width + 8) * U * np.abs(want))


def test_add_rms_norm_adds_in_place_and_norms_the_sum(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    x, delta, weight = normal(rng, 5, 64), normal(rng, 5, 64), normal(rng, 64)
    device = backend.put(x)
    got = backend.ops(np.float32).add_rms_norm(device, backend.put(delta), backend.put(weight), 1e-5)
    total = x.astype(np.float64) + delta
    assert_within(backend.to_host(device), total, 2 * U * np.abs(total))
    want = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert_within(backend.to_host(got), want, 20 * U * np.abs(want) + 4 * U)


@given(**SHAPES, size=st.sampled_from((1.0, 30.0, 1000.0)))
@settings(max_examples=40)
def test_silu_mul(backend: Backend, seed: int, rows: int, width: int, size: float) -> None:
    """Gate first, then up; a gate of -1000 gives 0, not a warning and not NaN."""
    rng = np.random.default_rng(seed)
    gate, up = normal(rng, rows, width, sd=size), normal(rng, rows, width)
    got = backend.to_host(backend.ops(np.float32).silu_mul(backend.put(np.concatenate([gate, up], axis=1))))
    # exp(-g) as 1 / exp(g) for negative gates: the same function, without the overflow
    sigmoid = np.where(gate >= 0, 1 / (1 + np.exp(-np.abs(gate, dtype=np.float64))), 0.0)
    small = np.exp(-np.abs(gate, dtype=np.float64))
    sigmoid = np.where(gate >= 0, sigmoid, small / (1 + small))
    want = gate * sigmoid * up
    # exp errs by its argument's rounding, and results below float32's smallest normal are 0 or coarse
    assert_within(got, want, (np.abs(gate) + 8) * 2 * U * np.abs(want) + 1e-36)


# --- rotary embedding and the pages of keys and values ---


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.integers(1, 64),
)
@settings(max_examples=40)
def test_rope_store_turns_pairs_half_a_head_apart_and_fills_pages(
    backend: Backend, seed: int, rows: int, kv_heads: int, group: int, half: int
) -> None:
    """q and k are turned by the angles of their own positions, as complex numbers; v is stored as it is; page -1 means
    do not store, not the last page."""
    rng = np.random.default_rng(seed)
    heads, width = kv_heads * (group + 2), kv_heads * 2 * half
    qkv, angle = normal(rng, rows, heads, 2 * half), rng.uniform(-500, 500, (30, half))
    cos, sin, positions = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), rng.integers(0, 30, rows)
    turned = qkv.astype(np.float64)
    for row, head, i in np.ndindex(rows, kv_heads * (group + 1), half):
        pair = complex(qkv[row, head, i], qkv[row, head, i + half])
        pair *= complex(cos[positions[row], i], sin[positions[row], i])
        turned[row, head, i], turned[row, head, i + half] = pair.real, pair.imag
    pages = np.full((2 * rows + 5, width), np.nan, np.float32)
    places = rng.permutation(len(pages))[: 2 * rows].reshape(2, rows)
    places[:, rng.random(rows) < 0.2] = -1
    q, stored = run_rope_store(backend, qkv.reshape(rows, -1), pages, cos, sin, positions, places)
    bound = 4 * U * np.abs(qkv).max()
    assert_within(q, turned[:, : kv_heads * group], bound)
    want = pages.astype(np.float64)
    for row, (k_page, v_page) in enumerate(places.T):
        if k_page >= 0:
            want[k_page] = turned[row, kv_heads * group : kv_heads * (group + 1)].ravel()
            want[v_page] = turned[row, kv_heads * (group + 1) :].ravel()
            assert (stored[v_page] == qkv[row, kv_heads * (group + 1) :].ravel()).all()
    written = ~np.isnan(want).any(axis=1)
    assert_within(stored[written], want[written], bound)
    assert np.isnan(stored[~written]).all()


def run_rope_store(
    backend: Backend,
    qkv: np.ndarray,
    pages: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    places: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """q, and the pages afterwards."""
    ops, device = backend.ops(np.float32), backend.put(pages)
    angles = (ops.angle_table(backend.put(cos)), ops.angle_table(backend.put(sin)))
    k_pages, v_pages = (backend.put(place) for place in places)
    q = ops.rope_store(backend.put(qkv), device, *angles, backend.put(positions), k_pages, v_pages)
    return backend.to_host(q), backend.to_host(device)


# --- attention ---


@dataclass(frozen=True)
class Attention:
    """Sequences' keys and values [context, kv_heads, head_dim], scattered over pages, and rows of queries."""

    q: np.ndarray
    pages: np.ndarray
    sequence_pages: np.ndarray
    spans: Spans
    keys: list[np.ndarray]
    values: list[np.ndarray]


def attention_case(
    seed: int, kv_heads: int, group: int, head_dim: int, sequences: Sequence[tuple[int, int]], size: float = 1.0
) -> Attention:
    """`sequences` are (length, context): the last `length` of `context` tokens are rows of this step."""
    rng = np.random.default_rng(seed)
    keys = [normal(rng, context, kv_heads, head_dim, sd=size) for _, context in sequences]
    values = [normal(rng, context, kv_heads, head_dim) for _, context in sequences]
    total = 2 * sum(context for _, context in sequences) + 9
    order = iter(rng.permutation(total).tolist())
    pages = np.full((total, kv_heads * head_dim), np.nan, np.float32)
    slots = rng.permutation(len(sequences) + 2)[: len(sequences)]
    longest = max(context for _, context in sequences) + 3  # entries past a context are -1
    table = np.full((len(sequences) + 2, 2, longest), -1, np.int32)
    for slot, both in zip(slots, zip(keys, values, strict=True), strict=True):
        for half, vectors in enumerate(both):
            for position, vector in enumerate(vectors):
                page = table[slot, half, position] = next(order)
                pages[page] = vector.reshape(-1)
    lengths = np.array([length for length, _ in sequences], np.int64)
    contexts = np.array([context for _, context in sequences], np.int64)
    spans = Spans(slots.astype(np.int64), np.cumsum(lengths) - lengths, lengths, contexts)
    q = normal(rng, int(lengths.sum()), kv_heads * group, head_dim, sd=size)
    return Attention(q, pages, table, spans, keys, values)


def attention_oracle(case: Attention) -> tuple[np.ndarray, np.ndarray]:
    """Row by row and head by head in float64: softmax(q K / sqrt(d)) V over the tokens up to the row's own."""
    rows, heads, head_dim = case.q.shape
    want, bound = np.empty((rows, heads, head_dim)), np.empty((rows, heads, 1))
    for index, (start, length) in enumerate(zip(case.spans.start, case.spans.length, strict=True)):
        keys, values = case.keys[index].astype(np.float64), case.values[index].astype(np.float64)
        context, kv_heads, _ = keys.shape
        for i, head in np.ndindex(int(length), heads):
            visible, shared = context - int(length) + i + 1, head // (heads // kv_heads)
            q = case.q[start + i, head].astype(np.float64)
            score = np.array([q @ keys[j, shared] for j in range(visible)]) / head_dim**0.5
            weight = np.exp(score - score.max())
            want[start + i, head] = weight / weight.sum() @ values[:visible, shared]
            size = (np.abs(keys[:visible, shared]) @ np.abs(q)).max() / head_dim**0.5  # of a score's terms
            error = 2 * rounding(head_dim) * size + 4 * U * np.abs(score).max() + 2 * rounding(visible)
            bound[start + i, head] = error * np.abs(values[:visible, shared]).max()
    return want.reshape(rows, heads * head_dim), np.repeat(bound, head_dim, axis=2).reshape(rows, heads * head_dim)


def run_attention(backend: Backend, case: Attention) -> np.ndarray:
    arrays = map(backend.put, (case.q, case.pages, case.sequence_pages, case.spans))
    return backend.to_host(backend.ops(np.float32).attention(*arrays))


@st.composite
def attention_cases(draw: st.DrawFn) -> Attention:
    kv_heads, group = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 4)))
    head_dim = draw(st.sampled_from((16, 20, 32, 64, 80, 128)))
    context = st.one_of(st.integers(1, 40), st.integers(1, 300))
    pairs = st.tuples(st.integers(0, 40), context).map(lambda pair: (min(pair), pair[1]))  # a prefix may be cached
    sequences = draw(st.lists(pairs, min_size=1, max_size=4))
    return attention_case(draw(st.integers(0, 2**32 - 1)), kv_heads, group, head_dim, sequences)


@given(case=attention_cases())
@settings(max_examples=40)
def test_attention_matches_the_definition_whatever_the_shapes(backend: Backend, case: Attention) -> None:
    want, bound = attention_oracle(case)
    assert_within(run_attention(backend, case), want, bound)


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 127, 128, 129, 300])
def test_decode_and_prefill_are_one_formula(backend: Backend, context: int) -> None:
    """Whole prefill, the last token alone, and anything between: the same rows."""
    whole = attention_case(1, 2, 2, 16, [(context, context)])
    want, bound = attention_oracle(whole)
    for length in {1, context // 2, context - 1, context} - {0}:
        spans = Spans(whole.spans.slot, np.array([0]), np.array([length]), np.array([context]))
        part = replace(whole, q=whole.q[context - length :], spans=spans)
        assert_within(run_attention(backend, part), want[context - length :], bound[context - length :])
        if context > 2:  # a position forgotten at either end would show
            short = replace(part, spans=replace(spans, context=np.array([context - 1])))
            if length < context:
                gap = np.abs(run_attention(backend, short) - want[context - length :]).max()
                assert gap > 10 * bound.max()


def test_no_row_sees_a_later_token_and_every_row_sees_all_others(backend: Backend) -> None:
    case = attention_case(2, 2, 2, 16, [(6, 10)])
    before = run_attention(backend, case)
    slot = int(case.spans.slot[0])
    for position in range(10):
        pages = case.pages.copy()
        pages[case.sequence_pages[slot, 1, position]] += 100
        changed = np.abs(run_attention(backend, replace(case, pages=pages)) - before).max(axis=1) > 1e-6
        assert changed.tolist() == [position <= 4 + row for row in range(6)], position


def test_a_sequence_sees_only_its_own_pages(backend: Backend) -> None:
    """With all of a neighbour's pages NaN, a sequence's rows keep their bits."""
    case = attention_case(3, 2, 2, 32, [(5, 9), (1, 30), (0, 4)])
    pages = case.pages.copy()
    pages[case.sequence_pages[case.spans.slot[1], :, :30].ravel()] = np.nan
    with np.errstate(invalid="ignore"):
        got, before = run_attention(backend, replace(case, pages=pages)), run_attention(backend, case)
    assert (got[:5] == before[:5]).all()
    assert np.isnan(got[5]).all()


@pytest.mark.parametrize(("length", "context"), [(1, 1), (1, 40), (1, 300), (7, 40), (40, 40)])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_nan_in_a_visible_page_reaches_the_row(backend: Backend, length: int, context: int, half: int) -> None:
    """A softmax that turns NaN into 0 would hide a stale page, and let an overflow pass as an answer."""
    case = attention_case(5, 2, 2, 16, [(length, context), (3, 9)])
    for position in {0, context // 2, context - 1}:
        pages = case.pages.copy()
        pages[case.sequence_pages[case.spans.slot[0], half, position]] = np.nan
        with np.errstate(invalid="ignore"):
            got = run_attention(backend, replace(case, pages=pages))
        seen = position <= np.arange(context - length, context)
        assert np.isnan(got[:length][seen]).all()
        # one that is hidden only by its weight of 0 may come through in some backends: 0 * NaN; a key may not
        assert half == 1 or np.isfinite(got[:length][~seen]).all()
        assert np.isfinite(got[length:]).all()


def test_large_scores_do_not_overflow_the_softmax(backend: Backend) -> None:
    case = attention_case(4, 1, 4, 64, [(20, 60)], size=30.0)  # scores up to some thousands; exp overflows at 88
    want, bound = attention_oracle(case)
    got = run_attention(backend, case)
    assert np.isfinite(got).all()
    assert_within(got, want, bound)
