// LoRA number by number: where a model's numbers do not come in eights, the fast rungs do this instead.
#pragma once

// The shrink of `count` rows and `columns` columns of A from j0 on.
HELPER void shrink_plainly(float* t, int t_stride, const Num* x, int x_stride, const Num* pages, int page_stride,
                           const int* ids, int width, int d_in, int split, int splits, int count, int j0, int columns) {
    int each = ceil_div(d_in, splits), last = min((split + 1) * each, d_in), pieces = pieces_of(d_in, width);
    wait_for_previous();
    for (int pair = threadIdx.x; pair < count * columns; pair += blockDim.x) {
        int row = pair / columns, j = j0 + pair % columns;
        float sum = 0;
        for (int k = split * each; k < last; k++) {
            const Num* column = page_at(pages, ids[j * pieces + k / width], page_stride);
            sum += to_float(page_at(x, row, x_stride)[k]) * to_float(column[k % width]);
        }
        t[static_cast<long long>(row) * t_stride + j] = sum;
    }
}

// The expand of rows row0 .. and a run of chunks.
HELPER void expand_plainly(Num* y, const float* t, const Num* pages, const int* page_table, Lora adapter, Run run,
                           int size, int row0, int count, int rows, int width, int targets, int t_columns, int splits,
                           int y_stride, int page_stride) {
    wait_for_previous();
    for (int i = threadIdx.x; i < count * size * NUMS16; i += blockDim.x) {
        Chunk at = chunk_at(run.chunk + i / NUMS16 % size, run.length, width);
        int row = row0 + i / NUMS16 / size, k = i % NUMS16;
        float sum = 0;
        for (int j = 0; k < at.count && j < adapter.rank * splits; j++) {
            int page = page_table[adapter.b + j / splits * pieces_of(run.length, width) + at.piece];
            long long from = ((j % splits) * static_cast<long long>(rows) + row) * targets + run.target;
            sum += t[from * t_columns + j / splits] * to_float(page_at(pages, page, page_stride)[at.offset + k]);
        }
        Num* to = y + static_cast<long long>(row) * y_stride + run.column + at.index + k;
        if (k < at.count) *to = to_num(to_float(*to) + adapter.scale * sum);
    }
}
