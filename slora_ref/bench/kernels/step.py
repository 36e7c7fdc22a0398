"""What `bench kernels` measures of a step beside its layers, in Llama-7B: these kernels run once a step.

The tables of a step (who has which adapter, which pages are new), the rows that are looked up, and sampling; and the
joining of the shards' parts of t, which runs once a projection.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from slora_ref.bench.kernels.cases import HIDDEN
from slora_ref.bench.kernels.peers import peer_parts, peer_sum
from slora_ref.bench.kernels.rows import LAYERS, POSITIONS, VOCAB, RowCase, draw, exact
from slora_ref.config import TARGETS
from slora_ref.ops import lora_arguments, row_arguments, sample_arguments
from slora_ref.ops.launch import Arguments
from slora_ref.ops.tables import AdapterTables

RANK, SHARDS, SPLITS, GROUP = 64, 2, 4, 3  # GROUP: q, k and v
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.7
INT, ENTRY = 4, 16  # bytes


def step_cases(rows: int) -> list[RowCase]:
    """One of each, for a step of so many rows, each with an adapter and a sequence of its own."""
    entered = [lookup(rows), join(rows), feed(rows), enter(rows), gather(rows), threshold(rows), token(rows)]
    return [*entered, peer_sum(rows), peer_parts(rows)]


def numbers(count: int) -> Any:
    """[count] int32, each of 0 .. count - 1 once, in random order."""
    return cupy.asarray(np.random.default_rng(5).permutation(count).astype(np.int32))


def lookup(rows: int) -> RowCase:
    """lora_lookup for all layers and targets."""
    entries = LAYERS * len(TARGETS) * rows

    def make(random: Any) -> Arguments:
        tables = AdapterTables.empty(rows, LAYERS, 1)
        tables.rank[...], tables.scale[...] = RANK, 1
        tables.a_start[...] = np.arange(rows * len(TARGETS)).reshape(rows, -1)
        device = AdapterTables(**{name: cupy.asarray(array) for name, array in vars(tables).items()})
        lora = cupy.empty((LAYERS, len(TARGETS), rows, lora_arguments.LORA_WORDS), np.int32)
        return lora_arguments.lora_lookup(lora, numbers(rows), device)

    def check(before: Arguments, after: Arguments) -> float:
        lora, starts = after["lora"], before["a_start"][before["slots"]].T + before["slots"]
        return exact((lora[..., 0] == starts).all() and (lora[..., 2] == RANK).all())

    return RowCase("lora_lookup", rows, entries * (ENTRY + 2 * INT), make, check)


def join(rows: int) -> RowCase:
    """lora_join of q, k and v."""
    shape = (SHARDS, SPLITS, rows, GROUP, RANK // SHARDS)

    def make(random: Any) -> Arguments:
        parts, columns = random.standard_normal(shape, dtype=np.float32), np.full((rows, len(TARGETS)), shape[-1])
        t = cupy.empty((*shape[1:-1], RANK), np.float32)
        return lora_arguments.lora_join(t, parts, numbers(rows), cupy.asarray(columns, np.int32), 0)

    def check(before: Arguments, after: Arguments) -> float:
        return exact((after["t"] == cupy.concatenate(list(before["parts"]), axis=-1)).all())

    return RowCase("lora_join", rows, 2 * INT * int(np.prod(shape)), make, check, "float32")


def enter(rows: int) -> RowCase:
    """enter_pages, a row a sequence."""

    def make(random: Any) -> Arguments:
        table, ids = cupy.empty((rows, 2, POSITIONS), np.int32), numbers(4 * rows).reshape(4, rows)
        return row_arguments.enter_pages(table, numbers(rows), *ids[1:])

    def check(before: Arguments, after: Arguments) -> float:
        table, slots, places = (after[name] for name in ("sequence_pages", "slots", "places"))
        written = table[slots, 0, places], table[slots, 1, places]
        return exact((written[0] == before["k_pages"]).all() and (written[1] == before["v_pages"]).all())

    return RowCase("enter_pages", rows, 6 * INT * rows, make, check, "float32")


def feed(rows: int) -> RowCase:
    """enter_tokens, where all are placeholders in the first run, and tokens that stay as they are in those after it."""

    def make(random: Any) -> Arguments:
        sampled = cupy.stack([numbers(rows), full(rows, 1, np.int32)])
        return row_arguments.enter_tokens(-1 - numbers(rows)[::-1], sampled, slice(0, rows))

    def check(before: Arguments, after: Arguments) -> float:
        return exact((after["token_ids"] == before["sampled"][0][-1 - before["token_ids"]]).all())

    return RowCase("enter_tokens", rows, 2 * INT * rows, make, check, "float32")


def gather(rows: int) -> RowCase:
    """gather_rows: the embeddings of a step's tokens."""

    def make(random: Any) -> Arguments:
        source = draw(random, VOCAB, HIDDEN)
        return row_arguments.gather_rows(cupy.empty((rows, HIDDEN), np.float16), source, numbers(VOCAB)[:rows])

    def check(before: Arguments, after: Arguments) -> float:
        return exact((after["out"] == before["source"][before["ids"]]).all())

    return RowCase("gather_rows", rows, 2 * 2 * rows * HIDDEN, make, check, most=8)


def sampling(random: Any, rows: int) -> dict[str, Any]:
    """Logits, where the largest is, and each row's options."""
    logits = random.standard_normal((rows, VOCAB), dtype=np.float32) / 4
    return {"logits": logits, "token": logits.argmax(axis=1).astype(np.int32), "temperature": full(rows, TEMPERATURE)}


def full(rows: int, value: float, dtype: Any = np.float32) -> Any:
    """[rows] one value."""
    return cupy.full(rows, value, dtype)


def kept(logits: Any, keep: Any) -> Any:
    """[rows] how many logits `keep` of sample_threshold leaves, and [rows, vocab] which are surely among them."""
    bits = logits.view(np.uint32)
    order = cupy.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
    above = order > keep[:, :1].view(np.uint32)
    return above.sum(axis=1) + keep[:, 1], above | (order == keep[:, :1].view(np.uint32))


def wanted(logits: Any) -> Any:
    """[rows] how many the options leave: of the TOP_K likeliest the fewest that have TOP_P of their probability."""
    best = -cupy.sort(-logits.astype(np.float64), axis=1)[:, :TOP_K]
    weights = cupy.exp((best - best[:, :1]) / TEMPERATURE)
    share = cupy.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    return (share < TOP_P).sum(axis=1) + 1


def threshold(rows: int) -> RowCase:
    """sample_threshold with top-k and top-p."""

    def make(random: Any) -> Arguments:
        options = {"top_k": full(rows, TOP_K, np.int32), "top_p": full(rows, TOP_P)}
        keep = cupy.empty((rows, 2), np.int32)
        return sample_arguments.sample_threshold(keep, **sampling(random, rows), **options)

    def check(before: Arguments, after: Arguments) -> float:
        return exact((kept(before["logits"], after["keep"])[0] == wanted(before["logits"])).all())

    return RowCase("sample_threshold", rows, INT * rows * VOCAB, make, check, "float32")


def token(rows: int) -> RowCase:
    """sample_draw behind a threshold that leaves the positive logits."""

    def make(random: Any) -> Arguments:
        keep = cupy.tile(cupy.asarray([np.uint32(1 << 31).view(np.int32), 0], np.int32), (rows, 1))
        words = {"seeds": numbers(rows).astype(np.uint64), "positions": numbers(rows).astype(np.uint64)}
        return sample_arguments.sample_draw(keep=keep, min_p=full(rows, 0), **words, **sampling(random, rows))

    def check(before: Arguments, after: Arguments) -> float:
        return exact((before["logits"][cupy.arange(rows), after["token"]] > 0).all())

    return RowCase("sample_draw", rows, INT * rows * VOCAB, make, check, "float32")
