// computes: t[row] = x[row] A for every target of a group, A of the row's own adapter at its own rank, in float32
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, rows] of Lora. A is in pages: see Lora in device.h
// map: a block owns four columns of a row's A and a split, a warp one of them, a lane every 32nd number
// new here: neighbouring lanes read neighbouring numbers, so a read of 32 bytes from memory brings 16 that are used,
//           not 1
// limits: none; columns of t beyond the rank are left as they are
#include "device.h"

extern "C" __global__ void mbgmv_shrink_2_warp(float* t, const Num* x, const Num* pages, const int* page_table,
                                               const Lora* lora, int rows, int d_in, int width, int targets,
                                               int t_columns, int splits, int x_stride, int page_stride) {
    launch_dependents();
    int row = blockIdx.y, target = blockIdx.z % targets, split = blockIdx.z / targets, lane = threadIdx.x % 32;
    int j = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    Lora adapter = lora[target * rows + row];
    if (j >= adapter.rank) return;
    int pieces = ceil_div(d_in, width), part = ceil_div(d_in, splits);
    int first = split * part, end = min(first + part, d_in);
    const Num* from = x + static_cast<long long>(row) * x_stride;
    float sum = 0;
    for (int i = first + lane; i < end; i += 32) {
        long long page = page_table[adapter.a + j * pieces + i / width];
        sum += to_float(from[i]) * to_float(pages[page * page_stride + i % width]);
    }
    sum = warp_sum(sum);
    if (lane == 0) t[((static_cast<long long>(split) * rows + row) * targets + target) * t_columns + j] = sum;
}
