"""Llama-7B on one GPU

Minutes: 15
Paper: 7.2
After: start a 7B model with many adapters on one GPU, and say where the time of a step goes and what it must cost.
"""

# %% [markdown]
# ## The cost that hurts
# A toy model shows that answers are right. What a server costs is decided at the size of real models, and there by
# one question: how many bytes does a step read? This chapter works it out on paper first, and then looks at what was
# measured. Nothing here needs a GPU but the commands to type.
#
# ## The smallest example
# A decode step of a 7B model in float16, for one request and for 64. The weights are read once for all, by the base
# model's matrix products (*gemm*); keys and values once for each request (*attention*), an adapter once for all of
# its requests (*lora*).

# %%
import numpy as np
from show import Picture, attempt, measured, refused, source, table

from slora_ref.bench.decode import DecodeCase, DecodeOptions
from slora_ref.bench.decode.cases import BYTES_PER_S
from slora_ref.synthetic import AdapterKind

options = DecodeOptions()


def floors(batch, adapters, tflops=700.0):
    """Milliseconds that the bytes of each part must take."""
    case = next(c for c in DecodeOptions(batches=(batch,), adapters=(adapters,)).cases())
    return {name: floor.bytes_ms for name, floor in case.floors(tflops).items() if name != "communication"}


rows = []
for batch, adapters in ((1, 1), (64, 1), (64, 64), (128, 128)):
    parts = floors(batch, adapters)
    total = sum(parts.values())
    times = (f"{ms:.2f}" for ms in (*parts.values(), total))
    rows.append((batch, adapters, *times, f"{1e3 * batch / total:,.0f}"))
table(["requests", "adapters", *(f"{name}, ms" for name in parts), "together, ms", "tokens/s at most"], rows)

# %% [markdown]
# A single request pays for all of the reading; 64 share it. Adapters of rank 8 add little, even if each request has
# its own. And keys and values grow with the context until they are the largest part.
#
# ## The code
# The floors are pure arithmetic on shapes. They assume that each byte is read once, at a fixed rate (chapter 4 says
# whence it is), and that nothing else takes time:

# %% listing
source(DecodeCase.floors)

# %%
print(f"{BYTES_PER_S / 1e12:.2f} TB/s; contexts of {options.prompt} + {options.output // 2} tokens")
print(f"adapters of rank {options.kind.ranks} on {', '.join(options.kind.targets)}")

# %% [markdown]
# ## One call instead of hundreds
# A decode step is many small kernels, and the host needs several microseconds to prepare and start each of them. If
# that takes longer than the GPU computes, the GPU waits. So a step's launches are written down when a step of its
# shape comes for the first time: all arrays lie where they lay before, and only the numbers in them differ. On a GPU
# they then become a *CUDA graph*, started by one call. The same engine on the same kernels runs here through g++,
# with the toy model (two layers), to show what there is to be started:

# %%
from collections import Counter

from slora_ref import Engine, EngineConfig, SamplingParams
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config import ModelConfig
from slora_ref.engine.build import assemble
from slora_ref.engine.devices import KernelDevice
from slora_ref.ops.host_ops import HostOps
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER

config, toy = EngineConfig(pool_pages=2000, loading="inline", max_running=8), ModelConfig.from_folder(MODEL_FOLDER)
weights = load_checkpoint(MODEL_FOLDER, toy, "float32")
engine = Engine(*assemble(toy, weights, None, KernelDevice(config, HostOps(np.float32)), config))
for task in ("upper-case", "reverse-word"):
    engine.add_adapter(task, ADAPTERS_FOLDER / task)
garden = [0, 74, 68, 85, 71, 72, 81, 32]
answers = engine.generate([garden] * 3, SamplingParams(max_tokens=8), ["upper-case", "reverse-word", None])
kept = engine.executor.kept
for graph in kept.graphs.values():
    parts = Counter(part for part, _ in graph.tape.work)
    print(f"one graph: {len(graph.tape.work)} launches,", ", ".join(f"{count} {part}" for part, count in parts.items()))
print(f"steps: {engine.steps}, different shapes: {len(kept.tapes)}; tokens: {[len(one.token_ids) for one in answers]}")

# %% [markdown]
# ## What to type
# On a machine with an NVIDIA GPU (24 GB hold a 7B model and a small pool), after `make demo`:
# ```
# .venv/bin/pip install -e '.[cuda13]'      # or [cuda12], whichever matches the driver
# .venv/bin/slora-ref demo --device cuda --model llama-7b --adapters 2000
# .venv/bin/slora-ref bench decode --batch 64 --adapters 0,1,8,32,64 --mode graph,eager
# .venv/bin/slora-ref bench kernels
# ```
# The weights are random, the adapters' too: time does not depend on what the numbers say. The first run compiles the
# kernels. The demo registers 2,000 adapters, sends 1,000 requests with the paper's lengths and a skewed popularity,
# and checks a sample of the answers against a dense model with merged weights.
#
# ## What to expect
# The committed run of the demo, and the committed measurement of steps: *eager* is launch by launch, *graph* one
# call.

# %%
demo = measured("DEMO-H200")
print(f"{demo['requests']:,} requests of {demo['adapters_used']} of {demo['adapters_registered']:,} adapters")
print(f"{demo['requests_per_s']:.1f} requests/s, {demo['tokens_per_s']:,.0f} tokens/s in {demo['steps']:,} steps")
print(f"{demo['adapter_loads']} loads at {demo['load_gb_s']:.0f} GB/s; pool {demo['pool_gb']:.0f} GB")
pool = demo["pool"]
print(f"of {pool['pages']:,} pages at most {pool['peak_kv']:,} by sequences and {pool['peak_adapter']:,} by adapters")
print(f"checked {demo['checked']} answers, {demo['correct']} as the dense merged model answers")

# %%
for row in measured("START-H200")["rows"]:
    kernels = "kept from an earlier run" if row["kernels_cached"] else "compiled"
    print(f"first token {row['first_ready_s']:.1f} s after the start, with kernels {kernels}")

# %%
result = measured("DECODE-H200")
found = [row for row in result["rows"] if (row["model"], row["dtype"], row["shards"]) == ("llama-7b", "float16", 1)]
graph, eager = ({(r["batch"], r["adapters"]): r for r in found if r["mode"] == mode} for mode in ("graph", "eager"))
rows = []
for (batch, adapters), row in graph.items():
    if adapters in (0, batch):
        slow = eager[batch, adapters]["step_ms"]
        saved = f"{slow - row['step_ms']:.2f}"
        times = (f"{ms:.2f}" for ms in (slow, row["step_ms"], row["floor_ms"]))
        rows.append((batch, adapters, *times, saved, f"{row['floor_ms'] / row['step_ms']:.0%}"))
head = ("requests", "adapters", "eager, ms", "graph, ms", "floor, ms", "saved, ms", "graph: of the floor's speed")
table(head, rows)

# %% [markdown]
# One call saves some tenths of a millisecond, whatever a step computes. And the parts of a step of 64 requests,
# started as a graph:

# %%
parts = ("gemm", "lora", "attention", "rest")
steps = [row for (batch, _), row in graph.items() if batch == 64]
rows = [(row["adapters"], *(f"{row[f'{part}_ms']:.2f}" for part in parts)) for row in steps]
table(["adapters", *(f"{part}, ms" for part in parts)], rows)

# %% [markdown]
# ## The picture
# Where the time of a step goes, beside what its bytes must take. *rest* is all that is not a product, an adapter or
# attention: small kernels, gaps between launches, and the host. With adapters it is more: their kernels also wait
# behind the products between which they stand.

# %% picture
from matplotlib.figure import Figure
from show import DARK, EDGE, LIGHT, MIDDLE

figure = Figure(figsize=(8, 4), layout="constrained")
axes = figure.subplots()
places, bottom = np.arange(len(steps)), np.zeros(len(steps))
for part, colour in zip(parts, (DARK, MIDDLE, EDGE, LIGHT), strict=True):
    height = np.array([max(0.0, row[f"{part}_ms"]) for row in steps])
    axes.bar(places, height, 0.6, bottom, color=colour, edgecolor="white", label=part)
    bottom += height
floor, slow = [row["floor_ms"] for row in steps], [eager[64, row["adapters"]]["step_ms"] for row in steps]
axes.plot(places, slow, "D", color="black", markersize=5, label="the step, eager")
axes.hlines(floor, places - 0.42, places + 0.42, colors="black", linestyles="--", label="floor: bytes over bandwidth")
axes.set_xticks(places, [f"{row['adapters']}" for row in steps])
axes.set(xlabel="different adapters among 64 requests", ylabel="ms")
axes.set_title(f"a decode step on {result['machine']['gpu']}, as a graph")
axes.set_ylim(0, bottom.max() * 1.35)
axes.legend(ncols=3, loc="upper center", fontsize=8)
Picture(figure, "10_one_gpu", "A decode step of Llama-7B by parts, for several numbers of adapters, beside its floor")

# %%
worst = max(steps, key=lambda row: row["lora_ms"])
each = 64 // worst["adapters"]
print(f"adapters cost most with {worst['adapters']} of them, {each} requests each: {worst['lora_ms']:.2f} ms")

# %% [markdown]
# The bytes say: the more adapters, the dearer. When a measurement says otherwise, it is the kernels' doing. An earlier
# one had 32 adapters as the dearest, 0.92 ms: a tile of sixteen rows with two rows in it is mostly empty. To show such
# things is what a floor is for: a few rows of a low rank now go one by one (`uses_mbgmm` in chapter 4).
#
# ## Exercise
# - **Write** `floor_ms(hidden, ffn, layers, vocab, batch, ranks, context)`: the milliseconds that a decode step's
#   bytes take at 4.05 TB/s, for a model without grouped queries, in float16. `ranks` has the rank of each distinct
#   adapter, on q, k, v and o. Count the seven projections of each layer and the head; keys and values; A and B. Leave
#   out norms and the embedding.
# - **Check**: against the bench's own floors.
# - **Resources**: shapes alone; nothing of `slora_ref`.

# %%
def floor_ms(hidden, ffn, layers, vocab, batch, ranks, context):
    """Milliseconds."""
    raise NotImplementedError


def check_floor_ms(candidate):
    """Two models, several batches, ranks of 64 and 8."""
    kind = AdapterKind(ranks=(64, 8))
    for model in ("llama-7b", "llama-13b"):
        for batch, adapters in ((1, 0), (64, 1), (64, 64), (128, 32)):
            [case] = DecodeOptions(model=model, batches=(batch,), adapters=(adapters,), kind=kind).cases()
            config, ranks = case.config, [case.kind.ranks[i % len(case.kind.ranks)] for i in range(adapters)]
            sizes = config.hidden_size, config.intermediate_size, config.num_layers, config.vocab_size
            got, want = candidate(*sizes, batch, ranks, case.context), case.floor_ms(700.0)
            where = f"{model}, {batch} requests, {adapters} adapters"
            assert abs(got - want) < 1e-6 * want, f"{where}: {got:.5f}, not {want:.5f}"


attempt(check_floor_ms, floor_ms)

# %% mistake
def without_contexts(hidden, ffn, layers, vocab, batch, ranks, context):
    """Only what is stored in files."""
    weights = layers * (4 * hidden * hidden + 3 * hidden * ffn) + vocab * hidden
    return 1e3 * 2 * (weights + layers * 4 * 2 * hidden * sum(ranks)) / 4.05e12


refused(check_floor_ms, without_contexts)

# %% solution
def solved(hidden, ffn, layers, vocab, batch, ranks, context):
    """Weights once, adapters once, two vectors of keys and values for each token of each context."""
    weights = layers * (4 * hidden * hidden + 3 * hidden * ffn) + vocab * hidden
    adapters = layers * 4 * 2 * hidden * sum(ranks)
    keys = layers * 2 * hidden * batch * context
    return 1e3 * 2 * (weights + adapters + keys) / 4.05e12


attempt(check_floor_ms, solved)

# %% [markdown]
# ## What the paper adds
# The paper's claim is that this picture stays the same while thousands of adapters are registered. Its table 3, for
# adapters of rank 8 on an A100, and this project's own runs on the GPU of this page:

# %%
from slora_ref.paper.theirs import table as theirs

serve = measured("SERVE-FEW-MANY-H200")
paper = [row for row in theirs("table3_a100_80") if row["setting"] == "S1"]
rows = [("S-LoRA, NVIDIA A100", f"{int(row['n']):,}", row["slora"]) for row in paper]
where = f"here, {serve['machine']['gpu']}"
rows += [(where, f"{row['registered']:,}", f"{row['requests_per_s']:.2f}") for row in serve["rows"]]
table(["", "adapters registered", "requests/s"], rows)

# %% [markdown]
# Not the same requests, and another GPU: compare within a machine, not between them. What is resident is bounded by
# the batch, what is registered by main memory.
#
# The original's kernels and loop were further from the floor than the bytes would have it: with the first adapter
# throughput falls by a fifth (chapter 9), most of it host time for launching them by the replay's fit. Here, where
# launches are kept and a step is started before the tokens of the one before are read (chapter 5), what is left of
# the host's part is the time in which the GPU has no step to do:

# %%
served = measured("SERVE-H200")["rows"]
rows = [(f"{row['registered']:,}", f"{row['requests_per_s']:.2f}", f"{row['idle_fraction']:.1%}") for row in served]
table(["adapters registered", "requests/s", "of the time without a step on the GPU"], rows)

# %% [markdown]
# (The first row is the first run after the start, when the launches of each new shape of step are prepared.)
