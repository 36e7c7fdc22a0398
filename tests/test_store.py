"""AdapterStore: names and versions, the packed weights against the files, a budget, and folders that go wrong."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from strategies import model_configs
from tiny import adapter_tensors, module_name, tiny_config, write_adapter_folder

from slora_ref.config import TARGETS, ModelConfig
from slora_ref.errors import AdapterError, LoadFailed, UnknownAdapter
from slora_ref.ops.tables import AdapterTables
from slora_ref.pager import PageLayout, PagePool
from slora_ref.store import AdapterStore
from slora_ref.store.arena import ALIGNMENT

T0 = tiny_config()
WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, np.ndarray]


def store_of(config: ModelConfig = T0, budget_bytes: int = 1 << 30) -> AdapterStore:
    """An empty store for the model."""
    return AdapterStore(config, PageLayout(config), np.float32, budget_bytes)


# --- what is packed ---


def unpack(
    storage: np.ndarray, tables: AdapterTables, slot: int, config: ModelConfig, layer: int, target: int
) -> tuple[np.ndarray, np.ndarray]:
    """lora_A and lora_B read from pages one vector at a time, as AdapterTables' docstring says; tails must be zero."""
    width = storage.shape[2]
    rank = tables.rank[slot, layer, target]

    def vectors(start: int, size: int) -> np.ndarray:
        pieces = -(-size // width)
        read = np.zeros((rank, pieces * width), storage.dtype)
        for j in range(rank):
            for p in range(pieces):
                read[j, p * width : (p + 1) * width] = storage[layer, tables.pages[slot, start + j * pieces + p]]
        assert not read[:, size:].any(), "the tail of a page is not zero"
        return read[:, :size]

    d_in, d_out = config.target_shape(TARGETS[target])
    return vectors(tables.a_start[slot, target], d_in), vectors(tables.b_start[slot, target], d_out).T


@st.composite
def rank_tables(draw: st.DrawFn, config: ModelConfig) -> dict[tuple[int, str], int]:
    """{(layer, target): rank} with some modules left out and another rank in every layer."""
    modules = [(layer, target) for layer in range(config.num_layers) for target in TARGETS]
    chosen = draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
    return {module: draw(st.integers(1, 5)) for module in chosen}


@given(data=st.data(), config=model_configs(), seed=st.integers(0, 99))
def test_pages_hold_the_files_a_and_b_in_every_layer(
    data: st.DataObject, config: ModelConfig, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any shape of model, any ranks by layer, pages scattered over a pool of NaN."""
    ranks = data.draw(rank_tables(config))
    tensors = adapter_tensors(config, ranks, seed)
    folder = write_adapter_folder(tmp_path_factory.mktemp("adapter"), config, ranks, tensors=tensors)
    store = store_of(config)
    version = store.add("x", folder)
    pool = PagePool(store.layout, version.pages + 5, 1, 1, 2, poison=True, shuffle_seed=seed)
    pool.open_adapter(version.adapter_id, version.shape)
    pool.write_adapter(version.adapter_id, store.image(version.adapter_id))
    pool.check()
    slot = pool.adapter_slot(version.adapter_id)
    for layer in range(config.num_layers):
        for index, target in enumerate(TARGETS):
            rank = ranks.get((layer, target), 0)
            assert pool.adapters.rank[slot, layer, index] == rank
            if rank:
                a, b = unpack(pool.storage, pool.adapters, slot, config, layer, index)
                name = f"base_model.model.{module_name(layer, target)}"
                assert np.array_equal(a, tensors[f"{name}.lora_A.weight"])
                assert np.array_equal(b, tensors[f"{name}.lora_B.weight"])
    used = pool.storage[:, pool.adapters.pages[slot, : version.pages]]
    assert not np.isnan(used).any(), "pages are written whole"
    assert np.count_nonzero(used) == sum(np.count_nonzero(tensor) for tensor in tensors.values()), "and nothing else"


def test_the_scale_stays_outside_of_the_copy(tmp_path: Path) -> None:
    """Class of fault: the scale is folded into B, so a second load scales twice, or two names share one scale."""
    store = store_of()
    tensors = adapter_tensors(T0, {(0, "q_proj"): 4}, seed=1)
    versions = [
        store.add(
            name, write_adapter_folder(tmp_path / name, T0, 4, ["q_proj"], [0], tensors=tensors, lora_alpha=alpha)
        )
        for name, alpha in (("weak", 1), ("strong", 64))
    ]
    weak, strong = (store.image(version.adapter_id) for version in versions)
    assert np.array_equal(weak, strong)
    assert [version.shape.scales[0, 0] for version in versions] == [0.25, 16]
    assert not versions[0].shape.scales[1].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_copy_has_the_pools_type(tmp_path: Path, dtype: type) -> None:
    store = AdapterStore(T0, PageLayout(T0), dtype)
    version = store.add("x", write_adapter_folder(tmp_path, T0, 2, dtype="bfloat16"))
    assert store.image(version.adapter_id).dtype == dtype


def test_nobody_can_write_into_the_copy(tmp_path: Path) -> None:
    """Class of fault: an adapter changes after eviction and reload, since its copy in host memory was used in place."""
    store = store_of()
    version = store.add("x", write_adapter_folder(tmp_path, T0, 2))
    with pytest.raises(ValueError, match="read-only"):
        store.image(version.adapter_id)[0, 0, 0] = 1


# --- names and versions ---


def test_registering_reads_no_weights(tmp_path: Path) -> None:
    store = store_of()
    folder = write_adapter_folder(tmp_path, T0, 2)
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()  # what a look at the weights would refuse
    (folder / WEIGHTS).write_bytes(data)
    version = store.add("x", folder)
    assert store.names == ["x"] and store.host_bytes == 0
    assert version.pages == 2 * (4 + 3 + 3 + 4 + 5 + 5 + 5)  # widths 64, 32 and 96 in pages of 32
    with pytest.raises(LoadFailed, match="'x'"):
        store.image(version.adapter_id)


@pytest.mark.parametrize("name", ["", "A", "a ", "a/../a", "b", "base", "../a", "a\0", "x" * 10_000])
def test_an_unknown_name_is_an_error_and_never_another_adapter(tmp_path: Path, name: str) -> None:
    """Pitfall 37: unknown, empty, wrong case, a path, endless."""
    store = store_of()
    store.add("a", write_adapter_folder(tmp_path, T0, 2))
    with pytest.raises(UnknownAdapter, match=r"1 are; engine\.adapters lists them") as refused:
        store.lookup(name)
    assert len(str(refused.value)) < 600


def test_the_name_of_a_removed_adapter_is_unknown_at_once(tmp_path: Path) -> None:
    store = store_of()
    version = store.add("a", write_adapter_folder(tmp_path, T0, 2))
    store.acquire(version)
    assert store.remove("a") is version
    for call in (store.lookup, store.remove):
        with pytest.raises(UnknownAdapter):
            call("a")
    assert store.version(version.adapter_id) is version, "those that use it still find it"
    store.check()


def refused(store: AdapterStore, error: type[Exception], add: Callable[[], object], match: str) -> None:
    """The registration is refused and leaves no trace, not even in the numbers to come."""
    names, next_id = store.names, store._next_id
    with pytest.raises(error, match=match):
        add()
    assert (store.names, store._next_id) == (names, next_id)
    store.check()


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\0", "\x1b[31m"])
def test_a_malformed_name_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_adapter_folder(tmp_path, T0, 2)
    store = store_of()
    refused(store, AdapterError, lambda: store.add(name, folder), "must be 1 to 256 printable characters")
    store.add("x" * 256, folder)
    store.add("Ünïcode / with space", folder)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path, T0, 2)
    store = store_of()
    store.add("a", folder)
    refused(store, AdapterError, lambda: store.add("a", folder), "'a' is already registered; remove it first")


def test_a_folder_that_is_refused_leaves_no_trace(tmp_path: Path) -> None:
    store = store_of()
    refused(store, AdapterError, lambda: store.add("a", tmp_path / "nowhere"), "nowhere")
    other = write_adapter_folder(tmp_path / "other", tiny_config(hidden_size=32), 2)
    refused(store, AdapterError, lambda: store.add("a", other), "base model and config")
    store.add("a", write_adapter_folder(tmp_path / "right", T0, 2))


def test_a_version_lives_until_its_last_user_has_gone(tmp_path: Path) -> None:
    store = store_of()
    folder = write_adapter_folder(tmp_path, T0, 2)
    old = store.add("a", folder)
    store.acquire(old)
    store.acquire(old)
    store.remove("a")
    new = store.add("a", folder)
    assert new.adapter_id != old.adapter_id and store.lookup("a") is new
    store.release(old.adapter_id)
    with pytest.raises(AssertionError):
        store.forget(old)
    assert store.release(old.adapter_id) is old
    store.forget(old)
    with pytest.raises(KeyError):
        store.version(old.adapter_id)
    with pytest.raises(AssertionError):
        store.forget(new)  # still registered
    store.check()


def test_a_release_too_many_is_a_bug_that_shows(tmp_path: Path) -> None:
    """Class of fault: the count of users drifts, and a removal waits for ever or comes too early (pitfall 27)."""
    store = store_of()
    version = store.add("a", write_adapter_folder(tmp_path, T0, 2))
    store.acquire(version)
    store.release(version.adapter_id)
    with pytest.raises(AssertionError, match="'a' released more often than acquired"):
        store.release(version.adapter_id)


@pytest.mark.parametrize("same_time", [False, True])
def test_a_reloaded_name_never_answers_with_old_weights(tmp_path: Path, same_time: bool) -> None:
    """Pitfalls 20 and 21: other weights of the same shape under the same path, at best with the same time of change.

    Archives and build systems set times: two files of one size at one path can then have the same one.
    """
    store = store_of()
    folder = write_adapter_folder(tmp_path / "x", T0, 2, seed=1)
    first = store.add("x", folder)
    before = store.image(first.adapter_id).copy()
    status = (folder / WEIGHTS).stat()
    store.remove("x")
    store.forget(first)
    fresh = write_adapter_folder(tmp_path / "fresh", T0, 2, seed=2)
    (fresh / WEIGHTS).replace(folder / WEIGHTS)
    if same_time:
        os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = store.add("x", folder)
    assert second.header.fingerprint != first.header.fingerprint
    after = store.image(second.adapter_id)
    assert not np.array_equal(before, after)
    alone = store_of()
    assert np.array_equal(after, alone.image(alone.add("x", folder).adapter_id))


def test_another_file_with_the_same_time_and_size_does_not_answer_for_the_one_registered(tmp_path: Path) -> None:
    """Not at the next registration but at the load: archives restore times, so time and size alone say nothing."""
    store = store_of()
    folder = write_adapter_folder(tmp_path / "x", T0, 2, seed=1)
    version, status = store.add("x", folder), (folder / WEIGHTS).stat()
    other = write_adapter_folder(tmp_path / "other", T0, 2, seed=2)
    (folder / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())
    os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(LoadFailed, match="changed since it was registered"):
        store.image(version.adapter_id)


def test_a_link_that_is_turned_elsewhere_leaves_what_is_registered_alone(tmp_path: Path) -> None:
    store, link = store_of(), tmp_path / "latest"
    first, second = (write_adapter_folder(tmp_path / f"v{seed}", T0, 2, seed=seed) for seed in (1, 2))
    link.symlink_to(first)
    version = store.add("x", link)
    link.unlink()
    link.symlink_to(second)
    expected = store_of()
    assert np.array_equal(store.image(version.adapter_id), expected.image(expected.add("x", first).adapter_id))


def test_a_path_that_can_be_none_is_refused() -> None:
    with pytest.raises(AdapterError, match="no path"):
        store_of().add("x", "a\0b")


# --- host memory ---


def test_names_that_share_a_folder_share_its_copy(tmp_path: Path) -> None:
    store = store_of()
    folder = write_adapter_folder(tmp_path, T0, 2)
    ids = [store.add(f"name{i}", folder).adapter_id for i in range(5)]
    assert len(set(ids)) == 5
    assert len({id(store.image(adapter_id)) for adapter_id in ids}) == 1
    assert store.host_bytes == store.image(ids[0]).nbytes


def test_beyond_the_budget_the_least_recently_used_copies_go_and_are_read_again(tmp_path: Path) -> None:
    size = store_of().add("x", write_adapter_folder(tmp_path / "0", T0, 2)).nbytes
    store = store_of(budget_bytes=3 * size)
    ids = [store.add(f"{i}", write_adapter_folder(tmp_path / f"{i}", T0, 2, seed=i)).adapter_id for i in range(4)]
    images = {i: store.image(i) for i in (ids[0], ids[1], ids[2])}
    before = images[ids[1]].copy()
    assert store.image(ids[0]) is images[ids[0]]  # used again, so 1 is now the oldest
    store.image(ids[3])
    assert store.host_bytes == 3 * size and store.host.evictions == 1 and store.disk.reads == 4
    assert all(store.image(i) is images[i] for i in (ids[0], ids[2]))
    assert np.array_equal(store.image(ids[1]), before)
    assert store.disk.reads == 5


def test_an_adapter_larger_than_the_budget_is_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path, T0, 2)
    nbytes = store_of().add("x", folder).nbytes
    small = store_of(budget_bytes=nbytes - 1)
    match = f"takes {nbytes:,} bytes of host memory; host_bytes is {nbytes - 1:,}"
    refused(small, AdapterError, lambda: small.add("x", folder), match)
    assert store_of(budget_bytes=nbytes).add("x", folder).nbytes == nbytes


# --- folders that go wrong after they were registered (pitfall 29) ---


def _vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def _lose_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def _truncate(folder: Path) -> None:
    status = (folder / WEIGHTS).stat()
    os.truncate(folder / WEIGHTS, status.st_size - 8)
    os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))


def _become_garbage(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 100)


def _become_another(folder: Path) -> None:
    write_adapter_folder(folder, T0, 2, seed=99)
    os.utime(folder / WEIGHTS, ns=(0, 0))


def _change_rank(folder: Path) -> None:
    write_adapter_folder(folder, T0, 3)


def _change_scale(folder: Path) -> None:
    weights = (folder / WEIGHTS).stat()
    write_adapter_folder(folder, T0, 2, lora_alpha=64)
    os.utime(folder / WEIGHTS, ns=(weights.st_atime_ns, weights.st_mtime_ns))


def _become_nan(folder: Path) -> None:
    status = (folder / WEIGHTS).stat()
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    (folder / WEIGHTS).write_bytes(data)
    os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))


FAULTS = {
    "the folder vanished": _vanish,
    "the weights vanished": _lose_weights,
    "the file is cut": _truncate,
    "the file is garbage": _become_garbage,
    "other weights": _become_another,
    "another rank": _change_rank,
    "another scale": _change_scale,
    "not a number": _become_nan,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_goes_wrong_fails_its_own_load_and_no_other(tmp_path: Path, fault: str) -> None:
    store = store_of()
    bad = store.add("bad", write_adapter_folder(tmp_path / "bad", T0, 2, seed=1))
    good = store.add("good", write_adapter_folder(tmp_path / "good", T0, 2, seed=2))
    FAULTS[fault](tmp_path / "bad")
    for _ in range(2):
        with pytest.raises(LoadFailed, match="adapter 'bad' could not be loaded: "):
            store.image(bad.adapter_id)
    assert store.host_bytes == 0
    assert store.image(good.adapter_id).any()
    store.check()


def test_what_is_in_host_memory_is_served_whatever_becomes_of_the_folder(tmp_path: Path) -> None:
    store = store_of()
    version = store.add("x", write_adapter_folder(tmp_path / "x", T0, 2))
    image = store.image(version.adapter_id)
    _vanish(tmp_path / "x")
    assert store.image(version.adapter_id) is image


def test_too_little_memory_fails_the_load_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class of fault: an adapter that the machine cannot hold takes the step down (pitfall 29)."""
    store = store_of()
    version = store.add("x", write_adapter_folder(tmp_path, T0, 2))

    def no_memory(*_: object) -> None:
        raise MemoryError("Unable to allocate 40. GiB")

    monkeypatch.setattr("slora_ref.store.disk.pack_into", no_memory)
    with pytest.raises(LoadFailed, match="'x' could not be loaded: Unable to allocate"):
        store.image(version.adapter_id)
    assert store.host_bytes == 0


# --- check() itself ---

DAMAGE: dict[str, Callable[[AdapterStore], object]] = {
    "a name leads to another's version": lambda store: store._by_name.__setitem__("a", store._by_name["b"]),
    "a name leads to a removed version": lambda store: setattr(store._by_name["a"], "removed", True),
    "a version is lost": lambda store: store._versions.pop(0),
    "a version is replaced": lambda store: store._versions.__setitem__(0, store._versions[1]),
    "fewer than no users": lambda store: setattr(store._versions[0], "users", -1),
    "removed, unused and kept": lambda store: store.remove("a"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_check_finds_damage(tmp_path: Path, fault: str) -> None:
    store = store_of()
    for name in ("a", "b"):
        store.add(name, write_adapter_folder(tmp_path, T0, 2))
    store.check()
    DAMAGE[fault](store)
    with pytest.raises(AssertionError):
        store.check()


# --- any sequence of events ---


class StoreMachine(RuleBasedStateMachine):
    """Names come, go and come back over folders that are rewritten and deleted, with room for two copies in memory.

    Every file has the same size and the same time. A version has the weights that were there when it was registered, or
    it fails to load.
    """

    names = st.sampled_from(["a", "b"])
    places = st.sampled_from(["x", "y"])

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory(prefix="slora_ref_store_")
        self.root = Path(self.temporary.name)
        self.config = tiny_config(num_layers=1, hidden_size=4, num_heads=1, num_kv_heads=1, head_dim=2)
        self.store = store_of(self.config, budget_bytes=2 * ALIGNMENT)
        self.written: dict[str, int] = {}  # folder -> the number that all its weights are
        self.since: dict[int, int] = {}  # version -> the number in its folder when it was registered
        self.users: dict[int, int] = {}
        self.number = 0

    def teardown(self) -> None:
        self.temporary.cleanup()

    @rule(place=places)
    def write(self, place: str) -> None:
        """Other weights of the same shape, in a new file beside the old one, which is moved away."""
        self.number += 1
        folder = self.root / place
        folder.mkdir(exist_ok=True)
        if place in self.written:
            (folder / WEIGHTS).rename(self.root / f"old{self.number}")
        tensors = adapter_tensors(self.config, {(0, "q_proj"): 1}, seed=0)
        tensors = {name: np.full_like(tensor, self.number) for name, tensor in tensors.items()}
        write_adapter_folder(folder, self.config, 1, ["q_proj"], tensors=tensors)
        os.utime(folder / WEIGHTS, ns=(0, 0))
        self.written[place] = self.number

    @rule(place=places)
    def delete(self, place: str) -> None:
        if self.written.pop(place, 0):
            self.number += 1
            (self.root / place).rename(self.root / f"old{self.number}")

    @rule(name=names, place=places)
    def add(self, name: str, place: str) -> None:
        if name in self.store.names or place not in self.written:
            with pytest.raises(AdapterError):
                self.store.add(name, self.root / place)
        else:
            version = self.store.add(name, self.root / place)
            assert version.adapter_id not in self.since, "a number is used again"
            self.since[version.adapter_id] = self.written[place]
            self.users[version.adapter_id] = 0
            assert version.nbytes <= ALIGNMENT, "there is room for two"

    @precondition(lambda self: self.store.names)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        version = self.store.remove(data.draw(st.sampled_from(self.store.names)))
        self.forget_if_unused(version.adapter_id)

    @precondition(lambda self: self.store.names)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        version = self.store.lookup(data.draw(st.sampled_from(self.store.names)))
        self.store.acquire(version)
        self.users[version.adapter_id] += 1

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from([i for i, users in self.users.items() if users]))
        self.users[adapter_id] -= 1
        assert self.store.release(adapter_id).users == self.users[adapter_id]
        self.forget_if_unused(adapter_id)

    def forget_if_unused(self, adapter_id: int) -> None:
        version = self.store.version(adapter_id)
        if version.removed and not self.users[adapter_id]:
            self.store.forget(version)
            del self.users[adapter_id]

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted(self.users)))
        place = self.store.version(adapter_id).header.path.name
        try:
            image = self.store.image(adapter_id)
        except LoadFailed:
            assert self.written.get(place) != self.since[adapter_id], "its file is still the one that was registered"
        else:
            assert set(np.unique(image)) - {0} == {self.since[adapter_id]}, "other weights than were registered"

    @invariant()
    def agrees(self) -> None:
        self.store.check()
        assert self.store._versions.keys() == self.users.keys()
        assert len(self.store.host) <= 2


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(stateful_step_count=25)
