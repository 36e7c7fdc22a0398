"""Paged attention, with a cached prefix

Minutes: 20
Paper: 5.1
After: say what a row of a step may see, find its keys in scattered pages, and add up a softmax in pieces.
"""

# %% [markdown]
# ## The cost that hurts
# A token attends over all tokens before it. Generated naively, each new token means running the whole text again;
# with the keys and values of earlier tokens kept, each token is computed once. That is the difference between a
# triangle and a line:

# %%
from show import Picture, attempt, refused, source, table

prompt, answer = 200, 100
again = sum(range(prompt, prompt + answer))
print(f"rows through the model for {answer} tokens after a prompt of {prompt}:")
print(f"  computing everything again: {again:,}")
print(f"  with keys and values kept:  {prompt + answer - 1:,}")

# %% [markdown]
# What is kept must lie somewhere, and chapter 2 said where: in pages, any pages. So attention has to work when a
# sequence's past is scattered over the pool, and when only the last few of its tokens are in the step. This chapter
# is about that one formula.
#
# ## The smallest example
# Three tokens, one head of two numbers. The weights of the last token are the softmax of its query times each key.

# %%
import numpy as np

keys = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
values = np.array([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0]])
query = np.array([2.0, 0.0])
scores = keys @ query / np.sqrt(2)
weights = np.exp(scores - scores.max())
weights /= weights.sum()
print("scores: ", np.round(scores, 3).tolist())
print("weights:", np.round(weights, 3).tolist())
print("mixed:  ", np.round(weights @ values, 3).tolist())

# %% [markdown]
# Now the same with pages. Keys and values go wherever there was room, and a table remembers where. Everything else in
# the pool is NaN: if a single foreign number were touched, the answer would be NaN.

# %%
pages = np.full((10, 2), np.nan)
k_table, v_table = np.array([7, 2, 5]), np.array([1, 8, 4])
pages[k_table], pages[v_table] = keys, values
scores = pages[k_table] @ query / np.sqrt(2)
weights = np.exp(scores - scores.max())
weights /= weights.sum()
print("mixed:  ", np.round(weights @ pages[v_table], 3).tolist())

# %% [markdown]
# ## The data structure
# `sequence_pages[slot, 0, p]` is the page of the key of token p, `sequence_pages[slot, 1, p]` that of its value. A
# step names its rows by `Spans`: `length` rows of sequence `slot`, which then has `context` tokens in pages, these
# included. One rule covers everything: row i of a span sees `context - length + i + 1` tokens.
#
# - a whole prompt: length = context; row i sees i + 1 tokens, the causal triangle;
# - one generated token: length = 1; it sees everything;
# - a piece of a prompt whose beginning is in pages already (a cached prefix, a chunk of a long prompt): anything
#   between.
#
# Here is a step with one of each. The pool hands out pages in random order, on purpose.

# %%
from slora_ref.config import ModelConfig
from slora_ref.ops import NumpyOps, Spans
from slora_ref.pager import PageLayout, PagePool

model = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
pool = PagePool(PageLayout(model), 60, 3, 16, 1, dtype=np.float64, poison=True, shuffle_seed=1)
contexts = {"whole prompt": (5, 5), "generated token": (1, 9), "piece of a prompt": (3, 7)}
slots = [pool.open_sequence() for _ in contexts]
rng = np.random.default_rng(0)
past = {}
for slot, (_, context) in zip(slots, contexts.values(), strict=True):
    k_pages, v_pages = pool.extend(np.full(context, slot), np.arange(context))
    past[slot] = rng.standard_normal((2, context, model.kv_width))
    pool.storage[0, k_pages], pool.storage[0, v_pages] = past[slot]
lengths, ends = (np.array(column) for column in zip(*contexts.values(), strict=True))
spans = Spans(np.array(slots), np.cumsum(lengths) - lengths, lengths, ends)
rows = []
for name, slot, start, length, context in zip(contexts, *vars(spans).values(), strict=True):
    sees = [int(context - length + i + 1) for i in range(length)]
    where = pool.sequence_pages[slot, 0, :context].tolist()
    rows.append((name, f"{start} to {start + length - 1}", context, str(sees)[1:-1], str(where)[1:-1]))
table(["span", "rows", "context", "tokens that each row sees", "pages of the keys"], rows)

# %% [markdown]
# ## The code
# The specification: a loop over spans, each gathers its own pages. Heads are a batch axis; a model with fewer key
# heads lets several query heads share one.

# %% listing
from slora_ref.ops.attend import attend

source(NumpyOps.attention, attend)

# %% [markdown]
# Against dense attention, one row and one head at a time, and its opposite: one token more or fewer in sight is seen.

# %%
queries = rng.standard_normal((int(lengths.sum()), model.num_heads, model.head_dim))
paged = NumpyOps(np.float64).attention(queries, pool.storage[0], pool.sequence_pages, spans)


def dense(row_query, k, v, visible):
    """One row over `visible` contiguous tokens, head by head."""
    heads = []
    for head in range(model.num_heads):
        part = slice(head // 2 * model.head_dim, (head // 2 + 1) * model.head_dim)
        score = k[:visible, part] @ row_query[head] / np.sqrt(model.head_dim)
        weight = np.exp(score - score.max())
        heads.append(weight / weight.sum() @ v[:visible, part])
    return np.concatenate(heads)


worst, least = 0.0, np.inf
for slot, start, length, context in zip(*vars(spans).values(), strict=True):
    for i in range(length):
        visible = context - length + i + 1
        row = start + i
        worst = max(worst, np.abs(paged[row] - dense(queries[row], *past[slot], visible)).max())
        if visible > 1:
            least = min(least, np.abs(paged[row] - dense(queries[row], *past[slot], visible - 1)).max())
print("paged = dense, to rounding:", worst < 1e-12)
print(f"with one token fewer in sight, a row changes by at least {least:.3f}")

# %% [markdown]
# The order of the pages makes no difference, not even to the last bit: a table only says where to read. So the pool
# may hand out whatever is free, and a sequence that was thrown out and computed again answers the same.

# %%
tidy = PagePool(PageLayout(model), 60, 3, 16, 1, dtype=np.float64, poison=True)
for slot, (_, context) in zip([tidy.open_sequence() for _ in contexts], contexts.values(), strict=True):
    k_pages, v_pages = tidy.extend(np.full(context, slot), np.arange(context))
    tidy.storage[0, k_pages], tidy.storage[0, v_pages] = past[slot]
again = NumpyOps(np.float64).attention(queries, tidy.storage[0], tidy.sequence_pages, spans)
print("the same pages:", np.array_equal(tidy.sequence_pages, pool.sequence_pages))
print("the same bits: ", np.array_equal(again, paged))

# %% [markdown]
# ## The picture
# What each row of that step reads: pages of the pool from left to right, rows from top to bottom. The staircases of
# the causal mask are still there, but torn apart by the page tables.

# %% picture
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from show import DARK, EDGE, LIGHT, MIDDLE

figure = Figure(figsize=(9, 3.2), layout="constrained")
axes = figure.subplots()
axes.broken_barh([(page, 0.9) for page in range(pool.num_pages)], (-0.45, lengths.sum() - 0.1), facecolor=LIGHT)
names = []
for name, slot, start, length, context in zip(contexts, *vars(spans).values(), strict=True):
    for i in range(length):
        sees = context - length + i + 1
        for kind, colour in enumerate((DARK, MIDDLE)):
            reads = [(int(page), 0.9) for page in pool.sequence_pages[slot, kind, :sees]]
            axes.broken_barh(reads, (start + i - 0.45, 0.9), facecolor=colour)
        names.append(f"{name}, {i + 1} of {length}")
axes.set_yticks(range(len(names)), names)
axes.set(xlim=(-0.2, pool.num_pages), ylim=(len(names) - 0.4, -0.6), xlabel="page of the pool")
axes.set_title("which pages a row reads")
figure.legend(
    handles=[
        Patch(facecolor=DARK, label="a key"),
        Patch(facecolor=MIDDLE, label="a value"),
        Patch(facecolor=LIGHT, edgecolor=EDGE, label="not read by this row"),
    ],
    loc="outside lower center",
    ncols=3,
    frameon=False,
)
Picture(figure, "03_paged_attention", "The pages that each row of a step reads: keys, values, and all others untouched")

# %% [markdown]
# ## A softmax in pieces
# A GPU cannot hold the scores of a long context where it computes with them, and it shares one context out among many
# workers. But the softmax needs the sum over all of them, and to be safe against overflow the largest score first.
# The way out: keep the sum *relative to the largest score so far*, and when a larger one appears, rescale what was
# added.
#
# $m' = \max(m, s)$, then $\text{total}' = \text{total} \cdot e^{m - m'} + e^{s - m'}$, and the mixed values likewise.

# %%
largest, total, mixed = -np.inf, 0.0, np.zeros(2)
for score, value in zip((1.0, 3.0, 2.0), values, strict=True):
    new = max(largest, score)
    rescale = np.exp(largest - new)
    total = total * rescale + np.exp(score - new)
    mixed = mixed * rescale + np.exp(score - new) * value
    largest = new
    print(f"score {score}: largest {largest}, total {total:.3f}, mixed so far {np.round(mixed / total, 3).tolist()}")

# %% [markdown]
# Two parts of a context that were done apart are put together by the same rule, each with its largest score and its
# total. Here the first two tokens and the third, by two workers who know nothing of each other:

# %%
parts = []
for seen, found in (((1.0, 3.0), values[:2]), ((2.0,), values[2:])):
    weights = np.exp(np.array(seen) - max(seen))
    parts.append((max(seen), weights.sum(), weights @ found))
most = max(part[0] for part in parts)
total = sum(total * np.exp(largest - most) for largest, total, _ in parts)
mixed = sum(mixed * np.exp(largest - most) for largest, _, mixed in parts)
print(f"largest {most}, total {total:.3f}, mixed {np.round(mixed / total, 3).tolist()}: as above")

# %% [markdown]
# On a GPU that is [a kernel of its own](../kernels_cu/paged_attention_merge_1_naive.cu); the next chapter tells how
# to read it.
#
# ## Exercise
# - **Write** `attend_in_chunks(query, chunks)`: attention of one query over keys and values that come in chunks, each
#   a pair `(keys, values)` of `[tokens, head_dim]`. Return `[head_dim]`.
# - **Check**: against the plain softmax, with chunks of several sizes, and with scores whose exponentials overflow,
#   or all vanish, unless they are made relative.
# - **Resources**: each chunk is given out once and wiped when the next one is taken. A context of 20,000 tokens must
#   not take more memory than a few chunks.

# %%
import tracemalloc


def attend_in_chunks(query, chunks):
    """softmax(query K^T / sqrt(head_dim)) V over all chunks."""
    raise NotImplementedError


def wiped(keys, values, size):
    """Chunks that turn to NaN as soon as the next one is taken."""
    for start in range(0, len(keys), size):
        chunk = keys[start : start + size].copy(), values[start : start + size].copy()
        yield chunk
        for part in chunk:
            part.fill(np.nan)


def measured(candidate, query, chunks):
    """What a candidate returns, and the most memory that it took, in kB."""
    tracemalloc.start()
    try:
        with np.errstate(over="raise"):
            return candidate(query, chunks), tracemalloc.get_traced_memory()[1] / 1e3
    finally:
        tracemalloc.stop()


def check_attend_in_chunks(candidate):
    """Contexts of 1 to 20,000 tokens in chunks of 1 to 16; `side` is what is added to each score."""
    rng = np.random.default_rng(2)
    cases = (1, 1, 1, 0), (40, 16, 1, 0), (33, 8, 3e3, 0), (33, 8, 1, -2e3), (20_000, 16, 1, 0)
    for context, size, scale, side in cases:
        keys, values = rng.standard_normal((2, context, 8))
        query = rng.standard_normal(8) * scale
        keys += side * np.sqrt(8) * query / (query @ query)
        score = keys @ query / np.sqrt(8)
        weight = np.exp(score - score.max())
        expected = weight / weight.sum() @ values
        got, kilobytes = measured(candidate, query, wiped(keys, values, size))
        assert np.allclose(got, expected), f"wrong for {context:,} tokens in chunks of {size}, scores near {side:.0f}"
        assert kilobytes < 100, f"{context:,} tokens in chunks of {size} took more than 100 kB"


attempt(check_attend_in_chunks, attend_in_chunks)

# %% mistake
def not_relative(query, chunks):
    """Exponentials of the scores themselves."""
    total, mixed = 0.0, np.zeros(len(query))
    for keys, values in chunks:
        weights = np.exp(keys @ query / np.sqrt(len(query)))
        total, mixed = total + weights.sum(), mixed + weights @ values
    return mixed / total


def begins_at_zero(query, chunks):
    """Relative to the largest score so far, or to 0 while all scores are negative."""
    largest, total, mixed = 0.0, 0.0, np.zeros(len(query))
    for keys, values in chunks:
        scores = keys @ query / np.sqrt(len(query))
        new = max(largest, scores.max())
        weights, rescale = np.exp(scores - new), np.exp(largest - new)
        total, mixed, largest = total * rescale + weights.sum(), mixed * rescale + weights @ values, new
    with np.errstate(invalid="ignore"):
        return mixed / total


def keeps_all(query, chunks):
    """The plain softmax, over copies of all chunks."""
    copies = [(keys.copy(), values.copy()) for keys, values in chunks]
    keys, values = (np.concatenate(part) for part in zip(*copies, strict=True))
    scores = keys @ query / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ values


for mistake in (not_relative, begins_at_zero, keeps_all):
    refused(check_attend_in_chunks, mistake)

# %% solution
def solved(query, chunks):
    """A chunk at a time; what was added is rescaled when a larger score appears."""
    largest, total, mixed = -np.inf, 0.0, np.zeros(len(query))
    for keys, values in chunks:
        scores = keys @ query / np.sqrt(len(query))
        new = max(largest, scores.max())
        weights, rescale = np.exp(scores - new), np.exp(largest - new)
        total = total * rescale + weights.sum()
        mixed = mixed * rescale + weights @ values
        largest = new
    return mixed / total


attempt(check_attend_in_chunks, solved)

# %% [markdown]
# ## What the paper adds
# Little, and it says so: paged attention is vLLM's, and S-LoRA takes its kernels from LightLLM. What S-LoRA needs of
# it is the unit: a key is one page, so that a page can as well be a column of A. (vLLM's blocks hold 16 tokens, which
# makes tables shorter and reads longer; a page of one token never has an unused rest.) The rule for what a row sees
# is what makes the next two chapters possible: if prompts, pieces of prompts and single tokens are one formula, they
# can share a step.
