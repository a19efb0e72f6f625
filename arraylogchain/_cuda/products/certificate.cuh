// What a product of shifted exponentials proves, and sums of exponentials that need no proof.
#pragma once
#include "numbers.cuh"

// From where on sums of `terms` products are proved. Splitting numbers for tensor cores can lose a
// little more to underflow than the sums do, no more than two terms (docs/numerics.md).
template <class T> __device__ __forceinline__ T line_of_certificate(long long terms) {
    return provable_from<T>(terms + 2);
}

// log(sum) + row_shift + column_shift where that is proved right to rounding, or known. Sets
// `unproved`, and returns NaN, where it is neither.
template <class T>
__device__ __forceinline__ T settled(T sum, T row_shift, T column_shift, T line, bool& unproved) {
    if (sum >= line) return log_plus(sum, row_shift + column_shift);
    if (is_nan(row_shift) || is_nan(column_shift)) return Number<T>::nan();
    const T infinity = Number<T>::infinity();
    // A line without a finite entry makes zeros; beside +inf, it makes NaN as well.
    const bool zero = row_shift == -infinity || column_shift == -infinity;
    if (zero && row_shift != infinity && column_shift != infinity) return -infinity;
    unproved = true;
    return Number<T>::nan();
}

// log(sum of exp(terms)), one term at a time, relative to about the largest of them.
//
// Only a term that is much larger than `top` takes its place: each time, the sum is rounded once
// more, but what it was before then weighs little. A NaN term makes the sum NaN. What
// rounding adds to the sum is taken off the next term (Kahan): terms may be many, and equal.
template <class T> struct LogSum {
    T top = -Number<T>::infinity(), sum = 0, excess = 0;

    __device__ __forceinline__ void add(T term) {
        const T above = term - top;
        const bool replaces = above > T(8);
        T y = exponential(replaces ? -above : above);  // 0 for a difference of equal infinities
        y = is_nan(term) ? term : y;
        const T corrected = y - excess;
        const T next = sum + corrected;
        excess = replaces ? T(0) : (next - sum) - corrected;
        sum = replaces ? fma(sum, y, T(1)) : next;
        top = replaces ? term : top;
    }
    __device__ __forceinline__ void merge(T other_top, T other_sum) {
        const T highest = other_top > top ? other_top : top;
        // Equal infinities: only a NaN counts.
        const T y = is_finite(highest) ? exponential(top - highest) : T(1);
        const T other_y = is_finite(highest) ? exponential(other_top - highest) : T(1);
        sum = sum * y + other_sum * other_y;
        excess = 0;
        top = highest;
    }
    __device__ __forceinline__ T value() const {
        if (is_nan(sum)) return sum;
        return is_finite(top) ? log_plus(sum, top) : top;
    }
};
