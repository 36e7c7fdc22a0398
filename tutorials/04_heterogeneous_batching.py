"""Heterogeneous batching: the kernels

Minutes: 40
Paper: 5.3
After: say what padding and copying cost, read the kernel ladder, and tell what each barrier is for.
"""

# %% [markdown]
# ## The cost that hurts
# In one step, 32 rows may belong to 32 adapters of ranks 8, 16, 32 and 64, whose weights lie in scattered pages. A
# library multiplies a batch of matrices, if they are all of one shape and each in one piece. So one would copy every
# adapter out of its pages into a block of the largest rank, padded with zeros, and multiply those. Each number of an
# adapter is used once in a decode step, for one row. So all that counts is how many bytes are moved:

# %%
import numpy as np
from show import ROOT, Picture, attempt, excerpt, measured, refused, source, table

hidden, half = 4096, 2  # a projection of Llama-7B, in float16
rows = []
mixtures = {"all 8": [8] * 32, "8, 16, 32, 64": [8, 16, 32, 64] * 8, "31 of 8, one of 64": [8] * 31 + [64]}
for name, ranks in mixtures.items():
    needed = 2 * hidden * half * sum(ranks)  # A and B, each read once where they lie
    padded = 2 * hidden * half * len(ranks) * max(ranks)
    moved = needed + padded + padded  # read the pages, write the padded copy, read it again
    rows.append((name, f"{needed / 1e6:.1f}", f"{moved / 1e6:.1f}", f"{moved / needed:.1f}"))
table(["ranks of 32 rows", "MB gathered", "MB with padding and copies", "times as many"], rows)

# %% [markdown]
# ## The smallest example
# Two rows, ranks 1 and 3. Padded to rank 3 the products are the same, and of the columns that are read, two of six
# are zeros. Gathering reads four columns.

# %%
rng = np.random.default_rng(0)
x = rng.integers(-3, 4, (2, 4))
adapters = [(rng.integers(-2, 3, (4, r)), rng.integers(-2, 3, (r, 2))) for r in (1, 3)]
stacked_a, stacked_b = np.zeros((2, 4, 3), int), np.zeros((2, 3, 2), int)
for i, (a, b) in enumerate(adapters):
    stacked_a[i, :, : a.shape[1]], stacked_b[i, : b.shape[0]] = a, b
print("padded:  ", (x[:, None] @ stacked_a @ stacked_b)[:, 0].tolist())
print("gathered:", [(row @ a @ b).tolist() for row, (a, b) in zip(x, adapters, strict=True)])

# %% [markdown]
# ## The data structure
# A kernel finds an adapter by one entry of 16 bytes a row:

# %% listing
excerpt("kernels_cu/device.h", "// Where one target's A and B", "};")

# %% [markdown]
# And the rows are split between two kinds of kernels: **MBGMV**, a row at a time, where an adapter has a single row
# or sharing would save little, and **MBGMM**, which reads an adapter once for a tile of rows. The names are the
# paper's: multi-size batched gather matrix-vector (matrix-matrix) multiplication. The decision is made in one place:

# %% listing
from slora_ref.ops import Segments, plan

source(plan.uses_mbgmm)

# %% [markdown]
# A step of 24 rows: one of adapter 0, twenty of adapter 1 (a prompt), two of the base model (-1), one of adapter 2. All
# three are of rank 64; of rank 16, the twenty would be read one by one as well:

# %%
start, length = np.array([0, 1, 21, 23]), np.array([1, 20, 2, 1])
segments = Segments(np.array([0, 1, -1, 2]), start, length, rank=np.array([64, 64, 0, 64]))
planned = plan.plan_lora(segments, rows=24)
for row in np.flatnonzero(planned.row_slots >= 0):
    print(f"MBGMV: row {row}, adapter {planned.row_slots[row]}")
for (first, count), adapter in zip(planned.tiles, planned.tile_slots, strict=True):
    if count:
        print(f"MBGMM: rows {first} to {first + count - 1}, adapter {adapter}")

# %% [markdown]
# Let us make a batch by hand: five rows, three adapters of ranks 3, 17 and 8, one row of the base model, and pages of
# 64 numbers in random order. A column of A has 200 numbers, so it takes four pages, the last one in part. The entries
# are what a kernel gets to see.

# %% behind
from slora_ref.ops import lora_arguments
from slora_ref.ops.host_kernels import ORDERS, HostKernels
from slora_ref.ops.ladder import ladder, make_launch


def make_batch(ranks=(3, 17, 8), owners=(0, 2, -1, 1, 0), d_in=200, d_out=150, width=64, seed=0):
    """Adapters scattered over pages, and their entries: what lora_lookup would make from the pool's tables."""
    rng = np.random.default_rng(seed)
    a_pieces, b_pieces = -(-d_in // width), -(-d_out // width)
    needed = sum(ranks) * (a_pieces + b_pieces)
    pages = np.full((needed + 5, width), np.nan, np.float16)
    free, page_table, entries, dense = rng.permutation(needed).tolist(), [], [], []
    for rank in ranks:
        a, b = (rng.standard_normal(shape) * 0.2 for shape in ((d_in, rank), (rank, d_out)))
        starts = []
        for vectors, pieces in ((a.T, a_pieces), (b, b_pieces)):
            starts.append(len(page_table))
            for vector in vectors:
                padded = np.zeros(pieces * width)
                padded[: len(vector)] = vector
                for piece in padded.reshape(pieces, width):
                    page_table.append(free.pop())
                    pages[page_table[-1]] = piece
        entries.append((*starts, rank, int(np.float32(16 / rank).view(np.int32))))
        dense.append((a.astype(np.float16).astype(float), b.astype(np.float16).astype(float), 16 / rank))
    lora = np.array([[entries[owner] if owner >= 0 else (0, 0, 0, 0) for owner in owners]], np.int32)
    x = rng.standard_normal((len(owners), d_in)).astype(np.float16)
    return x, pages, np.array([page_table], np.int32), lora, dense, owners


def shrink_arguments(batch, splits=1):
    """t, one part for each split of d_in, is NaN where no kernel has written."""
    x, pages, page_table, lora, dense, _ = batch
    columns = -(-max(b.shape[0] for _, b, _ in dense) // 8) * 8
    t = np.full((splits, len(x), 1, columns), np.nan, np.float32)
    return lora_arguments.mbgmv_shrink(t, x, pages, page_table, lora)


def expand_arguments(batch):
    """y begins at 1; t is what a right shrink would give."""
    x, pages, page_table, lora, dense, owners = batch
    arguments = shrink_arguments(batch)
    for row, owner in enumerate(owners):
        if owner >= 0:
            arguments["t"][0, row, 0, : dense[owner][0].shape[1]] = x[row].astype(float) @ dense[owner][0]
    y = np.ones((len(x), dense[0][1].shape[1]), np.float16)
    return lora_arguments.mbgmv_expand(y, arguments["t"], pages, page_table, lora, (y.shape[1],))


def error(batch, arguments):
    """The largest error of any row, as a share of the largest number; infinity for NaN."""
    x, _, _, _, dense, owners = batch
    worst, largest = 0.0, 0.0
    for row, owner in enumerate(owners):
        none = (np.zeros((x.shape[1], 0)), np.zeros((0, dense[0][1].shape[1])), 0.0)
        a, b, scale = dense[owner] if owner >= 0 else none
        t = x[row].astype(float) @ a
        if "y" in arguments:
            got, want = arguments["y"][row].astype(float), 1 + scale * t @ b
        else:
            got, want = arguments["t"][:, row, 0, : len(t)].sum(axis=0), t
        if len(want):
            worst, largest = max(worst, np.abs(got - want).max()), max(largest, np.abs(want).max())
            worst = worst if np.isfinite(got).all() else np.inf
    return worst / largest


batch = make_batch()
entries = batch[3][0, :, :3].tolist()
table(["row", "first entry of A", "of B", "rank"], [(row, *entry) for row, entry in enumerate(entries)])

# %% [markdown]
# ## A few words of CUDA
# A kernel is a function that thousands of *threads* run at once. 32 threads are a *warp*: they run in step and can
# hand each other numbers (*shuffles*); a thread's place in its warp is its *lane*. Some warps are a *block*: they
# have fast *shared memory* in common (what a thread has to itself lies in its *registers*), and a *barrier*
# (`__syncthreads()`), at which each waits for all. Blocks know nothing of each other. `threadIdx.x` and `blockIdx.x`
# tell a thread which part of the work is its own.
#
# ## The ladder
# The kernels of an operation form a ladder. The first rung is the formula; each further one adds one idea. All take
# the same arguments. They are CUDA, and they run here as well: g++ compiles the same files, the threads of a block
# run one after the other from barrier to barrier, and memory ends where an array ends (`kernels_cu/README.md`). So
# each rung can be checked on a laptop, in three orders of threads.

# %% behind
kernels = HostKernels()


def run(kernel, batch, order="forward", kernels=kernels, splits=1):
    """The error of a kernel's result; MBGMM's get the rows as one tile of the first row's adapter."""
    arguments = shrink_arguments(batch, splits) if "shrink" in kernel else expand_arguments(batch)
    if kernel.startswith("mbgmm"):
        tile = np.array([[0, len(batch[0])]], np.int32)
        names = ("x", "pages", "page_table") if "shrink" in kernel else ("pages", "page_table")
        weights = [arguments[name] for name in names]
        lora = np.ascontiguousarray(arguments["lora"][:, :1])
        if "shrink" in kernel:
            arguments = lora_arguments.mbgmm_shrink(arguments["t"], *weights, lora, tile)
        else:
            width = (arguments["y"].shape[1],)
            arguments = lora_arguments.mbgmm_expand(arguments["y"], arguments["t"], *weights, lora, tile, width)
    kernels.run(make_launch(kernel, np.float16, arguments), order, seed=1)
    return error(batch, arguments)


def checked(operation, batch):
    """The rungs of an operation, whether they are right in three orders of threads, and what is new in them."""
    for kernel in ladder(operation, np.float16):
        right = all(run(kernel, batch, order) < 1e-3 for order in ORDERS)
        yield f"[{kernel}](../kernels_cu/{kernel}.cu)", "yes" if right else "no", new_here(kernel)


def new_here(kernel):
    """What the head of a kernel's file says is new."""
    head = (ROOT / f"kernels_cu/{kernel}.cu").read_text(encoding="utf-8").split("// new here: ")[1]
    return " ".join(head.split("// limits")[0].replace("//", "").split())


header = ["kernel", "right in three orders", "new here"]
table(header, [*checked("mbgmv_shrink", batch), *checked("mbgmv_expand", batch)])

# %% [markdown]
# ### Rung 1: the formula
# A thread owns a column of A and walks down it. (`target`: q, k and v have one input and are done in one launch.
# `split`: a long d_in may be shared out among several blocks, whose sums are added later.)

# %% listing
excerpt("kernels_cu/mbgmv_shrink_1_naive.cu", "int row = blockIdx.x")

# %% [markdown]
# ### Rung 2: neighbours read neighbours
# A GPU's memory answers in sectors of 32 bytes. When the 32 threads of a warp read one number each, what matters is
# how many sectors these lie in. In rung 1 they read 32 columns at the same place, each a page away; in rung 2 a warp
# owns one column and reads 32 neighbouring numbers. In rung 3 each thread reads 16 bytes at once.

# %%
def sectors(addresses, size):
    """Sectors of 32 bytes that a warp touches when its threads read `size` bytes at these addresses."""
    return len({byte // 32 for address in addresses for byte in range(address, address + size)})


page_bytes = 4096 * half
reads = {
    "1: a thread a column": ([lane * page_bytes for lane in range(32)], half, 1),
    "2: a warp a column": ([lane * half for lane in range(32)], half, 1),
    "3: 16 bytes a thread, 16 loads in flight": ([lane * 16 for lane in range(32)], 16, 16),
}
rows = []
for name, (addresses, size, flight) in reads.items():
    touched = sectors(addresses, size)
    rows.append((name, touched, f"{32 * size / (32 * touched):.0%}", 32 * size * flight))
table(["rung of the shrink", "sectors a load", "of their bytes used", "bytes in flight a warp"], rows)

# %% listing
excerpt("kernels_cu/mbgmv_shrink_2_warp.cu", "int row = blockIdx.y")

# %% [markdown]
# ### Rung 3: keep the memory busy
# A load takes long, and a memory is fast only while many loads are on their way: its rate is the bytes in flight over
# the time that one takes. Rung 2 waits for each number before it asks for the next. Rung 3 asks for 16 times 16 bytes
# a thread before it uses the first, so nothing may branch between those loads, and that is most of its code.
#
# ### Many rows of one adapter: MBGMM
# A prompt is hundreds of rows of one adapter. Served one by one, each would read A and B again. So MBGMM takes a tile
# of rows at a time: a number that was read serves all rows of the tile. And a GPU has units that multiply two small
# matrices in one instruction, its *tensor cores*; a tile has matrices for them, a single row has not. Here 20 rows of
# one adapter of rank 17, in one tile:

# %%
tile = make_batch(ranks=(17,), owners=(0,) * 20)
table(header, [*checked("mbgmm_shrink", tile), *checked("mbgmm_expand", tile)])

# %% [markdown]
# ## What the barriers are for
# Where threads share memory, one must not read before the other has written. A barrier says so; its comment says
# which write it keeps from which read. On the host threads run strictly one after the other between barriers, so a
# missing one is not a matter of luck: in some order a thread sees memory that has not been written yet, and that is
# NaN. Here each barrier is taken out in turn (a *mutant*), and the kernel run again:

# %%
import re
import shutil
import tempfile
from pathlib import Path

BARRIER = re.compile(r"__syncthreads\(\);  // (.*)")


def mutants(kernel, name):
    """The kernel without each of the barriers of its file or header `name` in turn, and the barrier's comment."""
    text = (ROOT / "kernels_cu" / name).read_text(encoding="utf-8")
    for found in BARRIER.finditer(text):
        folder = Path(tempfile.mkdtemp(prefix="slora_ref_mutant_"))
        shutil.copy(ROOT / f"kernels_cu/{kernel}.cu", folder)
        (folder / name).write_text(text[: found.start()] + text[found.end() :], encoding="utf-8")
        yield HostKernels(folder, folder / "cache"), found[1]


two_passes = make_batch(ranks=(5,), owners=(0, 0), d_in=4200, d_out=16, width=4200)
cases = [
    ("mbgmv_expand_2_vector", "mbgmv_expand_2_vector.cu", batch),
    ("mbgmv_shrink_3_in_flight", "lora_shrink.h", two_passes),
    ("mbgmv_shrink_4_tensor_cores", "lora_shrink.h", two_passes),
    ("mbgmv_expand_3_in_flight", "lora_rows.h", make_batch(ranks=(40, 17, 8), d_out=1200)),
]
rows, needed = [], {name: set() for _, name, _ in cases}
for kernel, name, case in cases:
    for broken, comment in mutants(kernel, name):
        right = [order for order in ORDERS if run(kernel, case, order, broken) < 1e-3]
        wrong = [order for order in ORDERS if order not in right]
        if wrong:  # else it is a barrier that this kernel never comes to
            rows.append((kernel, comment, ", ".join(wrong), ", ".join(right) or "none"))
            needed[name].add(comment)
for name, comments in needed.items():
    assert comments == set(BARRIER.findall((ROOT / "kernels_cu" / name).read_text(encoding="utf-8"))), name
print("no barrier of", " or ".join(needed), "can be left out")
table(["kernel", "the barrier that was taken out", "wrong in the orders", "still right in"], rows)

# %% [markdown]
# The headers are shared by the last rungs. The last line is the reason for three orders: in reverse the
# upper half happens to run first, and a program that lacks a barrier works. The tests do this for each barrier of
# each last rung, and for shifted indices, dropped bounds and wrong signs besides (`tests/kernel_mutants.py`).
#
# ## How fast? The roofline
# A kernel that uses each number once can be no faster than its bytes over the memory's bandwidth; that line is the
# roof, and the time it allows is the *floor*. These times are measured on a GPU and committed, with the machine;
# nothing on this page was timed here. Beside them stands cuBLAS, NVIDIA's library of matrix products (*GEMM*, general
# matrix multiplication): *batched* wants all products of one shape, *grouped* takes any.

# %%
from slora_ref.bench.decode.cases import BYTES_PER_S
from slora_ref.bench.kernels.cases import FLOOR_BYTES_PER_S

result = measured("KERNELS-H200")
print(f"the roof: {FLOOR_BYTES_PER_S / 1e12:.2f} TB/s for a kernel, {BYTES_PER_S / 1e12:.2f} for a step (chapter 10)")
print(f"a copy, on the GPU of this page: {result['copy_gb_s'] / 1e3:.2f} TB/s")
decode = [
    row
    for row in result["rows"]
    if (row["operation"], row["case"], row["dtype"], row["rows"]) == ("lora", "distinct", "float16", 64)
]
rows = []
for row in decode:
    library = row["baselines"]
    times = (row["floor_us"], row["us"], library["cublas_batched_padded"], library["cublas_grouped"])
    rows.append((row["rank"], f"{row['bytes'] / 1e6:.1f}", *(f"{us:.1f}" for us in times), f"{row['fraction']:.0%}"))
table(["rank", "MB", "floor, us", "ours, us", "cuBLAS batched, us", "cuBLAS grouped, us", "of the floor's speed"], rows)

# %% [markdown]
# Three rates for one memory? What it can do is found by trying, with a plain copy: the last line. The floors take the
# rates of published tables of other servers' kernels (4.2) and steps (4.05), from another GPU of this kind, so that
# shares of the floor's speed can be compared with theirs.
#
# The rows: one for each of 64 adapters, one projection, shrink and expand together. cuBLAS gets every favour here:
# equal ranks, and weights that already lie in one piece, so it neither pads nor copies. At small ranks everybody is
# far from the roof: a few megabytes are moved in less time than two kernels take to start.
#
# Prompts are another matter. Here 16 prompts of 256 rows, each with an adapter of its own:

# %%
prompts = [
    row
    for row in result["rows"]
    if (row["operation"], row["case"], row["dtype"]) == ("lora", "prefill", "float16") and row["d_outs"] == [4096]
]
rows = []
for row in prompts:
    times = (row["floor_us"], row["us"], row["baselines"]["cublas_batched_padded"], row["baselines"]["cublas_grouped"])
    rows.append((row["rank"], f"{row['bytes'] / 1e6:.1f}", *(f"{us:.1f}" for us in times), f"{row['fraction']:.0%}"))
table(["rank", "MB", "floor, us", "ours, us", "cuBLAS batched, us", "cuBLAS grouped, us", "of the floor's speed"], rows)

# %% [markdown]
# With large ranks the library's tiles are better than these kernels', as long as all ranks are equal and lie in one
# piece. That is the price of readable code, and it is small beside the base model's product.
#
# ## The picture
# Left, each rung by itself at rank 64: MBGMV for 64 rows of 64 adapters, MBGMM for 16 prompts of 256 rows. The black
# tick is the floor of the bytes. Rung 2 of MBGMM's expand is slower than rung 1: an idea that did not help stays in
# the ladder. Right, the last rungs against the library, by rank.

# %% picture
from matplotlib.figure import Figure
from show import DARK, EDGE, MIDDLE

figure = Figure(figsize=(11, 4.6), layout="constrained")
left, axes = figure.subplots(1, 2)
place, names = 0.0, {}
for row in result["rows"]:
    if row["operation"].startswith("mbgm") and row["case"] in ("distinct", "prefill"):
        for kernel, us in row["rungs"].items():
            names[place] = kernel
            left.barh(place, us, color=DARK if us == row["us"] else MIDDLE, edgecolor="white")
            left.plot([row["floor_us"]] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2.5)
            left.text(us * 1.1, place, f"{us:,.0f}", va="center", fontsize=8)
            place += 1
        place += 0.5
left.set_yticks(list(names), list(names.values()), fontsize=8)
left.set(xscale="log", xlim=(4, 60_000), ylim=(place, -1), xlabel="time, us", title="each rung, and its floor")
left.set_xticks([10, 100, 1000, 10_000], ["10", "100", "1,000", "10,000"])
left.minorticks_off()
megabytes = np.array([row["bytes"] / 1e6 for row in decode])
axes.plot(megabytes, [row["baselines"]["cublas_grouped"] for row in decode], "^--", color=EDGE, label="cuBLAS grouped")
axes.plot(
    megabytes, [row["baselines"]["cublas_batched_padded"] for row in decode], "s-", color=MIDDLE, label="cuBLAS batched"
)
axes.plot(megabytes, [row["us"] for row in decode], "o-", color=DARK, label="MBGMV, last rungs")
axes.plot(megabytes, [row["floor_us"] for row in decode], ":", color=DARK, label="roof: bytes over bandwidth")
axes.set(xscale="log", yscale="log", xlabel="MB of A and B that 64 rows need", ylabel="time, us")
axes.set_xticks(megabytes, [f"{m:.0f}\nrank {row['rank']}" for m, row in zip(megabytes, decode, strict=True)])
axes.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.legend(fontsize=8)
axes.set_title("shrink and expand, 64 rows of 64 adapters")
figure.suptitle(f"{result['machine']['gpu']}, float16")
Picture(figure, "04_heterogeneous_batching", "Time of each rung beside its floor, and of the last rungs beside cuBLAS")

# %% [markdown]
# ## Exercise
# - **Write** a rung between 1 and 2, in CUDA: a warp owns a column of A, a lane every 32nd number, as in rung 2, but
#   without the shuffles of `warp_sum`: the lanes put their sums into shared memory, and one lane of each warp adds
#   them.
# - **Check**: right numbers in three orders of threads; also where d_in is shared out between two blocks (`splits`;
#   the head has worked out `first` and `end`), and where rows and pages lie apart (`x_stride`, `page_stride`).
# - **Resources**: one barrier. Mind that *every* thread of a block must reach it; the host build tells you if not.

# %%
import itertools

HEAD = """#include "device.h"
extern "C" __global__ void mbgmv_shrink_2_warp(float* t, const Num* x, const Num* pages, const int* page_table,
                                               const Lora* lora, int rows, int d_in, int width, int targets,
                                               int t_columns, int splits, int x_stride, int page_stride) {
    SHARED(float, parts, [128]);  // one number for each thread of the block
    int row = blockIdx.y, target = blockIdx.z % targets, split = blockIdx.z / targets, lane = threadIdx.x % 32;
    int j = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    Lora adapter = lora[target * rows + row];
    int pieces = ceil_div(d_in, width), part = ceil_div(d_in, splits);
    int first = split * part, end = min(first + part, d_in);
    const Num* from = x + static_cast<long long>(row) * x_stride;
    float* to = t + ((static_cast<long long>(split) * rows + row) * targets + target) * t_columns + j;
"""


def shared_sum():
    """The rest of the kernel, as text; its last line closes the function."""
    raise NotImplementedError


def apart(array):
    """The same rows with three numbers between them, NaN."""
    return np.concatenate([array, np.full((len(array), 3), np.nan, array.dtype)], axis=1)[:, : array.shape[1]]


def check_shared_sum(candidate):
    """Compiled by g++ in the place of rung 2."""
    text = candidate()
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    assert code.count("__syncthreads") == 1, "one barrier is enough, and one is needed"
    assert "shfl" not in code and "warp_sum" not in code, "without shuffles"
    folder = Path(tempfile.mkdtemp(prefix="slora_ref_exercise_"))
    (folder / "mbgmv_shrink_2_warp.cu").write_text(HEAD + text, encoding="utf-8")
    own, (x, pages, *rest) = HostKernels(folder, folder / "cache"), batch
    for order, case, splits in itertools.product(ORDERS, (batch, (apart(x), apart(pages), *rest)), (1, 2)):
        where = f"in the order {order}, {splits} splits, pages of {case[1].strides[0] // half} numbers"
        assert run("mbgmv_shrink_2_warp", case, order, own, splits) < 1e-3, f"wrong numbers {where}"


attempt(check_shared_sum, shared_sum)

# %% solution
def solved():
    """A thread without a column has nothing to add, but it comes to the barrier all the same."""
    return """
    float sum = 0;
    for (int i = first + lane; j < adapter.rank && i < end; i += 32) {
        long long page = page_table[adapter.a + j * pieces + i / width];
        sum += to_float(from[i]) * to_float(pages[page * page_stride + i % width]);
    }
    parts[threadIdx.x] = sum;
    __syncthreads();  // all sums are written before one lane of each warp adds them
    if (lane > 0 || j >= adapter.rank) return;
    float total = 0;
    for (int k = 0; k < 32; k++) total += parts[threadIdx.x + k];
    *to = total;
}
"""


attempt(check_shared_sum, solved)

# %% mistake
def leaves_early():
    """A thread without a column goes home before the barrier, as it may in rung 2."""
    return """
    if (j >= adapter.rank) return;
    float sum = 0;
    for (int i = first + lane; i < end; i += 32) {
        long long page = page_table[adapter.a + j * pieces + i / width];
        sum += to_float(from[i]) * to_float(pages[page * page_stride + i % width]);
    }
    parts[threadIdx.x] = sum;
    __syncthreads();  // all sums are written before one lane of each warp adds them
    if (lane > 0) return;
    float total = 0;
    for (int k = 0; k < 32; k++) total += parts[threadIdx.x + k];
    *to = total;
}
"""


def no_stride():
    """As if a page began where the one before ends."""
    return solved().replace("page * page_stride", "page * width")


def no_splits():
    """As if a block had the whole of d_in."""
    return solved().replace("i = first + lane", "i = lane").replace("i < end", "i < d_in")


for mistake in (leaves_early, no_stride, no_splits):
    refused(check_shared_sum, mistake)

# %% [markdown]
# ## What the paper adds
# Punica (2023) had the idea of a kernel that gathers each row's adapter, for one rank at a time; S-LoRA extends it to
# many ranks and to pages, and measures what padding and copying cost: its `bmm` variant serves a small fraction of
# the requests. But that variant also makes its padded weights by many small operations and empties a cache in every
# step. Where one kernel copies and pads (`slora_ref/baselines/padded_kernels.py`), for ranks of 8 to 64:

# %%
rows = [row for row in measured("PAPER-H200")["rows"] if row["experiment"] == "fig5" and row["adapters"] in (5, 100)]
table(["adapters", "system", "ms a step"], [(row["adapters"], row["system"], f"{row['step_ms']:.1f}") for row in rows])

# %% [markdown]
# In the authors' code the list of ranks (8 to 128) and of widths is fixed when it is compiled, 440 kernels in all; a
# batch's largest rank must be on the list; lanes above a row's rank stand idle in the expand; and prompts go through
# the row-by-row kernel unless they are long and the ranks large. The kernels here take any rank and any width, which
# costs a few integer operations where bytes are what counts.
