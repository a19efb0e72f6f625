// What kernels have as inline PTX on a device. Each has a function with two sides; the host's side
// calls these. An asynchronous copy (cp.async) is a plain copy here and needs no function.
#pragma once
#include "intrinsics.h"

namespace shim {

// A number in [-1, 1] that looks random and depends on x alone.
inline float noise(float x) {
    uint64_t bits = bit_cast<unsigned>(x) * 0x9e3779b97f4a7c15ull;
    bits ^= bits >> 29;
    bits *= 0xbf58476d1ce4e5b9ull;
    return static_cast<float>(static_cast<int32_t>(bits >> 32)) * 0x1p-31f;
}

// ex2.approx.f32: a relative error of up to 2**-22; exact for whole numbers and infinities.
inline float ex2_approx(float x) {
    const double exact = std::exp2(double(x));
    const bool is_exact = std::rint(x) == x || !std::isfinite(float(exact));
    return static_cast<float>(is_exact ? exact : exact * (1.0 + 0x1p-22 * double(noise(x))));
}

// lg2.approx.f32: an error of up to 2**-22, absolute for arguments in (0.5, 2), relative elsewhere.
inline float lg2_approx(float x) {
    const double exact = std::log2(double(x));
    if (x == 1.0f || !std::isfinite(exact)) return static_cast<float>(exact);
    return static_cast<float>(exact + 0x1p-22 * double(noise(x)) * max(1.0, std::fabs(exact)));
}

}  // namespace shim

// The fast functions are made of the approximate instructions.
inline float __exp2f(float x) { return shim::ex2_approx(x); }
inline float __expf(float x) { return shim::ex2_approx(x * 1.442695041f); }
inline float __log2f(float x) { return shim::lg2_approx(x); }
inline float __logf(float x) { return shim::lg2_approx(x) * 0.6931471806f; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
