// Numbers as kernels see them: what is read and written per dtype, and exp and log with the
// accuracy that the error model counts on.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// What a dtype is computed in, and the limits of that.
template <class T> struct Number {
    using Compute = float;  // half precisions
};

template <> struct Number<float> {
    using Compute = float;
    static constexpr float eps = 0x1p-23f;
    static constexpr float tiny = 0x1p-126f;  // the smallest normal number: below it, 0
    static __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
    static __device__ __forceinline__ float nan() { return __int_as_float(0x7fc00000); }
};

template <> struct Number<double> {
    using Compute = double;
    static constexpr double eps = 0x1p-52;
    static constexpr double tiny = 0x1p-1022;
    static __device__ __forceinline__ double infinity() {
        return __longlong_as_double(0x7ff0000000000000ll);
    }
    static __device__ __forceinline__ double nan() {
        return __longlong_as_double(0x7ff8000000000000ll);
    }
};

template <class T> using ComputeOf = typename Number<T>::Compute;

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ double load(const double* p) { return *p; }
__device__ __forceinline__ float load(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }

__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(double* p, double x) { *p = x; }
__device__ __forceinline__ void store(__half* p, float x) { *p = __float2half(x); }
__device__ __forceinline__ void store(__nv_bfloat16* p, float x) { *p = __float2bfloat16(x); }

template <class T> __device__ __forceinline__ bool is_nan(T x) { return x != x; }
template <class T> __device__ __forceinline__ bool is_finite(T x) {
    return x - x == T(0);
}

// The larger of two; NaN if one is.
template <class T> __device__ __forceinline__ T larger(T x, T y) {
    return x > y || is_nan(x) ? x : y;
}

#if !defined(ALC_CPU_SHIM) && __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ float larger<float>(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
#endif

__device__ __forceinline__ float exp2_approx(float x) {
#ifdef ALC_CPU_SHIM
    return shim::ex2_approx(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// exp(x + rest) for x <= 88 and a rest that x was rounded by; 0 below the normal numbers, and for
// NaN.
//
// x is split into whole and fractional powers of two by FMA, so nothing of it is lost: multiplied
// by log2(e) as it is, it would be rounded to an eps of itself, an error that grows with x.
__device__ __forceinline__ float exponential(float x, float rest = 0.0f) {
    constexpr float log2e = 0x1.715476p+0f, log2e_rest = 0x1.4ae0cp-26f;
    constexpr float round = 0x1.8p+23f;  // added and taken off, it rounds to a whole number
    const float shifted = fmaf(x, log2e, round);
    const float whole = shifted - round;
    float fraction = fmaf(x, log2e, -whole);
    fraction = fmaf(x, log2e_rest, fraction);
    fraction = fmaf(rest, log2e, fraction);
    // The last bits of `shifted` are the whole number; they move into the exponent.
    const int power = __float_as_int(shifted) << 23;
    const float y = __int_as_float(__float_as_int(exp2_approx(fraction)) + power);
    return x >= -0x1.5d58ap+6f ? y : 0.0f;
}

__device__ __forceinline__ double exponential(double x, double rest = 0.0) {
    const double y = exp(x);
    return x >= -0x1.6232bdd7abcd2p+9 ? fma(y, rest, y) : 0.0;
}

// exp(x - shift), the rounding of the difference included; 0 where that is NaN.
template <class T> __device__ __forceinline__ T exponential_of_difference(T x, T shift) {
    const T d = x - shift;
    const T part = d - x;
    const T rest = (x - (d - part)) - (shift + part);
    return exponential(d, is_finite(rest) ? rest : T(0));
}

// log(x) + shift for normal x: rounded once, but for a logarithm of a number near 1.
__device__ __forceinline__ float log_plus(float x, float shift) {
    const int bits = __float_as_int(x);
    // Exponents that leave a mantissa between 0.7 and 1.4.
    const int power = (bits - 0x3f3504f3) >> 23;
    const float mantissa = __int_as_float(bits - (power << 23));
    // The first part of ln 2 is short, so that its multiples are exact.
    const float first = float(power) * 0x1.62e4p-1f;
    const float sum = shift + first;
    const float part = sum - shift;
    const float rest = (shift - (sum - part)) + (first - part);
    const float log_mantissa = fmaf(float(power), 0x1.7f7d1cp-20f, logf(mantissa));
    return is_finite(sum) ? sum + (rest + log_mantissa) : sum;
}

__device__ __forceinline__ double log_plus(double x, double shift) {
    const long long bits = __double_as_longlong(x);
    const long long power = (bits - 0x3fe6a09e667f3bcdll) >> 52;
    const double mantissa = __longlong_as_double(bits - (power << 52));
    const double first = double(power) * 0x1.62e42feep-1;
    const double sum = shift + first;
    const double part = sum - shift;
    const double rest = (shift - (sum - part)) + (first - part);
    const double log_mantissa = fma(double(power), 0x1.a39ef35793c76p-33, log(mantissa));
    return is_finite(sum) ? sum + (rest + log_mantissa) : sum;
}

// Sums of K products of factors up to exp(1/2) lose less than 5 K tiny to underflow. From this line
// on, that is less than an eps of the sum: it is proved right to rounding.
template <class T> __device__ __forceinline__ T provable_from(long long terms) {
    return T(5) * T(terms) * (Number<T>::tiny / Number<T>::eps);
}
