"""PageAllocator: free and owned pages partition the pool whatever is done, and a misuse changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slora_ref.allocator import PageAllocator
from slora_ref.errors import OutOfPages, PageError

SEEDS = st.one_of(st.none(), st.integers(0, 3))


def state_of(allocator: PageAllocator) -> tuple[bytes, ...]:
    """What the allocator hands out next, in which order, and what it takes back."""
    return allocator._ids.tobytes(), allocator._is_free.tobytes(), bytes([allocator._low]), bytes([allocator._high])


class AllocatorMachine(RuleBasedStateMachine):
    """Blocks are allocated and freed in any order, whole, in part and mixed; beside it stands a plain set."""

    @initialize(pages=st.integers(0, 24), seed=SEEDS)
    def start(self, pages: int, seed: int | None) -> None:
        self.allocator = PageAllocator(pages, seed)
        self.ends: dict[bool, list[int]] = {False: [], True: []}  # owned, by the end that they came from

    @property
    def owned(self) -> list[int]:
        return [*self.ends[False], *self.ends[True]]

    @rule(count=st.integers(0, 26), far=st.booleans())
    def allocate(self, count: int, far: bool) -> None:
        before, free = state_of(self.allocator), self.allocator.free_pages
        if count > free:
            with pytest.raises(OutOfPages) as refused:
                self.allocator.allocate(count, far)
            assert (refused.value.needed, refused.value.free) == (count, free)
            assert state_of(self.allocator) == before
        else:
            pages = self.allocator.allocate(count, far).tolist()
            assert len(pages) == count
            assert not set(pages) & set(self.owned), "handed out twice"
            self.ends[far] += pages

    @rule(data=st.data(), far=st.booleans())
    def free_some(self, data: st.DataObject, far: bool) -> None:
        own = self.ends[far]
        chosen = data.draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        self.allocator.free(np.array(chosen, np.int32), far)
        self.ends[far] = [page for page in own if page not in chosen]

    @rule(far=st.booleans())
    def free_all_in_another_order(self, far: bool) -> None:
        self.allocator.free(np.array(sorted(self.ends[far]), np.int32), far)
        self.ends[far] = []

    @rule(far=st.booleans())
    def more_than_the_end_has_given(self, far: bool) -> None:
        before = state_of(self.allocator)
        if self.ends[not far]:
            with pytest.raises(PageError, match=f"{'far' if far else 'near'} end"):
                self.allocator.free(np.array(self.owned, np.int32), far)
        assert state_of(self.allocator) == before

    @rule(data=st.data(), kind=st.sampled_from(["free already", "outside", "twice at once"]))
    def misuse(self, data: st.DataObject, kind: str) -> None:
        """A wrong page among right ones: refused as a whole."""
        pages = self.allocator.num_pages
        wrong = {
            "free already": sorted(set(range(pages)) - set(self.owned)),
            "outside": [-pages - 1, -1, pages, pages + 7],
            "twice at once": self.owned,
        }[kind]
        if not wrong:
            return
        chosen = data.draw(st.lists(st.sampled_from(self.owned), unique=True)) if self.owned else []
        page = data.draw(st.sampled_from(wrong))
        chosen = [*chosen, page, *([page] if kind == "twice at once" and page not in chosen else [])]
        before = state_of(self.allocator)
        with pytest.raises(PageError):
            self.allocator.free(np.array(data.draw(st.permutations(chosen)), np.int32))
        assert state_of(self.allocator) == before

    @invariant()
    def agrees_with_the_set(self) -> None:
        self.allocator.check()
        assert len(set(self.owned)) == len(self.owned) == self.allocator.used_pages
        assert self.allocator.used_pages + self.allocator.free_pages == self.allocator.num_pages
        assert set(range(self.allocator.num_pages)) - set(self.owned) == set(free_ids(self.allocator))


def free_ids(allocator: PageAllocator) -> list[int]:
    """Ids that the allocator would still hand out."""
    return allocator._ids[allocator._low : allocator._high].tolist()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(stateful_step_count=30)


@given(pages=st.integers(1, 50), seed=SEEDS)
def test_all_pages_can_be_had_each_once(pages: int, seed: int | None) -> None:
    allocator = PageAllocator(pages, seed)
    assert sorted(allocator.allocate(pages).tolist()) == list(range(pages))


def test_pages_come_in_a_random_order_only_when_asked_for() -> None:
    plain, again = PageAllocator(1000).allocate(1000), PageAllocator(1000).allocate(1000)
    shuffled = PageAllocator(1000, 7).allocate(1000)
    assert plain.tolist() == again.tolist()
    assert sorted(np.abs(np.diff(plain)).tolist()) == [1] * 999
    assert np.abs(np.diff(shuffled)).mean() > 100
    assert shuffled.tolist() == PageAllocator(1000, 7).allocate(1000).tolist()


def test_pages_that_were_freed_come_out_again_in_the_same_order() -> None:
    """Neighbours stay neighbours, which reads faster."""
    allocator = PageAllocator(10)
    pages = allocator.allocate(6)
    assert pages.tolist() == [0, 1, 2, 3, 4, 5]
    allocator.free(pages[1:4])
    assert allocator.allocate(3).tolist() == [1, 2, 3]


def test_blocks_from_the_far_end_stay_neighbours_whatever_happens_at_the_near_one() -> None:
    allocator, rng = PageAllocator(1000), np.random.default_rng(0)
    block = allocator.allocate(64, far=True)
    assert (np.diff(block) == 1).all()
    pages = allocator.allocate(900)
    allocator.free(rng.permutation(pages)[:700])
    allocator.free(block, far=True)
    assert allocator.allocate(64, far=True).tolist() == block.tolist()


def test_pages_handed_out_are_a_copy() -> None:
    """The caller's array must not change when the allocator goes on, nor the allocator when the caller writes."""
    allocator = PageAllocator(4)
    first = allocator.allocate(2)
    ids = first.tolist()
    allocator.free(first)
    first[:] = 0
    allocator.check()
    assert sorted(allocator.allocate(2).tolist()) == sorted(ids)


def test_a_negative_count_is_refused() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(PageError, match="-1"):
        allocator.allocate(-1)
    allocator.check()


def test_misuse_says_which_pages() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(4)
    allocator.free(pages[:1])
    with pytest.raises(PageError, match=rf"freed twice: \[{pages[0]}\]"):
        allocator.free(pages)
    with pytest.raises(PageError, match=rf"named twice in one free: \[{pages[1]}\]"):
        allocator.free(pages[[1, 2, 1]])
    with pytest.raises(PageError, match=r"9 freed, the pool has 0\.\.7"):
        allocator.free(np.array([9]))
    with pytest.raises(OutOfPages, match="6 pages needed, 5 free"):
        allocator.allocate(6)


DAMAGE = {
    "a free page is listed twice": lambda pool, owned: pool._ids.__setitem__(0, pool._ids[1]),
    "an owned page is on the free list": lambda pool, owned: pool._ids.__setitem__(0, owned[0]),
    "an owned page is marked free": lambda pool, owned: pool._is_free.__setitem__(owned[0], True),
    "a free page is marked owned": lambda pool, owned: pool._is_free.__setitem__(pool._ids[0], False),
    "an id below the pool": lambda pool, owned: pool._ids.__setitem__(0, -1),  # as an index it is page 7, the same
    "an id above the pool": lambda pool, owned: pool._ids.__setitem__(0, 8),
    "a page is lost": lambda pool, owned: setattr(pool, "_high", 4),
    "a page appears": lambda pool, owned: setattr(pool, "_high", 6),
    "more pages than there are": lambda pool, owned: setattr(pool, "_high", 9),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_check_finds_damage(fault: str) -> None:
    allocator = PageAllocator(8)
    owned = allocator.allocate(3)
    allocator.check()
    assert allocator._ids[0] == 7 and allocator._high == 5
    DAMAGE[fault](allocator, owned)
    with pytest.raises(AssertionError):
        allocator.check()
