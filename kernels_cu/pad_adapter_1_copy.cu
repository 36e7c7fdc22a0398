// computes: out[entry, target, j] = column j of A, or scale x row j of B, of an entry's adapter; zeros from its rank on
// arrays: out [entries, targets, columns, length]; pages [.., width]; page_table; lora [targets, capacity] of Lora
// map: a block owns one vector (a column of A, a row of B), a thread every 128th chunk of 16 bytes of it
// new here: what paging saves: all adapters of a step once more in memory, each as large as the largest (S-LoRA-bmm)
// limits: none
#include "device.h"
#include "lora.h"

extern "C" __global__ void pad_adapter_1_copy(Num* out, const Num* pages, const int* page_table, const Lora* lora,
                                              int entries, int targets, int columns, int length, int width,
                                              int capacity, int page_stride, int of_b) {
    int j = blockIdx.x, target = blockIdx.y, entry = blockIdx.z, pieces = pieces_of(length, width);
    Lora adapter = lora[target * capacity + entry];
    Num* to = out + ((entry * static_cast<long long>(targets) + target) * columns + j) * length;
    const int* places = page_table + (of_b ? adapter.b : adapter.a) + j * pieces;
    for (int c = threadIdx.x; c < chunks_of(length, width); c += blockDim.x) {
        Chunk chunk = chunk_at(c, length, width);
        uint4 numbers = {0, 0, 0, 0};
        if (adapter.rank > j) {
            numbers = load_nums(page_at(pages, places[chunk.piece], page_stride) + chunk.offset, chunk.count);
            if (of_b) {
                float scaled[NUMS16];
                unpack(numbers, scaled);
#pragma unroll
                for (int i = 0; i < NUMS16; i++) scaled[i] *= adapter.scale;
                numbers = pack(scaled);
            }
        }
        store_nums(to + chunk.index, numbers, chunk.count);
    }
}
