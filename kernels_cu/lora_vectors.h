// For kernels whose threads take few chunks of 16 bytes of a row, but those of all vectors (columns of A, rows of B).
#pragma once

// A chunk of each of MOST neighbouring vectors: where they lie. They are found while other chunks are on their way.
template <int MOST> struct Vectors {
    int page[MOST];
    int offset, count;  // of the chunk in the page; how many vectors, none where the thread has no chunk
};
template <int MOST>
HELPER void find_vectors(Vectors<MOST>& found, const Weights& of, int first, int count, int chunk, int length) {
    Chunk at = chunk_at(chunk, length, of.width);
    int pieces = pieces_of(length, of.width);
    const int* ids = of.page_table + first + at.piece;
    found.offset = at.offset, found.count = at.count ? count : 0;
#pragma unroll
    for (int u = 0; u < MOST; u++) found.page[u] = u < found.count ? ids[u * pieces] : 0;
}
template <int MOST>
HELPER void fetch_vectors(uint4 (&weights)[MOST], const Weights& of, const Vectors<MOST>& found) {
#pragma unroll
    for (int u = 0; u < MOST; u++)
        weights[u] = load16_once(page_at(of.pages, found.page[u], of.page_stride) + found.offset, u < found.count);
}

// Sums of COUNT numbers of each lane over a warp, a power of two: lane i has that of number i / (32 / COUNT).
template <int COUNT> HELPER float warp_sums(float (&sums)[COUNT]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = COUNT / 2; half; half /= 2) {  // the upper lanes go on with the upper half of the numbers
        int apart = 32 / COUNT * half;
#pragma unroll
        for (int k = 0; k < half; k++) {
            float given = lane & apart ? sums[k] : sums[k + half], kept = lane & apart ? sums[k + half] : sums[k];
            sums[k] = kept + __shfl_xor_sync(~0u, given, apart);
        }
    }
#pragma unroll
    for (int apart = 16 / COUNT; apart; apart /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], apart);
    return sums[0];
}
// A number of t: its splits, in their order; many are read at a time.
HELPER float add_splits(const float* t, int splits, long long split_stride) {
    constexpr int MANY = 8;
    float sum = 0, parts[MANY];
    for (int first = 0; first < splits; first += MANY) {
#pragma unroll
        for (int u = 0; u < MANY; u++) parts[u] = first + u < splits ? t[(first + u) * split_stride] : 0.0f;
#pragma unroll
        for (int u = 0; u < MANY; u++) sum += parts[u];
    }
    return sum;
}
