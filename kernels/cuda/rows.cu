// One scale per row, for the sign kinds: a tile can only add to its row's total. *_measure writes the totals of tiles,
// and the codes, which need no scale; finish_rows joins the totals. One pass over memory all the same if the residual
// is lazy: the compensated value is kept, and c - scale * sgn(c) is formed when it is next read, or by settle.

template <bool MEAN>
__device__ __forceinline__ void measure(const Job &job) {
    __shared__ unsigned words[TILE / 32];
    const Tile tile = this_tile<TILE>(job.table);
    f32 c[ITEMS];
    compensate<MEAN, THREADS>(c, job, tile);
    if (job.new_residual && tile.feedback) write_floats<THREADS>(job.new_residual + tile.residual_at, c, tile.real);
    collect_signs<THREADS>(c, tile.real, words);
    total_terms<THREADS>(c, TILE_SHIFT, job.totals + blockIdx.x);
    store_signs(job.codes(tile), words, tile.padded);
}

extern "C" __global__ void __launch_bounds__(THREADS) encode_measure(PARAMETERS) { measure<false>(JOB); }

extern "C" __global__ void __launch_bounds__(THREADS) serve_measure(PARAMETERS) { measure<true>(JOB); }

// ---------------------------------------------------------------- scales of rows

constexpr int FINISH_THREADS = 1024, FINISH_READS = 16, FINISH_LEVELS = 10; // enough for 2^34 elements in a row

// The float64 halving tree over the totals of one row's tiles, in every thread of the block.
//
// Thread t owns the totals at t + 1024 i, the upper levels of the tree. It reads them 16 at a time, such that a read is
// a whole subtree (i, i + n/16, ...) and the subtrees come in bit-reversed order, in which neighbours meet: the levels
// that wait for their other half fit into a few registers, as the digits of a binary counter.
__device__ __forceinline__ double total_tiles(const f32 *totals, int tiles) {
    int groups = 1, levels = 0;
    while ((int64)groups * FINISH_READS * FINISH_THREADS < tiles) groups *= 2, ++levels;
    double total = 0, waiting[FINISH_LEVELS];
    for (int group = 0; group < groups; ++group) {
        const unsigned i = levels ? __brev(group) >> (32 - levels) : 0;
        double v[FINISH_READS];
#pragma unroll
        for (int k = 0; k < FINISH_READS; ++k) {
            const int64 at = threadIdx.x + (int64)FINISH_THREADS * (k * groups + i);
            v[k] = at < tiles ? widen(totals[at]) : 0;
        }
        total = halve<FINISH_READS>(v);
        bool carry = true;
#pragma unroll
        for (int level = 0; level < FINISH_LEVELS; ++level) {
            if (carry && group >> level & 1) total = meet(waiting[level], total);
            else if (carry) waiting[level] = total, carry = false;
        }
    }
    __shared__ double part[FINISH_THREADS];
    part[threadIdx.x] = total;
    __syncthreads();
    double warps[FINISH_THREADS / 32];
#pragma unroll
    for (int i = 0; i < FINISH_THREADS / 32; ++i) warps[i] = part[32 * i + threadIdx.x % 32];
    return halve_lanes(halve<FINISH_THREADS / 32>(warps), 32);
}

// One thread block per row of each piece.
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) finish_rows(PARAMETERS) {
    const Table table = {columns, lines, tiles, rows, rank};
    const int row = blockIdx.x / lines, line = blockIdx.x % lines;
    const int64 before = table.get(TILES_BEFORE, line), width = table.get(WIDTH, line);
    const f32 *mine = (const f32 *)totals + (int64)row * tiles + before;
    const double total = total_tiles(mine, (int)((width + TILE - 1) / TILE));
    if (threadIdx.x > 0) return;
    const f32 scale = sign_scale(total, min(table.get(NUMEL, line) - table.row_of_piece(row) * width, width));
    new_scale[table.get(PIECE, line) * rows + row] = scale.value;
    store_float(message + row * stride + table.get(COLUMN, line), scale);
    if (!finite(scale)) *flag = 1;
}

// v -= scale * sgn(v), in place. ``whole``: of whole rows, padding included.
extern "C" __global__ void __launch_bounds__(THREADS)
settle(float *value, const float *scale, const int64 *columns, int lines, int tiles, int rows, int rank, int whole) {
    const Tile tile = this_tile<TILE>(Table{columns, lines, tiles, rows, rank});
    if (!tile.feedback) return;
    const f32 s = f32{scale[tile.scale]};
    const int real = whole ? tile.padded : tile.real;
    f32 *at = (f32 *)value + tile.residual_at;
    f32 v[ITEMS];
    read_floats<THREADS>(v, at, real);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) v[j] = v[j] - signed_as(v[j], s);
    write_floats<THREADS>(at, v, real);
}
