// How a fault of a kernel becomes a message: memory that ends where access ends, and the signals that follow.
// It knows arguments and addresses, but neither threads nor kernels.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

struct uint3 { unsigned x, y, z; };
static uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {
struct Argument {  // kind: 'a' array (item: bytes of its dtype), 'i' integer, 'f' floating point (item: its bytes)
    const char* name;
    char* data;
    long long bytes;
    int kind, item;
};
struct Request {  // order of threads and blocks: 'f' forward, 'r' reverse, 's' shuffled by the seed
    unsigned grid[3], block[3], shared, seed;
    int order, count, message_size;
    char* message;
    Argument* arguments;
};
static Request* request;
static sigjmp_buf escape;

// Ends the launch, from whatever stack: the fibers are abandoned, the caller gets the message.
[[noreturn]] static void fail(const char* format, ...) {
    int used = snprintf(request->message, request->message_size, "block (%u, %u, %u), thread (%u, %u, %u): ",
                        blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    va_list values;
    va_start(values, format);
    vsnprintf(request->message + used, request->message_size - used, format, values);
    siglongjmp(escape, 1);
}

// --- memory between two ranges without access; what surrounds it up to there is 0xFF, and must stay so ---
constexpr size_t GUARD = 64 << 20;
struct Region {
    const char* name;
    char *map, *data;
    size_t bytes, mapped;
    bool constant;
};
static Region regions[97];
static Region *arguments = regions, *shared_arrays = regions + 64, *dynamic_shared = regions + 96;

static Region guarded(const char* name, size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + 15 + page) / page * page, mapped = whole + 2 * GUARD;
    void* map = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char* start = static_cast<char*>(map) + GUARD;
    if (map == MAP_FAILED || mprotect(start, whole, PROT_READ | PROT_WRITE)) fail("no memory for %s", name);
    memset(start, 0xFF, whole);
    return {name, start - GUARD, start + whole - (bytes + 15) / 16 * 16, bytes, mapped, false};
}
static void release(Region& region) {
    if (region.map) munmap(region.map, region.mapped);
    region = Region();
}
static void check_surroundings(const Region& region) {
    for (char* p = region.map + GUARD; region.map && p < region.map + region.mapped - GUARD; p++)
        if (p == region.data && region.bytes) p += region.bytes - 1;
        else if (*p != char(0xFF))
            fail("%s has %zu bytes; byte %td was written", region.name, region.bytes, p - region.data);
}
static char* shared_array(const char* name, size_t bytes) {
    Region* array = shared_arrays;
    while (array->map) array++;
    if (array == dynamic_shared) fail("more than 32 shared arrays");
    return (*array = guarded(name, bytes)).data;
}
static void on_signal(int signal, siginfo_t* info, void*) {
    if (signal == SIGFPE) fail("integer division by zero");
    char* at = static_cast<char*>(info->si_addr);
    for (Region& r : regions) {
        if (at < r.map || at >= r.map + r.mapped) continue;
        bool inside = at >= r.data && at < r.data + r.bytes;
        fail(inside ? "%s is const; byte %td of %zu was written" : "%s: access to byte %td, it has %zu", r.name,
             at - r.data, r.bytes);
    }
    fail("access to no array's memory: a wild pointer, or a thread's stack overflowed");
}
static void check_aligned(const void* p, int bytes) {
    if (reinterpret_cast<uintptr_t>(p) % bytes) fail("a load or store of %d bytes at a misaligned address", bytes);
}

// Turns the signals into failures for as long as it lives. It has a stack of its own: a thread's may have overflowed.
class FaultHandler {
    struct sigaction former[3];
    stack_t former_stack;
    static constexpr int SIGNALS[3] = {SIGSEGV, SIGBUS, SIGFPE};

public:
    FaultHandler() {
        static char memory[1 << 16];
        stack_t stack = {memory, 0, sizeof memory};
        sigaltstack(&stack, &former_stack);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &action, &former[i]);
    }
    ~FaultHandler() {
        for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &former[i], nullptr);
        sigaltstack(&former_stack, nullptr);
    }
};
}  // namespace shim
