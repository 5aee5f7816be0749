// The part of CUDA that our kernels use, on the CPU: every CUDA thread is a coroutine with its own stack, the threads
// of a block take turns on one CPU thread, and blocks follow each other. Barriers, votes and shuffles really wait for
// everyone they name; if someone never comes, the launch ends with an error instead of a hang. A warp goes as far ahead
// of the others as barriers let it, and the order of turns and blocks can be reversed: that brings out results that
// depend on it, those of a missing barrier above all.
//
// Stands in for arithmetic.cu: float32 here is the CPU's, so compile with -ffp-contract=off.

#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstring>
#include <functional>
#include <type_traits>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static // one block at a time

static struct { unsigned x; } threadIdx, blockIdx;

// ---------------------------------------------------------------- threads, warps and blocks

namespace host {

constexpr int MAX_THREADS = 1024, WARP = 32;
constexpr size_t STACK_BYTES = 128 << 10;

// Where ``expected`` threads wait for each other. The generation counts how often they have all met.
struct Meeting {
    int arrived;
    unsigned generation;
};

struct Warp {
    Meeting meeting;
    unsigned votes[2]; // by the parity of the generation: a fast lane may already write the next one
    char slots[2][WARP][8];
};

struct Thread {
    ucontext_t birth;
    jmp_buf place;
    bool born, done;
    const Meeting *waits;
    unsigned generation;
};

static Thread threads[MAX_THREADS];
static Warp warps[MAX_THREADS / WARP];
static Meeting block;
static char *stacks;
static int current, block_threads;
static jmp_buf scheduler;
static std::function<void()> kernel;
static const char *fault;

static void pause() {
    if (_setjmp(threads[current].place) == 0) _longjmp(scheduler, 1);
}

static void live() {
    for (;;) {
        kernel();
        threads[current].done = true;
        pause();
    }
}

static void resume(int thread) {
    current = thread;
    threadIdx.x = thread;
    if (_setjmp(scheduler)) return;
    Thread &t = threads[thread];
    if (t.born) _longjmp(t.place, 1);
    t.born = true;
    getcontext(&t.birth);
    t.birth.uc_stack.ss_sp = stacks + thread * STACK_BYTES;
    t.birth.uc_stack.ss_size = STACK_BYTES;
    makecontext(&t.birth, live, 0);
    setcontext(&t.birth);
}

// The caller goes on once ``expected`` threads are here; returns the parity of this meeting.
static int meet(Meeting &meeting, int expected) {
    const unsigned generation = meeting.generation;
    if (++meeting.arrived == expected) {
        meeting.arrived = 0;
        ++meeting.generation;
    } else {
        Thread &t = threads[current];
        t.waits = &meeting;
        t.generation = generation;
        while (meeting.generation == generation) pause();
        t.waits = nullptr;
    }
    return generation & 1;
}

static Warp &warp() { return warps[threadIdx.x / WARP]; }

static void need_all(unsigned mask) {
    if (mask != 0xffffffffu) fault = "a warp operation does not name all lanes";
}

// As far as the warp gets without others; returns whether it got anywhere.
static bool run_warp(int first, bool reverse, int &left) {
    bool progress = false, again = true;
    while (again) {
        again = false;
        for (int i = 0; i < WARP; ++i) {
            const int thread = first + (reverse ? WARP - 1 - i : i);
            Thread &t = threads[thread];
            if (t.done || (t.waits && t.waits->generation == t.generation)) continue;
            again = progress = true;
            resume(thread);
            if (t.done) --left;
        }
    }
    return progress;
}

static bool run_block(bool reverse) {
    for (int t = 0; t < block_threads; ++t) threads[t].done = false;
    for (int left = block_threads; left > 0;) {
        bool progress = false;
        for (int i = 0; i < block_threads; i += WARP)
            if (run_warp(reverse ? block_threads - WARP - i : i, reverse, left)) progress = true;
        if (!progress) return false;
    }
    return true;
}

static const char *run(unsigned grid, unsigned count, bool reverse) {
    if (count > MAX_THREADS || count % WARP) return "the thread block is too large or no multiple of a warp";
    if (!stacks) stacks = new char[MAX_THREADS * STACK_BYTES]; // untouched pages cost nothing
    if (fault) return "an earlier launch failed, its threads are still waiting";
    block_threads = (int)count;
    for (unsigned b = 0; b < grid && !fault; ++b) {
        blockIdx.x = reverse ? grid - 1 - b : b;
        if (!run_block(reverse)) fault = "some threads wait for others that never come";
    }
    return fault;
}

// ---------------------------------------------------------------- launches from Python

template <class T>
constexpr char type_code() {
    if (std::is_pointer<T>::value) return 'P';
    if (std::is_same<T, float>::value) return 'f';
    if (std::is_same<T, int>::value) return 'i';
    if (std::is_same<T, unsigned>::value) return 'I';
    return std::is_same<T, long long>::value ? 'q' : '?';
}

template <class... A, size_t... I>
static std::function<void()> with_arguments(void (*function)(A...), void **args, std::index_sequence<I...>) {
    return [=] { function(*(A *)args[I]...); };
}

// ``types``: one letter per argument of the caller, who is told if the kernel has others.
template <class... A>
static const char *launch(void (*function)(A...), unsigned grid, unsigned count, const char *types, void **args,
                          bool reverse) {
    const char expected[] = {type_code<A>()..., 0};
    if (strcmp(types, expected)) return "the arguments are not those of the kernel";
    kernel = with_arguments(function, args, std::index_sequence_for<A...>());
    return run(grid, count, reverse);
}

} // namespace host

#define LAUNCHER(name)                                                                                                 \
    extern "C" const char *launch_##name(unsigned grid, unsigned count, const char *types, void **args, int reverse) { \
        return host::launch(name, grid, count, types, args, reverse);                                                  \
    }

// ---------------------------------------------------------------- device functions

inline void __syncthreads() { host::meet(host::block, host::block_threads); }
inline void __syncwarp() { host::meet(host::warp().meeting, host::WARP); }

inline unsigned __ballot_sync(unsigned mask, int vote) {
    host::need_all(mask);
    host::Warp &warp = host::warp();
    unsigned &votes = warp.votes[warp.meeting.generation & 1];
    if (warp.meeting.arrived == 0) votes = 0;
    votes |= (unsigned)(vote != 0) << (threadIdx.x % host::WARP);
    return warp.votes[host::meet(warp.meeting, host::WARP)];
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
    host::need_all(mask);
    host::Warp &warp = host::warp();
    const unsigned lane = threadIdx.x % host::WARP;
    memcpy(warp.slots[warp.meeting.generation & 1][lane], &value, sizeof value);
    const int parity = host::meet(warp.meeting, host::WARP);
    memcpy(&value, warp.slots[parity][lane ^ offset], sizeof value);
    return value;
}

// The value of the lane so many below; its own, where there is none.
template <class T>
T __shfl_up_sync(unsigned mask, T value, int offset) {
    host::need_all(mask);
    host::Warp &warp = host::warp();
    const int lane = threadIdx.x % host::WARP;
    memcpy(warp.slots[warp.meeting.generation & 1][lane], &value, sizeof value);
    const int parity = host::meet(warp.meeting, host::WARP);
    memcpy(&value, warp.slots[parity][lane < offset ? lane : lane - offset], sizeof value);
    return value;
}

inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }

inline int __popc(unsigned bits) {
    int count = 0;
    for (; bits; bits &= bits - 1) ++count;
    return count;
}

inline unsigned __brev(unsigned bits) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (bits >> i & 1) << (31 - i);
    return reversed;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
using std::sqrt;

template <class T>
T atomicAdd(T *to, T more) {
    const T before = *to;
    *to += more;
    return before;
}

template <class T>
T atomicOr(T *to, T bits) {
    const T before = *to;
    *to |= bits;
    return before;
}

template <class T>
T atomicMax(T *to, T other) {
    const T before = *to;
    *to = max(before, other);
    return before;
}

// ---------------------------------------------------------------- in place of arithmetic.cu

struct f32 {
    float value;
};

inline f32 operator+(f32 a, f32 b) { return {a.value + b.value}; }
inline f32 operator-(f32 a, f32 b) { return {a.value - b.value}; }
inline f32 operator*(f32 a, f32 b) { return {a.value * b.value}; }
inline f32 operator/(f32 a, f32 b) { return {a.value / b.value}; }
inline bool operator<(f32 a, f32 b) { return a.value < b.value; }
inline bool operator>(f32 a, f32 b) { return a.value > b.value; }
inline bool operator>=(f32 a, f32 b) { return a.value >= b.value; }
inline unsigned pattern(f32 a) {
    unsigned bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}
inline f32 number(unsigned bits) {
    f32 a;
    memcpy(&a, &bits, sizeof a);
    return a;
}
inline f32 root(f32 a) { return {std::sqrt(a.value)}; }
inline int nearest(f32 a) { return (int)nearbyintf(a.value); }
inline int truncated(f32 a) { return (int)a.value; }
inline double widen(f32 a) { return a.value; }
inline f32 narrow(double a) { return {(float)a}; }
