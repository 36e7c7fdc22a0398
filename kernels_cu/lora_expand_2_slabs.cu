// computes: y[row] += scale t[row] B for every target of a group and every row of a tile, whose rows share one adapter
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, tiles] of Lora; tiles
//         [tiles] of (first row, rows); counts [2]: the first tiles have several rows, the tiles in use. B is in pages.
//         t of a tile of one row is all in split 0
// map: a block takes piece after piece of work: of a tile 16 rows and RUN chunks of 16 bytes of one target's part of y,
//      eight of them a warp's; of a row alone 128, 64 or 32 chunks, a thread one of them, as in MBGMV
// new here: B goes to shared memory, a warp's part to the warp alone, in whole 128 bytes of a rank's row; so a lane
//           computes half as many addresses, nothing is turned over in registers, and a multiprocessor has room for
//           five blocks, not three: few of them have a second piece of work
// limits: none; no float32. t of a tile is rounded to the pages' type, after a power of two that brings its row's
//         largest below 2
#include "device.h"
#include "lora.h"
#include "lora_rows.h"

constexpr int WARPS = 4, ROWS = 16, RANKS = 64, SLAB = 8, RUN = WARPS * SLAB, THREADS = 32 * WARPS;
constexpr int ROOM = SLAB * NUMS16 + 8;  // float32 of a row of sums, so that four rows lie in different banks

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT == 2 ? 5 : 1)
lora_expand_2_slabs(Num* y, const float* t, const Num* pages, const int* page_table, const Lora* lora,
                    const int2* tiles, const int* counts, int tile_count, int rows, int d_out0, int d_out1, int d_out2,
                    int width, int targets, int t_columns, int splits, int y_stride, int page_stride) {
    DYNAMIC_SHARED(float, t_row);                 // of a row alone: [t_columns + 64]
    SHARED(uint4, slabs, [WARPS][RANKS * SLAB]);  // of each warp [ranks][SLAB], then sums [ROWS][ROOM]; or handed on
    SHARED(Num, t_tile, [ROWS * RANKS]);          // of a tile: [ranks / 8][rows][8]
    SHARED(float, up, [ROWS]);                    // and what the sums of a row are multiplied with
    launch_dependents();
    int tall = counts[0], used = counts[1], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int groups = t_columns >= 32 ? 4 : t_columns >= 16 ? 2 : 1, lanes = THREADS / groups;  // of a row alone
    int of_tile = count_runs(RUN, {d_out0, d_out1, d_out2}, width);
    int of_row = count_runs(lanes, {d_out0, d_out1, d_out2}, width);
    uint4* slab = slabs[warp];
    const Weights weights = {pages, page_table, width, page_stride};

    auto multiply = [&](const Run& run, int row0, int count, Lora adapter, int j0) {
        int ranks = min(RANKS, adapter.rank - j0), deep = ceil_div(ranks, 32) * 32;
        int pieces = pieces_of(run.length, width), page[RANKS / 4];
        int mine = lane / SLAB, c = lane % SLAB;  // a chunk of every fourth row of B, and of y
        Chunk at = chunk_at(run.chunk + warp * SLAB + c, run.length, width);
        const int* ids = page_table + adapter.b + j0 * pieces + (at.count ? at.piece : 0);
#pragma unroll
        for (int k = 0; k < RANKS / 4; k++) page[k] = ids[min(mine + k * 4, ranks - 1) * pieces];
#pragma unroll
        for (int k = 0; k < RANKS / 4; k++)
            if (k * 4 < deep)
                copy16(slab + place(mine + k * 4, c), page_at(pages, page[k], page_stride) + at.offset,
                       mine + k * 4 < ranks && at.count);
        copies_commit();
        wait_for_previous();
        uint4 before[ROWS / 4];
        Num* to = y + (static_cast<long long>(row0) + mine) * y_stride + run.column + at.index;
        int below = at.count ? count - mine : 0;  // rows of the tile from this one on
#pragma unroll
        for (int k = 0; k < ROWS / 4; k++) before[k] = load16_once(page_at(to, k, 4 * y_stride), k * 4 < below);
        stage_t<THREADS>(load_four, t_tile, up, t + (row0 * 1ll * targets + run.target) * t_columns + j0, count, ROWS,
                         ranks, deep, targets * t_columns, splits, rows * 1ll * targets * t_columns, adapter.scale);
        copies_wait<0>();
        __syncthreads();  // t_tile, up and the slabs are written before all threads read them
        float sums[SLAB][4] = {};
#pragma unroll 1
        for (int k = 0; k < deep / 32; k++) {
            unsigned a[2][4], b[4];
            for (int half = 0; half < 2; half++)
                load_matrices<false>(a[half], t_tile + ((4 * k + 2 * half + lane / 16) * ROWS + lane % 16) * 8);
#pragma unroll
            for (int i = 0; i < SLAB; i++) {
                load_matrices<true>(b, slab + k * 32 * SLAB + place(lane, i));
                mma_16x8x16(sums[i], a[0], {b[0], b[1]});
                mma_16x8x16(sums[i], a[1], {b[2], b[3]});
            }
        }
        const float factor[2] = {up[lane / 4], up[lane / 4 + 8]};
        float* given = reinterpret_cast<float*>(slab);
        __syncthreads();  // they are read before the next t takes t_tile's place, and sums the slabs'
#pragma unroll
        for (int i = 0; i < SLAB * 2; i++) {
            float2* two = reinterpret_cast<float2*>(given + (lane / 4 + i % 2 * 8) * ROOM + i / 2 * 8 + lane % 4 * 2);
            *two = {factor[i % 2] * sums[i / 2][i % 2 * 2], factor[i % 2] * sums[i / 2][i % 2 * 2 + 1]};
        }
        __syncwarp();  // the sums are written before all lanes add them
#pragma unroll
        for (int k = 0; k < ROWS / 4; k++) {
            float numbers[NUMS16];
            unpack(before[k], numbers);
            for (int i = 0; i < NUMS16; i++) numbers[i] += given[(mine + k * 4) * ROOM + c * NUMS16 + i];
            if (k * 4 < below) store16(page_at(to, k, 4 * y_stride), pack(numbers));
        }
        __syncwarp();  // the sums are read before the next copies take their place
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
            for (int j = 0; whole && j < adapter.rank; j += RANKS) multiply(run, row0, count, adapter, j);
        }
        if (!work.alone || adapter.rank == 0) continue;
        Num* to = y + static_cast<long long>(tile.x) * y_stride;
        const float* from = t + (static_cast<long long>(tile.x) * targets + run.target) * t_columns;
        auto handed = reinterpret_cast<float(*)[THREADS]>(slabs[0]);
        expand_row<THREADS, 8>(groups, t_row, handed, to, from, weights, adapter, run, 1, 0);
        __syncthreads();  // t_row is read before the next one is written
    }
    wait_for_previous();
}
