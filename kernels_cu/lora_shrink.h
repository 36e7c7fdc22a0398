// A row that has its adapter to itself, x A: columns of A one by one, several a warp where they are short, or two for
// several warps on tensor cores. See lora_rows.h.
#pragma once
#include "lora_rows.h"

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
HELPER void shrink_columns(int own, uint4* x_part, float* t, const Num* x, const Weights& of, Lora adapter, int d_in,
                       int first, int begin, int end, bool whole) {
    if (own == 1) shrink_columns<WARPS, 1>(x_part, t, x, of, adapter, d_in, first, begin, end, whole);
    else if (own == 2) shrink_columns<WARPS, 2>(x_part, t, x, of, adapter, d_in, first, begin, end, whole);
    else shrink_columns<WARPS, 4>(x_part, t, x, of, adapter, d_in, first, begin, end, whole);
}

// Where a column is long, a warp takes two of them and shares them with others, on tensor cores:
constexpr int EACH_OF_TWO = 8;                   // chunks of each of its two columns that a lane has in flight
constexpr int SHARES = 2;                        // warps that share two columns, 32 chunks in turn
constexpr int PASS = 32 * EACH_OF_TWO * SHARES;  // chunks of a column in flight

// An entry, in a load that the compiler leaves where it stands: what a block does next takes less time than this.
HELPER Lora load_entry(const Lora* from) {
    union { uint4 words; Lora entry; } both = {load16_once(from)};
    return both.entry;
}

// t [first ..] = chunks begin .. end of a row of x, times two columns of A for each two of the block's warps.
// Tensor cores multiply every lane's numbers of A by every lane's of x, of four lanes at a time: rows g and g + 8 of a
// product are two columns' numbers of lanes 4 g .. 4 g + 3, column g is x of these lanes. The sums wanted are those of
// row g or g + 8 and column g; the others cost nothing, and are not looked at.
template <int WARPS>
HELPER void shrink_row(uint4* x_part, float (*parts)[2], float* t, const Num* x, const Weights& of, Lora adapter,
                       int d_in, int first, int begin, int end, bool whole) {
    constexpr int INPUTS = PASS / (32 * WARPS), STEP = 32 * SHARES;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp % SHARES * 32 + lane;
    int j = first + warp / SHARES * 2, pieces = pieces_of(d_in, of.width), per_piece = ceil_div(of.width, NUMS16);
    const int* ids[2];
    int page[2];  // of the lane's piece of each column
#pragma unroll
    for (int k = 0; k < 2; k++) {
        ids[k] = of.page_table + adapter.a + min(j + k, adapter.rank - 1) * pieces;
        page[k] = ids[k][min(lane, pieces - 1)];
    }
    float products[4][4] = {}, sums[2] = {0, 0};
    whole = whole && (pieces == 1 || (pieces <= 32 && per_piece >= STEP));  // or a step might pass over a page
    int stop = whole ? end : begin;
    for (int at = begin; at == begin || at < stop; at += PASS) {  // once at least: parts need a barrier between rows
        uint4 weights[2][EACH_OF_TWO], inputs[INPUTS];
        if (pieces == 1 && at + PASS <= stop && j + 1 < adapter.rank) {  // nothing to be worked out for each load
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const Num* from = page_at(of.pages, page[k], of.page_stride) + (at + own) * NUMS16;
#pragma unroll
                for (int u = 0; u < EACH_OF_TWO; u++) weights[k][u] = load16_once(from + u * STEP * NUMS16);
            }
        } else {
            int chunk = at + own, piece = 0;
            if (pieces > 1) piece = chunk / per_piece, chunk -= piece * per_piece;
            piece = min(piece, pieces - 1);
#pragma unroll
            for (int u = 0; u < EACH_OF_TWO; u++) {
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    int id = pieces == 1 ? page[k] : __shfl_sync(~0u, page[k], piece);
                    weights[k][u] = load16_once(page_at(of.pages, id, of.page_stride) + chunk * NUMS16,
                                                at + own + u * STEP < stop && j + k < adapter.rank);
                }
                chunk += STEP;
                bool next = chunk >= per_piece && piece < pieces - 1;
                piece += next, chunk -= next ? per_piece : 0;
            }
        }
        wait_for_previous();  // x is what the kernel before has written, the weights are not
#pragma unroll
        for (int u = 0, i = threadIdx.x; u < INPUTS; u++, i += 32 * WARPS)
            inputs[u] = load16_once(x + (at + i) * NUMS16, at + i < stop);
#pragma unroll
        for (int u = 0; u < INPUTS; u++) x_part[threadIdx.x + u * 32 * WARPS] = inputs[u];
        __syncthreads();  // all of x_part is written before any warp multiplies with it
#pragma unroll
        for (int u = 0; u < EACH_OF_TWO; u++) {
            if (u % 4 == 0 && at + u * STEP >= stop) break;
            uint4 a = weights[0][u], b = weights[1][u], c = x_part[own + u * STEP];
            mma_16x8x16(products[u % 2 * 2], {a.x, b.x, a.y, b.y}, {c.x, c.y});
            mma_16x8x16(products[u % 2 * 2 + 1], {a.z, b.z, a.w, b.w}, {c.z, c.w});
        }
        if (at + PASS < stop) {
            __syncthreads();  // x_part is read before the next pass overwrites it
        }
    }
    wait_for_previous();
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll 1
        for (int c = begin + own; !whole && j + k < adapter.rank && c < end; c += STEP) {
            Chunk at = chunk_at(c, d_in, of.width);
            const Num* weight = page_at(of.pages, ids[k][at.piece], of.page_stride) + at.offset;
            add_products(sums[k], load_nums(weight, at.count), load_nums(x + at.index, at.count));
        }
        float two[2];
        for (int i = 0; i < 2; i++) {
            int n = 2 * k + i;
            two[i] = (products[0][n] + products[1][n]) + (products[2][n] + products[3][n]);
        }
        if (lane % 4 == lane / 8) sums[k] += lane / 4 % 2 ? two[1] : two[0];  // column lane / 4 is this lane's
        sums[k] = warp_sum(sums[k]);
    }
    if (lane < 2) parts[warp][lane] = lane ? sums[1] : sums[0];
    __syncthreads();  // parts are written before they are added; x_part is read before the next row's x
    int i = threadIdx.x, mine = i / 2 * SHARES;
    if (i < WARPS / SHARES * 2 && first + i < adapter.rank) t[first + i] = parts[mine][i % 2] + parts[mine + 1][i % 2];
}

// Either way, by how long the columns are; both have x_part [PASS].
template <int WARPS>
HELPER void shrink_alone(int own, uint4* x_part, float (*parts)[2], float* t, const Num* x, const Weights& of,
                         Lora adapter, int d_in, int first, int begin, int end, bool whole) {
    static_assert(PASS == FLIGHT, "x_part has room for one of them");
    if (own == 1) shrink_row<WARPS>(x_part, parts, t, x, of, adapter, d_in, first, begin, end, whole);
    else shrink_columns<WARPS>(own, x_part, t, x, of, adapter, d_in, first, begin, end, whole);
}
