// computes: y[row] += scale t[row] B for every target of a group and every row of a tile, whose rows share one adapter
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, tiles] of Lora; tiles
//         [tiles] of (first row, rows), 0 rows: nothing to do. B is in pages
// map: a block owns tiles and RUN chunks of 16 bytes of one target's part of y, 64 rows of y and 128 of B at a time; a
//      warp 16 rows of y and half of a stage's chunks
// new here: for many rows: a block keeps t in registers for all of its columns, while B and y are on their way to
//           shared memory three stages ahead; t is read a quarter as often, and whole 128 bytes of a row of y at a time
// limits: none; no float32. t is rounded to the pages' type, after a power of two that brings its row's largest below 2
#include "device.h"
#include "lora.h"

constexpr int WARPS = 8, ROWS = 64, RANKS = 128, STAGES = 4, SLAB = 8, RUN = 128;  // SLAB: chunks of a row in a stage
constexpr int STAGE = (ROWS + RANKS) * SLAB, STEP = 32 * WARPS / SLAB;  // chunks of a stage; rows of a copy
constexpr int TILES = SLAB / 2;                                         // chunks of a stage that a warp owns

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
mbgmm_expand_4_staged(Num* y, const float* t, const Num* pages, const int* page_table, const Lora* lora,
                      const int2* tiles, int tile_count, int rows, int d_out0, int d_out1, int d_out2, int width,
                      int targets, int t_columns, int splits, int y_stride, int page_stride) {
    DYNAMIC_SHARED(uint4, ring);  // [STAGES][rows of y, then rows of B][SLAB]
    launch_dependents();
    Run run = find_run(blockIdx.x, RUN, {d_out0, d_out1, d_out2}, width);
    unsigned lane = threadIdx.x % 32, top = threadIdx.x / 32 % 4 * 16, first = threadIdx.x / 128 * TILES;  // row; chunk
    int pieces = pieces_of(run.length, width), chunks = min(RUN, chunks_of(run.length, width) - run.chunk);
    int my_row = threadIdx.x / SLAB, my_chunk = threadIdx.x % SLAB;  // what it copies of each slab: every STEPth row
    bool whole = whole_chunks(pages, width, page_stride) && run.length % NUMS16 == 0 && aligned16(y + run.column) &&
                 y_stride % NUMS16 == 0 && t_columns % 4 == 0;

    auto multiply = [&](int row0, int count, Lora adapter, int j0) {  // `count` rows, ranks j0 ..
        int ranks = min(RANKS, adapter.rank - j0), deep = ceil_div(ranks, 32) * 32, piece = -1, page[RANKS / STEP];
        Num* y_run = y + static_cast<long long>(row0) * y_stride + run.column + run.chunk * NUMS16;
        auto fetch = [&](int stage, bool of_y) {
            uint4* to = ring + stage % STAGES * STAGE + (of_y ? 0 : ROWS * SLAB) + place(my_row, my_chunk);
            int c = stage * SLAB + my_chunk;
            if (c >= chunks) return;
            Chunk at = chunk_at(run.chunk + c, run.length, width);
#pragma unroll
            for (int k = 0; k < RANKS / STEP; k++)
                if (!of_y && at.piece != piece)
                    page[k] = page_table[adapter.b + (j0 + min(my_row + k * STEP, ranks - 1)) * pieces + at.piece];
            if (!of_y) piece = at.piece;
#pragma unroll
            for (int k = 0; k < RANKS / STEP; k++) {
                int i = my_row + k * STEP;
                if (!of_y && i < deep)
                    copy16(to + k * STEP * SLAB, page_at(pages, page[k], page_stride) + at.offset, i < ranks);
                if (of_y && i < count) copy16(to + k * STEP * SLAB, page_at(y_run, i, y_stride) + c * NUMS16, true);
            }
        };
        for (int stage = 0; stage < STAGES - 1; stage++) fetch(stage, false);
        wait_for_previous();
        for (int stage = 0; stage < STAGES - 1; stage++) fetch(stage, true), copies_commit();

        // For now in the last stage: [deep / 8][ROWS][8]
        Num* t_tile = reinterpret_cast<Num*>(ring + (STAGES - 1) * STAGE);
        float* up = reinterpret_cast<float*>(t_tile + ROWS * RANKS);        // and behind it: [ROWS]
        stage_t(load_four, t_tile, up, t + (static_cast<long long>(row0) * targets + run.target) * t_columns + j0,
                count, ROWS, ranks, deep, targets * t_columns, splits,
                static_cast<long long>(rows) * targets * t_columns, adapter.scale);
        __syncthreads();  // t_tile and up are written before all warps read them
        unsigned a[RANKS / 16][4];
#pragma unroll
        for (int k = 0; k < RANKS / 16; k++)
            if (k * 16 < deep) load_matrices<false>(a[k], t_tile + ((2 * k + lane / 16) * ROWS + top + lane % 16) * 8);
        const float mine[2] = {up[top + lane / 4], up[top + lane / 4 + 8]};

        for (int stage = 0; stage * SLAB < chunks; stage++) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this stage's copies have landed; the former one's place, or t_tile's, is read
            fetch(stage + STAGES - 1, false), fetch(stage + STAGES - 1, true), copies_commit();
            uint4* slab = ring + stage % STAGES * STAGE;
            float sums[TILES][4] = {};
#pragma unroll
            for (int k = 0; k < RANKS / 32; k++)
                if (k * 32 < deep)
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        unsigned b[4];
                        load_matrices<true>(b, slab + (ROWS + k * 32) * SLAB + place(lane, first ^ i));
                        mma_16x8x16(sums[i], a[2 * k], {b[0], b[1]});
                        mma_16x8x16(sums[i], a[2 * k + 1], {b[2], b[3]});
                    }
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                unsigned* two = reinterpret_cast<unsigned*>(slab + place(top + lane / 4, first ^ i)) + lane % 4;
                add_pair(two, mine[0] * sums[i][0], mine[0] * sums[i][1]);
                add_pair(two + 8 * SLAB * 4, mine[1] * sums[i][2], mine[1] * sums[i][3]);  // 8 rows below
            }
            __syncwarp();  // the warp's part of y is complete before its lanes write it out, 16 bytes each
            for (int i = 0; i < 2; i++) {
                int row = top + i * 8 + lane / TILES, chunk = first + lane % TILES, c = stage * SLAB + chunk;
                Num* to = y_run + static_cast<long long>(row) * y_stride + c * NUMS16;
                if (row < count && c < chunks) store16(to, slab[place(row, chunk)]);
            }
        }
        copies_wait<0>();
        __syncthreads();  // the ring is read before the next product fills it
    };
    for (int i = blockIdx.y; (i = next_tile(tiles, i, gridDim.y, tile_count)) < tile_count; i += gridDim.y)
        for (int row = 0; row < tiles[i].y; row += ROWS) {
            Lora adapter = lora[run.target * tile_count + i];
            int row0 = tiles[i].x + row, count = min(ROWS, tiles[i].y - row);
            if (!whole && adapter.rank)
                expand_plainly(y, t, pages, page_table, adapter, run, RUN, row0, count, rows, width, targets, t_columns,
                               splits, y_stride, page_stride);
            for (int j = 0; whole && j < adapter.rank; j += RANKS) multiply(row0, count, adapter, j);
        }
    if (blockIdx.x + blockIdx.y == 0) wait_for_previous();  // one block without work that waits is enough
}
