// computes: out[row] = silu(gate[row]) * up[row]
// arrays: out [rows, ffn]; gate_up [rows, 2 ffn]: gate, then up
// map: the blocks of a row share its chunks of 16 bytes, a thread takes one after the other
// new here: 16 bytes a load instead of one number
// limits: none; rows whose strides or widths are no multiple of 16 bytes are read number by number
#include "device.h"

extern "C" __global__ void silu_mul_2_vector(Num* out, const Num* gate_up, int rows, int ffn, int out_stride,
                                             int gate_up_stride) {
    long long row = blockIdx.y;
    const Num *gate = gate_up + row * gate_up_stride, *up = gate + ffn;
    Num* to = out + row * out_stride;
    bool whole = (ffn | out_stride | gate_up_stride) % NUMS16 == 0;
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * NUMS16, step = gridDim.x * blockDim.x * NUMS16;
    for (int i = first; i < ffn; i += step) {
        if (whole) {
            float g[NUMS16], u[NUMS16];
            unpack(load16(gate + i), g);
            unpack(load16(up + i), u);
            for (int k = 0; k < NUMS16; k++) g[k] = g[k] / (1.0f + expf(-g[k])) * u[k];
            store16(to + i, pack(g));
        } else {
            for (int k = i; k < min(i + NUMS16, ffn); k++) {
                float g = to_float(gate[k]);
                to[k] = to_num(g / (1.0f + expf(-g)) * to_float(up[k]));
            }
        }
    }
}
