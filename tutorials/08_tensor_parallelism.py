"""Tensor parallelism: one model on several GPUs

Minutes: 30
Paper: 6
After: split a projection and its adapter over N shards, and count the bytes that each of them sends.
"""

# %% [markdown]
# ## The cost that hurts
# A model of 70 billion parameters takes 140 GB in float16 and fits no single GPU. Its matrices are cut, each of N
# *shards* holds a part of each, and all work on every token together. What they must tell each other is sent between
# two products, while nothing else happens. So a good cut is one that needs few messages, and small ones. The base
# model's cut is known (Megatron-LM, 2019). The question of this chapter: how to cut A and B so that the adapters add
# next to nothing?
#
# ## The smallest example
# Block algebra, with numbers. A matrix cut by *columns*: each shard gets the whole x and makes some of the outputs. A
# matrix cut by *rows*: each shard has some of the inputs and makes a part of the sum for all outputs.

# %%
import numpy as np
from show import Picture, attempt, refused, source, table

x = np.array([[1, 2, 3, 4]])
W = np.arange(16).reshape(4, 4)
by_columns = [x @ W[:, :2], x @ W[:, 2:]]
by_rows = [x[:, :2] @ W[:2], x[:, 2:] @ W[2:]]
print("x W               ", (x @ W).tolist())
print("cut by columns    ", [part.tolist() for part in by_columns], " side by side: no sum")
print("cut by rows       ", [part.tolist() for part in by_rows], " to be added up")
print("the sum           ", sum(by_rows).tolist())

# %% [markdown]
# Put a matrix cut by columns before one cut by rows (q, k, v before o; gate and up before down), and what the first
# leaves on a shard is what the second needs there. One sum over the shards at the end is all. It is called an
# *all-reduce*: each shard gives an array, and each gets the sum of all. Below there will also be an *all-gather*:
# each gives an array, and each gets all of them, side by side.
#
# ## Now with adapters
# The module that computes all cuts says it in a few lines of block algebra:

# %% listing
from show import Markdown

from slora_ref.tp import split

Markdown("From [slora_ref/tp/split.py](../slora_ref/tp/split.py):\n```text\n" + split.__doc__.strip() + "\n```")

# %% [markdown]
# The point is in the two paragraphs about LoRA. Whatever is sent for an adapter has as many numbers as its *rank*,
# never as the hidden size. And for o the result needs no message of its own: it is added into the partial sum that
# the base model's all-reduce sends anyway.
#
# Let us do it, with two shards as threads, for a projection that is cut by columns (q) and one cut by rows (o). A
# communicator counts what it sends.

# %%
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from slora_ref.tp.threads import thread_communicators


def on_shards(count, work):
    """Runs `work(communicator)` on a thread for each shard; the results, and the communicators with their counts."""
    communicators = thread_communicators(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, communicators)), communicators


rng = np.random.default_rng(0)
rows, hidden, rank, scale = 3, 8, 4, 0.5
x = rng.standard_normal((rows, hidden))
q, a_q, b_q = (rng.standard_normal(shape) for shape in ((hidden, hidden), (hidden, rank), (rank, hidden)))
o, a_o, b_o = (rng.standard_normal(shape) for shape in ((hidden, hidden), (hidden, rank), (rank, hidden)))


def two_projections(communicator):
    """z = xQ + s(xA)B, then zO + s(zA)B, on one shard; x is whole, the result is whole."""
    mine, my_ranks = communicator.shard.part(hidden), communicator.shard.part(rank)
    z = x @ q[:, mine]
    t = np.concatenate(communicator.all_gather(x @ a_q[:, my_ranks]), axis=1)  # xA: rank numbers a row
    z += scale * t @ b_q[:, mine]
    y = z @ o[mine]  # a part of the sum, for all columns
    t = communicator.all_reduce(z @ a_o[mine])  # zA: rank numbers a row
    y[:, mine] += scale * t @ b_o[:, mine]  # only these columns, only on this shard
    return communicator.all_reduce(y)


results, communicators = on_shards(2, two_projections)
z = x @ (q + scale * a_q @ b_q)
print("two shards = one, merged:", np.allclose(results[0], z @ (o + scale * a_o @ b_o)))
print("both shards have the same bits:", results[0].tobytes() == results[1].tobytes())
print("calls of a shard:", communicators[0].counts.calls)

# %% [markdown]
# ## The real thing
# The model's own code does the same. Of o and down, this shard's columns of the sum are what B is added to. A message
# takes time, but hardly any work; so on a GPU x A and its message can run on a branch (a second queue of work) beside x
# W: `with_message` says so, and has them come one behind the other where that is faster. A model that is not split has
# a communicator as well, which sends nothing.

# %% listing
from slora_ref.model import LlamaModel

source(LlamaModel._project, LlamaModel._from_all_shards)

# %% [markdown]
# All page tables are equal on all shards: a page id names a page of *each* shard's pool, which holds that shard's
# part of a key or of a vector of A or B. So there is one allocator, one scheduler, one decision. A rank that N does
# not divide is rounded up, with zeros. Here the toy model with adapters of several ranks, on 2 and on 4 shards. (It
# has two key heads: with four shards, two share a head, the only thing that is ever stored twice.) Pages get narrower
# with the key heads of a shard: as many pages of half the width are half the bytes.

# %% behind
from slora_ref.adapter import load_adapter, read_header
from slora_ref.batch import Batch
from slora_ref.checkpoint import cut_weights, load_checkpoint
from slora_ref.config import ModelConfig
from slora_ref.ops import NumpyOps
from slora_ref.pager import AdapterShape, PageLayout, PagePool
from slora_ref.request import Request, SamplingParams, Sequence
from slora_ref.step import Work
from slora_ref.store.pack import pack
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER

config = ModelConfig.from_folder(MODEL_FOLDER)
weights = load_checkpoint(MODEL_FOLDER, config, np.float32)
names = ("upper-case", "caesar-3", "reverse-word", "caesar-5")
headers = {name: read_header(ADAPTERS_FOLDER / name, config) for name in names}
adapters = {name: load_adapter(header, config, np.float32) for name, header in headers.items()}
ids = list(range(40, 60))


def forward(communicator, adapter=None):
    """One shard: its weights, its pool, its part of the adapter, and one step of 20 rows."""
    layout = PageLayout(config, communicator.shard)
    pool = PagePool(layout, 600, 1, 32, 1, poison=True, shuffle_seed=1)
    if adapter is not None:
        pool.open_adapter(0, AdapterShape(adapter.header.ranks, adapter.header.scales))
        pool.write_adapter(0, pack(adapter, layout, np.float32))
    params = SamplingParams(keep_logits=True)
    sequence = Sequence(0, Request(prompt_ids=tuple(ids), params=params), -1 if adapter is None else 0, seed=0)
    sequence.slot = pool.open_sequence()
    part = cut_weights(weights, config, communicator.shard)
    model = LlamaModel(config, part, NumpyOps(), pool, 32, communicator)
    return model.forward(Batch.build([Work(sequence, 0, len(ids))], pool)), layout.width, pool.usage().adapter


rows = []
for name, adapter in adapters.items():
    [(alone, width, pages)], _ = on_shards(1, partial(forward, adapter=adapter))
    [(plain, _, _)], _ = on_shards(1, forward)
    for count in (2, 4):
        results, _ = on_shards(count, partial(forward, adapter=adapter))
        equal = max(np.abs(logits - alone).max() for logits, _, _ in results) < 1e-4 * np.abs(alone).max()
        rank = int(adapter.header.ranks.max())
        rows.append((name, rank, count, f"{width} -> {results[0][1]}", f"{pages} -> {results[0][2]}", equal))
print(f"without the adapter a logit would be off by up to {np.abs(alone - plain).max():.0f}")
table(["adapter", "rank", "shards", "numbers in a page", "pages of the adapter", "equal to one shard"], rows)

# %% [markdown]
# ## Bytes, counted against the formula
# In an attention block, for n rows at rank r: q, k and v gather 3 (N-1) n r / N numbers a shard, and o's all-reduce
# sends 2 (N-1) n r / N: together 5 (N-1) n r / N, the paper's formula. The base model's all-reduce sends 2 (N-1) n H
# / N.

# %%
from slora_ref.tp.split import lora_elements

rows = []
for count in (2, 4):
    for adapter in adapters.values():
        _, communicators = on_shards(count, partial(forward, adapter=adapter))
        counts = communicators[0].counts
        counted, base = counts.lora_nbytes // 4, (sum(counts.nbytes.values()) - counts.lora_nbytes) // 4
        rank = int(adapter.header.ranks.max())
        formula = config.num_layers * lora_elements(len(ids), rank, count)
        rows.append((count, rank, f"{base:,}", f"{counted:,}", f"{formula:,}", f"{counted / base:.1%}"))
header = ["shards", "rank", "base model, numbers sent", "adapter, counted", "adapter, formula", "more than the base"]
table(header, rows)

# %% [markdown]
# The toy's hidden size is 128, so a rank of 16 is a lot. At the size of a 70B model, H = 8192, it is 5r / 2H of the
# base model's attention: 2 % at rank 64.
#
# ## The picture
# Who holds what, for three shards. Above, a projection that is cut by columns; below, one that is cut by rows.

# %% picture
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from show import DARK, EDGE, LIGHT, MIDDLE

figure = Figure(figsize=(9.5, 4.4), layout="constrained")
axes = figure.subplots()
axes.set_axis_off()
axes.set(xlim=(0, 19.5), ylim=(0.3, 9.2))
colours = (DARK, MIDDLE, LIGHT)


def block(left, middle, width, height, cut, label):
    """A matrix as a rectangle, cut into three by columns or by rows, or whole."""
    bottom = middle - height / 2
    for i, colour in enumerate(colours if cut else ("white",)):
        if cut == "rows":
            low = bottom + (2 - i) * height / 3
            axes.broken_barh([(left, width)], (low, height / 3), facecolor=colour, edgecolor=EDGE)
        else:
            part = width / 3 if cut else width
            axes.broken_barh([(left + i * part, part)], (bottom, height), facecolor=colour, edgecolor=EDGE)
    axes.text(left + width / 2, bottom - 0.15, label, ha="center", va="top", fontsize=9)


def word(left, middle, text):
    """Something between the matrices."""
    axes.text(left, middle, text, ha="center", va="center", fontsize=9)


for middle, cut in ((7, "columns"), (2.4, "rows")):
    block(0.2, middle, 2.4, 0.8, "columns" if cut == "rows" else "", "z (n × H)" if cut == "rows" else "x (n × H)")
    word(3.0, middle, "×")
    block(3.4, middle, 2.4, 2.4, cut, "W (H × H)")
    word(6.2, middle, "+")
    block(6.6, middle, 2.4, 0.8, "columns" if cut == "rows" else "", "z" if cut == "rows" else "x")
    word(9.4, middle, "×")
    block(9.8, middle, 0.9, 2.4, cut, "A (H × r)")
    word(12.1, middle, "all-gather\nn × r\n→" if cut == "columns" else "all-reduce\nn × r\n→")
    word(13.2, middle, "×")
    block(13.6, middle, 2.4, 0.6, "columns", "B (r × H)")
    result = "each shard has\nits columns" if cut == "columns" else "all-reduce\nn × H\n(the base's own)"
    word(17.9, middle, result)
axes.text(0.2, 8.8, "cut by columns (q, k, v, gate, up)", fontsize=10, fontweight="bold")
axes.text(0.2, 4.2, "cut by rows (o, down)", fontsize=10, fontweight="bold")
figure.legend(
    handles=[Patch(facecolor=c, edgecolor=EDGE, label=f"on shard {i}") for i, c in enumerate(colours)]
    + [Patch(facecolor="white", edgecolor=EDGE, label="whole, on every shard")],
    loc="outside lower center",
    ncols=4,
    frameon=False,
)
Picture(figure, "08_shards", "How W, A and B are cut over three shards, and the messages between them")

# %% [markdown]
# ## Exercise
# - **Write** `adapter_part(a, b, by_rows, shard)`: the blocks of A `[d_in, r]` and B `[r, d_out]` that a shard holds
#   (`shard.part(n)` is its slice of n things, if they divide by `shard.count`), for a projection that is cut by rows
#   or by columns. A rank need not divide: it is rounded up, and the columns that are too many are zeros.
# - **Check**: with the messages of the picture, the result is that of one shard, on 1, 2, 3 and 4 shards, at ranks 4
#   and 5. As in the server, all shards have blocks of one shape.
# - **Resources**: no number is stored twice: over all shards, as many as A and B have, and the zeros.

# %%
import itertools

from slora_ref.tp import Shard


def adapter_part(a, b, by_rows, shard):
    """This shard's (A, B)."""
    raise NotImplementedError


def check_adapter_part(candidate):
    """Both kinds of projection, of 12 inputs and 24 outputs."""
    rng = np.random.default_rng(6)
    x, w = rng.standard_normal((3, 12)), rng.standard_normal((12, 24))

    def project(communicator, a, b, by_rows):
        shard = communicator.shard
        a_part, b_part = candidate(a, b, by_rows, shard)
        inputs, outputs = shard.part(12), shard.part(24)
        if by_rows:
            y = x[:, inputs] @ w[inputs]
            y[:, outputs] += communicator.all_reduce(x[:, inputs] @ a_part) @ b_part
            y = communicator.all_reduce(y)
        else:
            t = np.concatenate(communicator.all_gather(x @ a_part), axis=1)[:, : len(b)]
            y = np.concatenate(communicator.all_gather(x @ w[:, outputs] + t @ b_part), axis=1)
        return y

    for rank, count, by_rows in itertools.product((4, 5), (1, 2, 3, 4), (False, True)):
        a, b = rng.standard_normal((12, rank)), rng.standard_normal((rank, 24))
        where = f"at rank {rank} on {count} shards, cut by {'rows' if by_rows else 'columns'}"
        parts = [candidate(a, b, by_rows, Shard(index, count)) for index in range(count)]
        assert len({(a_part.shape, b_part.shape) for a_part, b_part in parts}) == 1, f"blocks of several shapes {where}"
        held, zeros = sum(part.size for pair in parts for part in pair), 0 if by_rows else 12 * (-rank % count)
        assert held == a.size + b.size + zeros, f"{held} numbers are held {where}, {a.size + b.size + zeros} are enough"
        results, _ = on_shards(count, partial(project, a=a, b=b, by_rows=by_rows))
        assert all(np.allclose(y, x @ (w + a @ b)) for y in results), f"wrong {where}"


attempt(check_adapter_part, adapter_part)

# %% mistake
def whole_a_everywhere(a, b, by_rows, shard):
    """Every shard has all of A, so that xA needs no message."""
    return a, b[:, shard.part(b.shape[1])]


def as_if_ranks_divide(a, b, by_rows, shard):
    """So many columns a shard, and what is left over is nobody's."""
    each = a.shape[1] // shard.count
    a_part = a[shard.part(len(a))] if by_rows else a[:, shard.index * each : (shard.index + 1) * each]
    return a_part, b[:, shard.part(b.shape[1])]


for mistake in (whole_a_everywhere, as_if_ranks_divide):
    refused(check_adapter_part, mistake)

# %% solution
def solved(a, b, by_rows, shard):
    """B by columns in both cases; A along its rank, or with the rows of W."""
    if by_rows:
        a_part = a[shard.part(len(a))]
    else:
        rounded = np.pad(a, ((0, 0), (0, -a.shape[1] % shard.count)))
        a_part = rounded[:, shard.part(rounded.shape[1])]
    return a_part, b[:, shard.part(b.shape[1])]


attempt(check_adapter_part, solved)

# %% [markdown]
# ## What the paper adds
# This cut is the paper's section 6, and its count of bytes is right: next to nothing. But messages cost time even
# when they are small, and there are more of them: q, k and v are gathered one by one in the authors' code (here
# together), and o's all-reduce comes on top, in each layer. One bar of the paper's figure 8, from the authors' script
# (chapter 9 has all of them, and replays them):

# %%
from slora_ref.paper.theirs import table as theirs

bar = next(row for row in theirs("fig8_tensor_parallel") if (row["gpus"], row["n"]) == ("4", "100"))
whole, silent, alone = (float(bar[name]) for name in ("slora", "without_lora_communication", "base_only"))
print(f"{bar['model']} on {bar['gpus']} {bar['gpu']}, {bar['n']} adapters: {whole} requests/s")
print(f"without the adapters' messages: {silent} requests/s, so these cost {1 - whole / silent:.0%}")
print(f"the base model alone: {alone} requests/s, so adapters cost {1 - whole / alone:.0%} in all")

# %% [markdown]
# Their code also needs a number of shards that is a power of two and ranks that it divides; rounding a rank up, with
# zeros, does away with both.
#
# And measured here, on two GPUs: a decode step of two larger models, whole, without LoRA's messages, and of the base
# model alone.

# %%
from show import measured

found = {(row["model"], row["shards"], row["adapters"]): row for row in measured("SHARDS-H200")["rows"]}
for model in dict.fromkeys(model for model, _, _ in found):
    alone, base, whole = found[model, 1, 64], found[model, 2, 0], found[model, 2, 64]
    print(f"\n{model}, {whole['batch']} requests over {whole['adapters']} adapters of rank {whole['rank']}")
    one, two = alone["step_ms"], whole["step_ms"]
    print(f"  one GPU {one:.2f} ms, two {two:.2f} ms: {one / two:.2f} x")
    silent, kernels = whole["kernels_without_lora_communication_ms"], whole["kernels_ms"]
    print(f"  kernels on two: {kernels:.2f} ms, without the adapters' messages {silent:.2f} ms, ", end="")
    print(f"of the base model {base['kernels_ms']:.2f} ms")
