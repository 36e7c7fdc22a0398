// computes: out[row] = softmax(q K^T / sqrt(head_dim)) V for many queries of a sequence, each over the tokens up to its
//           own
// arrays: out, q [rows, heads * head_dim]; pages [.., kv_heads * head_dim]; sequence_pages [slots, 2, positions]: pages
//         of keys, of values; tiles [tiles] of (first row, rows, sequence slot, visible tokens of the first row); 0
//         rows: nothing to do
// map: a block owns a head and tiles, 64 rows at a time (32 where head_dim > 128); a warp 16 rows and up to 128 columns
//      of their results
// new here: products by tensor cores: scores and weights never leave a warp's registers; keys and values are on their
//           way to shared memory a stage ahead, and their page ids before them
// limits: head_dim up to 256, above the first rung serves; no float32. Weights are rounded to the pages' type
#include "device.h"
#include "attention.h"

constexpr int WARPS = 4, STAGES = 2, SLAB = 512;  // SLAB: chunks of 8 numbers of keys, and of values, in a stage

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)
paged_attention_prefill_3_tensor_cores(Num* out, const Num* q, const Num* pages, const int* sequence_pages,
                                       const int4* tiles, int tile_count, int heads, int kv_heads, int head_dim,
                                       int positions, int q_stride, int out_stride, int page_stride) {
    DYNAMIC_SHARED(uint4, ring);                // [STAGES][keys, then values][TOKENS][DEEP]
    uint4* queries = ring + STAGES * 2 * SLAB;  // [ROWS][DEEP]
    launch_dependents();
    wait_for_previous();

    auto attend = [&](int4 tile, auto chunks) {
        constexpr int DEEP = decltype(chunks)::VALUE, TOKENS = SLAB / DEEP;  // chunks of a head, and zeros
        constexpr int CHUNKS = DEEP < 16 ? DEEP : 16, SIDE = DEEP / CHUNKS;  // of a warp; warps that share rows
        constexpr int ROWS = 16 * WARPS / SIDE, STEP = 32 * WARPS / DEEP, MINE = TOKENS / STEP;  // STEP: rows of a copy
        int thread = fresh(threadIdx.x), warp = thread / 32, head = blockIdx.x, dim = fresh(head_dim);
        bool whole = whole_heads(pages, page_stride, dim), whole_q = whole_heads(q, q_stride, dim);
        int top = warp / SIDE * 16, left = warp % SIDE * CHUNKS;                      // of a warp
        int my_row = thread / DEEP, my_chunk = thread % DEEP, d = my_chunk * NUMS16;  // of what it copies
        int count = min(ROWS, tile.y), end = tile.w + count - 1;                      // tokens seen by any
        const int* keys = sequence_pages + tile.z * 2LL * positions;
        const Num* kv = pages + head / (heads / kv_heads) * dim;
        const Num* q_rows = q + tile.x * static_cast<long long>(q_stride) + head * dim;
        auto copy = [&](uint4* slab, int row, const Num* from, bool whole, bool wanted) {
            uint4* to = slab + row * DEEP + (my_chunk ^ (row & 7));  // 8 neighbouring rows in different banks
            if (whole) copy16(to, from + d, wanted && d < dim);
            else store16(to, load_head(from, d, wanted ? dim : 0));
        };
        int key[MINE], value[MINE];  // page ids of what it copies next
        auto look_up = [&](int stage) {
            for (int k = 0; k < MINE; k++) {
                int token = min(stage * TOKENS + my_row + k * STEP, end - 1);
                key[k] = keys[token], value[k] = keys[positions + token];
            }
        };
        auto fetch = [&](int stage) {
            uint4* slab = ring + stage % STAGES * 2 * SLAB;
            for (int k = 0, row = my_row; k < MINE; k++, row += STEP) {
                copy(slab, row, page_at(kv, key[k], page_stride), whole, stage * TOKENS + row < end);
                copy(slab + SLAB, row, page_at(kv, value[k], page_stride), whole, stage * TOKENS + row < end);
            }
            copies_commit(), look_up(stage + 1);
        };
        look_up(0);
        for (int row = my_row; row < ROWS; row += STEP)
            copy(queries, row, page_at(q_rows, row, q_stride), whole_q, row < count);
        for (int stage = 0; stage < STAGES - 1; stage++) fetch(stage);

        float scale = score_scale(dim), sums[CHUNKS][4] = {}, total[2] = {0, 0};
        float largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
        for (int stage = 0; stage * TOKENS < end; stage++) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this stage's copies have landed; the former one's place is read
            fetch(stage + STAGES - 1);
            if (top >= count || stage * TOKENS >= tile.w + top + 15) continue;
            uint4* slab = ring + stage % STAGES * 2 * SLAB;
            int lane = fresh(threadIdx.x % 32), swizzle = lane & 7;
            float scores[TOKENS / 8][4] = {};
            unsigned weights[TOKENS / 8][2], a[4], b[4];
#pragma unroll
            for (int c = 0; c < DEEP; c += 2) {
                load_matrices<false>(a, queries + (top + lane % 16) * DEEP + (c + lane / 16 ^ swizzle));
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n += 2) {
                    int row = n * 8 + lane / 16 * 8 + lane % 8;
                    load_matrices<false>(b, slab + row * DEEP + (c + lane / 8 % 2 ^ swizzle));
                    mma_16x16x16(scores + n, a, b);
                }
            }
            for (int h = 0; h < 2; h++) {
                int seen = min(end, tile.w + top + lane / 4 + 8 * h) - stage * TOKENS;  // by the lane's row
                soften<TOKENS>(scores, weights, sums, h, seen, scale, largest[h], total[h]);
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; c += 2)
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n += 2) {
                    int chunk = left + c + lane / 16 ^ swizzle;
                    load_matrices<true>(b, slab + SLAB + (n * 8 + lane % 16) * DEEP + chunk);
                    mma_16x16x16(sums + c, {weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1]}, b);
                }
        }
        for (int h = 0; h < 2; h++) {
            for (int lanes = 1; lanes < 4; lanes *= 2) total[h] += __shfl_xor_sync(~0u, total[h], lanes);
            int row = top + threadIdx.x % 32 / 4 + 8 * h, d = left * 8 + threadIdx.x % 4 * 2;
            Num* to = out + (tile.x + row) * static_cast<long long>(out_stride) + head * dim;
            float share = 1.0f / total[h];
#pragma unroll
            for (int c = 0; c < CHUNKS && row < count; c++, d += 8)
                store_pair(to + d, sums[c][2 * h] * share, sums[c][2 * h + 1] * share, dim - d);
        }
        copies_wait<0>();
        __syncthreads();  // queries, keys and values are read before the next ones take their place
    };
    int size = head_dim > 128 ? 8 * WARPS : 16 * WARPS;
    for (int i = blockIdx.y; (i = next_tile(tiles, i, gridDim.y, tile_count)) < tile_count; i += gridDim.y)
        for (int4 tile = tiles[i]; tile.y > 0; tile.x += size, tile.y -= size, tile.w += size)
            if (head_dim <= 64) attend(tile, Constant<8>());
            else if (head_dim <= 128) attend(tile, Constant<16>());
            else attend(tile, Constant<32>());
}
