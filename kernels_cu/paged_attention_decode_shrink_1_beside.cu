// computes: out[row] = softmax(q K^T / sqrt(head_dim)) V as paged_attention_decode does, and t[row] = out[row] A, A of
//           the row's own adapter at its own rank, in float32
// arrays: those of paged_attention_decode, whose partial and stats are not used; t [blocks of a row, rows, 1,
//         t_columns] float32, for the expand to add; page_table of page ids; lora [1, rows] of Lora. A is in pages of
//         kv_heads * head_dim
// map: as paged_attention_decode_3_in_flight; and a warp owns every WARPS-th column of A, a lane the numbers of its
//      heads
// new here: out is multiplied where it is made, one launch instead of two; its part of A is on its way to shared memory
//           while the block attends. out has the bits of paged_attention_decode_3_in_flight
// limits: one split; a head is whole chunks, up to 256 numbers; t_columns up to RANKS; no float32
#include "device.h"
#include "attention_decode.h"

constexpr int RANKS = 16, COLUMNS = 32 * NUMS16;  // of a lane's heads, side by side

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
paged_attention_decode_shrink_1_beside(Num* out, float* partial, float2* stats, const Num* q, const Num* pages,
                                       const int* sequence_pages, const int2* queries, int rows, int heads,
                                       int kv_heads, int head_dim, int positions, int chunk, int splits, int q_stride,
                                       int out_stride, int page_stride, float* t, const int* page_table,
                                       const Lora* lora, int width, int t_columns) {
    DYNAMIC_SHARED(float, parts);            // [WARPS][query heads of a lane][COLUMNS]: each warp's sums; then a_part
    SHARED(float2, found, [WARPS][4 * 32]);  // each warp's largest score and sum: [.. query heads of a lane][side]
    SHARED(uint4, row_part, [4 * 32]);       // [query heads of a lane][32]: out
    launch_dependents();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Lora adapter = lora[blockIdx.y];
    wait_for_previous();

    // [RANKS / WARPS][HEADS][WARPS][32] chunks of A, each of which the thread that asks for it will multiply
    auto a_part = [&](int heads_of_lane) {
        return reinterpret_cast<uint4*>(parts + WARPS * heads_of_lane * COLUMNS) + threadIdx.x;
    };
    auto fetch = [&](auto shared_by, int head, int of_group, int d, int count) {
        constexpr int HEADS = decltype(shared_by)::VALUE, PARTS = RANKS / WARPS * HEADS;
        int pieces = pieces_of(heads * head_dim, width), page[PARTS], offset[PARTS];
        auto wanted = [&](int i) {
            return warp + i / HEADS * WARPS < adapter.rank && i % HEADS < of_group && count > 0;
        };
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            int column = (head + i % HEADS) * head_dim + d, piece = 0;
            if (pieces > 1) piece = column / width;
            offset[i] = column - piece * width, page[i] = 0;
            if (wanted(i)) page[i] = page_table[adapter.a + (warp + i / HEADS * WARPS) * pieces + piece];
        }
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            copy16(a_part(HEADS) + i * 32 * WARPS, page_at(pages, page[i], page_stride) + offset[i], wanted(i));
        copies_commit();
    };
    auto keep = [&](int place, Num number) { reinterpret_cast<Num*>(row_part)[place] = number; };
    auto finish = [&](auto shared_by) {
        constexpr int HEADS = decltype(shared_by)::VALUE;
        copies_wait<0>();
        __syncthreads();  // row_part is written before all warps multiply with it
        for (int j = warp; j < adapter.rank; j += WARPS) {
            float sum = 0;
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                add_products(sum, a_part(HEADS)[(j / WARPS * HEADS + h) * 32 * WARPS], row_part[h * 32 + lane]);
            sum = warp_sum(sum);
            if (lane == 0) t[(blockIdx.x * static_cast<long long>(rows) + blockIdx.y) * t_columns + j] = sum;
        }
    };
    const Decode of = {out,      partial,  stats,     q,     pages,  sequence_pages, queries,    heads,
                       kv_heads, head_dim, positions, chunk, splits, q_stride,       out_stride, page_stride};
    attend_decode(of, parts, found, fetch, keep, finish);
}
