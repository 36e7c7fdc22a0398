// computes: q is turned in place by its position's angles; k, turned, and v are written into the row's two pages
// arrays: qkv [rows, (heads + 2 kv_heads) * head_dim]: q, k, v; pages [.., kv_heads * head_dim]; cos, sin [positions,
//         head_dim / 2] float32; positions, k_pages, v_pages [rows]; page -1: do not store
// map: a block owns a row, a thread every blockDim-th pair (i, i + head_dim / 2) of a head
// new here: the first rung. One launch for q, k and v: each is read once and written once
// limits: none
#include "device.h"

extern "C" __global__ void rope_store_1_naive(Num* qkv, Num* pages, const float* cos, const float* sin,
                                              const int* positions, const int* k_pages, const int* v_pages, int rows,
                                              int heads, int kv_heads, int head_dim, int qkv_stride, int page_stride) {
    int row = blockIdx.x, half = head_dim / 2;
    Num* q = qkv + static_cast<long long>(row) * qkv_stride;
    const Num* v = q + (heads + kv_heads) * head_dim;
    int k_page = k_pages[row], v_page = v_pages[row];
    for (int pair = threadIdx.x; pair < (heads + kv_heads) * half; pair += blockDim.x) {
        int head = pair / half, i = pair % half;
        Num* from = q + head * head_dim + i;
        float c = cos[static_cast<long long>(positions[row]) * half + i];
        float s = sin[static_cast<long long>(positions[row]) * half + i];
        float low = to_float(from[0]), high = to_float(from[half]);
        Num* page = pages + k_page * static_cast<long long>(page_stride);
        Num* to = head < heads ? from : page + (head - heads) * head_dim + i;
        if (head >= heads && k_page < 0) continue;
        to[0] = to_num(low * c - high * s);
        to[half] = to_num(high * c + low * s);
    }
    for (int i = threadIdx.x; v_page >= 0 && i < kv_heads * head_dim; i += blockDim.x)
        pages[v_page * static_cast<long long>(page_stride) + i] = v[i];
}
