// computes: y[row] += scale t[row] B for every target of a group, B of the row's own adapter at its own rank
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, rows] of Lora. B is in
//         pages
// map: a block owns a row and blockDim chunks of 16 bytes of one target's part of y, a thread one of them
// new here: 16 bytes a load instead of one number, and t is read once a block instead of once a thread
// limits: none; at most three targets; a row of rank 0 is neither read nor written
#include "device.h"
#include "lora.h"

extern "C" __global__ void mbgmv_expand_2_vector(Num* y, const float* t, const Num* pages, const int* page_table,
                                                 const Lora* lora, int rows, int d_out0, int d_out1, int d_out2,
                                                 int width, int targets, int t_columns, int splits, int y_stride,
                                                 int page_stride) {
    DYNAMIC_SHARED(float, t_row);  // [t_columns]
    wait_for_previous();
    Run run = find_run(blockIdx.x, blockDim.x, {d_out0, d_out1, d_out2}, width);
    int row = blockIdx.y;
    Lora adapter = lora[run.target * rows + row];
    if (adapter.rank == 0) return;
    for (int j = threadIdx.x; j < adapter.rank; j += blockDim.x) {
        t_row[j] = 0;
        for (int split = 0; split < splits; split++)
            t_row[j] += t[((static_cast<long long>(split) * rows + row) * targets + run.target) * t_columns + j];
    }
    __syncthreads();  // t_row is written before all threads read it
    Chunk at = chunk_at(run.chunk + threadIdx.x, run.length, width);
    if (at.count == 0) return;
    int pieces = ceil_div(run.length, width);
    float sums[NUMS16] = {}, numbers[NUMS16];
    for (int j = 0; j < adapter.rank; j++) {
        long long page = page_table[adapter.b + j * pieces + at.piece];
        unpack(load_nums(pages + page * page_stride + at.offset, at.count), numbers);
        for (int i = 0; i < NUMS16; i++) sums[i] += t_row[j] * numbers[i];
    }
    Num* to = y + static_cast<long long>(row) * y_stride + run.column + at.index;
    unpack(load_nums(to, at.count), numbers);
    for (int i = 0; i < NUMS16; i++) numbers[i] += adapter.scale * sums[i];
    store_nums(to, pack(numbers), at.count);
}
