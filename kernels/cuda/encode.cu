// Floats, or the mean of other rows, to rows of bytes and the residual that stays behind: what all families share.

struct Job {
    const void *x; // f32, or bf16 if ``narrow``
    int narrow;
    f32 gain; // of x; of a mean: what the sum of the rows is divided by
    const byte *received; // in place of x: the rows to average
    int64 received_stride;
    int senders;
    const f32 *residual;
    const f32 *residual_scale; // not null: a residual is lazy, v stands for v - scale * sgn(v)
    byte *message;
    int64 stride;
    byte *flag;
    f32 *new_residual;
    f32 *new_scale; // lazy scales; zero where the new residual is a plain one
    unsigned key;
    Table table;
    f32 *totals; // one per tile, for pieces with one scale per row

    __device__ byte *row(const Tile &tile) const { return message + tile.row * stride + tile.column; }
    __device__ byte *codes(const Tile &tile) const { return row(tile) + tile.headers + tile.start * BITS / 8; }
};

// Every kernel from here on has the same parameters.
#define PARAMETERS                                                                                                     \
    const void *x, int narrow, float gain, const byte *received, int64 received_stride, int senders,                   \
        const float *residual, const float *residual_scale, byte *message, int64 stride, byte *flag,                   \
        float *new_residual, float *new_scale, unsigned key, const int64 *columns, int lines, int tiles, int rows,     \
        int rank, float *totals
#define JOB                                                                                                            \
    Job{x, narrow, f32{gain}, received, received_stride, senders, (const f32 *)residual,                               \
        (const f32 *)residual_scale, message, stride, flag, (f32 *)new_residual, (f32 *)new_scale, key,                \
        Table{columns, lines, tiles, rows, rank}, (f32 *)totals}

// ---------------------------------------------------------------- input

// c := gain * x + residual, or mean + residual; zero where the tile has no element.
template <bool MEAN, int STRIDE>
__device__ __forceinline__ void compensate(f32 (&c)[ITEMS], const Job &job, const Tile &tile) {
    const f32 lazy = job.residual_scale ? job.residual_scale[tile.scale] : f32{0}; // first: the others wait for it
    if (MEAN) read_mean<STRIDE>(c, job.received, job.received_stride, job.senders, job.gain, tile);
    else read_any<STRIDE>(c, job.x, tile.source, tile.real, job.narrow);
    if (!job.residual || !tile.feedback) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) c[j] = MEAN ? c[j] : job.gain * c[j];
        return;
    }
    f32 old[ITEMS];
    read_floats<STRIDE>(old, job.residual + tile.residual_at, tile.real);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const f32 plain = old[j] - signed_as(old[j], lazy);
        c[j] = (MEAN ? c[j] : job.gain * c[j]) + plain;
        if (item_base<STRIDE, ITEMS>() + j * STRIDE >= tile.real) c[j] = f32{0}; // the lazy scale made it -scale
    }
}
