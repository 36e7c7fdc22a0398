"""Pages: one pool for keys, values and adapters

Minutes: 25
Paper: 5.1
After: say why memory fragments, how one free list ends that, and what one pool saves over two.
"""

# %% [markdown]
# ## The cost that hurts
# A GPU that serves text holds three things: the base model, which never changes; the keys and values of every running
# sequence, which grow by a token a step and vanish at once; and the adapters that are in use, of many sizes, which
# come and go. Memory for the second and third kind is what decides how many requests can run, so it must not lie
# idle. But blocks of many sizes that come and go leave holes.
#
# ## The smallest example
# Sixteen cells, four sequences of four cells each; the second and the fourth end. Half of the memory is free, and a
# sequence of six does not fit:

# %%
from show import Picture, attempt, refused, source, table


class Contiguous:
    """Memory handed out in unbroken blocks, each in the first hole that is large enough."""

    def __init__(self, size):
        self.cells = ["."] * size

    def allocate(self, name, count):
        for start in range(len(self.cells) - count + 1):
            if all(cell == "." for cell in self.cells[start : start + count]):
                self.cells[start : start + count] = [name] * count
                return True
        return False

    def free(self, name):
        self.cells = ["." if cell == name else cell for cell in self.cells]


memory = Contiguous(16)
for name in "ABCD":
    memory.allocate(name, 4)
memory.free("B")
memory.free("D")
print("".join(memory.cells), "free:", memory.cells.count("."), "fits 6:", memory.allocate("E", 6))

# %% [markdown]
# Moving C would help, at the price of copying it. The way out of operating systems is older and better: cut
# everything into pages of one size, and keep for each owner a table of its pages. Any free page serves anybody, so a
# request fits if and only if there are enough free pages.

# %%
from slora_ref.allocator import PageAllocator
from slora_ref.errors import OutOfPages, PageError

allocator = PageAllocator(16)
tables = {name: allocator.allocate(4) for name in "ABCD"}
allocator.free(tables.pop("B"))
allocator.free(tables.pop("D"))
tables["E"] = allocator.allocate(6)
print("the table of E:", tables["E"].tolist(), "free:", allocator.free_pages)

# %% [markdown]
# How much is lost in earnest? Sequences of random lengths come and go in a memory of 1,000 cells, until a new one
# does not fit. How full is the memory then?

# %%
import numpy as np


def fullness_when_refused(seed, shortest=20, longest=120):
    """Share of cells in use each time that a block is refused for lack of one hole."""
    rng, memory, alive, shares = np.random.default_rng(seed), Contiguous(1000), [], []
    for number in range(300):
        size = int(rng.integers(shortest, longest))
        while not memory.allocate(number, size):
            shares.append(1 - memory.cells.count(".") / 1000)
            memory.free(alive.pop(int(rng.integers(len(alive)))))
        alive.append(number)
    return shares


shares = fullness_when_refused(0)
print(f"contiguous: refused {len(shares)} times, at {np.mean(shares):.0%} full on average, at {min(shares):.0%} once")
print("pages: refused only where fewer pages are free than are asked for")

# %% [markdown]
# A fifth of the memory idle, and that is with the length of each sequence known in advance. Where it is not, a
# contiguous block must be as long as the longest possible answer, and most of it is never used.
#
# ## The data structure
# A list of free page ids with two ends. Allocating n pages takes n from an end, freeing puts them back there; the
# pool's size plays no part. Keys and values, which come one by one, use one end, adapters the other: so an adapter's
# pages stay neighbours.

# %% listing
source(PageAllocator.allocate, PageAllocator.free)

# %% [markdown]
# The invariant: free and owned pages partition the pool, each page exactly once. What would break it is refused, and
# then nothing has changed.

# %%
allocator.check()
for wrong in ("E twice", "a page of nobody", "too many"):
    try:
        if wrong == "too many":
            allocator.allocate(5)
        else:
            allocator.free(np.append(tables["E"], tables["E"][0]) if wrong == "E twice" else np.array([99]))
    except (OutOfPages, PageError) as error:
        print(f"{wrong}: {type(error).__name__}: {error}")
allocator.check()

# %% [markdown]
# Measured once and committed, with the machine: the time to allocate does not depend on the pool.

# %%
from show import measured

allocations = [row for row in measured("HOST-CPU")["rows"] if row["operation"] == "allocate"]
rows = [(f"{row['pool_pages']:,}", row["pages"], f"{row['us']:.1f}") for row in allocations]
table(["pages in the pool", "pages allocated", "us"], rows)

# %% [markdown]
# ## How large is a page?
# Here is the idea of the paper. A token's key has as many numbers as a column of A: the hidden size H, in a
# multi-head model. So if a page is H numbers, a key is a page, a value is a page, and an adapter of rank r is r pages
# for each A and each B. *Two kinds of memory have one unit.* In this project the page is the key width of a layer, so
# that models with fewer key heads fit as well; there, a column of A takes a few pages. One page id names a place in
# every layer.

# %%
from dataclasses import replace

from slora_ref.config import TARGETS, ModelConfig
from slora_ref.config.presets import preset
from slora_ref.pager import PageLayout

llama_7b = preset("llama-7b")
models = {"32 key heads (Llama-7B)": llama_7b, "8 key heads": replace(llama_7b, num_kv_heads=8)}
rows = []
for name, config in models.items():
    layout = PageLayout(config)
    for rank in (8, 64):
        ranks = np.array([rank if target in TARGETS[:4] else 0 for target in TARGETS])
        pages = layout.adapter_pages(ranks)
        size = f"{pages * layout.page_bytes(2) / 1e6:.1f}"
        rows.append((name, layout.width, rank, pages, size, pages // layout.token_pages(1)))
table(["model", "numbers in a page", "rank on q, k, v, o", "pages", "MB in float16", "as many tokens"], rows)

# %% listing
source(PageLayout.adapter_pages, PageLayout.starts)

# %% [markdown]
# So an adapter of rank 64 takes the room of 256 tokens of Llama-7B: adapters and sequences compete for the same
# memory, and how much each kind needs changes by the minute.
#
# ## One pool or two
# Two pools, one for keys and values and one for adapters, each must be as large as its own worst moment. One pool
# must be as large as the worst moment of the sum. We measure it with the real scheduler and the adapters of the toy
# model, on a day that has a morning (many people, each with an adapter of their own, short texts) and an evening (few
# adapters, long texts). The model is left out (`tutorials/bare.py`): steps that answer with any token show the same
# pages.

# %%
from bare import bare_engine, serve

from slora_ref.pager import PagePool
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER
from slora_ref.workload import Arrival, SyntheticTrace, original_trace

morning = original_trace(
    SyntheticTrace(adapters=60, rate=40.0, duration=20, prompt=(4, 20), output=(4, 20))
)
evening = original_trace(
    SyntheticTrace(adapters=3, rate=3.0, duration=20, prompt=(50, 100), output=(50, 100), seed=7)
)
day = morning + [
    Arrival(time=22 + ask.time, adapter=ask.adapter, prompt=ask.prompt, output=ask.output) for ask in evening
]
_, usages = serve(bare_engine(100_000, eviction="eager"), day, lambda engine: engine.pool.usage())
kv, adapter = np.array([usage.kv for usage in usages]), np.array([usage.adapter for usage in usages])
one, two = (kv + adapter).max(), kv.max() + adapter.max()
print(f"{len(day)} requests, {len(usages)} steps")
print(f"most keys and values: {kv.max():,} pages; most adapters: {adapter.max():,} pages")
print(f"two pools must have {two:,} pages, one pool {one:,}: {1 - one / two:.0%} less")

# %% [markdown]
# The opposite check: where the mixture is the same all day, one pool saves next to nothing.

# %%
steady = original_trace(SyntheticTrace(adapters=60, rate=6.0, duration=40, prompt=(30, 60), output=(30, 60)))
_, same = serve(bare_engine(100_000, eviction="eager"), steady, lambda engine: engine.pool.usage())
flat = np.array([(usage.kv, usage.adapter) for usage in same])
print(f"steady: two pools {flat.max(axis=0).sum():,} pages, one pool {flat.sum(axis=1).max():,}")

# %% [markdown]
# ## The picture
# The adapters' worst moment is in the morning, the keys' in the evening. Two pools pay for both at the same time.

# %% picture
from matplotlib.figure import Figure
from show import DARK, EDGE, MIDDLE

figure = Figure(figsize=(8, 3.8), layout="constrained")
axes = figure.subplots()
steps = np.arange(len(usages) + 1)
axes.stairs(adapter, steps, fill=True, color=MIDDLE, label="adapter weights")
axes.stairs(kv + adapter, steps, baseline=adapter, fill=True, color=DARK, label="keys and values")
axes.axhline(two, color=EDGE, linestyle="--", label="two pools, each for its worst moment")
axes.axhline(one, color=EDGE, label="one pool")
axes.set(xlabel="step", ylabel="pages", ylim=(0, two * 1.08), xlim=(0, len(usages)))
axes.set_title("what a day needs, in one pool or in two")
for place, name in ((100, "morning"), (330, "evening")):
    axes.text(place, one * 1.05, name, ha="center", va="bottom")
figure.legend(loc="outside lower center", ncols=4, frameon=False)
Picture(figure, "02_pages", "Pages of adapters and of keys and values over a day, and the sizes of one pool and two")

# %% [markdown]
# ## Exercise
# Pages lie anywhere; the table says where. Column j of A is cut into `pieces` pages, whose ids stand in the table
# from `start + j * pieces` on; the last piece may end inside its page.
#
# - **Write** `gather(pages, table, start, rank, d_in)`: the matrix A, `[d_in, rank]`.
# - **Check**: against the adapter's own file, for all four targets, in a pool whose pages come in random order and
#   whose free pages hold NaN; and in pages that are too wide, or too narrow, to divide d_in.
# - **Resources**: each page of A is read once, no other page at all. `pages[i]` reads page i, `pages[ids]` several at
#   once; `pages.width` is the size of a page.

# %%
from slora_ref.adapter import load_adapter, read_header
from slora_ref.pager import AdapterShape
from slora_ref.store.pack import pack


class CountedPages:
    """The storage of one layer; remembers which pages were read."""

    def __init__(self, storage):
        self.storage, self.width, self.reads = storage, storage.shape[1], []

    def __getitem__(self, ids):
        self.reads += np.ravel(ids).tolist()
        return self.storage[ids]


def gather(pages, table, start, rank, d_in):
    """[d_in, rank] A, from its scattered pages."""
    raise NotImplementedError


def in_a_pool():
    """An adapter of rank 4 in a shuffled pool: for each target its pages, table, first entry, and A."""
    model = ModelConfig.from_folder(MODEL_FOLDER)
    loaded = load_adapter(read_header(ADAPTERS_FOLDER / "caesar-3", model), model, np.float32)
    pool = PagePool(PageLayout(model), 500, 1, 8, 1, poison=True, shuffle_seed=3)
    pool.open_adapter(0, AdapterShape(loaded.header.ranks, loaded.header.scales))
    pool.write_adapter(0, pack(loaded, pool.layout, np.float32))
    for target in range(4):
        yield pool.storage[1], pool.adapters.pages[0], int(pool.adapters.a_start[0, target]), loaded.a[1, target].T


def by_hand(width, d_in=12, rank=3, start=2):
    """The same for pages of any width; what no piece of A covers is NaN."""
    rng = np.random.default_rng(width)
    pieces, a = -(-d_in // width), rng.standard_normal((d_in, rank))
    storage = np.full((rank * pieces + 9, width), np.nan)
    table = rng.permutation(len(storage))
    for j, piece in np.ndindex(rank, pieces):
        part = a[piece * width : (piece + 1) * width, j]
        storage[table[start + j * pieces + piece], : len(part)] = part
    return storage, table, start, a


def check_gather(candidate):
    """Four targets of a real adapter, then pages that hold 5 and 40 numbers of a column of 12."""
    for storage, ids, start, a in [*in_a_pool(), by_hand(5), by_hand(40)]:
        pages, (d_in, rank) = CountedPages(storage), a.shape
        got = candidate(pages, ids, start, rank, d_in)
        where = f"for {d_in} numbers in pages of {pages.width}"
        assert np.array_equal(got, a), f"A is wrong {where}"
        of_a = ids[start : start + rank * -(-d_in // pages.width)].tolist()
        assert sorted(pages.reads) == sorted(of_a), f"read {len(pages.reads)} pages {where}, A has {len(of_a)}"


attempt(check_gather, gather)

# %% mistake
def without_the_table(pages, table, start, rank, d_in):
    """As if the pages lay side by side."""
    pieces = -(-d_in // pages.width)
    return pages[start : start + rank * pieces].reshape(rank, -1)[:, :d_in].T


def whole_pages_only(pages, table, start, rank, d_in):
    """As if each column filled its pages."""
    pieces = d_in // pages.width
    return pages[table[start : start + rank * pieces]].reshape(rank, d_in).T


for mistake in (without_the_table, whole_pages_only):
    refused(check_gather, mistake)

# %% solution
def solved(pages, table, start, rank, d_in):
    """All pieces at once: those of a column are neighbours in the table, and what lies beyond d_in is cut off."""
    pieces = -(-d_in // pages.width)
    return pages[table[start : start + rank * pieces]].reshape(rank, -1)[:, :d_in].T


attempt(check_gather, solved)

# %% [markdown]
# The kernels of chapter 4 do this without ever building A: each number is used where it is read.
#
# ## What the paper adds
# Paging of keys and values is vLLM's (PagedAttention, 2023). S-LoRA's step is to see that an adapter is made of
# vectors of the same length, and to put both into one pool. Its own comparison with split pools (`no-unify`) shows
# something else as well: those runs were given pools that were sized by hand at each point, up to 46 % smaller, so
# they mostly measure lost room for keys; and up to 50 adapters the split pools were as fast. The argument above needs
# no such help: one pool can never be worse, and it is better whenever the mixture changes. Here all have the same
# bytes, enough for few of 200 adapters, on a GPU with a model of Llama-7B's shape:

# %%
rows = [row for row in measured("PAPER-H200")["rows"] if row["experiment"] == "fragmentation"]
shown = []
for row in rows:
    name = f"two, {row['adapter_share']:.0%} for adapters" if row["adapter_share"] else "one"
    shown.append((name, f"{row['mean_running']:.1f}", f"{row['requests_per_s']:.1f}"))
table(["pools", "requests in a step", "requests/s"], shown)

# %% [markdown]
# The authors' code frees an adapter as soon as no running request uses it (`eviction="eager"`, as here). Keeping idle
# adapters until their pages are wanted costs nothing in one pool, since any page serves anybody; it is the default of
# this project.
