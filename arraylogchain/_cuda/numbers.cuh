// Numbers as the kernels see them: half precisions are read and written, and computed in float32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class In> struct ComputeType { using type = float; };
template <> struct ComputeType<double> { using type = double; };
template <class In> using Compute = typename ComputeType<In>::type;

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ double load(const double* p) { return *p; }
__device__ __forceinline__ float load(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }

__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(double* p, double x) { *p = x; }
__device__ __forceinline__ void store(__half* p, float x) { *p = __float2half(x); }
__device__ __forceinline__ void store(__nv_bfloat16* p, float x) { *p = __float2bfloat16(x); }

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float rounded(float x) { return rintf(x); }
__device__ __forceinline__ double rounded(double x) { return rint(x); }

template <class T> __device__ __forceinline__ T infinity() { return T(__int_as_float(0x7f800000)); }
template <class T> __device__ __forceinline__ T nan_value() { return T(__int_as_float(0x7fc00000)); }
template <class T> constexpr double largest_finite = 1.7976931348623157e308;
template <> constexpr double largest_finite<float> = 3.4028234663852886e38;
template <> constexpr double largest_finite<__half> = 65504;
template <> constexpr double largest_finite<__nv_bfloat16> = 3.3895313892515355e38;
template <class T> __device__ __forceinline__ bool is_nan(T x) { return x != x; }
template <class T> __device__ __forceinline__ bool is_finite(T x) { return x - x == T(0); }
template <class T> __device__ __forceinline__ T finite_or_zero(T x) { return is_finite(x) ? x : T(0); }

// The larger of two; NaN if one is, which fmax would drop.
template <class T> __device__ __forceinline__ T larger(T x, T y) { return x > y || is_nan(x) ? x : y; }

template <class T> __device__ __forceinline__ T smallest_normal() {
    return T(sizeof(T) == 4 ? 1.1754943508222875e-38 : 2.2250738585072014e-308);
}
// Limits x to the finite numbers of a type; NaN stays.
template <class Out, class T> __device__ __forceinline__ T clipped(T x) {
    const T limit = T(largest_finite<Out>);
    return x > limit ? limit : x < -limit ? -limit : x;
}

// log(2), and in two parts: an integer times the first is exact.
constexpr double LN2 = 0.69314718055994531, LN2_HIGH = 355.0 / 512, LN2_LOW = -2.1219444005469057e-4;

// A number in double. With -ftz=true, arithmetic on float takes subnormal numbers for 0.
__device__ __forceinline__ bool is_subnormal_or_zero(double) { return false; }
__device__ __forceinline__ bool is_subnormal_or_zero(float x) {
    return (*reinterpret_cast<const int*>(&x) & 0x7f800000) == 0;
}
__device__ __forceinline__ double exact(double x) { return x; }
__device__ __forceinline__ double exact(float x) {
    const int bits = *reinterpret_cast<const int*>(&x);
    const double subnormal = (bits & 0x7fffff) * 1.4012984643248171e-45;
    return !is_subnormal_or_zero(x) ? double(x) : bits < 0 ? -subnormal : subnormal;
}

// Whether a sum of K products of factors up to 1 is right to rounding. Factors and products below
// `tiny`, the smallest normal number, may be flushed to 0, which loses less than 5 K tiny in all:
// from threshold = 5 K tiny / eps on, that is less than rounding. NaN and infinite sums are not
// certified either: they need the rules for infinities.
template <class T> __device__ __forceinline__ bool is_certified(T sum, T threshold) {
    return sum >= threshold && sum < infinity<T>();
}

// The rounding error of x + z as `sum` (Knuth); NaN where the sum is not finite.
template <class T> __device__ __forceinline__ T lost_by_adding(T x, T z, T sum) {
    const T part = sum - x;
    return (x - (sum - part)) + (z - part);
}

// x + z + y, where y may cancel most of x + z; and with w as well.
template <class T> __device__ __forceinline__ T add_three(T x, T z, T y) {
    const T sum = x + z, lost = lost_by_adding(x, z, sum);
    return is_finite(sum) ? sum + y + lost : sum + y;
}
template <class T> __device__ __forceinline__ T add_four(T x, T z, T w, T y) {
    const T first = x + z, sum = first + w;
    const T lost = lost_by_adding(x, z, first) + lost_by_adding(first, w, sum);
    return is_finite(sum) ? sum + y + lost : sum + y;
}

// log(sum of exp(terms)) of one entry, with its own maximum: right whatever the range, and by the
// rules of scipy.special.logsumexp for infinities and NaN. `term(k)` is called twice for each k.
template <class T, class Term> __device__ T log_sum_exp(int terms, Term term) {
    T top = -infinity<T>();
    for (int k = 0; k < terms; ++k) top = larger(term(k), top);
    if (!is_finite(top)) return top;
    T sum = 0, lost = 0;  // Kahan: terms may be many, and equal
    for (int k = 0; k < terms; ++k) {
        const T next = exponential(term(k) - top) - lost;
        const T total = sum + next;
        lost = (total - sum) - next;
        sum = total;
    }
    return top + logarithm(sum);
}
