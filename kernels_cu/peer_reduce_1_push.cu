// computes: x = the sum of all shards' x, in float32 and in their order, so that every shard gets the same bits
// arrays: x [chunks] of 16 bytes; memory, offsets [shards], turns [blocks] and stop [1] are those of peers.h
// map: a block owns 512 chunks, a thread one of them
// new here: one launch and one way over the link, in place of a library's collective that takes several
// limits: x is a multiple of 16 bytes; at most `blocks` x 8 KiB; when the group has ended, x may stay as it is
#include "device.h"
#include "peers.h"

extern "C" __global__ void __launch_bounds__(CHUNKS, 1)
peer_reduce_1_push(Num* x, int* memory, const long long* offsets, int* turns, const int* stop, int chunks, int shard,
                   int shards, int blocks) {
    launch_dependents();
    wait_for_previous();
    const Peers peers = {reinterpret_cast<char*>(memory), offsets, stop, shard, shards, blocks};
    int i = blockIdx.x * CHUNKS + threadIdx.x;
    bool has_one = i < chunks;
    uint4 own = {};
    if (has_one) own = load16(x + static_cast<long long>(i) * NUMS16);
    int turn;
    if (!exchange(peers, turns, own, has_one, turn) || !has_one) return;
    float sums[NUMS16] = {}, numbers[NUMS16];
    for (int from = 0; from < shards; from++) {
        unpack(from == shard ? own : open_letter(letters(peers, shard, from, turn)), numbers);
#pragma unroll
        for (int k = 0; k < NUMS16; k++) sums[k] += numbers[k];
    }
    store16(x + static_cast<long long>(i) * NUMS16, pack(sums));
}
