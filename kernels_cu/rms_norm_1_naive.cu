// computes: x[row] += delta[row], where there is a delta; then out[row] = x / sqrt(mean(x^2) + eps) * weight
// arrays: out, x, delta [rows, hidden]; weight [hidden]; delta may be null, and x is then only read
// map: a block owns a row, a thread every blockDim-th number
// new here: the first rung. With the residual's addition, x is read once instead of three times
// limits: none
#include "device.h"

extern "C" __global__ void rms_norm_1_naive(Num* out, Num* x, const Num* delta, const Num* weight, int rows, int hidden,
                                            float eps, int out_stride, int x_stride, int delta_stride) {
    DYNAMIC_SHARED(float, squares);  // [blockDim]
    long long row = blockIdx.x;
    Num* from = x + row * x_stride;
    float sum = 0;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        if (delta) from[i] = to_num(to_float(from[i]) + to_float(delta[row * delta_stride + i]));
        sum += to_float(from[i]) * to_float(from[i]);  // of the sum as stored
    }
    squares[threadIdx.x] = sum;
    __syncthreads();  // each thread's squares are written before all threads add them
    float total = 0;
    for (int i = 0; i < blockDim.x; i++) total += squares[i];
    float scale = rsqrtf(total / hidden + eps);
    for (int i = threadIdx.x; i < hidden; i += blockDim.x)
        out[row * out_stride + i] = to_num(to_float(from[i]) * scale * to_float(weight[i]));
}
