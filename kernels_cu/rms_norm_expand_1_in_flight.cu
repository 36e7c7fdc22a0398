// computes: x[row] += delta[row] + scale t[row] B, B of the row's own adapter at its own rank; then
//           out[row] = x / sqrt(mean(x^2) + eps) * weight. With the bits of mbgmv_expand_3_in_flight, then
//           rms_norm_3_registers, to 8,192 numbers a row
// arrays: out, x, delta [rows, hidden]; weight [hidden]; t [splits, rows, 1, t_columns] float32, whose splits are added
//         here; pages [.., width]; page_table of page ids; lora [rows] of Lora. B is in pages
// map: a block owns a row; a thread its every blockDim-th chunk of 16 bytes, of B, delta and x; some of them the norm
// new here: one launch instead of two, and delta' = delta + scale t B is not written and read again; B of 12 ranks is
//           in flight, and may be before the kernel before has ended
// limits: none; rows and pages that are no multiple of 16 bytes are read number by number
#include "device.h"
#include "lora.h"
#include "lora_rows.h"
#include "lora_vectors.h"
#include "rms_norm.h"

constexpr int THREADS = 512, CLASSES = 4, RING = 3;  // at most; ranks are summed in classes, as expand_row does it

// Number i of delta' = delta + scale t B, where numbers are read one by one.
HELPER float expanded(const NormRow& row, const float* t_row, const Weights& of, const Lora& adapter, int i) {
    float y = to_float(row.delta[i]), sums[CLASSES] = {};
    if (adapter.rank == 0) return y;
    const int* ids = of.page_table + adapter.b + i / of.width;
    int pieces = pieces_of(row.hidden, of.width);
#pragma unroll 1
    for (int j = 0; j < adapter.rank; j += CLASSES)
#pragma unroll
        for (int c = 0; c < CLASSES; c++)
            if (j + c < adapter.rank) {
                const Num* vector = page_at(of.pages, ids[(j + c) * pieces], of.page_stride);
                sums[c] += t_row[j + c] * to_float(vector[i % of.width]);
            }
    return to_float(to_num(y + adapter.scale * ((sums[0] + sums[2]) + (sums[1] + sums[3]))));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
rms_norm_expand_1_in_flight(Num* out, Num* x, const Num* delta, const Num* weight, int rows, int hidden, float eps,
                            int out_stride, int x_stride, int delta_stride, const float* t, const Num* pages,
                            const int* page_table, const Lora* lora, int width, int targets, int t_columns, int splits,
                            int page_stride) {
    DYNAMIC_SHARED(uint4, added);  // [chunks of a row]: x as stored; then t_row
    SHARED(float, squares, [32]);  // of each warp
    launch_dependents();
    int chunks = ceil_div(hidden, NUMS16), rounds = ceil_div(chunks, blockDim.x);
    uint4* factors = added + chunks;  // [chunks]: weights
    float* t_row = reinterpret_cast<float*>(factors + chunks);  // [t_columns + CLASSES], zeros beyond the rank
    const Lora adapter = lora[blockIdx.x];
    const Weights of = {pages, page_table, width, page_stride};
    NormRow row = norm_row(out, x, delta, weight, hidden, out_stride, x_stride, delta_stride,
                           min(int(blockDim.x), norm_threads(hidden)));
    bool whole = row.kept == hidden && whole_chunks(pages, width, page_stride);
    // Chunks are served in rounds, and in each the ranks, CLASSES at a time: a step. RING steps are in flight.
    uint4 flying[RING][CLASSES], before, mine, numbers[KEPT], weights[KEPT];
    int round = 0, first = 0, next_round = 0, next_first = 0;
    Vectors<CLASSES> next;
    auto find = [&] {
        int count = whole && next_round < rounds ? adapter.rank - next_first : 0;
        find_vectors(next, of, adapter.b + next_first * pieces_of(hidden, width), count,
                     next_round * blockDim.x + threadIdx.x, hidden);
        next_first += CLASSES;
        if (next_first >= adapter.rank) next_first = 0, next_round++;
    };
    auto load = [&] {
        int i = (round * blockDim.x + threadIdx.x) * NUMS16;
        before = load16_once(row.delta + i, whole && i < hidden), mine = load16_once(row.x + i, whole && i < hidden);
    };
    find();
#pragma unroll
    for (int s = 0; s < RING; s++) fetch_vectors(flying[s], of, next), find();
    stage_weights(factors, row);
    wait_for_previous();
    load();
    const float* from = t + static_cast<long long>(blockIdx.x) * t_columns;
    for (int j = threadIdx.x; j < adapter.rank + CLASSES; j += blockDim.x)
        t_row[j] = j < adapter.rank ? add_splits(from + j, splits, static_cast<long long>(rows) * t_columns) : 0.0f;
    __syncthreads();  // t_row is there before all threads multiply with it
    float sums[CLASSES][NUMS16] = {};
    auto step = [&](uint4 (&weights)[CLASSES]) {
        if (round >= rounds) return;
        float few[NUMS16];
#pragma unroll
        for (int u = 0; u < CLASSES; u++) {
            unpack(weights[u], few);
#pragma unroll
            for (int i = 0; i < NUMS16; i++) sums[u][i] += t_row[first + u] * few[i];
        }
        fetch_vectors(weights, of, next), find();
        first += CLASSES;
        if (first < adapter.rank) return;
        unpack(before, few);
#pragma unroll
        for (int i = 0; i < NUMS16; i++) {
            float sum = (sums[0][i] + sums[2][i]) + (sums[1][i] + sums[3][i]);
            if (adapter.rank > 0) few[i] += adapter.scale * sum;
            for (int c = 0; c < CLASSES; c++) sums[c][i] = 0;
        }
        int chunk = round * blockDim.x + threadIdx.x;
        mine = add_nums(mine, pack(few));
        if (chunk < chunks) store16(row.x + chunk * NUMS16, mine), added[chunk] = mine;
        round++, first = 0;
        load();
    };
    while (whole && round < rounds)
#pragma unroll
        for (int s = 0; s < RING; s++) step(flying[s]);
    for (int i = threadIdx.x; !whole && i < hidden; i += blockDim.x)
        row.x[i] = to_num(to_float(row.x[i]) + expanded(row, t_row, of, adapter, i));
    __syncthreads();  // x is written before other threads read it
    copies_wait<0>();
    take_chunks(weights, factors, row);
    if (whole) take_chunks(numbers, added, row);
    else load_chunks(numbers, row.x, row);
    write_normed(row, numbers, weights, norm_scale(row, numbers, squares, eps));
}
