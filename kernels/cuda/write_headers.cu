// Floats to rows of bytes where each block has a header. A thread holds eight neighbours, all of one block of the
// codec; the threads of a block are its team, 1 to 256 of them.

struct Team {
    int threads, rank; // how many, and which this one is
    int meetings;      // so far: their parity tells which half of shared memory nobody reads any more
};

struct Sum {
    template <class T>
    __device__ T operator()(T a, T b) const { return a + b; }
};

struct Max {
    template <class T>
    __device__ T operator()(T a, T b) const { return max(a, b); }
};

// v[i] := of the whole team. Every thread of the tile calls it.
template <class Meet, int COUNT, class T>
__device__ __forceinline__ void unite(T (&v)[COUNT], Team &team) {
    constexpr Meet meet{};
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2)
        for (int i = 0; i < COUNT && offset < team.threads; ++i) v[i] = meet(v[i], __shfl_xor_sync(ALL, v[i], offset));
    if (team.threads <= 32) return;
    __shared__ T warps[2][THREADS / 32][COUNT];
    T(*all)[COUNT] = warps[team.meetings++ & 1];
    const int warp = threadIdx.x / 32, many = team.threads / 32, first = warp & -many;
    for (int i = 0; i < COUNT; ++i) all[warp][i] = v[i];
    __syncthreads();
    for (int i = 0; i < COUNT; ++i) {
        v[i] = all[first][i];
        for (int w = 1; w < many; ++w) v[i] = meet(v[i], all[first + w][i]);
    }
}

// What the earlier threads of the team have; ``total`` := what all have. Called once per tile.
__device__ __forceinline__ unsigned sum_before(unsigned mine, unsigned &total, const Team &team) {
    unsigned before = 0;
    total = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned other = __shfl_xor_sync(ALL, total, offset);
        if (offset >= team.threads) continue;
        if (threadIdx.x & offset) before += other;
        total += other;
    }
    if (team.threads <= 32) return before;
    __shared__ unsigned all[THREADS / 32];
    const int warp = threadIdx.x / 32, many = team.threads / 32, first = warp & -many;
    all[warp] = total;
    __syncthreads();
    total = 0;
    for (int w = first; w < first + many; ++w) {
        if (w < warp) before += all[w];
        total += all[w];
    }
    return before;
}

constexpr unsigned NOT_A_NUMBER = 0x7fc00000u;

__device__ __forceinline__ void store_short(byte *at, unsigned value) {
    at[0] = (byte)value, at[1] = (byte)(value >> 8);
}

__device__ __forceinline__ bool all_finite(const f32 (&c)[ITEMS], Team &team) {
    unsigned peak[1] = {0};
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) peak[0] = max(peak[0], pattern(magnitude(c[j])));
    unite<Max>(peak, team);
    return peak[0] < INFINITE;
}

// ---------------------------------------------------------------- any number of bits

// Patterns that compare like the numbers, both zeros alike.
__device__ __forceinline__ unsigned order(f32 a) {
    const unsigned bits = pattern(a + f32{0});
    return bits > MAGNITUDE ? ~bits : bits | ~MAGNITUDE;
}
__device__ __forceinline__ f32 ordered(unsigned order) {
    return number(order > MAGNITUDE ? order & MAGNITUDE : ~order);
}

// Where the least and the greatest element are, the first of equals; both 0 in a block that is not sound.
struct Ends {
    bool sound; // there are elements, and all are finite
    int least, greatest;

    __device__ bool has(int place) const { return place == least || place == greatest; }
};

__device__ __forceinline__ Ends find_ends(const f32 (&c)[ITEMS], int first, int real, Team &team) {
    uint64 ends[2] = {0, 0}; // order above place, each such that the largest is sought
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (first + j >= real) break;
        const unsigned place = 0xffff - (first + j);
        ends[0] = max(ends[0], (uint64)~order(c[j]) << 16 | place);
        ends[1] = max(ends[1], (uint64)order(c[j]) << 16 | place);
    }
    unite<Max>(ends, team);
    const bool finite = max(ends[0], ends[1]) >> 16 < order(number(INFINITE));
    if (!finite || real == 0) return Ends{false, 0, 0};
    return Ends{true, 0xffff - (int)(ends[0] & 0xffff), 0xffff - (int)(ends[1] & 0xffff)};
}

// Eight codes of every thread, in one word, to the codes of the tile.
__device__ __forceinline__ void store_words(uint64 word, int bits, const Job &job, const Tile &tile) {
    __shared__ byte packed[TILE];
    for (int i = 0; i < bits; ++i) packed[threadIdx.x * bits + i] = (byte)(word >> 8 * (bits - 1 - i));
    __syncthreads();
    byte *codes = job.row(tile) + tile.headers + tile.start / 8 * bits;
    for (int i = threadIdx.x; i < tile.padded / 8 * bits; i += THREADS) codes[i] = packed[i];
}

struct Grid {
    f32 step, inverse, zero;
};

// Over the range of the elements between the ends, and 0; ``shift`` of a step lower if it is shifted.
__device__ __forceinline__ Grid find_grid(const f32 (&c)[ITEMS], int first, int real, const Ends &ends, int top,
                                          bool shifted, f32 shift, Team &team) {
    unsigned range[2] = {~order(f32{0}), order(f32{0})}; // the least upside down again
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (first + j >= real || ends.has(first + j)) continue;
        range[0] = max(range[0], ~order(c[j]));
        range[1] = max(range[1], order(c[j]));
    }
    unite<Max>(range, team);
    const f32 low = ordered(~range[0]), span = ordered(range[1]) - low, steps = {(float)(top - shifted)};
    if (real == 0) return Grid{};
    if (!ends.sound || !finite(span)) return Grid{number(NOT_A_NUMBER), f32{0}, f32{0}};
    if (span < number(TINY)) return Grid{};
    const f32 inverse = steps / span, zero = f32{0} - low * inverse;
    return Grid{span / steps, inverse, shifted ? zero + shift : f32{(float)nearest(zero)}};
}

__device__ __forceinline__ unsigned to_grid(f32 c, const Grid &grid, int top, bool shifted) {
    const f32 at = c * grid.inverse;
    return min(max(shifted ? nearest(at + grid.zero) : nearest(at) + nearest(grid.zero), 0), top);
}

// c := what stays behind.
__device__ __forceinline__ void encode_grid(f32 (&c)[ITEMS], const Job &job, const Tile &tile, const Block &block,
                                            Team &team) {
    const int bits = tile.parameter & ~SHIFTED, top = (1 << bits) - 1, first = team.rank * ITEMS;
    const bool shifted = tile.parameter & SHIFTED;
    const Ends ends = find_ends(c, first, block.real, team);
    const f32 shift = uniform((unsigned)tile.at + block.start, job.key ^ tile.hash);
    const Grid grid = find_grid(c, first, block.real, ends, top, shifted, shift, team);
    byte *header = job.row(tile) + block.header;
    if (team.rank == 0 && block.span) {
        store_float(header, grid.step);
        store_float(header + 4, grid.zero);
        if (!ends.sound) store_float(header + 8, f32{0}), store_float(header + 12, f32{0});
        store_short(header + 16, ends.least);
        store_short(header + 18, ends.greatest);
        if (!finite(grid.step)) *job.flag = 1;
    }
    uint64 word = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const int place = first + j;
        const bool end = ends.has(place), coded = ends.sound && place < block.real && !end;
        const unsigned code = coded ? to_grid(c[j], grid, top, shifted) : 0;
        if (ends.sound && place == ends.least) store_float(header + 8, c[j]);
        if (ends.sound && place == ends.greatest) store_float(header + 12, c[j]);
        if (!end) c[j] = c[j] - (f32{(float)code} - grid.zero) * grid.step;
        else if (ends.sound) c[j] = f32{0};
        word = word << bits | code;
    }
    store_words(word, bits, job, tile);
}

// ---------------------------------------------------------------- powers of four

// c := what stays behind.
__device__ __forceinline__ void encode_powers(f32 (&c)[ITEMS], const Job &job, const Tile &tile, const Block &block,
                                              Team &team) {
    unsigned peak[1] = {0};
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) peak[0] = max(peak[0], pattern(magnitude(c[j])));
    unite<Max>(peak, team);
    const Scale s = peak_scale(peak[0]); // of top 1
    if (team.rank == 0 && block.span) store_float(job.row(tile) + block.header, s.scale);
    if (!finite(s.scale)) *job.flag = 1;
    const bool coded = pattern(s.inverse) != 0;
    const f32 half = s.scale * f32{1.0f / 2}, eighth = s.scale * f32{1.0f / 8};
    unsigned word = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const f32 size = magnitude(c[j]);
        const unsigned level = (size >= half) + (size >= eighth) + (size > f32{0});
        const unsigned code = coded ? level | (c[j] < f32{0} ? 4 : 0) : 0;
        c[j] = c[j] - power(code) * s.scale;
        word = word << 3 | code;
    }
    store_words(word, 3, job, tile);
}

// ---------------------------------------------------------------- sparse

// The pattern of the count-th largest magnitude, bit by bit.
__device__ __forceinline__ unsigned threshold_of(const unsigned (&size)[ITEMS], unsigned count, Team &team) {
    unsigned threshold = 0;
#pragma unroll 1
    for (unsigned bit = 1u << 30; bit; bit >>= 1) {
        unsigned reach[1] = {0};
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) reach[0] += size[j] >= (threshold | bit);
        unite<Sum>(reach, team);
        if (reach[0] >= count) threshold |= bit;
    }
    return threshold;
}

// c := what stays behind. Of equal magnitudes the first are sent, until there are ``count``.
__device__ __forceinline__ void encode_top(f32 (&c)[ITEMS], const Job &job, const Tile &tile, const Block &block,
                                           Team &team) {
    const bool sound = all_finite(c, team);
    const int slots = slots_of(tile.parameter, block.span, tile.shift), count = sound ? min(slots, block.real) : 0;
    byte *values = job.row(tile) + block.header, *places = values + 4 * slots;
    unsigned size[ITEMS], mine = 0, total; // counts of larger ones above those of equals
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) size[j] = pattern(magnitude(c[j]));
    const unsigned threshold = threshold_of(size, count, team);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) mine += size[j] > threshold ? 1 << 16 : size[j] == threshold;
    const unsigned before = sum_before(mine, total, team);
    int larger = before >> 16, equal = before & 0xffff;
    const int wanted = count - (int)(total >> 16); // of the equals
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const bool more = size[j] > threshold, tie = size[j] == threshold;
        if (sound && (more || (tie && equal < wanted))) {
            const int slot = larger + min(equal, wanted);
            const f32 value = c[j] + f32{0};
            store_float(values + 4 * slot, value);
            store_short(places + 2 * slot, team.rank * ITEMS + j);
            c[j] = c[j] - value;
        }
        larger += more, equal += tie;
    }
    for (int s = count + team.rank; s < slots; s += team.threads) {
        store_float(values + 4 * s, number(!sound && s == 0 ? NOT_A_NUMBER : 0));
        store_short(places + 2 * s, block.real ? 0xffff : 0);
    }
    if (!sound) *job.flag = 1;
}

// c := what stays behind.
__device__ __forceinline__ void encode_random(f32 (&c)[ITEMS], const Job &job, const Tile &tile, const Block &block,
                                              Team &team) {
    const bool sound = all_finite(c, team);
    const int length = tile.parameter;
    unsigned seed = (job.key ^ tile.hash) + ((unsigned)tile.at + block.start) * 0x9e3779b1u;
    if (!sound) seed = NOT_A_NUMBER;
    byte *header = job.row(tile) + block.header;
    if (team.rank == 0 && block.span) store_float(header, number(block.real ? seed : 0));
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const int place = team.rank * ITEMS + j, run = place / length, start = run * length;
        if (place >= block.span) continue;
        f32 value = {0};
        if (place < block.real) {
            if (place != random_place(run, length, block.real, seed)) continue;
            if (sound) value = c[j] + f32{0};
            if (KIND == UNBIASED) value = value * f32{(float)min(length, block.real - start)};
        } else if (place != start) continue;
        store_float(header + 4 + 4 * run, value);
        c[j] = c[j] - value;
        if (!sound || !finite(value)) *job.flag = 1;
    }
}

// ---------------------------------------------------------------- kernels

template <bool MEAN>
__device__ __forceinline__ void encode_tile(const Job &job) {
    const Tile tile = this_tile<TILE>(job.table);
    if (job.new_scale && tile.start == 0 && threadIdx.x == 0) job.new_scale[tile.scale] = f32{0};
    f32 c[ITEMS];
    compensate<MEAN, 1>(c, job, tile);
    const Block block = this_block(tile, item_base<1, ITEMS>());
    Team team = {1 << (tile.shift - 3), 0, 0};
    team.rank = threadIdx.x & (team.threads - 1);
    if (KIND == ANY_BITS) encode_grid(c, job, tile, block, team);
    else if (KIND == LOG) encode_powers(c, job, tile, block, team);
    else if (KIND == TOP) encode_top(c, job, tile, block, team);
    else encode_random(c, job, tile, block, team);
    if (job.new_residual && tile.feedback) write_floats<1>(job.new_residual + tile.residual_at, c, tile.real);
}

extern "C" __global__ void __launch_bounds__(THREADS) encode_blocks(PARAMETERS) { encode_tile<false>(JOB); }

extern "C" __global__ void __launch_bounds__(THREADS) serve_blocks(PARAMETERS) { encode_tile<true>(JOB); }
