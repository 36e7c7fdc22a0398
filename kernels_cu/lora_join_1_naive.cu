// computes: t = x A of a row from the columns of it that each shard has computed: column j comes from shard j / c, as
//           its column j % c; c = columns[slot, first + target] of the row's adapter, ceil(rank / shards)
// arrays: t [splits, rows, targets, t_columns]; parts [shards, splits, rows, targets, part_columns]; slots [rows], -1:
//         none; columns [slots, all_targets] is a_page_rank of AdapterTables
// map: a thread owns one number of t
// new here: the first rung; one launch for q, k and v, whose parts one all-gather has brought
// limits: none; what lies beyond a row's rank stays as it was
#include "device.h"

extern "C" __global__ void lora_join_1_naive(float* t, const float* parts, const int* slots, const int* columns,
                                             int splits, int rows, int targets, int t_columns, int part_columns,
                                             int shards, int first, int all_targets) {
    launch_dependents();
    wait_for_previous();
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, split = blockIdx.z;
    if (i >= targets * t_columns) return;
    int slot = slots[row], target = i / t_columns, j = i % t_columns;
    int each = slot < 0 ? 0 : columns[slot * all_targets + first + target];
    if (j >= shards * each) return;
    long long shard = j / each, from = ((shard * splits + split) * rows + row) * targets + target;
    t[(static_cast<long long>(split) * rows + row) * targets * t_columns + i] = parts[from * part_columns + j % each];
}
