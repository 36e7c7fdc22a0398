"""Prefetcher: what is resident, pinned, loading or idle, and in which order idle adapters leave."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loaders import DelayedLoader
from rig import MODEL, adapter_folder
from tiny import write_adapter_folder

from slora_ref.errors import LoadFailed
from slora_ref.pager import PageLayout, PagePool
from slora_ref.prefetch import ImmediateLoader, Prefetcher, ThreadLoader
from slora_ref.prefetch.eviction import CostAware
from slora_ref.store import AdapterStore

WEIGHTS = "adapter_model.safetensors"


def prefetcher_of(
    ranks: list[int], pages: int, max_adapters: int = 8, eviction: str = "lru", polls: int = 0, ahead: int = 0
) -> Prefetcher:
    """A prefetcher whose adapters 0, 1, ... have these ranks, and so 2 r pages; a load takes some polls."""
    layout = PageLayout(MODEL)
    store = AdapterStore(MODEL, layout)
    pool = PagePool(layout, pages, 4, 100, max_adapters, poison=True)
    loader = DelayedLoader(pool, store)
    for i, rank in enumerate(ranks):
        store.add(str(i), adapter_folder(rank))
        loader.polls[i] = polls
    return Prefetcher(pool, store, loader, eviction, ahead)


def load(prefetcher: Prefetcher, *adapter_ids: int) -> None:
    """Fetches adapters that load at once, one after the other."""
    for adapter_id in adapter_ids:
        assert prefetcher.fetch(adapter_id)
        assert prefetcher.poll() == []
        assert prefetcher.is_resident(adapter_id)
        prefetcher.check()


def resident(prefetcher: Prefetcher) -> set[int]:
    """Ids of the resident adapters."""
    prefetcher.check()
    return {version for version in prefetcher.store._versions if prefetcher.is_resident(version)}


# --- a load ---


def test_an_adapter_is_resident_when_its_load_has_ended_and_not_before() -> None:
    prefetcher = prefetcher_of([3], pages=10, polls=2)
    assert prefetcher.pages_of(0) == 6
    assert prefetcher.fetch(0)
    for _ in range(3):
        assert not prefetcher.is_resident(0) and prefetcher.held == {0} and prefetcher.loading == 1
        assert prefetcher.pool.usage().adapter == 6, "its pages are taken at once"
        prefetcher.poll()
        prefetcher.check()
    assert prefetcher.is_resident(0) and prefetcher.held == set() and prefetcher.resident == 1
    pages = prefetcher.pool.adapters.pages[0, :6]
    assert np.array_equal(prefetcher.pool.storage[:, pages], prefetcher.store.image(0))
    assert (prefetcher.counts.loads, prefetcher.counts.bytes_loaded) == (1, 6 * 2 * 4)


def test_a_load_that_fails_gives_its_pages_back_and_can_be_tried_again() -> None:
    """Class of fault: a failed load keeps its pages or its slot (pitfall 29)."""
    prefetcher = prefetcher_of([3], pages=10, max_adapters=1)
    prefetcher.loader.failing = {0}
    for _ in range(3):
        assert prefetcher.fetch(0)
        ((adapter_id, failure),) = prefetcher.poll()
        assert adapter_id == 0 and str(failure) == "adapter 0 fails as planned"
        prefetcher.check()
        assert prefetcher.pool.free_pages == 10 and prefetcher.pool.free_adapter_slots == 1
    assert (prefetcher.counts.failures, prefetcher.counts.loads, prefetcher.counts.bytes_loaded) == (3, 0, 0)
    prefetcher.loader.failing = set()
    load(prefetcher, 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug in a loader")])
def test_a_load_that_is_interrupted_as_it_starts_holds_nothing(error: BaseException) -> None:
    """Its pages would be held for ever, and its requests wait for ever."""
    prefetcher = prefetcher_of([3], pages=10)

    class Interrupted(DelayedLoader):
        def start(self, adapter_id: int) -> None:
            raise error

    prefetcher.loader = Interrupted(prefetcher.pool, prefetcher.store)
    with pytest.raises(type(error)):
        prefetcher.fetch(0)
    prefetcher.check()
    assert prefetcher.loading == 0 and prefetcher.pool.usage().free == 10
    prefetcher.loader = DelayedLoader(prefetcher.pool, prefetcher.store)
    load(prefetcher, 0)


def test_an_adapter_that_breaks_the_immediate_loader_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher = prefetcher_of([3], pages=10)
    prefetcher.loader = ImmediateLoader(prefetcher.pool, prefetcher.store)
    monkeypatch.setattr(prefetcher.store, "image", lambda adapter_id: 1 / 0)
    assert prefetcher.fetch(0)
    [(adapter_id, failure)] = prefetcher.poll()
    assert adapter_id == 0 and isinstance(failure, LoadFailed) and "ZeroDivisionError" in str(failure)
    assert prefetcher.pool.usage().free == 10


def test_a_drop_in_the_middle_of_a_load_waits_for_its_end() -> None:
    """Class of fault: pages are freed, and handed to another, while a load still writes into them."""
    prefetcher = prefetcher_of([3], pages=10, polls=2)
    prefetcher.fetch(0)
    prefetcher.store.forget(prefetcher.store.remove("0"))
    prefetcher.drop(0)
    assert prefetcher.pool.free_pages == 4
    assert prefetcher.poll() == prefetcher.poll() == prefetcher.poll() == []
    prefetcher.check()
    assert prefetcher.pool.free_pages == 10 and not prefetcher.is_resident(0) and prefetcher.loading == 0
    assert prefetcher.counts.loads == 0


def test_a_drop_in_the_middle_of_a_load_that_fails() -> None:
    prefetcher = prefetcher_of([3], pages=10, polls=1)
    prefetcher.loader.failing = {0}
    prefetcher.fetch(0)
    prefetcher.store.forget(prefetcher.store.remove("0"))
    prefetcher.drop(0)
    prefetcher.poll()
    assert [adapter_id for adapter_id, _ in prefetcher.poll()] == [0]
    prefetcher.check()
    assert prefetcher.pool.free_pages == 10


def test_dropping_what_is_idle_frees_it_and_what_was_never_there_is_nothing() -> None:
    prefetcher = prefetcher_of([3, 1], pages=10)
    load(prefetcher, 0)
    for adapter_id in (0, 1):
        prefetcher.store.forget(prefetcher.store.remove(str(adapter_id)))
        prefetcher.drop(adapter_id)
        prefetcher.check()
    assert prefetcher.pool.free_pages == 10


def test_dropping_what_is_in_use_is_a_bug_that_shows() -> None:
    prefetcher = prefetcher_of([3], pages=10)
    load(prefetcher, 0)
    prefetcher.pin(0)
    with pytest.raises(AssertionError, match="adapter 0 dropped while in use"):
        prefetcher.drop(0)


# --- the loader of the CPU ---


def test_the_immediate_loader_loads_within_the_step(tmp_path: Path) -> None:
    prefetcher = prefetcher_of([2], pages=20)
    bad = prefetcher.store.add("bad", write_adapter_folder(tmp_path / "bad", MODEL, 3, ["q_proj"]))
    shutil.rmtree(tmp_path / "bad")
    prefetcher.loader = ImmediateLoader(prefetcher.pool, prefetcher.store)
    for adapter_id in (0, bad.adapter_id):
        assert prefetcher.fetch(adapter_id)
    prefetcher.loader.wait()  # nothing is ever under way, so this returns
    ((failed, failure),) = prefetcher.poll()
    assert failed == bad.adapter_id and isinstance(failure, LoadFailed) and "'bad' could not be loaded" in str(failure)
    assert prefetcher.is_resident(0) and prefetcher.pool.usage().adapter == 4
    pages = prefetcher.pool.adapters.pages[prefetcher.pool.adapter_slot(0), :4]
    assert np.array_equal(prefetcher.pool.storage[:, pages], prefetcher.store.image(0))
    assert prefetcher.poll() == [], "each load is told once"
    prefetcher.check()


# --- who leaves ---


def test_the_least_recently_used_leaves_first() -> None:
    prefetcher = prefetcher_of([2, 2, 2, 2], pages=12)
    load(prefetcher, 0, 1, 2)
    prefetcher.pin(0)
    prefetcher.unpin(0)  # used now, so 1 is the oldest
    load(prefetcher, 3)
    assert resident(prefetcher) == {0, 2, 3}
    assert prefetcher.counts.evictions == 1


def test_no_more_leave_than_must() -> None:
    prefetcher = prefetcher_of([1, 1, 1, 1], pages=10)
    load(prefetcher, 0, 1, 2, 3)
    assert prefetcher.make_room(2) and resident(prefetcher) == {0, 1, 2, 3}
    assert prefetcher.make_room(3) and resident(prefetcher) == {1, 2, 3}
    assert prefetcher.make_room(8) and resident(prefetcher) == {3}
    assert prefetcher.make_room(10) and resident(prefetcher) == set()
    assert not prefetcher.make_room(11)


@pytest.mark.parametrize("eviction", ["lru", "eager"])
def test_what_is_pinned_or_loading_stays(eviction: str) -> None:
    prefetcher = prefetcher_of([2, 2, 2], pages=14, eviction=eviction)
    load(prefetcher, 0, 1)
    prefetcher.pin(0)
    prefetcher.loader.polls = {2: 5}
    assert prefetcher.fetch(2)
    assert prefetcher.held == {0, 2}
    assert not prefetcher.make_room(7)
    assert resident(prefetcher) == {0, 1}, "and nothing was evicted in vain"
    assert prefetcher.make_room(6)
    assert resident(prefetcher) == {0}


def test_a_pin_for_each_sequence() -> None:
    """Class of fault: the first of two sequences that ends takes the adapter from under the other."""
    prefetcher = prefetcher_of([2], pages=4)
    load(prefetcher, 0)
    for _ in range(3):
        prefetcher.pin(0)
    for _ in range(2):
        prefetcher.unpin(0)
        assert not prefetcher.make_room(4) and resident(prefetcher) == {0}
    prefetcher.unpin(0)
    assert prefetcher.make_room(4) and resident(prefetcher) == set()
    with pytest.raises(KeyError):
        prefetcher.unpin(0)


def test_eager_drops_at_the_last_unpin_and_not_before() -> None:
    prefetcher = prefetcher_of([2, 2], pages=20, eviction="eager")
    load(prefetcher, 0, 1)
    prefetcher.pin(0)
    prefetcher.pin(0)
    prefetcher.unpin(0)
    assert resident(prefetcher) == {0, 1}
    prefetcher.unpin(0)
    assert resident(prefetcher) == {1}, "what was loaded and not used yet stays for its request"
    assert prefetcher.counts.evictions == 1


def test_what_is_kept_does_not_leave_though_it_is_the_oldest() -> None:
    prefetcher = prefetcher_of([2, 2, 2], pages=8)
    load(prefetcher, 0, 1)
    assert prefetcher.make_room(4, keep={0}) and resident(prefetcher) == {0}
    assert not prefetcher.make_room(5, keep={0}) and resident(prefetcher) == {0}
    load(prefetcher, 1)
    assert prefetcher.fetch(2, keep={0})
    assert prefetcher.held == {2} and resident(prefetcher) == {0}


def test_a_full_table_makes_one_leave_though_pages_are_left() -> None:
    prefetcher = prefetcher_of([1, 1, 1, 1], pages=100, max_adapters=2)
    load(prefetcher, 0, 1)
    load(prefetcher, 2)
    assert resident(prefetcher) == {1, 2}
    assert prefetcher.fetch(3, keep={1})
    assert resident(prefetcher) == {1}
    assert prefetcher.pool.free_adapter_slots == 0
    assert not prefetcher.fetch(0, keep={1})
    prefetcher.poll()
    assert resident(prefetcher) == {1, 3}


def test_a_fetch_that_fails_for_want_of_pages_changes_nothing() -> None:
    """Class of fault: an adapter leaves for the sake of its slot, and then there are too few pages all the same."""
    prefetcher = prefetcher_of([1, 3, 8], pages=10, max_adapters=2)
    load(prefetcher, 0, 1)
    prefetcher.pin(1)
    assert not prefetcher.fetch(2)
    assert resident(prefetcher) == {0, 1} and prefetcher.counts.evictions == 0
    assert prefetcher.loader.started == [0, 1]


# --- what is coming ---


def test_what_is_coming_leaves_after_all_others_and_the_last_of_it_first() -> None:
    """Class of fault: the load for one waiting request evicts the adapter that the next one needs."""
    prefetcher = prefetcher_of([2, 2, 2, 2, 2], pages=16)
    load(prefetcher, 0, 1, 2, 3)
    prefetcher.expect([4, 0, 2])
    load(prefetcher, 4)
    assert resident(prefetcher) == {0, 2, 3, 4}, "1 is the oldest that nobody waits for"
    assert prefetcher.make_room(4) and resident(prefetcher) == {0, 2, 4}
    assert prefetcher.make_room(8) and resident(prefetcher) == {0, 4}
    assert prefetcher.make_room(12) and resident(prefetcher) == {4}


def test_a_round_of_loads_ahead_goes_in_order_as_far_as_pages_slots_and_its_size_allow() -> None:
    for pages, slots, ahead, begun in ((100, 8, 9, 4), (100, 8, 2, 2), (100, 3, 9, 3), (11, 8, 9, 2), (7, 8, 9, 1)):
        prefetcher = prefetcher_of([2, 3, 1, 2], pages=100, ahead=ahead, polls=1)
        prefetcher.expect([1, 2, 0, 3])  # 6, 2, 4 and 4 pages
        assert prefetcher.could_prefetch
        prefetcher.prefetch(pages, slots)
        assert prefetcher.loader.started == [1, 2, 0, 3][:begun], (pages, slots, ahead)
        assert prefetcher.counts.loads_ahead == begun
        prefetcher.check()


def test_what_was_loaded_ahead_counts_against_the_next_round() -> None:
    """So what waits for its turn never grows beyond the spare room, and stays until its turn."""
    prefetcher = prefetcher_of([2, 2, 2], pages=100, ahead=1)
    prefetcher.expect([0, 1, 2])
    for begun in ([0], [0, 1], [0, 1], [0, 1]):
        if prefetcher.could_prefetch:
            prefetcher.prefetch(pages=8, slots=2)
        prefetcher.poll()
        assert prefetcher.loader.started == begun
    prefetcher.pin(0)  # its turn: it is no longer spare room's
    prefetcher.expect([1, 2])
    prefetcher.prefetch(pages=8, slots=2)
    assert prefetcher.loader.started == [0, 1, 2]


def test_the_next_round_begins_when_the_last_has_ended() -> None:
    prefetcher = prefetcher_of([1, 1, 1], pages=100, ahead=2)
    prefetcher.loader.polls = {0: 0, 1: 2}
    prefetcher.expect([0, 1, 2])
    prefetcher.prefetch(100, 8)
    prefetcher.poll()
    assert prefetcher.is_resident(0) and not prefetcher.could_prefetch
    prefetcher.poll()
    prefetcher.poll()
    assert prefetcher.is_resident(1) and prefetcher.could_prefetch


def test_loads_ahead_evict_nothing_that_is_coming() -> None:
    prefetcher = prefetcher_of([2, 2, 2, 2], pages=12, ahead=4)
    load(prefetcher, 0, 1, 2)
    prefetcher.expect([0, 3, 2])
    prefetcher.prefetch(100, 8)
    prefetcher.poll()
    assert resident(prefetcher) == {0, 2, 3}
    prefetcher.expect([0, 3, 2, 1])
    prefetcher.prefetch(100, 8)
    assert prefetcher.loader.started == [0, 1, 2, 3]


def test_eager_keeps_what_is_coming_and_drops_it_when_it_is_not() -> None:
    prefetcher = prefetcher_of([2, 2, 2], pages=20, eviction="eager", ahead=2)
    prefetcher.expect([0, 1])
    load(prefetcher, 0, 1)
    for adapter_id in (0, 1):
        prefetcher.pin(adapter_id)
    prefetcher.expect([1])
    for adapter_id in (0, 1):
        prefetcher.unpin(adapter_id)
    assert resident(prefetcher) == {1}
    prefetcher.expect([2])
    assert resident(prefetcher) == set()


def test_what_is_dropped_is_no_longer_coming() -> None:
    prefetcher = prefetcher_of([2, 2], pages=20, ahead=2)
    prefetcher.expect([0, 1])
    prefetcher.store.forget(prefetcher.store.remove("0"))
    prefetcher.drop(0)
    prefetcher.prefetch(100, 8)
    assert prefetcher.loader.started == [1]


# --- cost-aware eviction ---


def use(prefetcher: Prefetcher, *adapter_ids: int) -> None:
    """One request after the other, each there and gone."""
    for adapter_id in adapter_ids:
        if not prefetcher.is_resident(adapter_id):
            load(prefetcher, adapter_id)
        prefetcher.pin(adapter_id)
        prefetcher.unpin(adapter_id)


def test_the_cost_aware_policy_keeps_the_popular_where_lru_keeps_the_last() -> None:
    for eviction, stays in (("lru", {1, 2}), ("cost", {0, 2})):
        prefetcher = prefetcher_of([2, 2, 2], pages=8, eviction=eviction)
        use(prefetcher, 0, 0, 0, 1)
        use(prefetcher, 2)
        assert resident(prefetcher) == stays, eviction


def test_popularity_is_remembered_while_an_adapter_is_away() -> None:
    prefetcher = prefetcher_of([2, 2, 2], pages=8, eviction="cost")
    use(prefetcher, 0, 0, 0, 0)
    prefetcher.make_room(8)
    use(prefetcher, 1, 1, 0)
    use(prefetcher, 2)
    assert resident(prefetcher) == {0, 2}


def test_popularity_fades() -> None:
    """What was popular long ago gives way to what is used now; LFU without ageing would keep it for ever."""
    prefetcher = prefetcher_of([2, 2, 2], pages=8, eviction="cost")
    use(prefetcher, *[0] * 8)
    for _ in range(4 * int(CostAware.HALF_LIFE)):
        prefetcher._score.use(3)
    use(prefetcher, 1, 1, 2)
    assert resident(prefetcher) == {1, 2}


def test_between_equally_popular_adapters_the_one_that_frees_most_for_its_cost_leaves() -> None:
    prefetcher = prefetcher_of([4, 1, 1], pages=11, eviction="cost")
    use(prefetcher, 0, 1, 2)
    assert resident(prefetcher) == {1, 2}


def test_a_version_that_is_gone_leaves_no_count_behind() -> None:
    prefetcher = prefetcher_of([2], pages=8, eviction="cost")
    use(prefetcher, 0)
    prefetcher.store.forget(prefetcher.store.remove("0"))
    prefetcher.drop(0)
    assert prefetcher._score._popularity == {}


# --- the loader with a thread ---


def test_the_thread_loads_beside_the_step_and_in_order(tmp_path: Path) -> None:
    prefetcher = prefetcher_of([2, 3, 1], pages=40)
    bad = prefetcher.store.add("bad", write_adapter_folder(tmp_path / "bad", MODEL, 3, ["q_proj"]))
    shutil.rmtree(tmp_path / "bad")
    prefetcher.loader = ThreadLoader(prefetcher.pool, prefetcher.store)
    for adapter_id in (0, bad.adapter_id, 1, 2):
        assert prefetcher.fetch(adapter_id)
    failures = []
    while prefetcher.loading:
        prefetcher.loader.wait()
        failures += prefetcher.poll()
    assert [adapter_id for adapter_id, _ in failures] == [bad.adapter_id]
    assert isinstance(failures[0][1], LoadFailed) and "'bad' could not be loaded" in str(failures[0][1])
    assert resident(prefetcher) == {0, 1, 2} and prefetcher.loader.seconds > 0
    for adapter_id in range(3):
        slot = prefetcher.pool.adapter_slot(adapter_id)
        pages = prefetcher.pool.adapters.pages[slot, : prefetcher.pages_of(adapter_id)]
        assert np.array_equal(prefetcher.pool.storage[:, pages], prefetcher.store.image(adapter_id))


def test_what_breaks_on_the_thread_is_told_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher = prefetcher_of([3], pages=10)
    prefetcher.loader = ThreadLoader(prefetcher.pool, prefetcher.store)
    monkeypatch.setattr(prefetcher.pool, "write_adapter", lambda adapter_id, image: 1 / 0)
    assert prefetcher.fetch(0)
    prefetcher.loader.wait()
    [(adapter_id, failure)] = prefetcher.poll()
    assert adapter_id == 0 and isinstance(failure, LoadFailed) and "ZeroDivisionError" in str(failure)
    prefetcher.check()
    assert prefetcher.pool.usage().free == 10


def test_the_thread_ends_with_its_loader() -> None:
    """Class of fault: each engine that was ever made leaves a thread, and with it a pool."""
    before = set(threading.enumerate())
    prefetcher = prefetcher_of([3], pages=10)
    prefetcher.loader = ThreadLoader(prefetcher.pool, prefetcher.store)
    prefetcher.fetch(0)
    prefetcher.loader.wait()
    [thread] = set(threading.enumerate()) - before
    storage = weakref.ref(prefetcher.pool)
    del prefetcher
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive() and storage() is None


# --- check() itself ---

DAMAGE: dict[str, Callable[[Prefetcher], object]] = {
    "idle and pinned": lambda p: p._pins.__setitem__(1, 1),
    "loading and resident": lambda p: p._loading.__setitem__(1, None),
    "pinned by nobody": lambda p: p._pins.__setitem__(0, 0),
    "an adapter without pages is pinned": lambda p: p._pins.__setitem__(3, 1),
    "the count of idle pages drifted": lambda p: setattr(p._idle, "pages", 2),
    "an idle adapter is forgotten": lambda p: p._idle.remove(1),
    "a load is forgotten": lambda p: p._loading.clear(),
    "cancelled, and not loading": lambda p: p._cancelled.add(1),
    "loaded ahead, and not loading": lambda p: p._round.add(1),
    "idle adapters are out of order": lambda p: p._idle._in_order.insert(0, (9.0, 7)),
    "pages of an adapter are miscounted": lambda p: p._pages.__setitem__(0, 4),
    "the pool lost an adapter": lambda p: p.pool.close_adapter(0),
    "the pool has one adapter more": lambda p: p.pool.open_adapter(3, p.store.version(3).shape),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_check_finds_damage(fault: str) -> None:
    prefetcher = prefetcher_of([1, 2, 3, 1], pages=100)
    load(prefetcher, 0, 1)
    prefetcher.pin(0)
    prefetcher.loader.polls = {2: 5}
    prefetcher.fetch(2)
    prefetcher.check()
    DAMAGE[fault](prefetcher)
    with pytest.raises(AssertionError):
        prefetcher.check()


# --- any sequence of events ---


class PrefetcherMachine(RuleBasedStateMachine):
    """Adapters are fetched, used, kept, replaced and dropped while loads are late or fail; beside it a plain model.

    Free pages are NaN, so weights that are read from a page of another adapter, or too early, show.
    """

    @initialize(
        ranks=st.lists(st.integers(1, 4), min_size=2, max_size=5),
        pages=st.integers(4, 24),
        slots=st.integers(1, 4),
        eviction=st.sampled_from(["lru", "eager"]),
        ahead=st.integers(0, 2),
    )
    def start(self, ranks: list[int], pages: int, slots: int, eviction: str, ahead: int) -> None:
        self.prefetcher = prefetcher_of(ranks, pages, slots, eviction, ahead=ahead)
        self.ranks = dict(enumerate(ranks))  # by version
        self.loading: list[int] = []
        self.pins: dict[int, int] = {}
        self.idle: list[int] = []  # least recently used first
        self.coming: list[int] = []
        self.round: set[int] = set()
        self.dropped: set[int] = set()

    def present(self) -> list[int]:
        """Registered versions."""
        return [i for i in self.ranks if i not in self.dropped]

    def free_pages(self) -> int:
        return self.prefetcher.pool.num_pages - sum(2 * self.ranks[i] for i in {*self.loading, *self.pins, *self.idle})

    def evict_for(self, pages: int, slots: int, keep: set[int]) -> bool:
        """What must leave, first for a slot, then for pages; nobody if it is not enough.

        The oldest first, but after all others what is coming, the last of it first.
        """
        leaving = [i for i in self.idle if i not in {*keep, *self.coming}]
        leaving += [i for i in reversed(self.coming) if i in self.idle and i not in keep]
        used = len(self.loading) + len(self.pins) + len(self.idle)
        must = max(0, used + slots - self.prefetcher.pool.max_adapters)
        if must > len(leaving) or self.free_pages() + sum(2 * self.ranks[i] for i in leaving) < pages:
            return False
        while must > 0 or self.free_pages() < pages:
            self.idle.remove(leaving.pop(0))
            must -= 1
        return True

    @rule(data=st.data(), polls=st.integers(0, 3), fails=st.sampled_from([False, False, True]))
    def fetch(self, data: st.DataObject, polls: int, fails: bool) -> None:
        missing = [i for i in self.present() if i not in {*self.loading, *self.pins, *self.idle}]
        if not missing:
            return
        adapter_id = data.draw(st.sampled_from(missing))
        keep = data.draw(st.sets(st.sampled_from(sorted(self.ranks))))
        loader = self.prefetcher.loader
        loader.polls[adapter_id] = polls
        (loader.failing.add if fails else loader.failing.discard)(adapter_id)
        enough = self.evict_for(2 * self.ranks[adapter_id], 1, keep)
        assert self.prefetcher.fetch(adapter_id, keep) == enough
        if enough:
            self.loading.append(adapter_id)

    @rule(data=st.data())
    def expect(self, data: st.DataObject) -> None:
        self.coming = data.draw(st.lists(st.sampled_from(self.present()), unique=True)) if self.present() else []
        self.prefetcher.expect(self.coming)
        if self.prefetcher.eviction == "eager" and self.prefetcher.ahead:
            self.idle = [i for i in self.idle if i in self.coming]

    @rule(pages=st.integers(0, 20), slots=st.integers(0, 3))
    def prefetch(self, pages: int, slots: int) -> None:
        """In order, within the pages and slots that are given, and evicting nothing that is coming."""
        missing = [i for i in self.coming if i not in {*self.loading, *self.pins, *self.idle}]
        can = bool(self.prefetcher.ahead and missing) and not self.round & set(self.loading)
        assert self.prefetcher.could_prefetch == can
        if not can:
            return
        there, started = [i for i in self.coming if i in self.idle], len(self.prefetcher.loader.started)
        self.prefetcher.prefetch(pages, slots)
        self.round = set()
        left = pages - sum(2 * self.ranks[i] for i in there)
        for i in missing:
            left -= 2 * self.ranks[i]
            if left < 0 or len(self.round) >= min(slots - len(there), self.prefetcher.ahead):
                break
            if self.evict_for(2 * self.ranks[i], 1, set(self.coming)):
                self.round.add(i)
                self.loading.append(i)
        assert set(self.prefetcher.loader.started[started:]) == self.round

    @rule()
    def poll(self) -> None:
        before = set(self.loading)
        failed = {adapter_id for adapter_id, _ in self.prefetcher.poll()}
        ended = before - self.prefetcher._loading.keys()
        assert failed == ended & self.prefetcher.loader.failing
        for adapter_id in [i for i in self.loading if i in ended]:
            self.loading.remove(adapter_id)
            if adapter_id not in failed | self.dropped:
                self.idle.append(adapter_id)

    @rule()
    def wait(self) -> None:
        """After it, the next poll brings something."""
        if self.loading:
            self.prefetcher.loader.wait()
            before = len(self.loading)
            self.poll()
            assert len(self.loading) < before

    @precondition(lambda self: self.idle or self.pins)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted({*self.idle, *self.pins})))
        self.prefetcher.pin(adapter_id)
        self.idle = [i for i in self.idle if i != adapter_id]
        self.pins[adapter_id] = self.pins.get(adapter_id, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted(self.pins)))
        self.prefetcher.unpin(adapter_id)
        self.pins[adapter_id] -= 1
        if not self.pins[adapter_id]:
            del self.pins[adapter_id]
            if self.prefetcher.eviction == "lru" or (self.prefetcher.ahead and adapter_id in self.coming):
                self.idle.append(adapter_id)

    @rule(pages=st.integers(0, 26), data=st.data())
    def make_room(self, pages: int, data: st.DataObject) -> None:
        keep = data.draw(st.sets(st.sampled_from(sorted(self.ranks))))
        assert self.prefetcher.make_room(pages, keep) == self.evict_for(pages, 0, keep)

    @precondition(lambda self: any(i not in self.pins for i in self.present()))
    @rule(data=st.data(), rank=st.integers(1, 4))
    def replace(self, data: st.DataObject, rank: int) -> None:
        """A name goes while nobody uses it, perhaps in the middle of its load, and comes back with other weights."""
        adapter_id = data.draw(st.sampled_from([i for i in self.present() if i not in self.pins]))
        store = self.prefetcher.store
        name = store.version(adapter_id).name
        store.forget(store.remove(name))
        self.prefetcher.drop(adapter_id)
        self.dropped.add(adapter_id)
        self.coming = [i for i in self.coming if i != adapter_id]
        self.idle = [i for i in self.idle if i != adapter_id]
        self.ranks[store.add(name, adapter_folder(rank)).adapter_id] = rank

    @invariant()
    def agrees_with_the_model(self) -> None:
        prefetcher = self.prefetcher
        prefetcher.check()
        prefetcher.pool.check()
        assert list(prefetcher._idle) == self.idle, "the order in which they would leave"
        assert prefetcher._pins == self.pins
        assert prefetcher.held == {*self.pins, *self.loading} and prefetcher.loading == len(self.loading)
        assert prefetcher.pool.free_pages == self.free_pages()
        for adapter_id in {*self.idle, *self.pins}:
            slot = prefetcher.pool.adapter_slot(adapter_id)
            pages = prefetcher.pool.adapters.pages[slot, : prefetcher.pages_of(adapter_id)]
            assert np.array_equal(prefetcher.pool.storage[:, pages], prefetcher.store.image(adapter_id))


TestPrefetcherMachine = PrefetcherMachine.TestCase
TestPrefetcherMachine.settings = settings(stateful_step_count=30)
