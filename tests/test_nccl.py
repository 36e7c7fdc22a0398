"""Shards as processes with a GPU each. Needs two GPUs; what does not need them is tested in test_shards.py."""

from __future__ import annotations

import time

import numpy as np
import pytest
from conftest import missing_gpu
from serving import ADAPTERS, adapter_folder, model_folder, reference_logits, run_to_end

from slora_ref import Engine, EngineConfig, SamplingParams
from slora_ref.errors import ShardLost

PARAMS = SamplingParams(max_tokens=6, keep_logits=True, ignore_eos=True)
TOLERANCE = 0.02  # of the largest logit, in float16
DEADLINE = 10.0


def gpus() -> int:
    """How many there are."""
    if missing_gpu():
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 2, reason=f"two GPUs are needed, there are {gpus()}")]


def two_gpus(dtype: str = "float16") -> Engine:
    """An engine of T0 over two GPUs; each adapter of the tests is registered."""
    sizes = {"pool_pages": 3000, "max_running": 8, "max_batched_tokens": 64}
    config = EngineConfig(device="cuda", shards=2, communicator="nccl", dtype=dtype, **sizes)
    engine = Engine.from_pretrained(model_folder(), config)
    for name in ADAPTERS:
        engine.add_adapter(name, adapter_folder(name))
    return engine


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_two_gpus_serve_as_the_dense_model_says(dtype: str) -> None:
    engine = two_gpus(dtype)
    asks = [("x", [5, 6, 7]), ("z", [*range(20)]), (None, [9]), ("layers", [1, 2]), ("o", [3]), ("qv", [4] * 9)]
    names = {engine.add_request(prompt, PARAMS, name): name for name, prompt in asks}
    for number, done in run_to_end(engine).items():
        want = reference_logits(names[number], (*done.prompt_ids, *done.token_ids))[: len(done.logits)]
        assert done.error is None and len(done.token_ids) == PARAMS.max_tokens
        assert np.abs(np.array(done.logits) - want).max() < TOLERANCE * np.abs(want).max()


def test_a_process_that_dies_ends_the_group_though_its_gpu_is_waited_for() -> None:
    engine = two_gpus()
    for _ in range(4):
        engine.add_request([5, 6, 7], PARAMS, "x")
    engine.step()
    engine.executor._leader.communicator._processes[0].kill()
    started = time.monotonic()
    with pytest.raises(ShardLost):
        while True:
            engine.step()
            engine.add_request([5], PARAMS)
    assert time.monotonic() - started < DEADLINE
