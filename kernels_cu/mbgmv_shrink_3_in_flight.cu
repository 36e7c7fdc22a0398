// computes: t[row] = x[row] A for every target of a group, A of the row's own adapter at its own rank, in float32
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, rows] of Lora. A is in pages: see Lora in device.h
// map: a block owns four columns of A in some rows, and a split; a warp one of them, a lane every 32nd chunk of 16
//      bytes
// new here: 16 loads of 16 bytes are in flight before the first is used, 256 bytes a lane instead of 2; x is read from
//           memory once a block. Nothing branches between the loads, or they would wait for each other
// limits: none; columns of t beyond the rank are left as they are
#include "device.h"
#include "lora.h"

constexpr int WARPS = 4, LOADS = 16, PASS = 32 * LOADS;  // chunks of a column that a warp has in flight

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
mbgmv_shrink_3_in_flight(float* t, const Num* x, const Num* pages, const int* page_table, const Lora* lora, int rows,
                         int d_in, int width, int targets, int t_columns, int splits, int x_stride, int page_stride) {
    SHARED(uint4, x_part, [PASS]);
    wait_for_previous();
    launch_dependents();
    int target = blockIdx.z, split = 0, lane = threadIdx.x % 32, first_column = blockIdx.x * WARPS;
    if (splits > 1) split = target / targets, target -= split * targets;
    Lora adapter = lora[target * rows + blockIdx.y];
    // Rank: of the lane's of the next 32 rows of this block; most may have nothing to do here
    int rank = 0, step = gridDim.y;
    if (step < rows) rank = lora[target * rows + min(blockIdx.y + lane * step, rows - 1)].rank;
    int pieces = pieces_of(d_in, width), per_piece = ceil_div(width, NUMS16), chunks = chunks_of(d_in, width);
    int part = splits > 1 ? ceil_div(chunks, splits) : chunks, begin = split * part, end = min(begin + part, chunks);
    bool whole = whole_chunks(pages, width,
            page_stride) && aligned16(x) && x_stride % NUMS16 == 0 && d_in % NUMS16 == 0 &&
                 (pieces == 1 || per_piece >= 32);

    auto shrink = [&](int row) {
        int j = first_column + threadIdx.x / 32, last = j < adapter.rank ? end : begin;
        const int* ids = page_table + adapter.a + min(j, adapter.rank - 1) * pieces;
        const Num* from = page_at(x, row, x_stride);
        float sums[4] = {0, 0, 0, 0};
        for (int first = begin; whole && first < end; first += PASS) {
            uint4 weights[LOADS], inputs[LOADS / WARPS];
            int page[LOADS], offset[LOADS], chunk = first + lane, piece = 0;
            if (pieces > 1) piece = chunk / per_piece, chunk -= piece * per_piece;
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                page[u] = ids[piece], offset[u] = chunk * NUMS16, chunk += 32;
                bool next = chunk >= per_piece && piece < pieces - 1;
                piece += next, chunk -= next ? per_piece : 0;
            }
#pragma unroll
            for (int u = 0; u < LOADS; u++)
                weights[u] = load16_once(page_at(pages, page[u], page_stride) + offset[u],
                        first + 32 * u + lane < last);
#pragma unroll
            for (int u = 0, i = threadIdx.x; u < LOADS / WARPS; u++, i += 32 * WARPS)
                inputs[u] = load16_once(from + (first + i) * NUMS16, first + i < end);
#pragma unroll
            for (int u = 0, i = threadIdx.x; u < LOADS / WARPS; u++, i += 32 * WARPS) x_part[i] = inputs[u];
            __syncthreads();  // x_part is written before all warps multiply with it
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                if (u % 4 == 0 && first + 32 * u >= end) break;
                add_products(sums[u % 4], weights[u], x_part[32 * u + lane]);
            }
            __syncthreads();  // x_part is read before the next pass overwrites it
        }
#pragma unroll 1
        for (int c = begin + lane; !whole && c < last; c += 32) {
            Chunk at = chunk_at(c, d_in, width);
            const Num* weight = page_at(pages, ids[at.piece], page_stride) + at.offset;
            add_products(sums[0], load_nums(weight, at.count), load_nums(from + at.index, at.count));
        }
        float sum = warp_sum((sums[0] + sums[2]) + (sums[1] + sums[3]));
        if (j < adapter.rank && lane == 0)
            t[((static_cast<long long>(split) * rows + row) * targets + target) * t_columns + j] = sum;
    };
    for (int n = 0, row = blockIdx.y; row < rows; n++, row += step) {
        if (n > 0 && n % 32 == 0) rank = lora[target * rows + min(row + lane * step, rows - 1)].rank;
        if (n > 0 && __shfl_sync(~0u, rank, n % 32) <= first_column) continue;
        if (n > 0) adapter = lora[target * rows + row];
        if (adapter.rank > first_column) shrink(row);
    }
}
