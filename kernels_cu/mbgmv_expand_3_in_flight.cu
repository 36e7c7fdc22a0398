// computes: y[row] += scale t[row] B for every target of a group, B of the row's own adapter at its own rank
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, rows] of Lora. B is in
//         pages
// map: a block owns 128, 64 or 32 chunks of 16 bytes of one target's part of y (the grid says which), in every
//      gridDim.y-th row; 1, 2 or 4 groups of its threads share the ranks, and a thread owns a chunk
// new here: 8 or 16 loads of 16 bytes a thread are in flight, the first before the shrink has ended; groups help where
//           rows are few. Ranks are summed in classes, j mod 4, in one order for any number of groups
// limits: none; at most three targets; a row of rank 0 is neither read nor written
#include "device.h"
#include "lora.h"
#include "lora_rows.h"

constexpr int THREADS = 128, MOST_GROUPS = 4;

extern "C" __global__ void __launch_bounds__(THREADS, 4)
mbgmv_expand_3_in_flight(Num* y, const float* t, const Num* pages, const int* page_table, const Lora* lora, int rows,
                         int d_out0, int d_out1, int d_out2, int width, int targets, int t_columns, int splits,
                         int y_stride, int page_stride) {
    DYNAMIC_SHARED(float, t_row);              // [t_columns + 16 MOST_GROUPS], zeros beyond the rank
    SHARED(float, handed, [NUMS16][THREADS]);  // by groups to others
    launch_dependents();
    int lanes = THREADS;
    while (lanes > THREADS / MOST_GROUPS && count_runs(lanes, {d_out0, d_out1, d_out2}, width) < int(gridDim.x))
        lanes /= 2;
    Run run = find_run(blockIdx.x, lanes, {d_out0, d_out1, d_out2}, width);
    const Weights weights = {pages, page_table, width, page_stride};
    lora += run.target * rows;
    Lora next = lora[blockIdx.y];
    for (int row = blockIdx.y, step = gridDim.y; row < rows; row += step) {
        Lora adapter = next;
        if (row + step < rows) next = lora[row + step];
        if (adapter.rank == 0) continue;
        Num* to = y + static_cast<long long>(row) * y_stride;
        const float* from = t + (static_cast<long long>(row) * targets + run.target) * t_columns;
        expand_row<THREADS>(THREADS / lanes, t_row, handed, to, from, weights, adapter, run, splits,
                            static_cast<long long>(rows) * targets * t_columns);
        if (step < rows) __syncthreads();  // all threads have multiplied before the next row's t takes its place
    }
    if (blockIdx.x + blockIdx.y == 0) wait_for_previous();  // one block that waits is enough
}
