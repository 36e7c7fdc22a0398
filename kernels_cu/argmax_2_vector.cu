// computes: token[row] = the first index of the row's largest logit; finite[row] = whether all of its logits are finite
// arrays: token, finite [rows] int32; logits [rows, vocab]
// map: a block owns a row, a thread every blockDim-th chunk of 16 bytes
// new here: 16 bytes a load instead of one number; lanes compare by shuffles, so thread 0 looks at warps, not threads
// limits: none; rows whose stride is no multiple of 16 bytes are read number by number
#include "device.h"

extern "C" __global__ void argmax_2_vector(int* token, int* finite, const Num* logits, int rows, int vocab,
                                           int logits_stride) {
    SHARED(float, bests, [32]);  // of each warp
    SHARED(int, tokens, [32]);
    SHARED(int, all_finite, [32]);
    const Num* from = logits + static_cast<long long>(blockIdx.x) * logits_stride;
    bool whole = logits_stride % NUMS16 == 0;
    float best = NEGATIVE_INFINITY;
    int at = vocab, good = 1;
    auto compare = [&](float logit, int i) {
        if (logit > best || (logit == best && i < at)) best = logit, at = i;
    };
    for (int i = threadIdx.x * NUMS16; i < vocab; i += blockDim.x * NUMS16) {
        float n[NUMS16];
        int count = min(NUMS16, vocab - i);
        if (whole && count == NUMS16) unpack(load16(from + i), n);
        else
            for (int k = 0; k < NUMS16; k++) n[k] = k < count ? to_float(from[i + k]) : 0.0f;
        for (int k = 0; k < NUMS16; k++) {
            good &= fabsf(n[k]) < -NEGATIVE_INFINITY;
            if (k < count) compare(n[k], i + k);
        }
    }
    for (int lanes = 16; lanes; lanes /= 2) {
        float other = __shfl_xor_sync(~0u, best, lanes);
        compare(other, __shfl_xor_sync(~0u, at, lanes));
        good &= __shfl_xor_sync(~0u, good, lanes);
    }
    int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) bests[warp] = best, tokens[warp] = at, all_finite[warp] = good;
    __syncthreads();  // each warp's findings are written before thread 0 compares them
    if (threadIdx.x > 0) return;
    for (int i = 1; i < blockDim.x / 32; i++) {
        good &= all_finite[i];
        compare(bests[i], tokens[i]);
    }
    token[blockIdx.x] = at;
    finite[blockIdx.x] = good;
}
