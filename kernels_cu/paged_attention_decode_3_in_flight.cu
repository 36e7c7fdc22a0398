// computes: out[row] = softmax(q K^T / sqrt(head_dim)) V for one query a row, over the tokens of the row's sequence
// arrays: out, q [rows, heads * head_dim]; pages [.., kv_heads * head_dim]; sequence_pages [slots, 2, positions]: pages
//         of keys, of values; queries [rows] of (sequence slot, visible tokens), slot -1: not here; partial [rows,
//         heads, splits, head_dim] float32 and stats [rows, heads, splits] of (largest score, sum of exp)
// map: a block owns a row, the heads of K and V that 32 lanes read side by side, of the query heads that share one up
//      to four, and of the tokens the split-th `chunk`; a warp every WARPS-th TOKENS of those, a lane 16 bytes of a
//      head
// new here: TOKENS keys and values are in flight before the first is used, and their successors' page ids too; sums are
//           rescaled once for TOKENS; heads that share K and V share its one read
// limits: head_dim up to 256, above the first rung serves; no float32
#include "device.h"
#include "attention.h"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
paged_attention_decode_3_in_flight(Num* out, float* partial, float2* stats, const Num* q, const Num* pages,
                                   const int* sequence_pages, const int2* queries, int rows, int heads, int kv_heads,
                                   int head_dim, int positions, int chunk, int splits, int q_stride, int out_stride,
                                   int page_stride) {
    DYNAMIC_SHARED(float, parts);            // [WARPS][query heads of a lane][32 * NUMS16]: each warp's sums
    SHARED(float2, found, [WARPS][4 * 32]);  // each warp's largest score and sum: [.. query heads of a lane][side]
    launch_dependents();
    wait_for_previous();
    int split = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32, lanes = 1;
    while (lanes * NUMS16 < head_dim) lanes *= 2;  // of a head
    long long row = blockIdx.y;
    int2 query = queries[row];
    int begin = split * chunk, end = min(begin + chunk, query.y);
    if (query.x < 0 || (begin >= end && split > 0)) return;
    const int* keys = sequence_pages + query.x * 2LL * positions;
    const int* values = keys + positions;
    bool whole = whole_heads(pages, page_stride, head_dim);
    float scale = score_scale(head_dim);

    auto attend = [&](auto shared_by) {
        constexpr int HEADS = decltype(shared_by)::VALUE, TOKENS = 8 / HEADS;  // HEADS: query heads of a lane
        int group = heads / kv_heads, parts_of_group = ceil_div(group, HEADS), side = 32 / lanes;
        int first_kv = blockIdx.x / parts_of_group * side, first_in_group = blockIdx.x % parts_of_group * HEADS;
        int kv_head = first_kv + lane / lanes, d = lane % lanes * NUMS16;
        int count = kv_head < kv_heads ? max(0, min(NUMS16, head_dim - d)) : 0;
        const Num* kv = pages + kv_head * head_dim + d;
        uint4 mine[HEADS];
        float sums[HEADS][NUMS16] = {}, largest[HEADS], total[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const Num* head = q + row * q_stride + (kv_head * group + first_in_group + h) * head_dim;
            mine[h] = load_nums(head + d, first_in_group + h < group ? count : 0);
            largest[h] = NEGATIVE_INFINITY, total[h] = 0;
        }
        int at = begin + warp * TOKENS, key[TOKENS], value[TOKENS];
        auto look_up = [&] {
            for (int t = 0, last = end - 1; t < TOKENS; t++)
                key[t] = keys[min(at + t, last)], value[t] = values[min(at + t, last)];
        };
        if (at < end) look_up();
        while (at < end) {
            uint4 k[TOKENS], v[TOKENS];
            int left = end - at;
#pragma unroll
            for (int t = 0; t < TOKENS && whole; t++)
                k[t] = load16_once(page_at(kv, key[t], page_stride), t < left && count);
#pragma unroll
            for (int t = 0; t < TOKENS && whole; t++)
                v[t] = load16_once(page_at(kv, value[t], page_stride), t < left && count);
            for (int t = 0; t < TOKENS && !whole; t++) {
                k[t] = load_nums(page_at(kv, key[t], page_stride), t < left ? count : 0);
                v[t] = load_nums(page_at(kv, value[t], page_stride), t < left ? count : 0);
            }
            at += WARPS * TOKENS;
            if (at < end) look_up();
            float score[HEADS][TOKENS] = {};
#pragma unroll
            for (int i = 0; i < HEADS * TOKENS; i++)
                add_products(score[i / TOKENS][i % TOKENS], mine[i / TOKENS], k[i % TOKENS]);
            for (int step = lanes / 2; step; step /= 2)
#pragma unroll
                for (int i = 0; i < HEADS * TOKENS; i++)
                    score[i / TOKENS][i % TOKENS] += __shfl_xor_sync(~0u, score[i / TOKENS][i % TOKENS], step);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float before = largest[h];
                for (int t = 0; t < TOKENS; t++) {
                    score[h][t] = t < left ? score[h][t] * scale : NEGATIVE_INFINITY;
                    largest[h] = fmaxf(largest[h], score[h][t]);
                }
                float rescale = exp2_approx(before - largest[h]);
                total[h] *= rescale;
                for (float& sum : sums[h]) sum *= rescale;
                for (int t = 0; t < TOKENS; t++) total[h] += score[h][t] = exp2_approx(score[h][t] - largest[h]);
            }
#pragma unroll
            for (int i = 0; i < HEADS * TOKENS; i++)
                add_weighted(sums[i / TOKENS], score[i / TOKENS][i % TOKENS], v[i % TOKENS]);
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            for (int i = 0; i < NUMS16; i++) parts[((warp * HEADS + h) * 32 + lane) * NUMS16 + i] = sums[h][i];
            if (d == 0) found[warp][h * 32 + lane / lanes] = float2{largest[h], total[h]};
        }
        __syncthreads();  // each warp's sums are written before all threads add them
        DecodeOutput to = {out, partial, stats, heads, head_dim, splits, out_stride};
        for (int i = threadIdx.x; i < HEADS * 32 * NUMS16; i += blockDim.x) {
            int h = i / (32 * NUMS16), beside = i / (lanes * NUMS16) % side, column = i % (lanes * NUMS16);
            if (column < head_dim && first_kv + beside < kv_heads && first_in_group + h < group)
                add_warps(to, row, (first_kv + beside) * group + first_in_group + h, split, column, WARPS,
                          &found[0][h * 32 + beside], 4 * 32, parts + i, HEADS * 32 * NUMS16);
        }
    };
    if (heads == kv_heads) attend(Constant<1>());
    else if (heads == 2 * kv_heads) attend(Constant<2>());
    else attend(Constant<4>());
}
