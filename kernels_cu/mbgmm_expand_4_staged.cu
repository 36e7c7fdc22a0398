// computes: y[row] += scale t[row] B for every target of a group and every row of a tile, whose rows share one adapter
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, tiles] of Lora; tiles
//         [tiles] of (first row, rows), 0 rows: nothing to do. B is in pages
// map: a block owns tiles and RUN chunks of 16 bytes of one target's part of y, 64 rows of y and 128 of B at a time; a
//      warp 16 rows of y and half of a stage's chunks
// new here: for many rows: a block keeps t in registers for all of its columns, while B and y are on their way to
//           shared memory three to seven stages ahead, the first before t is written; t is read a quarter as often, and
//           whole 128 bytes of a row of y at a time
// limits: none; no float32. t is rounded to the pages' type, after a power of two that brings its row's largest below 2
#include "device.h"
#include "lora.h"
#include "lora_staged.h"

constexpr int RUN = 128, TILES = SLAB / 2;  // TILES: chunks of a slab that a warp owns

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
mbgmm_expand_4_staged(Num* y, const float* t, const Num* pages, const int* page_table, const Lora* lora,
                      const int2* tiles, int tile_count, int rows, int d_out0, int d_out1, int d_out2, int width,
                      int targets, int t_columns, int splits, int y_stride, int page_stride) {
    DYNAMIC_SHARED(uint4, ring);  // [stages][rows of y, then rows of B][SLAB]
    launch_dependents();
    Run run = find_run(blockIdx.x, RUN, {d_out0, d_out1, d_out2}, width);
    int lane = threadIdx.x % 32, top = threadIdx.x / 32 % 4 * 16, first = threadIdx.x / 128 * TILES;  // row; chunk
    int begin = run.chunk * NUMS16, end = min(begin + RUN * NUMS16, run.length), stages = ceil_div(end - begin, WIDE);
    bool whole = whole_chunks(pages, width, page_stride) && run.length % NUMS16 == 0 && aligned16(y + run.column) &&
                 y_stride % NUMS16 == 0 && t_columns % 4 == 0;

    auto multiply = [&](int row0, int count, Lora adapter, int j0, auto most) {  // `count` rows, ranks j0 ..
        constexpr int DEEP = decltype(most)::VALUE, STAGE = (ROWS + DEEP) * SLAB, STAGES = ROOM / STAGE;
        Num* of_y = y + static_cast<long long>(row0) * y_stride + run.column;
        auto copy_y = [&](uint4* stage, int index) { copy_rows(stage, of_y + index, y_stride, count, index < end); };
        // y first: where B lies takes two reads more
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) copy_y(ring + i * STAGE, begin + my_chunk() * NUMS16 + i * WIDE);
        int ids = adapter.b + j0 * pieces_of(run.length, width);
        Vectors<DEEP> of_b =
            vectors_from<DEEP>(begin, end, pages, width, page_stride, page_table, ids, adapter.rank - j0, run.length);
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++, copies_commit())
            if (i < stages) copy_next(ring + i * STAGE + ROWS * SLAB, of_b);
        wait_for_previous();

        // For now in the last stage: [DEEP / 8][ROWS][8]
        Num* t_tile = reinterpret_cast<Num*>(ring + (STAGES - 1) * STAGE);
        float* up = reinterpret_cast<float*>(t_tile + ROWS * DEEP);  // and behind it: [ROWS]
        stage_t(load_four, t_tile, up, t + (static_cast<long long>(row0) * targets + run.target) * t_columns + j0,
                count, ROWS, adapter.rank - j0, DEEP, targets * t_columns, splits,
                static_cast<long long>(rows) * targets * t_columns, adapter.scale);
        __syncthreads();  // t_tile and up are written before all warps read them
        unsigned a[DEEP / 16][4];
#pragma unroll
        for (int k = 0; k < DEEP / 16; k++)
            load_matrices<false>(a[k], t_tile + ((2 * k + lane / 16) * ROWS + top + lane % 16) * 8);
        const float ups[2] = {up[top + lane / 4], up[top + lane / 4 + 8]};
        int of_lane = place(lane, first), mine = place(top + lane / 4, first) * 4 + lane % 4, slot = 0;
        // What it writes: a chunk of two rows. Lanes that take theirs at once: from rows in different banks
        int row = top + lane / 8 + lane / 4 % 2 * 4, chunk = first + lane % TILES;
        Num* to = of_y + row * static_cast<long long>(y_stride);
        uint4 *now = ring, *former = ring + (STAGES - 1) * STAGE;
#pragma unroll 1
        for (int i = 0; i < stages; i++) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this stage's copies have landed; the former one's place, or t_tile's, is read
            if (i + STAGES - 1 < stages) copy_y(former, of_b.index), copy_next(former + ROWS * SLAB, of_b);
            copies_commit();
            unsigned *words = reinterpret_cast<unsigned*>(now), two[TILES * 2];  // of y, and 8 rows below
            float sums[TILES][4] = {};
#pragma unroll
            for (int n = 0; n < TILES * 2; n++) two[n] = words[(mine ^ n / 2 * 4) + n % 2 * 8 * SLAB * 4];
#pragma unroll
            for (int k = 0; k < DEEP / 32; k++)
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    unsigned b[4];
                    load_matrices<true>(b, now + (ROWS + k * 32) * SLAB + (of_lane ^ n));
                    mma_16x8x16(sums[n], a[2 * k], {b[0], b[1]});
                    mma_16x8x16(sums[n], a[2 * k + 1], {b[2], b[3]});
                }
#pragma unroll
            for (int n = 0; n < TILES * 2; n++) {
                const float* sum = &sums[n / 2][n % 2 * 2];
                add_pair(&two[n], ups[n % 2] * sum[0], ups[n % 2] * sum[1]);
                words[(mine ^ n / 2 * 4) + n % 2 * 8 * SLAB * 4] = two[n];
            }
            __syncwarp();  // the warp's part of y is complete before its lanes write it out, 16 bytes each
            const uint4 both[2] = {now[place(row, chunk)], now[place(row + 8, chunk)]};
            int at = begin + i * WIDE + chunk * NUMS16;
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (row + k * 8 < count && at < end) store16_last(to + k * 8ll * y_stride + at, both[k]);
            former = now, now += STAGE;
            if (++slot == STAGES) slot = 0, now -= STAGES * STAGE;
        }
        copies_wait<0>();
        __syncthreads();  // the ring is read before the next product fills it
    };
    lora += run.target * tile_count;
    if (whole)
        for (int j = 0; j < t_columns; j += RANKS)
            each_tile(tiles, blockIdx.y, gridDim.y, tile_count, lora, [&](int row0, int count, Lora adapter) {
                of_class(adapter.rank - j, [&](auto most) { multiply(row0, count, adapter, j, most); });
            });
    else
        each_tile(tiles, blockIdx.y, gridDim.y, tile_count, lora, [&](int row0, int count, Lora adapter) {
            if (adapter.rank)
                expand_plainly(y, t, pages, page_table, adapter, run, RUN, row0, count, rows, width, targets, t_columns,
                               splits, y_stride, page_stride);
        });
    if (blockIdx.x + blockIdx.y == 0) wait_for_previous();  // one block without work that waits is enough
}
