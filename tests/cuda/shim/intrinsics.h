// CUDA's vector types, bit casts, rounded arithmetic, atomics and cached loads.
#pragma once
#include <type_traits>

#include "halves.h"

#define SHIM_VECTORS(T, name)                                                                     \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                            \
    struct alignas(16) name##4 { T x, y, z, w; };                                                 \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                    \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTORS(int, int)
SHIM_VECTORS(unsigned, uint)
SHIM_VECTORS(float, float)
SHIM_VECTORS(double, double)
SHIM_VECTORS(long long, longlong)
#undef SHIM_VECTORS

inline int __float_as_int(float x) { return shim::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return shim::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return shim::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return shim::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return shim::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return shim::bit_cast<double>(x); }
inline int __double2hiint(double x) { return shim::bit_cast<long long>(x) >> 32; }
inline int __double2loint(double x) { return static_cast<int>(shim::bit_cast<long long>(x)); }
inline double __hiloint2double(int high, int low) {
    return shim::bit_cast<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}

namespace shim {

// Conversions saturate on a device, and NaN becomes 0; the host's leave both undefined.
template <class Integer, class T>
inline Integer saturated(T x) {
    constexpr Integer kMin = std::numeric_limits<Integer>::min();
    constexpr Integer kMax = std::numeric_limits<Integer>::max();
    if (std::isnan(x)) return 0;
    if (x >= T(kMax)) return kMax;
    return x <= T(kMin) ? kMin : Integer(x);
}

// Keeps the compiler from merging a multiplication and an addition behind it.
template <class T>
inline T opaque(T x) {
    volatile T kept = x;
    return kept;
}

}  // namespace shim

#define SHIM_CONVERT(T, t, letter, Integer)                                                      \
    inline Integer __##t##2##letter##_rn(T x) { return shim::saturated<Integer>(std::rint(x)); } \
    inline Integer __##t##2##letter##_rz(T x) { return shim::saturated<Integer>(std::trunc(x)); }\
    inline Integer __##t##2##letter##_ru(T x) { return shim::saturated<Integer>(std::ceil(x)); } \
    inline Integer __##t##2##letter##_rd(T x) { return shim::saturated<Integer>(std::floor(x)); }
SHIM_CONVERT(float, float, int, int)
SHIM_CONVERT(float, float, uint, unsigned)
SHIM_CONVERT(float, float, ll, long long)
SHIM_CONVERT(double, double, int, int)
SHIM_CONVERT(double, double, uint, unsigned)
SHIM_CONVERT(double, double, ll, long long)
#undef SHIM_CONVERT
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

inline float __fadd_rn(float a, float b) { return shim::opaque(a + b); }
inline float __fsub_rn(float a, float b) { return shim::opaque(a - b); }
inline float __fmul_rn(float a, float b) { return shim::opaque(a * b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return shim::opaque(a + b); }
inline double __dsub_rn(double a, double b) { return shim::opaque(a - b); }
inline double __dmul_rn(double a, double b) { return shim::opaque(a * b); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

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

// Blocks run one after another and fibers are never interrupted: these are atomic as they are.
#define SHIM_ATOMIC(name, T, expression) \
    template <class T>                   \
    inline T name(T* at, T value) {      \
        const T old = *at;               \
        *at = expression;                \
        return old;                      \
    }
SHIM_ATOMIC(atomicAdd, T, old + value)
SHIM_ATOMIC(atomicMax, T, value > old ? value : old)
SHIM_ATOMIC(atomicMin, T, value < old ? value : old)
SHIM_ATOMIC(atomicOr, T, old | value)
SHIM_ATOMIC(atomicAnd, T, old& value)
SHIM_ATOMIC(atomicExch, T, value)
#undef SHIM_ATOMIC
template <class T>
inline T atomicCAS(T* at, T expected, T value) {
    const T old = *at;
    if (old == expected) *at = value;
    return old;
}

#define SHIM_LOAD(name) \
    template <class T>  \
    inline T name(const T* at) { return *at; }
SHIM_LOAD(__ldg)
SHIM_LOAD(__ldca)
SHIM_LOAD(__ldcg)
SHIM_LOAD(__ldcs)
#undef SHIM_LOAD
#define SHIM_STORE(name) \
    template <class T>   \
    inline void name(T* at, T value) { *at = value; }
SHIM_STORE(__stcg)
SHIM_STORE(__stcs)
SHIM_STORE(__stwb)
#undef SHIM_STORE

[[noreturn]] inline void __trap(SHIM_CALLER) {
    shim::fail(shim::Site{"__trap", file, line}.text());
}
