"""The tiers of the store: extents of the arena, host memory and its holds, the thread that reads folders."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny import tiny_config, write_adapter_folder

from slora_ref import Engine, EngineConfig, FinishReason, SamplingParams
from slora_ref.errors import ConfigError, LoadFailed
from slora_ref.pager import PageLayout
from slora_ref.store import AdapterStore, Arena
from slora_ref.store.arena import ALIGNMENT
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER

T0 = tiny_config()


def fill(folder: Path, count: int) -> list[Path]:
    """Adapter folders of equal size and different weights."""
    return [write_adapter_folder(folder / str(i), T0, 2, seed=i) for i in range(count)]


def store_of(room_for: int, folders: list[Path], background: bool = True, share: bool = True) -> AdapterStore:
    """A store whose host memory holds so many of these folders, registered as 0, 1, 2, ..."""
    probe = AdapterStore(T0, PageLayout(T0))
    nbytes = probe.add("probe", folders[0]).nbytes
    assert nbytes % ALIGNMENT == 0
    store = AdapterStore(T0, PageLayout(T0), np.float32, room_for * nbytes, background=background, share=share)
    for i, folder in enumerate(folders):
        store.add(str(i), folder)
    return store


def read_all(store: AdapterStore) -> None:
    """Waits until the thread has nothing to read."""
    while store._reader._busy:
        store.wait()


# --- the arena ---


class ArenaMachine(RuleBasedStateMachine):
    """Extents come and go; no two overlap, each is written whole and found as it was left."""

    @initialize(blocks=st.integers(1, 12))
    def start(self, blocks: int) -> None:
        self.arena = Arena(blocks * ALIGNMENT)
        self.extents: dict[int, tuple[int, int]] = {}  # first byte -> size and mark

    @rule(nbytes=st.integers(1, 5 * ALIGNMENT), mark=st.integers(0, 255))
    def take(self, nbytes: int, mark: int) -> None:
        gaps = [end - start for start, end in self.arena._gaps]
        start = self.arena.take(nbytes)
        assert (start is None) == (max(gaps, default=0) < nbytes)
        if start is not None:
            assert start % ALIGNMENT == 0
            assert self.arena.bytes_of(start, nbytes).size == nbytes
            self.arena.bytes_of(start, nbytes)[:] = mark
            self.extents[start] = nbytes, mark

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.extents)))
        del self.extents[start]
        self.arena.give_back(start)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.arena.check()
        for start, (nbytes, mark) in self.extents.items():
            assert (self.arena.bytes_of(start, nbytes) == mark).all()
        taken = sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes, _ in self.extents.values())
        assert sum(end - start for start, end in self.arena._gaps) == self.arena.nbytes - taken


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize(
    "damage",
    [
        lambda arena: arena._gaps.append((0, ALIGNMENT)),
        lambda arena: arena._gaps.clear(),
        lambda arena: arena._taken.clear(),
        lambda arena: arena._gaps.__setitem__(0, (ALIGNMENT, 2 * ALIGNMENT)) or arena._gaps.append((512, 1024)),
    ],
)
def test_the_arenas_check_finds_damage(damage: Callable[[Arena], object]) -> None:
    arena = Arena(4 * ALIGNMENT)
    arena.take(ALIGNMENT)
    arena.check()
    damage(arena)
    with pytest.raises(AssertionError):
        arena.check()


def test_the_arena_is_allocated_once_at_the_start_by_the_function_that_is_given(tmp_path: Path) -> None:
    """So a GPU can have it pinned; every copy lies in it."""
    given: list[np.ndarray] = []

    def allocate(nbytes: int) -> np.ndarray:
        given.append(np.empty(nbytes, np.uint8))
        return given[-1]

    store = AdapterStore(T0, PageLayout(T0), np.float32, 1 << 20, allocate=allocate)
    assert [memory.size for memory in given] == [1 << 20]
    for i, folder in enumerate(fill(tmp_path, 3)):
        image = store.image(store.add(str(i), folder).adapter_id)
        assert np.shares_memory(image, given[0])
    assert len(given) == 1


def test_more_memory_than_there_is_is_refused_with_the_number() -> None:
    def allocate(nbytes: int) -> np.ndarray:
        raise MemoryError

    with pytest.raises(ConfigError, match="host_bytes is 12,345"):
        AdapterStore(T0, PageLayout(T0), np.float32, 12345, allocate=allocate)


# --- holds ---


def test_what_is_held_stays_and_what_is_not_gives_way(tmp_path: Path) -> None:
    """Class of fault: a copy into the pool is under way, and another adapter is read into the memory it comes from."""
    store = store_of(2, fill(tmp_path, 4), background=False)
    holds = [store.hold(i) for i in (0, 1)]
    held = [store.image(i) for i in (0, 1)]
    before = [image.copy() for image in held]
    assert store.hold(2) is None, "both places are held"
    with pytest.raises(LoadFailed, match="no room in host memory beside the loads under way"):
        store.image(2)
    store.check()
    store.let_go(holds[0])
    assert store.hold(2) is not None
    store.image(2)
    assert np.array_equal(held[1], before[1]) and not np.array_equal(held[0], before[0])
    with pytest.raises(AssertionError, match="more often"):
        store.let_go(holds[0])


@pytest.mark.parametrize(("share", "copies"), [(True, 1), (False, 3)])
def test_names_of_one_folder_share_a_copy_or_have_their_own(tmp_path: Path, share: bool, copies: int) -> None:
    [folder] = fill(tmp_path, 1)
    store = store_of(3, [folder] * 3, background=False, share=share)
    images = [store.image(i) for i in range(3)]
    assert len(store.host) == copies == store.disk.reads
    assert np.array_equal(images[0], images[2])
    assert np.shares_memory(images[0], images[2]) == share


# --- the thread ---


def test_what_is_wanted_is_read_in_order_and_beside_the_caller(tmp_path: Path) -> None:
    store = store_of(4, fill(tmp_path, 4))
    assert store.hold(2) is None and store.host_bytes == 0
    store.want([2, 0])
    read_all(store)
    assert list(store.host._entries) == [store.version(i).source for i in (2, 0)]
    assert store.disk.reads == 2
    assert store.disk.bytes_read == sum(store.version(i).header.fingerprint.size for i in (2, 0))
    hold = store.hold(2)
    assert hold is not None and store.image(2).any()
    store.let_go(hold)
    store.check()


def slow(store: AdapterStore) -> tuple[threading.Semaphore, list[str]]:
    """A disk that reads a folder only when it is let; the names that were begun."""
    may_read, begun, read = threading.Semaphore(0), [], store.disk._read

    def wait_and_read(version: object, image: object) -> None:
        begun.append(version.name)  # type: ignore[attr-defined]
        assert may_read.acquire(timeout=30)
        read(version, image)  # type: ignore[arg-type]

    store.disk._read = wait_and_read  # type: ignore[method-assign,assignment]
    return may_read, begun


def test_what_is_no_longer_wanted_and_not_begun_is_not_read(tmp_path: Path) -> None:
    store = store_of(4, fill(tmp_path, 4))
    may_read, begun = slow(store)
    store.want([0, 1, 2])
    while not begun:
        time.sleep(1e-3)
    store.want([3])
    for _ in range(2):
        may_read.release()
    read_all(store)
    assert begun == ["0", "3"], "0 was under way; 1 and 2 were cancelled"


def test_the_caller_never_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """Class of fault: the file is first opened inside the engine's step."""
    store = store_of(4, fill(tmp_path, 3))
    store.want([0])
    read_all(store)
    may_read, begun = slow(store)
    started = time.perf_counter()
    store.want([1, 2])
    while not begun:
        time.sleep(1e-3)
    for _ in range(100):
        store.want([1, 2])
        assert store.hold(1) is None
        assert store.image(0).any(), "what is there can be had meanwhile"
        assert store.reading and store.failures() == []
        store.lookup("2")
    assert time.perf_counter() - started < 10
    for _ in range(2):
        may_read.release()
    read_all(store)
    assert store.hold(2) is not None


def test_a_folder_that_cannot_be_read_is_told_once_and_the_next_is_read(tmp_path: Path) -> None:
    folders = fill(tmp_path, 3)
    store = store_of(4, folders)
    shutil.rmtree(folders[0])
    store.want([0, 1])
    read_all(store)
    [(adapter_id, failure)] = store.failures()
    assert adapter_id == 0 and "'0' could not be loaded" in str(failure)
    assert store.failures() == [] and not store.reading
    assert store.hold(1) is not None
    store.want([0])
    read_all(store)
    assert [adapter_id for adapter_id, _ in store.failures()] == [0], "wanted again, tried again"
    store.check()


def test_reading_ahead_never_drops_what_is_wanted_sooner(tmp_path: Path) -> None:
    """Class of fault: a list longer than host memory turns it over and over."""
    store = store_of(2, fill(tmp_path, 4))
    for _ in range(3):
        store.want([0, 1, 2, 3])
        read_all(store)
    assert store.disk.reads == 2 and store.host.evictions == 0
    assert store.hold(0) is not None and store.hold(1) is not None and store.hold(2) is None


def test_a_list_that_has_no_room_now_is_read_when_there_is(tmp_path: Path) -> None:
    store = store_of(1, fill(tmp_path, 2))
    store.want([0])
    read_all(store)
    hold = store.hold(0)
    store.want([1])
    read_all(store)
    assert store.hold(1) is None and store.disk.reads == 1
    store.let_go(hold)
    store.want([1])
    read_all(store)
    assert store.hold(1) is not None


def test_the_thread_ends_with_its_store(tmp_path: Path) -> None:
    """Class of fault: each engine that was ever made leaves a thread, and with it an arena."""
    before = set(threading.enumerate())
    store = store_of(4, fill(tmp_path, 2))
    store.want([0, 1])
    read_all(store)
    [thread] = set(threading.enumerate()) - before
    host = weakref.ref(store.host)
    del store
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive() and host() is None


# --- the engine on it ---


def engine_of(**options: object) -> Engine:
    """The toy model with some of its adapters, read and loaded beside the steps."""
    engine = Engine.from_pretrained(MODEL_FOLDER, EngineConfig(pool_bytes=8 << 20, **options))  # type: ignore[arg-type]
    for name in ("upper-case", "mirror-word", "caesar-3", "drop-vowels"):
        engine.add_adapter(name, ADAPTERS_FOLDER / name)
    return engine


def test_answers_are_those_of_loading_within_the_steps() -> None:
    """Threads decide when an adapter is there, never what is said: 60 requests in a small host memory, both ways."""
    said = []
    for options in ({"loading": "inline"}, {"host_bytes": 1 << 18, "max_adapters": 2}, {"eviction": "cost"}):
        engine = engine_of(**options)
        names = [[None, *engine.adapters][i % 5] for i in range(60)]
        prompts = [f"{word}=" for word in ("garden", "stone", "river")] * 20
        done = engine.generate(prompts, SamplingParams(max_tokens=24), names)
        assert all(one.finish_reason is FinishReason.STOP for one in done)
        said.append([one.text for one in done])
        engine.check()
    assert said[0] == said[1] == said[2]
    assert len(set(said[0])) > 10


def test_no_file_is_read_on_the_thread_of_the_steps() -> None:
    engine, readers = engine_of(), set()
    disk_read = engine.store.disk._read

    def watched(version: object, image: object) -> None:
        readers.add(threading.current_thread().name)
        disk_read(version, image)  # type: ignore[arg-type]

    engine.store.disk._read = watched  # type: ignore[method-assign,assignment]
    engine.generate(["stone="] * 4, SamplingParams(max_tokens=4), engine.adapters)
    assert readers and all(name.startswith("adapter-reader") for name in readers)


def test_an_engine_with_nothing_to_run_waits_for_the_disk_without_turning() -> None:
    """One request, a disk that takes a while: a handful of steps, not a million."""
    engine, steps = engine_of(), 0
    disk_read = engine.store.disk._read
    engine.store.disk._read = lambda *args: (time.sleep(0.2), disk_read(*args))  # type: ignore[method-assign]
    number = engine.add_request("stone=", SamplingParams(max_tokens=4), "upper-case")
    done = None
    while engine.has_work:
        steps += 1
        done = next((news.completion for news in engine.step() if news.finished), done)
    assert done is not None and done.request_id == number and done.adapter_wait_steps >= 1
    assert steps < 40
    assert engine.prefetcher.counts.stalled_s > 0.15
    assert done.adapter_wait_s >= 0.15


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file would end the process here."""
    [folder] = fill(tmp_path, 1)
    store = store_of(1, [folder], background=False)
    version = store.version(0)
    size = version.header.fingerprint.size
    real = store.disk._headers.inspect

    def inspect_then_cut(path: Path) -> object:
        found = real(path)
        with (folder / "adapter_model.safetensors").open("r+b") as file:
            file.truncate(size // 2)
        return found

    monkeypatch.setattr(store.disk._headers, "inspect", inspect_then_cut)
    with pytest.raises(LoadFailed, match="changes while it is read"):
        store.image(0)
    assert len(store.host) == 0
