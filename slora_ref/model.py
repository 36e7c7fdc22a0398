"""LlamaModel: the forward pass over one batch, y = xW + s (xA) B at every target (paper section 4.1).

The base product and the adapter's are computed side by side, never merged, so rows of many adapters share one batch.
Keys, values, A and B are read from the pool's pages. With tensor parallelism (section 6, figure 4) each shard runs this
on its part of the weights and of every page, and the calls of the communicator are all that the shards ever exchange;
a model that is not split exchanges nothing. It knows batches and pages, but no requests and no sampling.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slora_ref.batch import Batch
from slora_ref.checkpoint import LayerWeights, ModelWeights
from slora_ref.config import ModelConfig
from slora_ref.ops import Ops
from slora_ref.ops.tables import DOWN, GATE_UP, QKV, LoraGroup, O
from slora_ref.pager import PageStorage
from slora_ref.rope import rope_table
from slora_ref.shapes import Array, Float, Int
from slora_ref.tp import local_config
from slora_ref.tp.communicator import Alone, Communicator
from slora_ref.tp.split import hidden_slice, vocab_rows


class LlamaModel:
    """A base model whose rows may each have an adapter.

    Args:
        config: of the base model, the whole of it.
        weights: of the base model, or of the communicator's shard of it.
        ops: the backend that computes.
        pool: keys, values and adapters.
        max_positions: the longest sequence, in tokens.
        communicator: of this shard; None: the model is not split.

    Raises:
        ConfigError: the model cannot be split over so many shards.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        pool: PageStorage,
        max_positions: int,
        communicator: Communicator | None = None,
    ) -> None:
        self.communicator = communicator or Alone()
        self.config = local_config(config, self.communicator.shard.count)
        self.weights, self.ops, self.pool = weights, ops, pool
        self._own, _ = hidden_slice(config.hidden_size, self.communicator.shard)
        self.own_vocab = vocab_rows(config.vocab_size, self.communicator.shard)
        self._cos, self._sin = (ops.angle_table(table) for table in rope_table(config, max_positions))

    def forward(self, batch: Batch) -> Float[Array, "logits vocab"]:
        """Runs one step: stores the rows' keys and values, returns the logits of `batch.logit_rows`."""
        own = replace(batch, token_ids=self.own_tokens(batch.token_ids))
        return self.logits(self.hidden(own), batch.logit_rows)

    def hidden(self, batch: Batch) -> Float[Array, "rows hidden"]:
        """The rows after the last layer and its norm; their keys and values are stored.

        The batch's tokens are those of own_tokens. About 2 FLOPs a row for each weight; memory traffic is the weights
        once, plus each adapter and each context once.
        """
        ops, layers, eps = self.ops, self.weights.layers, self.config.rms_norm_eps
        x = self.communicator.all_reduce(ops.embed(self.weights.embed, batch.token_ids))
        normed = ops.rms_norm(x, layers[0].input_norm, eps)
        next_norms = (*(weights.input_norm for weights in layers[1:]), self.weights.norm)
        for layer, (weights, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            normed = ops.add_rms_norm(x, self._attention(normed, batch, layer, weights), weights.post_norm, eps)
            normed = ops.add_rms_norm(x, self._feed_forward(normed, batch, layer, weights), next_norm, eps)
        return normed

    def logits(
        self, hidden: Float[Array, "rows hidden"], wanted: Int[Array, " logits"]
    ) -> Float[Array, "logits vocab"]:
        """The logits of the rows that are wanted, in float32 or better."""
        part = self.ops.head(self.ops.embed(hidden, wanted), self.weights.lm_head)
        logits = self.ops.join_columns(self.communicator.all_gather(part))
        return logits[:, : self.config.vocab_size]  # rows of padding are no tokens

    def own_tokens(self, token_ids: Int[Array, " rows"]) -> Int[Array, " rows"]:
        """The row of this shard's embedding for each token; of another shard's tokens the last, which is zeros."""
        own = self.own_vocab
        here = (token_ids >= own.start) & (token_ids < own.stop)  # if the model is not split, all are
        return np.where(here, token_ids - own.start, own.stop - own.start)

    def _attention(
        self, x: Float[Array, "rows hidden"], batch: Batch, layer: int, weights: LayerWeights
    ) -> Float[Array, "rows hidden"]:
        config, ops, pages = self.config, self.ops, self.pool.storage[layer]
        widths = (config.q_width, config.kv_width, config.kv_width)  # of this shard's heads
        qkv = self._project(x, weights.qkv, weights.qkv_bias, batch, layer, QKV, widths)
        q = ops.rope_store(qkv, pages, self._cos, self._sin, batch.positions, batch.k_pages, batch.v_pages)
        mixed = ops.attention(q, pages, self.pool.sequence_pages, batch.spans)
        part = self._project(mixed, weights.o, weights.o_bias, batch, layer, O)  # of the sum over all heads
        return self.communicator.all_reduce(part)

    def _feed_forward(
        self, x: Float[Array, "rows hidden"], batch: Batch, layer: int, weights: LayerWeights
    ) -> Float[Array, "rows hidden"]:
        ffn = self.config.intermediate_size
        gate_up = self._project(x, weights.gate_up, weights.gate_up_bias, batch, layer, GATE_UP, (ffn, ffn))
        part = self._project(self.ops.silu_mul(gate_up), weights.down, weights.down_bias, batch, layer, DOWN)
        return self.communicator.all_reduce(part)

    def _project(
        self,
        x: Float[Array, "rows d_in"],
        weight: Float[Array, "d_out d_in"],
        bias: Float[Array, " d_out"] | None,
        batch: Batch,
        layer: int,
        group: LoraGroup,
        d_outs: tuple[int, ...] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """xW + s (xA) B for the targets of a group.

        Where the model is split, xA and its message may come beside xW: the message is small, and what it takes is the
        time until all shards have come to it.

        Args:
            d_outs: columns of each target; None: one target, whose B is added to this shard's columns of the sum.
        """
        ops, pages, tables = self.ops, self.pool.storage[layer], self.pool.adapters
        place = (pages, tables, batch.segments, group, layer)
        if self.communicator.shard.count == 1:
            y, t = ops.linear(x, weight, bias), ops.lora_shrink(x, *place)
        else:
            y, t = ops.with_message(
                lambda: ops.linear(x, weight, bias),
                lambda: self._from_all_shards(ops.lora_shrink(x, *place), batch, group),
            )
        if d_outs is None:
            ops.lora_expand(y[:, self._own], t, *place, (self._own.stop - self._own.start,))
        else:
            ops.lora_expand(y, t, *place, d_outs)
        return y

    def _from_all_shards(self, t: Float[Array, " ..."], batch: Batch, group: LoraGroup) -> Float[Array, " ..."]:
        """xA, of which each shard has computed a part of the sum (o, down), or else some of the columns."""
        if group in (O, DOWN):
            return self.communicator.all_reduce(t, "lora")
        parts = self.communicator.all_gather(t, "lora")
        return self.ops.join_ranks(parts, self.pool.adapters, batch.segments, group)
