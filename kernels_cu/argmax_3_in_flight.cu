// computes: token[row] = the first index of the row's largest logit; finite[row] = whether all of its logits are finite
// arrays: token, finite [rows] int32; logits [rows, vocab]
// map: a block owns a row, a thread every blockDim-th chunk of 16 bytes
// new here: LOADS loads of 16 bytes are in flight before the first is looked at: with few rows, time is latency
// limits: none; rows whose stride is no multiple of 16 bytes are read number by number
#include "device.h"
#include "attention.h"

constexpr int LOADS = 8;

extern "C" __global__ void argmax_3_in_flight(int* token, int* finite, const Num* logits, int rows, int vocab,
                                              int logits_stride) {
    SHARED(float, bests, [32]);  // of each warp
    SHARED(int, tokens, [32]);
    SHARED(int, all_finite, [32]);
    const Num* from = logits + static_cast<long long>(blockIdx.x) * logits_stride;
    bool whole = logits_stride % NUMS16 == 0;
    int whole_nums = whole ? vocab / NUMS16 * NUMS16 : 0, step = blockDim.x * NUMS16;
    float best = NEGATIVE_INFINITY;
    int at = vocab, good = 1;
    auto compare = [&](float logit, int i) {
        if (logit > best || (logit == best && i < at)) best = logit, at = i;
    };
    auto look = [&](float logit, int i) { good &= fabsf(logit) < -NEGATIVE_INFINITY, compare(logit, i); };
    for (int first = threadIdx.x * NUMS16; first < whole_nums; first += LOADS * step) {
        uint4 chunks[LOADS];
#pragma unroll
        for (int n = 0; n < LOADS; n++) chunks[n] = load16_once(from + first + n * step, first + n * step < whole_nums);
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            float numbers[NUMS16];
            unpack(chunks[n], numbers);
            for (int k = 0; k < NUMS16 && first + n * step < whole_nums; k++) look(numbers[k], first + n * step + k);
        }
    }
    for (int i = whole_nums + threadIdx.x; i < vocab; i += blockDim.x) look(to_float(from[i]), i);
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
