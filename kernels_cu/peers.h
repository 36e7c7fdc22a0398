// How the shards of one host exchange small arrays without a library: each puts its numbers into the memory of the
// others, says so there, and waits until the others have said the same: one way over the link, and nobody reads across
// it.
//
// The memory of a shard has letters [shards, 2, blocks, CHUNKS] of 16 bytes, and behind them turns [shards, blocks]:
// from whom, which of two turns, and for which block. Block b has only to do with the others' block b, and a letter is
// written anew two turns later: by then its reader has said that it has come to the turn between, and so has read it.
//
// More blocks may wait than a GPU holds at a time. That GPUs start blocks in the order of their numbers is taken for
// granted, though CUDA does not promise it: then the first block that is not done everywhere runs, or will, everywhere.
#pragma once

constexpr int CHUNKS = 512;  // of 16 bytes that a block exchanges, one for each thread
constexpr int LOOKS = 4096;  // for a turn, between two looks whether the group has ended

struct Peers {
    char* own;                  // this shard's memory
    const long long* offsets;   // of each shard's, from `own` in bytes
    const int* stop;            // not 0: the group has ended, nobody need be waited for
    int shard, shards, blocks;
};
HELPER uint4* letters(const Peers& peers, int to, int from, int turn) {
    long long place = ((from * 2 + (turn & 1)) * static_cast<long long>(peers.blocks) + blockIdx.x) * CHUNKS;
    return reinterpret_cast<uint4*>(peers.own + peers.offsets[to]) + place + threadIdx.x;
}
HELPER int* said(const Peers& peers, int to, int from) {
    char* behind = peers.own + peers.offsets[to] + 32LL * peers.shards * peers.blocks * CHUNKS;
    return reinterpret_cast<int*>(behind) + from * peers.blocks + blockIdx.x;
}

// Memory that other GPUs write or read.
HELPER void say(int* to, int turn) {
#if ON_DEVICE
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(to), "r"(turn) : "memory");
#else
    *to = turn;
#endif
}
HELPER int hear(const int* from) {
#if ON_DEVICE
    int turn;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(turn) : "l"(from) : "memory");
    return turn;
#else
    return *from;
#endif
}
HELPER int look(const int* from) {
#if ON_DEVICE
    return *static_cast<const volatile int*>(from);
#else
    return *from;
#endif
}
HELPER uint4 open_letter(const uint4* from) {
#if ON_DEVICE
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
#else
    return load16(from);
#endif
}
HELPER void fence_of_all() {
#if ON_DEVICE
    __threadfence_system();
#endif
}

// Sends each thread's chunk to all others and waits for theirs; returns whether they came, as letters of this turn.
HELPER bool exchange(const Peers& peers, int* turns, uint4 chunk, bool has_one, int& turn) {
    SHARED(int, ended, [1]);
    turn = turns[blockIdx.x];
    int next = static_cast<int>(turn + 1u);  // after 2^31 turns it starts from below
    if (threadIdx.x == 0) ended[0] = 0;
    for (int to = 0; to < peers.shards; to++)
        if (has_one && to != peers.shard) store16(letters(peers, to, peers.shard, turn), chunk);
    fence_of_all();
    __syncthreads();  // the block's letters have gone, and `turn` is read, before one thread says so
    int other = threadIdx.x;
    if (other < peers.shards && other != peers.shard) {
        say(said(peers, other, peers.shard), next);
        const int* from = said(peers, peers.shard, other);
        for (unsigned looks = 1; static_cast<int>(hear(from) - static_cast<unsigned>(next)) < 0; looks++)
            if (looks % LOOKS == 0 && look(peers.stop)) {
                ended[0] = 1;
                break;
            }
    }
    if (threadIdx.x == 0) turns[blockIdx.x] = next;
    __syncthreads();  // all others have said so, or the group has ended, before any thread opens a letter
    return !ended[0];
}
