// computes: qkv + scale t B, rounded to what is stored; of that, q is turned in place by its position's angles; k,
//           turned, and v are written into the row's two pages, and in qkv they stay as they were
// arrays: qkv [rows, (heads + 2 kv_heads) * head_dim]: q, k, v; pages [.., width] of keys, values and B; cos, sin
//         [positions, head_dim / 2] float32; positions, k_pages, v_pages [rows]; page -1: do not store; t [splits,
//         rows, 3, t_columns] float32; page_table of page ids; lora [3, rows] of Lora
// map: a block owns a row and 128, 64 or 32 chunks of 16 bytes of its q, k or v (the grid says which); so 1, 2 or 4
//      groups of its threads share the ranks, and a thread owns a chunk
// new here: one launch instead of mbgmv_expand_3_in_flight's and rope_store_2_vector's, with the same bits: the other
//           half of a head comes from another lane, so k and v are neither written to qkv nor read again
// limits: half a head is 1, 2, 4, 8 or 16 whole chunks; width = kv_heads * head_dim; no float32
#include "device.h"
#include "attention.h"
#include "lora_rows.h"

constexpr int THREADS = 128, MOST_GROUPS = 4;

extern "C" __global__ void __launch_bounds__(THREADS, 4)
rope_store_expand_1_shuffles(Num* qkv, Num* pages, const float* cos, const float* sin, const int* positions,
                             const int* k_pages, const int* v_pages, int rows, int heads, int kv_heads, int head_dim,
                             int qkv_stride, int page_stride, const float* t, const int* page_table, const Lora* lora,
                             int width, int targets, int t_columns, int splits) {
    DYNAMIC_SHARED(float, t_row);              // [t_columns + 16 MOST_GROUPS], zeros beyond the rank
    SHARED(float, handed, [NUMS16][THREADS]);  // by groups to others
    launch_dependents();
    const int lengths[3] = {heads * head_dim, kv_heads * head_dim, kv_heads * head_dim};
    int lanes = chunks_of_a_block<THREADS, MOST_GROUPS>(lengths, width, gridDim.x);
    Run run = find_run(blockIdx.x, lanes, lengths, width);
    int row = blockIdx.y, per_half = head_dim / 2 / NUMS16, chunk = run.chunk + threadIdx.x % lanes;
    Lora adapter = lora[run.target * rows + row];
    int id = run.target == 0 ? 0 : run.target == 1 ? k_pages[row] : v_pages[row];
    if (id < 0) return wait_for_previous();
    Num* from = qkv + static_cast<long long>(row) * qkv_stride;
    Num* to = run.target == 0 ? from : page_at(pages, id, page_stride);
    bool turns = run.target < 2, upper = chunk & per_half;
    long long angle = (static_cast<long long>(positions[row]) * per_half + chunk % per_half) * NUMS16;
    float4 c[2], s[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        c[k] = load_four(cos + angle + 4 * k, turns);
        s[k] = load_four(sin + angle + 4 * k, turns);
    }

    auto store = [&](Num*, const Chunk& at, uint4 numbers) {
        if (turns) {
            const uint4 other = {__shfl_xor_sync(~0u, numbers.x, per_half), __shfl_xor_sync(~0u, numbers.y, per_half),
                                 __shfl_xor_sync(~0u, numbers.z, per_half), __shfl_xor_sync(~0u, numbers.w, per_half)};
            float low[NUMS16], high[NUMS16];
            unpack(upper ? other : numbers, low), unpack(upper ? numbers : other, high);
            const float by_c[8] = {c[0].x, c[0].y, c[0].z, c[0].w, c[1].x, c[1].y, c[1].z, c[1].w};
            const float by_s[8] = {s[0].x, s[0].y, s[0].z, s[0].w, s[1].x, s[1].y, s[1].z, s[1].w};
#pragma unroll
            for (int k = 0; k < NUMS16; k++)
                low[k] = turn(low[k], upper ? by_s[k] : by_c[k], high[k], upper ? by_c[k] : -by_s[k]);
            numbers = pack(low);
        }
        store_nums(to + at.index, numbers, at.count);
    };
    if (adapter.rank == 0) {
        wait_for_previous();
        if (static_cast<int>(threadIdx.x) >= lanes) return;
        Chunk at = chunk_at(chunk, run.length, width);
        return store(from, at, load_nums(from + run.column + at.index, at.count));
    }
    const Weights weights = {pages, page_table, width, page_stride};
    t += (static_cast<long long>(row) * targets + run.target) * t_columns;
    expand_run<THREADS, 8>(THREADS / lanes, t_row, handed, from, t, weights, adapter, run, splits,
                           static_cast<long long>(rows) * targets * t_columns, store);
}
