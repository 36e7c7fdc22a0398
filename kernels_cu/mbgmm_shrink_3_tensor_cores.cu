// computes: t[row] = x[row] A for every target of a group and every row of a tile, whose rows share one adapter
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, tiles] of Lora; tiles [tiles] of (first row, rows), 0 rows: nothing to do. A is in pages
// map: a block owns tiles, 16 rows at a time, a target, 64 columns of A and a split; a warp an eighth of the split; in
//      a step a lane owns a chunk of 16 bytes of 2 rows of x and of up to 8 columns of A
// new here: products by tensor cores, whose operands go from memory straight to registers: the order of a sum's terms
//           is free, so a lane's 8 neighbouring numbers serve two products. 8 loads of A are in flight, and no barrier
//           until the warps' parts are added
// limits: none; no float32; columns of t beyond the rank are left as they are
#include "device.h"
#include "lora.h"

constexpr int WARPS = 8, ROWS = 16, COLUMNS = 64, LOADS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
mbgmm_shrink_3_tensor_cores(float* t, const Num* x, const Num* pages, const int* page_table, const Lora* lora,
                            const int2* tiles, int tile_count, int rows, int d_in, int width, int targets,
                            int t_columns, int splits, int x_stride, int page_stride) {
    SHARED(float4, parts, [WARPS][COLUMNS / 8 * 32]);
    wait_for_previous();
    launch_dependents();
    int target = blockIdx.y, j0 = 0, split = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t_columns > COLUMNS) j0 = target / targets * COLUMNS, target %= targets;
    int2 tile = tiles[blockIdx.z];  // both at once, ahead of all else: what follows waits for them
    Lora adapter = lora[target * tile_count + blockIdx.z];
    int chunks = chunks_of(d_in, width), pieces = pieces_of(d_in, width), steps = ceil_div(chunks, 4);
    int share = ceil_div(steps, splits * WARPS), begin = (split * WARPS + warp) * share;
    int end = min(begin + share, steps);
    bool whole = whole_chunks(pages, width, page_stride) && aligned16(x) && x_stride % NUMS16 == 0 &&
                 d_in % NUMS16 == 0;

    auto multiply = [&](int row0, int count, Lora adapter, auto constant) {
        constexpr int TILES = decltype(constant)::VALUE, STEPS = TILES == 1 ? 4 : LOADS / TILES;
        float sums[TILES][4] = {};
        for (int first = begin; first < end; first += STEPS) {
            uint4 a[STEPS][2], b[STEPS][TILES];
            int page[STEPS][TILES];
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                Chunk at = chunk_at(min((first + s) * 4 + lane % 4, chunks - 1), d_in, width);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    int j = min(j0 + i * 8 + lane / 4, adapter.rank - 1);
                    page[s][i] = page_table[adapter.a + j * pieces + at.piece];
                }
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                int c = (first + s) * 4 + lane % 4;
                Chunk at = chunk_at(min(c, chunks - 1), d_in, width);
                bool wanted = first + s < end && c < chunks;
#pragma unroll
                for (int i = 0; i < TILES; i++)
                    b[s][i] = load16_once(page_at(pages, page[s][i], page_stride) + at.offset, wanted);
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    int row = row0 + min(lane / 4 + 8 * k, count - 1);
                    a[s][k] = load16_once(page_at(x, row, x_stride) + at.index, wanted);
                }
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                if (first + s >= end) break;
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    mma_16x8x16(sums[i], {a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y}, {b[s][i].x, b[s][i].y});
                    mma_16x8x16(sums[i], {a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w}, {b[s][i].z, b[s][i].w});
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) parts[warp][i * 32 + lane] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        __syncthreads();  // all warps' parts are written before they are added
        for (int i = threadIdx.x; i < TILES * 32; i += 32 * WARPS) {
            float4 sum = {0, 0, 0, 0};
            for (int k = 0; k < WARPS; k++)
                sum.x += parts[k][i].x, sum.y += parts[k][i].y, sum.z += parts[k][i].z, sum.w += parts[k][i].w;
            int j = j0 + i / 32 * 8 + i % 4 * 2, row = i % 32 / 4;
            float* to = t + ((split * static_cast<long long>(rows) + row0 + row) * targets + target) * t_columns + j;
            if (row < count && j < adapter.rank) to[0] = sum.x;
            if (row < count && j + 1 < adapter.rank) to[1] = sum.y;
            if (row + 8 < count && j < adapter.rank) to[8ll * targets * t_columns] = sum.z;
            if (row + 8 < count && j + 1 < adapter.rank) to[8ll * targets * t_columns + 1] = sum.w;
        }
        __syncthreads();  // the parts are read before the next product's are written
    };
    for (int i = blockIdx.z; i < tile_count; i = next_tile(tiles, i + gridDim.z, gridDim.z, tile_count)) {
        if (i > int(blockIdx.z)) tile = tiles[i], adapter = lora[target * tile_count + i];
        int columns = min(COLUMNS, adapter.rank - j0);
        for (int row = 0; columns > 0 && row < tile.y; row += ROWS) {
            int row0 = tile.x + row, count = min(ROWS, tile.y - row);
            float* to = t + ((split * static_cast<long long>(rows) + row0) * targets + target) * t_columns;
            if (!whole)
                shrink_plainly(to, targets * t_columns, page_at(x, row0, x_stride), x_stride, pages, page_stride,
                               page_table + adapter.a, width, d_in, split, splits, count, j0, columns);
            else if (columns <= 8) multiply(row0, count, adapter, Constant<1>());
            else if (columns <= 16) multiply(row0, count, adapter, Constant<2>());
            else if (columns <= 32) multiply(row0, count, adapter, Constant<4>());
            else multiply(row0, count, adapter, Constant<8>());
        }
    }
}
