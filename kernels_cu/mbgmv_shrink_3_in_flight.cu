// computes: t[row] = x[row] A for every target of a group, A of the row's own adapter at its own rank, in float32
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, rows] of Lora. A is in pages: see Lora in device.h
// map: a block owns four columns of A in some rows, and a split; a warp one of them, a lane every 32nd chunk of 16
//      bytes. Where columns are short, a warp owns two or four
// new here: 16 loads of 16 bytes are in flight before the first is used, 256 bytes a lane instead of 2; x is read from
//           memory once a block. Nothing branches between the loads, or they would wait for each other
// limits: none; columns of t beyond the rank are left as they are
#include "device.h"
#include "lora.h"
#include "lora_shrink.h"

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
mbgmv_shrink_3_in_flight(float* t, const Num* x, const Num* pages, const int* page_table, const Lora* lora, int rows,
                         int d_in, int width, int targets, int t_columns, int splits, int x_stride, int page_stride) {
    SHARED(uint4, x_part, [FLIGHT]);
    launch_dependents();
    int target = blockIdx.z, split = 0, lane = threadIdx.x % 32;
    if (splits > 1) split = target / targets, target -= split * targets;
    Lora adapter = lora[target * rows + blockIdx.y];
    // Rank: of the lane's of the next 32 rows of this block; most may have nothing to do here
    int rank = 0, step = gridDim.y;
    if (step < rows) rank = lora[target * rows + min(blockIdx.y + lane * step, rows - 1)].rank;
    int chunks = chunks_of(d_in, width);
    int part = splits > 1 ? ceil_div(chunks, splits) : chunks, begin = split * part, end = min(begin + part, chunks);
    int own = columns_of_a_warp(part, t_columns), first = blockIdx.x * WARPS * own;
    bool whole = whole_chunks(pages, width, page_stride) && aligned16(x) && (x_stride | d_in) % NUMS16 == 0;
    const Weights weights = {pages, page_table, width, page_stride};

    for (int n = 0, row = blockIdx.y; row < rows; n++, row += step) {
        if (n > 0 && n % 32 == 0) rank = lora[target * rows + min(row + lane * step, rows - 1)].rank;
        if (n > 0 && __shfl_sync(~0u, rank, n % 32) <= first) continue;
        if (n > 0) adapter = lora[target * rows + row];
        if (adapter.rank <= first) continue;
        float* to = t + ((split * static_cast<long long>(rows) + row) * targets + target) * t_columns;
        const Num* from = page_at(x, row, x_stride);
        shrink_columns<WARPS>(own, x_part, to, from, weights, adapter, d_in, first, begin, end, whole);
    }
    wait_for_previous();
}
