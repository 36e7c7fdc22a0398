// computes: for each layer, target and entry (a row or a tile of rows) where its adapter's A and B lie, rank and scale
// arrays: lora [layers, targets, entries] of Lora; slots [entries], -1: none; a_start, b_start [slots, targets] and
//         rank, scale [slots, layers, targets] of AdapterTables, whose page table is [slots, table]
// map: a thread owns one of the layers x targets x entries
// new here: one read of 16 bytes in each kernel to come instead of a chain slot -> rank -> start, once a step
// limits: none
#include "device.h"

extern "C" __global__ void lora_lookup_1_naive(Lora* lora, const int* slots, const int* a_start, const int* b_start,
                                               const int* rank, const float* scale, int entries, int layers,
                                               int targets, int table) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= layers * targets * entries) return;
    int slot = slots[i % entries], target = i / entries % targets, layer = i / entries / targets;
    if (slot < 0) {
        lora[i] = Lora{0, 0, 0, 0.0f};
        return;
    }
    int start = slot * targets + target, at = (slot * layers + layer) * targets + target;
    lora[i] = Lora{slot * table + a_start[start], slot * table + b_start[start], rank[at], scale[at]};
}
