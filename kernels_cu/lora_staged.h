// What the staged rungs of MBGMM share: slabs of x or y, and of weights, on their way to a ring of stages in shared
// memory. A slab is SLAB chunks of 16 bytes of each row; a thread copies one chunk of every STEPth row, in every slab:
// its next chunk is SLAB chunks further on, an addition, where chunk_at divides.
#pragma once

constexpr int WARPS = 8, ROWS = 64, RANKS = 128;          // of a block; rows of x or y, and of weights, at a time
constexpr int SLAB = 8, WIDE = SLAB * NUMS16;             // chunks and numbers of a row in a slab
constexpr int STEP = 32 * WARPS / SLAB, ROOM = 96 << 6;  // ROOM: chunks of the ring, 96 KB

HELPER int my_row() { return threadIdx.x / SLAB; }
HELPER int my_chunk() { return threadIdx.x % SLAB; }
// Neighbouring rows to a slab, the first from `from`: zeros beyond `count` rows, or where unwanted.
HELPER void copy_rows(uint4* slab, const Num* from, int stride, int count, bool wanted) {
    uint4* to = slab + place(my_row(), my_chunk());
#pragma unroll
    for (int k = 0; k < ROWS / STEP; k++) {
        int row = my_row() + k * STEP;
        copy16(to + k * STEP * SLAB, page_at(from, row, stride), wanted && row < count);
    }
}
// Vectors in pages, neighbours in the page table, at most MOST of them; and where this thread's next chunks lie.
template <int MOST> struct Vectors {
    const Num* pages;  // in page 0
    int width, stride;
    const int* page_table;
    int first, count, pieces;  // first: entry of the first vector's first page; pieces of each vector
    int index, end;            // of the chunk's first number in the vector; from `end` on, none is wanted
    int piece, offset;         // its page of the vector, and where in the page
    int page[MOST / STEP];     // of this thread's vectors, at that piece
};
template <int MOST> HELPER void turn_to_piece(Vectors<MOST>& v) {
#pragma unroll
    for (int k = 0; k < MOST / STEP; k++)
        v.page[k] = v.page_table[v.first + min(my_row() + k * STEP, v.count - 1) * v.pieces + v.piece];
}
// Their numbers begin .. end - 1, of `length`.
template <int MOST>
HELPER Vectors<MOST> vectors_from(int begin, int end, const Num* pages, int width, int stride, const int* page_table,
                                  int first, int count, int length) {
    int pieces = pieces_of(length, width), index = begin + my_chunk() * NUMS16;
    int piece = pieces == 1 ? 0 : min(index / width, pieces - 1), offset = index - piece * width;
    Vectors<MOST> v = {pages + offset, width, stride, page_table, first, count, pieces, index, end, piece, offset, {}};
    turn_to_piece(v);
    return v;
}
// The next slab of them: zeros beyond `count` vectors and from `end` on.
template <int MOST> HELPER void copy_next(uint4* slab, Vectors<MOST>& v) {
    uint4* to = slab + place(my_row(), my_chunk());
#pragma unroll
    for (int k = 0; k < MOST / STEP; k++) {
        bool wanted = v.index < v.end && my_row() + k * STEP < v.count;
        copy16(to + k * STEP * SLAB, page_at(v.pages, v.page[k], v.stride), wanted);
    }
    v.index += WIDE, v.offset += WIDE, v.pages += WIDE;
    if (v.offset < v.width || v.piece + 1 == v.pieces) return;
    while (v.offset >= v.width && v.piece + 1 < v.pieces) v.offset -= v.width, v.pages -= v.width, v.piece++;
    turn_to_piece(v);
}
// To memory, as the first to leave the cache: y is longer than it, weights and t are read again.
HELPER void store16_last(void* to, uint4 v) {
#if ON_DEVICE
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#else
    store16(to, v);
#endif
}
// work(first row, rows, adapter) for every ROWS rows of each tile from `first` on, in steps.
template <class Work>
HELPER void each_tile(const int2* tiles, int first, int step, int tile_count, const Lora* lora, Work work) {
    for (int i = first; (i = next_tile(tiles, i, step, tile_count)) < tile_count; i += step)
        for (int row = 0; row < tiles[i].y; row += ROWS)
            work(tiles[i].x + row, min(ROWS, tiles[i].y - row), lora[i]);
}
// work(Constant of the most ranks that it is for): the fewer, the more stages the ring has. Of more than RANKS, RANKS.
template <class Work> HELPER void of_class(int ranks, Work work) {
    if (ranks <= 0) return;
    if (ranks <= 32) work(Constant<32>());
    else if (ranks <= 64) work(Constant<64>());
    else work(Constant<RANKS>());
}
