// What the fast rungs of the LoRA kernels share: vectors in pages, 16 bytes at a time.
// A vector (a column of A, a row of B) is cut into pieces of `width` numbers, a page each, and a piece into chunks of
// NUMS16 numbers: one load. The last chunk of a piece or of the vector may be ragged, and is then read one by one.
#pragma once

// Blocks that must fit a multiprocessor. Before sm_90 the same kernels take more registers; one block has enough.
#if ON_DEVICE && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int RESIDENT = 1;
#else
constexpr int RESIDENT = 2;
#endif
HELPER int pieces_of(int length, int width) {
    if (width >= length) return 1;  // saves a division, which takes as long as a read from L2
    return ceil_div(length, width);
}
HELPER int chunks_of(int length, int width) {
    if (width >= length) return ceil_div(length, NUMS16);
    return length / width * ceil_div(width, NUMS16) + ceil_div(length % width, NUMS16);
}
struct Chunk {
    int piece;   // page of the vector
    int offset;  // of its first number in the page
    int index;   // of its first number in the vector
    int count;   // its numbers, 0 beyond the vector's end
};
HELPER Chunk chunk_at(int chunk, int length, int width) {
    int per_piece = ceil_div(width, NUMS16), piece = 0;
    if (width < length) piece = chunk / per_piece;
    int offset = (chunk - piece * per_piece) * NUMS16, index = piece * width + offset;
    return Chunk{piece, offset, index, max(0, min(NUMS16, min(width - offset, length - index)))};
}

template <class Number>  // Num, const or not
HELPER Number* page_at(Number* pages, int page, int stride) {
#if ON_DEVICE  // one instruction; the compiler makes four
    Number* at;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(page), "r"(stride * int(sizeof(Num))), "l"(pages));
    return at;
#else
    return pages + page * static_cast<long long>(stride);
#endif
}
HELPER bool aligned16(const void* p) { return reinterpret_cast<unsigned long long>(p) % 16 == 0; }
// Whether every chunk of every page can be read by one load: what lies in a page beyond a vector's end is zeros.
HELPER bool whole_chunks(const Num* pages, int width, int page_stride) {
    return aligned16(pages) && page_stride % NUMS16 == 0 && width % NUMS16 == 0;
}
HELPER uint4 load_nums(const Num* from, int count) {  // zeros beyond count
    if (count == NUMS16 && aligned16(from)) return load16(from);
    float numbers[NUMS16];
#pragma unroll
    for (int i = 0; i < NUMS16; i++) numbers[i] = i < count ? to_float(from[i]) : 0.0f;
    return pack(numbers);
}
HELPER void add_products(float& sum, uint4 a, uint4 b) {
    float left[NUMS16], right[NUMS16];
    unpack(a, left), unpack(b, right);
#pragma unroll
    for (int i = 0; i < NUMS16; i++) sum += left[i] * right[i];
}
HELPER void store_nums(Num* to, uint4 v, int count) {
    if (count == NUMS16 && aligned16(to)) return store16(to, v);
    float numbers[NUMS16];
    unpack(v, numbers);
#pragma unroll
    for (int i = 0; i < NUMS16; i++)
        if (i < count) to[i] = to_num(numbers[i]);
}
// To shared memory, asynchronously; unwanted: zeros.
HELPER void copy16(uint4* shared, const Num* from, bool wanted) {
#if ON_DEVICE
    asm volatile("{.reg .pred p; setp.eq.s32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p;}"
                 :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "l"(from),
                         "r"(int(wanted)) : "memory");
#else
    copy_async16(shared, from, wanted ? 16 : 0);
#endif
}
// Where a chunk of a row lies in a slab of shared memory, 8 chunks a row: 8 neighbouring rows in different banks.
HELPER int place(int row, int chunk) { return row * 8 + (chunk ^ (row & 7)); }
// A number that a lambda can take at compile time
template <int N> struct Constant { static constexpr int VALUE = N; };

HELPER float4 load_four(const float* from, int count) {  // four numbers, of which count matter; none: zeros
#if ON_DEVICE
    float4 v;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;"
                 " mov.f32 %2, 0f00000000; mov.f32 %3, 0f00000000; @p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from), "r"(int(count > 0)) : "memory");
    return v;
#else
    if (count > 0) shim::check_aligned(from, 16);
    return count > 0 ? *reinterpret_cast<const float4*>(from) : float4{0, 0, 0, 0};
#endif
}
#ifndef DTYPE_FLOAT32
// Four numbers, in one load that the compiler leaves where it stands; unwanted: zeros.
HELPER void load8_once(unsigned (&to)[2], const Num* from, bool wanted) {
#if ON_DEVICE
    asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;"
                 " @p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];}"
                 : "=r"(to[0]), "=r"(to[1]) : "l"(from), "r"(int(wanted)) : "memory");
#else
    to[0] = to[1] = 0;
    if (wanted) shim::check_aligned(from, 8), memcpy(to, from, 8);
#endif
}
HELPER void store8(Num* to, const unsigned (&v)[2]) {
    *reinterpret_cast<int2*>(to) = {static_cast<int>(v[0]), static_cast<int>(v[1])};
}
// Four numbers of each of four ranks -> for each of the four numbers: ranks 0 and 1 in a word, 2 and 3 in another.
HELPER void pair_up(unsigned (&b)[4][2]) {
    const unsigned w[4][2] = {{b[0][0], b[0][1]}, {b[1][0], b[1][1]}, {b[2][0], b[2][1]}, {b[3][0], b[3][1]}};
#pragma unroll
    for (int q = 0; q < 8; q++) {
        unsigned low = w[q % 2 * 2][q / 4], high = w[q % 2 * 2 + 1][q / 4];
        b[q / 2][q % 2] = q / 2 % 2 ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
    }
}
HELPER unsigned pair(float a, float b) {  // two neighbouring numbers
#if ON_DEVICE  // one instruction; the compiler makes three
    unsigned both;
#ifdef DTYPE_FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
#endif
    return both;
#else
    return to_num(a).bits | static_cast<unsigned>(to_num(b).bits) << 16;
#endif
}
HELPER float power_of_two(int exponent) {  // of a normal number
    union { unsigned bits; float number; } both = {(exponent + 127u) << 23};
    return both.number;
}
HELPER int exponent_of(float x) {  // of a power of two that brings x > 0 below 2, or below 4 at the very end
    union { float number; unsigned bits; } both = {x};
    return min(max(int(both.bits >> 23) - 127, -126), 126);
}
// t of a tile to shared memory, splits added, zeros beyond `count` rows and `ranks`: t_tile [deep / 8][tall][8], each
// row divided by a power of two that up [tall] gives back, with the scale: half precision has few exponents. For all
// THREADS of a block, ROWS rows at a time of a thread. load(from, count): up to four numbers, zeros beyond count.
template <int THREADS = 256, int ROWS = 2, class Load>
HELPER void stage_t(Load load, Num* t_tile, float* up, const float* from, int count, int tall, int ranks, int deep,
                    int row_stride, int splits, long long split_stride, float scale) {
    int wide = deep <= 32 ? 8 : deep <= 64 ? 16 : 32, j = threadIdx.x % wide * 4;  // threads of a row; four ranks each
    for (int first = threadIdx.x / wide; first < tall; first += ROWS * THREADS / wide) {
        float sums[ROWS][4] = {};
        for (int split = 0; split < splits; split += 4) {  // four splits at a time
            float4 part[4 * ROWS];
#pragma unroll
            for (int k = 0; k < 4 * ROWS; k++) {
                int row = first + k % ROWS * THREADS / wide;
                const float* at = from + (split + k / ROWS) * split_stride + row * 1ll * row_stride + j;
                part[k] = load(at, split + k / ROWS < splits && row < count ? ranks - j : 0);
            }
#pragma unroll
            for (int k = 0; k < 4 * ROWS; k++) {
                float(&sum)[4] = sums[k % ROWS];
                sum[0] += part[k].x, sum[1] += part[k].y, sum[2] += part[k].z, sum[3] += part[k].w;
            }
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            int row = first + k * THREADS / wide;
            float largest = 0;
            for (int i = 0; i < 4; i++) {
                sums[k][i] = j + i < ranks ? sums[k][i] : 0;
                largest = fmaxf(largest, fabsf(sums[k][i]));
            }
            for (int step = wide / 2; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
            int exponent = exponent_of(largest);
            unsigned two[2];
            for (int i = 0; i < 2; i++)
                two[i] = pair(sums[k][2 * i] * power_of_two(-exponent), sums[k][2 * i + 1] * power_of_two(-exponent));
            if (row < tall && j < deep) store8(t_tile + (j / 8 * tall + row) * 8 + j % 8, two);
            if (row < tall && j == 0) up[row] = scale * power_of_two(exponent);
        }
    }
}
HELPER void add_pair(unsigned* two, float a, float b) {  // two neighbouring numbers += a, b
    Num low = {static_cast<unsigned short>(*two)}, high = {static_cast<unsigned short>(*two >> 16)};
    *two = pair(to_float(low) + a, to_float(high) + b);
}
#endif

// The targets' outputs stand side by side in y; each is cut into runs of `size` chunks. The run'th one:
struct Run {
    int target, length;  // and the numbers of its output
    int chunk;           // the run's first, in that output
    int column;          // of y where that output begins
};
HELPER Run find_run(int run, int size, const int (&d_out)[3], int width) {
    Run at = {0, 0, run * size, 0};
#pragma unroll
    for (int target = 0; target < 3; target++) {
        int chunks = ceil_div(chunks_of(d_out[target], width), size) * size;
        at.target = target, at.length = d_out[target];
        if (at.chunk < chunks) break;
        at.chunk -= chunks, at.column += d_out[target];
    }
    return at;
}
HELPER int count_runs(int size, const int (&d_out)[3], int width) {
    int runs = 0;
#pragma unroll
    for (int target = 0; target < 3; target++) runs += ceil_div(chunks_of(d_out[target], width), size);
    return runs;
}

#include "lora_plain.h"

// The first entry from i on, in steps, that has rows (y); tile_count or more: none. All lanes of a warp look, at 32
// entries at a time.
template <typename Tile>
HELPER int next_tile(const Tile* tiles, int i, int step, int tile_count) {
    for (; i < tile_count; i += 32 * step) {
        int mine = i + static_cast<int>(threadIdx.x % 32) * step, found = mine;
        if (mine >= tile_count || tiles[mine].y == 0) found = 0x7fffffff;
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) found = min(found, __shfl_xor_sync(~0u, found, lanes));
        if (found < tile_count) return found;
    }
    return tile_count;
}
