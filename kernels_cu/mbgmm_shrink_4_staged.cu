// computes: t[row] = x[row] A for every target of a group and every row of a tile, whose rows share one adapter
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, tiles] of Lora; tiles [tiles] of (first row, rows), 0 rows: nothing to do. A is in pages
// map: a block owns tiles, a target and a split, 64 rows and 128 columns of A at a time; a warp 16 rows and half of the
//      columns
// new here: for many rows: a number of A serves 64 rows instead of 16, through shared memory, to which x and A are on
//           their way three stages ahead of the products
// limits: none; no float32; columns of t beyond the rank are left as they are
#include "device.h"
#include "lora.h"

constexpr int WARPS = 8, ROWS = 64, COLUMNS = 128, STAGES = 4, SLAB = 8;  // SLAB: chunks of 16 bytes of a row in a slab
constexpr int STAGE = (ROWS + COLUMNS) * SLAB;                            // chunks of a stage: as many slabs as fit
constexpr int STEP = 32 * WARPS / SLAB;                                   // rows that all threads copy at a time

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
mbgmm_shrink_4_staged(float* t, const Num* x, const Num* pages, const int* page_table, const Lora* lora,
                      const int2* tiles, int tile_count, int rows, int d_in, int width, int targets, int t_columns,
                      int splits, int x_stride, int page_stride) {
    DYNAMIC_SHARED(uint4, ring);  // [STAGES][slabs][rows of x, then columns of A][SLAB]
    wait_for_previous();
    launch_dependents();
    int target = blockIdx.y, split = blockIdx.z;
    unsigned lane = threadIdx.x % 32;
    int chunks = chunks_of(d_in, width), pieces = pieces_of(d_in, width);
    int part = ceil_div(ceil_div(chunks, splits), SLAB) * SLAB, begin = split * part, end = min(begin + part, chunks);
    // What this thread copies of each slab: every STEPth row
    int mine = threadIdx.x / SLAB, my_chunk = threadIdx.x % SLAB;
    bool whole = whole_chunks(pages, width, page_stride) && aligned16(x) && (x_stride | d_in) % NUMS16 == 0;

    auto multiply = [&](int row0, int count, Lora adapter, int j0) {  // `count` rows, columns j0 ..
        int columns = min(COLUMNS, adapter.rank - j0), share = 1, slabs = 1;  // tiles of 8 columns of a warp
        while (share * 16 < columns) share *= 2;
        int height = ROWS + share * 16;
        while (2 * slabs * height <= ROWS + COLUMNS) slabs *= 2;
        const int* ids = page_table + adapter.a + j0 * pieces;
        int piece = -1, page[COLUMNS / STEP];  // of this thread's columns of A, at that piece
        auto fetch = [&](int stage) {
            uint4* to = ring + stage % STAGES * STAGE + place(mine, my_chunk);
            int first = begin + stage * slabs * SLAB;
            for (int slab = 0; slab < slabs && first < end; slab++, first += SLAB, to += height * SLAB) {
                Chunk at = chunk_at(first + my_chunk, d_in, width);
                if (first + my_chunk >= end) at = Chunk{0, 0, 0, 0};
#pragma unroll
                for (int k = 0; k < COLUMNS / STEP; k++)
                    if (at.piece != piece) page[k] = ids[min(mine + k * STEP, columns - 1) * pieces + at.piece];
                piece = at.piece;
#pragma unroll
                for (int k = 0; k < ROWS / STEP; k++)
                    if (whole && mine + k * STEP < count)
                        copy16(to + k * STEP * SLAB, page_at(x, row0 + mine + k * STEP, x_stride) + at.index, at.count);
#pragma unroll
                for (int k = 0; k < COLUMNS / STEP; k++)
                    if (whole && mine + k * STEP < columns)
                        copy16(to + (ROWS + k * STEP) * SLAB, page_at(pages, page[k], page_stride) + at.offset,
                               at.count);
#pragma unroll 1
                for (int i = mine; !whole && i < max(count, columns); i += STEP) {
                    const Num* row = page_at(x, row0 + i, x_stride) + at.index;
                    const Num* column = page_at(pages, ids[min(i, columns - 1) * pieces + piece], page_stride);
                    if (i < count) to[(i - mine) * SLAB] = load_nums(row, at.count);
                    if (i < columns) to[(ROWS + i - mine) * SLAB] = load_nums(column + at.offset, at.count);
                }
            }
            copies_commit();
        };
        float sums[COLUMNS / 16][4] = {};
        int top = threadIdx.x / 32 % 4 * 16, first = threadIdx.x / 128 * share;  // row; tile of 8 columns
        auto add = [&](const uint4* slab, auto constant) {
#pragma unroll
            for (int half = 0; half < 2; half++) {  // 32 numbers of each row
                unsigned a[2][4], b[4];
#pragma unroll
                for (int k = 0; k < 2; k++)
                    load_matrices<false>(a[k], slab + top * SLAB + place(lane % 16, half * 4 + k * 2 + lane / 16));
#pragma unroll
                for (int i = 0; i < decltype(constant)::VALUE; i++) {
                    const uint4* tile = slab + (ROWS + (first + i) * 8) * SLAB;
                    load_matrices<false>(b, tile + place(lane % 8, half * 4 + lane / 8));
                    mma_16x8x16(sums[i], a[0], {b[0], b[1]});
                    mma_16x8x16(sums[i], a[1], {b[2], b[3]});
                }
            }
        };
        for (int stage = 1 - STAGES; begin + stage * slabs * SLAB < end; stage++) {
            if (stage >= 0) copies_wait<STAGES - 2>();
            // This stage's copies have landed; the place of the one before, or of the product before, has been read.
            if (stage >= 0 || stage == 1 - STAGES) __syncthreads();
            fetch(stage + STAGES - 1);
            for (int slab = 0; stage >= 0 && slab < slabs && begin + (stage * slabs + slab) * SLAB < end; slab++) {
                const uint4* from = ring + stage % STAGES * STAGE + slab * height * SLAB;
                if (share == 1) add(from, Constant<1>());
                else if (share == 2) add(from, Constant<2>());
                else if (share == 4) add(from, Constant<4>());
                else add(from, Constant<8>());
            }
        }
        int j = first * 8 + lane % 4 * 2, row = top + lane / 4;
        float* to = t + ((split * static_cast<long long>(rows) + row0 + row) * targets + target) * t_columns + j0 + j;
#pragma unroll
        for (int k = 0; k < 4; k += 2, row += 8, to += 8ll * targets * t_columns)
#pragma unroll
            for (int i = 0; i < COLUMNS / 16; i++) {
                if (row < count && i < share && j + i * 8 < columns) to[i * 8] = sums[i][k];
                if (row < count && i < share && j + i * 8 + 1 < columns) to[i * 8 + 1] = sums[i][k + 1];
            }
        copies_wait<0>();
    };
    for (int i = blockIdx.x; (i = next_tile(tiles, i, gridDim.x, tile_count)) < tile_count; i += gridDim.x)
        for (int row = 0; row < tiles[i].y; row += ROWS)
            for (int j = 0; j < lora[target * tile_count + i].rank; j += COLUMNS)
                multiply(tiles[i].x + row, min(ROWS, tiles[i].y - row), lora[target * tile_count + i], j);
}
