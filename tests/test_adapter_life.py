"""Adapters under load, at random: folders come, change, are cut and vanish; names come, are replaced and go; reads and
loads are late or fail; host memory holds two of them. Who is served, is served with the weights of its own version.

There is no model (tests/rig.py): the weights of a version are one number, so that a page of another version shows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from loaders import DelayedReader
from rig import MODEL, Rig
from serving import without_shape_checks
from strategies import Ask
from test_engine_machine import assert_came_everywhere
from tiny import adapter_tensors, write_adapter_folder

from slora_ref.errors import AdapterError, RequestError, UnknownAdapter
from slora_ref.request import BASE_MODEL, FinishReason, Sequence
from slora_ref.store.arena import ALIGNMENT

WEIGHTS = "adapter_model.safetensors"
PLACES = "pqr"
NAMES = "012"
TOO_LARGE = 2 * ALIGNMENT // (2 * MODEL.head_dim * 4) + 1
"""A rank whose packed weights alone exceed host memory."""


@pytest.fixture(autouse=True, scope="module")
def _no_shape_checks() -> Iterator[None]:
    with without_shape_checks():
        yield


@dataclass
class Known:
    """What the test knows of a version.

    Args:
        place: its folder.
        state: of the folder when it was registered; folders count their changes.
        number: all its weights.
        may_fail: a read or a load of it was planned to fail at some time.
    """

    place: str
    state: int
    number: int
    may_fail: bool = False


class AdapterLife(RuleBasedStateMachine):
    """What may happen to adapters while they are served."""

    covered: ClassVar[Counter[str]] = Counter()

    @initialize(
        pages=st.integers(16, 60),
        slots=st.integers(1, 3),
        eviction=st.sampled_from(["lru", "eager", "cost"]),
        prefetch=st.integers(0, 3),
        running=st.integers(1, 4),
        late=st.integers(0, 3),
    )
    def start(self, pages: int, slots: int, eviction: str, prefetch: int, running: int, late: int) -> None:
        self.late = late  # polls that a load takes unless it is planned otherwise
        self.temporary = tempfile.TemporaryDirectory(prefix="slora_ref_life_")
        self.root = Path(self.temporary.name)
        self.rig = Rig(
            pages,
            eviction=eviction,
            max_adapters=slots,
            weights=True,
            host_bytes=2 * ALIGNMENT,
            prefetch=prefetch,
            max_running=running,
            max_batched_tokens=running + 6,
        )
        self.reader = DelayedReader(self.rig.store)
        self.numbers = iter(range(1, 10**6))
        self.states = dict.fromkeys(PLACES, 0)  # changes of each folder
        self.written: dict[str, int] = {}  # folder that is whole -> the number in it
        self.known: dict[int, Known] = {}  # by adapter id, also of versions that are gone
        self.judged: set[int] = set()
        for place in PLACES:
            self.write(place, 1)
            self.register(NAMES[PLACES.index(place)], place)

    # --- folders ---

    @rule(place=st.sampled_from(PLACES), how=st.sampled_from([None, None, "short", "gone", "garbage", "no config"]))
    def change_folder(self, place: str, how: str | None) -> None:
        """Damage, but more often other weights."""
        if how is None:
            self.write(place, 1 + self.states[place] % 3)
        else:
            self.damage(place, how)

    def write(self, place: str, rank: int) -> None:
        """Other weights in the same files; no size or time gives it away if the rank is the same."""
        folder, number = self.root / place, next(self.numbers)
        tensors = adapter_tensors(MODEL, {(0, "q_proj"): rank}, seed=0)
        tensors = {name: np.full_like(tensor, number) for name, tensor in tensors.items()}
        shutil.rmtree(folder, ignore_errors=True)
        write_adapter_folder(folder, MODEL, rank, ["q_proj"], tensors=tensors)
        os.utime(folder / WEIGHTS, ns=(0, 0))
        self.states[place] += 1
        self.written[place] = number

    def damage(self, place: str, how: str) -> None:
        folder = self.root / place
        if not (folder / WEIGHTS).exists():
            return
        if how == "short":
            os.truncate(folder / WEIGHTS, max(0, (folder / WEIGHTS).stat().st_size - 5))
        elif how == "gone":
            shutil.rmtree(folder)
        elif how == "garbage":
            (folder / WEIGHTS).write_bytes(b"\xff" * 200)
        else:
            (folder / "adapter_config.json").unlink(missing_ok=True)
        self.states[place] += 1
        self.written.pop(place, None)

    @rule(place=st.sampled_from(PLACES))
    def touch(self, place: str) -> None:
        """A change of rights and a backup of hard links: the adapter is as good as before."""
        if (self.root / place / WEIGHTS).exists():
            (self.root / place / WEIGHTS).chmod(0o640)
            os.link(self.root / place / WEIGHTS, self.root / f"link{next(self.numbers)}")

    # --- names ---

    @rule(name=st.sampled_from(NAMES), place=st.sampled_from(PLACES))
    def register(self, name: str, place: str) -> None:
        store = self.rig.store
        before = dict(store._by_name)
        if name in store.names or place not in self.written:
            with pytest.raises(AdapterError):
                store.add(name, self.root / place)
            assert store._by_name == before
        else:
            self.remember(store.add(name, self.root / place).adapter_id, place)
        self.rig.check()

    @rule(name=st.sampled_from(NAMES), place=st.sampled_from(PLACES))
    def replace(self, name: str, place: str) -> None:
        """In place, whatever the old version is doing; where the folder is refused, the old version stays."""
        store = self.rig.store
        if name not in store.names:
            with pytest.raises(UnknownAdapter):
                store.replace(name, self.root / place)
            return
        old = store.lookup(name)
        if place not in self.written:
            with pytest.raises(AdapterError):
                store.replace(name, self.root / place)
            assert store.lookup(name) is old and not old.removed
            return
        self.covered["replaced in use"] += old.users > 0
        assert store.replace(name, self.root / place) is old
        self.remember(store.lookup(name).adapter_id, place)
        self.rig._forget_if_unused(old.adapter_id)
        self.rig.check()

    def remember(self, adapter_id: int, place: str) -> None:
        assert adapter_id not in self.known, "a number is used again"
        self.known[adapter_id] = Known(place, self.states[place], self.written[place])
        self.rig.loader.polls[adapter_id] = self.late

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if name not in self.rig.store.names:
            return
        version = self.rig.store.remove(name)
        self.covered["removed in use"] += version.users > 0
        self.covered["removed while loading"] += version.adapter_id in self.rig.prefetcher._loading
        self.rig._forget_if_unused(version.adapter_id)
        self.rig.check()

    @precondition(lambda self: self.rig.prefetcher.loading)
    @rule()
    def remove_what_is_loading(self) -> None:
        """With all that wait for it, so that nobody is left for whom it is loaded."""
        loading = set(self.rig.prefetcher._loading)
        for sequence in [s for s in self.rig.alive if s.adapter_id in loading]:
            self.rig.abort(sequence)
        for name in [n for n in NAMES if n in self.rig.store.names]:
            if self.rig.store.lookup(name).adapter_id in loading:
                self.remove(name)

    @rule()
    def register_what_host_memory_cannot_hold(self) -> None:
        folder = self.root / "large"
        if not folder.exists():
            write_adapter_folder(folder, MODEL, TOO_LARGE, ["q_proj"])
        with pytest.raises(AdapterError, match="of host memory; host_bytes is"):
            self.rig.store.add("large", folder)

    # --- requests ---

    @rule(
        names=st.lists(st.sampled_from([None, *NAMES, *NAMES]), min_size=1, max_size=8),
        prompt=st.integers(1, 6),
        tokens=st.integers(1, 8),
        steps=st.integers(0, 6),
    )
    def ask_for(self, names: list[str | None], prompt: int, tokens: int, steps: int) -> None:
        for name in names:
            self.ask(name, prompt, tokens)
        self.step(steps)

    def ask(self, name: str | None, prompt: int, tokens: int) -> None:
        ask = Ask(None if name is None else int(name), prompt, tokens, tokens)
        if name is not None and name not in self.rig.store.names:
            with pytest.raises(UnknownAdapter):
                self.rig.ask(ask)
            return
        pages = 2 * (prompt + tokens - 1) + (0 if name is None else self.rig.store.lookup(name).pages)
        if pages > self.rig.pool.num_pages:
            with pytest.raises(RequestError):
                self.rig.ask(ask)
        else:
            self.rig.ask(ask)

    @precondition(lambda self: self.rig.alive)
    @rule(place=st.integers(0, 20))
    def abort(self, place: int) -> None:
        self.rig.abort(self.rig.alive[place % len(self.rig.alive)])

    # --- faults on the way ---

    @rule(polls=st.integers(0, 5))
    def slow_disk(self, polls: int) -> None:
        self.reader.polls = polls

    @rule(name=st.sampled_from(NAMES), late=st.integers(0, 4), fails=st.sampled_from([False, False, True]))
    def plan_loads(self, name: str, late: int, fails: bool) -> None:
        self.plan(name, self.rig.loader.failing, fails)
        if name in self.rig.store.names:
            self.rig.loader.polls[self.rig.store.lookup(name).adapter_id] = late

    @rule(name=st.sampled_from(NAMES), fails=st.sampled_from([False, False, True]))
    def plan_reads(self, name: str, fails: bool) -> None:
        self.plan(name, self.reader.failing, fails)

    def plan(self, name: str, failing: set[int], fails: bool) -> None:
        if name in self.rig.store.names:
            adapter_id = self.rig.store.lookup(name).adapter_id
            (failing.add if fails else failing.discard)(adapter_id)
            self.known[adapter_id].may_fail |= fails

    # --- steps ---

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            self.check()

    @precondition(lambda self: self.rig.prefetcher.resident)
    @rule()
    def evict(self) -> None:
        """Whatever is idle, all at once."""
        self.rig.prefetcher.make_room(self.rig.pool.free_pages + self.rig.prefetcher._idle.pages)
        self.check()

    def check(self) -> None:
        """Each resident adapter has the weights of its version; each request ended as its adapter's history allows."""
        pool, prefetcher = self.rig.pool, self.rig.prefetcher
        for adapter_id in {*prefetcher._pins, *prefetcher._idle}:
            slot = pool.adapter_slot(adapter_id)
            pages = pool.adapters.pages[slot, : prefetcher.pages_of(adapter_id)]
            assert (pool.storage[:, pages] == self.known[adapter_id].number).all(), "weights of another version"
        for sequence in self.rig.sequences:
            if sequence.finished and sequence.number not in self.judged:
                self.judged.add(sequence.number)
                self.judge(sequence)
        assert len(self.rig.store.host) <= 2
        assert len(self.rig.store.host._holds) == len(set(map(str, prefetcher._loading.values())))

    def judge(self, sequence: Sequence) -> None:
        self.covered[str(sequence.finish_reason)] += 1
        self.covered["waited"] += sequence.adapter_wait_steps > 0
        if sequence.finish_reason is FinishReason.ERROR:
            known = self.known[sequence.adapter_id]
            changed = known.state != self.states[known.place]
            self.covered["its folder changed"] += changed
            assert changed or known.may_fail, sequence.error
            assert sequence.adapter_id != BASE_MODEL and sequence.error

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.reader.polls = 0
            for _ in range(40 + 20 * len(self.rig.alive)):
                if self.rig.alive:
                    self.step(1)
            assert not self.rig.alive, "a request without an end"
            self.covered["failures"] += self.rig.prefetcher.counts.failures
            self.covered["evictions"] += self.rig.prefetcher.counts.evictions
            self.covered["loads ahead"] += self.rig.prefetcher.counts.loads_ahead
            self.covered["host evictions"] += self.rig.store.host.evictions
            self.rig.check_all_is_free()
            assert not self.rig.store.host._holds
            self.temporary.cleanup()


def test_any_life_of_adapters_serves_each_request_with_its_own_version() -> None:
    AdapterLife.covered.clear()
    run_state_machine_as_test(AdapterLife, settings=settings(stateful_step_count=40))
    assert_came_everywhere(AdapterLife.covered)
    assert len(AdapterLife.covered) == 12
