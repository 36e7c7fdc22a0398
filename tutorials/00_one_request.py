"""One request through the system

Minutes: 15
Paper: 3, 4.1
After: say which file does what to a request, from its text to its answer.
"""

# %% [markdown]
# ## The cost that hurts
# A base model that was fine-tuned for a thousand customers is a thousand models. Stored one by one they do not fit;
# run one by one they waste the GPU, since each of them has too few requests to fill a batch. LoRA (Hu et al., 2021)
# makes the first half small: a fine-tune is a pair of thin matrices A and B beside each weight W, so that y = xW +
# s(xA)B. S-LoRA makes the second half small as well: requests of *different* fine-tunes run in *one* batch of *one*
# base model.
#
# The project brings a toy model: a Llama that knows letters, and an adapter for each of some thirty tasks. The base
# model repeats a word; with the adapter `upper-case` it shouts it. How large are they?

# %%
import math

from safetensors import safe_open
from show import Picture, attempt, refused, source

from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER, TASKS


def numbers(path):
    """How many numbers a safetensors file holds, read from its header alone."""
    with safe_open(path, "numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in list(file.keys()))


base = numbers(MODEL_FOLDER / "model.safetensors")
adapters = {name: numbers(ADAPTERS_FOLDER / name / "adapter_model.safetensors") for name in TASKS}
print(f"base model: {base:,} numbers")
print(f"upper-case: {adapters['upper-case']:,} numbers, {adapters['upper-case'] / base:.1%} of the base model")
print(f"{len(TASKS)} tasks as merged models: {len(TASKS) * base:,} numbers")
print(f"one base model and {len(TASKS)} adapters: {base + sum(adapters.values()):,} numbers")

# %% [markdown]
# ## The parts
# A server is a handful of objects, and `slora_ref/engine/build.py` puts them together. Here we take the parts one by
# one and drive them by hand, with a pool of only 96 pages, so that every page can be seen.

# %%
from slora_ref import EngineConfig, SamplingParams
from slora_ref.batch import Batch, arrange
from slora_ref.engine.build import build_parts
from slora_ref.engine.inputs import sampling_of
from slora_ref.request import FinishReason, Request, Sequence

scheduler, prefetcher, executor, clock, model_config, tokenizer = build_parts(
    MODEL_FOLDER, EngineConfig(pool_pages=96, max_length=32, loading="inline")
)
pool, store = scheduler.pool, prefetcher.store
print(f"{model_config.num_layers} layers, hidden {model_config.hidden_size}, {model_config.num_kv_heads} key heads")
print(f"the pool: {pool.num_pages} pages of {pool.layout.width} numbers in each layer, {pool.free_pages} free")

# %% [markdown]
# ### Step 1: an adapter gets a name (`store/`, `adapter/`)
# Registering reads the configuration and the header of the weights file: ranks, shapes, scale. No weight is read. So
# a thousand names cost next to nothing, and whatever cannot be served exactly is refused here and not in the middle
# of an answer.

# %%
version = store.add("shout", ADAPTERS_FOLDER / "upper-case")
print(f"'shout' is adapter {version.adapter_id}, it will take {version.pages} pages, {store.host_bytes} bytes are read")
print("rank of each target, by layer:", version.header.ranks.tolist())

# %% [markdown]
# ### Step 2: a text becomes a request (`tokenizer/`, `request.py`)
# The text becomes tokens, here a begin token and one token a letter. A `Request` never changes; a `Sequence` is that
# request on its way: its tokens so far, and `computed`, how many of them have a key and a value in the pool.

# %%
prompt = tokenizer.encode("garden=")
request = Request(prompt_ids=tuple(prompt), params=SamplingParams(max_tokens=12), adapter="shout")
sequence = Sequence(number=0, request=request, adapter_id=version.adapter_id, seed=0)
print("tokens:", sequence.tokens)
print(f"computed: {sequence.computed}; at most {sequence.peak_tokens} tokens will ever be in the pool")

# %% [markdown]
# ### Step 3: it waits, unless it can never fit (`scheduler/`)
# The scheduler refuses at once what could not run even alone. Everything else waits, in the order of arrival.

# %%
scheduler.add(sequence)
print(f"waiting: {len(scheduler.waiting)}, running: {len(scheduler.running)}")

# %% [markdown]
# ### Step 4: its adapter comes into the pool (`prefetch/`, `pager/`)
# A request enters a step only when its adapter is resident. The first look finds it missing and begins to load it:
# pages are taken from the same free list that keys and values use. With `loading="inline"` its file is read and
# copied on the spot, so that this page is the same in every run; by default both happen beside the steps, and the
# other requests go on meanwhile.

# %%
step, _ = scheduler.schedule(clock.now())
print(f"first look: {step.rows} rows to compute, pages: {pool.usage()}")
prefetcher.poll()
step, _ = scheduler.schedule(clock.now())
print(f"second look: {step.rows} rows to compute, running: {len(scheduler.running)}")

# %% [markdown]
# ### Step 5: the step becomes integer arrays (`step.py`, `batch.py`)
# All that the model needs to know of a step is a few arrays of integers: one entry a row (a token), and the stretches
# of rows that share an adapter (`segments`) or a sequence (`spans`). Each new token gets two pages, one for its key
# and one for its value.

# %%
work = arrange(step.work)
batch = Batch.build(work, pool)
for name in ("token_ids", "positions", "k_pages", "v_pages"):
    print(f"{name:10}", getattr(batch, name).tolist())
segments = batch.segments
for adapter, start, length in zip(segments.adapter, segments.start, segments.length, strict=True):
    print(f"segment: the adapter in slot {adapter} has {length} rows, from row {start} on")

# %% [markdown]
# ### Step 6: the model runs (`model.py`, `ops/`, `rope.py`)
# A layer's attention. `_project` is xW + s(xA)B: one matrix product for all rows, and beside it each row's own
# adapter, read from the pool's pages ([chapter 1](01_many_adapters.md)). Keys and values are written to and read from
# the same pages ([chapter 3](03_paged_attention.md)). `communicator` is for a model that is split over several
# workers ([chapter 8](08_tensor_parallelism.md)); this one is whole.

# %% listing
from slora_ref.model import LlamaModel

source(LlamaModel._attention)

# %% [markdown]
# ### Step 7: logits become a token (`executor/`, `sampler.py`)
# The executor hides *where* a step runs. Only the last row of the prompt asks for a token. A step in which a prompt
# is computed, all of its rows at once, is called *prefill*.

# %%
scheduler.commit(step)
result = executor.start(batch, sampling_of([item.sequence for item in work if item.samples])).read()
sequence.tokens.append(int(result.tokens[0]))
print(f"token {sequence.tokens[-1]} is {tokenizer.decode(sequence.output_ids)!r}; pages: {pool.usage()}")

# %% [markdown]
# ### Step 8: again, until it ends (`engine/loop.py`)
# From now on each step computes one row, the token that was just made: *decode*. (A *decode step* is one in which all
# requests are so far.) The whole of serving is this loop. At the end the pages of keys and values are free again; the
# adapter's stay, idle, until somebody wants them.

# %%
from slora_ref.pager.census import page_owners

history = [page_owners(pool)]
while sequence.tokens[-1] not in model_config.eos_token_ids:
    step, _ = scheduler.schedule(clock.now())
    work = arrange(step.work)
    batch = Batch.build(work, pool)
    scheduler.commit(step)
    result = executor.start(batch, sampling_of([item.sequence for item in work if item.samples])).read()
    sequence.tokens.append(int(result.tokens[0]))
    history.append(page_owners(pool))
    print(f"step {len(history)}: {tokenizer.decode(sequence.output_ids)!r:10} {pool.usage()}")
scheduler.finish(sequence, FinishReason.STOP, clock.now())
history.append(page_owners(pool))
print(f"the end: {pool.usage()}, adapters resident: {prefetcher.resident}")

# %% [markdown]
# ## The invariants
# Every stateful part can be asked to check itself. The most important rule of the pool is that each page has exactly
# one owner: free, a sequence's, or an adapter's. The tests call these checks after every step of thousands of random
# histories.

# %%
for part in (pool, store, prefetcher, scheduler):
    part.check()
print("all parts agree")

# %% [markdown]
# `Engine` is the same loop with many requests at once. The answer is the same, and a second adapter answers
# differently.

# %%
from slora_ref import Engine

engine = Engine.from_pretrained(MODEL_FOLDER)
for task in ("upper-case", "reverse-word"):
    engine.add_adapter(task, ADAPTERS_FOLDER / task)
for answer in engine.generate(["garden="] * 3, adapters=["upper-case", "reverse-word", None]):
    print(f"{answer.adapter!s:13} {answer.text}")
assert engine.generate(["garden="], adapters="upper-case")[0].text == tokenizer.decode(sequence.output_ids)

# %% listing
from slora_ref.engine.loop import EngineLoop

source(EngineLoop.step)

# %% [markdown]
# ## The picture
# One line a step, one place a page. The adapter is loaded once; each step adds two pages for its new token; at the
# end only the adapter is left.

# %% picture
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from show import DARK, EDGE, LIGHT, MIDDLE

from slora_ref.pager.census import FREE, KV

figure = Figure(figsize=(9, 3.4), layout="constrained")
axes = figure.subplots()
for line, owners in enumerate(history):
    for page, owner in enumerate(owners.tolist()):
        colour = LIGHT if owner == FREE else DARK if owner == KV else MIDDLE
        axes.broken_barh([(page, 0.92)], (line + 0.54, 0.86), facecolor=colour)
axes.set(xlim=(0, pool.num_pages), ylim=(len(history) + 0.5, 0.5), xlabel="page", ylabel="step")
axes.set_yticks(range(1, len(history) + 1), [*map(str, range(1, len(history))), "end"])
axes.set_title("who owns each page of the pool, step by step")
colours = {"adapter weights": MIDDLE, "keys and values": DARK, "free": LIGHT}
figure.legend(
    handles=[Patch(facecolor=colour, edgecolor=EDGE, label=name) for name, colour in colours.items()],
    loc="outside lower center",
    ncols=3,
    frameon=False,
)
Picture(figure, "00_one_request", "The pages of a small pool while one request runs: adapter, keys and values, free")

# %% [markdown]
# ## Exercise
# - **Write** `smallest_pool(adapter_pages, prompt_tokens, max_tokens)`: the fewest pages with which a request is
#   accepted. A token takes two pages. Mind the last token: it is an answer, but is it ever read?
# - **Check**: a pool of that size takes the request, a pool one page smaller refuses it.
# - **Resources**: arithmetic alone; no engine, no loop.

# %%
from show import time_limit

from slora_ref.errors import RequestError


def smallest_pool(adapter_pages, prompt_tokens, max_tokens):
    """The fewest pages of a pool that can hold the request to its end."""
    raise NotImplementedError


def accepts(pages, task, word, max_tokens):
    """Whether a pool of so many pages takes the request."""
    engine = Engine.from_pretrained(MODEL_FOLDER, EngineConfig(pool_pages=pages))
    engine.add_adapter(task, ADAPTERS_FOLDER / task)
    try:
        engine.generate([f"{word}="], SamplingParams(max_tokens=max_tokens), task)
    except RequestError:
        return False
    return True


def check_smallest_pool(candidate):
    """Three requests, each with just enough pages and with one page less; then one that no search gets through."""
    for task, word, max_tokens in (("upper-case", "sun", 1), ("upper-case", "garden", 9), ("reverse-word", "tree", 5)):
        tokens = len(tokenizer.encode(f"{word}="))
        pages = candidate(store_pages[task], tokens, max_tokens)
        assert accepts(pages, task, word, max_tokens), f"{pages} pages are too few for {word}"
        assert not accepts(pages - 1, task, word, max_tokens), f"{pages - 1} pages would do for {word}"
    with time_limit(1):
        many = candidate(10**15, 7, 5)
    assert many == 10**15 + candidate(0, 7, 5), "an adapter's pages count once"


store_pages = {"upper-case": version.pages, "reverse-word": store.add("back", ADAPTERS_FOLDER / "reverse-word").pages}
attempt(check_smallest_pool, smallest_pool)

# %% mistake
def counts_the_last_token(adapter_pages, prompt_tokens, max_tokens):
    """Two pages for every token."""
    return adapter_pages + 2 * (prompt_tokens + max_tokens)


refused(check_smallest_pool, counts_the_last_token)

# %% solution
def solved(adapter_pages, prompt_tokens, max_tokens):
    """The last token of the answer is never fed back, so it needs no key and no value."""
    return adapter_pages + 2 * (prompt_tokens + max_tokens - 1)


attempt(check_smallest_pool, solved)

# %% [markdown]
# ## What the paper adds
# Nothing in these eight steps is about *one* adapter: the segments of step 5 may be as many as there are rows
# ([chapter 1](01_many_adapters.md)). The paper is about making that cheap: pages for adapters and for keys and values
# alike (5.1, [chapter 2](02_pages.md)), kernels that read scattered pages at each row's own rank (5.3, [chapter
# 4](04_heterogeneous_batching.md)), loads that hide behind steps (5.2, [chapter 6](06_thousands_of_adapters.md)),
# which request comes next (4.2 and 4.3, [chapter 7](07_which_request_next.md)), and the same on several GPUs (6,
# [chapter 8](08_tensor_parallelism.md)). [Chapter 9](09_the_evaluation.md) asks what came of it.
