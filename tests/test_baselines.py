"""Baselines run for real: whatever part is swapped, the tokens are the usual engine's and the dense model's.

On the CPU in NumPy and by the kernels through g++, and (marked gpu) on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import CONFIG as MODEL
from serving import adapter_folder, assert_right, host_kernels, model_folder, without_shape_checks

from slora_ref import Completion, Engine, EngineConfig, SamplingParams
from slora_ref.adapter import load_adapter, read_header
from slora_ref.baselines import Base, MergingExecutor, Packed, merge_and_switch, padded_bmm, peft_style, split_pools
from slora_ref.baselines.merge import merged_weights
from slora_ref.baselines.padded_kernels import MOST_ROWS
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config import ModelConfig
from slora_ref.engine.devices import Device, KernelDevice
from slora_ref.errors import ConfigError
from slora_ref.ops import KernelOps
from slora_ref.ops.host_ops import HostOps
from slora_ref.reference import Reference

NAMES = ("x", "y", "z", "qv", "layers", "o")
FOLDERS = {name: adapter_folder(name) for name in NAMES}
CONFIG = EngineConfig(pool_pages=4000, max_running=8, max_batched_tokens=64, loading="inline", poison=True, seed=1)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, keep_logits=True)
PROMPTS = [[3 + 5 * i % 80, 7, 11 + i] * (1 + i % 3) for i in range(18)]
USED = [NAMES[i * 5 % len(NAMES)] for i in range(len(PROMPTS))]
MIXED = [*USED[:-2], None, None]
ON = pytest.mark.parametrize("on", ["cpu", "host", pytest.param("cuda", marks=pytest.mark.gpu)])


def open_base(on: str, config: EngineConfig = CONFIG) -> tuple[Base, EngineConfig]:
    """T0 on the CPU in NumPy, through g++ ("host"), or on a GPU; and the options for it."""
    if on == "cuda":
        config = replace(config, device="cuda", dtype="float32")
    base = Base.load(model_folder(), config)
    if on != "host":
        return base, config
    device = KernelDevice(config, HostOps(np.float32, kernels=host_kernels()))
    return replace(base, device=device), config


def merging(on: str) -> Engine:
    return merge_and_switch(*open_base(on))


def padding(on: str) -> Engine:
    return padded_bmm(*open_base(on))


def as_peft(on: str) -> Engine:
    return peft_style(*open_base(on), 3)


def splitting(on: str) -> Engine:
    return split_pools(*open_base(on), FOLDERS, 0.5)


ENGINES = {"merge": merging, "bmm": padding, "peft": as_peft, "split": splitting}


@pytest.fixture(autouse=True)
def _shape_checks_in_numpy_only(request: pytest.FixtureRequest) -> Iterator[None]:
    """With kernels they take most of the time; the same functions have them on in other tests."""
    if request.node.name.endswith(("[cpu]", "-cpu]")) or "on" not in request.fixturenames:
        yield
        return
    with without_shape_checks():
        yield


def serve(engine: Engine, adapters: Sequence[str | None]) -> list[Completion]:
    for name in set(NAMES) - set(engine.adapters):
        engine.add_adapter(name, FOLDERS[name])
    completions = engine.generate(PROMPTS, PARAMS, list(adapters))
    engine.check()
    return completions


@functools.cache
def usual() -> list[Completion]:
    """What the usual engine says."""
    return serve(Engine.from_pretrained(model_folder(), CONFIG), MIXED)


@ON
@pytest.mark.parametrize("baseline", ENGINES)
def test_a_baseline_gives_the_engines_tokens(baseline: str, on: str) -> None:
    completions = serve(ENGINES[baseline](on), MIXED)
    assert [c.token_ids for c in completions] == [c.token_ids for c in usual()]
    for ours, theirs, name in zip(completions, usual(), MIXED, strict=True):
        assert np.abs(np.stack(ours.logits) - np.stack(theirs.logits)).max() < 1e-4
        assert_right(ours, name, PARAMS)


@pytest.mark.parametrize("baseline", ENGINES)
def test_other_adapters_give_other_tokens(baseline: str) -> None:
    completions = serve(ENGINES[baseline]("cpu"), USED[::-1])
    assert [c.token_ids for c in completions] != [c.token_ids for c in usual()]


@ON
def test_packed_models_give_the_engines_tokens(on: str) -> None:
    if on == "host":
        pytest.skip("packed engines open their devices themselves")
    config = CONFIG if on == "cpu" else replace(CONFIG, device="cuda", dtype="float32")
    packed = Packed(model_folder(), FOLDERS, config)
    completions = packed.generate(PROMPTS[:-2], PARAMS, USED[:-2])
    assert [c.token_ids for c in completions] == [c.token_ids for c in usual()[:-2]]
    assert {engine.pool.num_pages for engine in packed.engines.values()} == {4000 // 6}


def test_packed_models_need_a_pool_to_divide() -> None:
    with pytest.raises(ConfigError, match="pool_pages"):
        Packed(model_folder(), {"x": adapter_folder("x")}, EngineConfig())


# --- merge and switch ---


def copied_layers(base: Base) -> list[dict[str, np.ndarray]]:
    layers = [vars(layer) for layer in base.weights.layers]
    return [{name: array.copy() for name, array in layer.items() if array is not None} for layer in layers]


@ON
def test_switching_back_and_forth_does_not_drift(on: str) -> None:
    """Adding and subtracting in place would: every merge starts from the weights as they were loaded."""
    base, config = open_base(on)
    before = copied_layers(base)
    engine = merge_and_switch(base, config)
    serve(engine, USED)
    first, again = (engine.generate([PROMPTS[0]], PARAMS, ["x"])[0] for _ in range(2))
    for _ in range(3):
        engine.generate(PROMPTS[:4], PARAMS, ["y", "z", "y", None])
    last = engine.generate([PROMPTS[0]], PARAMS, ["x"])[0]
    for other in (again, last):
        assert all(np.array_equal(a, b) for a, b in zip(first.logits, other.logits, strict=True))
    assert isinstance(engine.executor, MergingExecutor) and engine.executor.merges > 10
    assert any((kept["qkv"] != now["qkv"]).any() for kept, now in zip(before, copied_layers(base), strict=True))
    engine.executor.restore()
    for kept, now in zip(before, copied_layers(base), strict=True):
        assert all((kept[name] == now[name]).all() for name in kept)


def test_a_merge_that_fails_halfway_is_taken_out_before_the_next_step() -> None:
    """Half an adapter must not be taken for the base model."""
    engine = merging("cpu")
    engine.add_adapter("x", FOLDERS["x"])
    merge, merged = engine.executor._adapter, []

    def fail_at_the_fifth(*place: int) -> Any:
        merged.append(place)
        if len(merged) == 5:
            raise MemoryError("as planned")
        return merge(*place)

    engine.executor._adapter = fail_at_the_fifth
    assert "as planned" in engine.generate([PROMPTS[0]], PARAMS, "x")[0].error
    assert_right(engine.generate([PROMPTS[0]], PARAMS)[0], None, PARAMS)


@pytest.mark.parametrize("name", NAMES)
def test_merged_weights_are_the_model_with_the_adapter(name: str) -> None:
    model = ModelConfig.from_folder(model_folder())
    weights = load_checkpoint(model_folder(), model, "float32")
    adapter = load_adapter(read_header(adapter_folder(name), model), model)
    ids = [3, 7, 11, 5, 80, 2]
    merged = Reference(model, merged_weights(model, weights, adapter)).logits(ids)
    assert np.abs(merged - Reference(model, weights, adapter).logits(ids)).max() < 1e-4
    assert np.abs(merged - Reference(model, weights).logits(ids)).max() > 0.1


# --- padded bmm ---


@ON
def test_a_prompt_longer_than_a_padded_piece_is_cut(on: str) -> None:
    base, config = open_base(on, replace(CONFIG, max_batched_tokens=4 * MOST_ROWS))
    prompts = [[5 + i % 80 for i in range(length)] for length in (2 * MOST_ROWS + 3, 1, 9, 30)]
    used = ["x", "layers", "qv", None]
    engine = padded_bmm(base, config)
    for name in NAMES:
        engine.add_adapter(name, FOLDERS[name])
    for done, name in zip(engine.generate(prompts, PARAMS, used), used, strict=True):
        assert_right(done, name, PARAMS)
    engine.check()


def turned_view(device: Device, array: np.ndarray) -> Any:
    """The same stack of matrices, whose neighbouring numbers are those of a column."""
    return device.place(array.swapaxes(1, 2).copy()).swapaxes(1, 2)


STACKS = [((3, 1, 40), (3, 40, 16)), ((2, 5, 8), (2, 8, 24)), ((1, 7, 1), (1, 1, 9)), ((2, 4, 3), (2, 3, 1))]


@pytest.mark.parametrize("on", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_products_of_stacks_take_turned_and_cut_matrices(on: str, kind: str, turned: tuple[bool, bool]) -> None:
    device = open_base(on)[0].device
    ops, rng = device.ops(), np.random.default_rng(0)
    assert isinstance(ops, KernelOps)
    for shapes in STACKS:
        x, w = (rng.standard_normal(shape).astype(kind) for shape in shapes)
        y = rng.standard_normal((len(x), x.shape[1], w.shape[2] + 5)).astype(kind)
        want = y.astype(np.float64)
        want[:, :, 2:-3] += 0.5 * x.astype(np.float64) @ w
        each = zip((x, w), turned, strict=True)
        views = (turned_view(device, array) if turn else device.place(array) for array, turn in each)
        placed = device.place(y)
        ops.prepared_products(placed[:, :, 2:-3], *views, 0.5, add=True)()
        got = ops.fetch(placed).astype(np.float64)
        assert np.abs(got - want).max() <= {"float32": 1e-5, "float16": 4e-3}[kind] * np.abs(want).max()


# --- split pools ---


def most_running(engine: Engine, adapters: Sequence[str]) -> int:
    """Requests that ran in one step, at most."""
    for number, name in enumerate(adapters):
        engine.add_request(PROMPTS[number], SamplingParams(max_tokens=60, ignore_eos=True), name)
    most = 0
    while engine.has_work:
        engine.step()
        engine.check()
        most = max(most, len(engine.scheduler.running))
    return most


def test_split_pools_admit_fewer_than_one_pool_of_their_size() -> None:
    """Each adapter of rank 1 takes a slot for rank 16; and where all use one adapter, the other slots are idle."""
    base, config = open_base("cpu", replace(CONFIG, pool_pages=1800))
    folders = {f"{name}{i}": FOLDERS[name] for i in range(3) for name in ("x", "z")}
    many = [name for _ in range(3) for name in folders]
    for used in (many, ["x0"] * len(many)):
        one = base.engine(config)
        for name, path in folders.items():
            one.add_adapter(name, path)
        with without_shape_checks():
            assert most_running(split_pools(base, config, folders, 0.6), used) < most_running(one, used)


@pytest.mark.parametrize(
    ("options", "share", "message"),
    [({"pool_pages": None}, 0.5, "give it"), ({}, 0.001, "largest adapter"), ({}, 1.5, "leave 0 of 4000")],
)
def test_what_cannot_be_split_is_refused(options: dict[str, None], share: float, message: str) -> None:
    base, config = open_base("cpu")
    with pytest.raises(ConfigError, match=message):
        split_pools(base, replace(config, **options), FOLDERS, share)


def test_a_split_pool_checks_itself() -> None:
    base, config = open_base("cpu")
    engine = split_pools(base, config, FOLDERS, 0.5)
    engine.generate(PROMPTS[:1], PARAMS, "x")
    engine.pool.check()
    engine.pool._adapter_pages[0] = engine.pool._adapter_pages[0] + 1
    with pytest.raises(AssertionError):
        engine.pool.check()


BUILDERS: dict[str, Callable[[Base, EngineConfig], Engine]] = {"merge": merge_and_switch, "bmm": padded_bmm}


@pytest.mark.parametrize("build", BUILDERS)
def test_baselines_have_one_shard(build: str) -> None:
    config = replace(CONFIG, shards=2)
    with pytest.raises(ConfigError, match="one device"):
        BUILDERS[build](Base.load(model_folder(), config), config)


def test_a_base_with_random_weights_serves() -> None:
    base = Base.random(MODEL, CONFIG)
    engine = base.engine(CONFIG)
    engine.add_adapter("x", Path(FOLDERS["x"]))
    assert len(engine.generate([[3, 4, 5]], PARAMS, "x")[0].token_ids) == 6
