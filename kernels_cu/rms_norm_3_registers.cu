// computes: x[row] += delta[row], where there is a delta; then out[row] = x / sqrt(mean(x^2) + eps) * weight
// arrays: out, x, delta [rows, hidden]; weight [hidden]; delta may be null, and x is then only read
// map: a block owns a row, a thread its every blockDim-th chunk of 16 bytes, KEPT of them in registers
// new here: x and the weights are read once, before the sum of squares is known, and wait in registers for it; the
//           weights already while the kernel before ends
// limits: none; numbers beyond KEPT chunks a thread, and rows whose strides are no multiple of 16 bytes, are read again
#include "device.h"
#include "rms_norm.h"

extern "C" __global__ void rms_norm_3_registers(Num* out, Num* x, const Num* delta, const Num* weight, int rows,
                                                int hidden, float eps, int out_stride, int x_stride,
                                                int delta_stride) {
    SHARED(float, squares, [32]);  // of each warp
    NormRow row = norm_row(out, x, delta, weight, hidden, out_stride, x_stride, delta_stride, blockDim.x);
    uint4 numbers[KEPT], more[KEPT], weights[KEPT];
    launch_dependents();
    load_chunks(weights, weight, row);
    wait_for_previous();  // the kernel before has written delta, the weights it has not
    load_chunks(numbers, row.x, row);
    load_chunks(more, row.delta, row, row.delta);
    add_delta(row, numbers, more);
    write_normed(row, numbers, weights, norm_scale(row, numbers, squares, eps));
}
