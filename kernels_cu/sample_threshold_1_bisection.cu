// computes: keep[row] = (order, ties), what top-k and then top-p leave of a row: all logits above `order`, and of those
//           equal to it the first `ties`; `order` is a logit's bits as order_of of sample.h arranges them
// arrays: keep [rows] of two 32-bit integers; logits [rows, vocab]; token [rows] the index of the largest logit;
//         temperature, top_p [rows] float32; top_k [rows]; top_k 0: all; temperature 0: the row is left alone
// map: a block owns a row, a thread every blockDim-th logit
// new here: the first rung. The largest order that enough logits reach is found bit by bit, in 32 sums: no sort
// limits: none; what a row that is not finite gets means nothing
#include "sample.h"

extern "C" __global__ void sample_threshold_1_bisection(int2* keep, const Num* logits, const int* token,
                                                        const float* temperature, const int* top_k,
                                                        const float* top_p, int rows, int vocab, int logits_stride) {
    SHARED(Weight, warps, [32]);
    long long row = blockIdx.x;
    const Num* from = logits + row * logits_stride;
    float heat = temperature[row], share = top_p[row];
    if (heat == 0) return;
    if (token[row] >= vocab) return;  // of a row that is all NaN no logit is the largest
    float best = to_float(from[token[row]]);
    auto weigh = [&](float logit) { return weight_of(relative(logit - best, heat)); };
    auto sum_from = [&](unsigned order, auto value) {  // over all logits of this order or a higher one
        Weight mine = 0, total;
        for (int i = threadIdx.x; i < vocab; i += blockDim.x)
            if (order_of(to_float(from[i])) >= order) mine += value(to_float(from[i]));
        sum_before(mine, warps, total);
        return total;
    };
    auto highest = [&](Weight wanted, auto value) {  // the highest order from which on the sum is `wanted` or more
        unsigned order = 0;
        for (unsigned bit = 1u << 31; bit; bit >>= 1)
            if (sum_from(order | bit, value) >= wanted) order |= bit;
        return order;
    };
    auto one = [](float) { return Weight(1); };
    unsigned order = 0;
    Weight ties = vocab;
    if (top_k[row] > 0 && top_k[row] < vocab) {
        order = highest(top_k[row], one);
        ties = top_k[row] - sum_from(order + 1, one);
    }
    if (share < 1) {
        Weight above = sum_from(order + 1, weigh);
        Weight total = above + (order ? ties * weigh(number_of(order)) : 0);
        double exact = share * static_cast<double>(total);
        Weight wanted = static_cast<Weight>(exact);
        if (wanted < exact || wanted == 0) wanted++;
        order = highest(wanted, weigh);
        above = sum_from(order + 1, weigh);
        Weight each = weigh(number_of(order));  // the last ones to be kept, so more than nothing
        ties = (wanted - above + each - 1) / each;
    }
    if (threadIdx.x == 0) keep[row] = int2{static_cast<int>(order), static_cast<int>(ties)};
}
