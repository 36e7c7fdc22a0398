"""Which request next: abort, clusters, fair shares

Minutes: 30
Paper: 4.2, 4.3, B
After: choose a policy for a promise, prove whom to serve when not all can be, and say what clustering buys.
"""

# %% [markdown]
# ## The cost that hurts
# When more requests arrive than can be served, a queue grows, and with it everybody's wait. Served in order of
# arrival, soon *each* request waits too long: the machine is busy all the time, and nobody is content. Which request
# comes next costs nothing to change, and changes that.
#
# ## The smallest example
# One request can be served each second, two arrive each second, and an answer is worth something only if it begins
# within 3 seconds. After ten seconds, how many were in time?

# %%
from show import Picture, attempt, refused, source, table


def in_time(newest_first):
    """How many of 20 requests start within 3 s."""
    waiting, good = [], 0
    for second in range(10):
        waiting += [second, second]
        chosen = waiting.pop(-1 if newest_first else 0)
        good += second - chosen <= 3
    return good


print("oldest first:", in_time(newest_first=False), "of 20 in time, 10 could be")
print("newest first:", in_time(newest_first=True), "of 20 in time")

# %% [markdown]
# ## The data structure
# A policy sees who waits, who runs and what time it is. It answers with an order, and with those who are to be
# dropped. It never admits: the scheduler takes the candidates in that order until one does not fit. So a policy is a
# few lines, knows no pages, and its order is also its promise about starvation.

# %% listing
from slora_ref.policy import FCFS, LCFS, AdapterClusters, EarlyAbort, FairShare, Ordering, Policy

source(Ordering, Policy)

# %% [markdown]
# ## Overload, at size
# The real scheduler, without a model (`tutorials/bare.py`), and more arrivals than it can serve. `FCFS` is first
# come, first served; `LCFS` last come, first served; `EarlyAbort` the paper's. The limit for the first token is 6 s,
# as in the paper; *satisfaction* is its reward, 1 - (wait / 6 s)² up to the limit and 0 beyond.

# %%
import numpy as np
from bare import bare_engine, serve

from slora_ref.metrics import percentile
from slora_ref.workload import SyntheticTrace, original_trace

LIMIT = 6.0


def step_seconds(batch):
    """Reading the weights, and some work for each row."""
    return 0.030 + 0.0005 * len(batch.token_ids)


def waits(completions):
    """Seconds to the first token; infinite for those who were dropped before."""
    return np.array([np.inf if c.first_token_at is None else c.first_token_at - c.arrival for c in completions])


trace = original_trace(SyntheticTrace(adapters=0, rate=8.0, duration=60, prompt=(4, 60), output=(4, 120)))
rows, waited = [], {}
for policy in (FCFS(), LCFS(), EarlyAbort(LIMIT)):
    engine = bare_engine(8000, step_seconds, policy, max_running=16)
    completions, _ = serve(engine, trace)
    name, wait = type(policy).__name__, waits(completions)
    waited[name] = wait
    reward = np.where(wait < LIMIT, 1 - np.square(np.minimum(wait, LIMIT) / LIMIT), 0)
    served = wait[np.isfinite(wait)]
    rows.append(
        (
            name,
            f"{np.mean(wait < LIMIT):.0%}",
            f"{reward.mean():.2f}",
            f"{percentile(served, 50):.1f}",
            f"{percentile(served, 99):.1f}",
            int(np.isinf(wait).sum()),
        )
    )
table(["policy", "first token in time", "satisfaction", "wait p50, s", "p99, s", "dropped"], rows)

# %% [markdown]
# FCFS is fair, and after half a minute of no use to anybody. LCFS serves the great majority in time and lets the rest
# wait to the end. Early abort drops those who would be late anyway, so their work need not be done at all. Its
# satisfaction is below that of LCFS: whenever the queue shrinks for a moment it takes the oldest first again, who are
# then served just in time.
#
# ## The picture
# One point a request: when it came, and how long it waited for its first token.

# %% picture
from matplotlib.figure import Figure
from show import DARK, EDGE, MIDDLE

figure = Figure(figsize=(10, 3.6), layout="constrained")
came = np.array([ask.time for ask in sorted(trace, key=lambda ask: ask.time)])
for axes, (name, wait) in zip(figure.subplots(1, 3, sharey=True), waited.items(), strict=True):
    there = np.isfinite(wait)
    axes.plot(came[there], wait[there], ".", color=DARK, markersize=4, label="served")
    axes.plot(came[~there], np.full((~there).sum(), -1.5), "|", color=MIDDLE, label="dropped")
    axes.axhline(LIMIT, color=EDGE, linestyle="--", label="limit")
    axes.set(title=name, xlabel="arrival, s")
axes.legend(loc="upper right")
figure.axes[0].set_ylabel("wait for the first token, s")
Picture(figure, "07_overload", "Waits under overload: rising with FCFS, split with LCFS, bounded with early abort")

# %% listing
source(EarlyAbort.order)

# %% [markdown]
# ## Why the newest: Theorem B.1
# Let r(x) be the reward for a first token after x seconds. Two assumptions: later is never better (r falls), and each
# further second costs at least as much as the one before (r is concave). Requests came at a₁ < a₂ < ... < aₙ; after
# that there are l ≤ n times at which one can start. **Then nothing earns more than serving the l latest, in order of
# arrival.**
#
# *Which.* Suppose somebody serves i and leaves out k, who came later. Give i's time t to k: k has waited less, so
# r(t - aₖ) ≥ r(t - aᵢ). Again and again, until the latest are served.
#
# *In which order.* Take two of them, i before k, and two times s < t. In order they wait s - aᵢ and t - aₖ; in
# reverse s - aₖ and t - aᵢ. Both pairs have the same sum, and in reverse one wait is the shortest of the four and the
# other the longest. A concave function prefers the middle: r(s - aᵢ) + r(t - aₖ) ≥ r(s - aₖ) + r(t - aᵢ). So swap
# until in order. ∎
#
# A proof that was followed may still have a hole. So all choices and orders, for random requests and times:

# %%
import itertools


def best_of_all(arrivals, times, reward):
    """The most that any choice of requests in any order earns."""
    plans = itertools.permutations(arrivals, len(times))
    return max(sum(reward(t - a) for t, a in zip(times, plan, strict=True)) for plan in plans)


def theorem(arrivals, times, reward):
    """What the latest in order of arrival earn."""
    return sum(reward(t - a) for t, a in zip(times, sorted(arrivals)[-len(times) :], strict=True))


def smooth(x):
    """Falling and concave everywhere, also below zero."""
    return 1 - (x / LIMIT) ** 2


def cut_off(x):
    """The reward that is really used: never below zero, so not concave at the limit."""
    return max(0.0, 1 - (x / LIMIT) ** 2)


rng = np.random.default_rng(0)
holds = {smooth: 0, cut_off: 0}
for _ in range(300):
    arrivals = np.sort(rng.uniform(0, 8, 5)).tolist()
    times = (8 + np.sort(rng.uniform(0, 4, 3))).tolist()
    for reward in holds:
        holds[reward] += theorem(arrivals, times, reward) >= best_of_all(arrivals, times, reward) - 1e-12
for reward, count in holds.items():
    print(f"{reward.__name__:8}: the theorem's plan is the best in {count} of 300 cases")

# %% [markdown]
# With the reward cut off at zero, the theorem is false: it may be right to give up somebody who is nearly lost for
# somebody who is not. Its smallest counterexample: requests that came 5 s and 0 s ago, times now and in 5 s.

# %%
arrivals, times = [-5.0, 0.0], [0.0, 5.0]
print(f"in order of arrival: {theorem(arrivals, times, cut_off):.2f}")
print(f"the best plan:       {best_of_all(arrivals, times, cut_off):.2f}, the newer one at once; the older one is lost")

# %% [markdown]
# To drop those who are past the limit does not make the theorem true: here nobody is. And the theorem knows all
# arrivals and all times before it begins, which a server does not. `EarlyAbort` is a rule of thumb made from it: it
# takes the theorem's *whom*, the newest, one at a time, since it cannot know how many there will be time for, and so
# gives up the theorem's *order* among them. That it pays is measured (above, and against the authors' numbers in
# the [results](../slora_ref/paper/results/README.md)), not proved.
#
# ## Clusters
# A request of an adapter that is not in the batch brings pages of weights along, which are then missing for keys and
# values: fewer requests fit. If the next ones are taken from adapters that run already, the batch grows.
# `AdapterClusters` lets at most d adapters run, until somebody has waited for too long. Here 250 requests of 32
# adapters wait at once (an evening's batch job), and patience is not at stake:

# %%
from slora_ref.workload import Arrival

rng = np.random.default_rng(0)
drawn = zip(rng.integers(0, 32, 250), rng.integers(4, 60, 250), rng.integers(4, 120, 250), strict=True)
job = [Arrival(time=0.0, adapter=int(a), prompt=int(p), output=int(o)) for a, p, o in drawn]
rows = []
for d in (None, 1, 2, 4, 8):
    policy = FCFS() if d is None else AdapterClusters(d, patience=1e9)
    engine = bare_engine(3500, step_seconds, policy, max_running=64, eviction="eager")
    _, seen = serve(engine, job, lambda engine: (len(engine.scheduler.running), engine.pool.usage().adapter))
    running, adapter = np.mean(seen, axis=0)
    share, rate = adapter / engine.pool.num_pages, len(job) / engine.clock.now()
    rows.append(("FCFS" if d is None else f"clusters, d = {d}", f"{running:.1f}", f"{share:.0%}", f"{rate:.2f}"))
table(["policy", "requests in a step", "of the pool: adapters", "requests/s"], rows)

# %% [markdown]
# Half of the pool was adapters, and with clusters it is a quarter. But a single adapter has too few requests to fill
# the batch. And where requests trickle in one by one, there is nothing to choose from, and clustering can only delay.
#
# ## Fair shares
# One adapter sends ten times as many requests as each of the others. First come, first served gives it ten times the
# service, and the others its wait. `FairShare` counts the tokens that each adapter was given, and the lowest count
# comes next (virtual token counters, 2024).

# %%
rng = np.random.default_rng(1)
flood = [
    Arrival(time=float(t), adapter=adapter, prompt=20, output=30)
    for adapter, rate in ((0, 20.0), (1, 2.0), (2, 2.0), (3, 2.0))
    for t in np.cumsum(rng.exponential(1 / rate, int(20 * rate)))
]
rows = []
for policy in (FCFS(), FairShare()):
    engine = bare_engine(4000, step_seconds, policy, max_running=16)
    completions, _ = serve(engine, flood)
    for adapter in ("user-0", "user-1", "user-2"):
        own = [done for done in completions if done.adapter == adapter]
        early = sum(len(done.token_ids) for done in own if done.finished_at < 20)
        rows.append((type(policy).__name__, adapter, len(own), early, f"{percentile(waits(own), 50):.1f}"))
table(["policy", "adapter", "requests", "tokens in the first 20 s", "wait p50, s"], rows)

# %% [markdown]
# ## Exercise
# - **Write** `plan(arrivals, times)` for the theorem: given arrival times in any order and sorted times to start,
#   return a list of pairs (time, arrival) that earns the most, for any reward that falls and is concave.
# - **Check**: against all choices and orders, for three rewards; then 200,000 waiting requests.
# - **Resources**: O(n log n), no search: three seconds for the large one.

# %%
from show import time_limit


def plan(arrivals, times):
    """Pairs (time, arrival)."""
    raise NotImplementedError


def check_plan(candidate):
    """A hundred random cases, and a large one."""
    rng = np.random.default_rng(4)
    rewards = (smooth, lambda x: -x, lambda x: -np.exp(x / 3))
    for _ in range(100):
        arrivals = rng.uniform(0, 8, 5).tolist()
        times = (8 + np.sort(rng.uniform(0, 4, int(rng.integers(1, 5))))).tolist()
        pairs = candidate(arrivals, times)
        assert sorted(t for t, _ in pairs) == times, "each time is used once"
        assert len({a for _, a in pairs} & set(arrivals)) == len(times), "a request is served once"
        for reward in rewards:
            earned = sum(reward(t - a) for t, a in pairs)
            assert earned >= best_of_all(arrivals, times, reward) - 1e-9, "another plan earns more"
    many, times = rng.permutation(200_000).tolist(), list(range(200_000, 300_000))
    with time_limit(3):
        pairs = candidate(many, times)
    assert sorted(pairs) == list(zip(times, range(100_000, 200_000), strict=True)), "wrong for many requests"


attempt(check_plan, plan)

# %% mistake
def newest_first(arrivals, times):
    """The right requests, in the wrong order."""
    return list(zip(times, sorted(arrivals, reverse=True)[: len(times)], strict=True))


def one_by_one(arrivals, times):
    """The theorem for one time alone, again and again: at each time the latest of those who are left."""
    waiting, pairs = list(arrivals), []
    for time in times:
        pairs.append((time, max(waiting)))
        waiting.remove(max(waiting))
    return pairs


for mistake in (newest_first, one_by_one):
    refused(check_plan, mistake)

# %% solution
def solved(arrivals, times):
    """The latest, in order of arrival."""
    return list(zip(times, sorted(arrivals)[-len(times) :], strict=True))


attempt(check_plan, solved)

# %% [markdown]
# ## What the paper adds
# Early abort (4.3) estimates two rates, arrivals and starts a round, to tell overload from calm, and uses the theorem
# in overload only. Clustering (4.2) is evaluated in its appendix. The authors' raw results say more than the text.
# For Llama-13B on an A100, by burstiness (cv; 1: arrivals as random as can be), satisfaction and throughput:

# %%
from slora_ref.paper.theirs import pair
from slora_ref.paper.theirs import table as theirs

names = [f"{policy} {what}" for what in ("sat", "thr") for policy in ("FCFS", "LCFS", "Abort")]
rows = [(row["cv"], *(row[name] for name in names)) for row in theirs("fig10_s4_a100_80_abort")]
table(["cv", *(name.replace("sat", "satisfaction").replace("thr", "requests/s") for name in names)], rows)

# %% [markdown]
# LCFS alone ties with FCFS in throughput, and in the calmest rows its satisfaction is slightly above abort's. Abort
# gains because those who are dropped leave the queue. And for clusters of d adapters among 32 (d = 32: no clusters),
# requests a second / share of first tokens in time, by popularity (alpha; 1: all alike):

# %%
measured = theirs("fig11_s4_clusters_alpha")
served = [[pair(cell)[0] for cell in list(row.values())[1:]] for row in measured]
print(f"clusters serve up to {max(max(rates) / rates[-1] - 1 for rates in served):.0%} more requests than d = 32")
table(list(measured[0]), map(dict.values, measured))

# %% [markdown]
# Throughput hardly changes, as the paper says, but many more first tokens are in time; which d matters little.
#
# The code differs from the text (`OriginalEarlyAbort`, `OriginalAdapterClusters` in `slora_ref/policy/`): 0.5 s stand
# for the estimated prefill, both averages are cut to whole numbers, and d is a wish: what is left over is filled with
# anybody.
#
# Fair sharing is not in the paper; it comes from the same group (Sheng et al., "Fairness in Serving Large Language
# Models", 2024), whose code has it as one more queue.
