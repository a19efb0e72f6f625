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

// cvt.rna.tf32.f32: 10 bits behind the point; a tie goes away from zero.
inline unsigned to_tf32(float x) {
    const unsigned bits = bit_cast<unsigned>(x);
    return std::isfinite(x) ? (bits + 0x1000u) & 0xffffe000u : bits;
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32, d = a b + d, with the fragments of the PTX
// manual. Of what stands behind the 10th bit the hardware takes no notice.
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                             SHIM_CALLER) {
    struct Fragments {
        float* d;
        const unsigned *a, *b;
    };
    const Fragments own{d, a, b};
    const Site site{"mma.m16n8k8", file, line};
    collective(site, ~0u, reinterpret_cast<uint64_t>(&own), 0, [](Fiber* warp, unsigned, int) {
        float A[16][8], B[8][8], D[16][8];
        const auto number = [](unsigned bits) { return bit_cast<float>(bits & 0xffffe000u); };
        for (int lane = 0; lane < kWarp; ++lane) {
            const Fragments& x = *reinterpret_cast<const Fragments*>(warp[lane].value);
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) A[g + i % 2 * 8][t + i / 2 * 4] = number(x.a[i]);
            for (int i = 0; i < 2; ++i) B[t + i * 4][g] = number(x.b[i]);
            for (int i = 0; i < 4; ++i) D[g + i / 2 * 8][2 * t + i % 2] = x.d[i];
        }
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < 8; ++k)
                for (int j = 0; j < 8; ++j) D[i][j] += A[i][k] * B[k][j];
        for (int lane = 0; lane < kWarp; ++lane) {
            const Fragments& x = *reinterpret_cast<const Fragments*>(warp[lane].value);
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) x.d[i] = D[g + i / 2 * 8][2 * t + i % 2];
        }
    });
}

}  // namespace shim

// The fast functions are made of the approximate instructions.
inline float __exp2f(float x) { return shim::ex2_approx(x); }
inline float __expf(float x) { return shim::ex2_approx(x * 1.442695041f); }
inline float __log2f(float x) { return shim::lg2_approx(x); }
inline float __logf(float x) { return shim::lg2_approx(x) * 0.6931471806f; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
