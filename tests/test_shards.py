"""Engines whose model is split over shards: the same answers, and what happens on one shard happens on all or on none.

Shards are threads, or processes that mpirun starts. A dead one ends the group with an error and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import ADAPTERS, CONFIG, adapter_folder, assert_all_free, assert_right, new_engine, run_to_end
from tiny import tiny_config, write_adapter_folder, write_model_folder

from slora_ref import Engine, EngineConfig, SamplingParams
from slora_ref.demo import DemoOptions, run_demo
from slora_ref.engine.devices import KernelDevice
from slora_ref.engine.follower import Follower, follow
from slora_ref.engine.leader import agree, stop
from slora_ref.engine.orders import Order, batch_of, run_order, told_sampling
from slora_ref.errors import AdapterError, ConfigError, ShardLost
from slora_ref.ops.host_kernels import HostKernels
from slora_ref.ops.host_ops import HostOps
from slora_ref.ops.tape import Replayed, Tape
from slora_ref.request import FinishReason
from slora_ref.tp import Shard
from slora_ref.tp.processes import ProcessCommunicator, start_processes
from slora_ref.tp.threads import thread_communicators

ROOT = Path(__file__).parents[1]
PARAMS = SamplingParams(max_tokens=6, keep_logits=True, ignore_eos=True)
DEADLINE = 10.0  # seconds in which a group must have ended


def shard_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shard-")]


def assert_no_threads() -> None:
    """The followers have left, also those of engines that earlier tests have dropped."""
    gc.collect()
    until = time.monotonic() + DEADLINE
    while shard_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not shard_threads()


# --- threads ---


@pytest.mark.parametrize("shards", [2, 4])
def test_a_group_serves_as_one_engine_does(shards: int) -> None:
    """Two KV heads: on four shards each is held twice. The pool is so small that adapters come and go."""
    engine = new_engine({name: name for name in ADAPTERS}, shards=shards, pool_pages=1300, max_adapters=3)
    asks = [(name, [*range(3 + i, 20)]) for i, name in enumerate([*ADAPTERS, None, *ADAPTERS])]
    ids = {engine.add_request(prompt, PARAMS, name): name for name, prompt in asks}
    done = run_to_end(engine)
    for number, name in ids.items():
        assert_right(done[number], name, PARAMS)
    assert engine.prefetcher.counts.evictions > 0
    assert_all_free(engine)
    del engine
    assert_no_threads()


class OneAtATime(HostKernels):
    """The host build of a kernel is one for the process, and so is what its blocks share."""

    lock = threading.Lock()

    def run(self, *launch: object) -> None:
        with self.lock:
            super().run(*launch)


def kernel_engine(monkeypatch: pytest.MonkeyPatch, names: Iterable[str], **options: object) -> Engine:
    """An engine whose shards compute by the kernels, through g++."""

    def on_kernels(config: EngineConfig, _: Shard) -> KernelDevice:
        return KernelDevice(config, HostOps(np.float32, kernels=OneAtATime(), shards=config.shards))

    for module in ("build", "follower"):
        monkeypatch.setattr(f"slora_ref.engine.{module}.open_device", on_kernels)
    return new_engine({name: name for name in names}, **options)


def test_only_what_some_adapter_changes_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of q and v: a gather in each layer, and nothing for o, gate, up and down."""
    engine = kernel_engine(monkeypatch, ["qv"], shards=2)
    number = engine.add_request([5, 6, 7], PARAMS, "qv")
    assert_right(run_to_end(engine)[number], "qv", PARAMS)
    parts = [part for tape in engine.executor._executor.last for part, _ in tape.work]
    assert parts.count("lora_communication") == CONFIG.num_layers
    assert parts.count("communication") == 3 + 2 * CONFIG.num_layers  # embedding, o, down; logits, and their order


def test_a_group_on_kernels_serves_as_one_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in NumPy; launches and collectives of a bucket are kept, and repeated."""
    shards = 4
    engine = kernel_engine(monkeypatch, ADAPTERS, shards=shards, pool_pages=1300, max_adapters=3)
    asks = [("x", [5, 6, 7]), ("z", [*range(20)]), (None, [9]), ("layers", [1, 2]), ("o", [3]), ("qv", [4] * 9)]
    ids = {engine.add_request(prompt, PARAMS, name): name for name, prompt in asks}
    done = run_to_end(engine)
    for number, name in ids.items():
        assert_right(done[number], name, PARAMS)
    assert engine.executor._executor.kept.graphs, "launches were kept"
    replays: list[Tape] = []
    monkeypatch.setattr(Replayed, "milliseconds", lambda graph: replays.append(graph.tape) or 1.5)
    assert engine.executor.milliseconds(("communication", "lora_communication")) == 1.5
    again = engine.add_request([5, 6, 7], PARAMS, "x")
    assert_right(run_to_end(engine)[again], "x", PARAMS)
    assert len(replays) == shards and {len(tape.work) for tape in replays} == {len(replays[0].work)}
    assert {part for part, _ in replays[0].work} == {"communication", "lora_communication"}


def test_who_interrupts_a_measurement_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others repeat messages that shard 0 does not, and the next step's would be taken for them."""
    engine = kernel_engine(monkeypatch, ["x"], shards=2)
    engine.generate([[5, 6, 7]], PARAMS, "x")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slora_ref.engine.leader.milliseconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.executor.milliseconds()
    with pytest.raises(ShardLost, match="shard 0 failed"):
        engine.generate([[5, 6, 7]], PARAMS, "x")
    assert_no_threads()


def test_random_weights_are_the_same_on_any_number_of_shards() -> None:
    config = tiny_config(tie_word_embeddings=True)
    prompts = [[5, 6, 7, 8], [9, 10]]
    one, two = (
        Engine.from_config(config, EngineConfig(pool_pages=400, shards=shards), seed=3).generate(prompts, PARAMS)
        for shards in (1, 2)
    )
    for ours, theirs in zip(one, two, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert np.abs(np.array(ours.logits) - np.array(theirs.logits)).max() < 1e-4


def test_requests_that_are_aborted_leave_the_others_alone() -> None:
    engine = new_engine({"x": "x", "z": "z"}, shards=2)
    kept, dropped = (engine.add_request([5, 6, 7], PARAMS, name) for name in ("x", "z"))
    engine.step()
    engine.step()
    assert engine.abort(dropped)
    late = engine.add_request([8, 9], PARAMS, "z")
    done = run_to_end(engine)
    assert done[dropped].finish_reason is FinishReason.ABORT
    assert_right(done[kept], "x", PARAMS)
    assert_right(done[late], "z", PARAMS)
    assert_all_free(engine)


def test_tables_of_followers_are_the_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    followers: list[Follower] = []
    before = Follower.make_pool

    def remember(self: Follower, order: Order) -> None:
        before(self, order)
        followers.append(self)

    monkeypatch.setattr(Follower, "make_pool", remember)
    engine = new_engine({"x": "x", "qv": "qv"}, shards=4)
    for name in ("x", "qv"):
        engine.add_request([5, 6, 7, 8], PARAMS, name)
    for _ in range(3):
        engine.step()
    assert len(followers) == 3
    mine = engine.pool
    for follower in followers:
        for name, table in vars(mine.adapters).items():
            assert (getattr(follower.pool.adapters, name) == table).all(), name
        entered = mine.sequence_pages >= 0
        assert entered.any() and (follower.pool.sequence_pages[entered] == mine.sequence_pages[entered]).all()
        assert follower.pool.storage.shape == mine.storage.shape


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_load_that_fails_on_one_shard_has_failed_on_all(monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    """As if the file could not be read there: its requests end with the reason, and the others go on."""
    engine = new_engine({"x": "x", "bad": "z"}, shards=4)
    if where == 0:
        monkeypatch.setattr(engine.store, "image", _failing(engine.store.image, adapter=1))
    before = Follower.load

    def load(self: Follower, order: Order) -> None:
        if self.communicator.shard.index == where and order.values["folder"] == str(adapter_folder("z")):
            raise AdapterError("the disk is gone")
        before(self, order)

    monkeypatch.setattr(Follower, "load", load)
    good, bad = (engine.add_request([5, 6, 7], PARAMS, name) for name in ("x", "bad"))
    done = run_to_end(engine)
    assert done[bad].finish_reason is FinishReason.ERROR and "the disk is gone" in (done[bad].error or "")
    assert where == 0 or f"shard {where}" in (done[bad].error or "")
    assert_right(done[good], "x", PARAMS)
    assert engine.prefetcher.counts.failures == 1
    monkeypatch.undo()
    again = engine.add_request([5, 6, 7], PARAMS, "bad")
    assert_right(run_to_end(engine)[again], "z", PARAMS)
    assert_all_free(engine)


def _failing(image: object, adapter: int) -> object:
    def fail(adapter_id: int) -> np.ndarray:
        if adapter_id == adapter:
            raise AdapterError("the disk is gone")
        return image(adapter_id)

    return fail


def test_a_folder_that_has_changed_is_refused_by_every_shard(tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path / "a", CONFIG, 4, seed=1)
    engine = new_engine(shards=2)
    engine.add_adapter("a", folder)
    write_adapter_folder(folder, CONFIG, 4, seed=2)
    number = engine.add_request([5, 6], PARAMS, "a")
    assert "has changed" in (run_to_end(engine)[number].error or "")


def test_a_shard_that_fails_in_a_step_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    before, runs = Follower.run, []

    def run(self: Follower, order: Order) -> None:
        runs.append(order)
        if len(runs) == 3:
            raise MemoryError("no room")
        before(self, order)

    monkeypatch.setattr(Follower, "run", run)
    engine = new_engine({"x": "x"}, shards=2)
    engine.add_request([5, 6, 7], PARAMS, "x")
    started = time.monotonic()
    with pytest.raises(ShardLost, match=r"shard 1 failed: MemoryError\('no room'\)"):
        for _ in range(20):
            engine.step()
    engine.add_request([5], PARAMS)
    with pytest.raises(ShardLost):
        engine.step()
    assert time.monotonic() - started < DEADLINE
    assert_no_threads()


def test_an_interrupt_of_the_leader_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine({"x": "x"}, shards=4)
    engine.add_request([5, 6, 7], PARAMS, "x")
    engine.step()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.executor._executor, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            engine.step()
    assert_no_threads()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shards": 3}, "3 shards: query heads is 4, which must be a multiple of the shards"),
        ({"shards": 2, "max_length": 600}, "max_length 600"),
        ({"shards": 0}, "shards is 0"),
        ({"shards": 2, "communicator": "nccl"}, "communicator nccl has no shards on device cpu; take threads or mpi"),
        ({"shards": 2, "communicator": "pigeons"}, "auto or threads or mpi or nccl"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_thread(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        new_engine(**options)
    assert_no_threads()


def test_each_device_has_a_usual_communicator() -> None:
    assert EngineConfig(shards=2).communicator == "threads"
    assert EngineConfig(shards=2, device="cuda").communicator == "nccl"
    with pytest.raises(ConfigError, match="communicator threads has no shards on device cuda; take mpi or nccl"):
        EngineConfig(shards=2, device="cuda", communicator="threads")


def test_a_shard_that_cannot_open_the_checkpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(Follower, "make_pool", unreadable)
    with pytest.raises(ConfigError, match="shard 1: stale file handle"):
        new_engine(shards=2)
    assert_no_threads()


def test_a_shard_that_hears_of_an_unknown_order_ends_the_group() -> None:
    leader, other = thread_communicators(2)
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(follow, other)
        leader.broadcast(Order("run").encode())
        assert isinstance(following.exception(DEADLINE), AssertionError)
    with pytest.raises(ShardLost, match="shard 1 failed"):
        agree(leader, None)
    stop(leader)  # nobody listens, and that is no error


# --- processes that shard 0 starts ---


def process_engine(
    monkeypatch: pytest.MonkeyPatch, shards: int, **options: object
) -> tuple[Engine, ProcessCommunicator]:
    """An engine whose shards are the processes that NCCL's would be, with arrays in host memory."""
    started: list[ProcessCommunicator] = []

    def start(config: EngineConfig) -> ProcessCommunicator:
        started.append(start_processes(config.shards, "slora_ref.engine.worker"))
        return started[0]

    monkeypatch.setattr("slora_ref.engine.group._communicator", start)
    return new_engine({"x": "x", "z": "z"}, shards=shards, **options), started[0]


def assert_no_processes(communicator: ProcessCommunicator) -> None:
    for process in communicator._processes:
        process.wait(DEADLINE)


def test_started_processes_serve_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, communicator = process_engine(monkeypatch, 4)
    numbers = {engine.add_request([5, 6, 7], PARAMS, name): name for name in ("x", None, "z")}
    done = run_to_end(engine)
    for number, name in numbers.items():
        assert_right(done[number], name, PARAMS)
    del engine
    gc.collect()
    assert [process.returncode for process in communicator._processes] == [0, 0, 0]


def test_a_started_process_that_dies_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, communicator = process_engine(monkeypatch, 4)
    woken = threading.Event()
    communicator.on_loss.append(woken.set)  # as NCCL is, so that shard 0 does not wait for a GPU for ever
    engine.add_request([5, 6, 7], PARAMS, "x")
    engine.step()
    engine.step()
    communicator._processes[1].kill()
    started = time.monotonic()
    with pytest.raises(ShardLost, match=r"shard 2 has ended with exit code -9|closed its link"):
        while True:
            engine.step()
            engine.add_request([5], PARAMS)
    assert time.monotonic() - started < DEADLINE and woken.wait(DEADLINE)
    assert_no_processes(communicator)


def test_a_group_ends_whatever_fails_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is to be woken may fail; links are closed and processes ended all the same, and the failure is heard of."""
    _, communicator = process_engine(monkeypatch, 2)
    woken = threading.Event()
    communicator.on_loss += [lambda: 1 / 0, woken.set]
    with pytest.raises(ZeroDivisionError):
        communicator.fail("enough")
    assert woken.is_set()
    with pytest.raises(ShardLost, match="enough"):
        communicator.check()
    assert_no_processes(communicator)


def test_started_processes_end_with_their_parent() -> None:
    """Also when that is killed, so that it can tell them nothing."""
    code = "import sys, time, slora_ref.tp.processes as p; g = p.start_processes(3, 'slora_ref.engine.worker')\n"
    code += "print(*[each.pid for each in g._processes], flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    until = time.monotonic() + DEADLINE
    while any(map(running, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(running, pids))


def running(pid: int) -> bool:
    """Whether a process, perhaps somebody else's child, has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- orders ---


@given(
    arrays=st.dictionaries(
        st.text("abc", min_size=1),
        st.tuples(st.sampled_from(["<i8", "<i4", "<f4"]), st.lists(st.integers(0, 3), max_size=3)),
    ),
    text=st.text(max_size=20),
)
def test_an_order_arrives_as_it_was_sent(arrays: dict[str, tuple[str, list[int]]], text: str) -> None:
    sent = {name: np.arange(np.prod(shape)).reshape(shape).astype(dtype) for name, (dtype, shape) in arrays.items()}
    got = Order.decode(Order("load", {"folder": text}, sent).encode())
    assert got.kind == "load" and got.values == {"folder": text} and got.arrays.keys() == sent.keys()
    for name, array in sent.items():
        assert got.arrays[name].dtype == array.dtype and got.arrays[name].shape == array.shape
        assert (got.arrays[name] == array).all()


def test_a_batch_arrives_as_it_was_sent() -> None:
    engine = new_engine({"x": "x"})
    seen = []
    start = engine.executor.start
    engine.executor.start = lambda *step: seen.append(step) or start(*step)
    drawn = SamplingParams(max_tokens=6, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=(1 << 64) - 1)
    for name, params in (("x", drawn), (None, PARAMS)):
        engine.add_request([5, 6, 7], params, name)
    run_to_end(engine)
    for batch, sampling in seen:
        order = Order.decode(run_order(batch, sampling).encode())
        assert str(batch_of(order)) == str(batch)
        assert str(told_sampling(order)) == str(sampling)
    assert len(seen) > 5


# --- processes ---

MPIRUN = next(filter(None, (shutil.which("mpirun", path=Path(sys.executable).parent), shutil.which("mpirun"))), None)
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed; pip install -e .[mpi]")


def mpirun(shards: int, *command: str) -> subprocess.Popen[str]:
    """Starts `python -m slora_ref` so many times, one thread each: there may be fewer cores than processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    whole = [str(MPIRUN), "-n", str(shards), sys.executable, "-m", "slora_ref", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(whole, cwd=ROOT, env=environment, text=True, **pipes)


def assert_none_left(seed: str) -> None:
    """The processes have ended, at the latest some time after mpirun."""
    until = time.monotonic() + DEADLINE
    while alive(seed) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(seed)


def alive(seed: str) -> list[int]:
    """The processes that run a demo with this seed, however they were started; not mpirun itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"-m", b"slora_ref"] and seed.encode() in words:
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_the_demo_says_what_shards_have_sent(shards: int) -> None:
    report = run_demo(DemoOptions(adapters=60, requests=12, shards=shards), lambda _: None)
    assert not report.failed and report.shards == shards
    assert ("messages of a shard" in report.table()) == (shards > 1)
    assert 0 < report.sent.lora_nbytes < report.sent.nbytes if shards > 1 else report.sent.nbytes == 0
    assert "counted as they were sent" in report.table() or shards == 1


@needs_mpi
@pytest.mark.parametrize("shards", [2, 4])
def test_mpi_serves_the_demo(shards: int) -> None:
    started = mpirun(shards, "demo", "--communicator", "mpi", "--adapters", "300", "--requests", "40", "--json")
    out, err = started.communicate(timeout=100)
    assert started.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["wrong"] == 0 and report["correct"] == 40 and report["shards"] == shards
    assert len(out.splitlines()) == 1, "only shard 0 speaks"


@needs_mpi
@pytest.mark.parametrize("how", ["shard 0 killed", "shard 1 killed", "Ctrl-C"])
def test_a_process_that_dies_ends_all_of_them(how: str) -> None:
    seed = str(time.time_ns())
    started = mpirun(2, "demo", "--communicator", "mpi", "--adapters", "50", "--rate", "30", "--seed", seed)
    assert "registered" in started.stdout.readline()
    time.sleep(0.5)
    both = sorted(alive(seed))
    assert len(both) == 2
    before = time.monotonic()
    if how == "Ctrl-C":
        started.send_signal(signal.SIGINT)
    else:
        os.kill(both[0 if "0" in how else 1], signal.SIGKILL)
    started.communicate(timeout=DEADLINE)
    assert time.monotonic() - before < DEADLINE
    assert started.returncode != 0
    assert_none_left(seed)


@needs_mpi
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shards", "4"], "4 shards need as many processes; there are 2: start them with mpirun -n 4"),
        (["--pool-pages", "10"], "the pool has 10 pages"),
    ],
)
def test_a_command_that_is_refused_ends_all_of_them(options: list[str], words: str) -> None:
    seed = str(time.time_ns())
    started = mpirun(2, "demo", "--communicator", "mpi", "--seed", seed, *options)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 2
    assert err.count("error") == 1 and words in err
    assert_none_left(seed)


def test_a_bias_of_o_and_down_is_added_once(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    folder = write_model_folder(tmp_path, config)
    prompts = [[5, 6, 7, 8], [9, 10]]
    one, two = (
        Engine.from_pretrained(folder, EngineConfig(pool_pages=400, shards=shards)).generate(prompts, PARAMS)
        for shards in (1, 2)
    )
    for ours, theirs in zip(one, two, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert np.abs(np.array(ours.logits) - np.array(theirs.logits)).max() < 1e-4
