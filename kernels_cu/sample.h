// What the sampling kernels share. Probabilities are whole numbers, 2^40 for the likeliest token: then a sum does not
// depend on its order, and a token is drawn the same way in every batch.
#pragma once
#include "device.h"

typedef unsigned long long Weight;
typedef unsigned long long Word;

#if ON_DEVICE
HELPER unsigned bits_of_float(float x) { return __float_as_uint(x); }
HELPER float float_of_bits(unsigned bits) { return __uint_as_float(bits); }
HELPER Word high_word(Word a, Word b) { return __umul64hi(a, b); }
#else
HELPER unsigned bits_of_float(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
HELPER float float_of_bits(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
HELPER Word high_word(Word a, Word b) { return static_cast<unsigned __int128>(a) * b >> 64; }
#endif

// Bits in the order of the numbers; -0 is 0.
HELPER unsigned order_of(float x) {
    unsigned bits = bits_of_float(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
HELPER float number_of(unsigned order) { return float_of_bits(order >> 31 ? order ^ 0x80000000u : ~order); }

// exp(below / temperature): the probability beside that of the likeliest token, which lies `-below` above.
HELPER float relative(float below, float temperature) { return below == 0 ? 1.0f : expf(below / temperature); }
HELPER Weight weight_of(float probability) { return static_cast<Weight>(probability * 1099511627776.0f); }

// The sum of `mine` over the threads before this one, and over all. Sums of each warp go through `warps` [32].
HELPER Weight sum_before(Weight mine, Weight* warps, Weight& total) {
    int lane = threadIdx.x % 32;
    Weight upto = mine;
    for (int step = 1; step < 32; step *= 2) {
        Weight other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
    }
    __syncthreads();  // the warps' sums of the call before are read before they are overwritten
    if (lane == 31) warps[threadIdx.x / 32] = upto;
    __syncthreads();  // each warp's sum is written before all threads add them
    Weight start = total = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) {
        if (warp == threadIdx.x / 32) start = total;
        total += warps[warp];
    }
    return start + upto - mine;
}

// The first 64 bits of NumPy's Philox(key=seed, counter=position): Philox 4x64-10 (Salmon et al. 2011).
HELPER Word philox(Word seed, Word position) {
    Word c0 = position + 1, c1 = 0, c2 = 0, c3 = 0, key0 = seed, key1 = 0;
    for (int round = 0; round < 10; round++) {
        Word low0 = 0xD2E7470EE14C6C93ull * c0, high0 = high_word(0xD2E7470EE14C6C93ull, c0);
        Word low1 = 0xCA5A826395121157ull * c2, high1 = high_word(0xCA5A826395121157ull, c2);
        c0 = high1 ^ c1 ^ key0, c1 = low1, c2 = high0 ^ c3 ^ key1, c3 = low0;
        key0 += 0x9E3779B97F4A7C15ull, key1 += 0xBB67AE8584CAA73Bull;
    }
    return c0;
}
