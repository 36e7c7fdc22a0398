// What the fast attention rungs share. A head is head_dim neighbouring numbers of a row or a page; NUMS16 are a load.
#pragma once
#include "lora.h"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
HELPER float exp2_approx(float x) {  // 2^x in one instruction, to 22 bits; subnormal results are 0
#if ON_DEVICE
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}
// Times q k, it makes a score whose softmax takes powers of two: 2^score is e^(q k / sqrt(head_dim)).
HELPER float score_scale(int head_dim) { return LOG2_E * rsqrtf(static_cast<float>(head_dim)); }
// The same number, of which the compiler knows nothing: what it makes is made again each time, not kept in registers.
HELPER int fresh(int x) {
#if ON_DEVICE
    asm volatile("" : "+r"(x));
#endif
    return x;
}
// Whether every chunk of every head in rows `stride` apart is one load.
HELPER bool whole_heads(const Num* rows, int stride, int head_dim) {
    return aligned16(rows) && stride % NUMS16 == 0 && head_dim % NUMS16 == 0;
}
// Numbers d .. of a head, zeros beyond its end.
HELPER uint4 load_head(const Num* head, int d, int head_dim) {
    return load_nums(head + d, max(0, min(NUMS16, head_dim - d)));
}
HELPER void add_weighted(float (&sums)[NUMS16], float weight, uint4 v) {
    float numbers[NUMS16];
    unpack(v, numbers);
#pragma unroll
    for (int i = 0; i < NUMS16; i++) sums[i] += weight * numbers[i];
}

// Decode attention: what the warps of a block found for one head. Warp w saw scores up to found[w * gap].x, whose
// powers add up to found[w * gap].y, and weighted sums of V; column d's lies at parts[w * pitch] for the caller's d.
struct DecodeOutput {
    Num* out;
    float* partial;
    float2* stats;
    int heads, head_dim, splits, out_stride;
};
HELPER void add_warps(const DecodeOutput& to, long long row, int head, int split, int d, int warps, const float2* found,
                      int gap, const float* parts, int pitch) {
    float largest = NEGATIVE_INFINITY, total = 0, sum = 0;
    for (int w = 0; w < warps; w++) largest = fmaxf(largest, found[w * gap].x);
    for (int w = 0; w < warps; w++) {
        float weight = found[w * gap].y == 0 ? 0.0f : exp2_approx(found[w * gap].x - largest);  // 0: no token
        total += weight * found[w * gap].y;
        sum += weight * parts[w * pitch];
    }
    long long place = (row * to.heads + head) * to.splits + split;
    if (to.splits > 1) to.partial[place * to.head_dim + d] = sum;
    else to.out[row * to.out_stride + head * to.head_dim + d] = to_num(total == 0 ? 0.0f : sum / total);
    if (to.splits > 1 && d == 0) to.stats[place] = float2{largest * LN_2, total};
}

#ifndef DTYPE_FLOAT32
// d [2][16, 8] += a [16, 16] b: b[0], b[1] for the left 8 columns, b[2], b[3] for the right.
HELPER void mma_16x16x16(float (*d)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
    mma_16x8x16(d[0], a, {b[0], b[1]});
    mma_16x8x16(d[1], a, {b[2], b[3]});
}
HELPER unsigned pair_of(float low, float high) {
#if ON_DEVICE  // one instruction; the compiler makes three
    unsigned pair;
#ifdef DTYPE_FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
#else
    return to_num(low).bits | static_cast<unsigned>(to_num(high).bits) << 16;
#endif
}
HELPER void store_pair(Num* to, float first, float second, int count) {  // the first `count` of two neighbours
    if (count >= 2 && reinterpret_cast<unsigned long long>(to) % 4 == 0) {
        *reinterpret_cast<unsigned*>(to) = pair_of(first, second);
    } else {
        if (count > 0) to[0] = to_num(first);
        if (count > 1) to[1] = to_num(second);
    }
}
// One step of a softmax in the registers of mma_16x8x16: of row lane / 4 + 8 * h, `seen` of whose TOKENS scores count
// (more or less than all, too). Scores become weights 2^((score - largest) scale), as pairs in `weights`; where the
// largest score so far grew, total and sums, which are in its terms, are rescaled. The lanes of a row add their totals
// later.
template <int TOKENS, int COLUMNS>
HELPER void soften(float (&scores)[TOKENS / 8][4], unsigned (&weights)[TOKENS / 8][2], float (&sums)[COLUMNS][4], int h,
                   int seen, float scale, float& largest, float& total) {
    float before = largest;
    seen -= threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++) {
        float& score = scores[i / 2][2 * h + i % 2];
        score = i / 2 * 8 + i % 2 < seen ? score : NEGATIVE_INFINITY;
        largest = fmaxf(largest, score);
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    if (largest > before) {
        float rescale = exp2_approx((before - largest) * scale);
        total *= rescale;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[c][2 * h] *= rescale, sums[c][2 * h + 1] *= rescale;
    }
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
        float low = exp2_approx(scores[n][2 * h] * scale - largest * scale);
        float high = exp2_approx(scores[n][2 * h + 1] * scale - largest * scale);
        total += low + high;
        weights[n][h] = pair_of(low, high);
    }
}
#endif
