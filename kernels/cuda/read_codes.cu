// Rows of bytes to floats: one code per element, times a scale.

constexpr int APART = 32; // STRIDE of decoding

// raw[j] := the byte or word with the code of item j; ``codes`` points at that of item 0.
template <int STRIDE, int COUNT>
__device__ __forceinline__ void load_codes(unsigned (&raw)[COUNT], const byte *codes, int base, int real) {
    if (BITS == 32 && ((size_t)codes & 3) == 0) {
        const unsigned *words = (const unsigned *)codes;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) raw[j] = base + j * STRIDE < real ? words[j * STRIDE] : 0;
    } else if (BITS == 16 && ((size_t)codes & 1) == 0) {
        const unsigned short *halves = (const unsigned short *)codes;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) raw[j] = base + j * STRIDE < real ? halves[j * STRIDE] : 0;
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            raw[j] = 0;
#pragma unroll
            for (int i = 0; i < (BITS + 7) / 8; ++i)
                if (base + j * STRIDE < real) raw[j] |= (unsigned)codes[j * STRIDE * BITS / 8 + i] << (8 * i);
        }
    }
}

template <int STRIDE, int COUNT>
__device__ __forceinline__ bool at_once(const Tile &tile) {
    return !SCALED || STRIDE * COUNT <= (int64)1 << tile.shift;
}

// v := this thread's items of those from ``at`` on of the tile, scales times ``gain``; past its elements, rubbish.
// ONE: all items share a scale. Every load stands before the first use, so that they overlap.
template <bool ONE, int STRIDE, int COUNT>
__device__ __forceinline__ void read_items(f32 (&v)[COUNT], const byte *row, const Tile &tile, int at, f32 gain, f32) {
    const int base = item_base<STRIDE, COUNT>(), real = tile.real - at;
    const int64 element = tile.start + at + base;
    const int down = 8 - BITS - BITS * (base % PER_BYTE);
    unsigned raw[COUNT];
    f32 scale[ONE ? 1 : COUNT];
    load_codes<STRIDE>(raw, row + tile.headers + (element * BITS >> 3), base, real);
#pragma unroll
    for (int j = 0; j < (ONE ? 1 : COUNT); ++j) {
        const byte *from = row + 4 * ((element + j * STRIDE) >> tile.shift);
        scale[j] = !SCALED ? f32{1} : base + j * STRIDE < real ? load_float(from) : f32{0};
    }
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const unsigned code = BITS < 8 ? raw[j] >> down & MASK : raw[j];
        v[j] = from_code(code) * (scale[ONE ? 0 : j] * gain);
    }
}
