// computes: token[row] = a token drawn from softmax(logits / temperature) among those that `keep` and min-p leave: the
//           first at which the running sum of probabilities passes noise x total
// arrays: token [rows]: before, the index of the largest logit; logits [rows, vocab]; keep [rows] of (order, ties) from
//         sample_threshold; temperature (0: the token stays), min_p [rows] float32; seeds, positions [rows] 64-bit: the
//         noise is a function of these two alone
// map: a block owns a row, a thread a run of neighbouring logits
// new here: the first rung
// limits: none; what a row that is not finite gets means nothing
#include "sample.h"

extern "C" __global__ void sample_draw_1_philox(int* token, const Num* logits, const int2* keep,
                                                const float* temperature, const float* min_p, const Word* seeds,
                                                const Word* positions, int rows, int vocab, int logits_stride) {
    SHARED(Weight, warps, [32]);
    long long row = blockIdx.x;
    const Num* from = logits + row * logits_stride;
    float heat = temperature[row], least = min_p[row];
    if (heat == 0) return;
    if (token[row] >= vocab) return;  // of a row that is all NaN no logit is the largest
    unsigned order = keep[row].x;
    Weight ties = static_cast<unsigned>(keep[row].y), ignored, total;
    float best = to_float(from[token[row]]);
    int thread = threadIdx.x, run = ceil_div(vocab, blockDim.x);
    int first = min(vocab, thread * run), last = min(vocab, first + run);
    Weight equal = 0;
    for (int i = first; i < last; i++) equal += order_of(to_float(from[i])) == order;
    Weight equals_before = sum_before(equal, warps, ignored);
    auto go = [&](Weight sum, Weight target) {  // through the run, until the sum passes the target
        Weight seen = equals_before;
        int i = first;
        for (; i < last && sum <= target; i++) {
            float logit = to_float(from[i]), probability = relative(logit - best, heat);
            bool kept = order_of(logit) > order || (order_of(logit) == order && seen++ < ties);
            if (kept && probability >= least) sum += weight_of(probability);
            if (sum > target) token[row] = i;
        }
        return sum;
    };
    Weight mine = go(0, ~0ull), before = sum_before(mine, warps, total);
    Weight target = high_word(philox(seeds[row], positions[row]) >> 11 << 11, total);  // noise in [0, 1) x total
    if (target < before + mine) go(before, target);  // in runs behind the token it is a sum that has passed already
}
