"""Staging: the numbers of a step in one host buffer, which travels to the device in one copy.

Sizes are rounded up to buckets, and what is beyond the step's own rows is padding that no kernel acts on: adapter -1,
page -1, sequence -1. So all steps of a bucket have their arrays at the same addresses. It knows batches, no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from slora_ref.batch import Batch
from slora_ref.ops import KernelOps, Segments, Spans
from slora_ref.ops.plan import AttentionPlan, LoraPlan, plan_attention
from slora_ref.ops.ticket import Ticket
from slora_ref.sampler import Sampling
from slora_ref.shapes import Array, Int

ALIGNMENT = 16  # bytes; what one vector load needs
INT_MAX = (1 << 31) - 1
NONE = -1
SMALL, STEPS = 8, ((256, 8), (512, 32), (math.inf, 64))  # powers of two to SMALL, then multiples of 8, 32, 64
LEAST_LOGITS = 4  # so that two rows of integers, one behind the other, are both aligned


def bucket(rows: int) -> int:
    """The size that so many rows are padded to: at most an eighth more from 64 rows on."""
    if rows <= SMALL:
        return 1 << max(0, rows - 1).bit_length()
    each = next(step for most, step in STEPS if rows <= most)
    return -(-rows // each) * each


def buckets(most: int) -> list[int]:
    """The sizes of all steps of up to so many rows."""
    return sorted({bucket(rows) for rows in range(1, most + 1)})


@dataclass(frozen=True)
class StepArrays:
    """A step's arrays, each a part of one buffer; rows first, so that their places do not depend on the logits.

    Args:
        token_ids, positions, slots, k_pages, v_pages: [rows] token, its place, its sequence and its two pages.
        adapters: [rows] the slot of its adapter.
        row_slots, tile_slots, tiles, counts, queries, attention_tiles: of LoraPlan and AttentionPlan.
        logit_rows: [logits] rows whose logits are wanted.
        temperature, top_k, top_p, min_p, seeds, places: [logits] of Sampling; temperature 0 where nothing is drawn.
    """

    token_ids: Array
    positions: Array
    slots: Array
    k_pages: Array
    v_pages: Array
    adapters: Array
    row_slots: Array
    tile_slots: Array
    tiles: Array
    counts: Array
    queries: Array
    attention_tiles: Array
    logit_rows: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array
    places: Array


@dataclass(frozen=True)
class Staged:
    """A step on its way to the device.

    Args:
        rows, logits: the buckets.
        arrays: on the device.
        lora, attention: the plans, whose arrays are among those.
        segments, spans: the batch's.
        sent: passed when the arrays have come to the device.
    """

    rows: int
    logits: int
    arrays: StepArrays
    lora: LoraPlan
    attention: AttentionPlan
    segments: Segments
    spans: Spans
    sent: Ticket

    @property
    def layers_shape(self) -> tuple[object, ...]:
        """What the launches of the layers depend on: rows, and which kernels have anything to do; no adapter's name."""
        return self.rows, self.lora.kernels, self.attention.single, self.attention.shared


class Staging:
    """One buffer in host memory and one on the device.

    Args:
        ops: the backend.
        most_rows: of a step; all of them may want logits.
    """

    def __init__(self, ops: KernelOps, most_rows: int) -> None:
        self._ops, self.most = ops, bucket(most_rows)
        self.most_logits = max(self.most, LEAST_LOGITS)
        size = _carve(None, *self._shapes(self.most, self.most_logits))[1]
        self._host, self._device = ops.staging((size,), np.uint8), ops.new((size,), np.uint8)
        self._sent: Ticket | None = None
        self._views: dict[tuple[int, int], tuple[StepArrays, StepArrays, int]] = {}

    def stage(self, batch: Batch, sampling: Sampling) -> Staged:
        """Plans the step and starts its copy."""
        if self._sent is not None:
            self._sent.wait()  # the copy of the step before has left the buffer
        rows, logits = bucket(len(batch.token_ids)), max(LEAST_LOGITS, bucket(len(batch.logit_rows)))
        lora, attention = self._ops.plan_lora(batch.segments, rows), plan_attention(batch.spans, rows)
        host, device, size = self._arrays(rows, logits)
        _fill_rows(host, batch, lora, attention)
        _fill_logits(host, batch, sampling)
        self._sent = self._ops.upload(self._device[:size], self._host[:size])
        return Staged(rows, logits, device, lora, attention, batch.segments, batch.spans, self._sent)

    def _arrays(self, rows: int, logits: int) -> tuple[StepArrays, StepArrays, int]:
        """The arrays of a bucket in both buffers, and the bytes that they take."""
        key = rows, logits
        if key not in self._views:
            shapes = self._shapes(rows, logits)
            (host, size), (device, _) = _carve(self._host, *shapes), _carve(self._device, *shapes)
            self._views[key] = StepArrays(**host), StepArrays(**device), size
        return self._views[key]

    def _shapes(self, rows: int, logits: int) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
        """Shape of each array of a bucket, and the dtypes that are not int32."""
        none = np.zeros(0, np.int64)
        lora = self._ops.plan_lora(Segments(none, none, none, none), rows)
        attention = plan_attention(Spans(none, none, none, none), rows)
        of_rows = ("token_ids", "positions", "slots", "k_pages", "v_pages", "adapters", "row_slots")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(of_rows, (rows,))
        shapes |= {name: getattr(lora, name).shape for name in ("tile_slots", "tiles", "counts")}
        shapes |= {"queries": attention.queries.shape, "attention_tiles": attention.tiles.shape}
        shapes |= dict.fromkeys(("logit_rows", "temperature", "top_k", "top_p", "min_p", "seeds", "places"), (logits,))
        dtypes: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "min_p"), np.float32)
        return shapes, dtypes | dict.fromkeys(("seeds", "places"), np.uint64)


def _carve(buffer: Any, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Cuts arrays out of a buffer of bytes (None: only counts), each aligned; returns them and the bytes taken."""
    arrays, at = {}, 0
    for name, shape in shapes.items():
        dtype = np.dtype(dtypes.get(name, np.int32))
        size = math.prod(shape) * dtype.itemsize
        if buffer is not None:
            arrays[name] = buffer[at : at + size].view(dtype).reshape(shape)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return arrays, at


def _pad(to: Int[Array, " padded"], values: Int[Array, " rows"], padding: int) -> None:
    to[: len(values)] = values
    to[len(values) :] = padding


def _fill_rows(host: StepArrays, batch: Batch, lora: LoraPlan, attention: AttentionPlan) -> None:
    """What the model needs to know of the rows."""
    _pad(host.token_ids, batch.token_ids, 0)
    _pad(host.positions, batch.positions, 0)
    _pad(host.slots, np.repeat(batch.spans.slot, batch.spans.length), NONE)
    _pad(host.k_pages, batch.k_pages, NONE)
    _pad(host.v_pages, batch.v_pages, NONE)
    host.adapters[...] = batch.segments.of_rows(len(host.adapters))
    host.row_slots[...], host.tile_slots[...] = lora.row_slots, lora.tile_slots
    host.tiles[...], host.counts[...] = lora.tiles, lora.counts
    host.queries[...], host.attention_tiles[...] = attention.queries, attention.tiles


def _fill_logits(host: StepArrays, batch: Batch, sampling: Sampling) -> None:
    """What the sampler needs to know of the logits: those that nothing is sampled from are greedy, and ignored."""
    _pad(host.logit_rows, batch.logit_rows, 0)
    host.temperature[...], sampled = 0, batch.sampled
    host.temperature[sampled], host.top_k[sampled] = sampling.temperature, np.minimum(sampling.top_k, INT_MAX)
    host.top_p[sampled], host.min_p[sampled] = sampling.top_p, sampling.min_p
    host.seeds[sampled] = np.array(sampling.seeds, np.uint64)
    host.places[sampled] = np.array(sampling.positions, np.uint64)
