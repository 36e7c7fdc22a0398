"""The simulator: its times against a roofline worked out by hand, its loop against the engine's own, and the properties
of every policy under it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slora_ref.clock import SimulatedClock
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine.loop import EngineLoop
from slora_ref.metrics import RequestRecord, summarize
from slora_ref.pager import PageLayout
from slora_ref.policy import (
    FCFS,
    LCFS,
    AdapterClusters,
    EarlyAbort,
    FairShare,
    OneAdapter,
    OriginalAdapterClusters,
    OriginalEarlyAbort,
    Policy,
)
from slora_ref.simulate.collectives import Collectives
from slora_ref.simulate.datasheet import GPUS, MODELS, POOL_TOKENS, SETTINGS, gpu_called
from slora_ref.simulate.kernels import (
    MergedKernels,
    OriginalKernels,
    PaddedKernels,
    SegmentKernels,
    TiledPrefillKernels,
)
from slora_ref.simulate.replay import Replay
from slora_ref.simulate.roofline import Constants, LoraRows, Roofline, StepShape, parameters
from slora_ref.simulate.store import LinkLoader, ShapeStore
from slora_ref.simulate.system import System, original_config
from slora_ref.workload import Arrival, SyntheticTrace, original_trace

SMALL = ModelConfig(
    vocab_size=32, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)
CONSTANTS = Constants(
    bandwidth=0.5,
    flops=0.5,
    lora_reads=0.5,
    layer=1e-3,
    lora_layer=5e-4,
    sequence=1e-4,
    padded_layer=2e-3,
    padded_copy=1e-7,
    collective=1e-4,
    collective_bandwidth=1e10,
)
ORIGINAL = {"separate_prefill": True, "join_every": 10, "blocking_loads": True, "eviction": "eager", "prefetch": 0}
POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FCFS,
    "lcfs": LCFS,
    "abort": EarlyAbort,
    "original abort": OriginalEarlyAbort,
    "clusters": lambda: AdapterClusters(2),
    "original clusters with abort": lambda: OriginalAdapterClusters(2, OriginalEarlyAbort()),
    "fair": FairShare,
    "one adapter": OneAdapter,
}


def system(pool_tokens: int = 300, adapters: int = 6, policy: Callable[[], Policy] = FCFS, **options: Any) -> System:
    """A small model with adapters of ranks 4 and 2 on a slow machine."""
    config = EngineConfig(pool_pages=2 * pool_tokens, max_running=16, max_batched_tokens=64, max_adapters=8, **options)
    return System(
        gpu=GPUS["a10g"],
        model=SMALL,
        adapters=adapters,
        ranks=(4, 2),
        config=config,
        constants=CONSTANTS,
        policy=policy,
    )


def trace(
    seed: int = 0, rate: float = 40.0, cv: float = 1.0, adapters: int = 6, duration: float = 2.0
) -> list[Arrival]:
    spec = SyntheticTrace(
        adapters=adapters, rate=rate, cv=cv, duration=duration, prompt=(1, 40), output=(1, 30), seed=seed
    )
    return original_trace(spec)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name: str, key: str | None) -> None:
    assert gpu_called(name) == key and (key is None or key in GPUS)


# --- times ---


def test_a_decode_step_by_hand() -> None:
    gpu, model = GPUS["a10g"], MODELS["llama-7b"]
    roofline = Roofline(gpu, model, CONSTANTS, OriginalKernels(model))
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    assert parameters(model) == weights
    shape = StepShape(3, 3, 700, [LoraRows(0, 1, 8, 16_777_216)] * 3)
    on_gpu = (2 * weights + 700 * 2 * 2 * 32 * 4096 + 3 * 16_777_216) / 300e9
    assert roofline.seconds(shape) == pytest.approx(max(32 * 1.5e-3, on_gpu) + 3e-4)
    assert on_gpu < 32 * 1.5e-3  # the host decides here, and the GPU below
    many = StepShape(100, 100, 90_000, [LoraRows(i, 1, 8, 16_777_216) for i in range(100)])
    assert roofline.seconds(many) == pytest.approx(
        (2 * weights + 90_000 * 2 * 2 * 32 * 4096 + 100 * 16_777_216) / 300e9 + 100e-4
    )


def test_a_prefill_step_by_hand() -> None:
    gpu, model = GPUS["a100-80"], MODELS["llama-7b"]
    shape = StepShape(2000, 5, 2000, [])
    seconds = Roofline(gpu, model, CONSTANTS).seconds(shape)
    flops = 2 * parameters(model) * 2000 / 156e12
    assert seconds == pytest.approx(flops + 2000 * 2 * 2 * 32 * 4096 / 1019.5e9 + 5e-4)


def test_a_step_on_four_gpus_by_hand() -> None:
    """Weights, keys and adapters in four parts; 82 collectives of the base model, 160 of rank 16, the largest."""
    gpu, model, rows = GPUS["a100-40"], MODELS["llama-13b"], 50
    lora = [LoraRows(0, 1, 8, 1000)] * 49 + [LoraRows(1, 1, 16, 2000)]
    shape = StepShape(rows, rows, 0, lora)
    one = Roofline(gpu.times(4), model, CONSTANTS, OriginalKernels(model))
    full, silent = (Collectives(model, 4, lora=sent) for sent in (True, False))
    sent = 81 * 2 * 3 * rows * 5120 // 4 + 3 * rows * 32000 // 4
    assert silent.seconds(shape, CONSTANTS) == pytest.approx(82e-4 + 2 * sent / 1e10)
    more = 160e-4 + 2 * 40 * (5 * 3 * rows * 16 // 4) / 1e10
    assert full.seconds(shape, CONSTANTS) - silent.seconds(shape, CONSTANTS) == pytest.approx(more)
    fused = Collectives(model, 4, lora=True, gathers=1)
    assert full.seconds(shape, CONSTANTS) - fused.seconds(shape, CONSTANTS) == pytest.approx(80e-4)
    split = Roofline(gpu.times(4), model, CONSTANTS, OriginalKernels(model), full)
    assert split.seconds(shape) == pytest.approx(one.seconds(shape) + full.seconds(shape, CONSTANTS))
    alone = Roofline(gpu, model, CONSTANTS, OriginalKernels(model))
    assert one.gpu_seconds(shape) == pytest.approx(alone.gpu_seconds(shape) / 4)


def test_a_system_on_several_gpus_loads_faster_and_sends_messages() -> None:
    one, two = (replace(system(adapters=6), shards=shards).build() for shards in (1, 2))
    assert one.executor.roofline.messages is None and two.executor.roofline.gpu.flops == 2 * GPUS["a10g"].flops
    silent = replace(system(), shards=2, lora_messages=False).build()
    seconds = [max(record.finished_at for record in replay.play(trace())) for replay in (two, silent)]
    assert seconds[0] > seconds[1], "messages take time"
    assert one.prefetcher.loader._bytes_per_s * 2 == two.prefetcher.loader._bytes_per_s


def test_an_adapter_of_the_7b_model_weighs_what_the_paper_says() -> None:
    """Rank 8: 16.8 MB in 64 pages; rank 64 as much as 256 tokens."""
    layout = PageLayout(MODELS["llama-7b"])
    store = ShapeStore(MODELS["llama-7b"], layout)
    assert store.register(8).pages == 64 and store.version(0).nbytes == 16_777_216
    assert store.register(64).pages == layout.token_pages(256)
    outside = ShapeStore(MODELS["llama-7b"], layout, in_pool=False)
    assert outside.register(64).pages == 0 and outside.version(0).nbytes == store.version(1).nbytes


@pytest.mark.parametrize(
    ("rows", "ranks", "tiled"),
    [([200, 1], [64, 8], True), ([199, 1], [64, 8], False), ([200, 1], [32, 8], False), ([200], [64], False)],
)
def test_the_originals_tiled_kernel_needs_long_prompts_large_ranks_and_company(
    rows: list[int], ranks: list[int], tiled: bool
) -> None:
    gpu = replace(GPUS["a10g"], cache=2e9)  # so slow that it decides
    lora = [LoraRows(i, count, rank, 1000 * rank) for i, (count, rank) in enumerate(zip(rows, ranks, strict=True))]
    seconds = OriginalKernels(SMALL).lora_seconds(StepShape(sum(rows), len(rows), 0, lora), gpu, CONSTANTS)
    readers = len(rows) if tiled else sum(rows)
    assert seconds == pytest.approx(readers * 1000 * max(ranks) / 1e9)
    always = TiledPrefillKernels(SMALL).lora_seconds(StepShape(sum(rows), len(rows), 0, lora), gpu, CONSTANTS)
    assert always == pytest.approx(len(rows) * 1000 * max(ranks) / 1e9)


def test_every_adapter_comes_from_memory_at_least_once() -> None:
    """In the original's kernels, where rows may read it again from the cache; in this project's, exactly once."""
    lora = [LoraRows(0, 5, 8, 100), LoraRows(0, 1, 8, 100), LoraRows(1, 7, 8, 300)]
    shape, gpu = StepShape(13, 3, 0, lora), replace(GPUS["a10g"], cache=1e15)
    for kernels in (SegmentKernels(SMALL), OriginalKernels(SMALL)):
        assert kernels.lora_seconds(shape, gpu, CONSTANTS) == pytest.approx(400 / 300e9)


def test_merged_weights_cost_something_only_where_the_adapter_changes() -> None:
    kernels = MergedKernels(MODELS["llama-7b"])
    change = 4 * 2 * 32 * 4 * 4096 * 4096 / 300e9  # two readings and two writings of q, k, v and o
    costs = []
    for adapter in (0, 0, 1, None, None, 1):
        lora = [] if adapter is None else [LoraRows(adapter, 1, 8, 100)]
        costs.append(kernels.lora_seconds(StepShape(1, 1, 0, lora), GPUS["a10g"], CONSTANTS))
    assert costs == pytest.approx([change, 0.0, change, change, 0.0, change])


def test_padding_costs_a_copy_for_every_sequence() -> None:
    kernels = PaddedKernels(SMALL)
    mixed = StepShape(3, 3, 0, [LoraRows(0, 1, 8, 100), LoraRows(1, 1, 16, 200), LoraRows(0, 1, 8, 100)])
    alone = StepShape(2, 2, 0, [LoraRows(0, 1, 8, 100)] * 2)
    assert kernels.host_seconds(mixed, CONSTANTS) == pytest.approx(2 * 2.5e-3 + 1e-7 * 3 * 2 * 64)
    assert kernels.host_seconds(alone, CONSTANTS) == pytest.approx(2 * 2.5e-3)
    assert kernels.lora_seconds(mixed, GPUS["a10g"], CONSTANTS) == pytest.approx(600 / 300e9)


def test_loads_share_one_link() -> None:
    clock, layout = SimulatedClock(), PageLayout(SMALL)
    store = ShapeStore(SMALL, layout)
    sizes = [store.register(rank).nbytes for rank in (4, 2)]
    loader = LinkLoader(clock, store, bytes_per_s=1e6, overhead=0.01)
    loader.start(0)
    loader.start(1)
    assert loader.completed() == []
    loader.wait()
    assert clock.now() == pytest.approx(0.01 + sizes[0] / 1e6)
    assert loader.completed() == [(0, None)] and loader.completed() == []
    loader.wait()
    assert clock.now() == pytest.approx(0.02 + sum(sizes) / 1e6)
    assert loader.completed() == [(1, None)] and loader.bytes_loaded == sum(sizes)


# --- the loop ---


class Whole(Replay):
    """A Replay whose step is the engine's own, with its arrays, samples and texts."""

    _run = EngineLoop._run


def as_whole(built: Replay) -> Whole:
    store = built.prefetcher.store
    assert isinstance(store, ShapeStore)
    return Whole(built.scheduler, built.prefetcher, built.executor, built.clock, built.model_config, store)


@pytest.mark.parametrize("options", [{}, ORIGINAL, {"admission": "expected"}], ids=["ours", "original", "expected"])
def test_a_replay_is_the_engine_without_the_work(options: dict[str, Any]) -> None:
    """The same records, to the last bit, as the engine's own step gives with the same executor."""
    short, whole = system(**options).build(), as_whole(system(**options).build())
    records = short.play(trace(rate=20.0))
    assert whole.play(trace(rate=20.0)) == records
    assert short.prefetcher.counts == whole.prefetcher.counts and short.steps == whole.steps
    assert short.prefetcher.counts.loads >= 6


FEW = settings(max_examples=max(2, settings.default.max_examples // 25))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("original", [True, False], ids=["original", "ours"])
@FEW
@given(seed=st.integers(0, 2**32 - 1), rate=st.sampled_from([5.0, 40.0, 200.0]), cv=st.sampled_from([1.0, 4.0]))
def test_every_request_ends_exactly_once(
    policy: str, original: bool, seed: int, rate: float, cv: float
) -> None:
    """And in every step somebody runs, is told, or is waited for: nothing is idle while it could work."""
    requests = trace(seed, rate, cv, duration=30 / rate)
    replay = system(policy=POLICIES[policy], **(ORIGINAL if original else {})).build()
    before = (-1, -1.0)

    def moved() -> None:
        nonlocal before
        if replay.steps % 8 == 0:
            replay.check()
        after = (replay.steps, replay.clock.now())
        assert after > before or any(s.finish_reason is not None for s in replay.sequences)
        before = after

    records = replay.play(requests, moved)
    assert [record.arrival for record in records] == [request.time for request in requests]
    for record, request in zip(records, requests, strict=True):
        assert record.finished_at is not None and record.finished_at >= record.arrival
        assert record.output == (request.output if record.completed else 0)
        assert record.completed or "abort" in policy
    usage = replay.pool.usage()
    assert usage.kv == 0 and (usage.adapter == 0 or not original)


def never_too_late(records: list[RequestRecord], prefill: float, slo: float) -> None:
    """Nobody was dropped who could still have had the first token in time."""
    for record in records:
        if not record.completed:
            assert record.finished_at is not None and record.finished_at + prefill - record.arrival >= slo - 1e-9


@FEW
@given(seed=st.integers(0, 2**32 - 1), rate=st.sampled_from([60.0, 200.0]))
def test_early_abort_never_drops_a_request_that_could_still_be_in_time(seed: int, rate: float) -> None:
    """On a machine where every prefill takes the same time, so that it is known what could be."""
    fastest = replace(CONSTANTS, bandwidth=1.0, flops=1.0, lora_reads=1.0)
    flat = replace(fastest, layer=0.05, lora_layer=0.0, sequence=0.0)
    slo = 1.0
    aborting = replace(
        system(policy=lambda: EarlyAbort(slo), adapters=0, pool_tokens=100, separate_prefill=True), constants=flat
    )
    records = aborting.build().play(trace(seed, rate, adapters=0, duration=1.0))
    assert any(not record.completed for record in records)
    never_too_late(records, 0.1, slo)


def test_a_request_that_could_never_fit_is_refused_and_counted() -> None:
    replay = system(pool_tokens=20).build()
    large = Arrival(time=0.0, adapter=0, prompt=30, output=5)
    records = replay.play([large, Arrival(time=1.0, adapter=1, prompt=2, output=2)])
    assert [record.completed for record in records] == [True, False] and len(replay.refused) == 1
    assert summarize(records).attainment == 0.5


def test_five_minutes_with_two_thousand_adapters_take_seconds() -> None:
    setting = SETTINGS["S2"]
    built = System(
        gpu=GPUS["a100-80"],
        model=MODELS[setting.model],
        adapters=2000,
        ranks=setting.ranks,
        config=original_config(POOL_TOKENS[setting.model, "a100-80"]),
        constants=CONSTANTS,
    ).build()
    start = time.process_time()
    records = built.play(original_trace(SyntheticTrace(adapters=2000, rate=10.0)))
    assert all(record.completed for record in records) and len(records) == 3000
    assert math.isfinite(built.clock.now()) and time.process_time() - start < 10
