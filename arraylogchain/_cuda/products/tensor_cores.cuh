// Products of small matrices by the tensor cores of a warp, and float32 numbers split for them.
//
// They are of compute capability 8.0 or newer. The host chooses no kernel that has them on older
// devices; for these, too, everything has to compile.
#pragma once
#include "numbers.cuh"

// The matrices are spread over the warp, as the PTX manual lays down for m16n8k8. With g = lane / 4
// and t = lane % 4 a lane has
//
//   of a [16, 8]:  a[0] at (g, t), a[1] at (g + 8, t), a[2] at (g, t + 4), a[3] at (g + 8, t + 4)
//   of b [8, 8]:   b[0] at (t, g), b[1] at (t + 4, g)
//   of d [16, 8]:  d[0], d[1] at (g, 2 t), (g, 2 t + 1), and d[2], d[3] in row g + 8.
//
// All lanes have to take part: `volatile` keeps compilers from moving a product into a branch.

// d += a b. The last 13 bits of an entry of a or b are ignored. Sums are cut off, not rounded, and
// not much longer than float32: see docs/numerics.md.
__device__ __forceinline__ void multiply_add(float (&d)[4], const float (&a)[4],
                                             const float (&b)[2]) {
#ifdef ALC_CPU_SHIM
    shim::mma_m16n8k8_tf32(d, a, b);
#elif __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])),
                   "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                   "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#else
    __trap();
#endif
}

// The same of 8 rows and 4 terms, m8n8k4: a at (g, t), b at (t, g), d at (g, 2 t) and (g, 2 t + 1).
__device__ __forceinline__ void multiply_add(double& d0, double& d1, double a, double b) {
#ifdef ALC_CPU_SHIM
    shim::mma_m8n8k4_f64(d0, d1, a, b);
#elif __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d0), "+d"(d1)
                 : "d"(a), "d"(b));
#else
    __trap();
#endif
}

// d += a b with the rounding of fused multiply-adds. From 9.0 on there is one instruction for it,
// which is faster there than four of those that 8.0 has.
__device__ __forceinline__ void multiply_add(double (&d)[4], const double (&a)[4],
                                             const double (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
    multiply_add(d[0], d[1], a[0], b[0]);
    multiply_add(d[2], d[3], a[1], b[0]);
    multiply_add(d[0], d[1], a[2], b[1]);
    multiply_add(d[2], d[3], a[3], b[1]);
#endif
}

// x = high + low, exactly: its first 11 bits, rounded to nearest, and what is missing.
//
// `low` has 12 bits, of which tensor cores read 11: together that is x to an eps of itself.
__device__ __forceinline__ void split(float x, float& high, float& low) {
    high = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
    low = x - high;
}
