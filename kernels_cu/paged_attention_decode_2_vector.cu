// computes: out[row] = softmax(q K^T / sqrt(head_dim)) V for one query a row, over the tokens of the row's sequence
// arrays: out, q [rows, heads * head_dim]; pages [.., kv_heads * head_dim]; sequence_pages [slots, 2, positions]: pages
//         of keys, of values; queries [rows] of (sequence slot, visible tokens), slot -1: not here; partial [rows,
//         heads, splits, head_dim] float32 and stats [rows, heads, splits] of (largest score, sum of exp)
// map: a block owns a row, a head and, of its tokens, the split-th `chunk`; a warp every WARPS-th of those tokens, a
//      lane every 32nd chunk of 16 bytes of the head
// new here: neighbouring lanes read one key and one value 16 bytes each, where a thread read a key of its own number by
//           number; each warp has a maximum and sums of its own, so the warps meet once, at the end
// limits: head_dim up to 256; above, the first rung serves
#include "device.h"
#include "attention.h"

constexpr int WARPS = 8, CHUNKS = 256 / NUMS16 / 32;  // chunks of a head that a lane owns

extern "C" __global__ void paged_attention_decode_2_vector(Num* out, float* partial, float2* stats, const Num* q,
                                                           const Num* pages, const int* sequence_pages,
                                                           const int2* queries, int rows, int heads, int kv_heads,
                                                           int head_dim, int positions, int chunk, int splits,
                                                           int q_stride, int out_stride, int page_stride) {
    DYNAMIC_SHARED(float, parts);     // [WARPS][head_dim]
    SHARED(float2, found, [WARPS]);  // each warp's largest score and sum of powers
    int head = blockIdx.x, split = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long row = blockIdx.y;
    int2 query = queries[row];
    int begin = split * chunk, end = min(begin + chunk, query.y);
    if (query.x < 0 || (begin >= end && split > 0)) return;
    const int* keys = sequence_pages + query.x * 2LL * positions;
    const int* values = keys + positions;
    const Num* kv = pages + head / (heads / kv_heads) * head_dim;
    uint4 mine[CHUNKS];
    float sums[CHUNKS][NUMS16] = {}, largest = NEGATIVE_INFINITY, total = 0;
    for (int c = 0; c < CHUNKS; c++)
        mine[c] = load_head(q + row * q_stride + head * head_dim, (32 * c + lane) * NUMS16, head_dim);
    for (int token = begin + warp; token < end; token += WARPS) {
        const Num *key = page_at(kv, keys[token], page_stride), *value = page_at(kv, values[token], page_stride);
        float score = 0;
        for (int c = 0; c < CHUNKS; c++)
            add_products(score, mine[c], load_head(key, (32 * c + lane) * NUMS16, head_dim));
        score = warp_sum(score) * score_scale(head_dim);
        float before = largest;
        largest = fmaxf(largest, score);
        float rescale = exp2_approx(before - largest), weight = exp2_approx(score - largest);
        total = total * rescale + weight;
        for (int c = 0; c < CHUNKS; c++) {
            for (float& sum : sums[c]) sum *= rescale;
            add_weighted(sums[c], weight, load_head(value, (32 * c + lane) * NUMS16, head_dim));
        }
    }
    for (int c = 0; c < CHUNKS; c++)
        for (int k = 0, d = (32 * c + lane) * NUMS16; k < NUMS16; k++)
            if (d + k < head_dim) parts[warp * head_dim + d + k] = sums[c][k];
    if (lane == 0) found[warp] = float2{largest, total};
    __syncthreads();  // each warp's sums are written before all threads add them
    DecodeOutput to = {out, partial, stats, heads, head_dim, splits, out_stride};
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x)
        add_warps(to, row, head, split, d, WARPS, found, 1, parts + d, head_dim);
}
