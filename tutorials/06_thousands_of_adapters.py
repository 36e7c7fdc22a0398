"""Thousands of adapters: host memory, prefetch, eviction

Minutes: 25
Paper: 5.1, 5.2
After: say where two thousand adapters lie, how a load hides behind steps, and who leaves when pages are wanted.
"""

# %% [markdown]
# ## The cost that hurts
# Two thousand adapters do not fit on a GPU, and a request whose adapter is not there must wait until it has crossed
# the link from host memory. How long is that? For a model in the shape of Llama-7B, over a link of 25 GB/s, against a
# decode step that reads 13.5 GB of weights at 2 TB/s:

# %%
from show import Picture, attempt, measured, refused, source, table

layers, hidden, half, link, memory = 32, 4096, 2, 25e9, 2e12
step_ms = 1e3 * 13.5e9 / memory
rows = []
for rank in (8, 16, 64):
    size = layers * 4 * 2 * rank * hidden * half
    load_ms = 1e3 * size / link
    rows.append((rank, f"{size / 1e6:.1f}", f"{2000 * size / 1e9:.0f}", f"{load_ms:.2f}", f"{load_ms / step_ms:.2f}"))
table(["rank on q, k, v, o", "MB each", "GB for 2,000", "ms over the link", "in decode steps"], rows)

# %% [markdown]
# A load is about as long as a step or shorter. If everybody waits for it, it costs a step; if it happens *beside* a
# step, it costs nothing, except to the one who waits for it. And if it has begun before his turn comes, it costs
# nobody anything.
#
# ## The smallest example
# Three requests of three adapters. A step takes 20 ms, a load takes 20 to 40 ms (a page 0.1 ms), and one request runs
# already, without an adapter. Three ways: steps wait for loads (`blocking_loads`, as in the authors' code); only the
# request waits; loads begin ahead of the turn (`prefetch`). The scheduler is the real one, the model is left out.

# %%
import numpy as np
from bare import Recorder, bare_engine, serve

from slora_ref.workload import Arrival

PAGE_SECONDS = 1e-4
asks = [Arrival(time=0.0, adapter=-1, prompt=4, output=20)]
asks += [Arrival(time=0.03, adapter=adapter, prompt=4, output=4) for adapter in (16, 25, 17)]
modes = {
    "steps wait": {"blocking_loads": True},
    "the request waits": {},
    "loaded ahead": {"prefetch": 8},
}
runs, rows = {}, []
for name, options in modes.items():
    engine = bare_engine(2000, lambda batch: 0.02, seconds_a_page=PAGE_SECONDS, max_running=2, **options)
    recorder = Recorder(engine)
    completions, _ = serve(engine, asks)
    runs[name] = recorder.steps, engine.prefetcher.loader.log, engine.clock.now()
    first = [1e3 * (done.first_token_at - done.arrival) for done in completions[1:]]
    pause = 1e3 * max(np.diff([start for start, work in recorder.steps if 0 in work]))
    rows.append((name, *(f"{wait:.0f}" for wait in first), f"{pause:.0f}", f"{1e3 * engine.clock.now():.0f}"))
header = ["loads", "first token of A, ms", "of B", "of C", "longest pause of the other, ms", "all done, ms"]
table(header, rows)

# %% [markdown]
# ## The picture
# Steps above, loads below. On the left nothing happens while a load is under way. In the middle the steps go on, but
# each load begins only at its request's turn. On the right the link works ahead.

# %% picture
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from show import DARK, EDGE, MIDDLE

figure = Figure(figsize=(10, 3), layout="constrained")
panels = figure.subplots(1, 3, sharey=True, sharex=True)
for axes, (name, (steps, loads, end)) in zip(panels, runs.items(), strict=True):
    for start, work in steps:
        for number in work:
            place = min(number, 1)
            axes.broken_barh([(1e3 * start, 18)], (1.1 + 0.45 * place, 0.4), facecolor=DARK)
            label = "-ABC"[number]
            axes.text(1e3 * start + 9, 1.3 + 0.45 * place, label, color="white", ha="center", va="center", fontsize=7)
    for (_, start, stop), label in zip(loads, "ABC", strict=True):
        axes.broken_barh([(1e3 * start, 1e3 * (stop - start) - 1)], (0.1, 0.7), facecolor=MIDDLE, edgecolor=EDGE)
        axes.text(1e3 * (start + stop) / 2, 0.45, label, ha="center", va="center", fontsize=8)
    axes.axvline(1e3 * end, color=EDGE, linestyle=":")
    axes.set(title=f"{name}: {1e3 * end:.0f} ms", xlabel="time, ms", ylim=(0, 2.1))
    axes.set_yticks([0.45, 1.5], ["loads", "steps"])
figure.legend(
    handles=[Patch(facecolor=DARK, label="in a step (- has no adapter)"), Patch(facecolor=MIDDLE, label="a load")],
    loc="outside lower center",
    ncols=2,
    frameon=False,
)
Picture(figure, "06_loads", "Loads and steps in time: one after the other, side by side, and ahead of their turn")

# %% [markdown]
# ## Three tiers
# - **Disk**: the folders as PEFT wrote them. Registering reads a configuration and a header.
# - **Host memory**: one arena; each adapter once, packed in the order of the pool's pages, so that a load is one
#   copy. Beyond its budget the least recently used make way and are read again.
# - **The pool**: adapters that are pinned (somebody runs), loading, or idle.
#
# An idle adapter's pages belong to nobody in particular. They are taken when they are wanted, by keys as well as by
# other adapters, so a cache of adapters costs nothing: there is no size to choose.

# %% listing
from slora_ref.prefetch import Prefetcher
from slora_ref.prefetch.residency import Residency

source(Prefetcher.prefetch, Residency.make_room, Residency._victims)

# %% [markdown]
# The invariants are in `check`: an adapter is idle or pinned or loading, never two of them; pages by tables, by books
# and by the allocator agree. The tests ask after every step.
#
# ## Who leaves?
# `eager` is the paper: an adapter leaves with its last running request. `lru` keeps it until its pages are wanted,
# and the least recently used goes first. `cost` looks at how often it was wanted lately, and what its pages would
# save. 300 adapters with the skewed popularity of real use (a tenth of the names gets half of the requests), in a
# pool for a few dozen:

# %%
from slora_ref.workload import SyntheticTrace, original_trace


def step_seconds(batch):
    """Reading the weights, and some work for each row."""
    return 0.02 + 0.0002 * len(batch.token_ids)


crowd = original_trace(SyntheticTrace(adapters=300, rate=25.0, duration=20, alpha=0.3, prompt=(4, 20), output=(4, 30)))
share = np.mean([ask.adapter < 30 for ask in crowd])
print(f"{len(crowd)} requests, {len({ask.adapter for ask in crowd})} adapters; {share:.0%} go to a tenth of the names")
rows = []
for eviction, prefetch in (("eager", 0), ("lru", 0), ("cost", 0), ("lru", 16), ("cost", 16)):
    options = {"eviction": eviction, "prefetch": prefetch, "max_running": 10}
    engine = bare_engine(6000, step_seconds, seconds_a_page=PAGE_SECONDS, **options)
    completions, resident = serve(engine, crowd, lambda engine: engine.prefetcher.resident)
    waits = [1e3 * (done.first_token_at - done.arrival) for done in completions]
    counts = engine.prefetcher.counts
    rows.append(
        (
            eviction,
            prefetch,
            counts.loads,
            f"{counts.hits / len(crowd):.0%}",
            f"{np.mean(resident):.0f}",
            *(f"{np.percentile(waits, percent):.0f}" for percent in (50, 99)),
        )
    )
table(["eviction", "ahead", "loads", "adapter was there", "resident", "first token p50, ms", "p99, ms"], rows)

# %% [markdown]
# Keeping the idle ones saves loads, and choosing who leaves saves more. Loading ahead saves none; it lets them happen
# before anybody waits.
#
# ## Exercise
# How good could any rule be? If all uses were known in advance, the best is to let go whoever is wanted again last
# (Belady, 1966).
#
# - **Write** `fewest_loads(uses, places)`: how many loads a sequence of uses needs at least, when `places` adapters
#   of equal size fit, at the start none is there, and each must be there when it is used.
# - **Check**: against a search of all possibilities; then long sequences: one that goes in circles, where the answer
#   is known, and one of skewed popularity, against LRU.
# - **Resources**: no search; at most a pass over the resident adapters for each load: five seconds for 200,000 uses.

# %%
from functools import cache

from show import time_limit


def fewest_loads(uses, places):
    """The fewest loads."""
    raise NotImplementedError


def by_search(uses, places):
    """All possibilities: after each use, which adapter leaves."""

    @cache
    def cost(at, resident):
        if at == len(uses):
            return 0
        if uses[at] in resident:
            return cost(at + 1, resident)
        if len(resident) < places:
            return 1 + cost(at + 1, resident | {uses[at]})
        return 1 + min(cost(at + 1, resident - {victim} | {uses[at]}) for victim in resident)

    return cost(0, frozenset())


def lru_loads(uses, places):
    """What the least recently used rule needs."""
    resident, loads = {}, 0
    for use in uses:
        loads += use not in resident
        resident.pop(use, None)
        if len(resident) == places:
            del resident[next(iter(resident))]
        resident[use] = None
    return loads


def check_fewest_loads(candidate):
    """Sixty short cases and ten of 150 uses by search, then two large ones."""
    rng = np.random.default_rng(5)
    for length, names in [(12, 5)] * 60 + [(150, 7)] * 10:
        uses, places = tuple((rng.power(0.5, length) * names).astype(int).tolist()), int(rng.integers(1, 4))
        got, best = candidate(uses, places), by_search(uses, places)
        assert got == best, f"{got} loads, not {best}, for {length} uses of {names} adapters with {places} places"
    with time_limit(5):
        circle = candidate(tuple(range(500)) * 40, 400)
        skewed = tuple((rng.power(0.3, 200_000) * 300).astype(int).tolist())
        best = candidate(skewed, 40)
    assert circle == 500 + 39 * 100, f"{circle} loads for 40 rounds of 500 adapters, of which 400 can stay"
    print(f"200,000 uses, 40 places: LRU needs {lru_loads(skewed, 40):,} loads, the best rule {best:,}")


attempt(check_fewest_loads, fewest_loads)

# %% mistake
def least_recently_used(uses, places):
    """A good rule for those who do not know the future."""
    return lru_loads(uses, places)


def looks_a_little_ahead(uses, places, ahead=12):
    """Lets go somebody whom the next few uses do not want, if there is one."""
    resident, loads = set(), 0
    for at, use in enumerate(uses):
        if use not in resident:
            loads += 1
            coming = uses[at : at + ahead]
            if len(resident) == places:
                resident.remove(max(resident, key=lambda one: coming.index(one) if one in coming else ahead))
        resident.add(use)
    return loads


for mistake in (least_recently_used, looks_a_little_ahead):
    refused(check_fewest_loads, mistake)

# %% solution
def solved(uses, places):
    """Backwards once, for the next use of each; forwards, letting go whoever is wanted last."""
    following, seen = [0] * len(uses), {}
    for at in reversed(range(len(uses))):
        following[at] = seen.get(uses[at], len(uses))
        seen[uses[at]] = at
    resident, loads = {}, 0
    for at, use in enumerate(uses):
        if use not in resident:
            loads += 1
            if len(resident) == places:
                del resident[max(resident, key=resident.__getitem__)]
        resident[use] = following[at]
    return loads


attempt(check_fewest_loads, solved)

# %% [markdown]
# A queue *is* a bit of future that is known: the scheduler hands the prefetcher the adapters that are coming, and
# those leave last, whatever their score.
#
# ## What the paper adds
# Section 5.2: while a batch decodes, look into the queue, predict the next batch, load its adapters. In the authors'
# code this is off unless asked for, no published experiment asks for it, and it runs within the loop that launches
# the steps. Every load crosses the link twice there (the whole image once for A, once for B), host memory holds each
# adapter twice, and adapters are dropped at once. The numbers of the paper were had in spite of that: a load is cheap
# beside the steps that it must hide behind. Here, once across the link, with Llama-7B's shape, all requests at once:

# %%
rows = []
for row in measured("SERVE-FEW-MANY-H200")["rows"] + measured("SERVE-10000-H200")["rows"]:
    asked = f"{row['registered']:,}", row["popularity"], f"{row['requests']:,}"
    loads = row["loads"], row["loads_ahead"], f"{row['bytes'] / 1e9:.1f}"
    times = f"{row['gb_s'] / row['link_gb_s']:.0%}", f"{row['hidden_fraction']:.1%}", f"{row['waiting_steps_p99']:.0f}"
    rows.append((*asked, *loads, *times))
header = ["registered", "popularity", "requests", "loads", "ahead", "GB", "of the link", "beside steps"]
table([*header, "steps waited, p99"], rows)

# %% [markdown]
# Uniform: all names alike; zipf: a name's share falls as one over its place. "Ahead" are loads that began before
# their request's turn; "of the link" is their rate as a part of what a plain copy reaches; "beside steps" the share
# of their time in which steps went on.
