// computes: t[row] = x[row] A for every target of a group and every row of a tile, whose rows share one adapter
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, tiles] of Lora; tiles [tiles] of (first row, rows); counts [2]: the first tiles have several rows,
//         the tiles in use. A is in pages. t of a tile of one row is all in split 0
// map: a block takes piece after piece of work: of a tile 16 rows, 16 columns of A and a split, a quarter of it a
//      warp's; of a row alone four columns, as in MBGMV: two warps share two, or of short ones a warp has two or four
// new here: one launch for MBGMM and MBGMV, of as many blocks as a GPU holds: none without work, none that waits for
//           the other kernel's. All of a piece is on its way at once: A to registers, even before x is written, x to
//           shared memory, a warp's part to the warp alone
// limits: none; no float32; columns of t beyond the rank are left as they are
#include "device.h"
#include "lora.h"
#include "lora_shrink.h"

constexpr int WARPS = 4, ROWS = 16, COLUMNS = 16, STEPS = 32 / 4;  // of 4 chunks, in flight: a lane copies one of x

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)
lora_shrink_1_together(float* t, const Num* x, const Num* pages, const int* page_table, const Lora* lora,
                       const int2* tiles, const int* counts, int tile_count, int rows, int d_in, int width, int targets,
                       int t_columns, int splits, int x_stride, int page_stride) {
    SHARED(uint4, x_tile, [WARPS][STEPS * 4 * ROWS]);  // of each warp [steps][rows][4]; or of a row alone [PASS]
    SHARED(float4, parts, [2][WARPS][COLUMNS / 8 * 32]);  // of this product, and of the former, which may yet be read
    SHARED(float, row_parts, [WARPS][2]);
    launch_dependents();
    int tall = counts[0], used = counts[1], warp = threadIdx.x / 32, lane = threadIdx.x % 32, product = 0;
    int chunks = chunks_of(d_in, width), pieces = pieces_of(d_in, width), steps = ceil_div(chunks, 4);
    int per_piece = pieces == 1 ? steps : width / NUMS16 / 4;  // steps of a page
    int share = ceil_div(steps, splits * WARPS), own = columns_of_a_warp(chunks, t_columns);
    int of_tile = ceil_div(t_columns, COLUMNS) * splits, of_row = ceil_div(t_columns, WARPS * own);
    bool whole = whole_chunks(pages, width, page_stride) && aligned16(x) && (x_stride | d_in) % NUMS16 == 0;
    bool whole_steps = whole && (pieces == 1 || width % (4 * NUMS16) == 0);  // or a step might pass over a page
    const Weights weights = {pages, page_table, width, page_stride};
    auto t_of = [&](int split, int row, int target) {
        return t + ((split * static_cast<long long>(rows) + row) * targets + target) * t_columns;
    };
    auto place_of = [&](int step, int row, int chunk) { return (step * ROWS + (row ^ (step & 1))) * 4 + chunk; };

    auto multiply = [&](float* to, int row0, int count, Lora adapter, int split, int j0, auto constant) {
        constexpr int TILES = decltype(constant)::VALUE;  // of 8 columns
        int begin = (split * WARPS + warp) * share, end = min(begin + share, steps);
        float sums[TILES][4] = {};
        for (int first = begin, count_steps; first < end; first += count_steps) {  // up to the end of a page
            int piece = first / per_piece, c = first * 4 + lane % 4;
            count_steps = min(STEPS, min(end, (piece + 1) * per_piece) - first);
            const Num* from[TILES];
            uint4 b[STEPS][TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                int column = min(j0 + i * 8 + lane / 4, adapter.rank - 1);
                int page = page_table[adapter.a + column * pieces + piece];
                from[i] = page_at(pages, page, page_stride) + (c - piece * per_piece * 4) * NUMS16;
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int i = 0; i < TILES; i++)
                    b[s][i] = load16_once(from[i] + s * 4 * NUMS16, s < count_steps && c + s * 4 < chunks);
            wait_for_previous();  // x is what the kernel before has written, the weights are not
            for (int row = 0; row < count; row++)
                copy16(&x_tile[warp][place_of(lane / 4, row, lane % 4)],
                       page_at(x, row0 + row, x_stride) + (first * 4 + lane) * NUMS16,
                       lane < count_steps * 4 && first * 4 + lane < chunks);
            copies_commit(), copies_wait<0>();
            __syncwarp();  // all lanes' copies have landed before any lane multiplies with them
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                uint4 a[2];
                for (int k = 0; k < 2; k++) a[k] = x_tile[warp][place_of(s, lane / 4 + k * 8, lane % 4)];
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    mma_16x8x16(sums[i], {a[0].x, a[1].x, a[0].y, a[1].y}, {b[s][i].x, b[s][i].y});
                    mma_16x8x16(sums[i], {a[0].z, a[1].z, a[0].w, a[1].w}, {b[s][i].z, b[s][i].w});
                }
            }
            __syncwarp();  // x_tile is read before the next copies overwrite it
        }
        wait_for_previous();
        for (int i = 0; i < TILES; i++)
            parts[product % 2][warp][i * 32 + lane] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        __syncthreads();  // all warps' parts are written before they are added
        if (threadIdx.x < TILES * 64) {  // a thread adds two numbers of a row
            const float2* part = reinterpret_cast<const float2*>(&parts[product % 2][0][0]) + threadIdx.x;
            float2 sum = {0, 0};
            for (int k = 0; k < WARPS; k++, part += COLUMNS / 8 * 64) sum.x += part->x, sum.y += part->y;
            int i = threadIdx.x, j = j0 + i / 64 * 8 + i / 2 % 4 * 2, row = i % 64 / 8 + i % 2 * 8;
            float* two = to + static_cast<long long>(row) * targets * t_columns + j;
            if (row < count && j < adapter.rank) two[0] = sum.x;
            if (row < count && j + 1 < adapter.rank) two[1] = sum.y;
        }
        product++;
    };
    for (int item = blockIdx.x;; item += gridDim.x) {
        Work work = find_work(item, tall, of_tile * targets, of_row * targets);
        if (work.tile >= used) break;
        int target = work.part % targets, part = work.part / targets;
        int2 tile = tiles[work.tile];
        Lora adapter = lora[target * tile_count + work.tile];
        int split = part % splits, j0 = part / splits * COLUMNS, columns = min(COLUMNS, adapter.rank - j0);
        for (int row = 0; !work.alone && columns > 0 && row < tile.y; row += ROWS) {
            int row0 = tile.x + row, count = min(ROWS, tile.y - row);
            float* to = t_of(split, row0, target);
            if (!whole_steps)
                shrink_plainly(to, targets * t_columns, page_at(x, row0, x_stride), x_stride, pages, page_stride,
                               page_table + adapter.a, width, d_in, split, splits, count, j0, columns);
            else if (columns <= 8) multiply(to, row0, count, adapter, split, j0, Constant<1>());
            else multiply(to, row0, count, adapter, split, j0, Constant<2>());
        }
        if (int first = part * WARPS * own; work.alone && first < adapter.rank)
            shrink_alone<WARPS>(own, &x_tile[0][0], row_parts, t_of(0, tile.x, target), page_at(x, tile.x, x_stride),
                                weights, adapter, d_in, first, 0, chunks, whole);
    }
    wait_for_previous();
}
