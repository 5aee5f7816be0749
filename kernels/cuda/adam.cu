// The optimizers' passes over flat buffers, one launch each for all tensors: what ``adam`` computes, in the bits of
// ``cpu.adam``. One thread block per tile; a tile never reaches over the end of a tensor.

typedef long long int64;
typedef unsigned long long uint64;

constexpr int THREADS = 256, ITEMS = 8, TILE = THREADS * ITEMS;
constexpr unsigned ALL = 0xffffffffu, MAGNITUDE = 0x7fffffffu, INFINITE = 0x7f800000u, SIGN = ~MAGNITUDE;

// columns[c * segments + s], written by adam.py: tiles before, addresses of x and g (0: none), place in the buffers.
enum { TILES_BEFORE, X, G, FIRST, NUMEL };
enum { K, LOW, EPS, REACH }; // divisors[4 * s + d]

struct Part {
    int segment;
    int count;    // elements of the tile
    int64 at;     // its first one, in the flat buffers
    f32 *x;       // the same of the parameter
    const f32 *g; // and of the gradient; null: zero
    f32 k, low, eps, reach;
};

__device__ __forceinline__ Part this_part(const int64 *columns, int segments, const f32 *divisors) {
    int low = 0, high = segments; // the last segment with no more tiles before it
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (columns[middle] <= (int64)blockIdx.x) low = middle;
        else high = middle;
    }
    const int64 start = (blockIdx.x - columns[low]) * TILE;
    const f32 *g = (const f32 *)columns[G * segments + low];
    Part part;
    part.segment = low;
    part.count = (int)min(columns[NUMEL * segments + low] - start, (int64)TILE);
    part.at = columns[FIRST * segments + low] + start;
    part.x = (f32 *)columns[X * segments + low] + start;
    part.g = g ? g + start : nullptr;
    if (divisors) {
        part.k = divisors[4 * low + K];
        part.low = divisors[4 * low + LOW];
        part.eps = divisors[4 * low + EPS];
        part.reach = divisors[4 * low + REACH];
    }
    return part;
}

__device__ __forceinline__ bool finite(f32 a) { return (pattern(a) & MAGNITUDE) < INFINITE; }
__device__ __forceinline__ f32 magnitude(f32 a) { return number(pattern(a) & MAGNITUDE); }
__device__ __forceinline__ f32 more(f32 a, f32 b) { return a > b ? a : b; }

// At most ``bound``, at least its negative.
__device__ __forceinline__ f32 within(f32 a, f32 bound) {
    const f32 least = number(pattern(bound) ^ SIGN);
    const f32 below = a < bound ? a : bound;
    return below > least ? below : least;
}

// gain * g; no gradient is m times zero, as on the processor.
__device__ __forceinline__ f32 gradient(const Part &part, const f32 *m, f32 gain, int i) {
    return part.g ? gain * part.g[i] : f32{0} * m[part.at + i];
}

// Adds up over the block, and to the count of the segment. All threads call it.
__device__ __forceinline__ void count(uint64 *counts, int segment, int far) {
    for (int bit = 0; bit < 4; ++bit) { // a thread has at most ITEMS
        const int votes = __popc(__ballot_sync(ALL, far >> bit & 1));
        if (threadIdx.x % 32 == 0 && votes) atomicAdd(counts + segment, (uint64)votes << bit);
    }
}

#define EACH_ITEM(i, part)                                                                                             \
    _Pragma("unroll") for (int j_ = 0; j_ < ITEMS; ++j_) if (const int i = threadIdx.x + j_ * THREADS; i < (part).count)

extern "C" __global__ void __launch_bounds__(256)
scaled(const int64 *columns, int segments, f32 *out, float gain) {
    const Part part = this_part(columns, segments, nullptr);
    EACH_ITEM(i, part) out[part.at + i] = part.g ? f32{gain} * part.g[i] : f32{0};
}

extern "C" __global__ void __launch_bounds__(256)
apply_mean(const int64 *columns, int segments, const f32 *divisors, const f32 *p, const f32 *v, f32 *m, const f32 *a, float step, float decay,
    float momentum_scale, float most) {
    const Part part = this_part(columns, segments, divisors);
    EACH_ITEM(i, part) {
        const int64 at = part.at + i;
        const f32 mean = p[at], own = root(part.k * v[at]);
        const f32 momentum = f32{momentum_scale} * mean * (more(own, part.low) + part.eps);
        const f32 from = a ? a[at] : part.x[i];
        m[at] = own < part.low ? within(momentum, f32{most} * own) : momentum;
        part.x[i] = f32{decay} * from - f32{step} * mean;
    }
}

extern "C" __global__ void __launch_bounds__(256)
accumulate(const int64 *columns, int segments, const f32 *divisors, const f32 *m, const f32 *u, const f32 *v, f32 *out, uint64 *counts, float beta,
    float alpha, float gain, float decay) {
    const Part part = this_part(columns, segments, divisors);
    int far = 0;
    EACH_ITEM(i, part) {
        const int64 at = part.at + i;
        const f32 g = gradient(part, m, f32{gain}, i), own = root(part.k * v[at]);
        const f32 divisor = more(own, part.low) + part.eps;
        far += magnitude(g) > part.reach * (own + part.eps);
        const f32 cut = finite(g) ? within(g, part.reach * divisor) : g;
        f32 sum = f32{beta} * m[at] + f32{alpha} * cut;
        if (u) sum = sum + f32{decay} * u[at];
        out[at] = sum / divisor;
    }
    count(counts, part.segment, far);
}

extern "C" __global__ void __launch_bounds__(256)
local_step(const int64 *columns, int segments, const f32 *divisors, f32 *m, f32 *u, f32 *a, const f32 *v, uint64 *counts, int *bad, float beta,
    float alpha, float gain, float lr, float decay, float anchor_decay, int begins) {
    const Part part = this_part(columns, segments, divisors);
    int far = 0;
    EACH_ITEM(i, part) {
        const int64 at = part.at + i;
        const f32 before = m[at], g = gradient(part, m, f32{gain}, i), own = root(part.k * v[at]);
        const f32 divisor = more(own, part.low) + part.eps;
        far += magnitude(g) > part.reach * (own + part.eps);
        if (!finite(g)) *bad = 1; // whichever thread does it
        const f32 momentum =
            finite(g) ? f32{beta} * before + f32{alpha} * within(g, part.reach * divisor) : before;
        const f32 anchor = begins ? part.x[i] : a[at];
        const f32 moved = begins ? f32{lr} * momentum : f32{decay} * u[at] + f32{lr} * momentum;
        m[at] = momentum;
        if (begins) a[at] = anchor;
        u[at] = moved;
        part.x[i] = f32{anchor_decay} * anchor - moved / divisor;
    }
    count(counts, part.segment, far);
}

extern "C" __global__ void __launch_bounds__(256)
update_variance(const int64 *columns, int segments, f32 *m, f32 *v, float beta, float alpha, float weight, float rest, float unit) {
    const Part part = this_part(columns, segments, nullptr);
    EACH_ITEM(i, part) {
        const int64 at = part.at + i;
        if (!part.g) {
            m[at] = f32{beta} * m[at];
            v[at] = f32{rest} * v[at];
            continue;
        }
        const f32 g = part.g[i], squares = g * g * f32{unit}, old = v[at];
        const f32 between = f32{weight} < f32{0.5f} ? old + f32{weight} * (squares - old) : squares - f32{rest} * (squares - old);
        m[at] = f32{beta} * m[at] + f32{alpha} * g;
        v[at] = (pattern(old) & MAGNITUDE) == 0 ? squares : between;
    }
}

extern "C" __global__ void __launch_bounds__(256)
apply_step(const int64 *columns, int segments, const f32 *divisors, const f32 *m, const f32 *v, float step, float decay) {
    const Part part = this_part(columns, segments, divisors);
    EACH_ITEM(i, part) {
        const int64 at = part.at + i;
        const f32 divisor = more(root(part.k * v[at]), part.low) + part.eps;
        part.x[i] = f32{decay} * part.x[i] - f32{step} * (m[at] / divisor);
    }
}

// Sum of g^2 of each tile, in double, where the square of a float32 is exact.
extern "C" __global__ void __launch_bounds__(256)
square_sums(const int64 *columns, int segments, double *sums) {
    __shared__ double shared[THREADS];
    const Part part = this_part(columns, segments, nullptr);
    double sum = 0;
    EACH_ITEM(i, part) if (part.g) {
        const double g = widen(part.g[i]);
        sum += g * g;
    }
    shared[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = shared[0];
}
