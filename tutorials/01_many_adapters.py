"""One adapter, many adapters

Minutes: 20
Paper: 4.1, 7.5
After: say what an adapter costs in bytes and FLOPs, merged and on the fly, and when merging wins.
"""

# %% [markdown]
# ## The cost that hurts
# A LoRA adapter changes a weight matrix W by a product of two thin ones: W + sAB, with A of `[d_in, r]` and B of `[r,
# d_out]`. The usual advice is to *merge*: compute W + sAB once and serve it like any model, at no extra cost a token.
# For one adapter there is nothing better. For many, each needs its own copy of W. Here is what that means for a model
# in the shape of Llama-7B, with rank 8 on the four projections of attention.

# %%
import numpy as np
from show import Picture, attempt, measured, refused, source, table

from slora_ref.config import TARGETS
from slora_ref.config.presets import preset

llama_7b = preset("llama-7b")
HALF = 2  # bytes of a float16
ATTENTION = TARGETS[:4]


def model_bytes(config):
    """Bytes of all weights in float16."""
    layer = sum(d_in * d_out for d_in, d_out in map(config.target_shape, TARGETS)) + 2 * config.hidden_size
    return HALF * (config.num_layers * layer + (2 * config.vocab_size + 1) * config.hidden_size)


def adapter_bytes(config, rank, targets=ATTENTION):
    """Bytes of the As and Bs of one adapter in float16."""
    return HALF * config.num_layers * sum(rank * sum(config.target_shape(target)) for target in targets)


base, small = model_bytes(llama_7b), adapter_bytes(llama_7b, 8)
print(f"the model: {base / 1e9:.1f} GB; an adapter of rank 8: {small / 1e6:.1f} MB, {small / base:.2%} of it")
for count in (1, 5, 100, 2000):
    print(f"{count:5} adapters: merged {count * base / 1e9:9,.1f} GB, apart {(base + count * small) / 1e9:6.1f} GB")

# %% [markdown]
# Two thousand adapters are 34 GB. They lie in main memory; the GPU needs those of the running batch only.
#
# ## The smallest example
# The whole idea is that a product may be bracketed in another way: x(W + sAB) = xW + s(xA)B. The right side never
# makes the large matrix AB. Three inputs, two outputs, rank 1, and numbers that can be checked by hand:

# %%
x = np.array([[1, 0, 2]])
W = np.array([[1, 2], [3, 4], [5, 6]])
A, B, s = np.array([[1], [0], [1]]), np.array([[10, 20]]), 2
print("merged weights W + sAB:", (W + s * A @ B).tolist())
print("x (W + sAB)    =", (x @ (W + s * A @ B)).tolist())
print("xW             =", (x @ W).tolist())
print("xA             =", (x @ A).tolist(), "  one number for each rank: this is all that passes through the adapter")
print("xW + s (xA) B  =", (x @ W + s * (x @ A) @ B).tolist())

# %% [markdown]
# ## What it costs
# For one row, xW takes 2 · d_in · d_out operations, and (xA)B takes 2 · r · (d_in + d_out). While tokens are
# generated, though, the time goes into *reading* weights: every weight is read from memory to be used for a few rows.
# There W is read once for the whole batch, whoever its rows belong to, and each adapter once for its rows.

# %%
d_in, d_out = llama_7b.target_shape("q_proj")
rows = []
for rank in (8, 16, 32, 64, 128):
    flops = 2 * rank * (d_in + d_out) / (2 * d_in * d_out)
    read = rank * (d_in + d_out) / (d_in * d_out)
    rows.append((rank, f"{flops:.2%}", f"{read:.2%}", f"{32 * read:.1%}"))
table(["rank", "FLOPs beside xW", "bytes, 32 rows of one adapter", "bytes, 32 rows of 32 adapters"], rows)

# %% [markdown]
# The last column is the honest one: with 32 different adapters in a batch the small matrices are read 32 times as
# often, and at rank 64 they are as many bytes as W itself. Low rank is cheap, not free, and the kernels of the paper
# are about reading those bytes and no others. (In the whole model it is less: the feed-forward weights have no
# adapter here.)
#
# ## The code
# The dense reference merges; the server never does. `lora_shrink` computes t = xA for all targets that share an
# input, `lora_expand` adds s · tB. Both go through the segments of a step: neighbouring rows of one adapter.

# %% listing
from slora_ref.ops import NumpyOps

source(NumpyOps.lora_expand)

# %% [markdown]
# The two agree. A text under an adapter, through the server with its pages and through the plain merged model:

# %%
from slora_ref import Engine, SamplingParams
from slora_ref.adapter import load_adapter, read_header
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config import ModelConfig
from slora_ref.reference import Reference
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER

toy = ModelConfig.from_folder(MODEL_FOLDER)
weights = load_checkpoint(MODEL_FOLDER, toy, np.float32)
header = read_header(ADAPTERS_FOLDER / "caesar-3", toy)
merged = Reference(toy, weights, load_adapter(header, toy, np.float32), np.float64)
engine = Engine.from_pretrained(MODEL_FOLDER)
engine.add_adapter("caesar-3", ADAPTERS_FOLDER / "caesar-3")
[answer] = engine.generate(["serve="], SamplingParams(max_tokens=8, keep_logits=True), "caesar-3")
served = np.stack(answer.logits)
dense = merged.logits([*answer.prompt_ids, *answer.token_ids][:-1])
plain = Reference(toy, weights, None, np.float64).logits([*answer.prompt_ids, *answer.token_ids][:-1])
print("served:", answer.text)
print("served = merged:", bool(np.abs(served - dense).max() < 1e-4))
print(f"served - base model: up to {np.abs(served - plain).max():.1f}, so the adapter is really there")

# %% [markdown]
# ## Merging on the fly, and what it does to the weights
# There is a way in between: keep one copy, add sAB when an adapter's turn comes and subtract it afterwards. Its first
# fault is that requests of other adapters wait. Its second is quieter: in float16 what was added is not what is
# subtracted, since each sum is rounded. After some switches the base model is another model.

# %%
rng = np.random.default_rng(0)
size, rank = 256, 8
pristine = (rng.standard_normal((size, size)) * size**-0.5).astype(np.float16)
adapters = [
    (rng.standard_normal((size, rank)) * 0.05, rng.standard_normal((rank, size)) * 0.05) for _ in range(5)
]
deltas = [(2 * a @ b).astype(np.float16) for a, b in adapters]
drifting = pristine.copy()
for switch in range(1, 1001):
    delta = deltas[switch % len(deltas)]
    drifting += delta
    drifting -= delta
    if switch in (1, 10, 100, 1000):
        error = np.sqrt(np.mean((drifting.astype(float) - pristine) ** 2))
        size_of_delta = np.sqrt(np.mean(np.square(deltas, dtype=float)))
        changed = np.mean(drifting != pristine)
        print(f"{switch:5} switches: {changed:.0%} of the weights changed, error {error / size_of_delta:.1%} of sAB")

# %% [markdown]
# ## The picture: when merging wins
# Bytes that one decode step must move for 64 rows that belong to n adapters. Merged copies: each adapter's rows need
# a pass over their own model. Merged in turn: a pass for each adapter, and each switch reads and writes the four
# projections. On the fly: one pass, plus n adapters. With a single adapter merging wins, by exactly the adapter's
# bytes. From two on it loses by whole models.

# %% picture
from matplotlib.figure import Figure
from show import DARK, EDGE, MIDDLE

counts = np.array([1, 2, 4, 8, 16, 32, 64])
projections = HALF * llama_7b.num_layers * sum(d_in * d_out for d_in, d_out in map(llama_7b.target_shape, ATTENTION))
lines = {
    "merged copies: n passes": (counts * base, MIDDLE, "s-"),
    "merged in turn: n passes, n switches": (counts * base + counts * (counts > 1) * 2 * projections, EDGE, "^--"),
    "on the fly, rank 64": (base + counts * adapter_bytes(llama_7b, 64), DARK, "o:"),
    "on the fly, rank 8": (base + counts * small, DARK, "o-"),
}
figure = Figure(figsize=(7, 4), layout="constrained")
axes = figure.subplots()
for name, (read, colour, style) in lines.items():
    axes.plot(counts, read / 1e9, style, color=colour, label=name)
axes.set(xscale="log", yscale="log", xlabel="different adapters among 64 rows", ylabel="GB read and written in a step")
axes.set_xticks(counts, map(str, counts))
axes.set_yticks([10, 20, 50, 100, 200, 500, 1000], ["10", "20", "50", "100", "200", "500", "1000"])
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.legend()
axes.set_title("Llama-7B, float16: what a decode step moves")
Picture(figure, "01_many_adapters", "Bytes moved in a decode step against the number of adapters in the batch")

# %% [markdown]
# A GPU holds 64 copies of a 7B model in no case, so the upper lines are also a fiction of memory. And they assume
# that requests of all adapters are there at the same time: if all traffic goes to one adapter, merging is right.
#
# Nor are bytes all that counts. In the authors' own results (chapter 9) two merged copies side by side, each in a
# server of its own, get more done than one, and more than S-LoRA with any number. So none of them was reading all
# the time: there were pauses, which a second server could fill. The lines say where things go when n grows, not
# where two programs cross.
#
# ## Exercise
# - **Write** `forward(x, W, adapters, which)`: y for a batch in which row i uses `adapters[which[i]]`, a triple (A,
#   B, s), or none where `which[i]` is -1.
# - **Check**: against the merged model, row by row.
# - **Resources**: W is read once, each adapter that occurs once and no other; no more operations than 2 · d_in ·
#   d_out a row, and 2 · r · (d_in + d_out) a row with an adapter.
#
# The matrices count what is done with them: only `rows @ matrix` is allowed, and each row costs, whatever is in it.

# %%
class Counted:
    """A matrix that can only stand on the right of a product, and counts its reads and the operations."""

    __array_ufunc__ = None  # NumPy leaves the product to __rmatmul__

    def __init__(self, array):
        self.array, self.reads, self.flops = array, 0, 0

    def __rmatmul__(self, rows):
        self.reads += 1
        self.flops += 2 * len(rows) * self.array.size
        return rows @ self.array


def forward(x, W, adapters, which):
    """[rows, d_out] y = xW + s(xA)B, each row with its own adapter."""
    raise NotImplementedError


def check_forward(candidate):
    """Ten rows, four adapters of several ranks, one of them unused."""
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((10, 12)), rng.standard_normal((12, 7))
    plain = [(rng.standard_normal((12, r)), rng.standard_normal((r, 7)), 0.5 * r) for r in (1, 2, 5, 3)]
    which = np.array([2, 0, -1, 2, 1, 0, 2, -1, 1, 2])
    W, adapters = Counted(weight), [(Counted(a), Counted(b), s) for a, b, s in plain]
    y = candidate(x, W, adapters, which)
    for row, adapter in enumerate(which):
        merged = weight if adapter < 0 else weight + plain[adapter][2] * plain[adapter][0] @ plain[adapter][1]
        assert np.allclose(y[row], x[row] @ merged), f"row {row} is wrong"
    assert W.reads == 1, f"W was read {W.reads} times"
    allowed = 2 * len(x) * weight.size
    assert W.flops <= allowed, f"{W.flops} operations with W, {allowed} are enough"
    for number, (a, b, _) in enumerate(adapters):
        assert a.reads == b.reads == (number in which), f"adapter {number}: read {a.reads} and {b.reads} times"
        allowed = 2 * np.count_nonzero(which == number) * (a.array.size + b.array.size)
        assert a.flops + b.flops <= allowed, f"adapter {number}: {a.flops + b.flops} operations, {allowed} are enough"


attempt(check_forward, forward)

# %% mistake
def row_by_row(x, W, adapters, which):
    """Right, and slow: W is read for each row."""
    y = np.concatenate([x[i : i + 1] @ W for i in range(len(x))])
    for i, number in enumerate(which):
        if number >= 0:
            a, b, s = adapters[number]
            y[i] += s * (x[i : i + 1] @ a @ b)[0]
    return y


def takes_w_out(x, W, adapters, which):
    """One read: W comes out as what it makes of a unit matrix, put below the rows; then merging, as ever."""
    both = np.concatenate([x, np.eye(x.shape[1])]) @ W
    y, weight = both[: len(x)], both[len(x) :]
    for number in set(which.tolist()) - {-1}:
        a, b, s = adapters[number]
        y[which == number] = x[which == number] @ (weight + s * a.array @ b.array)
    return y


for mistake in (row_by_row, takes_w_out):
    refused(check_forward, mistake)

# %% solution
def solved(x, W, adapters, which):
    """The base model for all rows at once; then each adapter for its own rows."""
    y = x @ W
    for number in set(which.tolist()) - {-1}:
        a, b, s = adapters[number]
        rows = np.flatnonzero(which == number)
        y[rows] += s * (x[rows] @ a @ b)
    return y


attempt(check_forward, solved)

# %% [markdown]
# In the server the rows of an adapter are made neighbours first (`arrange` in `slora_ref/batch.py`), so that a slice
# does instead of a list of rows.
#
# ## What the paper adds
# Section 4.1 makes this choice, and the rest of the paper is what it takes to keep it cheap. Section 7.5 measures it
# (figure 9) against merging in turn. The authors' raw results, requests a second on an A10G, for prompts and answers
# of up to 512 tokens:

# %%
from slora_ref.paper.theirs import table as theirs

found = {(row["n"], row["alpha"], row["mode"]): row["512x512"] for row in theirs("fig9_merge_a10g")}
rows = []
for name, alpha in (("equal shares", "1"), ("one gets most", "0.1")):
    rows += [(n, name, found[n, alpha, "slora"], found[n, alpha, "merge"]) for n in ("1", "2", "5")]
table(["adapters", "requests", "on the fly", "merged in turn"], rows)

# %% [markdown]
# With one adapter merging wins, with five it does half as much. The paper says that uneven shares hurt merging; its
# raw results show the opposite, as the picture above would: where one adapter gets most of the requests, there is
# less to switch. And so it comes out in this project, whose merging engine is `slora_ref/baselines/merge.py`, for 96
# requests at once to a model of Llama-7B's shape:

# %%
rows = [row for row in measured("PAPER-H200")["rows"] if row["experiment"] == "fig9"]
shown = [(row["adapters"], row["system"], f"{row['requests_per_s']:.1f}", f"{row['mean_running']:.0f}") for row in rows]
table(["adapters", "system (slora: on the fly)", "requests/s", "requests in a step"], shown)
