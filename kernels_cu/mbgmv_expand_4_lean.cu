// computes: y[row] += scale t[row] B for every target of a group, B of the row's own adapter at its own rank
// arrays: y [rows, sum of d_out], the targets' outputs side by side; t [splits, rows, targets, t_columns] float32,
//         whose splits are added here; pages [.., width]; page_table of page ids; lora [targets, rows] of Lora. B is in
//         pages
// map: a block owns 128 chunks of 16 bytes of one target's part of y, in every gridDim.y-th row; a thread owns a chunk
// new here: for up to 8 ranks. All of B is a load a rank and thread, so nothing loops; each thread reads t itself, so
//           none waits for another; a lane reads a page id for its warp. That is 420 instructions in a row, and half
//           the registers of rung 3: twice as many blocks fit beside the shrink, where they read B meanwhile
// limits: none; at most three targets; a row of rank 0 is neither read nor written. More ranks, several pages a vector,
//         several splits, and numbers that do not come in eights are right, but slow
#include "device.h"
#include "lora.h"
#include "lora_rows.h"

constexpr int THREADS = 128, RANKS = 8, CLASSES = 4;  // of ranks, as in expand_row
constexpr int LONG = 0x7fffffff;                      // width of a page that holds any vector

// What an earlier kernel has written: a load that stays in order with its like, ahead of the products. Unwanted: zeros.
HELPER uint4 load16_written(const void* from, bool wanted) {
#if ON_DEVICE
    uint4 v;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
                 " @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "r"(static_cast<int>(wanted)) : "memory");
    return v;
#else
    return load16_once(from, wanted);
#endif
}
// A row's run of chunks number by number, in the order of expand_row's sums.
HELPER void expand_numbers(Num* y, const float* t, const Weights& of, Lora adapter, const Run& run, int splits,
                           long long split_stride) {
    int pieces = pieces_of(run.length, of.width);
#pragma unroll 1
    for (int i = threadIdx.x; i < THREADS * NUMS16; i += THREADS) {
        Chunk at = chunk_at(run.chunk + i / NUMS16, run.length, of.width);
        if (i % NUMS16 >= at.count) continue;
        const int* ids = of.page_table + adapter.b + at.piece;
        float sums[CLASSES] = {};
#pragma unroll 1
        for (int j = 0; j < adapter.rank; j += CLASSES) {
#pragma unroll
            for (int c = 0; c < CLASSES; c++) {
                if (j + c >= adapter.rank) continue;
                float sum = 0;
#pragma unroll 1
                for (int split = 0; split < splits; split++) sum += t[split * split_stride + j + c];
                const Num* page = page_at(of.pages, ids[(j + c) * pieces], of.page_stride);
                sums[c] += sum * to_float(page[at.offset + i % NUMS16]);
            }
        }
        Num* to = y + run.column + at.index + i % NUMS16;
        *to = to_num(to_float(*to) + adapter.scale * ((sums[0] + sums[2]) + (sums[1] + sums[3])));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
mbgmv_expand_4_lean(Num* y, const float* t, const Num* pages, const int* page_table, const Lora* lora, int rows,
                    int d_out0, int d_out1, int d_out2, int width, int targets, int t_columns, int splits, int y_stride,
                    int page_stride) {
    launch_dependents();
    int lengths = width | page_stride | y_stride | d_out0 | d_out1 | d_out2;
    // In this order the compiler has what follows where it is lean, and the rest behind it
    bool lean = splits == 1 && t_columns <= RANKS && t_columns % 4 == 0 && aligned16(y) && aligned16(pages) &&
                max(d_out0, max(d_out1, d_out2)) <= width && lengths % NUMS16 == 0;
    if (!lean) {
        Run run = find_run(blockIdx.x, THREADS, {d_out0, d_out1, d_out2}, width);
        const Weights weights = {pages, page_table, width, page_stride};
        wait_for_previous();
        for (int row = blockIdx.y; row < rows; row += gridDim.y) {
            Lora adapter = lora[run.target * rows + row];
            const float* from = t + (static_cast<long long>(row) * targets + run.target) * t_columns;
            if (adapter.rank > 0)
                expand_numbers(y + static_cast<long long>(row) * y_stride, from, weights, adapter, run, splits,
                               static_cast<long long>(rows) * targets * t_columns);
        }
        return;
    }
    Run run = find_run(blockIdx.x, THREADS, {d_out0, d_out1, d_out2}, LONG);
    int index = (run.chunk + threadIdx.x) * NUMS16, lane = threadIdx.x % 32;
    bool active = index < run.length;
    pages += index, y += run.column + index;
#pragma unroll 1
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        Lora adapter = lora[run.target * rows + row];
        if (adapter.rank == 0) continue;
        uint4 b[RANKS], before;
        union { uint4 words[RANKS / 4]; float numbers[RANKS]; } t_row;
        int page = lane < adapter.rank ? page_table[adapter.b + lane] : 0;
#pragma unroll
        for (int j = 0; j < RANKS; j++)
            b[j] = load16_once(page_at(pages, __shfl_sync(~0u, page, j), page_stride), active && j < adapter.rank);
        wait_for_previous();
        Num* to = page_at(y, row, y_stride);
        before = load16_written(to, active);
        const float* from = t + (row * targets + run.target) * t_columns;
#pragma unroll
        for (int q = 0; q < RANKS / 4; q++) t_row.words[q] = load16_written(from + 4 * q, 4 * q < adapter.rank);
        float sums[CLASSES][NUMS16] = {}, numbers[NUMS16];
#pragma unroll
        for (int j = 0; j < RANKS; j++) {
            float factor = j < adapter.rank ? t_row.numbers[j] : 0;
            unpack(b[j], numbers);
#pragma unroll
            for (int i = 0; i < NUMS16; i++) sums[j % CLASSES][i] += factor * numbers[i];
        }
        unpack(before, numbers);
#pragma unroll
        for (int i = 0; i < NUMS16; i++)
            numbers[i] += adapter.scale * ((sums[0][i] + sums[2][i]) + (sums[1][i] + sums[3][i]));
        if (active)
            store16(to, uint4{pair(numbers[0], numbers[1]), pair(numbers[2], numbers[3]),
                              pair(numbers[4], numbers[5]), pair(numbers[6], numbers[7])});
    }
    if (blockIdx.x + blockIdx.y == 0) wait_for_previous();  // one block that waits is enough
}
