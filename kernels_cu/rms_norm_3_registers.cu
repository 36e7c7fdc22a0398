// computes: x[row] += delta[row], where there is a delta; then out[row] = x / sqrt(mean(x^2) + eps) * weight
// arrays: out, x, delta [rows, hidden]; weight [hidden]; delta may be null, and x is then only read
// map: a block owns a row, a thread its every blockDim-th chunk of 16 bytes, KEPT of them in registers
// new here: x and the weights are read once, before the sum of squares is known, and wait in registers for it; the
//           weights already while the kernel before ends
// limits: none; numbers beyond KEPT chunks a thread, and rows whose strides are no multiple of 16 bytes, are read again
#include "device.h"
#include "attention.h"

constexpr int KEPT = 2;

extern "C" __global__ void rms_norm_3_registers(Num* out, Num* x, const Num* delta, const Num* weight, int rows,
                                                int hidden, float eps, int out_stride, int x_stride,
                                                int delta_stride) {
    SHARED(float, squares, [32]);  // of each warp
    launch_dependents();
    long long row = blockIdx.x;
    Num *from = x + row * x_stride, *to = out + row * out_stride;
    const Num* plus = delta ? delta + row * delta_stride : nullptr;
    bool whole = (x_stride | delta_stride | out_stride | hidden) % NUMS16 == 0;
    int first = threadIdx.x * NUMS16, step = blockDim.x * NUMS16, kept = whole ? min(hidden, KEPT * step) : 0;
    uint4 a[KEPT], b[KEPT], weights[KEPT];
#pragma unroll
    for (int n = 0; n < KEPT; n++) weights[n] = load16_once(weight + first + n * step, first + n * step < kept);
    wait_for_previous();  // the kernel before has written delta, the weights it has not
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int i = first + n * step;
        a[n] = load16_once(from + i, i < kept);
        b[n] = load16_once(plus + i, plus && i < kept);
    }
    float sum = 0;
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        float numbers[NUMS16], more[NUMS16];
        unpack(a[n], numbers), unpack(b[n], more);
        for (int k = 0; k < NUMS16; k++) {
            numbers[k] = to_float(to_num(numbers[k] + more[k]));  // the sum as stored
            sum += numbers[k] * numbers[k];
        }
        a[n] = pack(numbers);
        if (plus && first + n * step < kept) store16(from + first + n * step, a[n]);
    }
    for (int i = kept + threadIdx.x; i < hidden; i += blockDim.x) {
        if (plus) from[i] = to_num(to_float(from[i]) + to_float(plus[i]));
        sum += to_float(from[i]) * to_float(from[i]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    __syncthreads();  // each warp's squares are written before all threads add them
    float total = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) total += squares[warp];
    float scale = rsqrtf(total / hidden + eps);
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        float numbers[NUMS16], factors[NUMS16];
        unpack(a[n], numbers), unpack(weights[n], factors);
        for (int k = 0; k < NUMS16; k++) numbers[k] *= scale * factors[k];
        if (first + n * step < kept) store16(to + first + n * step, pack(numbers));
    }
    for (int i = kept + threadIdx.x; i < hidden; i += blockDim.x)
        to[i] = to_num(to_float(from[i]) * scale * to_float(weight[i]));
}
