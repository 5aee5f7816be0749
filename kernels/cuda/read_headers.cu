// Rows of bytes to floats where each block has a header: any number of bits, top-k, one at random, powers of
// four. Mirrors "blocks with a header" in reference.py.

constexpr bool CODED = KIND == ANY_BITS || KIND == LOG; // a code per element behind the headers
constexpr int APART = CODED ? 1 : 32; // STRIDE of decoding: eight codes of b bits are b bytes, one thread's
constexpr int SHIFTED = 16;           // in the parameter of ANY_BITS
typedef unsigned long long uint64;

// A block of the codec; a tile holds whole ones, but for the row's last.
struct Block {
    int start;      // first element, in the tile
    int real, span; // how many elements exist, without and with padding; past the row none
    int64 header;   // bytes of the row before its header
};

// How many values a header has room for.
__device__ __forceinline__ int slots_of(int parameter, int span, int shift) {
    if (KIND == LOG) return 0;
    return KIND == TOP ? (span * parameter + (1 << shift) - 1) >> shift : (span + parameter - 1) / parameter;
}

__device__ __forceinline__ Block this_block(const Tile &tile, int element) {
    const int size = 1 << tile.shift, slots = slots_of(tile.parameter, size, tile.shift);
    const int bytes = KIND == ANY_BITS ? 20 : KIND == TOP ? 6 * slots : 4 + 4 * slots;
    Block block;
    block.start = element >> tile.shift << tile.shift;
    block.real = max(min(tile.real - block.start, size), 0);
    block.span = max(min(tile.padded - block.start, size), 0);
    block.header = ((tile.start + block.start) >> tile.shift) * bytes;
    return block;
}

__device__ __forceinline__ unsigned load_short(const byte *at) { return at[0] | (unsigned)at[1] << 8; }

// Which element of its block run ``run`` of so many elements sends.
__device__ __forceinline__ int random_place(int run, int length, int real, unsigned seed) {
    const int start = run * length;
    const f32 draw = uniform(start, seed) * f32{(float)min(length, real - start)};
    return start + truncated(draw);
}

// ---------------------------------------------------------------- one row

// Eight neighbours per thread, all of one block.
__device__ __forceinline__ void read_grid(f32 (&v)[ITEMS], const byte *row, const Tile &tile, f32 gain) {
    const int element = item_base<1, ITEMS>(), bits = tile.parameter & ~SHIFTED;
    if (element >= tile.real) return;
    const Block block = this_block(tile, element);
    const byte *header = row + block.header, *codes = row + tile.headers + (tile.start + element) / 8 * bits;
    uint64 word = 0;
    for (int i = 0; i < bits; ++i) word = word << 8 | codes[i];
    const f32 step = load_float(header) * gain, zero = load_float(header + 4);
    const int least = load_short(header + 16), greatest = load_short(header + 18);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const int place = element + j - block.start;
        const unsigned code = (unsigned)(word >> bits * (ITEMS - 1 - j)) & ((1u << bits) - 1);
        v[j] = (f32{(float)code} - zero) * step;
        if (place == least) v[j] = load_float(header + 8) * gain;
        if (place == greatest) v[j] = load_float(header + 12) * gain;
    }
}

// What a code of LOG means, times its block's scale.
__device__ __forceinline__ f32 power(unsigned code) {
    const unsigned level = code & 3; // 1/16, 1/4, 1
    return number((level ? (121u + 2 * level) << 23 : 0) | (code & 4) << 29);
}

// Eight neighbours per thread, all of one block.
__device__ __forceinline__ void read_powers(f32 (&v)[ITEMS], const byte *row, const Tile &tile, f32 gain) {
    const int element = item_base<1, ITEMS>();
    if (element >= tile.real) return;
    const byte *codes = row + tile.headers + (tile.start + element) / 8 * 3;
    const unsigned word = codes[0] << 16 | codes[1] << 8 | codes[2];
    const f32 scale = load_float(row + this_block(tile, element).header) * gain;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) v[j] = power(word >> 3 * (ITEMS - 1 - j) & 7) * scale;
}

// The threads that would hold a block with STRIDE = 1 put its values where they belong, in shared memory.
template <int STRIDE>
__device__ __forceinline__ void read_sparse(f32 (&v)[ITEMS], const byte *row, const Tile &tile, f32 gain, f32 absent) {
    __shared__ f32 values[TILE + TILE / 32];
    const int base = item_base<STRIDE, ITEMS>();
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) values[spaced(base + j * STRIDE)] = absent;
    __syncthreads();
    const Block block = this_block(tile, threadIdx.x * ITEMS);
    const byte *header = row + block.header, *from = KIND == TOP ? header : header + 4;
    const int slots = slots_of(tile.parameter, KIND == TOP ? block.span : block.real, tile.shift);
    const unsigned seed = slots && KIND != TOP ? pattern(load_float(header)) : 0;
    const int team = 1 << (tile.shift - 3);
    for (int s = threadIdx.x & (team - 1); s < slots; s += team) {
        const int place = KIND == TOP ? load_short(header + 4 * slots + 2 * s)
                                      : random_place(s, tile.parameter, block.real, seed);
        if (place < block.real) values[spaced(block.start + place)] = load_float(from + 4 * s) * gain;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) v[j] = values[spaced(base + j * STRIDE)]; // its own: another row may follow at once
}

// ---------------------------------------------------------------- as in read_codes.cu

template <int STRIDE, int COUNT>
__device__ __forceinline__ bool at_once(const Tile &) {
    return true;
}

// v := this thread's items of the tile, times ``gain``, ``absent`` where none is sent; past its elements, rubbish.
template <bool ONE, int STRIDE>
__device__ __forceinline__ void read_items(f32 (&v)[ITEMS], const byte *row, const Tile &tile, int, f32 gain,
                                           f32 absent) {
    if constexpr (KIND == ANY_BITS) read_grid(v, row, tile, gain);
    else if constexpr (KIND == LOG) read_powers(v, row, tile, gain);
    else read_sparse<STRIDE>(v, row, tile, gain, absent);
}
