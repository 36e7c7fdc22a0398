// computes: y[row] += scale t[row] B for every target of a group and every row of a tile, whose rows share one adapter
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, tiles] of Lora; tiles
//         [tiles] of (first row, rows), 0 rows: nothing to do. B is in pages
// map: a block owns tiles, 16 rows at a time, and RUN chunks of 16 bytes of one target's part of y; a warp four of them
// new here: products by tensor cores; B goes from memory straight to registers, for all rows, 8 bytes of four rows of B
//           for four products, in an order that leaves whole 8 bytes of y with a lane; B and y are read before t is
//           waited for
// limits: none; no float32. t is rounded to the pages' type, after a power of two that brings its row's largest below 2
#include "device.h"
#include "lora.h"

constexpr int WARPS = 8, ROWS = 16, RANKS = 64, RUN = 32;

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
mbgmm_expand_3_tensor_cores(Num* y, const float* t, const Num* pages, const int* page_table, const Lora* lora,
                            const int2* tiles, int tile_count, int rows, int d_out0, int d_out1, int d_out2, int width,
                            int targets, int t_columns, int splits, int y_stride, int page_stride) {
    SHARED(Num, t_tile, [ROWS * RANKS]);  // [ranks / 8][rows][8]
    SHARED(float, up, [ROWS]);            // what the sums of a row are multiplied with
    launch_dependents();
    int start = blockIdx.y;
    if (tiles[start].y == 0) start = next_tile(tiles, start + gridDim.y, gridDim.y, tile_count);
    if (start >= tile_count && blockIdx.x + blockIdx.y > 0) return;  // one block without work that waits is enough
    Run run = find_run(blockIdx.x, RUN, {d_out0, d_out1, d_out2}, width);
    int lane = threadIdx.x % 32, g = lane / 4, own = run.chunk + threadIdx.x / 32 * 4;
    int pieces = pieces_of(run.length, width);
    bool whole = whole_chunks(pages, width, page_stride) && run.length % NUMS16 == 0 && aligned16(y + run.column) &&
                 y_stride % NUMS16 == 0 && t_columns % 4 == 0;

    auto multiply = [&](int row0, int count, Lora adapter, int j0, auto constant) {
        constexpr int STEPS = decltype(constant)::VALUE;  // of 16 ranks
        int ranks = min(RANKS, adapter.rank - j0), tall = ceil_div(count, 16) * 16;
        // Of 4 columns; lanes' pieces are 0, 4, 1, 5 ..: sums lie side by side
        int piece = g / 2 + g % 2 * 4, page[STEPS][4];
        Chunk of_b = chunk_at(own + piece / 2, run.length, width);
        unsigned b[STEPS][4][2], before[ROWS / 16][4][2];  // y [16 rows below][8 rows below, 16 columns further]
#pragma unroll
        for (int k = 0; k < STEPS * 4; k++) {
            int j = j0 + min(k / 4 * 16 + lane % 4 * 2 + k % 2 + k % 4 / 2 * 8, ranks - 1);
            page[k / 4][k % 4] = page_table[adapter.b + j * pieces + (of_b.count ? of_b.piece : 0)];
        }
#pragma unroll
        for (int k = 0; k < STEPS * 4; k++) {
            const Num* from = page_at(pages, page[k / 4][k % 4], page_stride) + of_b.offset + piece % 2 * 4;
            load8_once(b[k / 4][k % 4], from, k / 4 * 16 + lane % 4 * 2 + k % 2 + k % 4 / 2 * 8 < ranks && of_b.count);
        }
        wait_for_previous();
        const Chunk of_y[2] = {chunk_at(own + lane % 4 / 2, run.length, width),
                               chunk_at(own + 2 + lane % 4 / 2, run.length, width)};
        Num* row_y = y + (static_cast<long long>(row0) + g) * y_stride + run.column + lane % 2 * 4;
        auto place = [&](int r) { return row_y + r / 2 * 8ll * y_stride + of_y[r % 2].index; };
#pragma unroll
        for (int r = 0; r < ROWS / 4; r++)
            load8_once(before[r / 4][r % 4], place(r), of_y[r % 2].count && r / 2 * 8 + g < count);
        stage_t(load_four, t_tile, up, t + (static_cast<long long>(row0) * targets + run.target) * t_columns + j0,
                count, tall, ranks, STEPS * 16, targets * t_columns, splits,
                static_cast<long long>(rows) * targets * t_columns, adapter.scale);
        __syncthreads();  // t_tile and up are written before all warps read them
#pragma unroll
        for (int k = 0; k < STEPS; k++) pair_up(b[k]);
#pragma unroll
        for (int band = 0; band < ROWS / 16; band++) {
            if (band * 16 >= tall) break;
            float sums[4][4] = {};
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                unsigned a[4];
                load_matrices<false>(a, t_tile + ((2 * k + lane / 16) * tall + band * 16 + lane % 16) * 8);
#pragma unroll
                for (int q = 0; q < 4; q++) mma_16x8x16(sums[q], a, b[k][q]);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                int row = band * 16 + r / 2 * 8 + g;
                unsigned(&two)[2] = before[band][r];
                add_pair(&two[0], up[row] * sums[0][r], up[row] * sums[1][r]);
                add_pair(&two[1], up[row] * sums[2][r], up[row] * sums[3][r]);
                if (row < count && of_y[r % 2].count) store8(place(band * 4 + r), two);
            }
        }
        __syncthreads();  // t_tile is read before the next one is written
    };
    for (int i = start; i < tile_count; i = next_tile(tiles, i + gridDim.y, gridDim.y, tile_count)) {
        Lora adapter = lora[run.target * tile_count + i];
        for (int row = 0; row < tiles[i].y; row += ROWS) {
            int row0 = tiles[i].x + row, count = min(ROWS, tiles[i].y - row);
            if (!whole && adapter.rank)
                expand_plainly(y, t, pages, page_table, adapter, run, RUN, row0, count, rows, width, targets, t_columns,
                               splits, y_stride, page_stride);
            for (int j = 0; whole && j < adapter.rank; j += RANKS)
                if (adapter.rank - j <= 16) multiply(row0, count, adapter, j, Constant<1>());
                else if (adapter.rank - j <= 32) multiply(row0, count, adapter, j, Constant<2>());
                else multiply(row0, count, adapter, j, Constant<4>());
        }
    }
    wait_for_previous();
}
