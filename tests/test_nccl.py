"""NCCL: in a group of one, and shard 0 of two without the other, on one GPU; shards as processes, where there are two.

There kernels move whole chunks of small arrays, and so nearly all that T0 has, unless the test says no.
What needs no GPU is tested in test_tp.py, test_shards.py, test_branch.py and test_peers.py.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
import pytest
from conftest import missing_gpu, plan_as_shipped
from lone import LoneShard, be_alone, be_alone_on_a_gpu
from serving import (
    ADAPTERS,
    CONFIG,
    adapter_folder,
    assert_right,
    model_folder,
    new_engine,
    reference_logits,
    run_to_end,
)

from slora_ref import Engine, EngineConfig, SamplingParams
from slora_ref.checkpoint import float_dtype
from slora_ref.errors import ShardLost
from slora_ref.ops.collectives import StepCommunicator
from slora_ref.tp.communicator import Alone

PARAMS = SamplingParams(max_tokens=6, keep_logits=True, ignore_eos=True)
TOLERANCE = {"float32": 1e-4, "float16": 0.02}  # of the largest logit
DEADLINE = 10.0
LATE = [
    [[*range(3, 9 + i)] for i in range(12)],
    [SamplingParams(max_tokens=9, temperature=heat, seed=3, ignore_eos=True) for heat in (0.0, 1.2)] * 6,
    [*ADAPTERS] * 2,
]
"""Prompts, parameters and adapters of requests that read no logits, as Engine.generate takes them."""
ASKS = [("x", [5, 6, 7]), (None, [5, 6, 7]), ("z", [*range(20)]), ("layers", [1, 2]), ("o", [3]), ("qv", [4] * 9)]


def gpus() -> int:
    """How many there are."""
    if missing_gpu():
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


pytestmark = pytest.mark.gpu


def needs_two(test: Any) -> Any:
    """For a test on two GPUs, whose followers are started."""
    reason = f"two GPUs are needed, there are {gpus()}"
    return pytest.mark.skipif(gpus() < 2, reason=reason)(pytest.mark.usefixtures("as_followers_plan")(test))


# --- one GPU ---


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nccl_of_one_copies_and_adds_nothing(dtype: str) -> None:
    import cupy

    communicator = importlib.import_module("slora_ref.tp.nccl").NcclCommunicator(Alone())
    values = np.arange(1, 13).astype(float_dtype(dtype)).reshape(3, 4)
    x, gathered = cupy.asarray(values), cupy.zeros((1, 3, 4), float_dtype(dtype))
    sent = communicator.reduce(x), communicator.gather(x, gathered)
    assert cupy.asnumpy(gathered)[0].tobytes() == values.tobytes()
    assert sent == (0, 0), "there is nobody to send anything to"


def test_a_graph_takes_in_both_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather in a branch beside work on the main stream, and an all-reduce behind both; with other numbers, again."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True).use()
    ops = importlib.import_module("slora_ref.ops.cuda_ops").CudaOps(np.float32, shards=2, overlap=True)
    communicator = StepCommunicator(be_alone_on_a_gpu(monkeypatch)(LoneShard()), ops)
    x, y, out = (cupy.zeros(1 << 16, np.float32) for _ in range(3))

    def double() -> None:
        cupy.multiply(y, 2, out=y)

    def add() -> None:
        cupy.add(gathered.sum(axis=0, out=out), y, out=out)

    with ops.recording() as tape:
        with ops.branch():
            gathered = communicator.all_gather(x, "lora")
        ops.do("gemm", double)
        ops.join()
        ops.do("lora", add)
        communicator.all_reduce(out)
    graph = ops.graph(tape)
    for number in (1.0, 5.0):
        x[...], y[...] = number, 10 * number
        graph.launch()
        stream.synchronize()
        assert (cupy.asnumpy(out) == 21 * number).all()


def lone_answers(engine: Engine) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and logits of each of ASKS, twice: the second time by kept and captured steps."""
    found = []
    for _ in range(2):
        numbers = [engine.add_request(prompt, PARAMS, name) for name, prompt in ASKS]
        done = run_to_end(engine)
        assert not [done[n].error for n in numbers if done[n].error]
        found += [(list(done[n].token_ids), np.array(done[n].logits)) for n in numbers]
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("dtype", "eager"), [("float32", True), ("float32", False), ("float16", False)])
def test_a_shard_alone_computes_on_a_gpu_what_it_does_in_numpy(
    dtype: str, eager: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its branches and its part of NCCL's work, launched one by one and as captured graphs."""
    be_alone(monkeypatch)
    names = {name: name for name in ADAPTERS}
    want = lone_answers(new_engine(names, shards=2))
    be_alone_on_a_gpu(monkeypatch)
    options: dict[str, Any] = {"dtype": dtype, "enforce_eager": eager, "overlap_lora": overlap}
    engine = new_engine(names, on="cuda", shards=2, **options)
    got = lone_answers(engine)
    for (_, prompt), (tokens, logits), (want_tokens, want_logits) in zip(ASKS * 2, got, want, strict=True):
        same = [a == b for a, b in zip(tokens, want_tokens, strict=True)]
        rows = len(prompt) + (same.index(False) if False in same else len(same) - 1)
        error = np.abs(logits[:rows] - want_logits[:rows]).max() / np.abs(want_logits).max()
        assert error < TOLERANCE[dtype]
    executor = engine.executor._executor
    parts = [part for tape in executor.last for part, _ in tape.work]
    assert parts.count("branch") == (8 * CONFIG.num_layers if overlap else 0)
    assert parts.count("lora_communication") == 4 * CONFIG.num_layers
    assert bool(executor.kept.graphs) != eager
    assert np.abs(got[0][1][0] - got[1][1][0]).max() > 0.1, "an adapter would not be missed"
    assert engine.executor.milliseconds(("lora", "lora_communication")) > 0, "parts of a step are captured, too"


def test_a_shard_alone_answers_late_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is started before the tokens of the one before are read; greedy and drawn ones."""
    be_alone(monkeypatch)
    found = []
    for on in ("cpu", "cuda"):
        engine = new_engine({name: name for name in ADAPTERS}, on=on, shards=2)
        assert engine.scheduler.config.async_scheduling == (on == "cuda")
        found.append([(done.token_ids, done.error) for done in engine.generate(*LATE)])
        be_alone_on_a_gpu(monkeypatch)
    assert found[0] == found[1]


def test_messages_of_a_graph_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of steps that are launched one by one."""
    be_alone_on_a_gpu(monkeypatch)
    counts = []
    for eager in (True, False):
        engine = new_engine({name: name for name in ADAPTERS}, on="cuda", shards=2, enforce_eager=eager)
        lone_answers(engine)
        sent = engine.executor.counts
        assert sent.as_of_a_ring and sent.calls["all_reduce"] > 0 < sent.lora_nbytes
        moved = ("all_reduce", "all_gather")  # orders are another matter: an engine that is dropped says stop
        counts.append([sent.lora_nbytes, *(table[name] for table in (sent.calls, sent.nbytes) for name in moved)])
    assert counts[0] == counts[1]


# --- two GPUs ---


@pytest.fixture
def as_followers_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are planned as outside of tests: followers are processes, which conftest.py has not changed."""
    plan_as_shipped(monkeypatch)


def two_gpus(dtype: str = "float16", overlap: bool = False, eager: bool = False, peers: bool = True) -> Engine:
    """An engine of T0 over two GPUs; each adapter of the tests is registered."""
    sizes = {"pool_pages": 3000, "max_running": 8, "max_batched_tokens": 64}
    options = {"communicator": "nccl", "dtype": dtype, "overlap_lora": overlap, "enforce_eager": eager}
    config = EngineConfig(device="cuda", shards=2, peer_messages=peers, **options, **sizes)
    engine = Engine.from_pretrained(model_folder(), config)
    for name in ADAPTERS:
        engine.add_adapter(name, adapter_folder(name))
    return engine


@needs_two
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("dtype", "eager"), [("float16", False), ("float32", True), ("float32", False)])
def test_two_gpus_serve_as_the_dense_model_says(dtype: str, eager: bool, overlap: bool) -> None:
    engine = two_gpus(dtype, overlap, eager)
    for _ in range(2):  # the second time by captured graphs
        names = {engine.add_request(prompt, PARAMS, name): name for name, prompt in ASKS}
        for number, done in run_to_end(engine).items():
            assert done.error is None, done.error
            assert len(done.token_ids) == PARAMS.max_tokens
            want = reference_logits(names[number], (*done.prompt_ids, *done.token_ids))[: len(done.logits)]
            assert np.abs(np.array(done.logits) - want).max() < 0.02 * np.abs(want).max()


@needs_two
@pytest.mark.parametrize("peers", [True, False])
def test_two_gpus_answer_late_as_the_dense_model_says(peers: bool) -> None:
    """No token is sent: both GPUs sample the same ones. The second time by captured graphs."""
    engine = two_gpus("float32", peers=peers)
    for _ in range(2):
        for done, params, name in zip(engine.generate(*LATE), *LATE[1:], strict=True):
            assert_right(done, name, params)


@needs_two
def test_a_process_that_dies_ends_the_group_though_its_gpu_is_waited_for() -> None:
    engine, params = two_gpus(), SamplingParams(max_tokens=30, ignore_eos=True)
    engine.generate([[5, 6, 7]] * 4, params, "x")
    for _ in range(4):
        engine.add_request([5, 6, 7], params, "x")
    for _ in range(9):
        engine.step()
    assert engine._under_way
    engine.executor._leader.communicator._processes[0].kill()
    started = time.monotonic()
    with pytest.raises(ShardLost):
        while True:
            engine.step()
            engine.add_request([5], params)
    assert time.monotonic() - started < DEADLINE
