// computes: out[row] = silu(gate[row]) * up[row]
// arrays: out [rows, ffn]; gate_up [rows, 2 ffn]: gate, then up
// map: a block owns a row and blockDim columns, a thread one of them
// new here: the first rung. The sigmoid's exp may overflow to infinity; 1 / infinity is the right limit
// limits: none
#include "device.h"

extern "C" __global__ void silu_mul_1_naive(Num* out, const Num* gate_up, int rows, int ffn, int out_stride,
                                            int gate_up_stride) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    long long row = blockIdx.y;
    if (i >= ffn) return;
    float gate = to_float(gate_up[row * gate_up_stride + i]), up = to_float(gate_up[row * gate_up_stride + ffn + i]);
    out[row * out_stride + i] = to_num(gate / (1.0f + expf(-gate)) * up);
}
