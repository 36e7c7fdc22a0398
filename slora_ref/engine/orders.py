"""Orders: what the leading shard tells the others, as bytes. Integers, weights' places, and texts; never code.

`open` says where the weights come from and the engine's options, `pool` the size of the pool; `join` makes the model,
once every shard has its memory. `load` says where an adapter lies and the pages it goes to, `run` is a batch and how to
sample, so that every shard finds the same tokens; `stop` ends it; `time` repeats parts of the last step for a
measurement. Nothing is told of a page that is freed or of a request that ends: a batch names every page that matters,
so shards cannot come to differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from slora_ref.batch import Batch
from slora_ref.checkpoint.fingerprint import Fingerprint
from slora_ref.ops import Segments, Spans
from slora_ref.pager import PagePool
from slora_ref.sampler import Sampling
from slora_ref.shapes import Array
from slora_ref.store import AdapterVersion

Kind = Literal["open", "pool", "join", "load", "run", "time", "stop"]


@dataclass(frozen=True, eq=False)
class Order:
    """One message.

    Args:
        values: what JSON can hold.
        arrays: of numbers.
    """

    kind: Kind
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def encode(self) -> bytes:
        """A line of JSON that describes the arrays, and their numbers one after the other."""
        forms = {name: (array.dtype.str, array.shape) for name, array in self.arrays.items()}
        head = json.dumps({"kind": self.kind, "values": self.values, "arrays": forms})
        return b"".join([head.encode(), b"\n", *(array.tobytes() for array in self.arrays.values())])

    @classmethod
    def decode(cls, message: bytes) -> Order:
        """What `encode` has written; the arrays are read-only."""
        head, _, data = message.partition(b"\n")
        values, arrays, at = json.loads(head), {}, 0
        for name, (dtype, shape) in values["arrays"].items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += arrays[name].nbytes
        assert at == len(data), f"{len(data)} bytes of arrays came, {at} were announced"
        return cls(values["kind"], values["values"], arrays)


def load_order(version: AdapterVersion, pool: PagePool) -> Order:
    """The order to load an adapter into the pages that the pool has set aside for it."""
    slot, fingerprint = pool.adapter_slot(version.adapter_id), version.header.fingerprint
    values = {"slot": slot, "folder": str(version.header.path)}
    values |= {"modified_ns": fingerprint.modified_ns, "size": fingerprint.size, "digest": fingerprint.digest.hex()}
    pages = pool.adapters.pages[slot, : version.pages]
    return Order("load", values, {"pages": pages, "ranks": version.shape.ranks, "scales": version.shape.scales})


def names_same_file(order: Order, found: Fingerprint) -> bool:
    """Whether a load order means the file of which this fingerprint was taken, perhaps on another host."""
    values = order.values
    digest = bytes.fromhex(values["digest"])
    return Fingerprint(values["modified_ns"], values["size"], digest, 0, 0).same_content(found)


ROWS = ("token_ids", "positions", "k_pages", "v_pages", "logit_rows", "sampled")
"""The arrays of a batch that stand alone; beside them are those of segments and spans."""


def run_order(batch: Batch, sampling: Sampling) -> Order:
    """The order to compute one step, and to sample as shard 0 does."""
    arrays = {name: getattr(batch, name) for name in ROWS}
    arrays |= {f"segments.{name}": array for name, array in vars(batch.segments).items()}
    arrays |= {f"spans.{name}": array for name, array in vars(batch.spans).items()}
    arrays |= {f"sampling.{name}": _numbers(value) for name, value in vars(sampling).items()}
    return Order("run", {"wants_logits": batch.wants_logits}, arrays)


def _numbers(values: Array | tuple[int, ...]) -> Array:
    """Seeds and positions, of up to 64 bits without a sign, as arrays like the rest."""
    return np.array(values, np.uint64) if isinstance(values, tuple) else values


def told_sampling(order: Order) -> Sampling:
    """How to sample, by a run order."""
    numbers: dict[str, Any] = {part.name: order.arrays[f"sampling.{part.name}"] for part in fields(Sampling)}
    return Sampling(**numbers | {name: tuple(numbers[name].tolist()) for name in ("seeds", "positions")})


def batch_of(order: Order) -> Batch:
    """The batch of a run order."""
    rows: dict[str, Any] = {name: order.arrays[name] for name in ROWS}
    segments, spans = (
        {part.name: order.arrays[f"{group}.{part.name}"] for part in fields(kind)}
        for group, kind in (("segments", Segments), ("spans", Spans))
    )
    return Batch(**rows, segments=Segments(**segments), spans=Spans(**spans), **order.values)
