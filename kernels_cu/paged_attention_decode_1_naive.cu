// computes: out[row] = softmax(q K^T / sqrt(head_dim)) V for one query a row, over the tokens of the row's sequence
// arrays: out, q [rows, heads * head_dim]; pages [.., kv_heads * head_dim]; sequence_pages [slots, 2, positions]: pages
//         of keys, of values; queries [rows] of (sequence slot, visible tokens), slot -1: not here; partial [rows,
//         heads, splits, head_dim] float32 and stats [rows, heads, splits] of (largest score, sum of exp)
// map: a block owns a row, a head and, of its tokens, the split-th `chunk`; a thread a token, then a column of V
// new here: the first rung. Scores of blockDim tokens at a time; sums are rescaled when a larger score appears
// limits: none; with one split the result is final, else paged_attention_merge makes it from partial and stats
#include "device.h"

extern "C" __global__ void paged_attention_decode_1_naive(Num* out, float* partial, float2* stats, const Num* q,
                                                          const Num* pages, const int* sequence_pages,
                                                          const int2* queries, int rows, int heads, int kv_heads,
                                                          int head_dim, int positions, int chunk, int splits,
                                                          int q_stride, int out_stride, int page_stride) {
    DYNAMIC_SHARED(float, scores);     // [blockDim], behind it the sums:
    float* sums = scores + blockDim.x;  // [head_dim], each touched by one thread
    int head = blockIdx.x, split = blockIdx.z;
    long long row = blockIdx.y;
    int2 query = queries[row];
    int begin = split * chunk, end = min(begin + chunk, query.y);
    if (query.x < 0 || (begin >= end && split > 0)) return;
    int column = head / (heads / kv_heads) * head_dim;
    const int* keys = sequence_pages + query.x * 2LL * positions;
    const int* values = keys + positions;
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) sums[d] = 0;
    float largest = NEGATIVE_INFINITY, total = 0;
    for (int first = begin; first < end; first += blockDim.x) {
        int token = first + threadIdx.x, count = min(blockDim.x, end - first);
        if (token < end) {
            float score = 0;
            const Num* key = pages + keys[token] * static_cast<long long>(page_stride) + column;
            for (int d = 0; d < head_dim; d++)
                score += to_float(q[row * q_stride + head * head_dim + d]) * to_float(key[d]);
            scores[threadIdx.x] = score * rsqrtf(static_cast<float>(head_dim));
        }
        __syncthreads();  // scores are written before any thread reads them
        float before = largest;
        for (int i = 0; i < count; i++) largest = fmaxf(largest, scores[i]);
        float rescale = expf(before - largest);
        total *= rescale;
        for (int i = 0; i < count; i++) total += expf(scores[i] - largest);
        for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
            float sum = sums[d] * rescale;
            for (int i = 0; i < count; i++) {
                const Num* value = pages + values[first + i] * static_cast<long long>(page_stride) + column;
                sum += expf(scores[i] - largest) * to_float(value[d]);
            }
            sums[d] = sum;
        }
        __syncthreads();  // scores are read before the next ones are written
    }
    long long place = (row * heads + head) * splits + split;
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        if (splits > 1) partial[place * head_dim + d] = sums[d];
        else out[row * out_stride + head * head_dim + d] = to_num(total == 0 ? 0.0f : sums[d] / total);
    }
    if (splits > 1 && threadIdx.x == 0) stats[place] = float2{largest, total};
}
