// computes: y[row] += scale t[row] B for every target of a group, B of the row's own adapter at its own rank
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, rows] of Lora. B is in
//         pages
// map: a block owns a row and 128, 64 or 32 chunks of 16 bytes of one target's part of y (the grid says which); so 1, 2
//      or 4 groups of its threads share the ranks, and a thread owns a chunk
// new here: 8 or 16 loads of 16 bytes a thread are in flight, the first before the shrink has ended; groups help where
//           rows are few. Ranks are summed in CLASSES, j mod CLASSES, in one order however many groups there are
// limits: none; at most three targets; a row of rank 0 is neither read nor written
#include "device.h"
#include "lora.h"

constexpr int THREADS = 128, CLASSES = 4;

extern "C" __global__ void __launch_bounds__(THREADS, 4)
mbgmv_expand_3_in_flight(Num* y, const float* t, const Num* pages, const int* page_table, const Lora* lora, int rows,
                         int d_out0, int d_out1, int d_out2, int width, int targets, int t_columns, int splits,
                         int y_stride, int page_stride) {
    DYNAMIC_SHARED(float, t_row);            // [t_columns + 64], zeros beyond the rank
    SHARED(float, handed, [NUMS16][THREADS]);  // by groups to others
    launch_dependents();
    int lanes = THREADS;
    while (lanes > THREADS / CLASSES && count_runs(lanes, {d_out0, d_out1, d_out2}, width) < int(gridDim.x)) lanes /= 2;
    Run run = find_run(blockIdx.x, lanes, {d_out0, d_out1, d_out2}, width);
    int row = blockIdx.y, lane = threadIdx.x & (lanes - 1), group = threadIdx.x / lanes;
    Lora adapter = lora[run.target * rows + row];
    if (adapter.rank == 0 && blockIdx.x + blockIdx.y > 0) return;  // one block that waits is enough
    if (adapter.rank == 0) return wait_for_previous();
    Chunk at = chunk_at(run.chunk + lane, run.length, width);
    bool active = at.count > 0, whole = whole_chunks(pages, width, page_stride);
    int pieces = pieces_of(run.length, width);
    const int* ids = page_table + adapter.b + (active ? at.piece : 0);
    Num* to = y + static_cast<long long>(row) * y_stride + run.column + at.index;

    auto add_to_y = [&](auto constant) {
        constexpr int GROUPS = decltype(constant)::VALUE, OWN = CLASSES / GROUPS, LOADS = OWN == 1 ? 16 : 8;
        float sums[OWN][NUMS16] = {}, numbers[NUMS16];
        uint4 before = {}, weights[LOADS];
        int page[LOADS];  // of the next weights, read while the former are on their way
        auto find = [&](int first) {
#pragma unroll
            for (int u = 0; u < LOADS; u++) page[u] = ids[min(first + u * GROUPS + group, adapter.rank - 1) * pieces];
        };
        auto fetch = [&](int first) {
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                bool wanted = active && first + u * GROUPS + group < adapter.rank;
                weights[u] = load16_once(page_at(pages, page[u], page_stride) + at.offset, wanted && whole);
            }
        };
        find(0), fetch(0), find(LOADS * GROUPS);
        wait_for_previous();
        if (active && group == 0) before = load_nums(to, at.count);
        for (int j = threadIdx.x; j < adapter.rank + LOADS * GROUPS; j += THREADS) {
            const float* part = t + (static_cast<long long>(row) * targets + run.target) * t_columns + j;
            t_row[j] = 0;
            for (int split = 0; j < adapter.rank && split < splits; split++)
                t_row[j] += part[static_cast<long long>(split) * rows * targets * t_columns];
        }
        __syncthreads();  // t_row is written before all threads multiply with it
        for (int first = 0; whole && first < adapter.rank; first += LOADS * GROUPS) {
            if (first > 0) fetch(first), find(first + LOADS * GROUPS);
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                unpack(weights[u], numbers);
#pragma unroll
                for (int i = 0; i < NUMS16; i++) sums[u % OWN][i] += t_row[first + u * GROUPS + group] * numbers[i];
            }
        }
#pragma unroll 1
        for (int j = group; !whole && active && j < adapter.rank; j += GROUPS) {
            unpack(load_nums(page_at(pages, ids[j * pieces], page_stride) + at.offset, at.count), numbers);
#pragma unroll
            for (int i = 0; i < OWN * NUMS16; i++)
                if (j / GROUPS % OWN == i / NUMS16) sums[i / NUMS16][i % NUMS16] += t_row[j] * numbers[i % NUMS16];
        }
#pragma unroll
        for (int i = 0; i < NUMS16; i++) {  // (0 + 2) + (1 + 3), as far as the classes are here
            if (OWN == 4) sums[0][i] += sums[2 % OWN][i], sums[1 % OWN][i] += sums[3 % OWN][i];
            if (OWN > 1) sums[0][i] += sums[1 % OWN][i];
        }
#pragma unroll
        for (int half = GROUPS / 2; half; half /= 2) {  // the upper half of the groups hands its sums to the lower one
#pragma unroll
            for (int i = 0; i < NUMS16; i++)
                if (group >= half && group < 2 * half) handed[i][threadIdx.x] = sums[0][i];
            __syncthreads();  // the sums are written before the lower half adds them
#pragma unroll
            for (int i = 0; i < NUMS16; i++)
                if (group < half) sums[0][i] += handed[i][threadIdx.x + half * lanes];
        }
        if (!active || group > 0) return;
        unpack(before, numbers);
#pragma unroll
        for (int i = 0; i < NUMS16; i++) numbers[i] += adapter.scale * sums[0][i];
        store_nums(to, pack(numbers), at.count);
    };
    if (lanes == THREADS) add_to_y(Constant<1>());
    else if (lanes == THREADS / 2) add_to_y(Constant<2>());
    else add_to_y(Constant<4>());
}
