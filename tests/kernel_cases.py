"""Cases for the kernels: an operation's arguments from a seed, and what a float64 oracle says the result is.

The oracles hold dense matrices and share no code with slora_ref. Whatever a kernel may not read is NaN: free pages, the
gaps between rows, columns of t beyond a rank. Whatever it may not write must keep its bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slora_ref.ops import attention_arguments, lora_arguments, pad_arguments, row_arguments, sample_arguments
from slora_ref.ops.kernel_source import DTYPES
from slora_ref.ops.peer_arguments import Mailbox, memory_bytes, peer_gather, peer_reduce
from slora_ref.ops.tables import AdapterTables
from slora_ref.tp.shard import Shard

# max|error| / max|reference|, by storage; sums are in float32, so float32 shows what the halves hide
TOLERANCE = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 5e-3}


@dataclass
class Case:
    """One call of an operation.

    Args:
        arguments: what every rung takes; the outputs among them are changed by a run.
        want: the right result by name, float64, and NaN where nothing is said of it.
        derived: turns the arguments after a run into what `want` speaks of; default: the arrays of the same names.
        untouched: by name, where an output must keep its bits.
    """

    operation: str
    dtype: str
    arguments: dict[str, Any]
    want: dict[str, np.ndarray]
    derived: Callable[[dict[str, Any]], dict[str, np.ndarray]] | None = None
    untouched: dict[str, np.ndarray] = field(default_factory=dict)

    def copy(self) -> dict[str, Any]:
        """Arguments to run on: gaps between rows are copied too."""
        return {name: copy_array(value) for name, value in self.arguments.items()}

    def check(self, after: dict[str, Any]) -> None:
        """Asserts that a run on a copy of the arguments left the right numbers."""
        got = self.derived(after) if self.derived else {name: after[name] for name in self.want}
        for name, want in self.want.items():
            said = ~np.isnan(want)
            value = np.asarray(got[name]).astype(np.float64)[said]
            largest = np.abs(want[said]).max(initial=1e-30)
            error = np.abs(value - want[said]).max(initial=0.0) / largest
            assert error <= TOLERANCE[self.dtype], f"{name}: error {error:.3g} of the largest number"
        for name in self.want.keys() & after.keys():
            if has_gaps(after[name]):
                assert np.isnan(after[name].base[..., after[name].shape[-1] :]).all(), f"{name}: written behind a row"
        for name, where in self.untouched.items():
            assert (bits(after[name])[where] == bits(self.arguments[name])[where]).all(), f"{name}: written elsewhere"


def copy_array(value: Any) -> Any:
    """A copy with the same strides, whose gaps between rows hold the same."""
    if not isinstance(value, np.ndarray) or not has_gaps(value):
        return value.copy() if isinstance(value, np.ndarray) else value
    copied: np.ndarray = value.base.copy()[..., : value.shape[-1]]
    return copied


def has_gaps(array: np.ndarray) -> bool:
    """Whether `array` was made by `store` with a gap."""
    base = array.base
    return array.ndim > 1 and base is not None and base.shape[:-1] == array.shape[:-1] and base.shape != array.shape


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"uint{8 * array.dtype.itemsize}")


def normal(rng: np.random.Generator, *shape: int, sd: float = 1.0) -> np.ndarray:
    return rng.standard_normal(shape) * sd


def store(values: np.ndarray, dtype: str, gap: int = 0) -> np.ndarray:
    """`values` in a dtype of storage, with `gap` numbers of NaN behind each row of the last axis."""
    wide = np.full((*values.shape[:-1], values.shape[-1] + gap), np.nan).astype(DTYPES[dtype])
    wide[..., : values.shape[-1]] = values.astype(DTYPES[dtype])
    return wide[..., : values.shape[-1]] if gap else wide


def page_gap(width: int, dtype: str) -> int:
    """What makes a page's row a multiple of 16 bytes, as the pool does."""
    return -width % (16 // DTYPES[dtype].itemsize)


# --- LoRA ---

LORA = ("mbgmv_", "mbgmm_", "lora_shrink", "lora_expand")

@dataclass(frozen=True)
class LoraShape:
    """Sizes of a LoRA case.

    Args:
        ranks: [adapters][targets], 0: the adapter has no such target.
        segments: (adapter or -1, rows).
    """

    width: int
    d_in: int
    d_outs: tuple[int, ...]
    ranks: Sequence[Sequence[int]]
    segments: Sequence[tuple[int, int]]
    splits: int = 1
    gap: int = 0
    tile: int = 16


def lora_case(operation: str, dtype: str, seed: int, shape: LoraShape) -> Case:
    """A case of mbgmv_shrink, mbgmv_expand, mbgmm_shrink, mbgmm_expand, lora_shrink or lora_expand."""
    rng = np.random.default_rng(seed)
    layout, targets = lay_out(rng, dtype, shape), len(shape.d_outs)
    owners = [adapter for adapter, length in shape.segments for _ in range(length)]
    single, together = operation.startswith("mbgmv"), operation.startswith("lora")
    entries = [(adapter, row, 1) for row, adapter in enumerate(owners)] if single else cut_tiles(rng, shape)
    alone = {row for row, (adapter, length) in zip(starts(shape), shape.segments, strict=True) if length == 1}
    if together:  # those with several rows first, those without any last
        entries.sort(key=lambda entry: 2 if entry[2] == 0 else entry[1] in alone)
    lora = np.zeros((targets, len(entries), 4), np.int32)
    for target, (i, entry) in itertools.product(range(targets), enumerate(entries)):
        lora[target, i] = layout.lora.get((entry[0], target), (0, 0, 0, 0))
    tiles = [] if single else [np.array([entry[1:] for entry in entries], np.int32).reshape(-1, 2)]
    if together:
        kinds = [(count > 0, count > 0 and first not in alone) for _, first, count in entries]
        tiles.append(np.array([sum(tall for _, tall in kinds), sum(used for used, _ in kinds)], np.int32))
    common = (layout.pages, layout.table, lora, *tiles)
    t_columns = -(-max(1, *map(max, shape.ranks)) // 8) * 8
    t = np.full((shape.splits, len(owners), targets, t_columns), np.nan, np.float32)
    served = [(row, adapter) for adapter, first, count in entries for row in range(first, first + count)]
    work = [(row, target, (adapter, target)) for row, adapter in served for target in range(targets)]
    work = [item for item in work if item[2] in layout.lora]
    if operation.endswith("shrink"):
        x = store(normal(rng, len(owners), shape.d_in), dtype, shape.gap)
        want, written = np.full(t.shape[1:], np.nan), np.zeros(t.shape, np.bool_)
        for row, target, key in work:
            want[row, target, : layout.lora[key][2]] = x[row].astype(np.float64) @ layout.a[key]
            written[:, row, target] = True
        arguments = getattr(lora_arguments, operation)(t, x, *common)
        if together:
            written[1:, list(alone)] = False

        def summed(after: dict[str, Any]) -> dict[str, np.ndarray]:
            return {"t": after["t"].sum(axis=0, where=written.any(axis=(2, 3), keepdims=True))}

        return Case(operation, dtype, arguments, {"t": want}, summed, {"t": ~written})
    y = store(normal(rng, len(owners), sum(shape.d_outs)), dtype, shape.gap)
    want, written, ends = y.astype(np.float64), np.zeros(y.shape, np.bool_), np.cumsum(shape.d_outs)
    for row, target, key in work:
        _, _, rank, scale = layout.lora[key]
        split = slice(0, 1 if together and row in alone else shape.splits)
        t[split, row, target, :rank] = normal(rng, split.stop, rank)
        columns = slice(ends[target] - shape.d_outs[target], ends[target])
        delta = t[split, row, target, :rank].sum(axis=0, dtype=np.float64) @ layout.b[key]
        want[row, columns] += np.int32(scale).view(np.float32) * delta
        written[row, columns] = True
    arguments = getattr(lora_arguments, operation)(y, t, *common, shape.d_outs)
    return Case(operation, dtype, arguments, {"y": want}, untouched={"y": ~written})


def starts(shape: LoraShape) -> list[int]:
    """The first row of each segment."""
    return list(itertools.accumulate((length for _, length in shape.segments[:-1]), initial=0))


def cut_tiles(rng: np.random.Generator, shape: LoraShape) -> list[tuple[int, int, int]]:
    """(adapter, first row, rows) of tiles in random order, some of them empty."""
    tiles, first = [], 0
    for adapter, length in shape.segments:
        tiles += [(adapter, first + i, min(shape.tile, length - i)) for i in range(0, length, shape.tile)]
        first += length
    tiles = [tile for tile in tiles if tile[0] >= 0] + [(-1, 0, 0)] * 2
    return [tiles[i] for i in rng.permutation(len(tiles))]


@dataclass(frozen=True)
class Layout:
    """Adapters in pages.

    Args:
        pages: [pages, width]; table: [1, entries] page ids.
        a, b: A [d_in, rank] and B [rank, d_out] of (adapter, target) as stored, in float64.
        lora: the four words of a Lora entry of (adapter, target).
    """

    pages: np.ndarray
    table: np.ndarray
    a: dict[tuple[int, int], np.ndarray]
    b: dict[tuple[int, int], np.ndarray]
    lora: dict[tuple[int, int], tuple[int, int, int, int]]


def lay_out(rng: np.random.Generator, dtype: str, shape: LoraShape) -> Layout:
    """Vectors cut into pages in random order, with gaps in the table; pages of nobody are NaN."""
    a, b, lora, table = {}, {}, {}, [-1]
    pieces: list[tuple[int, np.ndarray]] = []

    def add(vectors: np.ndarray) -> int:
        table.extend([-1] * int(rng.integers(0, 3)))
        start = len(table)
        for vector in vectors:
            for first in range(0, len(vector), shape.width):
                pieces.append((len(table), vector[first : first + shape.width]))
                table.append(-1)
        return start

    for adapter, ranks in enumerate(shape.ranks):
        for target, (rank, d_out) in enumerate(zip(ranks, shape.d_outs, strict=True)):
            if rank:
                columns = store(normal(rng, rank, shape.d_in, sd=shape.d_in**-0.5), dtype)
                rows = store(normal(rng, rank, d_out, sd=0.3), dtype)
                scale = np.float32(rng.uniform(0.25, 2))
                key = (adapter, target)
                lora[key] = (add(columns), add(rows), rank, int(scale.view(np.int32)))
                a[key], b[key] = columns.astype(np.float64).T, rows.astype(np.float64)
    count = len(pieces) + 5
    pages = store(np.full((count, shape.width), np.nan), dtype, page_gap(shape.width, dtype))
    for (entry, piece), page in zip(pieces, rng.permutation(count).tolist(), strict=False):
        table[entry] = page
        pages[page] = 0  # a page is written whole
        pages[page, : len(piece)] = piece
    return Layout(pages, np.array([table], np.int32), a, b, lora)


def lookup_case(dtype: str, seed: int, layers: int, adapters: int, entries: int) -> Case:
    """A case of lora_lookup."""
    rng = np.random.default_rng(seed)
    tables = AdapterTables.empty(adapters, layers, table=int(rng.integers(1, 50)))
    for name, array in vars(tables).items():
        if name != "pages":
            array[...] = rng.integers(0, 99, array.shape)
    slots = rng.integers(-1, adapters, entries).astype(np.int32)
    lora = np.full((layers, 7, entries, 4), -9, np.int32)
    want = np.zeros(lora.shape, np.int32)
    for layer, target, i in np.ndindex(layers, 7, entries):
        if (slot := slots[i]) >= 0:
            start, scale = slot * tables.pages.shape[1], tables.scale[slot, layer, target]
            places = (start + tables.a_start[slot, target], start + tables.b_start[slot, target])
            want[layer, target, i] = (*places, tables.rank[slot, layer, target], scale.view(np.int32))
    arguments = lora_arguments.lora_lookup(lora, slots, tables)
    wrong: Callable[[dict[str, Any]], dict[str, np.ndarray]] = lambda after: {"wrong": after["lora"] != want}  # noqa: E731
    return Case("lora_lookup", dtype, arguments, {"wrong": np.zeros(lora.shape)}, wrong)


def join_case(dtype: str, seed: int, shards: int, splits: int, rows: int, targets: int) -> Case:
    """A case of lora_join: ranks that do not divide, of an adapter that may lack a target, and rows of the base."""
    rng = np.random.default_rng(seed)
    first = int(rng.integers(0, 8 - targets))
    columns = rng.integers(0, 9, (5, 7)).astype(np.int32)
    slots = rng.integers(-1, 5, rows).astype(np.int32)
    part_columns, t_columns = 8, 8 * shards + int(rng.integers(0, 5))
    parts = normal(rng, shards, splits, rows, targets, part_columns).astype(np.float32)
    t = np.full((splits, rows, targets, t_columns), np.float32(-9))
    want = t.copy()
    for row, target in np.ndindex(rows, targets):
        each = columns[slots[row], first + target] if slots[row] >= 0 else 0
        for shard in range(shards):
            want[:, row, target, shard * each : (shard + 1) * each] = parts[shard, :, row, target, :each]
    arguments = lora_arguments.lora_join(t, parts, slots, columns, first)
    wrong: Callable[[dict[str, Any]], dict[str, np.ndarray]] = lambda after: {"wrong": after["t"] != want}  # noqa: E731
    return Case("lora_join", dtype, arguments, {"wrong": np.zeros(t.shape)}, wrong)


def peer_case(dtype: str, seed: int, operation: str, chunks: int, shards: int, ended: bool = False) -> Case:
    """A case of peer_reduce or peer_gather: the others have put their letters, and some are a turn ahead already.

    The memory of all shards is one array here, this shard's first. Turns are near the largest there are, or few.

    Args:
        ended: the group has ended, and the last shard has said nothing; then the result is left as it was.
    """
    blocks = 2
    rng = np.random.default_rng(seed)
    shard, turn, used = int(rng.integers(shards)), int(rng.choice([0, 5, 2**31 - 1])), -(-chunks // 512)
    memory = rng.integers(-99, 99, (shards, memory_bytes(shards, blocks) // 4), np.int32)
    size = shards * 2 * blocks * 2048
    letters = memory[:, :size].reshape(shards, shards, 2, blocks, 2048)  # [memory of, from, turn, block, words]
    said = memory[:, size : size + shards * blocks].reshape(shards, shards, blocks)
    assert np.shares_memory(letters, memory) and np.shares_memory(said, memory)
    parts = [store(normal(rng, chunks * 16 // DTYPES[dtype].itemsize), dtype) for _ in range(shards)]
    for other in range(shards):
        if other != shard:
            flat = np.zeros(blocks * 2048, np.int32)
            flat[: chunks * 4] = parts[other].view(np.int32)
            letters[0, other, turn % 2] = flat.reshape(blocks, 2048)
            said[0, other] = np.array(turn + rng.integers(1, 3, blocks), np.uint32).astype(np.int32)
    if ended:
        said[0, (shard - 1) % shards] = turn
    before = memory.copy()
    for place in range(1, shards):
        letters[place, shard, turn % 2].reshape(-1)[: chunks * 4] = parts[shard].view(np.int32)
        said[place, shard, :used] = np.array(turn + 1, np.uint32).astype(np.int32)
    want_memory, memory = memory.reshape(-1).copy(), before.reshape(-1)
    offsets = np.array([(other - shard) % shards * before.strides[0] for other in range(shards)], np.int64)
    turns = np.full(blocks, turn, np.int32)
    mailbox = Mailbox(Shard(shard, shards), memory, offsets, turns, np.full(1, ended, np.int32))
    x = parts[shard].copy()
    if operation == "peer_reduce":
        output, arguments = "x", peer_reduce(x, mailbox)
        want = x if ended else np.sum([part.astype(np.float64) for part in parts], axis=0)
    else:
        gathered = np.full((shards, *x.shape), 9).astype(x.dtype)
        output, arguments = "gathered", peer_gather(gathered, x, mailbox)
        want = gathered if ended else np.stack(parts)
    turned = np.where(np.arange(blocks) < used, np.array(turn + 1, np.uint32).astype(np.int32), turn)

    def derived(after: dict[str, Any]) -> dict[str, np.ndarray]:
        wrong = np.append(after["memory"] != want_memory, after["turns"] != turned)
        return {output: after[output], "wrong": wrong}

    wants = {output: want.astype(np.float64), "wrong": np.zeros(len(memory) + blocks)}
    return Case(operation, dtype, arguments, wants, derived)


def pad_case(dtype: str, seed: int, shape: LoraShape, of_b: bool) -> Case:
    """A case of pad_adapter: more places in the stack than the largest rank, more room in the table than entries."""
    rng = np.random.default_rng(seed)
    laid = lay_out(rng, dtype, shape)
    targets, columns = (1 if of_b else len(shape.d_outs)), max(max(ranks) for ranks in shape.ranks) + 3
    entries = rng.permutation([*range(len(shape.ranks)), 0, -1])
    length = shape.d_outs[0] if of_b else shape.d_in
    lora = np.full((targets, len(entries) + 3, 4), 99, np.int32)
    want = np.zeros((len(entries), targets, columns, length))
    for entry, target in np.ndindex(len(entries), targets):
        place = lora[target, entry] = laid.lora.get((entries[entry], target), (0, 0, 0, 0))
        if place[2]:
            key = (entries[entry], target)
            scaled = laid.b[key] * np.array(place[3], np.int32).view(np.float32)
            want[entry, target, : place[2]] = scaled if of_b else laid.a[key].T
    out = store(np.full(want.shape, np.nan), dtype)
    arguments = pad_arguments.pad_adapter(out, laid.pages, laid.table, lora, of_b)
    return Case("pad_adapter", dtype, arguments, {"out": want})


# --- attention ---


def attention_pages(
    rng: np.random.Generator, dtype: str, kv_heads: int, head_dim: int, contexts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Pages in random order, the table of sequences (slot i: sequence i), and keys and values as stored, in float64."""
    table = np.full((len(contexts), 2, max([1, *contexts])), -1, np.int32)
    count = 2 * sum(contexts) + 5
    pages = store(np.full((count, kv_heads * head_dim), np.nan), dtype, page_gap(kv_heads * head_dim, dtype))
    order, both = iter(rng.permutation(count).tolist()), []
    for slot, context in enumerate(contexts):
        vectors = store(normal(rng, 2, context, kv_heads * head_dim), dtype)
        for half, position in np.ndindex(2, context):
            page = table[slot, half, position] = next(order)
            pages[page] = vectors[half, position]
        both.append(vectors.astype(np.float64).reshape(2, context, kv_heads, head_dim))
    return pages, table, both


def attend(q: np.ndarray, both: np.ndarray, visible: int, group: int) -> np.ndarray:
    """One row's heads [heads, head_dim] over the first `visible` tokens."""
    out = np.zeros(q.shape)
    for head in range(len(q)) if visible else ():
        score = both[0, :visible, head // group] @ q[head] / q.shape[1] ** 0.5
        weight = np.exp(score - score.max())
        out[head] = weight / weight.sum() @ both[1, :visible, head // group]
    return out


def decode_case(
    dtype: str, seed: int, kv_heads: int, group: int, head_dim: int, contexts: Sequence[int], splits: int, gap: int = 0
) -> Case:
    """A case of paged_attention_decode; a context of -1: a row that is not decode. Splits are merged by the oracle."""
    rng = np.random.default_rng(seed)
    rows, heads = len(contexts), kv_heads * group
    pages, table, both = attention_pages(rng, dtype, kv_heads, head_dim, [max(c, 0) for c in contexts])
    q = store(normal(rng, rows, heads * head_dim), dtype, gap)
    out = store(np.full(q.shape, np.nan), dtype, gap)
    queries = np.array([(-1 if c < 0 else i, max(c, 0)) for i, c in enumerate(contexts)], np.int32)
    chunk = -(-table.shape[2] // splits)
    partial, stats = (np.full((rows, heads, splits, n), np.nan, np.float32) for n in (head_dim, 2))
    arguments = attention_arguments.paged_attention_decode(out, partial, stats, q, pages, table, queries, chunk)
    want = np.full((rows, heads, head_dim), np.nan)
    for row, context in enumerate(contexts):
        if context >= 0:
            want[row] = attend(q[row].astype(np.float64).reshape(heads, head_dim), both[row], context, group)
    skipped = np.repeat(np.array(contexts) < 0, heads * head_dim).reshape(rows, -1)
    merged = None if splits == 1 else lambda after: {"out": merge(after["partial"], after["stats"], queries, chunk)}
    expected = {"out": want.reshape(rows, -1)}
    return Case("paged_attention_decode", dtype, arguments, expected, merged, {"out": skipped})


def merge(partial: np.ndarray, stats: np.ndarray, queries: np.ndarray, chunk: int) -> np.ndarray:
    """What paged_attention_merge computes, in float64."""
    rows, heads, _, head_dim = partial.shape
    out = np.full((rows, heads, head_dim), np.nan)
    for row, (slot, context) in enumerate(queries.tolist()):
        used = -(-context // chunk)
        if slot >= 0:
            out[row] = 0
        if slot >= 0 and used:
            largest, total = stats[row, :, :used].astype(np.float64).transpose(2, 0, 1)
            weight = np.exp(largest - largest.max(axis=1, keepdims=True))
            sums = np.einsum("hs,hsd->hd", weight, partial[row, :, :used].astype(np.float64))
            out[row] = sums / (weight * total).sum(axis=1)[:, None]
    return out.reshape(rows, heads * head_dim)


def merge_case(dtype: str, seed: int, heads: int, head_dim: int, contexts: Sequence[int], chunk: int) -> Case:
    """A case of paged_attention_merge; splits that a row has no tokens for are NaN."""
    rng = np.random.default_rng(seed)
    rows, splits = len(contexts), max(1, -(-max(contexts) // chunk))
    queries = np.array([(-1 if c < 0 else i, max(c, 0)) for i, c in enumerate(contexts)], np.int32)
    partial, stats = normal(rng, rows, heads, splits, head_dim), np.abs(normal(rng, rows, heads, splits, 2, sd=2)) + 0.5
    for row, context in enumerate(queries[:, 1].tolist()):
        partial[row, :, -(-context // chunk) :] = stats[row, :, -(-context // chunk) :] = np.nan
    partial, stats = partial.astype(np.float32), stats.astype(np.float32)
    out = store(np.full((rows, heads * head_dim), np.nan), dtype, 3)
    arguments = attention_arguments.paged_attention_merge(out, partial, stats, queries, chunk)
    skipped = np.repeat(np.array(contexts) < 0, heads * head_dim).reshape(rows, -1)
    want = {"out": merge(partial, stats, queries, chunk)}
    return Case("paged_attention_merge", dtype, arguments, want, untouched={"out": skipped})


def prefill_case(
    dtype: str,
    seed: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    spans: Sequence[tuple[int, int]],
    gap: int = 0,
    tile: int = 16,
) -> Case:
    """A case of paged_attention_prefill; spans are (rows, context); the first row of the step belongs to none."""
    rng = np.random.default_rng(seed)
    heads, rows = kv_heads * group, 1 + sum(length for length, _ in spans)
    pages, table, both = attention_pages(rng, dtype, kv_heads, head_dim, [context for _, context in spans])
    q = store(normal(rng, rows, heads * head_dim), dtype, gap)
    out = store(np.full(q.shape, np.nan), dtype, gap)
    want, tiles, row = np.full((rows, heads, head_dim), np.nan), [(0, 0, 0, 0)], 1
    for slot, (length, context) in enumerate(spans):
        for i in range(0, length, tile):
            tiles.append((row + i, min(tile, length - i), slot, context - length + i + 1))
        for i in range(length):
            query = q[row + i].astype(np.float64).reshape(heads, head_dim)
            want[row + i] = attend(query, both[slot], context - length + i + 1, group)
        row += length
    order = rng.permutation(len(tiles))
    places = (pages, table, np.array(tiles, np.int32)[order], head_dim)
    arguments = attention_arguments.paged_attention_prefill(out, q, *places)
    untouched = np.zeros(q.shape, np.bool_)
    untouched[0] = True
    return Case("paged_attention_prefill", dtype, arguments, {"out": want.reshape(rows, -1)}, None, {"out": untouched})


def rope_case(dtype: str, seed: int, rows: int, heads: int, kv_heads: int, head_dim: int, gap: int = 0) -> Case:
    """A case of rope_store; one row in four is padding, its pages -1."""
    rng = np.random.default_rng(seed)
    half, width, q_width = head_dim // 2, kv_heads * head_dim, heads * head_dim
    qkv = store(normal(rng, rows, q_width + 2 * width), dtype, gap)
    angle = rng.uniform(-9, 9, (20, half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    positions = rng.integers(0, 20, rows).astype(np.int32)
    pages = store(np.full((2 * rows + 3, width), np.nan), dtype, page_gap(width, dtype))
    k_pages, v_pages = rng.permutation(2 * rows + 3)[: 2 * rows].astype(np.int32).reshape(2, rows)
    padding = np.arange(rows) % 4 == 3
    k_pages[padding] = v_pages[padding] = -1
    values = qkv.astype(np.float64).reshape(rows, -1, head_dim)
    turned = (values[..., :half] + 1j * values[..., half:]) * (cos + 1j * sin.astype(np.float64))[positions][:, None]
    turned = np.concatenate([turned.real, turned.imag], axis=2).reshape(rows, -1)
    stored, q = np.full(pages.shape, np.nan), turned.copy()
    q[:, q_width:] = np.nan
    for row in np.flatnonzero(~padding):
        stored[k_pages[row]] = turned[row, q_width : q_width + width]
        stored[v_pages[row]] = qkv[row, q_width + width :]
    arguments = attention_arguments.rope_store(qkv, pages, cos, sin, positions, k_pages, v_pages)
    untouched = {"pages": np.isnan(stored), "qkv": np.isnan(q)}
    return Case("rope_store", dtype, arguments, {"pages": stored, "qkv": q}, untouched=untouched)


# --- rows and pages ---


def rms_norm_case(
    dtype: str, seed: int, rows: int, hidden: int, add: bool, gap: int = 0, delta_gap: int = 1
) -> Case:
    """A case of rms_norm, with or without the residual's addition."""
    rng = np.random.default_rng(seed)
    x = store(normal(rng, rows, hidden), dtype, gap)
    delta = store(normal(rng, rows, hidden), dtype, delta_gap)
    weight, out = store(1 + normal(rng, hidden, sd=0.1), dtype), store(np.full((rows, hidden), np.nan), dtype, gap)
    total = x.astype(np.float64)
    if add:
        total = (x.astype(np.float32) + delta.astype(np.float32)).astype(DTYPES[dtype]).astype(np.float64)
    want = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 0.01) * weight.astype(np.float64)
    arguments = row_arguments.rms_norm(out, x, delta if add else None, weight, 0.01)
    untouched = {} if add else {"x": np.ones(x.shape, np.bool_)}
    return Case("rms_norm", dtype, arguments, {"out": want, "x": total}, untouched=untouched)


def silu_case(dtype: str, seed: int, rows: int, ffn: int, gap: int = 0, out_gap: int = 0) -> Case:
    """A case of silu_mul, with gates of up to some thousands."""
    rng = np.random.default_rng(seed)
    values = normal(rng, rows, 2 * ffn)
    values[:, : ffn // 3] *= 1000
    values[:, ffn:] = np.clip(values[:, ffn:], -2, 2)
    gate_up, out = store(values, dtype, gap), store(np.full((rows, ffn), np.nan), dtype, out_gap)
    gate, up = gate_up[:, :ffn].astype(np.float64), gate_up[:, ffn:].astype(np.float64)
    small = np.exp(-np.abs(gate))
    want = gate * np.where(gate >= 0, 1 / (1 + small), small / (1 + small)) * up
    return Case("silu_mul", dtype, row_arguments.silu_mul(out, gate_up), {"out": want})


def argmax_case(dtype: str, seed: int, rows: int, vocab: int, gap: int = 0) -> Case:
    """A case of argmax: ties, the largest in front, and one row in three with a number that is not finite."""
    rng = np.random.default_rng(seed)
    values = np.round(normal(rng, rows, vocab) * 4)
    for row, places in zip(range(rows), ([], [0], [5, 128], [], [7, 135, 263]), strict=False):
        values[row, [place for place in places if place < vocab]] = 99
    values[5:6] = -1 - np.abs(values[5:6])
    for row in range(0, rows, 3):
        values[row, rng.integers(0, vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    logits = store(values, dtype, gap)
    finite = np.isfinite(values).all(axis=1)
    token = np.where(finite, values.argmax(axis=1), np.nan)
    arrays = (np.full(rows, -9, np.int32), np.full(rows, -9, np.int32), logits)
    return Case("argmax", dtype, row_arguments.argmax(*arrays), {"token": token, "finite": finite.astype(np.float64)})


def gather_case(dtype: str, seed: int, rows: int, columns: int, gap: int = 0) -> Case:
    """A case of gather_rows: rows in any order, some twice; those that nobody wants are NaN."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 9, rows).astype(np.int32)
    values = normal(rng, 9, columns)
    values[np.setdiff1d(np.arange(9), ids)] = np.nan
    source, out = store(values, dtype, gap), store(np.full((rows, columns), np.nan), dtype, 2 * gap)
    want = {"out": source[ids].astype(np.float64)}
    return Case("gather_rows", dtype, row_arguments.gather_rows(out, source, ids), want)


def enter_tokens_case(dtype: str, seed: int, rows: int, most: int, shard: int = 0, shards: int = 1) -> Case:
    """A case of enter_tokens: half of the rows have their ids, one sample in three is of no use."""
    rng = np.random.default_rng(seed)
    each = 60 // shards
    sampled = np.stack([rng.integers(0, 60, most), rng.integers(0, 3, most) > 0]).astype(np.int32)
    ids, from_sample = rng.integers(0, 60, rows), rng.integers(0, most, rows)
    placeholder = rng.random(rows) < 0.5
    token_ids = np.where(placeholder, -1 - from_sample, ids).astype(np.int32)
    found = np.where(sampled[1, from_sample] > 0, sampled[0, from_sample], 0)
    tokens = np.where(placeholder, found, ids)
    want = {"token_ids": np.where(tokens // each == shard, tokens % each, each).astype(np.float64)}
    own = slice(shard * each, (shard + 1) * each)
    return Case("enter_tokens", dtype, row_arguments.enter_tokens(token_ids, sampled, own), want)


def enter_case(dtype: str, seed: int, rows: int, positions: int) -> Case:
    """A case of enter_pages: one row in four is padding, slot -1, whose place would lie in the table if it counted."""
    rng = np.random.default_rng(seed)
    table = rng.integers(-9, 0, (5, 2, positions)).astype(np.int32)
    places = rng.permutation(5 * positions)[:rows]
    slots, at = (places // positions).astype(np.int32), (places % positions).astype(np.int32)
    k_pages, v_pages = rng.integers(0, 99, (2, len(places))).astype(np.int32)
    slots[3::4], at[3::4] = -1, 2 * positions
    want, real = np.full(table.shape, np.nan), slots >= 0
    want[slots[real], 0, at[real]], want[slots[real], 1, at[real]] = k_pages[real], v_pages[real]
    arguments = row_arguments.enter_pages(table, slots, at, k_pages, v_pages)
    untouched = {"sequence_pages": np.isnan(want)}
    return Case("enter_pages", dtype, arguments, {"sequence_pages": want}, untouched=untouched)


# --- sampling ---

FILTERS = [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.6, 0.0), (40, 0.9, 0.1), (1, 0.5, 1.0), (7, 0.05, 0.0), (0, 1.0, 0.4)]
"""top-k, top-p, min-p of a row, in turn."""


def sampling_rows(seed: int, rows: int, vocab: int, gap: int, ties: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, with many of them equal or none, and parameters; one row in five is greedy."""
    rng = np.random.default_rng(seed)
    values = normal(rng, rows, vocab, sd=3)
    values[4::5, [0, -1]] = 50  # the greedy rows
    logits = store(np.round(values) if ties else values, "float32", gap)
    filters = [FILTERS[(seed + row) % len(FILTERS)] for row in range(rows)]
    top_k, top_p, min_p = (np.array(each) for each in zip(*filters, strict=True))
    temperature = np.where(np.arange(rows) % 5 == 4, 0, rng.choice([0.3, 1.0, 2.0], rows))
    return logits, {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}


def order_of(logits: np.ndarray) -> np.ndarray:
    """The order of float32 numbers as sample.h counts it."""
    bits = (logits.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint32)


def kept_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> list[int]:
    """What top-k, then top-p leave of a row, in sampler.py's order; nothing shared with it but that order."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    kept = order[:top_k] if top_k else order
    weights = [float(np.exp((float(logits[i]) - float(logits[order[0]])) / temperature)) for i in kept]
    before = np.cumsum(weights) - weights
    return [i for i, sum_before in zip(kept, before, strict=True) if top_p >= 1 or sum_before < top_p * sum(weights)]


def threshold_case(
    dtype: str, seed: int, rows: int, vocab: int, gap: int = 0, ties: bool = False, lost: bool = False
) -> Case:
    """A case of sample_threshold: the set that (order, ties) leave is what a sort leaves.

    Args:
        lost: the last row is all NaN; argmax says of such a row that `vocab` is its largest.
    """
    logits, how = sampling_rows(seed, rows, vocab, gap, ties)
    token, keep = logits.argmax(axis=1).astype(np.int32), np.full((rows, 2), -9, np.int32)
    want, greedy = np.zeros((rows, vocab)), np.repeat(how["temperature"][:, None] == 0, 2, axis=1)
    for row in np.flatnonzero(how["temperature"]):
        want[row, kept_tokens(logits[row], how["temperature"][row], how["top_k"][row], how["top_p"][row])] = 1
    if lost:
        logits[-1], token[-1], want[-1], greedy[-1] = np.nan, vocab, np.nan, True

    def sets(after: dict[str, Any]) -> dict[str, np.ndarray]:
        order, (least, ties) = order_of(after["logits"]), after["keep"].view(np.uint32).T[..., None]
        equal = order == least
        kept = (order > least) | (equal & (np.cumsum(equal, axis=1) <= ties))
        return {"kept": np.where(how["temperature"][:, None] > 0, kept, 0)}

    floats, top_k = {name: how[name].astype(np.float32) for name in how}, how["top_k"].astype(np.int32)
    arguments = sample_arguments.sample_threshold(keep, logits, token, floats["temperature"], top_k, floats["top_p"])
    return Case("sample_threshold", dtype, arguments, {"kept": want}, sets, {"keep": greedy})


def draw_case(
    dtype: str, seed: int, rows: int, vocab: int, gap: int = 0, ties: bool = False, lost: bool = False
) -> Case:
    """A case of sample_draw: NumPy's Philox points at a token of the running sum; lost: see threshold_case."""
    logits, how = sampling_rows(seed, rows, vocab, gap, ties)
    rng = np.random.default_rng(seed)
    seeds, positions = rng.integers(0, 1 << 64, rows, np.uint64), rng.integers(0, 9999, rows).astype(np.uint64)
    token, keep = logits.argmax(axis=1).astype(np.int32), np.zeros((rows, 2), np.uint32)
    if lost:
        logits[-1], token[-1] = np.nan, vocab
    want = token.astype(np.float64)
    for row in np.flatnonzero((how["temperature"] > 0) & (token < vocab)):
        heat = how["temperature"][row]
        kept = kept_tokens(logits[row], heat, how["top_k"][row], how["top_p"][row])
        order = order_of(logits[row])
        keep[row] = order[kept].min(), sum(order[kept] == order[kept].min())
        weights = np.zeros(vocab)
        weights[kept] = np.exp((logits[row, kept].astype(np.float64) - float(logits[row].max())) / heat)
        weights[weights < how["min_p"][row]] = 0
        random = np.random.Generator(np.random.Philox(key=int(seeds[row]), counter=int(positions[row]))).random()
        want[row] = np.argmax(np.cumsum(weights) > random * weights.sum())
    floats = {name: how[name].astype(np.float32) for name in how}
    places = (floats["temperature"], floats["min_p"], seeds, positions)
    arguments = sample_arguments.sample_draw(token, logits, keep.view(np.int32), *places)
    return Case("sample_draw", dtype, arguments, {"token": want})


def load_case(dtype: str, seed: int, layers: int, count: int, width: int, image_gap: int = 0) -> Case:
    """A case of load_pages."""
    rng = np.random.default_rng(seed)
    gap = page_gap(width, dtype)
    storage = store(np.full((layers, count + 4, width), np.nan), dtype, gap)
    image = store(normal(rng, layers, count, width), dtype, gap + image_gap)
    page_ids = rng.permutation(count + 4)[:count].astype(np.int32)
    want = np.full(storage.shape, np.nan)
    want[:, page_ids] = image
    arguments = row_arguments.load_pages(storage, image, page_ids)
    return Case("load_pages", dtype, arguments, {"storage": want}, untouched={"storage": np.isnan(want)})
