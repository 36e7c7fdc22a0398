// computes: t[row] = x[row] A for every target of a group, A of the row's own adapter at its own rank, in float32
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, rows] of Lora. A is in pages: see Lora in device.h
// map: a block owns four columns of A in some rows, and a split; a warp one of them, a lane every 32nd chunk of 16
//      bytes. Where columns are short, a warp owns two or four
// new here: 16 loads of 16 bytes are in flight before the first is used, 256 bytes a lane instead of 2; x is read from
//           memory once a block. Nothing branches between the loads, or they would wait for each other
// limits: none; columns of t beyond the rank are left as they are
#include "device.h"
#include "lora.h"
#include "lora_rows.h"

constexpr int WARPS = 4;
constexpr int LOADS = 16;           // of 16 bytes that a lane has in flight
constexpr int FLIGHT = 32 * LOADS;  // chunks that a warp has in flight

// Columns of A that a warp takes at a time: more than one where a column is short, as far as there are enough of them
HELPER int columns_of_a_warp(int chunks, int t_columns) {
    if (chunks <= FLIGHT / 4 && t_columns >= 32) return 4;
    return chunks <= FLIGHT / 2 && t_columns >= 16 ? 2 : 1;
}

// t [first column ..] = chunks begin .. end of a row of x, times the columns of A from `first` on, OWN for each warp.
template <int WARPS, int OWN>
HELPER void shrink_columns(uint4* x_part, float* t, const Num* x, const Weights& of, Lora adapter, int d_in, int first,
                           int begin, int end, bool whole) {
    constexpr int EACH = LOADS / OWN, SUMS = 4 / OWN, INPUTS = (EACH + WARPS - 1) / WARPS;
    int lane = threadIdx.x % 32, j = first + threadIdx.x / 32 * OWN;
    int pieces = pieces_of(d_in, of.width), per_piece = ceil_div(of.width, NUMS16);
    const int* ids[OWN];
    int last[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        ids[k] = of.page_table + adapter.a + min(j + k, adapter.rank - 1) * pieces;
        last[k] = j + k < adapter.rank ? end : begin;
    }
    float sums[4] = {0, 0, 0, 0};
    whole = whole && (pieces == 1 || per_piece >= 32);  // or a step of 32 chunks might pass over a page
    for (int at = begin; whole && at < end; at += 32 * EACH) {
        uint4 weights[LOADS], inputs[INPUTS];
        int page[LOADS], offset[EACH], chunk = at + lane, piece = 0;
        if (pieces > 1) piece = chunk / per_piece, chunk -= piece * per_piece;
        piece = min(piece, pieces - 1);
#pragma unroll
        for (int u = 0; u < EACH; u++) {
#pragma unroll
            for (int k = 0; k < OWN; k++) page[k * EACH + u] = ids[k][piece];
            offset[u] = chunk * NUMS16, chunk += 32;
            bool next = chunk >= per_piece && piece < pieces - 1;
            piece += next, chunk -= next ? per_piece : 0;
        }
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            weights[u] = load16_once(page_at(of.pages, page[u], of.page_stride) + offset[u % EACH],
                                     at + 32 * (u % EACH) + lane < last[u / EACH]);
        wait_for_previous();  // x is what the kernel before has written, the weights are not
#pragma unroll
        for (int u = 0, i = threadIdx.x; u < INPUTS; u++, i += 32 * WARPS)
            inputs[u] = load16_once(x + (at + i) * NUMS16, i < 32 * EACH && at + i < end);
#pragma unroll
        for (int u = 0, i = threadIdx.x; u < INPUTS; u++, i += 32 * WARPS)
            if (i < 32 * EACH) x_part[i] = inputs[u];
        __syncthreads();  // x_part is written before all warps multiply with it
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            if (u % 4 == 0 && at + 32 * u >= end) break;
#pragma unroll
            for (int k = 0; k < OWN; k++)
                add_products(sums[k * SUMS + u % SUMS], weights[k * EACH + u], x_part[32 * u + lane]);
        }
        __syncthreads();  // x_part is read before the next pass, or the next row, overwrites it
    }
    wait_for_previous();
#pragma unroll
    for (int k = 0; k < OWN; k++) {
#pragma unroll 1
        for (int c = begin + lane; !whole && c < last[k]; c += 32) {
            Chunk at = chunk_at(c, d_in, of.width);
            const Num* weight = page_at(of.pages, ids[k][at.piece], of.page_stride) + at.offset;
            add_products(sums[k * SUMS], load_nums(weight, at.count), load_nums(x + at.index, at.count));
        }
        float sum = sums[k * SUMS];
        if (SUMS == 4) sum = (sum + sums[2]) + (sums[1] + sums[3]);
        if (SUMS == 2) sum += sums[k * SUMS + 1];
        sum = warp_sum(sum);
        if (j + k < adapter.rank && lane == 0) t[j + k] = sum;
    }
}
template <int WARPS>
HELPER void shrink_own(int own, uint4* x_part, float* t, const Num* x, const Weights& of, Lora adapter, int d_in,
                       int first, int begin, int end, bool whole) {
    if (own == 1) shrink_columns<WARPS, 1>(x_part, t, x, of, adapter, d_in, first, begin, end, whole);
    else if (own == 2) shrink_columns<WARPS, 2>(x_part, t, x, of, adapter, d_in, first, begin, end, whole);
    else shrink_columns<WARPS, 4>(x_part, t, x, of, adapter, d_in, first, begin, end, whole);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
mbgmv_shrink_3_in_flight(float* t, const Num* x, const Num* pages, const int* page_table, const Lora* lora, int rows,
                         int d_in, int width, int targets, int t_columns, int splits, int x_stride, int page_stride) {
    SHARED(uint4, x_part, [FLIGHT]);
    launch_dependents();
    int target = blockIdx.z, split = 0, lane = threadIdx.x % 32;
    if (splits > 1) split = target / targets, target -= split * targets;
    Lora adapter = lora[target * rows + blockIdx.y];
    // Rank: of the lane's of the next 32 rows of this block; most may have nothing to do here
    int rank = 0, step = gridDim.y;
    if (step < rows) rank = lora[target * rows + min(blockIdx.y + lane * step, rows - 1)].rank;
    int chunks = chunks_of(d_in, width);
    int part = splits > 1 ? ceil_div(chunks, splits) : chunks, begin = split * part, end = min(begin + part, chunks);
    int own = columns_of_a_warp(part, t_columns), first = blockIdx.x * WARPS * own;
    bool whole = whole_chunks(pages, width, page_stride) && aligned16(x) && (x_stride | d_in) % NUMS16 == 0;
    const Weights weights = {pages, page_table, width, page_stride};

    for (int n = 0, row = blockIdx.y; row < rows; n++, row += step) {
        if (n > 0 && n % 32 == 0) rank = lora[target * rows + min(row + lane * step, rows - 1)].rank;
        if (n > 0 && __shfl_sync(~0u, rank, n % 32) <= first) continue;
        if (n > 0) adapter = lora[target * rows + row];
        if (adapter.rank <= first) continue;
        float* to = t + ((split * static_cast<long long>(rows) + row) * targets + target) * t_columns;
        const Num* from = page_at(x, row, x_stride);
        shrink_own<WARPS>(own, x_part, to, from, weights, adapter, d_in, first, begin, end, whole);
    }
    wait_for_previous();
}
