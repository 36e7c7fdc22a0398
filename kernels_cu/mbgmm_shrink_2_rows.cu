// computes: t[row] = x[row] A for every target of a group and every row of a tile, whose rows share one adapter
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, tiles] of Lora; tiles [tiles] of (first row, rows), 0 rows: nothing to do. A is in pages
// map: a block owns a tile, a target and a split; a warp every fourth column of A, a lane every 32nd number of it
// new here: a number of A that was read serves ROWS rows before it is forgotten, so A is read once for each ROWS rows
// limits: none; columns of t beyond the rank are left as they are
#include "device.h"

constexpr int ROWS = 16;

extern "C" __global__ void mbgmm_shrink_2_rows(float* t, const Num* x, const Num* pages, const int* page_table,
                                               const Lora* lora, const int2* tiles, int tile_count, int rows, int d_in,
                                               int width, int targets, int t_columns, int splits, int x_stride,
                                               int page_stride) {
    launch_dependents();
    int2 tile = tiles[blockIdx.x];
    int target = blockIdx.y, split = blockIdx.z, lane = threadIdx.x % 32;
    Lora adapter = lora[target * tile_count + blockIdx.x];
    int pieces = ceil_div(d_in, width), part = ceil_div(d_in, splits);
    int first = split * part, end = min(first + part, d_in);
    for (int j = threadIdx.x / 32; tile.y > 0 && j < adapter.rank; j += blockDim.x / 32)
        for (int row = 0; row < tile.y; row += ROWS) {
            const Num* from = x + static_cast<long long>(tile.x + row) * x_stride;
            int count = min(ROWS, tile.y - row);
            float sums[ROWS] = {};
            for (int i = first + lane; i < end; i += 32) {
                long long page = page_table[adapter.a + j * pieces + i / width];
                float weight = to_float(pages[page * page_stride + i % width]);
#pragma unroll
                for (int m = 0; m < ROWS; m++)
                    if (m < count) sums[m] += weight * to_float(from[static_cast<long long>(m) * x_stride + i]);
            }
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                float sum = warp_sum(sums[m]);
                long long at = (split * static_cast<long long>(rows) + tile.x + row + m) * targets + target;
                if (lane == 0 && m < count) t[at * t_columns + j] = sum;
            }
        }
}
