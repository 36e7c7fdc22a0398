"""KernelExecutor: a step by kernels, from one copy to the device to one small copy back, for which nobody waits here.

Its launches are kept and repeated, those of decode steps as graphs (executor/kept.py). It knows batches and sampling,
but no requests, and no backend in particular.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from slora_ref.batch import Batch
from slora_ref.config import TARGETS
from slora_ref.executor.kept import Kept, KeptSteps
from slora_ref.executor.kernel_step import KernelStep
from slora_ref.executor.staging import Staged, Staging, buckets
from slora_ref.model import LlamaModel
from slora_ref.ops import KernelOps, Segments, Spans
from slora_ref.ops.device_tables import DeviceTables
from slora_ref.ops.kernel_backend import AttentionStep
from slora_ref.ops.tape import Tape
from slora_ref.sampler import Sampling, likeliest
from slora_ref.shapes import Array, Float

MOST_TRIED = 2048  # rows: larger steps keep a device at work for longer than a library needs to load its code
MOST_UNREAD = 2  # steps: the one that runs, and the one before it, which is read meanwhile


class KernelExecutor:
    """Runs the model and samples where the model lies.

    Args:
        model: on `ops`.
        ops: the backend of the model.
        tables: of the model's pool.
        most_rows: of a step.
        keep, capture: see KeptSteps.
    """

    def __init__(
        self,
        model: LlamaModel,
        ops: KernelOps,
        tables: DeviceTables,
        most_rows: int,
        keep: bool = True,
        capture: bool = True,
    ) -> None:
        self.model, self.ops, self.tables = model, ops, tables
        self.staging, self.kept = Staging(ops, most_rows), KeptSteps(ops, keep, capture)
        self.last: tuple[Tape, ...] = ()  # the launches of the last step, for measurements
        shape = 2, self.staging.most_logits
        self._samples = ops.new(shape, np.int32)  # of the last step: tokens, and whether their logits are finite
        self._hosts = deque(ops.staging(shape, np.int32) for _ in range(MOST_UNREAD))

    def start(self, batch: Batch, sampling: Sampling) -> KernelStep:
        """Starts one step. A row that overflows gives non-finite logits, for that row alone.

        Logits that somebody reads are waited for: the next step writes its own in their place.
        """
        staged, logits = self._launch(batch, sampling)
        kept = self.ops.fetch(logits) if batch.wants_logits and logits is not None else None
        self._hosts.rotate()
        ended = self.ops.download(self._hosts[0], self._samples)
        return KernelStep(batch.sampled, self._hosts[0], staged.sent, ended, kept)

    def follow(self, batch: Batch, sampling: Sampling) -> None:
        """Starts a step on a shard that does not lead: its host reads nothing of it."""
        self._launch(batch, sampling)

    def wait(self) -> None:
        """Waits for all steps: a copy comes after them."""
        self.ops.fetch(self._samples)

    # --- what the device does ---

    def _launch(self, batch: Batch, sampling: Sampling) -> tuple[Staged, Float[Array, "logits vocab"] | None]:
        """Starts a step; with the logits, if any are wanted."""
        self.ops.use()
        self.kept.valid_for(self.tables.shape)
        staged, wanted = self.staging.stage(batch, sampling), len(batch.logit_rows)
        if wanted:
            return staged, self._compute(staged)[:wanted]
        self._layers(staged)
        return staged, None

    def _compute(self, staged: Staged) -> Float[Array, "logits vocab"]:
        """The whole step; from its second time on as one graph, if it is nothing but decode."""
        if not staged.attention.shared:
            whole = self.kept.do_at_once(staged.layers_shape, staged.logits)
            if whole is not None:
                self.last = (whole.tape,)
                logits: Float[Array, "logits vocab"] = whole.result
                return logits
        layers = self._layers(staged)
        chosen = self.kept.do(staged.logits, lambda: self._launch_logits(layers.result, staged), after=layers)
        self.last = (layers.tape, chosen.tape)
        return chosen.result

    def _layers(self, staged: Staged) -> Kept[Float[Array, "rows hidden"]]:
        """The step up to the last layer."""
        layers = self.kept.do(staged.layers_shape, lambda: self._launch_layers(staged, self.tables.targets))
        self.last = (layers.tape,)
        return layers

    def _launch_layers(self, staged: Staged, targets: frozenset[int]) -> Float[Array, "rows hidden"]:
        """Enters the step's tokens and pages, looks its adapters up, and runs the layers."""
        ops, arrays, tables = self.ops, staged.arrays, self.tables
        ops.enter_tokens(arrays.token_ids, self._samples, self.model.own_vocab)
        ops.enter_pages(tables.sequence_pages, arrays.slots, arrays.positions, arrays.k_pages, arrays.v_pages)
        plan, places = staged.lora, (arrays.row_slots, arrays.tile_slots, arrays.tiles, arrays.counts, arrays.adapters)
        segments = ops.lora_step(staged.segments, plan, tables.adapters, *places, tables.max_rank, targets)
        spans = AttentionStep(
            **vars(staged.spans),
            plan=staged.attention,
            queries=arrays.queries,
            tiles=arrays.attention_tiles,
            sequence_pages=tables.sequence_pages,
        )
        rows = (arrays.token_ids, arrays.positions, arrays.k_pages, arrays.v_pages)
        return self.model.hidden(Batch(*rows, segments, spans, arrays.logit_rows, arrays.logit_rows))

    def _launch_logits(self, hidden: Float[Array, "rows hidden"], staged: Staged) -> Float[Array, "logits vocab"]:
        """The logits, the likeliest tokens, and drawn ones in the place of some: none, where no temperature is set."""
        arrays, ops = staged.arrays, self.ops
        logits = self.model.logits(hidden, arrays.logit_rows)
        samples = self._samples[:, : staged.logits]
        ops.argmax(logits, samples)
        how = (arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p, arrays.seeds, arrays.places)
        ops.sample(samples[0], logits, *how)
        return logits

    # --- before the first step ---

    def warm_up(self) -> None:
        """Runs steps of nothing but padding, so that all is compiled and all memory that a step takes is taken.

        The largest comes first: memory that grew would be held twice, by the launches that were made before.
        """
        none = np.zeros(0, np.int64)
        nobody = likeliest(0)
        for rows in sorted({1, min(64, self.staging.most), self.staging.most}, reverse=True):
            segments = Segments(none, none, none, none)
            padding = np.full(rows, -1)
            batch = Batch(padding + 1, padding + 1, padding, padding, segments, Spans(*[none] * 4), padding + 1, none)
            staged = self.staging.stage(batch, nobody)
            staged = replace(
                staged,
                lora=replace(staged.lora, kernels=("mbgmv", "mbgmm", *(("lora",) if self.ops.together else ()))),
                attention=replace(staged.attention, single=True, shared=True),
            )
            self._launch_logits(self._launch_layers(staged, frozenset(range(len(TARGETS)))), staged)
        self._try_products()

    def _try_products(self) -> None:
        """Does the products of a layer, and the last one, once for each bucket.

        A library chooses its code for a size, and loads it, when the size comes for the first time, and until then the
        device waits.
        """
        ops, weights = self.ops, self.model.weights
        layer = weights.layers[0]
        for rows in buckets(min(self.staging.most, MOST_TRIED)):
            for name in ("qkv", "o", "gate_up", "down"):
                weight, bias = getattr(layer, name), getattr(layer, f"{name}_bias")
                ops.linear(self._any_rows(rows, weight), weight, bias)
            ops.head(self._any_rows(rows, weights.lm_head), weights.lm_head)

    def _any_rows(self, rows: int, weight: Float[Array, "d_out d_in"]) -> Float[Array, "rows d_in"]:
        """Any numbers for it to multiply, in memory that steps have, or most of it."""
        return self.ops.empty("silu_mul", (rows, weight.shape[1]), self.ops.dtype)
