// Extended numbers: a mantissa m in [1, 2), or 0, infinity or NaN, times 2^e with a whole number e
// held in the same type. Nothing underflows or overflows, and a chain needs no logarithm and no
// exponential of a state at any step.
#pragma once
#include "numbers.cuh"

constexpr unsigned kAllLanes = 0xffffffffu;

// What differs between the two types of computation.
//   kTop         the largest entry of a scaled state is about 2^kTop: there is room above it for
//                the sum of a product, and below it for entries that matter
//   kFarthest    whole numbers e are kept within it, so that their sums and differences are finite
template <class T>
struct Format;

template <>
struct Format<float> {
    using Bits = unsigned int;
    static constexpr int kDigits = 23, kBias = 127, kTop = 96;
    static constexpr Bits kInfinity = 0x7f800000u;
    static constexpr float kLargest = 0x1.fffffep127f, kFarthest = 0x1p125f;
    static constexpr float kLog2e = 0x1.715476p+0f, kLog2eRest = 0x1.4ae0cp-26f;
    static __device__ __forceinline__ Bits bits(float x) { return __float_as_uint(x); }
    static __device__ __forceinline__ float number(Bits x) { return __uint_as_float(x); }
    static __device__ __forceinline__ int leading_zeros(Bits x) { return __clz((int)x); }
};

template <>
struct Format<double> {
    using Bits = unsigned long long;
    static constexpr int kDigits = 52, kBias = 1023, kTop = 900;
    static constexpr Bits kInfinity = 0x7ff0000000000000ull;
    static constexpr double kLargest = 0x1.fffffffffffffp1023, kFarthest = 0x1p1020;
    static constexpr double kLog2e = 0x1.71547652b82fep+0, kLog2eRest = 0x1.777d0ffda0d24p-56;
    static __device__ __forceinline__ Bits bits(double x) {
        return (Bits)__double_as_longlong(x);
    }
    static __device__ __forceinline__ double number(Bits x) {
        return __longlong_as_double((long long)x);
    }
    static __device__ __forceinline__ int leading_zeros(Bits x) { return __clzll((long long)x); }
};

// Asked of the bits: comparisons take a subnormal for zero where they are flushed.
template <class T>
__device__ __forceinline__ bool is_zero(T x) {
    return (typename Format<T>::Bits)(Format<T>::bits(x) << 1) == 0;
}

template <class T>
struct Extended {
    T m, e;
    __device__ __forceinline__ bool is_regular() const { return m != T(0) && is_finite(m); }
};

// 2^n, or 0 where that is below the smallest normal number. n is at most the largest exponent.
template <class T>
__device__ __forceinline__ T power_of_two(T n) {
    using F = Format<T>;
    if (n <= T(-F::kBias)) return T(0);
    return F::number((typename F::Bits)((int)n + F::kBias) << F::kDigits);
}

// A nonnegative number, subnormal ones included, as an extended number; negative ones become NaN.
template <class T>
__device__ __forceinline__ Extended<T> split(T x) {
    using F = Format<T>;
    using Bits = typename F::Bits;
    Bits bits = F::bits(x);
    if (is_zero(x)) return {T(0), T(0)};
    if (bits > F::kInfinity) return {Number<T>::nan(), T(0)};
    if (bits == F::kInfinity) return {x, T(0)};
    int exponent = (int)(bits >> F::kDigits);
    if (exponent == 0) {
        // The leading bit goes to where normal numbers have it, unwritten.
        const int shift = F::leading_zeros(bits) - (int)(8 * sizeof(Bits) - 1 - F::kDigits);
        bits <<= shift;
        exponent = 1 - shift;
    }
    const Bits fraction = bits & (((Bits)1 << F::kDigits) - 1);
    return {F::number(fraction | ((Bits)F::kBias << F::kDigits)), T(exponent - F::kBias)};
}

// A positive normal number as an extended number.
template <class T>
__device__ __forceinline__ Extended<T> split_normal(T x) {
    using F = Format<T>;
    using Bits = typename F::Bits;
    const Bits bits = F::bits(x), fraction = bits & (((Bits)1 << F::kDigits) - 1);
    return {F::number(fraction | ((Bits)F::kBias << F::kDigits)),
            T((int)(bits >> F::kDigits) - F::kBias)};
}

// Put a mantissa in [1/2, 4) back into [1, 2).
template <class T>
__device__ __forceinline__ Extended<T> normalised(Extended<T> v) {
    using F = Format<T>;
    if (!v.is_regular()) return {v.m, T(0)};
    const T up = v.m >= T(2) ? T(1) : v.m < T(1) ? T(-1) : T(0);
    const T factor = v.m >= T(2) ? T(0.5) : v.m < T(1) ? T(2) : T(1);
    return {v.m * factor, fmin(fmax(v.e + up, -F::kFarthest), F::kFarthest)};
}

// exp(d) = 2^n * factor, with a factor in [1/2, 2], or 0, infinity or NaN as d tells. The product
// d * log2(e) is corrected for its rounding, so that what counts is that of d itself.
template <class T>
struct Power {
    T factor, n;
    __device__ __forceinline__ explicit Power(T d) {
        using F = Format<T>;
        if (!is_finite(d)) {
            n = T(0);
            factor = d < T(0) ? T(0) : d;
            return;
        }
        n = rint(fmin(fmax(d * F::kLog2e, -F::kFarthest), F::kFarthest));
        const T rest = fma(d, F::kLog2eRest, fma(d, F::kLog2e, -n));
        // Beyond all digits of n the rest means nothing.
        factor = exp2(fmin(fmax(rest, T(-1)), T(1)));
    }
};

template <class T>
__device__ __forceinline__ Extended<T> times_exp(Extended<T> v, T d) {
    const Power<T> power(d);
    return normalised<T>({v.m * power.factor, v.e + power.n});
}

// A sum of extended numbers that may be signed, kept as sum * 2^e for the largest e so far. What
// is not finite goes by itself.
template <class T>
struct ExtendedSum {
    T sum = T(0), e = T(0), special = T(0);
    bool any = false;

    __device__ __forceinline__ void add(T m, T exponent) {
        if (m == T(0)) return;
        if (!is_finite(m)) {
            special += m;
        } else if (!any || exponent > e) {
            sum = any ? fma(sum, power_of_two<T>(e - exponent), m) : m;
            e = exponent;
            any = true;
        } else {
            sum = fma(m, power_of_two<T>(exponent - e), sum);
        }
    }

    // The sum over neighbouring lanes, the same in each: `value` times 2^`exponent`.
    template <int Lanes = 32>
    __device__ __forceinline__ void over_lanes(T& value, T& exponent) const {
        T top = any ? e : -Number<T>::infinity();
        for (int o = Lanes / 2; o > 0; o >>= 1) top = fmax(top, __shfl_xor_sync(kAllLanes, top, o));
        T part = any ? sum * power_of_two<T>(e - top) : T(0), odd = special;
        for (int o = Lanes / 2; o > 0; o >>= 1) {
            part += __shfl_xor_sync(kAllLanes, part, o);
            odd += __shfl_xor_sync(kAllLanes, odd, o);
        }
        const bool is_odd = odd != T(0);
        value = is_odd ? odd : part;
        exponent = is_odd || part == T(0) ? T(0) : top;
    }
};

// m * 2^e with any positive finite m as an extended number.
template <class T>
__device__ __forceinline__ Extended<T> extended(T m, T e) {
    Extended<T> v = split(m);
    if (v.is_regular()) v.e += e;
    return v;
}

// The scale of a row, 2^bits * exp(nats + rest): whole numbers, summed exactly. `rest` is what
// sums of `nats` rounded off.
struct Scale {
    double bits, nats, rest;
    __device__ __forceinline__ void add_nats(double x) {
        const double sum = nats + x, part = sum - nats;
        rest += (nats - (sum - part)) + (x - part);
        nats = sum;
    }
};

// log(v) plus the log of a scale. The large parts are summed first; the first part of log(2) has
// 21 bits, so that its product with a whole number below 2^32 is exact.
template <class T>
__device__ __forceinline__ double log_of(Extended<T> v, const Scale& scale) {
    if (!v.is_regular()) {
        return is_finite(v.m) ? -(double)Number<T>::infinity() : (double)v.m;
    }
    const double power = (double)v.e + scale.bits;
    const double large = fma(power, 1453634.0 / 2097152.0, scale.nats);
    return large + (fma(power, 4.7493250390316726e-07, scale.rest) + (double)log(v.m));
}
