// A row of RMS norm, for all kernels that compute one: they differ in what they do beside it. The sum of squares is
// added in an order that depends on the number of threads alone, so kernels that give it as many have the same bits.
#pragma once

constexpr int KEPT = 2;  // chunks of 16 bytes of a row that a thread has in registers

struct NormRow {
    Num *out, *x;
    const Num *delta, *weight;  // delta may be null
    int hidden, threads;        // those that compute the norm: the block's first ones, whole warps
    int kept;                   // numbers that are in registers, the row's first ones; the others are read again
    int first, step, rest;      // of this thread: its first number, from a chunk to the next, its first beyond `kept`
};
HELPER NormRow norm_row(Num* out, Num* x, const Num* delta, const Num* weight, int hidden, int out_stride, int x_stride,
                        int delta_stride, int threads) {
    long long block = blockIdx.x;
    bool whole = (x_stride | delta_stride | out_stride | hidden) % NUMS16 == 0, takes_part = threadIdx.x < threads;
    int step = threads * NUMS16, kept = whole ? min(hidden, KEPT * step) : 0;
    NormRow row = {out + block * out_stride, x + block * x_stride, delta ? delta + block * delta_stride : nullptr};
    row.weight = weight, row.hidden = hidden, row.threads = threads, row.kept = kept, row.step = step;
    row.first = takes_part ? int(threadIdx.x) * NUMS16 : hidden;
    row.rest = takes_part ? kept + int(threadIdx.x) : hidden;
    return row;
}
// As many threads as grids.norm_threads of ops/grids.py gives a block that computes nothing else.
HELPER int norm_threads(int hidden) { return min(1024, max(256, 32 * ceil_div(hidden, 32 * KEPT * NUMS16))); }

HELPER void load_chunks(uint4 (&chunks)[KEPT], const Num* from, const NormRow& row, bool wanted = true) {
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int i = row.first + n * row.step;
        chunks[n] = load16_once(from + i, wanted && i < row.kept);
    }
}
// Weights may wait in shared memory, where registers have other uses: [chunks], each for the thread that has it copied.
HELPER void stage_weights(uint4* staged, const NormRow& row) {
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int i = row.first + n * row.step;
        if (i < row.kept) copy_async16(staged + i / NUMS16, row.weight + i);
    }
    copies_commit();
}
HELPER void take_chunks(uint4 (&chunks)[KEPT], const uint4* staged, const NormRow& row) {
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int i = row.first + n * row.step;
        chunks[n] = i < row.kept ? staged[i / NUMS16] : uint4{0, 0, 0, 0};
    }
}
HELPER uint4 add_nums(uint4 a, uint4 b) {
    float numbers[NUMS16], more[NUMS16];
    unpack(a, numbers), unpack(b, more);
#pragma unroll
    for (int k = 0; k < NUMS16; k++) numbers[k] += more[k];
    return pack(numbers);
}
HELPER void add_delta(const NormRow& row, uint4 (&x)[KEPT], const uint4 (&delta)[KEPT]) {
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int i = row.first + n * row.step;
        x[n] = add_nums(x[n], delta[n]);
        if (row.delta && i < row.kept) store16(row.x + i, x[n]);
    }
    for (int i = row.rest; row.delta && i < row.hidden; i += row.threads)
        row.x[i] = to_num(to_float(row.x[i]) + to_float(row.delta[i]));
}
// For all threads of the block: 1 / sqrt(mean(x^2) + eps) of the sum as stored; of_warps [32] is theirs.
HELPER float norm_scale(const NormRow& row, const uint4 (&x)[KEPT], float* of_warps, float eps) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        float numbers[NUMS16];
        unpack(x[n], numbers);
#pragma unroll
        for (int k = 0; k < NUMS16; k++) sum += numbers[k] * numbers[k];
    }
    for (int i = row.rest; i < row.hidden; i += row.threads) sum += to_float(row.x[i]) * to_float(row.x[i]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();  // the warps' sums are written before all threads add them
    float total = 0;
    for (int warp = 0; warp < row.threads / 32; warp++) total += of_warps[warp];
    return rsqrtf(total / row.hidden + eps);
}
// out = scale x weight; x becomes what is written.
HELPER void write_normed(const NormRow& row, uint4 (&x)[KEPT], const uint4 (&weights)[KEPT], float scale) {
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        float numbers[NUMS16], factors[NUMS16];
        unpack(x[n], numbers), unpack(weights[n], factors);
#pragma unroll
        for (int k = 0; k < NUMS16; k++) numbers[k] *= scale * factors[k];
        x[n] = pack(numbers);
        if (row.first + n * row.step < row.kept) store16(row.out + row.first + n * row.step, x[n]);
    }
    for (int i = row.rest; i < row.hidden; i += row.threads)
        row.out[i] = to_num(to_float(row.x[i]) * scale * to_float(row.weight[i]));
}
