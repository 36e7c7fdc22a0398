"""Baselines run for real: whatever part is swapped, the tokens are the usual engine's and the dense model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from serving import adapter_folder, model_folder

from slora_ref import Completion, Engine, EngineConfig, SamplingParams
from slora_ref.adapter import load_adapter, read_header
from slora_ref.baselines import MergingExecutor, Packed, merge_and_switch, padded_bmm, peft_style
from slora_ref.baselines.merge import merged_weights
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config import ModelConfig
from slora_ref.errors import ConfigError
from slora_ref.reference import Reference

NAMES = ("x", "y", "z", "qv", "layers", "o")
CONFIG = EngineConfig(pool_pages=4000, max_running=8, max_batched_tokens=64, loading="inline", seed=1)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, keep_logits=True)
PROMPTS = [[3 + 5 * i % 80, 7, 11 + i] * (1 + i % 3) for i in range(18)]
USED = [NAMES[i * 5 % len(NAMES)] for i in range(len(PROMPTS))]

ENGINES: dict[str, Callable[[Path, EngineConfig], Engine]] = {
    "merge": merge_and_switch,
    "bmm": padded_bmm,
    "peft": lambda folder, config: peft_style(folder, config, 3),
}


def serve(engine: Engine, adapters: Sequence[str | None]) -> list[Completion]:
    for name in NAMES:
        engine.add_adapter(name, adapter_folder(name))
    completions = engine.generate(PROMPTS, PARAMS, list(adapters))
    engine.check()
    return completions


@pytest.fixture(scope="module")
def usual() -> list[Completion]:
    return serve(Engine.from_pretrained(model_folder(), CONFIG), [*USED[:-2], None, None])


@pytest.mark.parametrize("baseline", ENGINES)
def test_a_baseline_gives_the_engines_tokens(baseline: str, usual: list[Completion]) -> None:
    completions = serve(ENGINES[baseline](model_folder(), CONFIG), [*USED[:-2], None, None])
    assert [c.token_ids for c in completions] == [c.token_ids for c in usual]
    for ours, theirs in zip(completions, usual, strict=True):
        assert np.abs(np.stack(ours.logits) - np.stack(theirs.logits)).max() < 1e-4
    differ = [c.token_ids for c in serve(ENGINES[baseline](model_folder(), CONFIG), USED[::-1])]
    assert differ != [c.token_ids for c in usual], "the adapters must matter"


def test_packed_models_give_the_engines_tokens(usual: list[Completion]) -> None:
    packed = Packed(model_folder(), {name: adapter_folder(name) for name in NAMES}, CONFIG)
    completions = packed.generate(PROMPTS[:-2], PARAMS, USED[:-2])
    assert [c.token_ids for c in completions] == [c.token_ids for c in usual[:-2]]
    assert {engine.pool.num_pages for engine in packed.engines.values()} == {4000 // 6}


def test_packed_models_need_a_pool_to_divide() -> None:
    with pytest.raises(ConfigError, match="pool_pages"):
        Packed(model_folder(), {"x": adapter_folder("x")}, EngineConfig())


def test_switching_back_and_forth_does_not_drift() -> None:
    """Adding and subtracting in place would: every merge starts from the weights as they were loaded."""
    engine = merge_and_switch(model_folder(), CONFIG)
    serve(engine, USED)
    first, again = (engine.generate([PROMPTS[0]], PARAMS, ["x"])[0] for _ in range(2))
    for _ in range(3):
        engine.generate(PROMPTS[:4], PARAMS, ["y", "z", "y", None])
    last = engine.generate([PROMPTS[0]], PARAMS, ["x"])[0]
    for other in (again, last):
        assert all(np.array_equal(a, b) for a, b in zip(first.logits, other.logits, strict=True))
    assert isinstance(engine.executor, MergingExecutor) and engine.executor.merges > 10
    fresh = load_checkpoint(model_folder(), ModelConfig.from_folder(model_folder()), "float32")
    assert all(
        np.array_equal(kept.qkv, new.qkv)
        for kept, new in zip(engine.executor.pristine.layers, fresh.layers, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_merged_weights_are_the_model_with_the_adapter(name: str) -> None:
    model = ModelConfig.from_folder(model_folder())
    weights = load_checkpoint(model_folder(), model, "float32")
    adapter = load_adapter(read_header(adapter_folder(name), model), model)
    ids = [3, 7, 11, 5, 80, 2]
    merged = Reference(model, merged_weights(model, weights, adapter)).logits(ids)
    assert np.abs(merged - Reference(model, weights, adapter).logits(ids)).max() < 1e-4
    assert np.abs(merged - Reference(model, weights).logits(ids)).max() > 0.1
