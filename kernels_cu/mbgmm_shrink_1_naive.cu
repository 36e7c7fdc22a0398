// computes: t[row] = x[row] A for every target of a group and every row of a tile, whose rows share one adapter
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, tiles] of Lora; tiles [tiles] of (first row, rows), 0 rows: nothing to do. A is in pages
// map: a block owns a tile, a target and one of `splits` parts of the sum over d_in; a thread every blockDim-th (row,
//      column)
// new here: the first rung, nothing but the formula
// limits: none; columns of t beyond the rank are left as they are
#include "device.h"

extern "C" __global__ void mbgmm_shrink_1_naive(float* t, const Num* x, const Num* pages, const int* page_table,
                                                const Lora* lora, const int2* tiles, int tile_count, int rows, int d_in,
                                                int width, int targets, int t_columns, int splits, int x_stride,
                                                int page_stride) {
    launch_dependents();
    int2 tile = tiles[blockIdx.x];
    int target = blockIdx.y, split = blockIdx.z;
    Lora adapter = lora[target * tile_count + blockIdx.x];
    int pieces = ceil_div(d_in, width), part = ceil_div(d_in, splits);
    int first = split * part, end = min(first + part, d_in);
    for (int pair = threadIdx.x; pair < tile.y * adapter.rank; pair += blockDim.x) {
        int j = pair % adapter.rank;
        long long row = tile.x + pair / adapter.rank;
        float sum = 0;
        for (int i = first; i < end; i++) {
            long long page = page_table[adapter.a + j * pieces + i / width];
            sum += to_float(x[row * x_stride + i]) * to_float(pages[page * page_stride + i % width]);
        }
        t[((split * static_cast<long long>(rows) + row) * targets + target) * t_columns + j] = sum;
    }
}
