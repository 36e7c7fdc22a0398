// computes: keep[row] = (order, ties), what top-k and then top-p leave of a row: all logits above `order`, and of those
//           equal to it the first `ties`
// arrays: see sample_threshold_1_bisection
// map: a block owns a row, a thread every blockDim-th logit
// new here: a sum goes over those orders alone between which the one that is looked for must still lie, half as many each
//           time: exp is computed for few logits, not 32 times for all
// limits: none; what a row that is not finite gets means nothing
#include "sample.h"

extern "C" __global__ void sample_threshold_2_narrowing(int2* keep, const Num* logits, const int* token,
                                                        const float* temperature, const int* top_k,
                                                        const float* top_p, int rows, int vocab, int logits_stride) {
    SHARED(Weight, warps, [32]);
    long long row = blockIdx.x;
    const Num* from = logits + row * logits_stride;
    float heat = temperature[row], share = top_p[row];
    int most = top_k[row] > 0 ? top_k[row] : vocab;
    if (heat == 0) return;
    if (token[row] >= vocab) return;  // of a row that is all NaN no logit is the largest
    float best = to_float(from[token[row]]);
    auto sum_of = [&](unsigned low, unsigned count, auto value) {  // over the logits of orders low .. low + count - 1
        Weight mine = 0, total;
#pragma unroll 8
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            unsigned order = order_of(to_float(from[i]));
            if (order - low < count) mine += value(order);
        }
        sum_before(mine, warps, total);
        return total;
    };
    // The highest order from which on the sum is `wanted` or more; and the sum above it
    auto highest = [&](Weight wanted, Weight& above, auto value) {
        unsigned order = 0;
        above = 0;
        for (unsigned bit = 1u << 31; bit; bit >>= 1) {
            Weight sum = above + sum_of(order | bit, bit, value);
            if (sum >= wanted) order |= bit;
            else above = sum;
        }
        return order;
    };
    auto one = [](unsigned) { return Weight(1); };
    auto weigh = [&](unsigned order) { return weight_of(relative(number_of(order) - best, heat)); };
    unsigned order = 0;
    Weight ties = vocab, above;
    if (most < vocab) {
        order = highest(most, above, one);
        ties = most - above;
    }
    if (share < 1) {
        Weight total = sum_of(order + 1, ~order, weigh) + (order ? ties * weigh(order) : 0);
        double exact = share * static_cast<double>(total);
        Weight wanted = static_cast<Weight>(exact);
        if (wanted < exact || wanted == 0) wanted++;
        order = highest(wanted, above, weigh);
        Weight each = weigh(order);  // the last ones to be kept, so more than nothing
        ties = (wanted - above + each - 1) / each;
    }
    if (threadIdx.x == 0) keep[row] = int2{static_cast<int>(order), static_cast<int>(ties)};
}
