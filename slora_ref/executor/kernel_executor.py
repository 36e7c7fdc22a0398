"""KernelExecutor: a step by kernels, from one copy to the device to one small copy back.

The launches of the layers are kept for each bucket of rows and repeated (ops/tape.py): preparing them costs more than a
GPU needs to run them. It knows batches and sampling, but no requests, and no backend in particular.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np

from slora_ref.batch import Batch
from slora_ref.config import TARGETS
from slora_ref.executor.result import StepResult
from slora_ref.executor.staging import Staged, Staging
from slora_ref.model import LlamaModel
from slora_ref.ops import KernelOps, Segments, Spans
from slora_ref.ops.device_tables import DeviceTables
from slora_ref.ops.kernel_backend import AttentionStep
from slora_ref.ops.tape import Tape
from slora_ref.sampler import Sampling, likeliest
from slora_ref.shapes import Array, Float, Int

MOST_TAPES = 128  # of the shapes used last; one of a 7B model takes about a megabyte of host memory


class KernelExecutor:
    """Runs the model and samples where the model lies.

    Args:
        model: on `ops`.
        ops: the backend of the model.
        tables: of the model's pool.
        most_rows: of a step.
        keep: whether launches are kept and repeated; False: each step prepares its own.
    """

    def __init__(
        self, model: LlamaModel, ops: KernelOps, tables: DeviceTables, most_rows: int, keep: bool = True
    ) -> None:
        self.model, self.ops, self.tables, self.keep = model, ops, tables, keep
        self.staging = Staging(ops, most_rows)
        self.last_layers = self.last_logits = Tape()  # the launches of the last step, for measurements
        self.tapes: OrderedDict[object, tuple[Tape, Array]] = OrderedDict()
        self._tokens = ops.staging((2 * self.staging.most_logits,), np.int32)

    def run(self, batch: Batch, sampling: Sampling) -> StepResult:
        """Computes one step. A row that overflows gives non-finite logits, for that row alone."""
        staged = self._stage(batch, sampling)
        hidden = self._hidden(staged)
        if not len(batch.logit_rows):
            return StepResult(np.zeros(0, np.int64), np.zeros(0, np.bool_), None)
        logits = self._logits(hidden, staged)
        tokens, finite = self._sample(logits, staged, draws=bool((sampling.temperature > 0).any()))
        kept = self.ops.fetch(logits[: len(batch.logit_rows)]) if batch.wants_logits else None
        return StepResult(tokens[batch.sampled].astype(np.int64), finite[batch.sampled].astype(np.bool_), kept)

    def follow(self, batch: Batch) -> None:
        """Computes a step on a shard that does not lead: the tokens are not its business."""
        staged = self._stage(batch, likeliest(len(batch.sampled)))
        hidden = self._hidden(staged)
        if len(batch.logit_rows):
            self._logits(hidden, staged)

    def _logits(self, hidden: Float[Array, "rows hidden"], staged: Staged) -> Float[Array, "logits vocab"]:
        with self.ops.recording() as self.last_logits:
            return self.model.logits(hidden, staged.arrays.logit_rows)

    def _stage(self, batch: Batch, sampling: Sampling) -> Staged:
        own = replace(batch, token_ids=self.model.own_tokens(batch.token_ids))
        return self.staging.stage(own, sampling)

    def _sample(
        self, logits: Float[Array, "logits vocab"], staged: Staged, draws: bool
    ) -> tuple[Int[Array, " logits"], Int[Array, " logits"]]:
        """The likeliest tokens, some replaced by drawn ones; comes back when the step has ended."""
        arrays, ops = staged.arrays, self.ops
        both = ops.empty("samples", (2, staged.logits), np.int32)
        ops.argmax(logits, both)
        if draws:
            how = (arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p, arrays.seeds, arrays.places)
            ops.sample(both[0], logits, *how)
        host = self._tokens[: 2 * staged.logits].reshape(2, staged.logits)
        ops.download(host, both)
        return host[0], host[1]

    def _hidden(self, staged: Staged) -> Float[Array, "rows hidden"]:
        """The rows after the last layer: by the launches of the last step of this shape, if there was one."""
        lora, attention = staged.lora, staged.attention
        flags = (lora.kernels, attention.single, attention.shared)
        key = (staged.rows, flags, self.tables.shape)
        if key in self.tapes:
            self.tapes.move_to_end(key)
            tape, hidden = self.tapes[key]
            tape.replay()
            self.last_layers = tape
            return hidden
        with self.ops.recording() as tape:
            hidden = self._launch_layers(staged, self.tables.targets)
        self.last_layers = tape
        if self.keep:
            self.tapes[key] = tape, hidden
            if len(self.tapes) > MOST_TAPES:
                self.tapes.popitem(last=False)
        return hidden

    def _launch_layers(self, staged: Staged, targets: frozenset[int]) -> Float[Array, "rows hidden"]:
        """Enters the step's pages, looks its adapters up, and runs the layers."""
        ops, arrays, tables = self.ops, staged.arrays, self.tables
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

    # --- before the first step ---

    def warm_up(self) -> None:
        """Runs steps of nothing but padding, so that all is compiled and all memory that a step takes is taken."""
        none = np.zeros(0, np.int64)
        nobody = likeliest(0)
        for rows in sorted({1, min(64, self.staging.most), self.staging.most}):
            segments = Segments(none, none, none)
            padding = np.full(rows, -1)
            batch = Batch(padding + 1, padding + 1, padding, padding, segments, Spans(*[none] * 4), padding + 1, none)
            staged = self.staging.stage(batch, nobody)
            staged = replace(
                staged,
                lora=replace(staged.lora, kernels=("mbgmv", "mbgmm", *(("lora",) if self.ops.together else ()))),
                attention=replace(staged.attention, single=True, shared=True),
            )
            hidden = self._launch_layers(staged, frozenset(range(len(TARGETS))))
            self._sample(self.model.logits(hidden, staged.arrays.logit_rows), staged, draws=True)
