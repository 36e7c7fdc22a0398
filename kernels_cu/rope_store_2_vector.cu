// computes: q is turned in place by its position's angles; k, turned, and v are written into the row's two pages
// arrays: qkv [rows, (heads + 2 kv_heads) * head_dim]: q, k, v; pages [.., kv_heads * head_dim]; cos, sin [positions,
//         head_dim / 2] float32; positions, k_pages, v_pages [rows]; page -1: do not store
// map: the blocks of a row share its pieces, a thread one of them: 16 bytes of either half of a head of q or k, or of v
// new here: 16 bytes a load instead of one number; several blocks a row, so that few rows fill a GPU
// limits: none; halves of heads or rows that are no multiple of 16 bytes are read number by number
#include "device.h"
#include "attention.h"

extern "C" __global__ void rope_store_2_vector(Num* qkv, Num* pages, const float* cos, const float* sin,
                                               const int* positions, const int* k_pages, const int* v_pages, int rows,
                                               int heads, int kv_heads, int head_dim, int qkv_stride, int page_stride) {
    launch_dependents();
    int row = blockIdx.y, half = head_dim / 2, per_half = ceil_div(half, NUMS16);
    int piece = blockIdx.x * blockDim.x + threadIdx.x, turned = (heads + kv_heads) * per_half;
    int head = piece / per_half, i = piece % per_half * NUMS16, count = min(NUMS16, half - i);
    Num* q = qkv + static_cast<long long>(row) * qkv_stride;
    int id = piece < turned ? k_pages[row] : v_pages[row];
    Num* page = pages + max(id, 0) * static_cast<long long>(page_stride);
    long long angle = static_cast<long long>(positions[row]) * half + i;
    wait_for_previous();
    if (piece < turned) {
        Num *from = q + head * head_dim + i, *to = head < heads ? from : page + (head - heads) * head_dim + i;
        if (head >= heads && id < 0) return;
        float low[NUMS16], high[NUMS16];
        unpack(load_nums(from, count), low), unpack(load_nums(from + half, count), high);
#pragma unroll
        for (int k = 0; k < NUMS16; k++) {
            float c = k < count ? cos[angle + k] : 0.0f, s = k < count ? sin[angle + k] : 0.0f, x = low[k];
            low[k] = x * c - high[k] * s, high[k] = high[k] * c + x * s;
        }
        store_nums(to, pack(low), count), store_nums(to + half, pack(high), count);
    } else {
        int column = (piece - turned) * NUMS16, width = kv_heads * head_dim;
        const Num* v = q + (heads + kv_heads) * head_dim;
        count = min(NUMS16, width - column);  // none beyond the last piece
        if (id >= 0) store_nums(page + column, load_nums(v + column, count), count);
    }
}
