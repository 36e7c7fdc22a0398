"""The integer arrays that kernels read: page tables of adapters and sequences, segments and spans of a step.

Everything a kernel needs to find a weight or a key in scattered pages is here; nothing here knows a request or a name.
Slots are small integers: a resident adapter has an adapter slot, a running sequence a sequence slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slora_ref.config import TARGETS
from slora_ref.shapes import Array, Float, Int


@dataclass(frozen=True)
class LoraGroup:
    """Targets that read the same input, so that one gather and one product serve them all.

    Args:
        name: for messages.
        targets: indices into TARGETS, in the order in which their outputs stand side by side in y.
    """

    name: str
    targets: tuple[int, ...]


def _group(name: str, *targets: str) -> LoraGroup:
    return LoraGroup(name, tuple(TARGETS.index(target) for target in targets))


QKV = _group("qkv", "q_proj", "k_proj", "v_proj")
O = _group("o", "o_proj")  # noqa: E741
GATE_UP = _group("gate_up", "gate_proj", "up_proj")
DOWN = _group("down", "down_proj")
LORA_GROUPS = (QKV, O, GATE_UP, DOWN)


@dataclass
class AdapterTables:
    """Where each resident adapter's A and B lie, and at which rank and scale they act.

    Column j of A is cut into pieces of `width` numbers, one page each: piece p of column j of target t lies in page
    `pages[slot, a_start[slot, t] + j * a_pieces + p]`; row j of B likewise from b_start. Within a group the As are
    neighbours, and so are the Bs.

    Args:
        pages: [adapter_slots, table] page ids, -1 where unused.
        a_start, b_start: [adapter_slots, targets] first entry of a target's A or B in `pages`.
        page_rank: [adapter_slots, targets] the rows of B that have pages: the largest rank of any layer.
        rank: [adapter_slots, layers, targets] the true rank, 0 where absent.
        a_page_rank, a_rank: the same for the columns of A: equal to page_rank and rank unless A is split over shards.
        scale: [adapter_slots, layers, targets] alpha / r (or rsLoRA's, or a pattern's) in float32, 0 where absent.
    """

    pages: Int[Array, "adapter_slots table"]
    a_start: Int[Array, "adapter_slots targets"]
    b_start: Int[Array, "adapter_slots targets"]
    page_rank: Int[Array, "adapter_slots targets"]
    rank: Int[Array, "adapter_slots layers targets"]
    a_page_rank: Int[Array, "adapter_slots targets"]
    a_rank: Int[Array, "adapter_slots layers targets"]
    scale: Float[Array, "adapter_slots layers targets"]

    @classmethod
    def empty(cls, slots: int, layers: int, table: int) -> AdapterTables:
        """Tables for `slots` adapters of at most `table` pages each; every slot empty."""
        targets = len(TARGETS)
        return cls(
            pages=np.full((slots, table), -1, np.int32),
            a_start=np.zeros((slots, targets), np.int32),
            b_start=np.zeros((slots, targets), np.int32),
            page_rank=np.zeros((slots, targets), np.int32),
            rank=np.zeros((slots, layers, targets), np.int32),
            a_page_rank=np.zeros((slots, targets), np.int32),
            a_rank=np.zeros((slots, layers, targets), np.int32),
            scale=np.zeros((slots, layers, targets), np.float32),
        )

    def enter(
        self,
        slot: int,
        pages: Int[Array, " pages"],
        starts: tuple[Int[Array, " targets"], Int[Array, " targets"]],
        ranks: Int[Array, "layers targets"],
        a_page_rank: Int[Array, " targets"],
        scales: Float[Array, "layers targets"],
    ) -> None:
        """Enters an adapter: its pages in table order, where its As and Bs start, its ranks and scales."""
        if len(pages) > self.pages.shape[1]:  # larger than any before it
            narrow, self.pages = self.pages, np.full((len(self.pages), len(pages)), -1, np.int32)
            self.pages[:, : narrow.shape[1]] = narrow
        self.pages[slot, : len(pages)], self.pages[slot, len(pages) :] = pages, -1
        self.a_start[slot], self.b_start[slot] = starts
        self.page_rank[slot], self.rank[slot], self.scale[slot] = ranks.max(axis=0), ranks, scales
        self.a_page_rank[slot], self.a_rank[slot] = a_page_rank, np.minimum(ranks, a_page_rank)

    def clear(self, slot: int) -> None:
        """Takes an adapter out."""
        self.pages[slot] = -1
        for table in (self.page_rank, self.rank, self.scale, self.a_page_rank, self.a_rank):
            table[slot] = 0


@dataclass(frozen=True)
class Segments:
    """Neighbouring rows of one adapter. Disjoint, in order, and together all rows of the step.

    Args:
        adapter: [segments] adapter slot, -1 for the base model.
        start, length: [segments] the rows start .. start + length - 1.
        rank: [segments] the largest rank of its adapter, 0 for the base model.
    """

    adapter: Int[Array, " segments"]
    start: Int[Array, " segments"]
    length: Int[Array, " segments"]
    rank: Int[Array, " segments"]

    def of_rows(self, rows: int) -> Int[Array, " rows"]:
        """[rows] the adapter slot of each row; -1 for the base model and for rows of padding."""
        slots = np.full(rows, -1, np.int32)
        own = np.repeat(self.adapter, self.length)
        slots[: len(own)] = own
        return slots

    def with_adapter(self) -> tuple[Int[Array, " used"], list[slice]]:
        """Adapter slot and rows of the segments that have an adapter and rows."""
        used = (self.adapter >= 0) & (self.length > 0)
        start, length = self.start[used], self.length[used]
        return self.adapter[used], list(map(slice, start.tolist(), (start + length).tolist()))


@dataclass(frozen=True)
class Spans:
    """Neighbouring rows of one sequence: the tokens whose queries attend over its pages.

    Args:
        slot: [spans] sequence slot.
        start, length: [spans] the rows start .. start + length - 1.
        context: [spans] tokens of the sequence with keys in pages, these rows included; row i sees context - length + i
            + 1.
    """

    slot: Int[Array, " spans"]
    start: Int[Array, " spans"]
    length: Int[Array, " spans"]
    context: Int[Array, " spans"]
