// computes: t[row] = x[row] A for every target of a group, A of the row's own adapter at its own rank, in float32
// arrays: t [splits, rows, targets, t_columns] float32; x [rows, d_in]; pages [.., width]; page_table of page ids; lora
//         [targets, rows] of Lora. A is in pages: see Lora in device.h
// map: a block owns eight columns of A in some rows, and a split; two warps share two of them, 32 chunks of 16 bytes in
//      turn
// new here: tensor cores multiply, two instructions for 32 bytes of A instead of 48: in a decode step nothing else runs
//           beside them. What stands before the first load of A is short: the entry is asked for before anything is
//           worked out, and where a column is in one page, nothing is worked out for each load
// limits: none; no float32; columns of t beyond the rank are left as they are; where columns are short and many, the
//         rung below does more at a time
#include "device.h"
#include "lora.h"
#include "lora_shrink.h"

constexpr int WARPS = 8, COLUMNS = WARPS / SHARES * 2;

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
mbgmv_shrink_4_tensor_cores(float* t, const Num* x, const Num* pages, const int* page_table, const Lora* lora, int rows,
                            int d_in, int width, int targets, int t_columns, int splits, int x_stride,
                            int page_stride) {
    SHARED(uint4, x_part, [PASS]);
    SHARED(float, parts, [WARPS][2]);
    launch_dependents();
    int target = blockIdx.z, split = 0, lane = threadIdx.x % 32, first = blockIdx.x * COLUMNS, step = gridDim.y;
    if (splits > 1) split = target / targets, target -= split * targets;
    Lora adapter = load_entry(lora + target * rows + blockIdx.y);
    // Rank: of the lane's of the next 32 rows of this block; most may have nothing to do here
    int rank = 0;
    if (step < rows) rank = lora[target * rows + min(blockIdx.y + lane * step, rows - 1)].rank;
    int chunks = chunks_of(d_in, width);
    int part = splits > 1 ? ceil_div(chunks, splits) : chunks, begin = split * part, end = min(begin + part, chunks);
    bool whole = whole_chunks(pages, width, page_stride) && aligned16(x) && (x_stride | d_in) % NUMS16 == 0;
    const Weights weights = {pages, page_table, width, page_stride};

    for (int n = 0, row = blockIdx.y; row < rows; n++, row += step) {
        if (n > 0 && n % 32 == 0) rank = lora[target * rows + min(row + lane * step, rows - 1)].rank;
        if (n > 0 && __shfl_sync(~0u, rank, n % 32) <= first) continue;
        if (n > 0) adapter = load_entry(lora + target * rows + row);
        if (adapter.rank <= first) continue;
        float* to = t + ((split * static_cast<long long>(rows) + row) * targets + target) * t_columns;
        const Num* from = page_at(x, row, x_stride);
        shrink_row<WARPS>(x_part, parts, to, from, weights, adapter, d_in, first, begin, end, whole);
    }
    wait_for_previous();
}
