// computes: storage[layer, page_ids[i]] = image[layer, i] for all layers and pages of an adapter, in one launch
// arrays: storage [layers, pages, width] on the device; image [layers, count, width] in pinned host memory, which is
//         read over the link; page_ids [count]
// map: all threads of all blocks go through all numbers together, neighbours to neighbours
// new here: the first rung. Few blocks: the link is slower than a few of them, and the others stay free for the step
// limits: none
#include "device.h"

extern "C" __global__ void load_pages_1_naive(Num* storage, const Num* image, const int* page_ids, int count,
                                              int layers, int width, int image_stride, int page_stride,
                                              long long layer_stride) {
    long long all = static_cast<long long>(layers) * count * width;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        long long vector = i / width, layer = vector / count;
        int page = page_ids[vector % count], column = i % width;
        storage[layer * layer_stride + page * static_cast<long long>(page_stride) + column] =
            image[vector * image_stride + column];
    }
}
