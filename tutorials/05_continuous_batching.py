"""Continuous batching: who runs in the next step

Minutes: 25
Paper: 4.1, A.1
After: explain iteration-level scheduling, chunked prefill and preemption, and compute how full the pool will ever be.
"""

# %% [markdown]
# ## The cost that hurts
# Generating one token reads the whole model from memory, for one request or for sixty. So requests must share steps.
# The simplest way, *request-level* batching, takes a batch, runs it to the end, then takes the next. But answers
# differ in length, and nobody knows them in advance: the batch lasts as long as its longest answer, and the places of
# the others stand empty. The paper's PEFT baseline works so.
#
# ## The smallest example
# Two places, four requests A to D that will generate 2, 8, 3 and 5 tokens. Below, one column is a step, and the model
# is left out (`tutorials/bare.py`): scheduler, pool and page tables are the real ones. Request-level batching needs
# only a policy that offers nobody while somebody runs.

# %%
import numpy as np
from bare import Recorder, bare_engine, serve
from show import Picture, attempt, refused, source, table

from slora_ref.policy import FCFS, Ordering
from slora_ref.workload import Arrival


class RequestLevel:
    """Nobody joins before everybody has ended."""

    def order(self, waiting, running, now):
        return Ordering(() if running else waiting)


def lanes(recorder, count):
    """For each request, one mark a step: prefill, decode, or not in it."""
    steps = [work for _, work in recorder.steps]
    return ["".join("P" if step.get(i, 0) > 1 else "d" if i in step else "." for step in steps) for i in range(count)]


four = [Arrival(time=0.0, adapter=-1, prompt=4, output=output) for output in (2, 8, 3, 5)]
for policy in (RequestLevel(), FCFS()):
    engine = bare_engine(100, policy=policy, max_running=2)
    recorder = Recorder(engine)
    serve(engine, four)
    print(f"{type(policy).__name__}: {len(recorder.steps)} steps")
    for name, lane in zip("ABCD", lanes(recorder, 4), strict=True):
        print(f"  {name} {lane}")

# %% [markdown]
# `P` is a prompt (it gives the first token), `d` a token more; `FCFS` is first come, first served. With
# iteration-level scheduling (Orca, 2022) the batch is chosen anew in every step: C takes A's place at once. The same
# work, fewer steps, and nobody waits for a stranger.
#
# ## At size
# Now 120 requests with lengths as different as in life. The time of a step: 30 ms for reading the model, and half a
# millisecond for each row. (p50 is the median; p99 is what 99 of 100 stay below.)

# %%
from slora_ref.metrics import percentile
from slora_ref.workload import SyntheticTrace, original_trace


def step_seconds(batch):
    """Reading the weights, and some work for each row."""
    return 0.030 + 0.0005 * len(batch.token_ids)


def times(completions):
    """Requests a second, and percentiles of the wait for the first token and of the whole answer."""
    first = [done.first_token_at - done.arrival for done in completions]
    whole = [done.finished_at - done.arrival for done in completions]
    rate = len(completions) / max(done.finished_at for done in completions)
    return [f"{rate:.2f}"] + [f"{percentile(v, p):.2f}" for v in (first, whole) for p in (50, 99)]


trace = original_trace(SyntheticTrace(adapters=0, rate=6.0, duration=20, prompt=(4, 60), output=(4, 120)))
rows = []
for policy in (RequestLevel(), FCFS()):
    engine = bare_engine(8000, step_seconds, policy, max_running=16)
    rows.append([type(policy).__name__, *times(serve(engine, trace)[0])])
table(["policy", "requests/s", "first token p50, s", "p99, s", "answer p50, s", "p99, s"], rows)

# %% [markdown]
# ## The picture
# Twelve requests in four places, in time. On the left a batch ends when its longest answer ends.

# %% picture
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from show import DARK, MIDDLE

twelve = [Arrival(time=0.0, adapter=-1, prompt=20, output=o) for o in (6, 40, 12, 25, 8, 16, 45, 5, 30, 10, 20, 7)]
figure = Figure(figsize=(10, 3.4), layout="constrained")
panels = figure.subplots(1, 2, sharey=True, sharex=True)
for axes, policy, name in zip(panels, (RequestLevel(), FCFS()), ("request level", "iteration level"), strict=True):
    engine = bare_engine(8000, step_seconds, policy, max_running=4)
    recorder = Recorder(engine)
    serve(engine, twelve)
    ends = [start for start, _ in recorder.steps[1:]] + [engine.clock.now()]
    for (start, work), end in zip(recorder.steps, ends, strict=True):
        for number, count in work.items():
            colour = MIDDLE if count > 1 else DARK
            axes.broken_barh([(start, (end - start) * 0.85)], (number - 0.4, 0.8), facecolor=colour)
    axes.axvline(engine.clock.now(), color=DARK, linestyle=":")
    axes.set(title=f"{name}: {engine.clock.now():.1f} s", xlabel="time, s")
panels[0].set(ylabel="request", ylim=(11.6, -0.6))
figure.legend(
    handles=[Patch(facecolor=MIDDLE, label="prompt"), Patch(facecolor=DARK, label="generated tokens")],
    loc="outside lower center",
    ncols=2,
    frameon=False,
)
Picture(figure, "05_continuous_batching", "Twelve requests in four places: request-level and iteration-level batching")

# %% [markdown]
# ## The code
# A step in three parts: who is admitted, which rows they compute, whether the pages are there.

# %% listing
from slora_ref.scheduler import Scheduler

source(Scheduler.schedule, Scheduler._pick_rows)

# %% [markdown]
# ## Long prompts
# A prompt of 120 tokens makes a step as long as several. Who is being answered meanwhile sees his text stall. Three
# ways: prefill in steps of its own (the paper's); whole prompts beside decoding; prompts cut into pieces, so that no
# step has more than so many rows (chunked prefill, Sarathi 2023). What the longest pause between two tokens of a
# running answer is, and when the long prompt's own first token comes:

# %%
asks = [Arrival(time=0.0, adapter=-1, prompt=4, output=60)]
asks += [Arrival(time=0.2 + 0.1 * i, adapter=-1, prompt=120, output=2) for i in range(4)]
modes = {
    "prefill in its own steps": {"separate_prefill": True, "max_batched_tokens": 256},
    "whole prompts beside": {"chunked_prefill": False, "max_batched_tokens": 256},
    "pieces, 40 rows a step": {"max_batched_tokens": 40},
    "pieces, 20 rows a step": {"max_batched_tokens": 20},
}
rows = []
for name, options in modes.items():
    engine = bare_engine(8000, step_seconds, max_running=8, **options)
    recorder = Recorder(engine)
    completions, _ = serve(engine, asks)
    tokens = [start for start, work in recorder.steps if 0 in work]
    waits = [done.first_token_at - done.arrival for done in completions[1:]]
    rows.append((name, f"{1e3 * max(np.diff(tokens)):.0f}", f"{1e3 * max(waits):.0f}"))
table(["mode", "longest pause between tokens, ms", "longest wait for a first token, ms"], rows)

# %% [markdown]
# There is no free lunch: small pieces keep the stream smooth and make the newcomer wait. Whether a prompt is cut or
# not, every row computes the same numbers (chapter 3), so it is a choice about time alone.
#
# ## How many may run?
# Each token of each sequence needs two pages, and a sequence that runs out of pages in the middle of its answer must
# be thrown out and computed again. The cautious rule: admit only if all can run to their full length. But they do not
# reach it at the same time. In lockstep the pool is fullest just before one of them ends, so it is enough to look at
# those moments.

# %%
from slora_ref.scheduler import peak_tokens

lives = [(2, 2, 50), (30, 30, 10), (40, 40, 5)]  # (last step, tokens still to generate, tokens now)
print("sum of the full lengths:", sum(tokens - 1 + left for _, left, tokens in lives))
print("most held at any time:  ", peak_tokens(lives))

# %% listing
from slora_ref.scheduler import peak

source(peak._peak_in_lockstep)

# %% [markdown]
# That is the default (`admission="max_tokens"`): nobody is ever thrown out. The other rule (`"expected"`) counts with
# the mean length of the answers so far. It admits more, and now and then the pool is full; then the newest sequence
# is *preempted*: its pages are freed, its tokens kept, and it is computed again later. Here requests allow 100 tokens
# each and take them all, so expecting less is a mistake, and the price can be seen:

# %%
many = [Arrival(time=0.1 * i, adapter=-1, prompt=10, output=3 if i < 8 else 100) for i in range(30)]
rows = []
for admission in ("max_tokens", "expected"):
    engine = bare_engine(1200, step_seconds, max_running=30, max_batched_tokens=512, admission=admission)
    recorder = Recorder(engine)
    _, running = serve(engine, many, lambda engine: len(engine.scheduler.running))
    computed = sum(sum(work.values()) for _, work in recorder.steps)
    rows.append((admission, max(running), engine.scheduler.preemptions, computed, f"{engine.clock.now():.1f}"))
table(["admission", "most at once", "preemptions", "rows computed", "seconds"], rows)

# %% [markdown]
# Half as many rows again are computed, and yet all is done sooner: larger batches share the reading of the model. Who
# pays are those who are thrown out and begin again, some of them several times.
#
# Their answers do not change, to the bit of their sampling noise: it is a function of the request's seed and the
# token's place alone (`slora_ref/sampler.py`), so neither batch nor preemption changes what is drawn. With the toy:

# %%
from slora_ref import Engine, EngineConfig, SamplingParams
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER

how = [SamplingParams(max_tokens=24, temperature=1.0, seed=i, ignore_eos=True) for i in range(12)]
prompts = ["river=", "window=", "castle="] * 4
answers = {}
for pages in (2000, 300):
    engine = Engine.from_pretrained(
        MODEL_FOLDER, EngineConfig(pool_pages=pages, admission="expected", max_running=12, max_batched_tokens=64)
    )
    engine.add_adapter("shout", ADAPTERS_FOLDER / "upper-case")
    engine.generate(["a="], SamplingParams(max_tokens=1))  # so that it expects one token an answer
    done = engine.generate(prompts, how, "shout")
    answers[pages] = [answer.token_ids for answer in done]
    print(f"{pages} pages: {sum(answer.preemptions for answer in done)} preemptions, first answer {done[0].text!r}")
print("the same answers:", answers[2000] == answers[300])

# %% [markdown]
# ## A step ahead
# Deciding who runs takes the host some time, and reading the new tokens takes some more; meanwhile a GPU would stand
# still. But the next step can nearly always be planned without knowing the tokens: who runs, where their pages are,
# who ends by `max_tokens`. Only that an end token was drawn is seen too late. So with `async_scheduling` (vLLM's
# name; the default on a GPU) a step is started before the tokens of the one before are read, and those enter it on
# the device. Its price, on the CPU, where it can be counted:

# %%
texts = {}
for ahead in (False, True):
    engine = Engine.from_pretrained(MODEL_FOLDER, EngineConfig(async_scheduling=ahead, loading="inline"))
    recorder = Recorder(engine)
    texts[ahead] = [answer.text for answer in engine.generate(prompts, SamplingParams(max_tokens=20))]
    computed = sum(sum(work.values()) for _, work in recorder.steps)
    print(f"a step ahead: {ahead!s:5}  {len(recorder.steps)} steps, {computed} rows, {texts[ahead][:3]}")
print("the same answers:", texts[False] == texts[True])

# %% [markdown]
# One row more for each of the twelve, computed for nothing and dropped. What it buys on a GPU is in chapter 10.
#
# ## Exercise
# - **Write** `most_held(sequences)`: each sequence is a pair (tokens now, tokens still to generate). In step t = 1,
#   2, ... it holds `now - 1 + t` tokens, up to `left` steps; then it is gone. Return the most that all of them hold
#   together.
# - **Check**: against stepping through, for small ones; then one with answers of up to a billion tokens.
# - **Resources**: O(n log n) for n sequences, however long they run: 100,000 of them within three seconds.

# %%
from show import time_limit


def most_held(sequences):
    """The most tokens held at any step."""
    raise NotImplementedError


def check_most_held(candidate):
    """Two hundred random sets, step by step; then a hundred thousand long sequences."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        sequences = rng.integers(1, 30, (int(rng.integers(1, 8)), 2)).tolist()
        last = max(left for _, left in sequences)
        brute = max(sum(now - 1 + t for now, left in sequences if left >= t) for t in range(1, last + 1))
        assert candidate(sequences) == brute, f"{candidate(sequences)} instead of {brute} for {sequences}"
    long = rng.integers(1, 10**9, (100_000, 2)).tolist()
    with time_limit(3):
        most = candidate(long)
    assert most == peak_tokens([(left, left, now) for now, left in long]), "wrong for long sequences"


attempt(check_most_held, most_held)

# %% mistake
def all_at_once(sequences):
    """As if all reached their full length at the same time."""
    return sum(now - 1 + left for now, left in sequences)


def at_each_end(sequences):
    """Right, for the fullest step is the last one of somebody; but each of them looks at all the others."""
    now, left = np.array(sequences).T
    return max(int((now - 1 + end)[left >= end].sum()) for end in left)


for mistake in (all_at_once, at_each_end):
    refused(check_most_held, mistake)

# %% solution
def solved(sequences):
    """Only the last step of some sequence can be the fullest: all that end no sooner are still there."""
    most = held = 0
    for alive, (left, now) in enumerate(sorted(((left, now) for now, left in sequences), reverse=True), 1):
        held += now - 1
        most = max(most, held + alive * left)
    return most


attempt(check_most_held, solved)

# %% [markdown]
# ## What the paper adds
# Iteration-level scheduling is Orca's, the forecast of the peak LightLLM's; S-LoRA builds on both, and its policies
# only reorder the queue. Two details differ between the paper's text and its code: in the text a new request joins in
# the next step, in the code at every tenth (`join_every=10` here); and the published runs forced the output lengths
# and told the scheduler, so that its forecast was always right. With answers that end by themselves, a reservation of
# `max_tokens` wastes memory, and that is when `"expected"` earns its preemptions.
