// Rows, or the mean of rows, to floats. What one row's bytes mean is in read_codes.cu or read_headers.cu.

template <int STRIDE, int COUNT>
__device__ __forceinline__ void read_row(f32 (&v)[COUNT], const byte *row, const Tile &tile) {
    if (at_once<STRIDE, COUNT>(tile)) read_items<true, STRIDE>(v, row, tile, 0, f32{1}, f32{0});
    else read_items<false, STRIDE>(v, row, tile, 0, f32{1}, f32{0});
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
decode_rows(const byte *message, int64 stride, float gain, int add, void *out, int narrow, const int64 *columns,
            int lines, int tiles, int rows, int rank) {
    const Tile tile = this_tile<DECODE_TILE>(Table{columns, lines, tiles, rows, rank});
    const byte *row = message + tile.row * stride + tile.column;
    const f32 absent = number(add ? ~MAGNITUDE : 0); // in place of what is not sent: x + -0 is x, for -0 too
    if (at_once<APART, DECODE_ITEMS>(tile)) {
        f32 v[DECODE_ITEMS];
        read_items<true, APART>(v, row, tile, 0, f32{gain}, absent);
        if (add) add_any<APART>(v, out, tile.source, tile.real, narrow);
        write_any<APART>(out, tile.source, v, tile.real, narrow);
        return;
    }
    for (int at = 0; at < tile.real; at += TILE) {
        const int real = min(tile.real - at, TILE);
        f32 v[ITEMS];
        read_items<false, APART>(v, row, tile, at, f32{gain}, absent);
        if (add) add_any<APART>(v, out, tile.source + at, real, narrow);
        write_any<APART>(out, tile.source + at, v, real, narrow);
    }
}

// The mean of the senders' versions of one row into the shard.
extern "C" __global__ void __launch_bounds__(THREADS)
decode_mean(const byte *received, int64 stride, int senders, void *out, int narrow, const int64 *columns, int lines,
            int tiles, int rows, int rank) {
    const Tile tile = this_tile<TILE>(Table{columns, lines, tiles, rows, rank});
    f32 c[ITEMS];
    read_mean<APART>(c, received, stride, senders, f32{(float)senders}, tile);
    write_any<APART>(out, tile.residual_at, c, tile.real, narrow);
}
