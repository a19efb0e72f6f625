// Sums of gradients as ordinary numbers.
#pragma once
#include "extended.cuh"

// m * 2^e as an ordinary number; one that is too large is cut off, so that sums of both signs have
// infinities only where NaN would be as good.
template <class T>
__device__ __forceinline__ T ordinary(T m, T e) {
    using F = Format<T>;
    constexpr T kMost = F::kLargest * T(0x1p-8f);
    if (!is_finite(m)) return m;
    const Extended<T> v = extended(T(fabs(m)), e);
    const T x = v.e > T(F::kBias - 9) ? kMost : v.m * power_of_two<T>(v.e);
    return m < T(0) ? -x : x;
}

// total + rest += x, exactly but for the rounding of the rest.
template <class T>
__device__ __forceinline__ void add_to(T& total, T& rest, T x) {
    constexpr T kMost = Format<T>::kLargest * T(0.25f);
    T sum = total + x;
    if (is_finite(sum)) {
        const T part = sum - total;
        rest += (total - (sum - part)) + (x - part);
        sum = fmin(fmax(sum, -kMost), kMost);
    }
    total = sum;
}
