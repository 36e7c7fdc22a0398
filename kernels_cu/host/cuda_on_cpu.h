// CUDA on the CPU: with this header in CUDA's place g++ compiles the .cu files, and runs them on copies of their
// arguments. A thread is a fiber: it runs until it waits or ends, then the next of its block, in the order asked for.
// So a missing barrier, a wrong index, an unwritten word shows, the same way each time. What cannot show: ../README.md.
#pragma once
#include <ucontext.h>

#include <tuple>
#include <type_traits>

#include "faults.h"

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// Shared memory exists only through these two, so that it can be filled with NaN before each block.
#define SHARED(type, name, size) \
    using name##_type = type size; \
    static auto& name = *reinterpret_cast<name##_type*>(shim::shared_array(#name, sizeof(name##_type)))
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(shim::dynamic_shared->data)
#define __syncthreads() shim::barrier(__LINE__)
#define __syncwarp(...) shim::warp_sync(__LINE__ __VA_OPT__(,) __VA_ARGS__)
#define __shfl_sync(...) shim::shuffle(__LINE__, 'i', __VA_ARGS__)
#define __shfl_xor_sync(...) shim::shuffle(__LINE__, 'x', __VA_ARGS__)
#define __shfl_up_sync(...) shim::shuffle(__LINE__, 'u', __VA_ARGS__)
#define __shfl_down_sync(...) shim::shuffle(__LINE__, 'd', __VA_ARGS__)
#define HOST_ENTRY(kernel) extern "C" int host_launch(shim::Request* request) { return shim::launch(kernel, request); }

struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
// <cmath> would take a third of the time that a kernel takes to compile.
extern "C" float expf(float), exp2f(float), logf(float), log2f(float), sqrtf(float), fabsf(float), floorf(float);
extern "C" float fmaxf(float, float), fminf(float, float), fmaf(float, float, float), ldexpf(float, int);
extern "C" int ilogbf(float);
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

namespace shim {
constexpr size_t MOST_THREADS = 1024, STACK = 128 << 10, SHARED_LIMIT = 96 << 10;
static char* stacks;

// --- fibers: made once, each runs one thread of every block; gdb steps through them, for no libc call switches ---
struct Context { void* at[5]; };
[[gnu::noipa]] static void jump(Context& to) { __builtin_longjmp(to.at, 1); }
[[gnu::noipa]] static void switch_to(Context& from, Context& to) { __builtin_setjmp(from.at) ? void() : jump(to); }
[[gnu::noipa]] static void switch_to_new(Context& from, char* stack, size_t bytes, void (*entry)()) {
    ucontext_t fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = stack, fresh.uc_stack.ss_size = bytes;
    makecontext(&fresh, entry, 0);
    if (!__builtin_setjmp(from.at)) setcontext(&fresh);
}
enum State : char { READY, AT_BARRIER, AT_WARP, ENDED };
struct Copy { char* to; const char* from; int bytes, group; };
struct Fiber {
    Context context;
    bool made;
    State state;
    int line, copies, group;
    unsigned mask;
    void* exchange;
    Copy copy[256];
};
static Fiber fibers[MOST_THREADS];
static Context scheduler;
static int order[MOST_THREADS], threads, current, waiting, ended;
static bool next_pass;
static unsigned random_state;
static void (*body)();

static unsigned random_below(unsigned n) { return ((random_state = random_state * 1664525u + 1013904223u) >> 8) % n; }
static void new_order() {
    for (int i = 0; i < threads; i++) order[i] = request->order == 'r' ? threads - 1 - i : i;
    for (int i = threads - 1; request->order == 's' && i > 0; i--) std::swap(order[i], order[random_below(i + 1)]);
}
static void select(unsigned i) {
    current = i;
    threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
}
static void run_fiber();
static void resume(int i) {
    select(i);
    if (fibers[i].made) return switch_to(scheduler, fibers[i].context);
    fibers[i].made = true;  // sizes differ, or all stacks would share one set of the cache
    mprotect(stacks + i * STACK, 1, PROT_NONE);
    switch_to_new(scheduler, stacks + i * STACK, STACK - i % 61 * 64, run_fiber);
}
static void pause() { switch_to(fibers[current].context, scheduler); }
static void run_fiber() {
    for (;; pause()) {
        body();
        if (fibers[current].copies) fail("the thread ends with an async copy that it never waited for");
        fibers[current].state = ENDED, ended++;
    }
}
static void barrier(int line) {
    fibers[current].state = AT_BARRIER, fibers[current].line = line;
    if (++waiting == threads) {
        for (int i = 0; i < threads; fibers[i++].state = READY)
            if (fibers[i].line != line) fail("divergent barrier: thread %d is at line %d", i, fibers[i].line);
        waiting = 0, next_pass = true;
        new_order();
    }
    pause();
}
// The lanes of a mask meet. The last to come runs resolve(exchange of each lane), which computes what each lane gets.
static void meet(int line, unsigned mask, void* exchange, void (*resolve)(void** all)) {
    int lane = current % 32, first = current - lane;
    if (!(mask >> lane & 1)) fail("line %d: the mask %x leaves out the caller", line, mask);
    Fiber& fiber = fibers[current];
    fiber.state = AT_WARP, fiber.line = line, fiber.mask = mask, fiber.exchange = exchange;
    void* all[32] = {};
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        if (first + i >= threads) fail("line %d: lane %d of the mask is beyond the block", line, i);
        Fiber& other = fibers[first + i];
        if (other.state != AT_WARP || other.line != line || other.mask != mask) return pause();
        all[i] = other.exchange;
    }
    resolve(all);
    for (int i = 0; i < 32; i++)
        if (all[i]) fibers[first + i].state = READY;
    if (request->order != 's') next_pass = true;  // they run on: a warp may be far ahead of the others
    pause();
}
static void warp_sync(int line, unsigned mask = ~0u) { meet(line, mask, &mask, [](void**) {}); }
template <class T> struct Exchange { T value; int lane; };
template <class T> static T shuffle(int line, char kind, unsigned mask, T value, int n, int width = 32) {
    int lane = current % 32, start = lane / width * width;
    int source = kind == 'x' ? lane ^ n : kind == 'u' ? lane - n : kind == 'd' ? lane + n : start + n % width;
    Exchange<T> mine{value, source < start || source >= start + width ? lane : source};
    meet(line, mask, &mine, [](void** all) {
        T got[32];
        for (int i = 0; i < 32; i++) {
            if (!all[i]) continue;
            int from = static_cast<Exchange<T>*>(all[i])->lane;
            if (!all[from]) fail("a shuffle reads lane %d, which is not in its mask", from);
            got[i] = static_cast<Exchange<T>*>(all[from])->value;
        }
        for (int i = 0; i < 32; i++)
            if (all[i]) static_cast<Exchange<T>*>(all[i])->value = got[i];
    });
    return mine.value;
}
// An asynchronous copy lands at its thread's wait, not at the issue: until then its destination is NaN.
static void copy_async(void* to, const void* from, int bytes) {
    Fiber& fiber = fibers[current];
    check_aligned(to, 16), check_aligned(from, bytes ? 16 : 1);
    if (fiber.copies == 256) fail("more than 256 asynchronous copies in flight");
    memset(to, 0xFF, 16);
    fiber.copy[fiber.copies++] = {static_cast<char*>(to), static_cast<const char*>(from), bytes, fiber.group};
}
static void copies_wait(int newest) {
    Fiber& fiber = fibers[current];
    Copy* kept = fiber.copy;
    for (Copy* copy = fiber.copy; copy < fiber.copy + fiber.copies; copy++)
        if (copy->group >= fiber.group - newest) *kept++ = *copy;
        else if (memset(copy->to, 0, 16) && copy->bytes) memcpy(copy->to, copy->from, copy->bytes);
    fiber.copies = kept - fiber.copy;
}

// --- blocks and launches ---
static void report_deadlock() {
    int i = 0;
    while (fibers[i].state == ENDED || (fibers[i].state == AT_BARRIER && waiting + ended < threads)) i++;
    select(i);
    fail("line %d: divergent %s: %d threads wait at a barrier, %d have ended", fibers[i].line,
         fibers[i].state == AT_WARP ? "lanes of a warp" : "barrier", waiting, ended);
}
static void run_block() {
    for (Region* array = shared_arrays; array <= dynamic_shared; array++)
        if (array->bytes) memset(array->data, 0xFF, array->bytes);
    for (int i = 0; i < threads; i++) fibers[i].state = READY, fibers[i].copies = fibers[i].group = 0;
    waiting = ended = 0;
    for (new_order(); ended < threads;) {
        bool progress = next_pass = false;
        for (int k = 0; k < threads && !next_pass; k++)
            if (fibers[order[k]].state == READY) progress = true, resume(order[k]);
        if (!progress && ended < threads) report_deadlock();
    }
    for (Region* array = shared_arrays; array <= dynamic_shared; array++) check_surroundings(*array);
}
static void run_grid() {
    unsigned total = gridDim.x * gridDim.y * gridDim.z, first = request->order == 's' ? random_below(total) : 0;
    for (unsigned i = 0; i < total; i++) {
        unsigned b = request->order == 'r' ? total - 1 - i : (first + i) % total;
        blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / (gridDim.x * gridDim.y)};
        run_block();
    }
    size_t bytes = 0;
    for (Region* array = shared_arrays; array <= dynamic_shared; array++) bytes += array->bytes;
    if (bytes > SHARED_LIMIT) fail("the block takes %zu bytes of shared memory, the limit is %zu", bytes, SHARED_LIMIT);
}
template <class P> static P argument(int i) {
    Argument& given = request->arguments[i];
    P value{};
    if constexpr (std::is_pointer_v<P>) {
        using Element = std::remove_pointer_t<P>;
        bool fits = int(sizeof(Element)) == given.item || (sizeof(Element) > 4 && given.bytes % sizeof(Element) == 0);
        if (given.kind != 'a' || (given.data && !fits))
            fail("%s: no array of %zu-byte items", given.name, sizeof(Element));
        if (!given.data) return value;
        Region& copy = arguments[i] = guarded(given.name, given.bytes);
        value = static_cast<P>(memcpy(copy.data, given.data, given.bytes));
        copy.constant = std::is_const_v<Element>;
        if (copy.constant) mprotect(copy.map + GUARD, copy.mapped - 2 * GUARD, PROT_READ);
    } else {
        char kind = std::is_integral_v<P> ? 'i' : 'f';
        if (given.kind != kind || given.item != sizeof(P)) fail("%s is no %c%zu", given.name, kind, sizeof(P));
        memcpy(&value, given.data, sizeof(P));
    }
    return value;
}
template <class... P, size_t... I> static void bind(void (*kernel)(P...), std::index_sequence<I...>) {
    static std::tuple<void (*)(P...), P...> call;
    call = {kernel, argument<P>(I)...};
    body = [] { std::apply([](auto function, auto... values) { function(values...); }, call); };
}
template <class... P> static int launch(void (*kernel)(P...), Request* asked) {
    request = asked;
    FaultHandler handler;
    int failed = sigsetjmp(escape, 1);
    if (!failed) {
        gridDim = {asked->grid[0], asked->grid[1], asked->grid[2]};
        blockDim = {asked->block[0], asked->block[1], asked->block[2]};
        threads = blockDim.x * blockDim.y * blockDim.z;
        random_state = asked->seed;
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        if (!stacks) stacks = (char*)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (asked->count != sizeof...(P)) fail("%d arguments, the kernel takes %zu", asked->count, sizeof...(P));
        if (threads > int(MOST_THREADS)) fail("%d threads in a block, the limit is %zu", threads, MOST_THREADS);
        bind(kernel, std::index_sequence_for<P...>());
        *dynamic_shared = guarded("dynamic shared memory", asked->shared);
        run_grid();
        for (int i = 0; i < asked->count; i++) check_surroundings(arguments[i]);
    }
    for (int i = 0; failed && i < int(MOST_THREADS); i++) fibers[i].made = false;  // abandoned where they stood
    for (int i = 0; i < 64; release(arguments[i++]))
        if (!failed && arguments[i].map && !arguments[i].constant)
            memcpy(asked->arguments[i].data, arguments[i].data, arguments[i].bytes);
    release(*dynamic_shared);
    return failed;
}
extern "C" void release_stacks() { munmap(stacks, MOST_THREADS * STACK), stacks = 0; for (auto& f : fibers) f.made = 0;}
}  // namespace shim
