// How work is dealt out: one thread block per tile, a tile never reaches over the row of one piece.
//
// Note: why so plain. A kernel that only moves memory needs many bytes in flight and few instructions per byte. Eight
// independent four-byte loads per thread and array, 128 bytes per warp each, do both on every alignment; wider loads
// would need a second path for buffers that are not aligned and would tear the halving trees apart.

constexpr int THREADS = 256;
constexpr int ITEMS = 8; // elements of a tile that one thread holds
constexpr int TILE_SHIFT = 11, TILE = THREADS * ITEMS; // = CHUNK of reference.py, the longest run summed in float32
static_assert(TILE == 1 << TILE_SHIFT, "");
constexpr int DECODE_ITEMS = WITH_HEADER ? ITEMS : 16; // decoding reads little: more bytes in flight per thread
constexpr int DECODE_TILE = THREADS * DECODE_ITEMS;

// The pieces of one family: columns[c * lines + line]. Kernels find their tile in it, cuda.py writes it.
enum {
    TILES_BEFORE, DECODE_TILES_BEFORE, PIECE, SOURCE, NUMEL, WIDTH, SHIFT, PARAMETER, HEADERS, COLUMN, RESIDUAL, SHARD,
    HASH
};

struct Table {
    const int64 *columns;
    int lines;
    int tiles; // of one row of all lines
    int rows;  // of the grid: all rows of a message, or 1 where only row ``rank`` of each piece is worked on
    int rank;  // -1: the grid's rows are the pieces' rows

    __device__ int64 get(int column, int line) const { return columns[column * lines + line]; }
    __device__ int64 row_of_piece(int64 row) const { return rank < 0 ? row : rank; }
};

struct Tile {
    int64 start;      // first element, in its row
    int64 at;         // the same in the whole piece: counts the noise
    int64 source;     // the same in the buffer
    int64 residual_at; // the same in the residual: of what was sent (all rows) or of what was reduced (one row)
    bool feedback;    // the piece has a residual
    int64 column;     // bytes of the row before the piece
    int row, scale;   // scale: place of the row's scale among the lazy ones
    int64 headers;    // bytes of the piece's scales or headers
    int shift, parameter;
    int real, padded; // how many elements exist, without and with padding
    unsigned hash;
};

// The line that holds ``tile``: the last one with no more tiles before it. All lanes call it together.
__device__ __forceinline__ int find_line(const Table &table, int before, int tile) {
    int found = -1;
#pragma unroll 1 // few have more than 32 lines
    for (int first = 0; first < table.lines; first += 32) {
        const int line = first + threadIdx.x % 32;
        found += __popc(__ballot_sync(ALL, line < table.lines && table.get(before, line) <= tile));
    }
    return found;
}

template <int SIZE>
__device__ __forceinline__ Tile this_tile(const Table &table) {
    constexpr int BEFORE = SIZE == TILE ? TILES_BEFORE : DECODE_TILES_BEFORE;
    const int tile_of_row = blockIdx.x % table.tiles;
    const int line = find_line(table, BEFORE, tile_of_row);
    const int64 width = table.get(WIDTH, line);
    Tile tile;
    tile.row = blockIdx.x / table.tiles;
    tile.start = (tile_of_row - table.get(BEFORE, line)) * SIZE;
    tile.at = table.row_of_piece(tile.row) * width + tile.start;
    tile.source = table.get(SOURCE, line) + tile.at;
    tile.feedback = table.get(RESIDUAL, line) >= 0;
    tile.residual_at = table.rank < 0 ? table.get(RESIDUAL, line) + tile.at : table.get(SHARD, line) + tile.start;
    tile.scale = (int)table.get(PIECE, line) * table.rows + tile.row;
    tile.column = table.get(COLUMN, line);
    tile.headers = table.get(HEADERS, line);
    tile.shift = (int)table.get(SHIFT, line);
    tile.parameter = (int)table.get(PARAMETER, line);
    tile.hash = (unsigned)table.get(HASH, line);
    tile.padded = (int)min(width - tile.start, (int64)SIZE);
    tile.real = (int)max(min(table.get(NUMEL, line) - tile.at, (int64)tile.padded), (int64)0);
    return tile;
}

// Item j of this thread is element base + j * STRIDE of the tile. With STRIDE = THREADS the halving tree over a whole
// tile starts inside each thread; with STRIDE = 32 a warp holds 32 * COUNT neighbours, with STRIDE = 1 a thread COUNT.
template <int STRIDE, int COUNT>
__device__ __forceinline__ int item_base() {
    return threadIdx.x / STRIDE * (STRIDE * COUNT) + threadIdx.x % STRIDE;
}

// Where element i lies in shared memory, so that neither 32 neighbours nor every eighth of 256 share a bank.
__device__ __forceinline__ int spaced(int i) { return i + i / 32; }

// Items of STRIDE = FROM to those of STRIDE = TO, 1 and 32, within the warp: so neighbours read and write memory.
template <int FROM, int TO>
__device__ __forceinline__ void turn(f32 (&v)[ITEMS]) {
    __shared__ f32 space[TILE + TILE / 32];
    const int from = item_base<FROM, ITEMS>(), to = item_base<TO, ITEMS>();
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) space[spaced(from + j * FROM)] = v[j];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) v[j] = space[spaced(to + j * TO)];
    __syncwarp(); // before the next turn
}

// A float of 16 bits as it lies in a caller's tensor: a float32 without its lower half.
struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ f32 wide(f32 a) { return a; }
__device__ __forceinline__ f32 wide(bf16 a) { return number((unsigned)a.bits << 16); }
__device__ __forceinline__ void put(f32 *to, f32 a) { *to = a; }
__device__ __forceinline__ void put(bf16 *to, f32 a) { // to nearest, ties to even; NaN stays NaN
    to->bits = (unsigned short)((pattern(a) & MAGNITUDE) > INFINITE ? 0x7fc0 : to_bf16(a));
}

// A full tile needs no condition per item, so all loads of a thread are in flight at once.
template <int STRIDE, int COUNT, class T>
__device__ __forceinline__ void read_floats(f32 (&v)[COUNT], const T *from, int real) {
    constexpr int STEP = STRIDE == 1 ? 32 : STRIDE;
    const int base = item_base<STEP, COUNT>();
    if (real == THREADS * COUNT) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) v[j] = wide(from[base + j * STEP]);
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) v[j] = base + j * STEP < real ? wide(from[base + j * STEP]) : f32{0};
    }
    if constexpr (STRIDE == 1) turn<32, 1>(v);
}

// Of a tensor of either type, from element ``at`` on.
template <int STRIDE, int COUNT>
__device__ __forceinline__ void read_any(f32 (&v)[COUNT], const void *from, int64 at, int real, int narrow) {
    if (narrow) read_floats<STRIDE>(v, (const bf16 *)from + at, real);
    else read_floats<STRIDE>(v, (const f32 *)from + at, real);
}

template <int STRIDE, int COUNT>
__device__ __forceinline__ void add_any(f32 (&v)[COUNT], const void *to, int64 at, int real, int narrow) {
    f32 old[COUNT];
    read_any<STRIDE>(old, to, at, real, narrow);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) v[j] = old[j] + v[j];
}

// With STRIDE = 1 ``v`` is used up.
template <int STRIDE, int COUNT, class T>
__device__ __forceinline__ void write_floats(T *to, f32 (&v)[COUNT], int real) {
    constexpr int STEP = STRIDE == 1 ? 32 : STRIDE;
    const int base = item_base<STEP, COUNT>();
    if constexpr (STRIDE == 1) turn<1, 32>(v);
    if (real == THREADS * COUNT) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) put(to + base + j * STEP, v[j]);
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (base + j * STEP < real) put(to + base + j * STEP, v[j]);
    }
}

template <int STRIDE, int COUNT>
__device__ __forceinline__ void write_any(void *to, int64 at, f32 (&v)[COUNT], int real, int narrow) {
    if (narrow) write_floats<STRIDE>((bf16 *)to + at, v, real);
    else write_floats<STRIDE>((f32 *)to + at, v, real);
}
