"""PageLayout: how many pages a token and an adapter take, and in which order (paper section 5.1).

Pure arithmetic. The paper's page is H numbers, a token's key in a multi-head model; here it is the key width of one
layer, head_dim * kv_heads, so grouped-query models fit too: there a column of A of length H takes H / width pages.
With tensor parallelism a page is a shard's part of a key; counts and tables are equal on all shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slora_ref.config import TARGETS, ModelConfig
from slora_ref.ops.tables import LORA_GROUPS
from slora_ref.shapes import Array, Float, Int
from slora_ref.tp import WHOLE, Shard
from slora_ref.tp.split import a_ranks, adapter_target_shape, cut_a, cut_b, local_config

PAGES_PER_TOKEN = 2  # a key and a value; the same page id names a row in every layer
ROW_ALIGNMENT_BYTES = 16  # what one vector load of a GPU thread needs


@dataclass(frozen=True)
class AdapterShape:
    """What the pool must know of an adapter: rank and scale of every target in every layer.

    Args:
        ranks: [layers, targets] int32, 0 where the adapter has no such target.
        scales: [layers, targets] float32, 0 where absent.
    """

    ranks: Int[Array, "layers targets"]
    scales: Float[Array, "layers targets"]

    @property
    def page_ranks(self) -> Int[Array, " targets"]:
        """[targets] the rank that decides the pages: the largest of any layer, since one table serves all layers."""
        largest: Int[Array, " targets"] = self.ranks.max(axis=0)
        return largest


class PageLayout:
    """Page arithmetic of one model.

    Args:
        config: the model; its head_dim and kv_heads give the page width, its projections the pages of an adapter.
        shard: the part of the model whose pages these are.

    Raises:
        ConfigError: the model cannot be split over so many shards.
    """

    def __init__(self, config: ModelConfig, shard: Shard = WHOLE) -> None:
        self.num_layers, self.shard, self._config = config.num_layers, shard, config
        self.width = local_config(config, shard.count).kv_width
        shapes = [adapter_target_shape(config, target, shard.count) for target in TARGETS]
        self.a_pieces = tuple(-(-d_in // self.width) for d_in, _ in shapes)
        self.b_pieces = tuple(-(-d_out // self.width) for _, d_out in shapes)

    def row_stride(self, itemsize: int) -> int:
        """Numbers from one page to the next in storage: the width rounded up so that each page starts aligned."""
        per_line = max(1, ROW_ALIGNMENT_BYTES // itemsize)
        return -(-self.width // per_line) * per_line

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of one page in storage, over all layers."""
        return self.num_layers * self.row_stride(itemsize) * itemsize

    def token_pages(self, tokens: int) -> int:
        """Pages that the keys and values of `tokens` tokens take."""
        return PAGES_PER_TOKEN * tokens

    def adapter_pages(self, page_ranks: Int[Array, " targets"]) -> int:
        """Pages of an adapter: r * ceil(d_in / width) for each A, r * ceil(d_out / width) for each B.

        Here d_in and d_out are the shard's, and r is ceil(r / shards) for an A that is split along its rank.
        """
        return int(self.a_ranks(page_ranks) @ np.asarray(self.a_pieces) + page_ranks @ np.asarray(self.b_pieces))

    def a_ranks(self, page_ranks: Int[Array, "*some targets"]) -> Int[Array, "*some targets"]:
        """[..., targets] columns of A that a shard has pages for."""
        return a_ranks(page_ranks, self.shard.count)

    def cut(
        self, a: Float[Array, "rank d_in"], b: Float[Array, "d_out rank"], target: int, page_rank: int
    ) -> tuple[Float[Array, "a_rank a_part"], Float[Array, "b_part rank"]]:
        """This shard's part of a target's weights, as PEFT stores them."""
        return cut_a(a, target, page_rank, self.shard), cut_b(b, target, self._config, self.shard)

    def starts(self, page_ranks: Int[Array, " targets"]) -> tuple[Int[Array, " targets"], Int[Array, " targets"]]:
        """The first table entry of each target's A and of each B.

        Group by group: the As of the targets that share an input, then their Bs. So the As of q, k and v are neighbours
        and one gather reads them.
        """
        a_start, b_start = np.zeros(len(TARGETS), np.int32), np.zeros(len(TARGETS), np.int32)
        entry = 0
        halves = (a_start, self.a_ranks(page_ranks), self.a_pieces), (b_start, page_ranks, self.b_pieces)
        for group in LORA_GROUPS:
            for starts, ranks, pieces in halves:
                for target in group.targets:
                    starts[target] = entry
                    entry += int(ranks[target]) * pieces[target]
        return a_start, b_start
