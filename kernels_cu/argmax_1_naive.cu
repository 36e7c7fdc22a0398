// computes: token[row] = the first index of the row's largest logit; finite[row] = whether all of its logits are finite
// arrays: token, finite [rows] int32; logits [rows, vocab]
// map: a block owns a row, a thread every blockDim-th logit
// new here: the first rung
// limits: none; the token of a row that is not finite means nothing
#include "device.h"

extern "C" __global__ void argmax_1_naive(int* token, int* finite, const Num* logits, int rows, int vocab,
                                          int logits_stride) {
    DYNAMIC_SHARED(int, tokens);            // [blockDim], behind it
    int* all_finite = tokens + blockDim.x;  // [blockDim] whether all is finite, and the best:
    float* bests = reinterpret_cast<float*>(all_finite + blockDim.x);
    const Num* from = logits + static_cast<long long>(blockIdx.x) * logits_stride;
    float best = NEGATIVE_INFINITY;
    int at = vocab;
    bool good = true;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float logit = to_float(from[i]);
        good = good && fabsf(logit) < -NEGATIVE_INFINITY;
        if (logit > best) best = logit, at = i;
    }
    tokens[threadIdx.x] = at, bests[threadIdx.x] = best, all_finite[threadIdx.x] = good;
    __syncthreads();  // each thread's findings are written before thread 0 compares them
    if (threadIdx.x > 0) return;
    for (int i = 1; i < blockDim.x; i++) {
        good = good && all_finite[i];
        if (bests[i] > best || (bests[i] == best && tokens[i] < at)) best = bests[i], at = tokens[i];
    }
    token[blockIdx.x] = at;
    finite[blockIdx.x] = good;
}
