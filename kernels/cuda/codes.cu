// What one element and one scale mean. Mirrors reference.py; one module per family of kinds, compiled with -DKIND=...

// Numbered as in reference.py, where ANY_BITS is named BITS.
enum { SIGN_L1, SIGN_RMS, INT8, INT4, TERNARY, FP8, BF16, FP16, FP32, ANY_BITS, TOP, RANDOM, UNBIASED, LOG };

typedef unsigned char byte;
typedef long long int64;

constexpr bool SIGN = KIND == SIGN_L1 || KIND == SIGN_RMS;
constexpr bool SCALED = KIND < BF16; // the casts have codes only
constexpr bool WITH_HEADER = KIND >= ANY_BITS; // a header per block, and nothing that this file says of codes
constexpr int BITS = SIGN ? 1 : KIND == TERNARY ? 2 : KIND == INT4 ? 4 : KIND == FP32 ? 32 : KIND >= BF16 ? 16 : 8;
constexpr int PER_BYTE = BITS < 8 ? 8 / BITS : 1;
constexpr unsigned MASK = 0xffffffffu >> (32 - BITS);
constexpr unsigned ALL = 0xffffffffu; // every lane of a warp
constexpr unsigned MAGNITUDE = 0x7fffffffu;
constexpr unsigned INFINITE = 0x7f800000u;
constexpr unsigned TINY = 27u << 23; // 2^-100

__device__ __forceinline__ f32 magnitude(f32 a) { return number(pattern(a) & MAGNITUDE); }
__device__ __forceinline__ bool finite(f32 a) { return (pattern(a) & MAGNITUDE) < INFINITE; }
__device__ __forceinline__ bool sign_bit(f32 a) { return a >= f32{0}; } // -0 counts, NaN does not

__device__ __forceinline__ f32 signed_as(f32 a, f32 scale) {
    return sign_bit(a) ? scale : number(pattern(scale) ^ ~MAGNITUDE);
}

// ---------------------------------------------------------------- narrow floats

__device__ __forceinline__ unsigned to_fp8(f32 a) {
    unsigned bits = min(pattern(a) & MAGNITUDE, 0x43e00000u); // 448
    unsigned code = bits < 121u << 23 // below 2^-6 the step is 2^-9
                        ? (unsigned)nearest(number(bits) * f32{512})
                        : ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    return code | (pattern(a) >> 24 & 0x80);
}

__device__ __forceinline__ f32 from_fp8(unsigned code) {
    unsigned exponent = code >> 3 & 15, mantissa = code & 7;
    f32 small = f32{(float)mantissa} * f32{1.0f / 512};
    unsigned bits = exponent ? (exponent + 120) << 23 | mantissa << 20 : pattern(small);
    return number(bits | (code & 0x80) << 24);
}

__device__ __forceinline__ unsigned to_bf16(f32 a) {
    return (pattern(a) + 0x7fffu + (pattern(a) >> 16 & 1)) >> 16;
}

// Saturates; NaN stays NaN.
__device__ __forceinline__ unsigned to_fp16(f32 a) {
    unsigned bits = min(pattern(a) & MAGNITUDE, 0x477fe000u); // 65504
    unsigned code = bits < 113u << 23 // below 2^-14 the step is 2^-24
                        ? (unsigned)nearest(number(bits) * f32{1 << 24})
                        : ((bits + 0xfffu + (bits >> 13 & 1)) >> 13) - ((127 - 15) << 10);
    if ((pattern(a) & MAGNITUDE) > INFINITE) code = 0x7e00;
    return code | (pattern(a) >> 16 & 0x8000);
}

__device__ __forceinline__ f32 from_fp16(unsigned code) {
    unsigned fields = (code & 0x7fff) << 13; // those of a float32 whose exponent is too small by 127 - 15
    f32 value = (code & 0x7c00) == 0x7c00 ? number(fields | INFINITE) : number(fields) * number((127 + 112) << 23);
    return number(pattern(value) | (code & 0x8000) << 16);
}

// ---------------------------------------------------------------- codes

struct Scale {
    f32 scale, inverse; // inverse = 0 where the block is sent as zero; sign kinds do not use it
};

__device__ __forceinline__ f32 uniform(unsigned index, unsigned key) {
    unsigned h = index + key;
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    h ^= h >> 16;
    return f32{(float)(h >> 9)} * f32{1.0f / (1 << 23)};
}

__device__ __forceinline__ unsigned to_code(f32 c, Scale s, unsigned index, unsigned key) {
    if (SIGN) return sign_bit(c);
    if (KIND == BF16) return to_bf16(c);
    if (KIND == FP16) return to_fp16(c);
    if (KIND == FP32) return pattern(c);
    if (pattern(s.inverse) == 0) return 0;
    if (KIND == TERNARY) return uniform(index, key) * s.scale < magnitude(c) ? (c > f32{0} ? 1 : 3) : 0;
    return KIND == FP8 ? to_fp8(c * s.inverse) : (unsigned)nearest(c * s.inverse) & MASK;
}

// The code's value before its scale.
__device__ __forceinline__ f32 from_code(unsigned code) {
    if (SIGN) return f32{code ? 1.0f : -1.0f};
    if (KIND == BF16) return number(code << 16);
    if (KIND == FP16) return from_fp16(code);
    if (KIND == FP32) return number(code);
    if (KIND == FP8) return from_fp8(code);
    return f32{(float)((int)(code << (32 - BITS)) >> (32 - BITS))};
}

// ---------------------------------------------------------------- scales

// What an element adds to the sum of its block, and how two totals meet: sums as floats, peaks as bit patterns, because
// as patterns NaN and infinity compare above every number.
__device__ __forceinline__ f32 term(f32 c) { return KIND == SIGN_L1 ? magnitude(c) : c * c; }

__device__ __forceinline__ f32 meet(f32 a, f32 b) { return a + b; }
__device__ __forceinline__ double meet(double a, double b) { return a + b; }
__device__ __forceinline__ unsigned meet(unsigned a, unsigned b) { return max(a, b); }

__device__ __forceinline__ f32 sign_scale(double sum, int64 count) {
    double mean = sum / (double)(count > 0 ? count : 1);
    return narrow(KIND == SIGN_L1 ? mean : sqrt(mean));
}

__device__ __forceinline__ Scale peak_scale(unsigned peak) {
    const f32 top = {KIND == INT8 ? 127.0f : KIND == INT4 ? 7.0f : KIND == FP8 ? 448.0f : 1.0f};
    if (peak >= INFINITE) return Scale{number(0x7fc00000u), f32{0}};
    if (peak < TINY) return Scale{f32{0}, f32{0}};
    return Scale{number(peak) / top, top / number(peak)};
}

// Scales lie anywhere in a message, so often on no multiple of four.
__device__ __forceinline__ f32 load_float(const byte *at) {
    if (((size_t)at & 3) == 0) return *(const f32 *)at;
    return number(at[0] | (unsigned)at[1] << 8 | (unsigned)at[2] << 16 | (unsigned)at[3] << 24);
}

__device__ __forceinline__ void store_float(byte *at, f32 a) {
    for (int i = 0; i < 4; ++i) at[i] = (byte)(pattern(a) >> (8 * i));
}
