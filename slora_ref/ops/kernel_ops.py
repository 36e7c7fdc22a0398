"""KernelOps: NumpyOps' interface made of kernel launches. What an operation computes is said there, the specification.

It gives each operation its arrays, in as few launches as there are kernels for. Its subclasses say how a launch runs
and where arrays lie.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from slora_ref.ops import row_arguments, sample_arguments
from slora_ref.ops.kernel_attention import KernelAttention
from slora_ref.ops.kernel_lora import KernelLora
from slora_ref.ops.ladder import fastest, make_launch
from slora_ref.ops.tape import Work
from slora_ref.shapes import Array, Float, Int, Num


class KernelOps(KernelLora, KernelAttention):
    """A backend that launches kernels.

    Args:
        dtype: of storage; sums are in float32.
        rungs: the kernel to use for an operation, where it is not the last rung.
        max_rank: the largest rank that will ever be registered; None: of the adapters resident in each step.
        shards: over which the model is split.
    """

    @abstractmethod
    def linear(
        self,
        x: Float[Array, "rows d_in"],
        weight: Float[Array, "d_out d_in"],
        bias: Float[Array, " d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """By the vendor's library, accumulated in float32."""

    @abstractmethod
    def head(self, x: Float[Array, "rows hidden"], weight: Float[Array, "vocab hidden"]) -> Float[Array, "rows vocab"]:
        """In float32: in half precision the likeliest tokens would often be equal."""

    @abstractmethod
    def prepared_products(
        self,
        y: Float[Array, "batch rows columns"],
        x: Float[Array, "batch rows inner"],
        w: Float[Array, "batch inner columns"],
        scale: float = 1.0,
        add: bool = False,
    ) -> Work:
        """What computes y = scale x w for each of a batch, or y += scale x w, by the vendor's library.

        x and w may be transposed views. For the baselines: the engine's own products have one matrix, or pages.
        """

    def embed(self, weight: Float[Array, "vocab_rows hidden"], ids: Int[Array, " rows"]) -> Float[Array, "rows hidden"]:
        """The rows `ids` of an embedding, or of hidden states."""
        out = self.empty(f"embed_{len(weight)}", (len(ids), weight.shape[1]), self.dtype)
        self.run("gather_rows", row_arguments.gather_rows(out, weight, self.put("ids", ids, np.int32)))
        return out

    def enter_tokens(self, token_ids: Int[Array, " rows"], sampled: Int[Array, "two most"], own: slice) -> None:
        """The tokens that the step before has sampled in place of their placeholders, -1 - i for the i-th.

        Then of all tokens what LlamaModel.own_tokens says.

        Args:
            own: the tokens whose embedding this shard has.
        """
        self.run("enter_tokens", row_arguments.enter_tokens(token_ids, sampled, own), np.float32)

    def join_columns(self, parts: Float[Array, "shards rows part"]) -> Float[Array, "rows columns"]:
        """A copy of each part; a shard alone has nothing to join."""
        shards, rows, part = parts.shape
        if shards == 1:
            return parts[0]
        whole = self.empty("joined_columns", (rows, shards * part), parts.dtype)

        def copy() -> None:
            for shard in range(shards):
                whole[:, shard * part : (shard + 1) * part] = parts[shard]

        self.do("communication", copy)
        return whole

    # --- operations on rows ---

    def rms_norm(
        self, x: Float[Array, "rows hidden"], weight: Float[Array, " hidden"], eps: float
    ) -> Float[Array, "rows hidden"]:
        """The sum of squares is in float32."""
        out = self.empty("rms_norm", x.shape, self.dtype)
        self.run("rms_norm", row_arguments.rms_norm(out, x, None, weight, eps))
        return out

    def add_rms_norm(
        self,
        x: Float[Array, "rows hidden"],
        delta: Float[Array, "rows hidden"],
        weight: Float[Array, " hidden"],
        eps: float,
    ) -> Float[Array, "rows hidden"]:
        """Reads and writes each number once."""
        out = self.empty("rms_norm", x.shape, self.dtype)
        self.run("rms_norm", row_arguments.rms_norm(out, x, delta, weight, eps))
        return out

    def silu_mul(self, gate_up: Float[Array, "rows two_ffn"]) -> Float[Array, "rows ffn"]:
        """In one pass: gate and up are read, their product is written."""
        out = self.empty("silu_mul", (gate_up.shape[0], gate_up.shape[1] // 2), self.dtype)
        self.run("silu_mul", row_arguments.silu_mul(out, gate_up))
        return out

    def argmax(self, logits: Float[Array, "rows vocab"], out: Int[Array, "two rows"]) -> None:
        """out[0] = the first largest logit's index; out[1] = 1 where all of the row's logits are finite."""
        self.run("argmax", row_arguments.argmax(out[0], out[1], logits), logits.dtype)

    def sample(
        self,
        token: Int[Array, " rows"],
        logits: Float[Array, "rows vocab"],
        temperature: Float[Array, " rows"],
        top_k: Int[Array, " rows"],
        top_p: Float[Array, " rows"],
        min_p: Float[Array, " rows"],
        seeds: Num[Array, " rows"],
        positions: Num[Array, " rows"],
    ) -> None:
        """Replaces the likeliest token by a drawn one where the temperature is not 0: what sampler.sample does."""
        keep = self.empty("keep", (len(logits), 2), np.int32)
        threshold = sample_arguments.sample_threshold(keep, logits, token, temperature, top_k, top_p)
        self.run("sample_threshold", threshold, np.float32)
        draw = sample_arguments.sample_draw(token, logits, keep, temperature, min_p, seeds, positions)
        self.run("sample_draw", draw, np.float32)

    def prepared_load(
        self,
        storage: Float[Array, "layers pages width"],
        image: Float[Array, "layers count width"],
        page_ids: Int[Array, " count"],
        on_host: Int[Array, " count"] | None = None,
    ) -> Work:
        """What writes an adapter's image into its pages, in one launch; on_host: page_ids in host memory."""
        arguments = row_arguments.load_pages(storage, image, page_ids)
        return self.prepare(make_launch(fastest("load_pages", self.dtype, arguments), self.dtype, arguments))
