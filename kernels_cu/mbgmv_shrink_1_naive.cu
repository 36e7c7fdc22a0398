// computes: t[row] = x[row] A for every target of a group, A of the row's own adapter at its own rank, in float32
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, rows] of Lora. A is in pages: see Lora in device.h
// map: a block owns a row, a target and one of `splits` parts of the sum over d_in; a thread every blockDim-th column
//      of A
// new here: the first rung, nothing but the formula
// limits: none; columns of t beyond the rank are left as they are
#include "device.h"

extern "C" __global__ void mbgmv_shrink_1_naive(float* t, const Num* x, const Num* pages, const int* page_table,
                                                const Lora* lora, int rows, int d_in, int width, int targets,
                                                int t_columns, int splits, int x_stride, int page_stride) {
    launch_dependents();
    int row = blockIdx.x, target = blockIdx.y, split = blockIdx.z;
    Lora adapter = lora[target * rows + row];
    int pieces = ceil_div(d_in, width), part = ceil_div(d_in, splits);
    int first = split * part, end = min(first + part, d_in);
    const Num* from = x + static_cast<long long>(row) * x_stride;
    for (int j = threadIdx.x; j < adapter.rank; j += blockDim.x) {
        float sum = 0;
        for (int i = first; i < end; i++) {
            long long page = page_table[adapter.a + j * pieces + i / width];
            sum += to_float(from[i]) * to_float(pages[page * page_stride + i % width]);
        }
        t[((static_cast<long long>(split) * rows + row) * targets + target) * t_columns + j] = sum;
    }
}
