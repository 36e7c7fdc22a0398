// computes: gathered[s] = shard s's x, on every shard
// arrays: gathered [shards, chunks] and x [chunks] of 16 bytes; memory, offsets [shards], turns [blocks] and stop [1]
//         are those of peers.h
// map: a block owns 512 chunks of x, a thread one of them
// new here: one launch and one way over the link, in place of a library's collective that takes several
// limits: x is a multiple of 16 bytes; at most `blocks` x 8 KiB; when the group has ended, `gathered` may stay as it is
#include "device.h"
#include "peers.h"

extern "C" __global__ void __launch_bounds__(CHUNKS, 1)
peer_gather_1_push(Num* gathered, const Num* x, int* memory, const long long* offsets, int* turns, const int* stop,
                   int chunks, int shard, int shards, int blocks) {
    launch_dependents();
    wait_for_previous();
    const Peers peers = {reinterpret_cast<char*>(memory), offsets, stop, shard, shards, blocks};
    int i = blockIdx.x * CHUNKS + threadIdx.x;
    bool has_one = i < chunks;
    uint4 own = {};
    if (has_one) own = load16(x + static_cast<long long>(i) * NUMS16);
    int turn;
    if (!exchange(peers, turns, own, has_one, turn)) return;
    for (int from = 0; has_one && from < shards; from++)
        store16(gathered + (static_cast<long long>(from) * chunks + i) * NUMS16,
                from == shard ? own : open_letter(letters(peers, shard, from, turn)));
}
