"""From a Run to what plays it: each variant's options, each baseline's one difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.paper.run import Run
from slora_ref.policy import (
    FCFS,
    LCFS,
    AdapterClusters,
    EarlyAbort,
    OneAdapter,
    OriginalAdapterClusters,
    OriginalEarlyAbort,
    Policy,
)
from slora_ref.simulate.datasheet import GPUS, MODELS, PEFT_BATCH, POOL_TOKENS, SETTINGS, free_tokens
from slora_ref.simulate.kernels import MergedKernels, PaddedKernels, SegmentKernels, TiledPrefillKernels
from slora_ref.simulate.roofline import Constants, Kernels, token_bytes, weight_bytes
from slora_ref.simulate.system import System, original_config

BASELINE_KERNELS: dict[str, Callable[[ModelConfig], Kernels]] = {"bmm": PaddedKernels, "merge": MergedKernels}
"""Baselines that differ in what adapters cost in a step. `no-unify` differs in the size of its pool alone: the authors'
admission counts adapters there too. `peft` differs in its policy."""

PREFETCH = EngineConfig().prefetch


def policy_of(run: Run) -> Callable[[], Policy]:
    """The run's policy, in the authors' reading or in the paper's."""
    if run.system == "merge":
        return OneAdapter
    if run.system == "peft":
        return partial(OneAdapter, joining=False, most_running=PEFT_BATCH[run.setting, run.gpu])
    original = run.variant == "original"
    policies: dict[str, Callable[[], Policy]] = {
        "fcfs": FCFS,
        "lcfs": LCFS,
        "abort": OriginalEarlyAbort if original else EarlyAbort,
        "clusters": partial(OriginalAdapterClusters if original else AdapterClusters, run.clusters),
    }
    return policies[run.policy]


def config_of(run: Run) -> EngineConfig:
    """The run's options. Not the authors': joining at every step, loads beside the steps, all free memory a pool."""
    setting = SETTINGS[run.setting]
    if run.variant == "original":
        return original_config(run.pool_tokens or original_tokens(setting.model, run.gpu, run.shards))
    model, gpus = MODELS[setting.model], GPUS[run.gpu].times(run.shards)
    pool = run.pool_tokens or free_tokens(gpus, model, weight_bytes(model))
    paper = replace(original_config(pool), join_every=1, blocking_loads=False, prefetch=PREFETCH)
    return paper if run.variant == "paper" else replace(paper, separate_prefill=False, eviction="lru")


def original_tokens(model: str, gpu: str, shards: int) -> int:
    """The pool of the authors' runs, in tokens.

    For several GPUs they are not on record: weights and pool take as much of each GPU as they took with Llama-13B.
    """
    if shards == 1:
        return POOL_TOKENS[model, gpu]
    known, split = MODELS["llama-13b"], MODELS[model]
    taken = weight_bytes(known) + POOL_TOKENS["llama-13b", gpu] * token_bytes(known)
    return (shards * taken - weight_bytes(split)) // token_bytes(split)


def system_of(run: Run, constants: Constants) -> System:
    """What serves the run's trace."""
    setting = SETTINGS[run.setting]
    system = System(
        gpu=GPUS[run.gpu],
        model=MODELS[setting.model],
        adapters=run.adapters,
        ranks=setting.ranks,
        config=config_of(run),
        constants=constants,
        policy=policy_of(run),
        shards=run.shards,
        lora_messages=run.system != "no-lora-messages",
    )
    if run.variant != "original":
        kernels = TiledPrefillKernels if run.variant == "paper" else SegmentKernels
        gathers = 1 if run.variant == "ours" else system.gathers
        system = replace(system, kernels=kernels, crossings=1, gathers=gathers)
    if run.system in BASELINE_KERNELS:
        return replace(system, kernels=BASELINE_KERNELS[run.system])
    return system
