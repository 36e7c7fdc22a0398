// computes: y[row] += scale t[row] B for every target of a group, B of the row's own adapter at its own rank
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32, of
//         which the splits are added here; pages [.., width]; page_table of page ids; lora [targets, rows] of Lora. B
//         is in pages
// map: a block owns a row and blockDim columns of y, a thread one of them
// new here: the first rung, nothing but the formula
// limits: none; at most three targets; a row of rank 0 is neither read nor written
#include "device.h"

extern "C" __global__ void mbgmv_expand_1_naive(Num* y, const float* t, const Num* pages, const int* page_table,
                                                const Lora* lora, int rows, int d_out0, int d_out1, int d_out2,
                                                int width, int targets, int t_columns, int splits, int y_stride,
                                                int page_stride) {
    wait_for_previous();
    int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x, target = 0, o = column;
    const int d_out[3] = {d_out0, d_out1, d_out2};
    while (target < targets && o >= d_out[target]) o -= d_out[target++];
    if (target == targets) return;
    Lora adapter = lora[target * rows + row];
    if (adapter.rank == 0) return;
    int pieces = ceil_div(d_out[target], width);
    float sum = 0;
    for (int j = 0; j < adapter.rank; j++) {
        float t_j = 0;
        for (int split = 0; split < splits; split++)
            t_j += t[((static_cast<long long>(split) * rows + row) * targets + target) * t_columns + j];
        long long page = page_table[adapter.b + j * pieces + o / width];
        sum += t_j * to_float(pages[page * page_stride + o % width]);
    }
    Num* to = y + static_cast<long long>(row) * y_stride + column;
    *to = to_num(to_float(*to) + adapter.scale * sum);
}
