"""The paper's evaluation, replayed

Minutes: 25
Paper: 7, A
After: replay a point of the paper on a laptop, say what holds of its claims, and what its raw numbers show besides.
"""

# %% [markdown]
# ## The cost that hurts
# The paper's numbers were measured on A10G and A100 GPUs, five minutes a point, more than a hundred points. Hardly
# any reader can repeat that, so hardly anyone asks: what if adapters were kept? What if requests joined in every
# step? But the authors published the raw results and the program that draws the requests. And scheduler, policies,
# allocator and prefetcher need no GPU. All that must be replaced is *how long a step takes*.
#
# ## The smallest example
# One point of figure 5 (one of the five that a few constants were fitted on, so it must come out right; the test is
# in the others): 600 requests of 200 adapters at two a second, on an A10G. The paper has names for its pairs of a
# model and ranks: **S1** is Llama-7B with adapters of rank 8, **S2** the same with ranks 64, 32, 16 and 8, **S4**
# Llama-13B with 64, 32 and 16. This is S2. The trace is the authors' own, number for number; the scheduler is the
# real one; a step's time comes from a formula.

# %%
import numpy as np
from show import Picture, attempt, refused, source, table

from slora_ref.paper.constants import fitted_constants
from slora_ref.paper.play import play
from slora_ref.paper.run import Run
from slora_ref.paper.theirs import number
from slora_ref.paper.theirs import table as theirs

run = Run(setting="S2", gpu="a10g", adapters=200, rate=2.0)
trace = run.arrivals()
first = trace[0]
print(f"{len(trace)} requests in {trace[-1].time:.0f} s. The first: after {first.time:.2f} s,")
print(f"for adapter {first.adapter}, with a prompt of {first.prompt} tokens and an answer of {first.output}")
ours = play(run, fitted_constants())
row = theirs("fig5_s2_a10g")[-1]
print(f"throughput: replayed {ours.throughput:.2f}, the authors' {row['S-LoRA thr']} requests/s")
print(f"latency:    replayed {ours.latency:.1f}, the authors' {row['S-LoRA lat']} s")

# %% [markdown]
# That took a second of a laptop's time instead of six minutes of a GPU's.
#
# ## The formula
# A step takes as long as the host needs to launch it or as long as the GPU needs, whichever is longer. The GPU reads
# the weights (or computes, if there are many rows), reads keys and values, and does what the adapters ask for.

# %% listing
from slora_ref.simulate.roofline import Roofline

source(Roofline.seconds, Roofline.gpu_seconds)

# %% [markdown]
# The rates are those of the data sheets times a few constants, one set for all GPUs, models and systems. They were
# fitted on five runs (those of collectives on two more), which are left out of all statistics. Nothing about
# scheduling was fitted: it is the code that it is.

# %%
import re

from slora_ref.paper.points import FITTED_RUNS
from slora_ref.simulate.roofline import Constants

for fitted in FITTED_RUNS:
    print(f"fitted on: {fitted.setting} {fitted.gpu}, {fitted.adapters} adapters, {fitted.rate:g} requests/s")
rows = []
for names, meaning in re.findall(r"^ {8}([\w, ]+): (.+(?:\n {12}.+)*)", Constants.__doc__, re.MULTILINE):
    values = ", ".join(f"{getattr(fitted_constants(), name):.3g}" for name in names.split(", "))
    rows.append((names, values, " ".join(meaning.split())))
table(["constant", "fitted", "what it is (bmm: the baseline that pads)"], rows)

# %% [markdown]
# ## Is it any good?
# A model that is close to the data proves little, if a silly one is close as well. So there are opponents. The *null
# model* knows the offered rate and one measured capacity. And three simulators are *wrong on purpose*: each leaves
# out one thing that the authors' code does. A test holds the bars; these are the committed results over all points of
# figures 5 and 6 and table 3.

# %%
from slora_ref.paper.wrong import committed

result = committed()
rows = []
for name, found in result["simulators"].items():
    errors = [found["throughput"], found["latency"]]
    cells = [f"{e[part]:.1%}" for e in errors for part in ("median", "worst")]
    right = f"{found['attainment_near']} of {found['attainment_count']}"
    rows.append((name, *cells, right, "yes" if found["passes"] else "no"))
null = result["simulators"]["right"]["null_model"]
rows.append(("null model", f"{null['median']:.1%}", f"{null['worst']:.1%}", "-", "-", "-", "-"))
header = ["simulator", "throughput, median error", "worst", "latency, median", "worst", "attainments right", "passes"]
table(header, rows)

# %% [markdown]
# ## The picture

# %% picture
from matplotlib.figure import Figure
from show import DARK, EDGE, MIDDLE

from slora_ref.paper.points import null_model
from slora_ref.paper.wrong import own_points

points = own_points()
measured = np.array([point.theirs["throughput"] for point in points])
fitted = np.array([point.run in FITTED_RUNS for point in points])
figure = Figure(figsize=(9, 4), layout="constrained")
panels = figure.subplots(1, 2, sharex=True, sharey=True)
replayed = result["simulators"]["right"]["throughput_of"]
guessed = np.array([null_model(point.run, "throughput") or np.nan for point in points])
sets = {"replayed": np.array([replayed[point.name] for point in points]), "null model": guessed}
for axes, (name, values) in zip(panels, sets.items(), strict=True):
    axes.plot([0.8, 11], [0.8, 11], color=EDGE, linewidth=1)
    colour = DARK if name == "replayed" else MIDDLE
    axes.plot(measured[~fitted], values[~fitted], "o", color=colour, markersize=4)
    axes.plot(measured[fitted], values[fitted], "x", color=colour, label="the replay was fitted on these")
    axes.legend(loc="upper left")
    axes.set(xscale="log", yscale="log", xlabel="measured by the authors, requests/s", title=name)
    axes.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
panels[0].set_ylabel("said to be, requests/s")
Picture(figure, "09_replayed", "Throughput as replayed and by the null model, against the authors' measurements")

# %% [markdown]
# ## What holds
# *The number of adapters hardly matters.* Replayed beside measured, on the A10G; the last row is a fitted one. It is
# the scheduler, not the formula, that bends the curve: each further adapter takes pages from the sequences.

# %%
rows = []
for cells in theirs("fig5_s2_a10g"):
    played = play(Run(setting="S2", gpu="a10g", adapters=int(cells["num_adapters"]), rate=2.0), fitted_constants())
    throughput, latency = cells["S-LoRA thr"], cells["S-LoRA lat"]
    rows.append((cells["num_adapters"], f"{played.throughput:.2f}", throughput, f"{played.latency:.1f}", latency))
table(["adapters", "requests/s, replayed", "measured", "latency s, replayed", "measured"], rows)

# %% [markdown]
# *Thousands of adapters fit, where merged models do not*; table 3 says so, and nothing in the raw results contradicts
# it.
#
# ## What the raw results show besides
# *Four times vLLM* is a comparison at five merged models, which leave an A100-80 almost no room for keys. With two,
# the packed models are ahead:

# %%
packed = {row["num_adapters"]: row["thr req/s"] for row in theirs("vllm_packed_s2_a100_80")}
own = {row["num_adapters"]: row["S-LoRA thr"] for row in theirs("fig5_s2_a100_80")}
names = sorted(packed | own, key=int)
rows = [(name, packed.get(name, "-"), own.get(name, "-")) for name in names]
table(["adapters (0: base model)", "vLLM-packed, requests/s", "S-LoRA, requests/s"], rows)

# %% [markdown]
# *The first adapter costs the most.* In the same table: without any, 9.64 requests a second, and 7.74 with one. A
# fifth goes to launching the LoRA kernels at all; the next 199 cost little.
#
# *Split pools are as good up to 50 adapters* there, in the authors' own files; beyond, their pools were typed
# smaller:

# %%
rows = [
    (row["num_adapters"], row["S-LoRA thr"], row["no-unify thr"], row["bmm thr"] or "-")
    for row in theirs("fig5_s2_a100_80")
]
table(["adapters", "S-LoRA", "split pools (no-unify)", "padding (bmm)"], rows)

# %% [markdown]
# *Messages between GPUs are few bytes and much time*: what the base model alone serves, without the adapters'
# messages, and with everything (figure 8). The last column is the replay's: two more constants, the latency and the
# bandwidth of a collective, were fitted on the second row.

# %%
from slora_ref.paper.page import read_rows

replayed, rows = {row.point: row.ours for row in read_rows("fig8")}, []
for row in theirs("fig8_tensor_parallel"):
    whole, silent = number(row["slora"]), number(row["without_lora_communication"])
    setting, gpu = {"30B": "S5", "70B": "S6"}[row["model"]], row["gpu"].lower()
    ours = f"{setting} {gpu} gpus={row['gpus']} n={row['n']}"
    lost = [1 - whole / silent, 1 - replayed[f"{ours} slora"] / replayed[f"{ours} no-lora-messages"]]
    name = f"{row['model']}, {row['gpus']} x {row['gpu']}, {row['n']} adapters"
    rows.append((name, row["base_only"], row["without_lora_communication"], row["slora"], *(f"{x:.0%}" for x in lost)))
table(["requests/s", "base model alone", "adapters, no messages", "all", "lost to messages", "replayed"], rows)

# %% [markdown]
# ## What if?
# The reason to have a simulator. The same setting under the options of the authors' code (new requests wait for ten
# steps, loads stop everything, adapters leave at once), of the paper's text (they join at once, all free memory is a
# pool, and each adapter's requests arrive by themselves, so it is another trace, with more requests), and of this
# project (prompts in pieces beside decoding, idle adapters stay):

# %%
rows = []
for variant in ("original", "paper", "ours"):
    played = play(Run(setting="S2", gpu="a10g", adapters=200, rate=2.0, variant=variant), fitted_constants())
    seconds = f"{played.latency:.1f}", f"{played.first_token:.1f}"
    rows.append((variant, f"{played.throughput:.2f}", *seconds, f"{played.attainment:.0%}"))
table(["options", "requests/s", "latency, s", "first token, s", "first token within 6 s"], rows)

# %% [markdown]
# Or ask about requests of your own. An `Engine` is what it was in chapter 0; only its executor is another, which
# reads the shape of a batch and moves the clock. So many requests at once, each of another adapter, with a prompt of
# 200 tokens and an answer of 100:

# %%
from slora_ref import Engine, SamplingParams
from slora_ref.paper.systems import system_of

rows = []
for count in (1, 8, 32):
    parts = system_of(run, fitted_constants()).build()
    engine = Engine(parts.scheduler, parts.prefetcher, parts.executor, parts.clock, parts.model_config)
    for adapter in range(count):
        engine.add_request([1] * 200, SamplingParams(max_tokens=100, ignore_eos=True), str(adapter))
    done = []
    while engine.has_work:
        done += [news.completion for news in engine.step() if news.completion]
    first, whole = (max(getattr(one, name) for one in done) for name in ("first_token_at", "finished_at"))
    rows.append((count, type(engine.executor).__name__, f"{first:.2f}", f"{whole:.2f}", f"{100 * count / whole:.0f}"))
table(["requests at once", "executor", "last first token, s", "all done, s", "tokens/s"], rows)

# %% [markdown]
# ## Exercise
# The paper says that adapters follow "a power law with exponent alpha". In the authors' program a request's adapter
# is floor(u n), with u drawn from the density alpha · u^(alpha - 1) on (0, 1).
#
# - **Write** `shares(adapters, alpha)`: the probability of each adapter, `[adapters]`, exactly.
# - **Check**: against 200,000 draws; alpha = 1 gives everyone the same share; two neighbours among 2n adapters have
#   together what one among n has, to the last digits.
# - **Resources**: a formula, no draws: it must work for ten million adapters.

# %%
def shares(adapters, alpha):
    """[adapters] the probability of each."""
    raise NotImplementedError


def check_shares(candidate):
    """Four values of alpha, and a large number of adapters."""
    rng = np.random.default_rng(7)
    for alpha in (0.1, 0.3, 0.6, 1.0):
        found, drawn = candidate(50, alpha), np.bincount((rng.power(alpha, 200_000) * 50).astype(int), minlength=50)
        spread = np.sqrt(200_000 * found * (1 - found))
        assert (np.abs(drawn - 200_000 * found) < 5 * spread).all(), f"not what is drawn for alpha = {alpha}"
        pairs = candidate(100, alpha).reshape(50, 2).sum(axis=1)
        assert np.allclose(pairs, found, rtol=1e-9, atol=0), f"not exact for alpha = {alpha}"
    assert np.allclose(candidate(8, 1.0), 1 / 8), "alpha = 1 is uniform"
    many = candidate(10_000_000, 0.3)
    assert len(many) == 10_000_000 and abs(many.sum() - 1) < 1e-9, "shares add up to 1"
    assert (many > 0).all(), "everyone has a share"
    for alpha in (0.1, 0.3, 0.6, 1.0):
        found = candidate(200, alpha)
        even = 1 / np.square(found).sum()
        print(f"alpha {alpha}: the first of 200 gets {found[0]:.1%}; as much skew as {even:.0f} equal adapters")


attempt(check_shares, shares)

# %% mistake
def zipf(adapters, alpha):
    """Another power law: the k-th adapter's share falls as 1 / k^alpha."""
    weights = np.arange(1, adapters + 1, dtype=float) ** -alpha
    return weights / weights.sum()


def density_in_the_middle(adapters, alpha):
    """Nearly right: the density in the middle of each adapter's interval, and the rest for the first."""
    found = alpha * ((np.arange(adapters) + 0.5) / adapters) ** (alpha - 1) / adapters
    found[0] = 1 - found[1:].sum()
    return found


for mistake in (zipf, density_in_the_middle):
    refused(check_shares, mistake)

# %% solution
def solved(adapters, alpha):
    """u falls below x with probability x^alpha, so the share of adapter i is a difference of two of them."""
    return np.diff(np.linspace(0, 1, adapters + 1) ** alpha)


attempt(check_shares, solved)

# %% [markdown]
# So the paper's alpha = 1, its default, is *no* skew at all.
#
# ## What the paper adds
# An evaluation whose raw data are public, down to the results that do not flatter it. That is why this chapter could
# be written. The whole comparison, all figures and tables, is `slora-ref paper all`, and its [results
# page](../slora_ref/paper/results/README.md) says how close each replay is: S-LoRA's own points well, its ablations
# less well, and the baselines (PEFT above all) only roughly.
