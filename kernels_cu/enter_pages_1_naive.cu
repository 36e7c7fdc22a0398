// computes: sequence_pages[slots[row], 0 and 1, places[row]] = k_pages[row], v_pages[row]: a step's new pages
// arrays: sequence_pages [slots, 2, positions], which stays on the device; slots, places, k_pages, v_pages [rows]; slot
//         -1: a row of padding
// map: a thread owns a row
// new here: the first rung; a step brings 4 integers a row, not the tables
// limits: none
#include "device.h"

extern "C" __global__ void enter_pages_1_naive(int* sequence_pages, const int* slots, const int* places,
                                               const int* k_pages, const int* v_pages, int rows, int positions) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || slots[row] < 0) return;
    int* to = sequence_pages + slots[row] * 2LL * positions + places[row];
    to[0] = k_pages[row];
    to[positions] = v_pages[row];
}
