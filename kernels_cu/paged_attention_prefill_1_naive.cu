// computes: out[row] = softmax(q K^T / sqrt(head_dim)) V for many queries of a sequence, each over the tokens up to its
//           own
// arrays: out, q [rows, heads * head_dim]; pages [.., kv_heads * head_dim]; sequence_pages [slots, 2, positions]: pages
//         of keys, of values; tiles [tiles] of (first row, rows, sequence slot, visible tokens of the first row); 0
//         rows: nothing to do
// map: a block owns a tile and a head, and goes through its rows; a thread a token, then a column of V
// new here: the first rung, decode attention row by row; each row of a tile sees one token more than the row before
// limits: none
#include "device.h"

extern "C" __global__ void paged_attention_prefill_1_naive(Num* out, const Num* q, const Num* pages,
                                                           const int* sequence_pages, const int4* tiles, int tile_count,
                                                           int heads, int kv_heads, int head_dim, int positions,
                                                           int q_stride, int out_stride, int page_stride) {
    DYNAMIC_SHARED(float, scores);     // [blockDim], behind it the sums:
    float* sums = scores + blockDim.x;  // [head_dim], each touched by one thread
    int head = blockIdx.x;
    int4 tile = tiles[blockIdx.y];
    int column = head / (heads / kv_heads) * head_dim;
    const int* keys = sequence_pages + tile.z * 2LL * positions;
    const int* values = keys + positions;
    for (int i = 0; i < tile.y; i++) {
        long long row = tile.x + i;
        int visible = tile.w + i;
        for (int d = threadIdx.x; d < head_dim; d += blockDim.x) sums[d] = 0;
        float largest = NEGATIVE_INFINITY, total = 0;
        for (int first = 0; first < visible; first += blockDim.x) {
            int token = first + threadIdx.x, count = min(blockDim.x, visible - first);
            if (token < visible) {
                float score = 0;
                const Num* key = pages + keys[token] * static_cast<long long>(page_stride) + column;
                for (int d = 0; d < head_dim; d++)
                    score += to_float(q[row * q_stride + head * head_dim + d]) * to_float(key[d]);
                scores[threadIdx.x] = score * rsqrtf(static_cast<float>(head_dim));
            }
            __syncthreads();  // scores are written before any thread reads them
            float before = largest;
            for (int k = 0; k < count; k++) largest = fmaxf(largest, scores[k]);
            float rescale = expf(before - largest);
            total *= rescale;
            for (int k = 0; k < count; k++) total += expf(scores[k] - largest);
            for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
                float sum = sums[d] * rescale;
                for (int k = 0; k < count; k++) {
                    const Num* value = pages + values[first + k] * static_cast<long long>(page_stride) + column;
                    sum += expf(scores[k] - largest) * to_float(value[d]);
                }
                sums[d] = sum;
            }
            __syncthreads();  // scores are read before the next ones are written
        }
        for (int d = threadIdx.x; d < head_dim; d += blockDim.x)
            out[row * out_stride + head * head_dim + d] = to_num(sums[d] / total);
    }
}
