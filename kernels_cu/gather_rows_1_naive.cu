// computes: out[row] = source[ids[row]]: the embedding of each token, or the rows whose logits are wanted
// arrays: out [rows, columns]; source [.., columns]; ids [rows]
// map: a thread owns one number of a row
// new here: the first rung; neighbouring threads copy neighbouring numbers
// limits: none
#include "device.h"

extern "C" __global__ void gather_rows_1_naive(Num* out, const Num* source, const int* ids, int rows, int columns,
                                               int out_stride, int source_stride) {
    long long row = blockIdx.y;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < columns) out[row * out_stride + i] = source[ids[row] * static_cast<long long>(source_stride) + i];
}
