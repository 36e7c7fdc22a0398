// computes: x[row] += delta[row], where there is a delta; then out[row] = x / sqrt(mean(x^2) + eps) * weight
// arrays: out, x, delta [rows, hidden]; weight [hidden]; delta may be null, and x is then only read
// map: a block owns a row, a thread every blockDim-th chunk of 16 bytes
// new here: 16 bytes a load instead of one number; squares are added by shuffles, then one barrier instead of a sum of
//           blockDim numbers by every thread
// limits: none; rows whose strides are no multiple of 16 bytes are read number by number
#include "device.h"

extern "C" __global__ void rms_norm_2_vector(Num* out, Num* x, const Num* delta, const Num* weight, int rows,
                                             int hidden, float eps, int out_stride, int x_stride, int delta_stride) {
    SHARED(float, squares, [32]);  // of each warp
    long long row = blockIdx.x;
    Num *from = x + row * x_stride, *to = out + row * out_stride;
    const Num* plus = delta ? delta + row * delta_stride : nullptr;
    bool whole = (x_stride | delta_stride | out_stride) % NUMS16 == 0;
    auto load = [&](const Num* p, int count, float(&n)[NUMS16]) {  // zeros beyond count
        if (whole && count == NUMS16) return unpack(load16(p), n);
        for (int k = 0; k < NUMS16; k++) n[k] = k < count ? to_float(p[k]) : 0.0f;
    };
    auto store = [&](Num* p, int count, const float(&n)[NUMS16]) {
        if (whole && count == NUMS16) return store16(p, pack(n));
        for (int k = 0; k < count; k++) p[k] = to_num(n[k]);
    };
    float a[NUMS16], b[NUMS16], sum = 0;
    for (int i = threadIdx.x * NUMS16; i < hidden; i += blockDim.x * NUMS16) {
        int count = min(NUMS16, hidden - i);
        load(from + i, count, a);
        if (plus) {
            load(plus + i, count, b);
            for (int k = 0; k < NUMS16; k++) a[k] = to_float(to_num(a[k] + b[k]));  // the sum as stored
            store(from + i, count, a);
        }
        for (int k = 0; k < NUMS16; k++) sum += a[k] * a[k];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    __syncthreads();  // each warp's squares are written before all threads add them
    float total = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) total += squares[warp];
    float scale = rsqrtf(total / hidden + eps);
    for (int i = threadIdx.x * NUMS16; i < hidden; i += blockDim.x * NUMS16) {
        int count = min(NUMS16, hidden - i);
        load(from + i, count, a);
        load(weight + i, count, b);
        for (int k = 0; k < NUMS16; k++) a[k] *= scale * b[k];
        store(to + i, count, a);
    }
}
