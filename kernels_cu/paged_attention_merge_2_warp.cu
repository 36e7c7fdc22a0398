// computes: out[row] from what paged_attention_decode left of each split: the sums weighted by exp(largest score)
// arrays: out [rows, heads * head_dim]; partial [rows, heads, splits, head_dim] float32; stats [rows, heads, splits] of
//         (largest score, sum of exp); queries [rows] of (sequence slot, visible tokens), slot -1: not here
// map: a block owns a row and 4 heads, a warp one of them, a lane every 32nd split's weight, then every 32nd column
// new here: a weight is computed once, by the lane that owns its split, instead of by every thread for each column; the
//           parts of LOADS splits are in flight
// limits: none; splits beyond a row's tokens are not read
#include "device.h"
#include "attention.h"

constexpr int WARPS = 4, LOADS = 8;

extern "C" __global__ void paged_attention_merge_2_warp(Num* out, const float* partial, const float2* stats,
                                                        const int2* queries, int rows, int heads, int head_dim,
                                                        int chunk, int splits, int out_stride) {
    int head = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    long long row = blockIdx.y, place = (row * heads + head) * splits;
    wait_for_previous();
    int2 query = queries[row];
    int used = min(ceil_div(query.y, chunk), splits);
    if (query.x < 0 || head >= heads) return;
    float largest = NEGATIVE_INFINITY, total = 0;
    for (int split = lane; split < used; split += 32) largest = fmaxf(largest, stats[place + split].x);
    largest = warp_max(largest);
    for (int d = lane; d < ceil_div(head_dim, 32) * 32; d += 32) {
        float sum = 0, weight = 0;
        total = 0;
        for (int first = 0; first < used; first += LOADS) {
            float part[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                part[i] = first + i < used && d < head_dim ? partial[(place + first + i) * head_dim + d] : 0.0f;
            if (first % 32 == 0) {
                bool mine = first + lane < used;
                float2 found = mine ? stats[place + first + lane] : float2{0, 0};
                weight = mine ? exp2_approx((found.x - largest) * LOG2_E) : 0.0f;
                total += warp_sum(weight * found.y);
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) sum += __shfl_sync(~0u, weight, first % 32 + i) * part[i];
        }
        if (d < head_dim) out[row * out_stride + head * head_dim + d] = to_num(total == 0 ? 0.0f : sum / total);
    }
}
