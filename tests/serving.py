"""Engines for tests: T0 and its adapters as real folders, written once a process, and the dense answer to any request.

Poison is on and pages come in random order unless a test says otherwise.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
from loaders import DelayedLoader
from tiny import tiny_config, write_adapter_folder, write_model_folder

from slora_ref import Completion, Engine, EngineConfig, FinishReason, SamplingParams
from slora_ref.adapter import load_adapter, read_header
from slora_ref.checkpoint import float_dtype, load_checkpoint
from slora_ref.device_loader import DeviceLoader
from slora_ref.engine.build import assemble
from slora_ref.engine.devices import KernelDevice
from slora_ref.ops.host_kernels import HostKernels
from slora_ref.ops.host_ops import HostOps
from slora_ref.pager import PageLayout
from slora_ref.reference import Reference
from slora_ref.sampler import filtered_probabilities, noise

CONFIG = tiny_config()
TOLERANCE = 1e-4
DIFFERENT = 0.1

ADAPTERS: dict[str, dict[str, Any]] = {
    "x": {"rank_or_ranks": 16, "seed": 1, "sd": 0.15},
    "y": {"rank_or_ranks": 4, "targets": ["q_proj"], "seed": 2, "sd": 0.4},
    "z": {"rank_or_ranks": 1, "seed": 3, "sd": 0.25},
    "qv": {"rank_or_ranks": 3, "targets": ["q_proj", "v_proj"], "seed": 4, "sd": 0.4},
    "layers": {"rank_or_ranks": {(0, "q_proj"): 2, (1, "o_proj"): 5, (1, "down_proj"): 1}, "seed": 5, "sd": 0.4},
    "o": {"rank_or_ranks": 2, "targets": ["o_proj"], "seed": 6, "sd": 0.5},
}
"""Weights by name, as write_adapter_folder takes them: big and small, whole and partial."""


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slora_ref_serving_")


@functools.cache
def model_folder() -> Path:
    """T0 with random weights."""
    return write_model_folder(Path(_folders().name) / "model", CONFIG, seed=0)


@functools.cache
def adapter_folder(weights: str) -> Path:
    """The folder of one of ADAPTERS."""
    return write_adapter_folder(Path(_folders().name) / "adapters" / weights, CONFIG, **ADAPTERS[weights])


@functools.cache
def image_bytes(*weights: str) -> int:
    """Bytes in host memory of the largest of these adapters, packed in float32."""
    layout, headers = PageLayout(CONFIG), [read_header(adapter_folder(name), CONFIG) for name in weights]
    pages = max(layout.adapter_pages(header.ranks.max(axis=0)) for header in headers)
    return 4 * CONFIG.num_layers * layout.width * pages


@functools.cache
def reference(weights: str | None) -> Reference:
    """The dense model with these weights merged in; None: the base model."""
    adapter = None if weights is None else load_adapter(read_header(adapter_folder(weights), CONFIG), CONFIG)
    return Reference(CONFIG, load_checkpoint(model_folder(), CONFIG, "float32"), adapter)


@functools.lru_cache(maxsize=4096)
def reference_logits(weights: str | None, ids: tuple[int, ...]) -> np.ndarray:
    """The dense model's logits after each token."""
    return reference(weights).logits(list(ids))


def open_engine(config: EngineConfig, on: str) -> Engine:
    """An engine of T0: "cpu", in NumPy; "host", by the kernels through g++; "cuda", by the kernels on a GPU."""
    if on != "host":
        return Engine.from_pretrained(model_folder(), config)
    device = KernelDevice(config, HostOps(float_dtype(config.dtype), kernels=host_kernels()))
    return Engine(*assemble(CONFIG, load_checkpoint(model_folder(), CONFIG, config.dtype), None, device, config))


@functools.cache
def host_kernels() -> HostKernels:
    """One for all, so that each library is opened once."""
    return HostKernels()


def new_engine(adapters: Mapping[str, str] | None = None, on: str = "cpu", **options: Any) -> Engine:
    """An engine of T0 with adapters {name: weights}, on one of the places of `open_engine`."""
    chosen = {"pool_pages": 3000, "max_running": 8, "max_batched_tokens": 64, "poison": True}
    chosen |= {"page_order_seed": 0, "loading": "inline"}
    device = {} if on == "cpu" else {"device": "cuda", "dtype": "float32"}  # what kernels compute has a GPU's options
    engine = open_engine(EngineConfig(**(chosen | device | options)), on)
    for name, weights in (adapters or {}).items():
        engine.add_adapter(name, adapter_folder(weights))
    return engine


@contextmanager
def without_shape_checks() -> Iterator[None]:
    """For tests of thousands of steps: the checks of array shapes take four fifths of the time, and other tests have
    them on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def delay_loads(engine: Engine) -> DelayedLoader:
    """Gives the engine a loader whose loads take as many polls as the test plans, and may fail."""
    inner = engine.prefetcher.loader
    write = functools.partial(write_at_once, inner) if isinstance(inner, DeviceLoader) else None
    engine.prefetcher.loader = loader = DelayedLoader(engine.pool, engine.store, write)
    return loader


def write_at_once(loader: DeviceLoader, adapter_id: int, image: np.ndarray) -> None:
    """What the device's loader does, and waits for it."""
    loader.copy(adapter_id, image)
    loader.wait()
    assert loader.completed() == [(adapter_id, None)]


def adapter_id(engine: Engine, name: str) -> int:
    """The id of a name's current version."""
    return engine.store.lookup(name).adapter_id


def run_to_end(engine: Engine, most_steps: int = 3000) -> dict[int, Completion]:
    """Steps until there is nothing left to do; every request ends, or this fails."""
    done: dict[int, Completion] = {}
    for _ in range(most_steps):
        if not engine.has_work:
            return done
        for news in engine.step():
            if news.completion is not None:
                assert news.request_id not in done, "a request ended twice"
                done[news.request_id] = news.completion
        engine.check()
    raise AssertionError(f"after {most_steps} steps these are not done: {sorted(engine._live)}")


def assert_right(done: Completion, weights: str | None, params: SamplingParams, seed: int | None = None) -> None:
    """A completion has ended by itself and is what the dense model with these weights would have said."""
    assert done.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (done.finish_reason, done.error)
    assert_tokens(done, weights, params, seed)


def assert_tokens(done: Completion, weights: str | None, params: SamplingParams, seed: int | None = None) -> None:
    """However a request ended: what it had said by then is right.

    Each token given those before it: the likeliest, where the gap to the next is above the tolerance; or, sampled, the
    one that the seed's noise at this position points to, give or take the tolerance. Kept logits match.
    """
    ids = (*done.prompt_ids, *done.token_ids)
    logits = reference_logits(weights, ids)[:-1]
    for position in range(len(done.prompt_ids), len(ids)):
        row, token = logits[position - 1], ids[position]
        if params.temperature == 0:
            assert row.max() - row[token] <= TOLERANCE, f"token {token} at {position}, not {row.argmax()}"
        else:
            assert_drawn(row, token, params, noise(params.seed if seed is None else seed, position))
    if not params.keep_logits:
        assert not done.logits
    elif done.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert len(done.logits) == len(logits)
    if done.logits:
        assert np.abs(np.array(done.logits) - reference_logits(weights, ids)[: len(done.logits)]).max() < TOLERANCE


def assert_drawn(row: np.ndarray, token: int, params: SamplingParams, at: float) -> None:
    """The running sum of probabilities passes `at` within this token, give or take what the tolerance may move it."""
    columns = ([params.temperature], [params.top_k], [params.top_p], [params.min_p])
    temperature, top_k, top_p, min_p = map(np.array, columns)
    p = filtered_probabilities(row[None], temperature, top_k, top_p, min_p)[0]
    ends = np.cumsum(p / p.sum())
    slack = 10 * TOLERANCE / params.temperature
    assert ends[token] - p[token] / p.sum() - slack <= at <= ends[token] + slack, (token, at)


def assert_all_free(engine: Engine) -> None:
    """Nothing runs: only idle adapters have pages; without adapters, everything is as at the start."""
    engine.check()
    assert engine.pool.usage().kv == 0
    assert not engine.prefetcher._pins
    assert all(version.users == 0 for version in engine.store._versions.values())
    for name in list(engine.adapters):
        engine.remove_adapter(name)
    for _ in range(50):  # loads under way end, and are dropped
        engine.step()
    engine.check()
    assert engine.pool.free_pages == engine.pool.num_pages
    assert engine.pool.free_adapter_slots == engine.pool.max_adapters
    assert len(engine.pool._free_sequence_slots) == engine.pool.max_sequences
    assert not engine.store._versions
