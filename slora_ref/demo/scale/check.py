"""Checks a sample of answers against dense merged weights, W + s B A in float32, where the model lies.

The weights of a model that is split are in no one place: they are read again, or drawn again from their seed, into host
memory, and go to the GPU layer by layer. Half precision moves a logit by up to TOLERANCE of the largest one. So a token
is right if no other is likelier by more than that; and the logits of the whole text, asked for once more, may differ by
no more than that.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.adapter import load_adapter
from slora_ref.checkpoint import ModelWeights, drawn_weights, float_dtype, load_checkpoint
from slora_ref.demo.scale.options import ScaleOptions
from slora_ref.engine import Completion, Engine
from slora_ref.executor import KernelExecutor, ModelExecutor
from slora_ref.reference import Reference
from slora_ref.request import SamplingParams

TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}  # of the largest logit


@dataclass(frozen=True)
class Checked:
    """One answer beside the dense model's.

    Args:
        right: every token is the dense model's, within the tolerance.
        decided: tokens at which the dense model's two likeliest are further apart than the tolerance.
        by_adapter: tokens that the base model would not have said, even with the tolerance.
        error: largest difference of a logit, and `largest`, the largest logit.
    """

    right: bool
    decided: int
    tokens: int
    by_adapter: int
    error: float
    largest: float


def check_sample(engine: Engine, completions: Seq[Completion], weights: ModelWeights) -> list[Checked]:
    """The verdict on each; asks the engine for their logits.

    Args:
        weights: of the whole base model, see `dense_weights`.
    """
    return [_check(engine, done, weights) for done in completions]


def dense_weights(engine: Engine, options: ScaleOptions) -> ModelWeights:
    """The weights that the engine uses, or those that its shards have each a part of."""
    executor = engine.executor
    if isinstance(executor, KernelExecutor | ModelExecutor):
        return executor.model.weights
    config, dtype = options.config(), float_dtype(options.dtype)
    if options.device == "cpu":
        return load_checkpoint(Path(options.model), config, dtype)
    memory = importlib.import_module("slora_ref.ops.cuda_memory")
    if options.is_shape:
        normals = memory.Normals(options.seed, dtype)
        return drawn_weights(config, normals.draw, normals.norm, lambda layer: layer.placed(memory.to_host))
    weights = load_checkpoint(Path(options.model), config, dtype)
    return replace(weights, embed=memory.to_device(weights.embed))


def _check(engine: Engine, done: Completion, weights: ModelWeights) -> Checked:
    assert done.adapter is not None, "a request of the demo has an adapter"
    tolerance = TOLERANCE[engine.scheduler.config.dtype]
    ids = [*done.prompt_ids, *done.token_ids][:-1]
    dense, base = (_dense_logits(engine, weights, adapter, ids) for adapter in (done.adapter, None))
    answered, largest = dense[len(done.prompt_ids) - 1 :], float(np.abs(dense).max())
    slack, tokens = tolerance * np.abs(answered).max(axis=1), np.array(done.token_ids)
    at = np.arange(len(tokens))
    best, second = np.partition(answered, -2, axis=1)[:, :-3:-1].T
    of_base = base[len(done.prompt_ids) - 1 :]
    served = _served_logits(engine, done.adapter, ids)
    return Checked(
        right=done.error is None and bool((best - answered[at, tokens] <= slack).all()),
        decided=int((best - second > slack).sum()),
        tokens=len(tokens),
        by_adapter=int((of_base.max(axis=1) - of_base[at, tokens] > slack).sum()),
        error=float(np.abs(served - dense[: len(served)]).max()),
        largest=largest,
    )


def _served_logits(engine: Engine, adapter: str, ids: list[int]) -> Any:
    """What the engine makes of the text, as one prompt."""
    longest = engine.pool.max_positions - 1
    params = SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True)
    return np.stack(engine.generate([ids[:longest]], params, adapter)[0].logits)


def _dense_logits(engine: Engine, weights: ModelWeights, adapter: str | None, ids: list[int]) -> Any:
    """The textbook model, a layer merged at a time."""
    header = None if adapter is None else engine.store.lookup(adapter).header
    merged = None if header is None else load_adapter(header, engine.model_config, np.float32)
    xp, cast, to_host = _library(weights)
    reference = Reference(engine.model_config, weights, merged, np.float32, xp, cast, keep=False)
    return to_host(reference.logits(ids))


def _library(weights: ModelWeights) -> tuple[Any, Any, Any]:
    """The array library of the embedding, its conversion to float32 of any weights, and its way to the host."""
    if type(weights.embed).__module__ == "numpy":
        return np, None, np.asarray
    memory, cupy = (importlib.import_module(name) for name in ("slora_ref.ops.cuda_memory", "cupy"))
    return cupy, lambda array: memory.to_float32(cupy.asarray(array)), cupy.asnumpy
