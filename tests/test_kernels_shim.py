"""The host build reports what a GPU would not: each fault here is one that a kernel could have.

Kernels are written into a folder of the test and compiled like the project's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from slora_ref.errors import KernelError
from slora_ref.ops.host_kernels import ORDERS, HostKernels
from slora_ref.ops.launch import Launch


class Bench:
    """Compiles and runs the body of a kernel."""

    def __init__(self, folder: Path) -> None:
        self.kernels = HostKernels(folder, folder / "cache")
        self.count = 0

    def __call__(
        self,
        parameters: str,
        body: str,
        *arguments: Any,
        threads: int = 64,
        blocks: int = 1,
        shared: int = 0,
        order: str = "forward",
        dtype: Any = np.float16,
    ) -> None:
        """Runs `body` with `parameters`, whose values are `arguments`; arrays among them are changed."""
        self.count += 1
        name = f"kernel_{self.count}"
        text = f'#include "device.h"\nextern "C" __global__ void {name}({parameters}) {{\n{body}\n}}\n'
        (self.kernels.folder / f"{name}.cu").write_text(text)
        names = {f"a{i}": value for i, value in enumerate(arguments)}
        launch = Launch(name, np.dtype(dtype), (blocks, 1, 1), threads, shared, names)
        self.kernels.run(launch, order, seed=3)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def ints(n: int) -> np.ndarray:
    return np.zeros(n, np.int32)


def floats(n: int) -> np.ndarray:
    return np.zeros(n, np.float32)


# --- barriers ---


def test_a_barrier_in_two_branches_is_reported(bench: Bench) -> None:
    with pytest.raises(KernelError, match="divergent barrier"):
        bench("int* out", "if (threadIdx.x < 5) { __syncthreads(); }\nelse __syncthreads();", ints(64))


@pytest.mark.parametrize("order", ORDERS)
def test_a_thread_that_returns_before_a_barrier_is_reported(bench: Bench, order: str) -> None:
    with pytest.raises(KernelError, match="63 threads wait at a barrier, 1 have ended"):
        bench("int* out", "if (threadIdx.x == 7) return;\n__syncthreads();", ints(64), order=order)


def test_a_missing_barrier_shows(bench: Bench) -> None:
    body = "SHARED(float, s, [64]); s[threadIdx.x] = threadIdx.x; {} out[threadIdx.x] = s[63 - threadIdx.x];"
    right = np.arange(64)[::-1]
    for order in ORDERS:
        out = floats(64)
        bench("float* out", body.format("__syncthreads();"), out, order=order)
        assert (out == right).all()
        bench("float* out", body.format(""), out, order=order)
        assert np.isnan(out).any(), "what another thread has not written yet is NaN"


def test_a_barrier_missing_before_memory_is_used_again_shows(bench: Bench) -> None:
    body = """SHARED(float, s, [64]);
    for (int i = 0; i < 2; i++) {{
        s[threadIdx.x] = i * 100 + threadIdx.x;
        __syncthreads();
        out[i * 64 + threadIdx.x] = s[(threadIdx.x + 1) % 64];
        {}
    }}"""
    right = (np.arange(64) + 1) % 64
    wrong = 0
    for order in ORDERS:
        out = floats(128)
        bench("float* out", body.format("__syncthreads();"), out, order=order)
        assert (out == np.concatenate([right, 100 + right])).all()
        bench("float* out", body.format(""), out, order=order)
        wrong += (out != np.concatenate([right, 100 + right])).any()
    assert wrong > 0


def test_threads_run_in_the_order_asked_for(bench: Bench) -> None:
    body = "SHARED(int, next, [1]); if (out[64]++ % 64 == 0) next[0] = 0; out[threadIdx.x] = next[0]++;"
    seen = {}
    for order in ORDERS:
        out = ints(65)
        bench("int* out", body, out, order=order)
        seen[order] = out[:64].tolist()
    assert seen["forward"] == list(range(64))
    assert seen["reverse"] == list(range(63, -1, -1))
    assert sorted(seen["shuffled"]) == list(range(64))
    assert seen["shuffled"] != seen["forward"]


# --- memory ---


@pytest.mark.parametrize("at", [64, 63 + 16, -1, 10**6])
def test_a_read_out_of_bounds_is_reported(bench: Bench, at: int) -> None:
    x = np.ones(64, np.float32)
    body = f"out[0] = x[threadIdx.x == 3 ? {at} : 0];"
    if at == -1:  # in front of an array there is NaN up to the page's start
        out = floats(1)
        bench("float* out, const float* x", body, out, x, threads=4)
        assert np.isnan(out[0])
    else:
        with pytest.raises(KernelError, match=f"a1: access to byte {4 * at}, it has 256"):
            bench("float* out, const float* x", body, floats(1), x)


@pytest.mark.parametrize("at", [-1, -300, 61, 63])
def test_a_write_out_of_bounds_is_reported(bench: Bench, at: int) -> None:
    """An array of 61 numbers starts aligned, so three numbers behind it are in its page; they must not change."""
    with pytest.raises(KernelError, match=f"a0 has 244 bytes; byte {4 * at} was written"):
        bench("float* out", f"out[{at}] = 0;", floats(61))


def test_a_failed_launch_changes_nothing_and_the_next_one_works(bench: Bench) -> None:
    x = np.ones(64, np.float32)
    for _ in range(2):
        with pytest.raises(KernelError, match=r"thread \(40, 0, 0\)"):
            bench("float* x", "x[threadIdx.x] = 5; if (threadIdx.x == 40) x[10000] = 1; __syncthreads();", x)
        assert (x == 1).all()
    bench("float* x", "x[threadIdx.x] = 5; __syncthreads();", x)
    assert (x == 5).all()


def test_a_write_to_a_const_argument_is_reported(bench: Bench) -> None:
    with pytest.raises(KernelError, match="a0 is const; byte 8 of 256 was written"):
        bench("const float* x", "const_cast<float*>(x)[2] = 1;", floats(64))


@pytest.mark.parametrize("access", ["load16(p)", "load16_once(p)", "store16(const_cast<Num*>(p), uint4{})"])
def test_a_misaligned_vector_access_is_reported(bench: Bench, access: str) -> None:
    with pytest.raises(KernelError, match="misaligned"):
        bench("Num* x", f"const Num* p = x + 4; {access};", np.zeros(64, np.float16))


@pytest.mark.parametrize("declaration", ["SHARED(float, s, [64])", "DYNAMIC_SHARED(float, s)"])
def test_shared_memory_is_nan_at_the_start_of_every_block(bench: Bench, declaration: str) -> None:
    out = floats(128)
    body = f"{declaration}; out[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x]; s[threadIdx.x] = 1;"
    bench("float* out", body, out, blocks=2, shared=256)
    assert np.isnan(out).all()


@pytest.mark.parametrize("declaration", ["SHARED(float, s, [64])", "DYNAMIC_SHARED(float, s)"])
def test_an_access_outside_shared_memory_is_reported(bench: Bench, declaration: str) -> None:
    with pytest.raises(KernelError, match="access to byte 256, it has 256"):
        bench("float* out", f"{declaration}; out[0] = s[64];", floats(1), shared=256)
    with pytest.raises(KernelError, match="256 bytes; byte -4 was written"):
        bench("float* out", f"{declaration}; s[-1] = 0;", floats(1), shared=256)


def test_more_shared_memory_than_all_architectures_have_is_reported(bench: Bench) -> None:
    with pytest.raises(KernelError, match="takes 98560 bytes of shared memory, the limit is 98304"):
        bench("int* out", "SHARED(float, s, [64]);", ints(1), shared=96 << 10)


def test_an_overflow_of_a_stack_is_reported(bench: Bench) -> None:
    body = "volatile char large[200000]; for (int i = 199999; i >= 0; i -= 64) large[i] = 1; out[0] = large[5];"
    with pytest.raises(KernelError, match="stack overflowed"):
        bench("int* out", body, ints(1))


def test_more_threads_than_a_block_has_are_reported(bench: Bench) -> None:
    bench("int* out", "__syncthreads(); if (threadIdx.x == 1023) out[0] = 1;", ints(1), threads=1024)
    with pytest.raises(KernelError, match="1025 threads in a block, the limit is 1024"):
        bench("int* out", "", ints(1), threads=1025)


def test_a_division_by_zero_is_reported(bench: Bench) -> None:
    with pytest.raises(KernelError, match="division by zero"):
        bench("int* out, int zero", "out[0] = 7 / zero;", ints(1), np.int32(0))


# --- arguments ---


@pytest.mark.parametrize(
    ("parameters", "value", "message"),
    [
        ("int n", np.int64(1), "a0 is no i4"),
        ("long long n", np.int32(1), "a0 is no i8"),
        ("float x", np.int32(1), "a0 is no f4"),
        ("int n", np.float32(1), "a0 is no i4"),
        ("float* x", np.int32(1), "a0: no array of 4-byte items"),
        ("float* x", np.zeros(4), "a0: no array of 4-byte items"),
        ("int4* x", np.zeros(6, np.int32), "a0: no array of 16-byte items"),
        ("int n, int m", np.int32(1), "1 arguments, the kernel takes 2"),
    ],
)
def test_an_argument_of_another_type_is_reported(bench: Bench, parameters: str, value: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        bench(parameters, "", value)


def test_what_gcc_refuses_is_in_the_message(bench: Bench) -> None:
    with pytest.raises(KernelError, match=r"nonsense. was not declared"):
        bench("int* out", "nonsense;", ints(1))


# --- asynchronous copies ---

COPY = """DYNAMIC_SHARED(float, s);
    copy_async16(s + 4 * threadIdx.x, x + 4 * threadIdx.x{}); copies_commit();
    {}
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = s[4 * threadIdx.x + i];
    copies_wait<0>();"""


def test_an_async_copy_lands_at_the_wait_not_at_the_issue(bench: Bench) -> None:
    x, out = np.arange(32, dtype=np.float32), floats(32)
    bench("float* out, const float* x", COPY.format("", "copies_wait<0>();"), out, x, threads=8, shared=128)
    assert (out == x).all()
    for early in ("", "copies_wait<1>();"):
        bench("float* out, const float* x", COPY.format("", early), out, x, threads=8, shared=128)
        assert np.isnan(out).all()


def test_an_async_copy_of_fewer_bytes_fills_up_with_zeros(bench: Bench) -> None:
    x, out = np.arange(1, 33, dtype=np.float32), floats(32)
    bench("float* out, const float* x", COPY.format(", 8", "copies_wait<0>();"), out, x, threads=8, shared=128)
    assert (out.reshape(8, 4)[:, :2] == x.reshape(8, 4)[:, :2]).all()
    assert (out.reshape(8, 4)[:, 2:] == 0).all()


def test_another_thread_sees_an_async_copy_only_after_a_barrier(bench: Bench) -> None:
    body = """DYNAMIC_SHARED(float, s);
    copy_async16(s + 4 * threadIdx.x, x + 4 * threadIdx.x); copies_commit(); copies_wait<0>(); {}
    out[threadIdx.x] = s[4 * (7 - threadIdx.x)];"""
    x, out = np.arange(32, dtype=np.float32), floats(8)
    bench("float* out, const float* x", body.format("__syncthreads();"), out, x, threads=8, shared=128)
    assert (out == x[::4][::-1]).all()
    bench("float* out, const float* x", body.format(""), out, x, threads=8, shared=128)
    assert np.isnan(out).any()


def test_an_async_copy_that_is_never_waited_for_is_reported(bench: Bench) -> None:
    body = "DYNAMIC_SHARED(float, s); copy_async16(s, x); copies_commit();"
    with pytest.raises(KernelError, match="never waited for"):
        bench("const float* x", body, floats(4), threads=1, shared=16)


def test_an_async_copy_overwrites_its_target_from_the_issue_on(bench: Bench) -> None:
    """Issued before all threads have read what was there: a missing barrier."""
    body = """DYNAMIC_SHARED(float, s); s[threadIdx.x] = 7; __syncthreads();
    if (threadIdx.x == 0) copy_async16(s, x);
    out[threadIdx.x] = s[threadIdx.x]; copies_commit(); copies_wait<0>();"""
    out = floats(4)
    bench("float* out, const float* x", body, out, np.ones(4, np.float32), threads=4, shared=16)
    assert np.isnan(out).any()


# --- warps ---


@pytest.mark.parametrize("order", ORDERS)
def test_shuffles(bench: Bench, order: str) -> None:
    lane = np.arange(64) % 32
    table = {
        "__shfl_xor_sync(~0u, v, 5)": lane ^ 5,
        "__shfl_up_sync(~0u, v, 3)": np.where(lane < 3, lane, lane - 3),
        "__shfl_down_sync(~0u, v, 3)": np.where(lane > 28, lane, lane + 3),
        "__shfl_sync(~0u, v, 9)": np.full(64, 9),
        "__shfl_sync(~0u, v, 2, 8)": lane // 8 * 8 + 2,
        "__shfl_down_sync(~0u, v, 1, 4)": np.where(lane % 4 == 3, lane, lane + 1),
    }
    for call, source in table.items():
        out = floats(64)
        bench("float* out", f"float v = threadIdx.x + 0.5f; out[threadIdx.x] = {call};", out, order=order)
        assert (out == np.arange(64) // 32 * 32 + source + 0.5).all(), call
    out = floats(64)
    bench("float* out", "out[threadIdx.x] = warp_sum(threadIdx.x) + warp_max(threadIdx.x);", out, order=order)
    assert (out == np.repeat([31 * 16 + 31, (32 + 63) * 16 + 63], 32)).all()


def test_a_shuffle_that_some_lanes_never_reach_is_reported(bench: Bench) -> None:
    with pytest.raises(KernelError, match="divergent lanes of a warp"):
        bench("int* out", "if (threadIdx.x < 31) out[0] = __shfl_xor_sync(~0u, 1, 1);", ints(1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("__shfl_xor_sync(0xffu, 1, 8)", "reads lane"),
        ("__shfl_xor_sync(0xff00u, 1, 1)", "the mask ff00 leaves out the caller"),
        ("__shfl_xor_sync(~0u, 1, 1)", "lane 8 of the mask is beyond the block"),
    ],
)
def test_a_mask_that_does_not_fit_is_reported(bench: Bench, call: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        bench("int* out", f"out[0] = {call};", ints(1), threads=8)


def test_a_missing_warp_barrier_shows(bench: Bench) -> None:
    body = "SHARED(float, s, [32]); s[threadIdx.x] = threadIdx.x; {} out[threadIdx.x] = s[31 - threadIdx.x];"
    for order in ORDERS:
        out = floats(32)
        bench("float* out", body.format("__syncwarp();"), out, threads=32, order=order)
        assert (out == np.arange(32)[::-1]).all()
        bench("float* out", body.format(""), out, threads=32, order=order)
        assert np.isnan(out).any()


# --- numbers and tensor cores ---

HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_becomes_the_float_that_it_is(bench: Bench, dtype: Any) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    out = floats(1 << 16)
    body = "int i = blockIdx.x * 64 + threadIdx.x; out[i] = to_float(x[i]);"
    bench("float* out, const Num* x", body, out, x, blocks=1024, dtype=dtype)
    np.testing.assert_array_equal(out, x.astype(np.float32))


@pytest.mark.parametrize("dtype", HALVES)
def test_floats_are_rounded_to_the_nearest_half_ties_to_even(bench: Bench, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        between = (every[:-1] + every[1:]) / 2  # ties, where the neighbours are neighbours
    drawn = rng.integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32)
    edges = np.array([65519.996, 65520, 2**-25, 3 * 2**-25, 0], np.float32)
    x = np.concatenate([every, between, drawn, edges])
    x = np.resize(x, -(-len(x) // 64) * 64)
    out = np.zeros(len(x), dtype)
    body = "int i = blockIdx.x * 64 + threadIdx.x; out[i] = to_num(x[i]);"
    bench("Num* out, const float* x", body, out, x, blocks=len(x) // 64, dtype=dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(out.astype(np.float32), x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", [*HALVES, np.float32])
def test_sixteen_bytes_unpack_and_pack(bench: Bench, dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal(64 * 16 // np.dtype(dtype).itemsize).astype(dtype)
    out, wide = np.zeros_like(x), floats(len(x))
    body = """float n[NUMS16]; unpack(load16_once(x + NUMS16 * threadIdx.x), n);
    for (int i = 0; i < NUMS16; i++) wide[NUMS16 * threadIdx.x + i] = n[i];
    store16(out + NUMS16 * threadIdx.x, pack(n));"""
    bench("Num* out, float* wide, const Num* x", body, out, wide, x, dtype=dtype)
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(wide, x.astype(np.float32))


def test_many_kernels_do_not_take_all_mappings_of_the_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's stack takes two; those of kernels that have not run for long are given back, and come again."""
    monkeypatch.setattr("slora_ref.ops.host_kernels.MOST_STACKS", 600)
    mappings = []
    for number in range(6):
        out = floats(512)
        bench("float* out", f"out[threadIdx.x] = {number} + threadIdx.x;", out, threads=512)
        np.testing.assert_array_equal(out, number + np.arange(512))
        mappings.append(len(Path("/proc/self/maps").read_text().splitlines()))
    assert max(mappings[1:]) < mappings[0] + 300
    again = floats(512)
    bench.kernels.run(Launch("kernel_1", np.dtype(np.float16), (1, 1, 1), 512, 0, {"a0": again}))
    np.testing.assert_array_equal(again, np.arange(512))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("order", ORDERS)
def test_mma_multiplies_what_load_matrices_loads(bench: Bench, dtype: Any, order: str) -> None:
    """a [16, 16] row by row, b [16, 8] row by row and hence turned over as it is loaded."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype(dtype), rng.standard_normal((16, 8)).astype(dtype)
    body = """SHARED(Num, as, [16][16]); SHARED(Num, bs, [32][8]);
    int lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;
    for (int i = lane; i < 256; i += 32) as[i / 16][i % 16] = a[i], bs[i / 8][i % 8] = i < 128 ? b[i] : Num{0};
    __syncwarp();
    unsigned fragment[4], both[4];
    load_matrices<false>(fragment, &as[lane % 16][lane / 16 * 8]);
    load_matrices<true>(both, bs[lane]);
    float d[4] = {1, 1, 1, 1};
    const unsigned halves[2] = {both[0], both[1]};
    mma_16x8x16(d, fragment, halves);
    for (int i = 0; i < 4; i++) out[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];"""
    out = floats(128)
    bench("float* out, const Num* a, const Num* b", body, out, a, b, threads=32, order=order, dtype=dtype)
    want = 1 + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out.reshape(16, 8), want, rtol=1e-5, atol=1e-5)
