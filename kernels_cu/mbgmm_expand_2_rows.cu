// computes: y[row] += scale t[row] B for every target of a group and every row of a tile, whose rows share one adapter
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, tiles] of Lora; tiles
//         [tiles] of (first row, rows), 0 rows: nothing to do. B is in pages
// map: a block owns ROWS rows of a tile at a time and blockDim columns of y, a thread one of them in all of the rows
// new here: a number of B that was read serves ROWS rows before it is forgotten, so B is read once for each ROWS rows
// limits: none; at most three targets; a tile of rank 0 is neither read nor written
#include "device.h"

constexpr int ROWS = 16;

extern "C" __global__ void mbgmm_expand_2_rows(Num* y, const float* t, const Num* pages, const int* page_table,
                                               const Lora* lora, const int2* tiles, int tile_count, int rows,
                                                       int d_out0,
                                               int d_out1, int d_out2, int width, int targets, int t_columns,
                                                       int splits,
                                               int y_stride, int page_stride) {
    wait_for_previous();
    int2 tile = tiles[blockIdx.y];
    int column = blockIdx.x * blockDim.x + threadIdx.x, target = 0, o = column;
    const int d_out[3] = {d_out0, d_out1, d_out2};
    while (target < targets && o >= d_out[target]) o -= d_out[target++];
    if (target == targets || tile.y == 0) return;
    Lora adapter = lora[target * tile_count + blockIdx.y];
    int pieces = ceil_div(d_out[target], width);
    for (long long row = tile.x; adapter.rank > 0 && row < tile.x + tile.y; row += ROWS) {
        int count = min(ROWS, static_cast<int>(tile.x + tile.y - row));
        float sums[ROWS] = {};
        for (int j = 0; j < adapter.rank; j++) {
            long long page = page_table[adapter.b + j * pieces + o / width];
            float weight = to_float(pages[page * page_stride + o % width]);
#pragma unroll
            for (int m = 0; m < ROWS; m++)
                for (int split = 0; m < count && split < splits; split++)
                    sums[m] += t[((split * static_cast<long long>(rows) + row + m) * targets + target) * t_columns +
                            j] * weight;
        }
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
            Num* to = y + (row + m) * y_stride + column;
            if (m < count) *to = to_num(to_float(*to) + adapter.scale * sums[m]);
        }
    }
}
