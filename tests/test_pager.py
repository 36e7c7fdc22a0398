"""PagePool and PageLayout: page arithmetic against the paper, tables against plain lists, NaN where nobody writes."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import adapter_shapes, model_configs
from tiny import tiny_config

from slora_ref.config import TARGETS, ModelConfig
from slora_ref.errors import OutOfPages, PageError
from slora_ref.ops.tables import LORA_GROUPS
from slora_ref.pager import AdapterShape, PageLayout, PagePool, PoolUsage

LLAMA_7B = tiny_config(
    hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128
)
LLAMA_3_8B = tiny_config(
    hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128
)


def ranks(config: ModelConfig, **by_target: int) -> AdapterShape:
    """The shape of an adapter with these ranks in every layer; scale 2."""
    table = np.zeros((config.num_layers, len(TARGETS)), np.int32)
    for name, rank in by_target.items():
        table[:, TARGETS.index(f"{name}_proj")] = rank
    return AdapterShape(table, np.where(table, np.float32(2), np.float32(0)))


# --- layout ---


def test_rank_8_on_attention_of_llama_7b_is_64_pages_in_each_layer() -> None:
    """The numbers of the design and of the paper: 16.8 MB in float16."""
    layout = PageLayout(LLAMA_7B)
    shape = ranks(LLAMA_7B, q=8, k=8, v=8, o=8)
    pages = layout.adapter_pages(shape.page_ranks)
    assert (layout.width, pages) == (4096, 64)
    assert pages * layout.num_layers * layout.width * 2 == 16_777_216
    assert layout.token_pages(1) * layout.num_layers * layout.width * 2 == 524_288  # 0.5 MB of keys and values a token


@pytest.mark.parametrize(
    ("config", "target", "a_pages", "b_pages"),
    [
        (LLAMA_7B, "q_proj", 1, 1),
        (LLAMA_7B, "gate_proj", 1, 3),  # ceil(11008 / 4096) = 3, the last one a third empty
        (LLAMA_7B, "down_proj", 3, 1),
        (LLAMA_3_8B, "q_proj", 4, 4),  # the page is the key width, 1024: a column of 4096 takes four
        (LLAMA_3_8B, "k_proj", 4, 1),
        (LLAMA_3_8B, "v_proj", 4, 1),
        (LLAMA_3_8B, "o_proj", 4, 4),
        (LLAMA_3_8B, "up_proj", 4, 14),
        (LLAMA_3_8B, "down_proj", 14, 4),
    ],
)
def test_pages_of_a_column_of_a_and_a_row_of_b(config: ModelConfig, target: str, a_pages: int, b_pages: int) -> None:
    layout = PageLayout(config)
    index = TARGETS.index(target)
    assert (layout.a_pieces[index], layout.b_pieces[index]) == (a_pages, b_pages)
    alone = np.zeros(len(TARGETS), np.int32)
    alone[index] = 5
    assert layout.adapter_pages(alone) == 5 * (a_pages + b_pages)


def test_a_targets_pages_follow_its_largest_rank_in_any_layer() -> None:
    config = tiny_config(num_layers=3)
    table = np.zeros((3, len(TARGETS)), np.int32)
    table[0, 0], table[2, 0], table[1, 3] = 2, 7, 1
    shape = AdapterShape(table, table.astype(np.float32))
    assert shape.page_ranks.tolist() == [7, 0, 0, 1, 0, 0, 0]
    assert PageLayout(config).adapter_pages(shape.page_ranks) == 7 * (2 + 2) + (2 + 2)  # widths 64 in pages of 32


@given(data=st.data(), config=model_configs())
def test_table_entries_of_an_adapter_are_disjoint_and_complete(data: st.DataObject, config: ModelConfig) -> None:
    layout = PageLayout(config)
    page_ranks = data.draw(adapter_shapes(config.num_layers)).page_ranks
    a_start, b_start = layout.starts(page_ranks)
    entries: list[int] = []
    for index, target in enumerate(TARGETS):
        for start, size in zip((a_start, b_start), config.target_shape(target), strict=True):
            pieces = sum(1 for first in range(0, size, layout.width))  # a vector cut into pages, counted one by one
            entries += range(start[index], start[index] + page_ranks[index] * pieces)
    assert sorted(entries) == list(range(layout.adapter_pages(page_ranks)))


@given(data=st.data(), config=model_configs())
def test_as_that_share_an_input_are_neighbours(data: st.DataObject, config: ModelConfig) -> None:
    """One gather of consecutive entries reads the A of q, k and v, and another that of gate and up."""
    layout = PageLayout(config)
    page_ranks = data.draw(adapter_shapes(config.num_layers)).page_ranks
    a_start, _ = layout.starts(page_ranks)
    for group in LORA_GROUPS:
        for left, right in zip(group.targets, group.targets[1:], strict=False):
            assert a_start[right] == a_start[left] + page_ranks[left] * layout.a_pieces[left]


@pytest.mark.parametrize(
    ("width", "itemsize", "stride"), [(16, 4, 16), (10, 4, 12), (10, 8, 10), (11, 8, 12), (12, 2, 16), (3, 32, 3)]
)
def test_rows_start_at_multiples_of_16_bytes(width: int, itemsize: int, stride: int) -> None:
    layout = PageLayout(tiny_config())
    layout.width = width
    assert layout.row_stride(itemsize) == stride


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_page_of_the_storage_is_aligned_and_exactly_as_wide_as_the_key(dtype: type) -> None:
    config = tiny_config(head_dim=10, num_kv_heads=1, num_heads=2)
    pool = PagePool(PageLayout(config), 7, 1, 1, 1, dtype)
    assert pool.storage.shape == (2, 7, 10)
    assert not [stride for stride in pool.storage.strides[:2] if stride % 16]
    assert pool.page_bytes == 2 * 10 * np.dtype(dtype).itemsize


# --- pool ---


class PoolMachine(RuleBasedStateMachine):
    """Sequences and adapters come and go in one pool of NaN; beside it stand plain lists of what was written."""

    @initialize(
        data=st.data(),
        config=model_configs(),
        pages=st.integers(0, 150),
        slots=st.integers(1, 4),
        adapters=st.integers(1, 3),
        seed=st.one_of(st.none(), st.integers(0, 9)),
    )
    def start(
        self, data: st.DataObject, config: ModelConfig, pages: int, slots: int, adapters: int, seed: int | None
    ) -> None:
        self.layers = config.num_layers
        self.layout = PageLayout(config)
        self.pool = PagePool(self.layout, pages, slots, 6, adapters, poison=True, shuffle_seed=seed)
        self.tokens: dict[int, list[float]] = {}  # open slot -> number written as the key of each token
        self.images: dict[int, tuple[AdapterShape, np.ndarray | None]] = {}
        self.next_number = 1.0

    def unchanged(self, error: type[Exception], call: Callable[[], object]) -> None:
        """The call is refused and leaves every table, list and number as it was."""
        before = pickle.dumps(self.pool)
        with pytest.raises(error):
            call()
        assert pickle.dumps(self.pool) == before

    @rule()
    def open_sequence(self) -> None:
        if len(self.tokens) == self.pool.max_sequences:
            self.unchanged(PageError, self.pool.open_sequence)
        else:
            slot = self.pool.open_sequence()
            assert slot not in self.tokens
            self.tokens[slot] = []

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """A step: some sequences grow by some tokens, their rows in any order of sequences."""
        rows = []
        for slot in data.draw(st.permutations(sorted(self.tokens))):
            length = len(self.tokens[slot])
            rows += [(slot, length + i) for i in range(data.draw(st.integers(0, min(3, 6 - length))))]
        slots, positions = np.array(rows, np.int64).reshape(-1, 2).T
        if 2 * len(rows) > self.pool.free_pages:
            self.unchanged(OutOfPages, lambda: self.pool.extend(slots, positions))
            return
        k_pages, v_pages = self.pool.extend(slots, positions)
        for (slot, _), k_page, v_page in zip(rows, k_pages, v_pages, strict=True):
            self.pool.storage[:, k_page] = self.next_number
            self.pool.storage[:, v_page] = -self.next_number
            self.tokens[slot].append(self.next_number)
            self.next_number += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), close=st.booleans())
    def end_sequence(self, data: st.DataObject, close: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        free = self.pool.free_pages
        if close:
            self.pool.close_sequence(slot)
            self.unchanged(PageError, lambda: self.pool.close_sequence(slot))
        else:
            self.pool.clear_sequence(slot)
        assert self.pool.free_pages == free + 2 * len(self.tokens[slot])
        self.tokens[slot] = []
        if close:
            del self.tokens[slot]

    @rule(data=st.data(), adapter_id=st.integers(0, 5))
    def open_adapter(self, data: st.DataObject, adapter_id: int) -> None:
        shape = data.draw(adapter_shapes(self.layers))
        pages = self.layout.adapter_pages(shape.page_ranks)
        if adapter_id in self.images or not self.pool.free_adapter_slots:
            self.unchanged(PageError, lambda: self.pool.open_adapter(adapter_id, shape))
        elif pages > self.pool.free_pages:
            self.unchanged(OutOfPages, lambda: self.pool.open_adapter(adapter_id, shape))
        else:
            assert len(self.pool.open_adapter(adapter_id, shape)) == pages
            self.images[adapter_id] = (shape, None)

    @precondition(lambda self: self.images)
    @rule(data=st.data())
    def write_adapter(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted(self.images)))
        shape, _ = self.images[adapter_id]
        size = (self.layers, self.layout.adapter_pages(shape.page_ranks), self.layout.width)
        image = np.arange(np.prod(size), dtype=np.float32).reshape(size) + self.next_number
        self.next_number += image.size
        self.pool.write_adapter(adapter_id, image)
        self.images[adapter_id] = (shape, image)

    @precondition(lambda self: self.images)
    @rule(data=st.data())
    def close_adapter(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted(self.images)))
        self.pool.close_adapter(adapter_id)
        del self.images[adapter_id]
        self.unchanged(KeyError, lambda: self.pool.close_adapter(adapter_id))

    @invariant()
    def every_part_is_consistent(self) -> None:
        self.pool.check()
        kv = 2 * sum(map(len, self.tokens.values()))
        adapter = sum(self.layout.adapter_pages(shape.page_ranks) for shape, _ in self.images.values())
        assert self.pool.usage() == PoolUsage(kv, adapter, self.pool.num_pages - kv - adapter)
        assert self.pool.free_adapter_slots == self.pool.max_adapters - len(self.images)

    @invariant()
    def sequences_are_found_through_their_tables(self) -> None:
        for slot, tokens in self.tokens.items():
            assert self.pool.lengths[slot] == len(tokens)
            for half, sign in enumerate((1, -1)):
                pages = self.pool.sequence_pages[slot, half, : len(tokens)]
                stored = self.pool.storage[:, pages]
                assert (stored == sign * np.array(tokens, np.float32)[None, :, None]).all()

    @invariant()
    def adapters_are_found_through_their_tables(self) -> None:
        tables = self.pool.adapters
        for adapter_id, (shape, image) in self.images.items():
            slot = self.pool.adapter_slot(adapter_id)
            assert (tables.rank[slot] == shape.ranks).all() and (tables.scale[slot] == shape.scales).all()
            stored = self.pool.storage[:, tables.pages[slot, : self.layout.adapter_pages(shape.page_ranks)]]
            if image is None:
                assert np.isnan(stored).all(), "an adapter that was not written yet can be read"
            else:
                assert (stored == image).all()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=30)


def small_pool(dtype: type | None = np.float32, poison: bool = True) -> PagePool:
    """64 pages with a sequence of 3 tokens, an empty one, an adapter of rank 2 on q and one of rank 1 on q and o."""
    config = tiny_config()
    pool = PagePool(PageLayout(config), 64, 3, 8, 3, dtype, poison)
    first, _ = pool.open_sequence(), pool.open_sequence()
    k_pages, v_pages = pool.extend(np.full(3, first), np.arange(3))
    for adapter_id, shape in enumerate((ranks(config, q=2), ranks(config, q=1, o=1))):
        pages = pool.open_adapter(adapter_id, shape)
        if dtype is not None:
            pool.write_adapter(adapter_id, np.ones((2, len(pages), pool.layout.width), dtype))
    if dtype is not None:
        pool.storage[:, k_pages] = pool.storage[:, v_pages] = 1
    pool.check()
    return pool


def test_an_adapter_of_the_base_model_has_no_slot() -> None:
    assert small_pool().adapter_slot(-1) == -1


def test_an_adapter_that_is_not_resident_has_no_slot_to_read_from() -> None:
    """Class of fault: an unknown adapter answered by slot 0 or by the base model."""
    with pytest.raises(KeyError):
        small_pool().adapter_slot(7)


def test_a_reused_adapter_slot_keeps_nothing_of_the_adapter_before() -> None:
    """Class of fault: modules that the new adapter lacks, or rows beyond its rank, still act (pitfall 20)."""
    config = tiny_config()
    pool = PagePool(PageLayout(config), 500, 1, 1, 1, poison=True)
    wide = ranks(config, q=16, k=16, v=16, o=16, gate=16, up=16, down=16)
    narrow = ranks(config, q=4)
    pages = pool.open_adapter(0, wide)
    pool.write_adapter(0, np.ones((2, len(pages), 32), np.float32))
    pool.close_adapter(0)
    pages = pool.open_adapter(1, narrow)
    assert pool.adapter_slot(1) == 0
    assert np.isnan(pool.storage[:, pages]).all()
    assert (pool.adapters.rank[0] == narrow.ranks).all() and (pool.adapters.scale[0] == narrow.scales).all()
    assert (pool.adapters.pages[0, len(pages) :] == -1).all()
    pool.check()


def test_a_wider_adapter_widens_the_table_and_keeps_what_is_in_it() -> None:
    pool = small_pool()
    before = pool.adapters.pages.copy()
    pool.open_adapter(9, ranks(tiny_config(), q=5))
    assert pool.adapters.pages.shape[1] == 20 > before.shape[1]
    assert (pool.adapters.pages[:2, : before.shape[1]] == before[:2]).all()
    pool.check()


def test_a_pool_without_storage_counts_the_same_pages() -> None:
    with_storage, without = small_pool(), small_pool(dtype=None)
    assert without.usage() == with_storage.usage() == PoolUsage(6, 16, 42)
    assert without.storage.size == 0
    assert without.page_bytes == with_storage.page_bytes
    without.close_sequence(0)
    without.close_adapter(0)
    assert without.usage() == PoolUsage(0, 8, 56)
    without.check()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_free_pages_are_nan_from_the_start_and_again_after_use(dtype: type) -> None:
    pool = small_pool(dtype)
    kept = pool.storage.base if pool.storage.base is not None else pool.storage
    assert np.isnan(kept).sum() == 2 * 42 * kept.shape[2]
    pool.close_sequence(0)
    pool.close_adapter(0)
    pool.close_adapter(1)
    assert np.isnan(pool.storage).all()


# --- check() itself ---


def _sequence_entry(pool: PagePool, page: int, position: int = 1) -> None:
    pool.sequence_pages[0, 0, position] = page


def _adapter_entry(pool: PagePool, page: int) -> None:
    pool._adapter_pages[0][3] = pool.adapters.pages[pool.adapter_slot(0), 3] = page


def _free_page(pool: PagePool) -> int:
    return int(np.flatnonzero(pool.allocator._is_free)[0])


DAMAGE: dict[str, Callable[[PagePool], object]] = {
    "a sequence reads another's page": lambda pool: _sequence_entry(pool, int(pool.sequence_pages[0, 0, 0])),
    "a sequence reads an adapter's page": lambda pool: _sequence_entry(pool, int(pool._adapter_pages[0][0])),
    "a sequence reads a free page": lambda pool: _sequence_entry(pool, _free_page(pool)),
    "a sequence has a hole": lambda pool: _sequence_entry(pool, -1),
    "a sequence has a page beyond its end": lambda pool: _sequence_entry(pool, _free_page(pool), position=5),
    "a table names a page outside the pool": lambda pool: _sequence_entry(pool, 64),
    "a sequence is longer than its table": lambda pool: pool.lengths.__setitem__(0, 4),
    "a sequence lost a token": lambda pool: pool.lengths.__setitem__(0, 2),
    "a closed slot holds a page": lambda pool: pool.sequence_pages.__setitem__((2, 0, 0), _free_page(pool)),
    "a closed slot has a length": lambda pool: pool.lengths.__setitem__(2, 1),
    "a sequence slot is free twice": lambda pool: pool._free_sequence_slots.append(2),
    "a sequence slot in use is free": lambda pool: pool._free_sequence_slots.append(0),
    "the count of kv pages drifted": lambda pool: setattr(pool, "_kv_pages", 8),
    "an adapter shares a page": lambda pool: _adapter_entry(pool, int(pool._adapter_pages[1][0])),
    "an adapter reads a free page": lambda pool: _adapter_entry(pool, _free_page(pool)),
    "an adapter's table names a page outside": lambda pool: _adapter_entry(pool, 64),
    "an adapter's table drifted": lambda pool: pool.adapters.pages.__setitem__((pool.adapter_slot(0), 3), 0),
    "an adapter's table is too long": lambda pool: pool.adapters.pages.__setitem__((2, 0), _free_page(pool)),
    "an adapter's rank drifted": lambda pool: pool.adapters.rank.__setitem__((0, slice(None), 0), 1),
    "an adapter's page rank drifted": lambda pool: pool.adapters.page_rank.__setitem__((0, 0), 1),
    "an adapter's start drifted": lambda pool: pool.adapters.b_start.__setitem__((0, 0), 3),
    "a closed adapter slot has a rank": lambda pool: pool.adapters.rank.__setitem__((2, 0, 0), 1),
    "a closed adapter slot has a scale": lambda pool: pool.adapters.scale.__setitem__((2, 0, 0), 1),
    "two adapters have one slot": lambda pool: pool._adapter_slots.__setitem__(1, pool.adapter_slot(0)),
    "an adapter slot is lost": lambda pool: pool._free_adapter_slots.pop(),
    "an adapter slot in use is free": lambda pool: pool._free_adapter_slots.append(0),
    "an adapter has a slot but no pages": lambda pool: pool._adapter_pages.pop(0),
    "a page leaked": lambda pool: pool.allocator.allocate(1),
    "a page went back at the other end": lambda pool: pool.allocator.free(pool.allocator.allocate(1, far=True)),
    "a page in use is free": lambda pool: pool.allocator.free(pool.sequence_pages[0, 0, :1]),
    "the free list is damaged": lambda pool: pool.allocator._ids.__setitem__(20, pool.allocator._ids[21]),
    "a free page was written": lambda pool: pool.storage.__setitem__((1, _free_page(pool), -1), 0),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_check_finds_damage(fault: str) -> None:
    pool = small_pool()
    DAMAGE[fault](pool)
    with pytest.raises(AssertionError):
        pool.check()


@pytest.mark.parametrize("fault", [name for name in DAMAGE if name != "a free page was written"])
def test_check_finds_damage_without_the_help_of_nan(fault: str) -> None:
    pool = small_pool(dtype=None)
    DAMAGE[fault](pool)
    with pytest.raises(AssertionError):
        pool.check()
