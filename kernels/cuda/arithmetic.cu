// Float32 as IEEE 754 says: every operation rounds once, to nearest, and keeps denormals.
//
// The operations are spelled in PTX because the options are not ours alone: CuPy appends -ftz=true to those of every
// module, after the caller's (cupy issue 9576), and the CPU path keeps denormals. An explicit .rn is never contracted
// into a fused multiply-add either. Bit patterns pass through PTX too: the compiler knows xor and and of a sign bit as
// neg and abs, and those would flush. Doubles are left to the compiler: no option flushes them, and no kernel here
// multiplies two of them.

struct f32 {
    float value;
};

#define OPERATION(op, ptx)                                                             \
    __device__ __forceinline__ f32 operator op(f32 a, f32 b) {                         \
        f32 c;                                                                         \
        asm(ptx " %0, %1, %2;" : "=f"(c.value) : "f"(a.value), "f"(b.value));          \
        return c;                                                                      \
    }
OPERATION(+, "add.rn.f32")
OPERATION(-, "sub.rn.f32")
OPERATION(*, "mul.rn.f32")
OPERATION(/, "div.rn.f32")
#undef OPERATION

#define COMPARISON(op, ptx)                                                            \
    __device__ __forceinline__ bool operator op(f32 a, f32 b) {                        \
        int holds;                                                                     \
        asm("{ .reg .pred p; " ptx " p, %1, %2; selp.s32 %0, 1, 0, p; }"               \
            : "=r"(holds) : "f"(a.value), "f"(b.value));                               \
        return holds;                                                                  \
    }
COMPARISON(<, "setp.lt.f32")
COMPARISON(>, "setp.gt.f32")
COMPARISON(>=, "setp.ge.f32")
#undef COMPARISON

__device__ __forceinline__ f32 root(f32 a) {
    f32 b;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(b.value) : "f"(a.value));
    return b;
}

#define CONVERSION(name, ptx, type, kind)                                              \
    __device__ __forceinline__ type name(f32 a) {                                      \
        type b;                                                                        \
        asm(ptx " %0, %1;" : kind(b) : "f"(a.value));                                  \
        return b;                                                                      \
    }
CONVERSION(pattern, "mov.b32", unsigned, "=r")
CONVERSION(nearest, "cvt.rni.s32.f32", int, "=r") // ties to even
CONVERSION(truncated, "cvt.rzi.s32.f32", int, "=r")
CONVERSION(widen, "cvt.f64.f32", double, "=d")
#undef CONVERSION

#define CONVERSION(name, ptx, type, kind)                                              \
    __device__ __forceinline__ f32 name(type a) {                                      \
        f32 b;                                                                         \
        asm(ptx " %0, %1;" : "=f"(b.value) : kind(a));                                 \
        return b;                                                                      \
    }
CONVERSION(number, "mov.b32", unsigned, "r")
CONVERSION(narrow, "cvt.rn.f32.f64", double, "d")
#undef CONVERSION
