// The exact block code where weights lie on the device: what ``cpu.exact`` computes, bit for bit. One thread block per
// block of numbers, which are unsigned integers. Each block's line of the table has five words, written by exact_blocks.py.

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned char byte;

constexpr int THREADS = 256, WARPS = THREADS / 32, ITEMS = 8, TILE = THREADS * ITEMS;
constexpr unsigned ALL = 0xffffffffu;
constexpr int SPARSE = 1, HEAD = 7, LONGEST = 24, GAP_BITS = 20; // exact_format

enum { OLD, NEW, NUMEL, CODE, SEED, WORDS };

__device__ __forceinline__ unsigned element(const void *numbers, int bytes, int64 at) {
    if (bytes == 1) return ((const byte *)numbers)[at];
    if (bytes == 2) return ((const unsigned short *)numbers)[at];
    return ((const unsigned *)numbers)[at];
}

__device__ __forceinline__ void put_element(void *numbers, int bytes, int64 at, unsigned value) {
    if (bytes == 1) ((byte *)numbers)[at] = (byte)value;
    else if (bytes == 2) ((unsigned short *)numbers)[at] = (unsigned short)value;
    else ((unsigned *)numbers)[at] = value;
}

// new - old modulo 2^bits, signed.
__device__ __forceinline__ int difference(unsigned before, unsigned after, int bytes) {
    const int unused = 32 - 8 * bytes;
    return (int)((after - before) << unused) >> unused;
}

__device__ __forceinline__ unsigned magnitude(int d) { return d < 0 ? 0u - (unsigned)d : (unsigned)d; }
__device__ __forceinline__ int log2_of(unsigned value) { return 31 - __clz((int)value); }

// ---------------------------------------------------------------- encode

struct Orders {
    int k, m;
};

// The law's parameters, of the sum of all gaps, the count of changes and how many have each logarithm.
__device__ Orders orders(int64 gaps, int64 count, const unsigned *logs) {
    Orders found = {0, 0};
    while (count << found.k < gaps * 69 / 100) ++found.k;
    int64 least = -1;
    for (int order = 0; order < 32; ++order) {
        int64 bits = 0;
        for (int log = 0; log < 32; ++log) bits += (int64)logs[log] * (order + 1 + 2 * max(log - order, 0));
        if (least < 0 || bits < least) {
            found.m = order;
            least = bits;
        }
    }
    return found;
}

// At most 32 bits of a code, which begins with zeros.
__device__ __forceinline__ void put(unsigned *code, int64 bit, unsigned value, int length) {
    if (!length) return;
    const int inside = (int)(bit & 31);
    atomicOr(code + (bit >> 5), value << inside);
    if (inside + length > 32) atomicOr(code + (bit >> 5) + 1, value >> (32 - inside));
}

// One change: its bits, which are written where there is a code.
__device__ int change(unsigned *code, int64 bit, unsigned gap, int d, Orders by) {
    const unsigned quotient = gap >> by.k, value = magnitude(d) - 1 + (1u << by.m);
    const bool escaped = quotient >= (unsigned)LONGEST;
    const int zeros = escaped ? LONGEST : (int)quotient, rest = escaped ? GAP_BITS : by.k;
    const int log = log2_of(value), more = log - by.m;
    if (code) {
        put(code, bit, 1u << zeros, zeros + 1);
        put(code, bit + zeros + 1, gap & ((1u << rest) - 1), rest);
        bit += zeros + 1 + rest;
        put(code, bit, d < 0, 1);
        put(code, bit + 1, 1u << more, more + 1);
        put(code, bit + 2 + more, value & ((1u << log) - 1), log);
    }
    return zeros + 1 + rest + 2 + more + log;
}

// sizes[block]: bytes of the sparse form; 0 where nothing changed, -1 where it would have more than ``most``.
extern "C" __global__ void __launch_bounds__(256)
encode_blocks(const int64 *table, int bytes, int64 most, int64 *sizes) {
    __shared__ unsigned logs[32], bits_before[WARPS], votes_of[WARPS];
    __shared__ int count, last, last_of[THREADS];
    __shared__ Orders by;
    const int64 *line = table + (int64)blockIdx.x * WORDS;
    const void *old = (const void *)line[OLD], *now = (const void *)line[NEW];
    const int64 numel = line[NUMEL];
    unsigned *code = (unsigned *)line[CODE];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (thread < 32) logs[thread] = 0;
    if (thread == 0) count = 0, last = -1;
    __syncthreads();
    for (int64 at = thread; at < numel; at += THREADS) {
        const unsigned before = element(old, bytes, at), after = element(now, bytes, at);
        if (before == after) continue;
        atomicAdd(logs + log2_of(magnitude(difference(before, after, bytes))), 1u);
        atomicAdd(&count, 1);
        atomicMax(&last, (int)at);
    }
    __syncthreads();
    if (thread == 0) {
        sizes[blockIdx.x] = 0;
        if (count) by = orders((int64)last + 1 - count, count, logs);
    }
    __syncthreads();
    if (!count) return;
    int64 bit = 8 * HEAD; // where the tile's code begins
    int previous = -1;    // the last change before the tile
    for (int64 first = 0; first < numel; first += TILE) {
        unsigned before[ITEMS], after[ITEMS];
        int mine = -1; // this thread's last change
        const int64 own = first + thread * ITEMS;
        for (int i = 0; i < ITEMS; ++i) {
            before[i] = after[i] = 0;
            if (own + i >= numel) continue;
            before[i] = element(old, bytes, own + i);
            after[i] = element(now, bytes, own + i);
            if (before[i] != after[i]) mine = (int)own + i;
        }
        const unsigned votes = __ballot_sync(ALL, mine >= 0), lower = votes & ((1u << lane) - 1);
        last_of[thread] = mine;
        votes_of[warp] = votes; // the same from each lane
        __syncthreads();
        int behind = previous, end = previous; // the last change before this thread's, and the tile's
        for (int w = 0; w < WARPS; ++w) {
            if (!votes_of[w]) continue;
            end = last_of[32 * w + log2_of(votes_of[w])];
            if (w < warp) behind = end;
        }
        if (lower) behind = last_of[32 * warp + log2_of(lower)];
        unsigned length = 0;
        for (int i = 0, at = behind; i < ITEMS; ++i)
            if (before[i] != after[i]) {
                length += change(nullptr, 0, (unsigned)((int)own + i - at - 1), difference(before[i], after[i], bytes), by);
                at = (int)own + i;
            }
        unsigned upto = length; // of this lane and those below
        for (int step = 1; step < 32; step *= 2) {
            const unsigned lower = __shfl_up_sync(ALL, upto, step);
            if (lane >= step) upto += lower;
        }
        if (lane == 31) bits_before[warp] = upto;
        __syncthreads();
        unsigned total = 0, below = 0;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) below += bits_before[w];
            total += bits_before[w];
        }
        if (bit + total > 8 * most) {
            if (thread == 0) sizes[blockIdx.x] = -1;
            return; // all threads do
        }
        int64 place = bit + below + upto - length;
        for (int i = 0, at = behind; i < ITEMS; ++i)
            if (before[i] != after[i]) {
                place += change(code, place, (unsigned)((int)own + i - at - 1), difference(before[i], after[i], bytes), by);
                at = (int)own + i;
            }
        bit += total;
        previous = end;
        __syncthreads();
    }
    if (thread == 0) {
        put(code, 0, SPARSE | by.k << 8 | by.m << 16, 24);
        put(code, 24, (unsigned)count, 32);
        sizes[blockIdx.x] = (bit + 7) / 8;
    }
}

// ---------------------------------------------------------------- decode

// At least 57 bits of a code, the first one lowest; zeros follow its end.
__device__ uint64 bits_from(const byte *code, int64 size, int64 bit) {
    uint64 word = 0;
    for (int64 at = bit >> 3, i = 0; i < 8 && at + i < size; ++i) word |= (uint64)code[at + i] << (8 * i);
    return word >> (bit & 7);
}

__device__ __forceinline__ int zeros_of(uint64 word) { return word ? __ffsll((int64)word) - 1 : 64; }

// Add the differences of a sparse form; true if it is one of the block. Nothing is written without ``apply``.
__device__ bool sparse(const byte *code, int64 size, void *numbers, int64 numel, int bytes, bool apply) {
    if (size < HEAD || code[0] != SPARSE) return false;
    const int k = code[1], m = code[2];
    const int64 count = (int64)(bits_from(code, size, 24) & ALL), most = (int64)1 << (8 * bytes - 1);
    if (k > GAP_BITS || m > 31 || count < 1 || count > numel) return false;
    int64 bit = 8 * HEAD, at = -1;
    for (int64 j = 0; j < count; ++j) {
        uint64 word = bits_from(code, size, bit);
        const int quotient = zeros_of(word);
        if (quotient > LONGEST) return false;
        const int rest = quotient == LONGEST ? GAP_BITS : k;
        const int64 low = (int64)(word >> (quotient + 1) & (((uint64)1 << rest) - 1));
        at += 1 + (quotient == LONGEST ? low : (int64)quotient << k | low);
        bit += quotient + 1 + rest;
        if (at >= numel) return false;
        word = bits_from(code, size, bit);
        const int zeros = zeros_of(word >> 1), log = m + zeros;
        if (zeros > 32 || log > 32) return false;
        bit += 2 + zeros;
        const uint64 value = (uint64)1 << log | (bits_from(code, size, bit) & (((uint64)1 << log) - 1));
        bit += log;
        const int64 change = (int64)value - ((int64)1 << m) + 1;
        if (change > most) return false;
        if (apply) {
            const unsigned d = word & 1 ? 0u - (unsigned)change : (unsigned)change;
            put_element(numbers, bytes, at, element(numbers, bytes, at) + d);
        }
    }
    return (bit + 7) >> 3 == size;
}

// Bits follow one another: a thread reads a block's, and as many do so as there are blocks. bad[block]: 1 if the code is
// none of such a block, which is then left as it was. SEED has the code's bytes.
extern "C" __global__ void __launch_bounds__(32)
decode_blocks(const int64 *table, int bytes, int *bad) {
    const int64 *line = table + (int64)blockIdx.x * WORDS;
    const byte *code = (const byte *)line[CODE];
    void *numbers = (void *)line[OLD];
    if (threadIdx.x) return;
    bad[blockIdx.x] = !sparse(code, line[SEED], numbers, line[NUMEL], bytes, false);
    if (!bad[blockIdx.x]) sparse(code, line[SEED], numbers, line[NUMEL], bytes, true);
}

// ---------------------------------------------------------------- hash

constexpr int CHUNK = 1024, STRIPE = 64, LANES = 8, CHUNKS = THREADS / LANES; // of xxh3; chunks that are summed at once
constexpr uint64 PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full, PRIME64_3 = 0x165667B19E3779F9ull,
                 PRIME64_4 = 0x85EBCA77C2B2AE63ull, PRIME64_5 = 0x27D4EB2F165667C5ull;

// Eight bytes of the secret that the seed makes of xxh3's own, which hash_blocks has in shared memory.
__device__ __forceinline__ uint64 secret_at(const byte *secret, int at) {
    uint64 word = 0;
    for (int i = 0; i < 8; ++i) word |= (uint64)secret[at + i] << (8 * i);
    return word;
}

// What a stripe adds to lane ``i``: the neighbour's word, and a product of its own.
__device__ __forceinline__ uint64 stripe_sum(const uint64 *stripe, const byte *secret, int i) {
    const uint64 key = stripe[i] ^ secret_at(secret, 8 * i);
    return stripe[i ^ 1] + (key & ALL) * (key >> 32);
}

__device__ uint64 folded(uint64 a, uint64 b) { // the halves of a product of 128 bits, one xor the other
    const uint64 a0 = a & ALL, a1 = a >> 32, b0 = b & ALL, b1 = b >> 32;
    const uint64 low = a0 * b0, cross = (low >> 32) + (a1 * b0 & ALL) + a0 * b1;
    const uint64 high = (a1 * b0 >> 32) + (cross >> 32) + a1 * b1;
    return (cross << 32 | (low & ALL)) ^ high;
}

// hashes[block] := xxh3 of 64 bits of the new numbers, by the line's seed; they begin at a multiple of 8 bytes, and have
// more than CHUNK. ``words``: xxh3's secret.
extern "C" __global__ void __launch_bounds__(256)
hash_blocks(const int64 *table, int bytes, const int64 *words, uint64 *hashes) {
    __shared__ byte secret[192];
    __shared__ uint64 sums[CHUNKS][LANES], lanes[LANES];
    const int64 *line = table + (int64)blockIdx.x * WORDS;
    const byte *data = (const byte *)line[NEW];
    const int64 size = line[NUMEL] * bytes, whole = (size - 1) / CHUNK;
    const int thread = threadIdx.x, lane = thread % LANES;
    if (thread < 24) {
        const uint64 word = (uint64)words[thread] + (thread % 2 ? 0 - (uint64)line[SEED] : (uint64)line[SEED]);
        for (int i = 0; i < 8; ++i) secret[8 * thread + i] = (byte)(word >> (8 * i));
    }
    const uint64 start[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    uint64 sum = start[lane]; // of threads below LANES: the state of their lanes
    for (int64 first = 0; first <= whole; first += CHUNKS) {
        __syncthreads();
        const int64 chunk = first + thread / LANES;
        uint64 own = 0;
        if (chunk <= whole) {
            const int stripes = chunk < whole ? CHUNK / STRIPE : (int)((size - 1 - whole * CHUNK) / STRIPE);
            for (int s = 0; s < stripes; ++s)
                own += stripe_sum((const uint64 *)(data + chunk * CHUNK + s * STRIPE), secret + 8 * s, lane);
        }
        sums[thread / LANES][lane] = own;
        __syncthreads();
        if (thread < LANES)
            for (int c = 0; c < CHUNKS && first + c <= whole; ++c) {
                sum += sums[c][lane];
                if (first + c == whole) break; // the last one is not whole
                sum = (sum ^ sum >> 47 ^ secret_at(secret, 128 + 8 * lane)) * PRIME32_1;
            }
    }
    if (thread < LANES) {
        uint64 end[LANES]; // the last stripe may begin anywhere
        for (int i = 0; i < LANES; ++i) end[i] = secret_at(data + size - STRIPE, 8 * i);
        lanes[lane] = sum + stripe_sum(end, secret + 121, lane);
    }
    __syncthreads();
    if (thread) return;
    uint64 hash = (uint64)size * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        hash += folded(lanes[i] ^ secret_at(secret, 11 + 8 * i), lanes[i + 1] ^ secret_at(secret, 19 + 8 * i));
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    hashes[blockIdx.x] = hash ^ hash >> 32;
}
