// CUDA's intrinsics that kernels use: bits, minima and maxima.
#pragma once
#include <type_traits>

#include "halves.h"

inline float __int_as_float(int x) { return shim::bit_cast<float>(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

// CUDA's min and max take mixed types, and of a number and a NaN they return the number.
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
    else return T(a) > T(b) ? T(a) : T(b);
}
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
    else return T(a) < T(b) ? T(a) : T(b);
}

[[noreturn]] inline void __trap(SHIM_CALLER) {
    shim::fail(shim::Site{"__trap", file, line}.text());
}
