// Rows of bytes to floats.

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

// v := this thread's items of the ``real`` elements from ``start`` on of one row of a piece, scales times ``gain``;
// past them, rubbish. ONE: all items share a scale. Every load stands before the first use, so that they overlap.
template <bool ONE, int STRIDE, int COUNT>
__device__ __forceinline__ void read_items(f32 (&v)[COUNT], const byte *row, const Tile &tile, int64 start, int real,
                                           f32 gain) {
    const int base = item_base<STRIDE, COUNT>();
    const int64 element = start + base;
    const int down = 8 - BITS - BITS * (base % PER_BYTE);
    unsigned raw[COUNT];
    f32 scale[ONE ? 1 : COUNT];
    load_codes<STRIDE>(raw, row + tile.head + (element * BITS >> 3), base, real);
#pragma unroll
    for (int j = 0; j < (ONE ? 1 : COUNT); ++j) {
        const byte *at = row + 4 * ((element + j * STRIDE) >> tile.shift);
        scale[j] = !SCALED ? f32{1} : base + j * STRIDE < real ? load_float(at) : f32{0};
    }
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const unsigned code = BITS < 8 ? raw[j] >> down & MASK : raw[j];
        v[j] = from_code(code) * (scale[ONE ? 0 : j] * gain);
    }
}

template <int STRIDE, int COUNT>
__device__ __forceinline__ bool share_scale(const Tile &tile) {
    return !SCALED || STRIDE * COUNT <= (int64)1 << tile.shift;
}

template <int STRIDE, int COUNT>
__device__ __forceinline__ void read_row(f32 (&v)[COUNT], const byte *row, const Tile &tile) {
    if (share_scale<STRIDE, COUNT>(tile)) read_items<true, STRIDE>(v, row, tile, tile.start, tile.real, f32{1});
    else read_items<false, STRIDE>(v, row, tile, tile.start, tile.real, f32{1});
}

// c := the senders' rows, added in their order, then divided; zero past the elements.
template <int STRIDE, int COUNT>
__device__ __forceinline__ void read_mean(f32 (&c)[COUNT], const byte *rows, int64 stride, int senders,
                                          f32 divisor, const Tile &tile) {
    read_row<STRIDE>(c, rows + tile.column, tile);
    for (int s = 1; s < senders; ++s) {
        f32 v[COUNT];
        read_row<STRIDE>(v, rows + s * stride + tile.column, tile);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) c[j] = c[j] + v[j];
    }
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const bool real = item_base<STRIDE, COUNT>() + j * STRIDE < tile.real;
        c[j] = real ? c[j] / divisor : f32{0};
    }
}

// Every row of every piece into the buffer, or added to it.
extern "C" __global__ void __launch_bounds__(THREADS)
decode_rows(const byte *wire, int64 stride, float gain, int add, float *out, const int64 *columns, int lines,
            int tiles, int rows, int rank) {
    const Tile tile = this_tile<DECODE_TILE>(Table{columns, lines, tiles, rows, rank});
    const byte *row = wire + tile.row * stride + tile.column;
    f32 *to = (f32 *)out + tile.source;
    if (share_scale<32, DECODE_ITEMS>(tile)) {
        f32 v[DECODE_ITEMS];
        read_items<true, 32>(v, row, tile, tile.start, tile.real, f32{gain});
        if (add) add_floats<32>(v, to, tile.real);
        write_floats<32>(to, v, tile.real);
        return;
    }
    for (int at = 0; at < tile.real; at += TILE) {
        const int real = min(tile.real - at, TILE);
        f32 v[ITEMS];
        read_items<false, 32>(v, row, tile, tile.start + at, real, f32{gain});
        if (add) add_floats<32>(v, to + at, real);
        write_floats<32>(to + at, v, real);
    }
}

// The mean of the senders' versions of one row into the shard.
extern "C" __global__ void __launch_bounds__(THREADS)
decode_mean(const byte *wires, int64 stride, int senders, float *out, const int64 *columns, int lines, int tiles,
            int rows, int rank) {
    const Tile tile = this_tile<TILE>(Table{columns, lines, tiles, rows, rank});
    f32 c[ITEMS];
    read_mean<32>(c, wires, stride, senders, f32{(float)senders}, tile);
    write_floats<32>((f32 *)out + tile.kept, c, tile.real);
}
