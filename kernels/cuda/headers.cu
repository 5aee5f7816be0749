// Headers before rows of bytes: what collectives/frame.py writes and compares, in one launch each.

typedef unsigned char byte;
typedef long long int64;

constexpr int THREADS = 256, HEADER = 64;
constexpr int FLAGS = 4, SUM = 60; // the bytes in which two headers may differ: one, and all from SUM on
constexpr int NOT_FINITE = 1, ASKS = 2;

// A header arrives as eight words, the first byte lowest.
#define WORDS int64 w0, int64 w1, int64 w2, int64 w3, int64 w4, int64 w5, int64 w6, int64 w7

__device__ __forceinline__ byte byte_of(int at, WORDS) {
    const int64 words[] = {w0, w1, w2, w3, w4, w5, w6, w7};
    return (byte)(words[at / 8] >> at % 8 * 8);
}

// The header before each of ``rows`` rows, with any of the flags.
extern "C" __global__ void __launch_bounds__(THREADS)
stamp(byte *message, int64 stride, int rows, const byte *flags, int count, WORDS) {
    const int row = (blockIdx.x * THREADS + threadIdx.x) / HEADER, at = threadIdx.x % HEADER;
    if (row >= rows) return;
    byte own = byte_of(at, w0, w1, w2, w3, w4, w5, w6, w7);
    if (at == FLAGS)
        for (int i = 0; i < count; ++i) own |= flags[i];
    message[row * stride + at] = own;
}

// found[0] := NOT_FINITE if a row bears that flag or another header; found[1] := ASKS if a row asks.
extern "C" __global__ void __launch_bounds__(THREADS)
compare(const byte *message, int64 stride, int rows, byte *found, WORDS) {
    __shared__ int bad, asks;
    if (threadIdx.x == 0) bad = asks = 0;
    __syncthreads();
    const int at = threadIdx.x % HEADER;
    const byte mine = byte_of(at, w0, w1, w2, w3, w4, w5, w6, w7);
    for (int row = threadIdx.x / HEADER; row < rows; row += THREADS / HEADER) {
        const byte theirs = message[row * stride + at];
        if (at == FLAGS ? theirs & NOT_FINITE : at < SUM && theirs != mine) bad = 1; // all write the same
        if (at == FLAGS && theirs & ASKS) asks = 1;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        found[0] = bad ? NOT_FINITE : 0;
        found[1] = asks ? ASKS : 0;
    }
}
