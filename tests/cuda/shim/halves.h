// The two half precisions: stored as CUDA stores them, converted with one rounding to nearest even.
#pragma once
#include <cmath>

#include "warps.h"

namespace shim {

// Rounds to a format of `digits` significant bits whose smallest normal number is 2**min_exponent.
// Counted in units of the last place, the numbers of a format are numbered without gaps.
template <int digits, int min_exponent>
inline unsigned short rounded_bits(double x) {
    constexpr int kInfinity = (32768 >> (digits - 1)) - 1 << (digits - 1);
    constexpr int kLowestUnit = min_exponent - (digits - 1);
    if (std::isnan(x)) return 0x7fff;
    const int sign = std::signbit(x) ? 0x8000 : 0;
    const double magnitude = std::fabs(x);
    if (std::isinf(magnitude)) return sign | kInfinity;
    int exponent = kLowestUnit;
    if (magnitude > 0) std::frexp(magnitude, &exponent);
    const int unit = std::max(exponent - digits, kLowestUnit);
    const double count = std::nearbyint(std::ldexp(magnitude, -unit));
    const double bits = std::ldexp(double(unit - kLowestUnit), digits - 1) + count;
    return sign | int(std::min(bits, double(kInfinity)));
}

}  // namespace shim

struct __half {
    unsigned short bits;
    __half() = default;
    explicit __half(float x) : bits(shim::rounded_bits<11, -14>(x)) {}
    explicit __half(double x) : bits(shim::rounded_bits<11, -14>(x)) {}
    operator float() const {
        const unsigned exponent = bits >> 10 & 31, mantissa = bits & 1023;
        const unsigned field = exponent == 31 ? 255 : exponent + 112;
        const float magnitude = exponent == 0 ? mantissa * 0x1p-24f
                                              : shim::bit_cast<float>(field << 23 | mantissa << 13);
        return bits & 0x8000 ? -magnitude : magnitude;
    }
};

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) : bits(shim::rounded_bits<8, -126>(x)) {}
    explicit __nv_bfloat16(double x) : bits(shim::rounded_bits<8, -126>(x)) {}
    operator float() const { return shim::bit_cast<float>(unsigned(bits) << 16); }
};

inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return __half(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
