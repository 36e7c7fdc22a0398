"""LlamaModel: the forward pass over one batch, y = xW + s (xA) B at every target (paper section 4.1).

The base product and the adapter's are computed side by side, never merged, so rows of many adapters share one batch.
Keys, values, A and B are read from the pool's pages. It knows batches and pages, but no requests and no sampling.
"""

from __future__ import annotations

from slora_ref.batch import Batch
from slora_ref.checkpoint import LayerWeights, ModelWeights
from slora_ref.config import ModelConfig
from slora_ref.ops import Ops
from slora_ref.ops.tables import DOWN, GATE_UP, QKV, LoraGroup, O
from slora_ref.pager import PagePool
from slora_ref.rope import rope_table
from slora_ref.shapes import Array, Float, Int


class LlamaModel:
    """A base model whose rows may each have an adapter.

    Args:
        config, weights: of the base model.
        ops: the backend that computes.
        pool: keys, values and adapters.
        max_positions: the longest sequence, in tokens.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, ops: Ops, pool: PagePool, max_positions: int
    ) -> None:
        self.config, self.weights, self.ops, self.pool = config, weights, ops, pool
        self._cos, self._sin = (ops.angle_table(table) for table in rope_table(config, max_positions))

    def forward(self, batch: Batch) -> Float[Array, "logits vocab"]:
        """Runs one step: stores the rows' keys and values, returns the logits of `batch.logit_rows`."""
        return self.logits(self.hidden(batch), batch.logit_rows)

    def hidden(self, batch: Batch) -> Float[Array, "rows hidden"]:
        """The rows after the last layer and its norm; their keys and values are stored.

        About 2 FLOPs a row for each weight; memory traffic is the weights once, plus each adapter and each context
        once.
        """
        ops, layers, eps = self.ops, self.weights.layers, self.config.rms_norm_eps
        x = ops.embed(self.weights.embed, batch.token_ids)
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
        logits = self.ops.head(self.ops.embed(hidden, wanted), self.weights.lm_head)
        return logits[:, : self.config.vocab_size]  # rows of padding are no tokens

    def _attention(
        self, x: Float[Array, "rows hidden"], batch: Batch, layer: int, weights: LayerWeights
    ) -> Float[Array, "rows hidden"]:
        config, ops, pages = self.config, self.ops, self.pool.storage[layer]
        qkv = ops.linear(x, weights.qkv, weights.qkv_bias)
        self._add_lora(qkv, x, batch, layer, QKV, (config.q_width, config.kv_width, config.kv_width))
        q = ops.rope_store(qkv, pages, self._cos, self._sin, batch.positions, batch.k_pages, batch.v_pages)
        mixed = ops.attention(q, pages, self.pool.sequence_pages, batch.spans)
        out = ops.linear(mixed, weights.o, weights.o_bias)
        self._add_lora(out, mixed, batch, layer, O, (config.hidden_size,))
        return out

    def _feed_forward(
        self, x: Float[Array, "rows hidden"], batch: Batch, layer: int, weights: LayerWeights
    ) -> Float[Array, "rows hidden"]:
        ops, ffn = self.ops, self.config.intermediate_size
        gate_up = ops.linear(x, weights.gate_up, weights.gate_up_bias)
        self._add_lora(gate_up, x, batch, layer, GATE_UP, (ffn, ffn))
        inner = ops.silu_mul(gate_up)
        out = ops.linear(inner, weights.down, weights.down_bias)
        self._add_lora(out, inner, batch, layer, DOWN, (self.config.hidden_size,))
        return out

    def _add_lora(
        self,
        y: Float[Array, "rows d_outs"],
        x: Float[Array, "rows d_in"],
        batch: Batch,
        layer: int,
        group: LoraGroup,
        d_outs: tuple[int, ...],
    ) -> None:
        """y += s (xA) B for the targets of a group, in place."""
        tables, pages = self.pool.adapters, self.pool.storage[layer]
        t = self.ops.lora_shrink(x, pages, tables, batch.segments, group, layer)
        self.ops.lora_expand(y, t, pages, tables, batch.segments, group, layer, d_outs)
