// computes: storage[layer, page_ids[i]] = image[layer, i] for all layers and pages of an adapter, in one launch
// arrays: storage [layers, pages, width] on the device; image [layers, count, width] in pinned host memory, which is
//         read over the link; page_ids [count]
// map: neighbouring threads, as many as a page has chunks of 16 bytes if that is a power of two, take BATCH pages at a
//      time; a thread the same chunks of each
// new here: which page and chunk is a thread's takes a division once for a page of 8 KB, not four for each chunk; the
//           first numbers are on their way before a load just ahead has ended
// limits: none; images whose rows are no multiple of 16 bytes apart are read number by number
#include "device.h"
#include "attention.h"

constexpr int BATCH = 4;

extern "C" __global__ void load_pages_3_whole_pages(Num* storage, const Num* image, const int* page_ids, int count,
                                                    int layers, int width, int image_stride, int page_stride,
                                                    long long layer_stride) {
    launch_dependents();
    int chunks = ceil_div(width, NUMS16), lanes = 1, pages = layers * count;
    while (lanes < chunks && lanes < blockDim.x) lanes *= 2;
    int groups = gridDim.x * (blockDim.x / lanes), group = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
    bool whole = (image_stride | page_stride) % NUMS16 == 0 && layer_stride % NUMS16 == 0;
    for (int first = group; first < pages; first += BATCH * groups)
        for (int column = threadIdx.x % lanes * NUMS16; column < width; column += lanes * NUMS16) {
            bool chunk = whole && column + NUMS16 <= width;
            uint4 numbers[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                int page = first + b * groups;
                numbers[b] = load16_once(image + page * static_cast<long long>(image_stride) + column,
                                         chunk && page < pages);
            }
            wait_for_previous();  // which may have written the same pages
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                int page = first + b * groups;
                if (page >= pages) break;
                const Num* from = image + page * static_cast<long long>(image_stride) + column;
                Num* layer = storage + page / count * layer_stride;
                Num* to = layer + page_ids[page % count] * static_cast<long long>(page_stride) + column;
                if (chunk) store16(to, numbers[b]);
                else
                    for (int k = 0; k < min(NUMS16, width - column); k++) to[k] = from[k];
            }
        }
    wait_for_previous();
}
