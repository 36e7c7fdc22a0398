"""The engine on kernels: on the CPU through g++, and (marked gpu) on a GPU. Meanings are those of the NumPy engine."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from serving import (
    ADAPTERS,
    CONFIG,
    adapter_folder,
    assert_all_free,
    assert_right,
    model_folder,
    new_engine,
    reference_logits,
    run_to_end,
    without_shape_checks,
)
from test_engine_machine import MODES, SMALL, EngineMachine, live

from slora_ref import Engine, EngineConfig, SamplingParams
from slora_ref.adapter import load_adapter, read_header
from slora_ref.batch import Batch
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config import TARGETS
from slora_ref.errors import ConfigError
from slora_ref.executor import KernelExecutor, StepResult
from slora_ref.executor.staging import bucket
from slora_ref.ops.host_ops import HostOps
from slora_ref.ops.ladder import usable
from slora_ref.ops.launch import Launch
from slora_ref.reference import Reference
from slora_ref.sampler import Sampling
from slora_ref.synthetic import AdapterKind, write_adapters

PLACES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
ON = pytest.mark.parametrize("on", PLACES)
NAMES = [None, *ADAPTERS, *ADAPTERS]
EACH = {name: name for name in ADAPTERS}


@pytest.fixture(autouse=True, scope="module")
def _no_shape_checks() -> Iterator[None]:
    with without_shape_checks():
        yield


def ask(number: int, **others: Any) -> tuple[list[int], SamplingParams, str | None]:
    """Prompts of 3 to 40 tokens; greedy, and drawn with every filter."""
    filters = [{"temperature": 0.8}, {"temperature": 1.5, "top_k": 9}, {"temperature": 1, "top_p": 0.8, "min_p": 0.05}]
    how = ({}, *filters)[number % 4]
    params = SamplingParams(**({"max_tokens": 6, "seed": number, "ignore_eos": True} | how | others))
    return [(7 * number + i) % 95 for i in range(3 + 37 * number // 12)], params, NAMES[number]


def serve(engine: Engine, **others: Any) -> list[Any]:
    """The answers to a dozen requests over all adapters, each checked."""
    asked = [ask(number, **others) for number in range(len(NAMES))]
    done = engine.generate(*map(list, zip(*asked, strict=True)))
    for completion, (_, params, name) in zip(done, asked, strict=True):
        assert_right(completion, name, params)
    engine.check()
    return done


@ON
def test_every_answer_is_the_dense_models(on: str) -> None:
    """Prefill, decode and both in one step; adapters alone and shared; logits kept and not."""
    engine = new_engine(EACH, on=on, max_batched_tokens=48)
    with_logits = serve(engine, keep_logits=True, logprobs=1, max_tokens=3)
    without = serve(engine, max_tokens=3)
    assert [done.token_ids for done in without] == [done.token_ids for done in with_logits]


@ON
@pytest.mark.parametrize("admission", MODES)
def test_any_history_of_the_engine_is_right(on: str, admission: str) -> None:
    machine = settings(stateful_step_count=20, max_examples=10, phases=[Phase.explicit, Phase.generate])
    run_state_machine_as_test(lambda: EngineMachine(admission, on), settings=machine)


@ON
def test_a_life_of_many_steps_ends_with_the_pages_of_the_start(on: str) -> None:
    machine = EngineMachine("expected", on)
    options = {"pool_pages": 110, "max_running": 5, "max_batched_tokens": 12, "max_adapters": 3}
    machine.build(options, SMALL[:4], polls=1)
    live(machine, random.Random(0), 100 if on == "host" else 600)
    machine.teardown()


class Fresh:
    """Beside an executor that keeps its launches, those of decode as graphs, one that never does, on the same model:
    compared in every step."""

    def __init__(self, kept: KernelExecutor) -> None:
        self.kept = kept
        self.fresh = KernelExecutor(kept.model, kept.ops, kept.tables, kept.staging.most, keep=False)
        self.steps = 0

    def start(self, batch: Batch, sampling: Sampling) -> StepResult:
        both = [executor.start(batch, sampling).read() for executor in (self.kept, self.fresh)]
        for name in ("tokens", "finite", "logits"):
            first, second = (np.asarray(getattr(result, name)) for result in both)
            assert first.tobytes() == second.tobytes(), name
        self.steps += 1
        return both[0]


@ON
def test_launches_that_are_repeated_give_the_bits_of_fresh_ones(on: str) -> None:
    engine = new_engine(EACH, on=on, max_batched_tokens=48)
    engine.executor = both = Fresh(engine.executor)
    serve(engine, keep_logits=True, max_tokens=7)
    assert not both.fresh.kept.tapes and not both.fresh.kept.graphs
    assert 1 < len(both.kept.kept.tapes) < both.steps and both.kept.kept.graphs


@pytest.mark.parametrize(("on", "dtype"), [("host", "float32"), pytest.param("cuda", "float16", marks=pytest.mark.gpu)])
def test_all_that_runs_is_among_what_is_compiled_ahead(on: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[tuple[str, str]] = set()
    backend = HostOps if on == "host" else importlib.import_module("slora_ref.ops.cuda_ops").CudaOps
    prepare = backend.prepare

    def seen(ops: Any, launch: Launch) -> Any:
        launched.add((launch.kernel, launch.dtype.name))
        return prepare(ops, launch)

    monkeypatch.setattr(backend, "prepare", seen)
    engine = new_engine(EACH, on=on, dtype=dtype, max_batched_tokens=48)
    for number in range(len(NAMES)):
        engine.add_request(*ask(number))
    run_to_end(engine)
    assert launched <= set(usable(dtype)) and len(launched) > len(set(usable(dtype))) // 2


def test_every_product_was_tried_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a library need not look for its code when a size comes for the first time."""
    sizes: set[tuple[int, ...]] = set()
    multiply = HostOps._product

    def seen(ops: HostOps, x: Any, weight: Any, *others: Any) -> Any:
        sizes.add((len(x), *weight.shape))
        return multiply(ops, x, weight, *others)

    monkeypatch.setattr(HostOps, "_product", seen)
    engine = new_engine(EACH, on="host", max_batched_tokens=48)
    engine.executor.warm_up()
    tried = set(sizes)
    sizes.clear()
    for number in range(len(NAMES)):
        engine.add_request(*ask(number))
    run_to_end(engine)
    assert len(sizes) > 20 and sizes <= tried


@ON
def test_a_larger_adapter_that_comes_later_makes_room_in_the_tables(on: str) -> None:
    """Launches that were kept for smaller tables are not used again, and adapters that were there stay."""
    engine = new_engine({"z": "z", "o": "o"}, on=on)
    prompt, params = [1, 2, 3, 4], SamplingParams(max_tokens=5, ignore_eos=True)
    for name in ("z", "o", "z"):
        assert_right(engine.generate([prompt], params, name)[0], name, params)
    before = engine.executor.tables.shape
    engine.add_adapter("x", adapter_folder("x"))
    done = engine.generate([prompt] * 3, params, ["z", "x", "o"])
    for completion, name in zip(done, ("z", "x", "o"), strict=True):
        assert_right(completion, name, params)
    tables = engine.executor.tables
    assert tables.shape != before and tables.max_rank == 16
    assert tables.adapters.pages.strides[0] % 16 == 0, "a row of the page table is an argument of a kernel"


@ON
def test_the_smallest_step_there_can_be(on: str) -> None:
    engine = new_engine(EACH, on=on, max_running=1, max_batched_tokens=2)
    prompt, params = [1, 2, 3, 4, 5], SamplingParams(max_tokens=3, ignore_eos=True, keep_logits=True)
    assert_right(engine.generate([prompt], params, "x")[0], "x", params)


@ON
def test_a_row_that_overflows_ends_its_own_request(on: str) -> None:
    engine = new_engine(EACH, on=on)
    weights = engine.executor.model.weights.embed
    weights[5] = np.inf
    done = engine.generate([[5, 1, 2], [1, 2, 3]], SamplingParams(max_tokens=3), [None, "x"])
    assert "not finite" in done[0].error
    assert done[1].error is None


@ON
def test_everything_is_given_back(on: str) -> None:
    engine = new_engine(EACH, on=on, max_adapters=2)
    serve(engine)
    assert engine.prefetcher.counts.evictions
    assert_all_free(engine)


def test_buckets_hold_their_rows_and_little_more() -> None:
    sizes = [bucket(rows) for rows in range(1, 3000)]
    assert all(rows <= size for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and all(bucket(size) == size for size in sizes)
    assert all(size <= rows * 9 / 8 for rows, size in enumerate(sizes, 1) if rows >= 64)


def test_a_gpu_that_is_not_there_is_refused_with_the_remedy() -> None:
    pytest.importorskip("numpy")
    try:
        import cupy

        missing = not cupy.cuda.runtime.getDeviceCount()
    except Exception:  # noqa: BLE001  whatever keeps CuPy from finding one
        missing = True
    if not missing:
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        Engine.from_config(CONFIG, EngineConfig(device="cuda"))


def test_each_device_has_its_dtypes() -> None:
    assert EngineConfig().dtype == "float32" and EngineConfig(device="cuda").dtype == "float16"
    with pytest.raises(ConfigError, match="dtype is 'float16'"):
        EngineConfig(dtype="float16")
    with pytest.raises(ConfigError, match="memory_fraction"):
        EngineConfig(device="cuda", memory_fraction=1.5)


HALF = {"float16": 0.02, "bfloat16": 0.06}  # of the largest logit


@ON
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_near_the_dense_model(on: str, dtype: str) -> None:
    """Steps in which adapters of large ranks share and those of small ranks are served row by row, in one launch."""
    engine = new_engine(EACH, on=on, dtype=dtype, poison=dtype == "float16")
    asked = [ask(number, keep_logits=True, temperature=0) for number in range(len(NAMES))]
    for done, (prompt, _, name) in zip(engine.generate(*map(list, zip(*asked, strict=True))), asked, strict=True):
        want = reference_logits(name, (*prompt, *done.token_ids))[:-1]
        assert np.abs(np.stack(done.logits) - want).max() < HALF[dtype] * np.abs(want).max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_graphs_give_what_single_launches_give(dtype: str, tmp_path: Path) -> None:
    """Seven targets, ranks 64, 32, 16 and 8 mixed, and the base model: the same bits, and those of the dense model."""
    folders = write_adapters(tmp_path, CONFIG, AdapterKind((64, 32, 16, 8), TARGETS), 4, seed=0)
    weights = load_checkpoint(model_folder(), CONFIG, "float32")
    adapters = [None, *(load_adapter(read_header(folder, CONFIG), CONFIG) for folder in folders)]
    params, prompts = SamplingParams(max_tokens=8, ignore_eos=True, keep_logits=True), [[i, 7, 9] for i in range(15)]
    names = [None if i % 5 == 0 else str(i % 5) for i in range(15)]
    answers = []
    for eager in (False, True):
        options = {"max_running": 16, "pool_pages": 20000, "enforce_eager": eager}
        engine = new_engine(on="cuda", dtype=dtype, poison=dtype != "bfloat16", **options)
        for name, folder in enumerate(folders, 1):
            engine.add_adapter(str(name), folder)
        answers.append(engine.generate(prompts, params, names))
        assert bool(engine.executor.kept.graphs) != eager
    for graph, single, name in zip(*answers, names, strict=True):
        assert np.stack(graph.logits).tobytes() == np.stack(single.logits).tobytes()
        want = Reference(CONFIG, weights, adapters[int(name or 0)]).logits([*graph.prompt_ids, *graph.token_ids])[:-1]
        error = np.abs(np.stack(graph.logits) - want).max() / np.abs(want).max()
        assert error < HALF.get(dtype, 1e-4)


@ON
def test_rows_of_the_base_model_have_the_same_bits_whether_others_carry_adapters(on: str) -> None:
    """In one batch and bucket: LoRA kernels run or not, the graph has them or not."""
    params, answers = SamplingParams(max_tokens=6, ignore_eos=True, keep_logits=True), []
    prompts, some = [[i, 2, 3] for i in range(6)], [None, None, "x", "x", "z", "o"]
    engine = new_engine(EACH, on=on)
    engine.generate(prompts, params, some)  # now the adapters are there, and all start in one step
    for names in ([None] * 6, some):
        done = engine.generate(prompts, params, names)
        answers.append([np.stack(each.logits).tobytes() for each in done])
    base, mixed = answers
    assert base[:2] == mixed[:2] and all(one != other for one, other in zip(base[2:], mixed[2:], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("scattered", "bar"), [(True, 0.85), (False, 0.95)], ids=["scattered", "neighbours"])
def test_a_load_is_near_the_links_peak(scattered: bool, bar: float, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank-8 adapter of a 7B model, 16.8 MB, from pinned memory: one launch, or a box, beside one plain copy."""
    import cupy

    from slora_ref.ops.cuda_memory import pinned_bytes
    from slora_ref.ops.cuda_ops import CudaOps

    ops, (layers, pages, width) = CudaOps(np.float16), (32, 64, 4096)
    image = pinned_bytes(2 * layers * pages * width).view(np.float16).reshape(layers, pages, width)
    image[...] = np.random.default_rng(0).standard_normal(width)
    storage = cupy.zeros((layers, 4096, width), np.float16)
    ids = np.random.default_rng(1).permutation(4096)[:pages] if scattered else np.arange(100, 100 + pages)
    ids = ids.astype(np.int32)
    load = ops.prepared_load(storage, image, cupy.asarray(ids), ids)
    plain = cupy.empty(image.shape, np.float16)
    load_s, copy_s = (best_seconds(work) for work in (load, lambda: plain.set(image)))
    assert (cupy.asnumpy(storage[:, cupy.asarray(ids)]) == image).all()
    assert int((storage != 0).any(axis=(0, 2)).sum()) == pages
    with capsys.disabled():
        rates = [image.nbytes / seconds / 1e9 for seconds in (load_s, copy_s)]
        print(f"\n{'scattered' if scattered else 'neighbours'}: {rates[0]:.1f} GB/s, a plain copy {rates[1]:.1f} GB/s")
    assert copy_s / load_s >= bar


def best_seconds(work: Any) -> float:
    """Of ten runs on the current stream."""
    import cupy

    times = []
    for _ in range(10):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return min(times)
