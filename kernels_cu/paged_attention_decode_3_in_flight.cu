// computes: out[row] = softmax(q K^T / sqrt(head_dim)) V for one query a row, over the tokens of the row's sequence
// arrays: out, q [rows, heads * head_dim]; pages [.., kv_heads * head_dim]; sequence_pages [slots, 2, positions]: pages
//         of keys, of values; queries [rows] of (sequence slot, visible tokens), slot -1: not here; partial [rows,
//         heads, splits, head_dim] float32 and stats [rows, heads, splits] of (largest score, sum of exp)
// map: a block owns a row, the heads of K and V that 32 lanes read side by side, of the query heads that share one up
//      to four, and of the tokens the split-th `chunk`; a warp every WARPS-th TOKENS of those, a lane 16 bytes of a
//      head
// new here: TOKENS keys and values are in flight before the first is used, and their successors' page ids too; sums are
//           rescaled once for TOKENS; heads that share K and V share its one read
// limits: head_dim up to 256, above the first rung serves; no float32
#include "device.h"
#include "attention_decode.h"

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
paged_attention_decode_3_in_flight(Num* out, float* partial, float2* stats, const Num* q, const Num* pages,
                                   const int* sequence_pages, const int2* queries, int rows, int heads, int kv_heads,
                                   int head_dim, int positions, int chunk, int splits, int q_stride, int out_stride,
                                   int page_stride) {
    DYNAMIC_SHARED(float, parts);            // [WARPS][query heads of a lane][32 * NUMS16]: each warp's sums
    SHARED(float2, found, [WARPS][4 * 32]);  // each warp's largest score and sum: [.. query heads of a lane][side]
    launch_dependents();
    wait_for_previous();
    const Decode of = {out,      partial,  stats,     q,     pages,  sequence_pages, queries,    heads,
                       kv_heads, head_dim, positions, chunk, splits, q_stride,       out_stride, page_stride};
    auto nothing = [](auto...) {};
    attend_decode(of, parts, found, nothing, nothing, nothing);
}
