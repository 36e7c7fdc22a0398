// What all kernels share: the number type of storage, and the instructions that C++ cannot name, each with a host twin.
// NVRTC compiles it without any other header. g++ takes the rest of CUDA from host/cuda_on_cpu.h.
// One of DTYPE_FLOAT32, DTYPE_FLOAT16, DTYPE_BFLOAT16 is defined by whoever compiles a kernel.
#pragma once
#ifdef __CUDACC__
#define SHARED(type, name, size) __shared__ __align__(16) type name size
#define DYNAMIC_SHARED(type, name) \
    extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared)
#define ON_DEVICE 1
#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)
#else
#include "host/cuda_on_cpu.h"
#define ON_DEVICE 0
#define NEGATIVE_INFINITY (-__builtin_huge_valf())
#endif
#define HELPER __device__ __forceinline__

// Where one target's A and B of one adapter lie and how they act in one layer; made by lora_lookup. A column of A (a
// row of B) takes ceil(its length / width) pages; column j's piece p is in page page_table[a + j * pieces + p].
struct __align__(16) Lora {
    int a, b;     // first entries of A and of B in the flat page table
    int rank;     // 0: none, leave the row alone
    float scale;
};

HELPER int ceil_div(int a, int b) { return (a + b - 1) / b; }

// --- numbers as stored: Num; all arithmetic is in float32 ---
#if defined(DTYPE_FLOAT32)
typedef float Num;
HELPER float to_float(Num x) { return x; }
HELPER Num to_num(float x) { return x; }
#else
struct Num { unsigned short bits; };
#if ON_DEVICE
HELPER float to_float(Num x) {
    float y;
#ifdef DTYPE_FLOAT16
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
#else
    y = __uint_as_float(static_cast<unsigned>(x.bits) << 16);
#endif
    return y;
}
HELPER Num to_num(float x) {  // rounds to nearest, ties to even
    Num y;
#ifdef DTYPE_FLOAT16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}
#else
template <class To, class From> HELPER To bits_of(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
HELPER float to_float(Num x) {
#ifdef DTYPE_FLOAT16
    unsigned sign = (x.bits & 0x8000u) << 16, rest = (x.bits & 0x7fffu) << 13;
    if (rest >= 0x7c00u << 13) return bits_of<float>(sign | rest | 0x7f800000u);  // infinity and NaN
    return bits_of<float>(sign | bits_of<unsigned>(bits_of<float>(rest) * 0x1p112f));  // also right for subnormals
#else
    return bits_of<float>(static_cast<unsigned>(x.bits) << 16);
#endif
}
HELPER Num to_num(float x) {
    unsigned bits = bits_of<unsigned>(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return Num{0x7fff};  // NaN
#ifdef DTYPE_FLOAT16
    if (rest >= 0x477ff000u) rest = 0x7c00u;  // rounds to infinity
    else if (rest < 0x38800000u) rest = bits_of<unsigned>(bits_of<float>(rest) + 0.5f) - 0x3f000000u;  // subnormal
    else rest = (rest + 0xfffu + (rest >> 13 & 1) - 0x38000000u) >> 13;
#else
    rest = (rest + 0x7fffu + (rest >> 16 & 1)) >> 16;
#endif
    return Num{static_cast<unsigned short>(sign | rest)};
}
#endif
#endif

// --- 16 bytes at a time; the address must be a multiple of 16 ---
constexpr int NUMS16 = 16 / sizeof(Num);  // numbers in 16 bytes
HELPER uint4 load16(const void* from) {
#if !ON_DEVICE
    shim::check_aligned(from, 16);
#endif
    return *static_cast<const uint4*>(from);
}
// A load that the compiler leaves where it stands, ahead of its use, and that does not stay in L1: for weights.
// Unwanted: zeros.
HELPER uint4 load16_once(const void* from, bool wanted = true) {
#if ON_DEVICE
    uint4 v;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
                 " @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "r"(static_cast<int>(wanted)));
    return v;
#else
    return wanted ? load16(from) : uint4{0, 0, 0, 0};
#endif
}
HELPER void store16(void* to, uint4 v) {
#if !ON_DEVICE
    shim::check_aligned(to, 16);
#endif
    *static_cast<uint4*>(to) = v;
}
HELPER void unpack(uint4 v, float (&numbers)[NUMS16]) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < NUMS16; i++) {
#ifdef DTYPE_FLOAT32
#if ON_DEVICE
        numbers[i] = __uint_as_float(words[i]);
#else
        memcpy(&numbers[i], &words[i], 4);
#endif
#else
        numbers[i] = to_float(Num{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)});
#endif
    }
}
HELPER uint4 pack(const float (&numbers)[NUMS16]) {
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < NUMS16; i++) {
#ifdef DTYPE_FLOAT32
#if ON_DEVICE
        words[i] = __float_as_uint(numbers[i]);
#else
        memcpy(&words[i], &numbers[i], 4);
#endif
#else
        words[i / 2] |= static_cast<unsigned>(to_num(numbers[i]).bits) << i % 2 * 16;
#endif
    }
    return uint4{words[0], words[1], words[2], words[3]};
}

// --- sums over the 32 lanes of a warp, in an order that no other row can change ---
HELPER float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
HELPER float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// --- programmatic dependent launch: sm_90 has it; elsewhere and on the host a kernel starts when the last ended ---
// In the first kernel: from here on the next one may start; what it needs is still only visible after its wait.
HELPER void launch_dependents() {
#if ON_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// In the next one: a thread calls it before it reads what the kernel before wrote; one block at least before it ends.
HELPER void wait_for_previous() {
#if ON_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- asynchronous copies of 16 bytes from global to shared memory; bytes < 16: the rest becomes 0 ---
HELPER void copy_async16(void* shared, const void* global, int bytes = 16) {
#if ON_DEVICE
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "l"(global), "r"(bytes) : "memory");
#else
    shim::copy_async(shared, global, bytes);
#endif
}
HELPER void copies_commit() {  // the copies issued so far form a group
#if ON_DEVICE
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    shim::fibers[shim::current].group++;
#endif
}
// Waits for this thread's groups but the NEWEST ones; other threads see what was copied after a barrier.
template <int NEWEST> HELPER void copies_wait() {
#if ON_DEVICE
    asm volatile("cp.async.wait_group %0;" :: "n"(NEWEST) : "memory");
#else
    shim::copies_wait(NEWEST);
#endif
}

#ifndef DTYPE_FLOAT32
// --- tensor cores: d [16, 8] += a [16, 16] b [16, 8], sums in float32. With g = lane / 4, i = lane % 4 * 2 a lane has
// a[0]: (row g, columns i, i+1), a[1]: row g+8, a[2]: columns i+8, i+9, a[3]: both; b[0]: (rows i, i+1, column g),
// b[1]: rows i+8, i+9; d[0], d[1]: (row g, columns i, i+1), d[2], d[3]: row g+8. The lower index is in the lower half.
HELPER void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if ON_DEVICE
#ifdef DTYPE_FLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
    asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#undef MMA
#else
    struct Lane { float* d; const unsigned *a, *b; } mine = {d, a, b};
    shim::meet(__LINE__, ~0u, &mine, [](void** all) {
        auto half = [](unsigned word, int k) { return to_float(Num{static_cast<unsigned short>(word >> k % 2 * 16)}); };
        auto lane = [&](int group, int k) { return static_cast<Lane*>(all[group * 4 + k % 8 / 2]); };
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 8; column++) {
                float sum = 0;
                for (int k = 0; k < 16; k++)
                    sum += half(lane(row % 8, k)->a[row / 8 + k / 8 * 2], k) * half(lane(column, k)->b[k / 8], k);
                lane(row % 8, column)->d[row / 8 * 2 + column % 2] += sum;
            }
    });
#endif
}
// Four 8 x 8 matrices from shared memory: lane i gives the address of row i % 8 of matrix i / 8 (16 bytes) and gets, of
// matrix m in r[m], row lane / 4, columns lane % 4 * 2 and the next; transposed: of the matrix turned over.
template <bool TRANSPOSED> HELPER void load_matrices(unsigned (&r)[4], const void* row) {
#if ON_DEVICE
    unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
#define LOAD(kind) asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                                : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory")
    if (TRANSPOSED) LOAD(".trans");
    else LOAD("");
#undef LOAD
#else
    shim::check_aligned(row, 16);
    struct Lane { unsigned* r; const unsigned short* row; } mine = {r, static_cast<const unsigned short*>(row)};
    shim::meet(__LINE__, ~0u, &mine, [](void** all) {
        auto at = [&](int m, int i, int j) { return static_cast<Lane*>(all[m * 8 + i])->row[j]; };
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) {
                int i = lane / 4, j = lane % 4 * 2;
                unsigned low = TRANSPOSED ? at(m, j, i) : at(m, i, j);
                unsigned high = TRANSPOSED ? at(m, j + 1, i) : at(m, i, j + 1);
                static_cast<Lane*>(all[lane])->r[m] = low | high << 16;
            }
    });
#endif
}
#endif
