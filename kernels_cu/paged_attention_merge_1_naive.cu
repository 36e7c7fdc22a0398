// computes: out[row] from what paged_attention_decode left of each split: the sums weighted by exp(largest score)
// arrays: out [rows, heads * head_dim]; partial [rows, heads, splits, head_dim] float32; stats [rows, heads, splits] of
//         (largest score, sum of exp); queries [rows] of (sequence slot, visible tokens), slot -1: not here
// map: a block owns a row and a head, a thread every blockDim-th column
// new here: the first rung, nothing but the formula
// limits: none; splits beyond a row's tokens are not read
#include "device.h"

extern "C" __global__ void paged_attention_merge_1_naive(Num* out, const float* partial, const float2* stats,
                                                         const int2* queries, int rows, int heads, int head_dim,
                                                         int chunk, int splits, int out_stride) {
    wait_for_previous();
    int head = blockIdx.x;
    long long row = blockIdx.y;
    int2 query = queries[row];
    if (query.x < 0) return;
    int used = min(ceil_div(query.y, chunk), splits);
    long long place = (row * heads + head) * splits;
    float largest = NEGATIVE_INFINITY;
    for (int split = 0; split < used; split++) largest = fmaxf(largest, stats[place + split].x);
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float sum = 0, total = 0;
        for (int split = 0; split < used; split++) {
            float weight = expf(stats[place + split].x - largest);
            sum += weight * partial[(place + split) * head_dim + d];
            total += weight * stats[place + split].y;
        }
        out[row * out_stride + head * head_dim + d] = to_num(total == 0 ? 0.0f : sum / total);
    }
}
