// computes: y[row] += scale t[row] B for every target of a group and every row of a tile, whose rows share one adapter
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, tiles] of Lora; tiles
//         [tiles] of (first row, rows); counts [2]: the first tiles have several rows, the tiles in use. B is in pages.
//         t of a tile of one row is all in split 0
// map: a block takes piece after piece of work: of a tile 16 rows and RUN chunks of 16 bytes of one target's part of y,
//      eight of them a warp's; of a row alone 128, 64 or 32 chunks, a thread one of them, as in MBGMV
// new here: one launch for MBGMM and MBGMV, of as many blocks as a GPU holds: none without work, none that waits for
//           the other kernel's. All of a piece of B is on its way to registers at once, even before t is written
// limits: none; no float32. t of a tile is rounded to the pages' type, after a power of two that brings its row's
//         largest below 2
#include "device.h"
#include "lora.h"
#include "lora_rows.h"

constexpr int WARPS = 4, ROWS = 16, RANKS = 64, RUN = 32, THREADS = 32 * WARPS;

extern "C" __global__ void __launch_bounds__(THREADS, 3)
lora_expand_1_together(Num* y, const float* t, const Num* pages, const int* page_table, const Lora* lora,
                       const int2* tiles, const int* counts, int tile_count, int rows, int d_out0, int d_out1,
                       int d_out2, int width, int targets, int t_columns, int splits, int y_stride, int page_stride) {
    DYNAMIC_SHARED(float, t_row);              // of a row alone: [t_columns + 64]
    SHARED(float, handed, [NUMS16][THREADS]);  // and by groups of threads to others
    SHARED(Num, t_tiles, [2][ROWS * RANKS]);   // of a tile, and of the former, not yet all read: [ranks / 8][rows][8]
    SHARED(float, ups, [2][ROWS]);             // and what the sums of a row are multiplied with
    launch_dependents();
    int tall = counts[0], used = counts[1], lane = threadIdx.x % 32, g = lane / 4, product = 0;
    int groups = t_columns >= 32 ? 4 : t_columns >= 16 ? 2 : 1, lanes = THREADS / groups;  // of a row alone
    int of_tile = count_runs(RUN, {d_out0, d_out1, d_out2}, width);
    int of_row = count_runs(lanes, {d_out0, d_out1, d_out2}, width);
    const Weights weights = {pages, page_table, width, page_stride};

    auto multiply = [&](const Run& run, int row0, int count, Lora adapter, int j0, auto constant) {
        constexpr int STEPS = decltype(constant)::VALUE;  // of 16 ranks
        Num* t_tile = t_tiles[product % 2];
        float* up = ups[product++ % 2];
        int ranks = min(RANKS, adapter.rank - j0), pieces = pieces_of(run.length, width), page[STEPS][4];
        // Of 4 columns; lanes' pieces are 0, 4, 1, 5 ..: sums lie side by side
        int own = run.chunk + threadIdx.x / 32 * 8, piece = g / 2 + g % 2 * 4;
        const Chunk of_b[2] = {chunk_at(own + piece / 2, run.length, width),
                               chunk_at(own + 4 + piece / 2, run.length, width)};
        unsigned b[2][STEPS][4][2], before[8][2];  // y: [16 columns further, then 8 rows below]
        auto rank_of = [&](int k) { return k / 4 * 16 + lane % 4 * 2 + k % 2 + k % 4 / 2 * 8; };
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int* ids = page_table + adapter.b + j0 * pieces + (of_b[half].count ? of_b[half].piece : 0);
#pragma unroll
            for (int k = 0; k < STEPS * 4; k++) page[k / 4][k % 4] = ids[min(rank_of(k), ranks - 1) * pieces];
#pragma unroll
            for (int k = 0; k < STEPS * 4; k++)
                load8_once(b[half][k / 4][k % 4], page_at(pages, page[k / 4][k % 4], page_stride) +
                           of_b[half].offset + piece % 2 * 4, rank_of(k) < ranks && of_b[half].count);
        }
        wait_for_previous();
        Num* row_y = y + (static_cast<long long>(row0) + g) * y_stride + run.column + lane % 2 * 4;
        auto chunk_of = [&](int r) { return chunk_at(own + r % 4 * 2 + lane % 4 / 2, run.length, width); };
        auto place = [&](int r) { return row_y + r / 4 * 8ll * y_stride + chunk_of(r).index; };
        auto mine = [&](int r) { return chunk_of(r).count && r / 4 * 8 + g < count; };
#pragma unroll
        for (int r = 0; r < 8; r++) load8_once(before[r], place(r), mine(r));
        stage_t<THREADS>(load_four, t_tile, up,
                         t + (static_cast<long long>(row0) * targets + run.target) * t_columns + j0,
                         count, ROWS, ranks, STEPS * 16, targets * t_columns, splits,
                         static_cast<long long>(rows) * targets * t_columns, adapter.scale);
        __syncthreads();  // t_tile and up are written before all warps read them
        float sums[2][4][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            unsigned a[4];
            load_matrices<false>(a, t_tile + ((2 * k + lane / 16) * ROWS + lane % 16) * 8);
#pragma unroll
            for (int q = 0; q < 8; q++) {
                if (q % 4 == 0) pair_up(b[q / 4][k]);
                mma_16x8x16(sums[q / 4][q % 4], a, b[q / 4][k][q % 4]);
            }
        }
#pragma unroll
        for (int r = 0; r < 8; r++) {
            float factor = up[r / 4 * 8 + g];
            const auto& sum = sums[r / 2 % 2];
            int i = r / 4 * 2 + r % 2;
            add_pair(&before[r][0], factor * sum[0][i], factor * sum[1][i]);
            add_pair(&before[r][1], factor * sum[2][i], factor * sum[3][i]);
            if (mine(r)) store8(place(r), before[r]);
        }
    };
    for (int item = blockIdx.x;; item += gridDim.x) {
        Work work = find_work(item, tall, of_tile, of_row);
        if (work.tile >= used) break;
        Run run = find_run(work.part, work.alone ? lanes : RUN, {d_out0, d_out1, d_out2}, width);
        int2 tile = tiles[work.tile];
        Lora adapter = lora[run.target * tile_count + work.tile];
        bool whole = whole_chunks(pages, width, page_stride) && run.length % NUMS16 == 0 && aligned16(y + run.column) &&
                     y_stride % NUMS16 == 0 && t_columns % 4 == 0;
        for (int row = 0; !work.alone && row < tile.y; row += ROWS) {
            int row0 = tile.x + row, count = min(ROWS, tile.y - row);
            if (!whole && adapter.rank)
                expand_plainly(y, t, pages, page_table, adapter, run, RUN, row0, count, rows, width, targets, t_columns,
                               splits, y_stride, page_stride);
            for (int j = 0; whole && j < adapter.rank; j += RANKS)
                if (adapter.rank - j <= 16) multiply(run, row0, count, adapter, j, Constant<1>());
                else if (adapter.rank - j <= 32) multiply(run, row0, count, adapter, j, Constant<2>());
                else multiply(run, row0, count, adapter, j, Constant<4>());
        }
        if (!work.alone || adapter.rank == 0) continue;
        Num* to = y + static_cast<long long>(tile.x) * y_stride;
        const float* from = t + (static_cast<long long>(tile.x) * targets + run.target) * t_columns;
        expand_row<THREADS>(groups, t_row, handed, to, from, weights, adapter, run, 1, 0);
        __syncthreads();  // t_row is read before the next one is written
    }
    wait_for_previous();
}
