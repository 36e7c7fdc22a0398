// A row that has its adapter to itself, as MBGMV serves it; and so whoever serves such rows beside others does, with
// the same bits: the order of a sum depends on lengths alone, not on how many warps or threads a block has.
#pragma once

struct Weights {  // where a block finds numbers of adapters
    const Num* pages;
    const int* page_table;
    int width, page_stride;
};

// A run of chunks of a row of y += scale t B. The block's THREADS are GROUPS that share the ranks, and a thread of a
// group owns a chunk. Ranks are summed in classes, j mod CLASSES, in one order for 1, 2 or 4 groups.
// t_row [t_columns + 16 GROUPS]; handed [NUMS16][THREADS]: sums that groups hand to others.
template <int THREADS, int GROUPS, int IN_FLIGHT>
HELPER void expand_row(float* t_row, float (*handed)[THREADS], Num* y, const float* t, const Weights& of, Lora adapter,
                       const Run& run, int splits, long long split_stride) {
    constexpr int CLASSES = 4, OWN = CLASSES / GROUPS, LANES = THREADS / GROUPS;
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, pieces = pieces_of(run.length, of.width);
    Chunk at = chunk_at(run.chunk + lane, run.length, of.width);
    bool active = at.count > 0, whole = whole_chunks(of.pages, of.width, of.page_stride);
    const int* ids = of.page_table + adapter.b + (active ? at.piece : 0);
    Num* to = y + run.column + at.index;
    float sums[OWN][NUMS16] = {}, numbers[NUMS16];
    uint4 before = {}, weights[IN_FLIGHT];
    int page[IN_FLIGHT];  // of the next weights, read while the former are on their way
    auto find = [&](int first) {
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) page[u] = ids[min(first + u * GROUPS + group, adapter.rank - 1) * pieces];
    };
    auto fetch = [&](int first) {
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            bool wanted = active && first + u * GROUPS + group < adapter.rank;
            weights[u] = load16_once(page_at(of.pages, page[u], of.page_stride) + at.offset, wanted && whole);
        }
    };
    find(0), fetch(0), find(IN_FLIGHT * GROUPS);
    wait_for_previous();
    if (active && group == 0) before = load_nums(to, at.count);
    for (int j = threadIdx.x; j < adapter.rank + IN_FLIGHT * GROUPS; j += THREADS) {
        t_row[j] = 0;
        for (int split = 0; j < adapter.rank && split < splits; split++) t_row[j] += t[split * split_stride + j];
    }
    __syncthreads();  // t_row is written before all threads multiply with it
    for (int first = 0; whole && first < adapter.rank; first += IN_FLIGHT * GROUPS) {
        if (first > 0) fetch(first), find(first + IN_FLIGHT * GROUPS);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            unpack(weights[u], numbers);
#pragma unroll
            for (int i = 0; i < NUMS16; i++) sums[u % OWN][i] += t_row[first + u * GROUPS + group] * numbers[i];
        }
    }
#pragma unroll 1
    for (int j = group; !whole && active && j < adapter.rank; j += GROUPS) {
        unpack(load_nums(page_at(of.pages, ids[j * pieces], of.page_stride) + at.offset, at.count), numbers);
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
            if (group < half) sums[0][i] += handed[i][threadIdx.x + half * LANES];
    }
    if (!active || group > 0) return;
    unpack(before, numbers);
#pragma unroll
    for (int i = 0; i < NUMS16; i++) numbers[i] += adapter.scale * sums[0][i];
    store_nums(to, pack(numbers), at.count);
}

template <int THREADS, int MOST = 16>
HELPER void expand_row(int groups, float* t_row, float (*handed)[THREADS], Num* y, const float* t, const Weights& of,
                       Lora adapter, const Run& run, int splits, long long split_stride) {
    if (groups == 1) expand_row<THREADS, 1, 8>(t_row, handed, y, t, of, adapter, run, splits, split_stride);
    else if (groups == 2) expand_row<THREADS, 2, 8>(t_row, handed, y, t, of, adapter, run, splits, split_stride);
    else expand_row<THREADS, 4, MOST>(t_row, handed, y, t, of, adapter, run, splits, split_stride);
}

// Work that blocks share: first `of_tile` parts of each of the `tall` tiles with several rows, then `of_row` parts of
// each tile of one row.
struct Work {
    int tile, part;
    bool alone;  // a tile of one row
};
HELPER Work find_work(int work, int tall, int of_tile, int of_row) {
    int left = work - tall * of_tile, parts = left < 0 ? of_tile : of_row;
    int from = left < 0 ? work : left, tile = from / parts;
    return Work{tile + (left < 0 ? 0 : tall), from - tile * parts, left >= 0};
}
