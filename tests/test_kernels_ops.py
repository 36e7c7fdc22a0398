"""The operations of a model through kernels: a whole forward pass agrees with NumpyOps in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from test_numpy_ops import Attention, Lora, attention_cases, attention_oracle, lora_cases, lora_oracle
from tiny import tiny_config

from slora_ref.batch import Batch
from slora_ref.checkpoint import random_weights
from slora_ref.config import ModelConfig
from slora_ref.errors import KernelError
from slora_ref.model import LlamaModel
from slora_ref.ops import NumpyOps, Ops, Segments, Spans, plan
from slora_ref.ops.host_ops import HostOps
from slora_ref.ops.kernel_source import DTYPES
from slora_ref.ops.ladder import operation_of
from slora_ref.ops.launch import Launch
from slora_ref.ops.tables import AdapterTables, O
from slora_ref.ops.tape import Work
from slora_ref.pager import AdapterShape, PageLayout, PagePool

TOLERANCE = {"float32": 2e-5, "float16": 0.02, "bfloat16": 0.1}  # of the largest logit


def build_pool(config: ModelConfig, dtype: Any, seed: int = 3) -> PagePool:
    """A poisoned pool in random order: sequences of 9, 40 and 70 tokens, adapters of ranks 1, 5 and 24."""
    pool = PagePool(PageLayout(config), 2000, 4, 80, 4, dtype=dtype, poison=True, shuffle_seed=seed)
    rng = np.random.default_rng(seed)
    for adapter, rank in enumerate((1, 5, 24)):
        ranks = np.full((config.num_layers, 7), rank, np.int32)
        ranks[0, adapter] = 0  # absent from one layer
        pages = pool.open_adapter(adapter, AdapterShape(ranks, np.where(ranks, 1.5, 0).astype(np.float32)))
        image = rng.standard_normal((config.num_layers, len(pages), config.kv_width)) * 0.05
        pool.write_adapter(adapter, image.astype(dtype))
    for length in (9, 40, 70):
        slot = pool.open_sequence()
        pages = np.concatenate(pool.extend(np.full(length, slot), np.arange(length)))
        pool.storage[:, pages] = rng.standard_normal((config.num_layers, 2 * length, config.kv_width)).astype(dtype)
    return pool


def build_batch(pool: PagePool) -> Batch:
    """Decode rows of two sequences (adapters 0 and 2) and 33 rows of prefill (base model, then adapter 1)."""
    slots = np.array([0, 1, *[2] * 5, *[3] * 28])
    if len(pool._free_sequence_slots):
        pool.open_sequence()
    positions = np.array([9, 40, *range(70, 75), *range(28)])
    k_pages, v_pages = pool.extend(slots, positions)
    adapters = np.array([pool.adapter_slot(a) for a in (0, 2, -1, 1)])
    rank = pool.adapters.page_rank[adapters].max(axis=1) * (adapters >= 0)
    segments = Segments(adapters, np.array([0, 1, 2, 7]), np.array([1, 1, 5, 28]), rank)
    spans = Spans(np.arange(4), np.array([0, 1, 2, 7]), np.array([1, 1, 5, 28]), np.array([10, 41, 75, 28]))
    ids = np.random.default_rng(1).integers(0, 97, len(slots))
    last = np.array([0, 1, 6, 34])
    return Batch(ids, positions, k_pages, v_pages, segments, spans, last, np.arange(4))


def logits_of(config: ModelConfig, ops: Ops, storage: Any, place: Callable[[np.ndarray], Any]) -> Any:
    """Logits of one step; weights and pages are rounded to `storage`, then put where `place` says."""
    weights = random_weights(config, 5, np.float32)
    pool = build_pool(config, np.float32)
    batch = build_batch(pool)
    pool.storage = place(pool.storage.astype(storage))
    model = LlamaModel(config, cast(weights, lambda array: place(array.astype(storage))), ops, pool, 80)
    return model.forward(batch)


def cast(value: Any, change: Any) -> Any:
    """Every array of nested dataclasses and tuples, changed."""
    if isinstance(value, np.ndarray):
        return change(value)
    if isinstance(value, tuple):
        return tuple(cast(item, change) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: cast(getattr(value, name), change) for name in value.__dataclass_fields__})
    return value


def in_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


CONFIG = tiny_config(attention_bias=True)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def assert_agrees_with_float64(got: np.ndarray, dtype: str) -> None:
    want = logits_of(CONFIG, NumpyOps(np.float64), DTYPES[dtype], in_float64)
    assert np.abs(got.astype(np.float64) - want).max() < TOLERANCE[dtype] * np.abs(want).max()
    assert np.abs(want).max() > 0.1


@pytest.mark.parametrize("order", ["forward", "reverse"])
@EACH_DTYPE
def test_a_forward_pass_on_the_host_agrees_with_float64(dtype: str, order: str) -> None:
    assert_agrees_with_float64(logits_of(CONFIG, HostOps(DTYPES[dtype], order=order), DTYPES[dtype], np.asarray), dtype)


@given(case=lora_cases())
@settings(max_examples=15)
def test_lora_in_the_tables_of_a_pool(case: Lora) -> None:
    """Through AdapterTables, with gaps, ranks that differ by layer and As before or behind Bs."""
    for layer in range(2):
        want, bound = lora_oracle(case, layer)
        ops, y = HostOps(np.float32), case.y.copy()
        t = ops.lora_shrink(case.x, case.pages[layer], case.tables, case.segments, case.group, layer)
        ops.lora_expand(y, t, case.pages[layer], case.tables, case.segments, case.group, layer, case.d_outs)
        assert (np.abs(y - want) <= bound).all()
        untouched = want == case.y
        assert (y[untouched].view(np.int32) == case.y[untouched].view(np.int32)).all(), "a base row was touched"


@given(case=attention_cases())
@settings(max_examples=15)
def test_attention_in_the_tables_of_a_pool(case: Attention) -> None:
    want, bound = attention_oracle(case)
    got = HostOps(np.float32).attention(case.q, case.pages, case.sequence_pages, case.spans)
    assert (np.abs(got - want) <= bound).all()


class Recorded(HostOps):
    """HostOps that notes what it launches."""

    def prepare(self, launch: Launch) -> Work:
        self.launched = [*getattr(self, "launched", []), launch]
        return super().prepare(launch)


def deltas(ops: HostOps, pairs: list[tuple[int, int]], adapters: int = 3) -> np.ndarray:
    """[rows, 40] what adapters of rank 9 add to zeros, for segments (adapter, rows); a row's x depends on its place."""
    rng, width, rank = np.random.default_rng(4), 40, 9
    pages = (rng.standard_normal((2 * rank * adapters, width)) / 4).astype(ops.dtype)
    tables = AdapterTables.empty(adapters, 1, 2 * rank)
    tables.pages[...] = rng.permutation(len(pages)).reshape(adapters, -1)
    tables.b_start[:, O.targets] = rank
    tables.rank[:, :, O.targets], tables.scale[:, :, O.targets] = rank, 2.0
    tables.page_rank[:, O.targets] = rank
    slots, lengths = np.array(pairs).T
    segments = Segments(slots, np.cumsum(lengths) - lengths, lengths, np.where(slots < 0, 0, rank))
    x = rng.standard_normal((lengths.sum(), width)).astype(ops.dtype)
    y = np.zeros_like(x)
    t = ops.lora_shrink(x, pages, tables, segments, O, 0)
    ops.lora_expand(y, t, pages, tables, segments, O, 0, (width,))
    return y


STEPS = (
    [(0, 1), (1, 2), (2, 1), (-1, 1), (0, 17)],
    [(0, 1), (-1, 2), (2, 1), (1, 1), (0, 17)],
    [(0, 1), (-1, 20), (1, 1)],
)


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of several rows share their adapter's weights, however small the step and the rank are."""
    monkeypatch.setattr(plan, "LEAST_SAVED", 0)


@pytest.mark.usefixtures("sharing")
@EACH_DTYPE
def test_the_bits_of_a_row_alone_do_not_depend_on_what_is_launched_for_the_others(dtype: str) -> None:
    """Whether other segments have several rows decides between one launch and two; rows 0 and 3 have rows alone."""
    each = [Recorded(DTYPES[dtype]) for _ in STEPS]
    alone = [deltas(ops, pairs) for ops, pairs in zip(each, STEPS, strict=True)]
    last = [operation_of(ops.launched[-1].kernel) for ops in each]
    assert last == [*["mbgmm_expand" if dtype == "float32" else "lora_expand"] * 2, "mbgmv_expand"]
    assert alone[0][0].any() and alone[0][0].tobytes() == alone[1][0].tobytes() == alone[2][0].tobytes()
    assert alone[0][3].any() and alone[0][3].tobytes() == alone[1][3].tobytes()


@pytest.mark.usefixtures("sharing")
@EACH_DTYPE
def test_fixed_launches_depend_on_the_number_of_rows_alone_and_change_no_bits(dtype: str) -> None:
    """What a captured graph needs: the same kernels with the same grids, whichever adapters run, also if none does."""
    launches = []
    for pairs in (*STEPS, [(-1, 22)], [(slot % 3, 1) for slot in range(22)]):
        free, fixed = HostOps(DTYPES[dtype], max_rank=16), Recorded(DTYPES[dtype], max_rank=16)
        fixed.fixed_launches = True
        assert deltas(free, pairs).tobytes() == deltas(fixed, pairs).tobytes()
        launches.append([(launch.kernel, launch.grid) for launch in fixed.launched])
    assert all(each == launches[0] for each in launches)
    assert sum("lookup" not in kernel for kernel, _ in launches[0]) == (4 if dtype == "float32" else 2)


# --- on a GPU ---


@pytest.mark.gpu
@EACH_DTYPE
def test_a_forward_pass_on_the_gpu_agrees_with_float64(dtype: str) -> None:
    """With early starts (programmatic dependent launch) and without: the same bits."""
    import cupy

    from slora_ref.ops.cuda_kernels import CudaKernels
    from slora_ref.ops.cuda_ops import CudaOps

    plain, early = (
        cupy.asnumpy(
            logits_of(
                CONFIG, CudaOps(DTYPES[dtype], kernels=CudaKernels(early_start=each)), DTYPES[dtype], cupy.asarray
            )
        )
        for each in (False, True)
    )
    assert_agrees_with_float64(plain, dtype)
    assert plain.tobytes() == early.tobytes()


@pytest.mark.gpu
def test_a_forward_pass_on_the_gpu_allocates_nothing_when_repeated() -> None:
    import cupy

    from slora_ref.ops.cuda_ops import CudaOps

    class Count(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "count"
        calls = 0

        def malloc_preprocess(self, **kwargs: Any) -> None:
            self.calls += 1

    weights = cast(random_weights(CONFIG, 5, np.float32), lambda array: cupy.asarray(array.astype(np.float16)))
    pool = build_pool(CONFIG, np.float32)
    batch = build_batch(pool)
    pool.storage = cupy.asarray(pool.storage.astype(np.float16))
    model = LlamaModel(CONFIG, weights, CudaOps(np.float16), pool, 80)
    first = cupy.asnumpy(model.forward(batch))
    with Count() as count:
        second = model.forward(batch)
    assert count.calls == 0
    assert cupy.asnumpy(second).tobytes() == first.tobytes()


@pytest.mark.gpu
def test_an_array_in_the_wrong_place_is_refused_by_name() -> None:
    import cupy

    from slora_ref.ops import row_arguments
    from slora_ref.ops.cuda_kernels import CudaKernels
    from slora_ref.ops.ladder import make_launch

    kernels = CudaKernels()
    x = cupy.zeros((4, 64), cupy.float16)
    for wrong, message in (
        (np.zeros((4, 128), np.float16), "argument gate_up: is in pageable host memory"),
        (cupy.zeros(4 * 128 + 1, cupy.float16)[1:].reshape(4, 128), "argument gate_up: starts at .* not at a multiple"),
    ):
        with pytest.raises(KernelError, match=message):
            kernels.run(make_launch("silu_mul_1_naive", np.float16, row_arguments.silu_mul(x, wrong)))
