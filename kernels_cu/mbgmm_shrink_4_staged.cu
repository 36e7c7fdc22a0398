// computes: t[row] = x[row] A for every target of a group and every row of a tile, whose rows share one adapter
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, tiles] of Lora; tiles [tiles] of (first row, rows), 0 rows: nothing to do. A is in pages
// map: a block owns tiles, a target and a split, 64 rows and 128 columns of A at a time; a warp 16 rows and half of the
//      columns
// new here: for many rows: a number of A serves 64 rows instead of 16, through shared memory, to which x and A are on
//           their way three to seven stages ahead of the products, the first of A even before x is written. A thread's
//           next chunk is an addition away from the one before, not a division: half the instructions of a stage
// limits: none; no float32; columns of t beyond the rank are left as they are
#include "device.h"
#include "lora.h"
#include "lora_staged.h"

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
mbgmm_shrink_4_staged(float* t, const Num* x, const Num* pages, const int* page_table, const Lora* lora,
                      const int2* tiles, int tile_count, int rows, int d_in, int width, int targets, int t_columns,
                      int splits, int x_stride, int page_stride) {
    DYNAMIC_SHARED(uint4, ring);  // [stages][rows of x, then columns of A][SLAB]
    int target = blockIdx.y, split = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int part = ceil_div(ceil_div(d_in, splits), WIDE) * WIDE, begin = split * part, end = min(begin + part, d_in);
    int stages = ceil_div(max(end - begin, 0), WIDE);
    bool whole = whole_chunks(pages, width, page_stride) && aligned16(x) && (x_stride | d_in) % NUMS16 == 0;

    auto multiply = [&](int row0, int count, Lora adapter, int j0, auto most) {  // `count` rows, columns j0 ..
        constexpr int MOST = decltype(most)::VALUE, TILES = MOST / 16;  // columns; tiles of 8 columns of a warp
        constexpr int STAGE = (ROWS + MOST) * SLAB, STAGES = ROOM / STAGE;
        int columns = min(MOST, adapter.rank - j0);
        int ids = adapter.a + j0 * pieces_of(d_in, width);
        Vectors<MOST> of_a = vectors_from<MOST>(begin, end, pages, width, page_stride, page_table, ids, columns, d_in);
        const Num* of_x = x + static_cast<long long>(row0) * x_stride;
        auto copy_x = [&](uint4* stage, int index) { copy_rows(stage, of_x + index, x_stride, count, index < end); };
        int index = of_a.index;
#pragma unroll 1
        for (int i = 0; i < min(STAGES - 1, stages); i++) copy_next(ring + i * STAGE + ROWS * SLAB, of_a);
        wait_for_previous();  // x is what the kernel before has written, the weights are not
        launch_dependents();
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++, copies_commit())
            if (i < stages) copy_x(ring + i * STAGE, index + i * WIDE);
        float sums[TILES][4] = {};
        int top = warp % 4 * 16, left = warp / 4 * TILES * 8, slot = 0;  // row, column; place in the ring
        uint4 *now = ring, *former = ring + (STAGES - 1) * STAGE;
        auto add = [&](const uint4* stage) {
#pragma unroll
            for (int half = 0; half < 2; half++) {  // 32 numbers of each row
                unsigned a[2][4], b[4];
#pragma unroll
                for (int k = 0; k < 2; k++)
                    load_matrices<false>(a[k], stage + top * SLAB + place(lane % 16, half * 4 + k * 2 + lane / 16));
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const uint4* tile = stage + (ROWS + left + n * 8) * SLAB;
                    load_matrices<false>(b, tile + place(lane % 8, half * 4 + lane / 8));
                    mma_16x8x16(sums[n], a[0], {b[0], b[1]});
                    mma_16x8x16(sums[n], a[1], {b[2], b[3]});
                }
            }
        };
#pragma unroll 1
        for (int i = 0; i < stages; i++) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this stage's copies have landed; the former one is read
            if (i + STAGES - 1 < stages) copy_x(former, of_a.index), copy_next(former + ROWS * SLAB, of_a);
            copies_commit();
            if (left < columns) add(now);
            former = now, now += STAGE;
            if (++slot == STAGES) slot = 0, now -= STAGES * STAGE;
        }
        int j = left + lane % 4 * 2;
        for (int k = 0; k < 4; k += 2) {
            int row = top + lane / 4 + k * 4;
            float* to = t + ((split * static_cast<long long>(rows) + row0 + row) * targets + target) * t_columns + j0;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                if (row < count && j + n * 8 < columns) to[j + n * 8] = sums[n][k];
                if (row < count && j + n * 8 + 1 < columns) to[j + n * 8 + 1] = sums[n][k + 1];
            }
        }
        copies_wait<0>();
        __syncthreads();  // the ring is read before the next product fills it
    };
    lora += target * tile_count;
    if (whole)
        for (int j = 0; j < t_columns; j += RANKS)
            each_tile(tiles, blockIdx.x, gridDim.x, tile_count, lora, [&](int row0, int count, Lora adapter) {
                of_class(adapter.rank - j, [&](auto most) { multiply(row0, count, adapter, j, most); });
            });
    else
        each_tile(tiles, blockIdx.x, gridDim.x, tile_count, lora, [&](int row0, int count, Lora adapter) {
            float* to = t + ((split * static_cast<long long>(rows) + row0) * targets + target) * t_columns;
            shrink_plainly(to, targets * t_columns, page_at(x, row0, x_stride), x_stride, pages, page_stride,
                           page_table + adapter.a, width, d_in, split, splits, count, 0, adapter.rank);
        });
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_for_previous();  // one block without work that waits is enough
}
