// Floats to rows of bytes: one code per element, under a scale per block or none.

// ---------------------------------------------------------------- halving trees

template <int COUNT, class T>
__device__ __forceinline__ T halve(T *v) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) v[i] = meet(v[i], v[i + COUNT / 2]);
    if constexpr (COUNT > 2) return halve<COUNT / 2>(v);
    return v[0];
}

template <class T>
__device__ __forceinline__ T across(T v, int offset) {
    return __shfl_xor_sync(ALL, v, offset);
}
__device__ __forceinline__ f32 across(f32 v, int offset) { return number(across(pattern(v), offset)); }

// Every lane ends with the total of its ``width`` neighbours.
template <class T>
__device__ __forceinline__ T halve_lanes(T v, int width) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        if (offset < width) v = meet(v, across(v, offset));
    return v;
}

// totals[b] := the tree over block b of the tile, in tree_sum's order. Past 256 elements its upper levels lie in the
// registers of one thread, the middle ones between warps, the last ones between lanes; the totals are complete after
// the caller's next barrier. STRIDE = THREADS holds one barrier itself.
template <int STRIDE, class T>
__device__ __forceinline__ void total_blocks(T (&v)[ITEMS], int shift, T *totals) {
    const int block = 1 << shift, base = item_base<STRIDE, ITEMS>();
    const int together = max(block / STRIDE, 1); // items of this thread that lie in one block
    if (together >= 8)
        for (int j = 0; j < 4; ++j) v[j] = meet(v[j], v[j + 4]);
    if (together >= 4) {
        v[0] = meet(v[0], v[2]), v[1] = meet(v[1], v[3]);
        v[4] = meet(v[4], v[6]), v[5] = meet(v[5], v[7]);
    }
    if (together >= 2)
        for (int j = 0; j < ITEMS; j += 2) v[j] = meet(v[j], v[j + 1]);
    if (STRIDE == 32) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            if (j & (together - 1)) continue;
            const T total = halve_lanes(v[j], block);
            const int element = base + j * STRIDE;
            if ((element & (block - 1)) == 0) totals[element >> shift] = total;
        }
        return;
    }
    __shared__ T part[ITEMS / 2][THREADS]; // here a block has two items or more of each thread
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j)
        if ((j & (together - 1)) == 0) part[j / together][threadIdx.x] = v[j];
    __syncthreads();
    if (warp < ITEMS / together) {
        T warps[THREADS / 32];
        for (int i = 0; i < THREADS / 32; ++i) warps[i] = part[warp][32 * i + lane];
        const T total = halve_lanes(halve<THREADS / 32>(warps), 32);
        if (lane == 0) totals[warp] = total;
    }
}

// ---------------------------------------------------------------- output

// words[w] := the bits of elements 32w to 32w + 31, first element highest.
template <int STRIDE>
__device__ __forceinline__ void collect_signs(const f32 (&c)[ITEMS], int real, unsigned *words) {
    const int base = item_base<STRIDE, ITEMS>(), lane = threadIdx.x % 32;
    unsigned mine = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const unsigned votes = __ballot_sync(ALL, base + j * STRIDE < real && sign_bit(c[j]));
        if (lane == j) mine = votes;
    }
    if (lane < ITEMS) words[(base - lane + lane * STRIDE) / 32] = __brev(mine);
}

__device__ __forceinline__ void store_signs(byte *codes, const unsigned *words, int padded) {
    const int at = threadIdx.x;
    if (8 * at < padded) codes[at] = (byte)(words[at / 4] >> (24 - 8 * (at % 4)));
}

// Neighbouring lanes join narrow codes to bytes. All lanes call it together.
__device__ __forceinline__ void store_code(byte *codes, int element, int padded, unsigned code) {
    if (BITS > 8) {
        byte *at = codes + element * (BITS / 8);
        if (element >= padded) return;
        if (BITS == 32 && ((size_t)at & 3) == 0) *(unsigned *)at = code;
        else if (BITS == 16 && ((size_t)at & 1) == 0) *(unsigned short *)at = (unsigned short)code;
        else
            for (int i = 0; i < BITS / 8; ++i) at[i] = (byte)(code >> (8 * i));
        return;
    }
    const int place = element % PER_BYTE;
    unsigned joined = code << (8 - BITS - BITS * place);
#pragma unroll
    for (int offset = 1; offset < PER_BYTE; offset *= 2) joined |= __shfl_xor_sync(ALL, joined, offset);
    if (place == 0 && element < padded) codes[element / PER_BYTE] = (byte)joined;
}

// Codes (of the sign kinds: already stored) and new residual of a tile whose scales are known, table[element >> shift].
template <int STRIDE>
__device__ __forceinline__ void emit(const f32 (&c)[ITEMS], const Job &job, const Tile &tile, const Scale *table) {
    const int base = item_base<STRIDE, ITEMS>();
    byte *codes = job.codes(tile);
    f32 *left = job.new_residual && tile.feedback ? job.new_residual + tile.residual_at : nullptr;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        const int element = base + j * STRIDE;
        const bool real = element < tile.real;
        Scale s = {f32{1}, f32{0}};
        if (SCALED) s = table[element >> tile.shift];
        const unsigned index = (unsigned)tile.at + element;
        const unsigned code = real ? to_code(c[j], s, index, job.key ^ tile.hash) : 0;
        if (left && real) left[element] = c[j] - from_code(code) * s.scale;
        if (!SIGN) store_code(codes, element, tile.padded, code);
    }
}

// ---------------------------------------------------------------- kernels

template <int STRIDE>
__device__ __forceinline__ void total_terms(const f32 (&c)[ITEMS], int shift, f32 *sums) {
    f32 v[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) v[j] = term(c[j]);
    total_blocks<STRIDE>(v, shift, sums);
}

template <int STRIDE>
__device__ __forceinline__ void total_peaks(const f32 (&c)[ITEMS], int shift, unsigned *peaks) {
    unsigned v[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) v[j] = pattern(magnitude(c[j]));
    total_blocks<STRIDE>(v, shift, peaks);
}

// table[b] := the scale of block b of the tile, also into the message. Holds barriers; complete after the next one.
//
// Clipping to a limit needs nothing but the smaller peak: a code is drawn against |c|, and draws stay below the scale.
template <int STRIDE>
__device__ __forceinline__ void scale_blocks(const f32 (&c)[ITEMS], const Job &job, const Tile &tile, Scale *table) {
    __shared__ f32 sums[TILE / 8];
    __shared__ unsigned peaks[TILE / 8];
    const int shift = tile.shift, block = threadIdx.x, first = block << shift;
    const bool clip = KIND == TERNARY && tile.parameter;
    if (SIGN || clip) total_terms<STRIDE>(c, shift, sums);
    if (!SIGN) total_peaks<STRIDE>(c, shift, peaks);
    __syncthreads();
    if (first >= TILE) return;
    Scale s = {};
    f32 average = {};
    if (SIGN || clip) average = sign_scale(widen(sums[block]), min(tile.real - first, 1 << shift));
    const unsigned limit = clip ? pattern(narrow(tile.parameter / 10.0) * average) : INFINITE;
    if (SIGN) s.scale = average;
    else s = peak_scale(min(peaks[block], limit));
    table[block] = s;
    if (first >= tile.padded) return;
    store_float(job.row(tile) + 4 * ((tile.start >> shift) + block), s.scale);
    if (!finite(s.scale)) *job.flag = 1;
}

template <bool MEAN, int STRIDE>
__device__ __forceinline__ void encode_tile(const Job &job, const Tile &tile) {
    __shared__ unsigned words[TILE / 32];
    __shared__ Scale table[TILE / 8];
    f32 c[ITEMS];
    compensate<MEAN, STRIDE>(c, job, tile);
    if (SIGN) collect_signs<STRIDE>(c, tile.real, words);
    if (SCALED) {
        scale_blocks<STRIDE>(c, job, tile, table);
        if (SIGN) store_signs(job.codes(tile), words, tile.padded);
        __syncthreads();
    } else {
        for (int j = 0; j < ITEMS; ++j)
            if (!finite(c[j])) *job.flag = 1;
    }
    emit<STRIDE>(c, job, tile, table);
}

template <bool MEAN>
__device__ __forceinline__ void encode_any_tile(const Job &job) {
    const Tile tile = this_tile<TILE>(job.table);
    if (job.new_scale && tile.start == 0 && threadIdx.x == 0) job.new_scale[tile.scale] = f32{0};
    if (SCALED && tile.shift > 8) encode_tile<MEAN, THREADS>(job, tile);
    else encode_tile<MEAN, 32>(job, tile);
}

// Five thread blocks per multiprocessor: while one waits at a barrier, the others load.
extern "C" __global__ void __launch_bounds__(THREADS, 5) encode_blocks(PARAMETERS) { encode_any_tile<false>(JOB); }

extern "C" __global__ void __launch_bounds__(THREADS) serve_blocks(PARAMETERS) { encode_any_tile<true>(JOB); }
