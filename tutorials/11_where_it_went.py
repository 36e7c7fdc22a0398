"""Where it went later

Minutes: 15
Paper: 8
After: say what production systems kept of S-LoRA, what they changed, and what a prefix cache must know of adapters.
"""

# %% [markdown]
# The paper is of November 2023. Within a year, each large server could do what it shows: many adapters in one batch,
# never merged. How they do it differs, and the differences teach as much as the paper.
#
# ## The cost that hurts
# One pool needs kernels that follow page tables. Most production systems chose *slots* instead: so many adapters in a
# batch at most, a place of the largest rank for each, reserved at the start. That is simpler and never moves
# anything, but the memory is gone whether it is used or not.
#
# ## The smallest example
# Two slots of rank 4. An adapter of rank 1 and one of rank 4 take eight columns; pages would take five. A third
# adapter of rank 1 has to wait; with pages it takes one more.

# %%
from show import Picture, attempt, refused, source, table

ranks, slots, largest = [1, 4, 1], 2, 4
print(f"slots: {slots * largest} columns reserved, {min(slots, len(ranks))} of {len(ranks)} adapters in the batch")
print(f"pages: {sum(ranks)} columns used, {len(ranks)} of {len(ranks)} adapters in the batch")

# %% [markdown]
# At the size of Llama-7B, with 32 adapters in a batch, of rank 8 or 64 on q, k, v and o: how much memory do slots
# reserve, how much do pages take, and how many tokens of context is the difference?

# %%
import numpy as np

from slora_ref.config import TARGETS
from slora_ref.config.presets import preset
from slora_ref.pager import PageLayout

layout = PageLayout(preset("llama-7b"))


def pages(rank):
    """Pages of an adapter of this rank on the four projections of attention."""
    return layout.adapter_pages(np.array([rank if target in TARGETS[:4] else 0 for target in TARGETS]))


page_gb = layout.page_bytes(2) / 1e9
rows = []
for large in (0, 2, 8, 32):
    used = (32 - large) * pages(8) + large * pages(64)
    reserved = 32 * pages(64)
    tokens = (reserved - used) // layout.token_pages(1)
    rows.append((large, f"{reserved * page_gb:.2f}", f"{used * page_gb:.2f}", f"{tokens:,}"))
table(["of 32 adapters have rank 64", "GB in slots", "GB in pages", "tokens that the difference would hold"], rows)

# %% [markdown]
# ## The picture

# %% picture
from matplotlib.figure import Figure
from show import DARK, EDGE, MIDDLE

figure = Figure(figsize=(7, 3.6), layout="constrained")
axes = figure.subplots()
share = np.arange(33)
used = ((32 - share) * pages(8) + share * pages(64)) * page_gb
reserved = np.full(33, 32 * pages(64) * page_gb)
axes.fill_between(share, used, reserved, color=MIDDLE, alpha=0.5, label="reserved and unused")
axes.plot(share, reserved, "--", color=EDGE, label="32 slots of rank 64")
axes.plot(share, used, "-", color=DARK, label="pages")
axes.set(xlabel="adapters of rank 64 among 32, the others have rank 8", ylabel="GB on the GPU")
axes.set(ylim=(0, 4.9), xlim=(0, 32))
axes.set_title("Llama-7B, float16: what 32 adapters take")
axes.legend(loc="lower right")
axes.grid(alpha=0.3)
Picture(figure, "11_slots", "Memory of 32 adapters in slots of the largest rank and in pages, by mixture of ranks")

# %% [markdown]
# ## What changed

# %% listing
systems = [
    (
        "vLLM",
        "one batch for many adapters, never merged; a cache of adapters in host memory (`max_cpu_loras`)",
        "slots: `max_loras` adapters in a batch, `max_lora_rank` columns each; keys and values in a pool "
        "of their own",
        "vLLM documentation, `vllm.config.lora` (0.11)",
    ),
    (
        "vLLM, kernels",
        "gathering by row",
        "began with Punica's CUDA kernel; replaced by Triton, since the list of compiled widths could not "
        "keep up with models; later one kernel for prompts and decoding",
        "vLLM pull requests 1804, 5036, 14685",
    ),
    (
        "vLLM, pages",
        "",
        "paged adapter weights were proposed, and changed to contiguous ones before a merge",
        "vLLM pull requests 5025, 5356",
    ),
    (
        "vLLM, shards",
        "A and B split over GPUs",
        "only half of the adapter's work is split by default; all of it with `fully_sharded_loras`",
        "vLLM documentation, `vllm.config.lora`",
    ),
    (
        "SGLang",
        "names S-LoRA and Punica as its sources; an adapter pool on the GPU, `lru` eviction, loads beside "
        "the steps (`enable_lora_overlap_loading`)",
        "`max_loras_per_batch` places; segments cut into chunks for the kernel (`csgmv`); the largest "
        "rank is fixed at the start",
        'SGLang documentation, "LoRA Serving"',
    ),
    (
        "LoRAX",
        "loads just in time without blocking others, prefetch and offload between GPU and host",
        "segments (Punica's SGMV) for prompts, row by row for decoding",
        "LoRAX README; its pull request 464",
    ),
    (
        "TensorRT-LLM",
        "a host cache and a device cache of adapters",
        "sized in adapters of the largest size; adapters over a quantised base model",
        'TensorRT-LLM documentation, "LoRA"; tensorrtllm_backend issue 559',
    ),
    (
        "dLoRA (OSDI 2024)",
        "computing beside the base model",
        "merges after all, while one adapter has most of the requests, and moves requests and adapters "
        "between replicas",
        "its abstract",
    ),
    (
        "CaraServe (2024)",
        "adapters in host memory",
        "while a load is under way, the CPU computes the adapter's part of the prompt; places requests by "
        "rank",
        "its abstract",
    ),
    (
        "Chameleon (2024)",
        "",
        "idle memory as a cache of popular adapters; several queues, so that large requests do not block "
        "small ones",
        "arXiv 2411.17741",
    ),
    (
        "LoRAServe (2025)",
        "",
        "adapters of like rank together: a batch is as slow as its largest rank",
        "arXiv 2511.22880",
    ),
]
table(["system", "kept", "changed", "source"], systems)

# %% [markdown]
# What adapters of rank 8 cost in a decode step there and here, on the same kind of GPU (vLLM was measured apart from
# this project). The bytes are the same; the kernels are not:

# %%
import json

from show import ROOT, measured

vllm = json.loads((ROOT / "slora_ref/bench/results/VLLM-H200.json").read_text(encoding="utf-8"))
print(f"{vllm['engine']}: {vllm['how'].split(': ', 1)[1].split('. ')[0]}")
ours = {(row["batch"], row["adapters"], row["mode"]): row["step_ms"] for row in measured("DECODE-H200")["rows"]}
rows = []
for row in vllm["decode"]:
    if row["batch"] == 64:
        rows.append((row["adapters"], row["step_ms"], f"{ours[64, row['adapters'], 'graph']:.2f}"))
table(["adapters among 64 requests", f"{vllm['engine']}, ms", "here, ms"], rows)

# %% [markdown]
# Three threads run through it. *Slots won over pages* where simplicity counted; what pages buy is room for contexts
# and no limit on adapters in a batch. *Fixed lists lost*: kernels for a list of ranks and widths were replaced by
# ones that take any. *Caching won over eager eviction*: nobody drops an adapter that may be wanted in a second.
#
# ## What the paper could not have: a prefix cache
# Servers now keep keys and values of prompts and reuse them for the next request that begins alike. With adapters
# there is a trap: a key is x(W + sAB), so the same text under another adapter has other keys. A cache that looks at
# the text alone answers with a stranger's context, silently. It has happened (vLLM pull request 3263: the two
# features had been merged apart). And the name is not enough either: a name that was registered anew is another
# adapter. Here each registration has a number of its own, and the number is what requests carry:

# %% listing
from slora_ref.store import AdapterStore

source(AdapterStore.replace)

# %%
from slora_ref import Engine, SamplingParams
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER

engine = Engine.from_pretrained(MODEL_FOLDER)
engine.add_adapter("mine", ADAPTERS_FOLDER / "upper-case")
first = engine.store.lookup("mine").adapter_id
before = engine.generate(["river="], SamplingParams(max_tokens=9), "mine")[0].text
engine.remove_adapter("mine")
engine.add_adapter("mine", ADAPTERS_FOLDER / "reverse-word")
after = engine.generate(["river="], SamplingParams(max_tokens=9), "mine")[0].text
print(f"'mine' was adapter {first}: {before}; now it is adapter {engine.store.lookup('mine').adapter_id}: {after}")

# %% [markdown]
# ## Exercise
# - **Write** `block_keys(tokens, adapter_id, block)`: for each full block of `block` tokens the key under which its
#   keys and values may be reused. Two blocks may have one key only if the tokens up to the block's end are the same,
#   and so is the version of the adapter (-1: the base model).
# - **Check**: shared beginnings share keys; other beginnings, other adapters, another version, tokens moved across a
#   border of blocks do not.
# - **Resources**: time and key sizes in proportion to the tokens: at most one look at each token, and a key of at
#   most 32 bytes.

# %%
class Looked(list):
    """Tokens that count how often they are looked at."""

    looks = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        Looked.looks += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        for token in super().__iter__():
            Looked.looks += 1
            yield token


def block_keys(tokens, adapter_id, block):
    """One key (bytes) for each full block."""
    raise NotImplementedError


def check_block_keys(candidate):
    """Pairs that must share, and pairs that must not."""
    text = list(range(40))
    keys = candidate(text, 3, 8)
    assert len(keys) == 5 and len(set(keys)) == 5, "one key for each full block, all different"
    assert all(isinstance(key, bytes) and len(key) <= 32 for key in keys), "keys are short bytes"
    assert candidate(text[:37], 3, 8) == keys[:4], "the same beginning shares its full blocks"
    assert candidate([*text[:20], 99, *text[21:]], 3, 8)[:2] == keys[:2], "what comes later does not matter"
    others = [
        candidate(text, 4, 8),
        candidate(text, -1, 8),
        candidate([7, *text[1:]], 3, 8),
        candidate([1, 23, *text[2:]], 3, 8),  # these differ in where one number ends and the next begins,
        candidate([12, 3, *text[2:]], 3, 8),
        candidate([1, *text[1:]], 23, 8),  # here between the adapter and the first token,
        candidate([31, *text[1:]], 2, 8),
        keys,
    ]
    assert len({key for some in others for key in some}) == 5 * len(others), "a key is shared that must not be"
    border = [candidate([*text[:7], *pair, *text[9:]], 3, 8)[1:] for pair in ((1, 23), (12, 3), (123, 3), (1, 233))]
    assert len({key for some in border for key in some}) == 4 * 4, "a key is shared across a border of blocks"
    Looked.looks = 0
    candidate(Looked(range(10_000)), 0, 16)
    assert Looked.looks <= 10_000, f"{Looked.looks} looks at 10,000 tokens"


attempt(check_block_keys, block_keys)

# %% mistake
import hashlib


def text_alone(tokens, adapter_id, block):
    """The key looks at the text, and at all of it, for each block."""
    ends = range(block, len(tokens) + 1, block)
    return [str(hash(tuple(tokens[:end]))).encode() for end in ends]


def runs_together(tokens, adapter_id, block):
    """A chain, but the numbers of one block run into those of the next: 1 and 23 are 12 and 3."""
    running, keys = hashlib.sha256(f"{adapter_id}:".encode()), []
    for start in range(0, len(tokens) // block * block, block):
        running.update(",".join(map(str, tokens[start : start + block])).encode())
        keys.append(running.digest())
    return keys


for mistake in (text_alone, runs_together):
    refused(check_block_keys, mistake)

# %% solution
def solved(tokens, adapter_id, block):
    """A chain: each key is made of the one before and of its own tokens; it begins with the adapter's version."""
    key, keys = hashlib.sha256(f"adapter {adapter_id}".encode()).digest(), []
    for start in range(0, len(tokens) // block * block, block):
        own = ",".join(map(str, tokens[start : start + block]))
        key = hashlib.sha256(key + own.encode()).digest()
        keys.append(key)
    return keys


attempt(check_block_keys, solved)

# %% [markdown]
# This project has no prefix cache: each sequence computes its own keys and values. The input that would catch a wrong
# one is in the tests all the same (`tests/README.md`).
#
# ## What the paper adds
# Looking back, its lasting part is the first sentence of its section 4: separate what can be batched from what
# cannot. One base product for everybody, and beside it small products that are read where they lie. Everything in the
# table is a way to pay less for the second half.
