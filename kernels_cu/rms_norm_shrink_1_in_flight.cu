// computes: x[row] += delta[row], where there is a delta; then out[row] = x / sqrt(mean(x^2) + eps) * weight; then
//           t[row] = out[row] A for every target of a group, A of the row's own adapter at its own rank. out and x have
//           the bits of rms_norm_3_registers, to 8,192 numbers a row
// arrays: out, x, delta [rows, hidden]; weight [hidden]; delta may be null, and x is then only read; t [splits, rows,
//         targets, t_columns] float32; pages [.., width]; page_table of page ids; lora [targets, rows] of Lora. A is in
//         pages
// map: a block owns a row, a thread every blockDim-th chunk of 16 bytes of out and of all columns of A, some threads
//      the norm
// new here: one launch instead of two, and A is on its way while the norm is computed, 16 loads of 16 bytes a thread. A
//           chunk of out serves all columns from registers
// limits: none; rows and pages that are no multiple of 16 bytes are read number by number; columns of t beyond the rank
//         are left as they are; all of the sum is in the first split
#include "device.h"
#include "lora.h"
#include "lora_rows.h"
#include "lora_vectors.h"
#include "rms_norm.h"

constexpr int THREADS = 512, TOGETHER = 4, RING = 4;  // at most; columns of a step; steps in flight
constexpr int LANES = 32 / TOGETHER;

// A step multiplies a chunk of a row with up to TOGETHER columns of a target.
struct Step {
    int target, first, round;
    Lora adapter;
};
HELPER void go_on(Step& step, const Lora* lora, int rows, int targets, int rounds) {
    if (++step.round < rounds) return;
    step.round = 0, step.first += TOGETHER;
    for (; step.target < targets && step.first >= step.adapter.rank; step.first = 0)
        if (++step.target < targets) step.adapter = lora[step.target * rows + blockIdx.x];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
rms_norm_shrink_1_in_flight(Num* out, Num* x, const Num* delta, const Num* weight, int rows, int hidden, float eps,
                            int out_stride, int x_stride, int delta_stride, float* t, const Num* pages,
                            const int* page_table, const Lora* lora, int width, int targets, int t_columns, int splits,
                            int page_stride) {
    DYNAMIC_SHARED(uint4, normed);  // [chunks of a row], weights at first; then parts
    SHARED(float, squares, [32]);   // of each warp
    launch_dependents();
    int chunks = ceil_div(hidden, NUMS16), rounds = ceil_div(chunks, blockDim.x), columns = targets * t_columns;
    float* parts = reinterpret_cast<float*>(normed + chunks);  // [warps][targets][t_columns]
    float* own = parts + threadIdx.x / 32 * columns;
    const Weights of = {pages, page_table, width, page_stride};
    NormRow row = norm_row(out, x, delta, weight, hidden, out_stride, x_stride, delta_stride,
                           min(int(blockDim.x), norm_threads(hidden)));
    bool whole = row.kept == hidden && whole_chunks(pages, width, page_stride);
    uint4 flying[RING][TOGETHER], numbers[KEPT], more[KEPT], weights[KEPT];
    Step now = {0, -TOGETHER, rounds - 1, lora[blockIdx.x]}, coming;
    go_on(now, lora, rows, targets, rounds), coming = now;
    Vectors<TOGETHER> next;
    auto find = [&] {
        int count = whole && coming.target < targets ? coming.adapter.rank - coming.first : 0;
        find_vectors(next, of, coming.adapter.a + coming.first * pieces_of(hidden, width), count,
                     coming.round * blockDim.x + threadIdx.x, hidden);
        if (coming.target < targets) go_on(coming, lora, rows, targets, rounds);
    };
    find();
#pragma unroll
    for (int s = 0; s < RING; s++) fetch_vectors(flying[s], of, next), find();
    stage_weights(normed, row);
    wait_for_previous();
    load_chunks(numbers, row.x, row);
    load_chunks(more, row.delta, row, row.delta);
    add_delta(row, numbers, more);
    float scale = norm_scale(row, numbers, squares, eps);
    copies_wait<0>();
    take_chunks(weights, normed, row);
    write_normed(row, numbers, weights, scale);
#pragma unroll
    for (int n = 0; n < KEPT; n++)
        if (row.first + n * row.step < row.kept) normed[row.first / NUMS16 + n * row.threads] = numbers[n];
    __syncthreads();  // the row is written before all threads multiply it
    float sums[TOGETHER] = {};
    auto step = [&](uint4 (&vectors)[TOGETHER]) {
        if (now.target >= targets) return;
        int chunk = now.round * blockDim.x + threadIdx.x, j = now.first + threadIdx.x % 32 / LANES;
        uint4 mine = chunk < chunks ? normed[chunk] : uint4{0, 0, 0, 0};
#pragma unroll
        for (int u = 0; u < TOGETHER; u++) add_products(sums[u], vectors[u], mine);
        fetch_vectors(vectors, of, next), find();
        if (now.round == rounds - 1) {
            float sum = warp_sums(sums);
            if (threadIdx.x % LANES == 0 && j < now.adapter.rank) own[now.target * t_columns + j] = sum;
#pragma unroll
            for (int u = 0; u < TOGETHER; u++) sums[u] = 0;
        }
        go_on(now, lora, rows, targets, rounds);
    };
    while (whole && now.target < targets)
#pragma unroll
        for (int s = 0; s < RING; s++) step(flying[s]);
    for (int i = 0; !whole && i < columns; i++) {
        const Lora adapter = lora[i / t_columns * rows + blockIdx.x];
        const int* ids = page_table + adapter.a + i % t_columns * pieces_of(hidden, width);
        if (i % t_columns >= adapter.rank) continue;
        float sum = 0;
        for (int n = threadIdx.x; n < hidden; n += blockDim.x)
            sum += to_float(row.out[n]) * to_float(page_at(pages, ids[n / width], page_stride)[n % width]);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) own[i] = sum;
    }
    __syncthreads();  // each warp's part is written before the parts are added
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        if (i % t_columns >= lora[i / t_columns * rows + blockIdx.x].rank) continue;
        float sum = 0;
        for (int warp = 0; warp < blockDim.x / 32; warp++) sum += parts[warp * columns + i];
        for (int split = 0; split < splits; split++)
            t[(split * static_cast<long long>(rows) + blockIdx.x) * columns + i] = split == 0 ? sum : 0;
    }
}
