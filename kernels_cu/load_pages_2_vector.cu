// computes: storage[layer, page_ids[i]] = image[layer, i] for all layers and pages of an adapter, in one launch
// arrays: storage [layers, pages, width] on the device; image [layers, count, width] in pinned host memory, which is
//         read over the link; page_ids [count]
// map: all threads of all blocks go through all chunks of 16 bytes together, BATCH at a time
// new here: 16 bytes a load instead of one number, and BATCH of them in flight: a read over the link takes
//           microseconds, so its rate is the bytes in flight over that
// limits: none; images whose rows are no multiple of 16 bytes apart are read number by number
#include "device.h"

constexpr int BATCH = 4;

extern "C" __global__ void load_pages_2_vector(Num* storage, const Num* image, const int* page_ids, int count,
                                               int layers, int width, int image_stride, int page_stride,
                                               long long layer_stride) {
    int chunks = ceil_div(width, NUMS16);
    long long all = static_cast<long long>(layers) * count * chunks;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    bool whole = (image_stride | page_stride) % NUMS16 == 0 && layer_stride % NUMS16 == 0;
    for (long long first = blockIdx.x * blockDim.x + threadIdx.x; first < all; first += BATCH * step) {
        uint4 numbers[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            long long i = first + b * step, vector = i / chunks;
            int column = i % chunks * NUMS16;
            if (!whole || i >= all || column + NUMS16 > width) continue;
            numbers[b] = load16(image + vector * image_stride + column);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            long long i = first + b * step, vector = i / chunks, layer = vector / count;
            if (i >= all) break;
            int column = i % chunks * NUMS16;
            long long page = page_ids[vector % count];
            Num* to = storage + layer * layer_stride + page * page_stride + column;
            if (whole && column + NUMS16 <= width) store16(to, numbers[b]);
            else
                for (int k = 0; k < min(NUMS16, width - column); k++) to[k] = image[vector * image_stride + column + k];
        }
    }
}
