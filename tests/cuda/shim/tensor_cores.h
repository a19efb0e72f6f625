// Products of small matrices by a warp (mma.sync), with the fragments of the PTX manual: with
// g = lane / 4 and t = lane % 4, a lane has
//
//   m16n8k8   of a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); of b: (t, g), (t + 4, g);
//             of d: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)
//   m8n8k4    of a: (g, t); of b: (t, g); of d: (g, 2 t), (g, 2 t + 1)
//
// All lanes of a warp have to take part.
#pragma once
#include "warps.h"

namespace shim {

// The 11 bits that tensor cores read of a float32 number.
inline double tf32(float x) { return bit_cast<float>(bit_cast<unsigned>(x) & 0xffffe000u); }

// x without the bits below `unit`, a power of two; and the power of two in the first bit of x.
inline double cut_off(double x, double unit) { return std::trunc(x / unit) * unit; }
inline double first_bit(double x) {
    return bit_cast<double>(bit_cast<uint64_t>(x) & 0x7ff0000000000000ull);
}

// A sum as tensor cores make it, at its worst: everything is aligned to the largest number, and
// what lies behind 24 bits of that is cut off; then the sum is cut off to float32. Devices that
// have been measured keep one to three bits more, and sum up as few as four products at a time.
template <int COUNT>
inline float sum_of_tensor_core(const double (&x)[COUNT]) {
    double top = 0, sum = 0;
    bool finite = true;
    for (double each : x) {
        top = std::max(top, std::fabs(each));
        finite = finite && std::isfinite(each);
    }
    const double unit = first_bit(top) * 0x1p-23;
    if (!finite || unit == 0) {
        for (double each : x) sum += each;
        return static_cast<float>(sum);
    }
    for (double each : x) sum += cut_off(each, unit);
    const double last = std::max(first_bit(sum) * 0x1p-23, 0x1p-149);
    return static_cast<float>(cut_off(sum, last));
}

// The address of what a lane brings, for the last one to read and write.
template <class Fragments>
inline const Fragments& fragments_of(const Fiber& fiber) {
    return *reinterpret_cast<const Fragments*>(fiber.value);
}
template <class Fragments, class Resolve>
inline void matrix_product(const Site& site, const Fragments& own, Resolve resolve) {
    // A warp that is not whole has lanes that are missing.
    if (fibers.size() - (current->index - current->lane) < kWarp)
        fail(site.text() + ": the warp is not whole");
    collective(site, ~0u, reinterpret_cast<uint64_t>(&own), 0,
               [&](Fiber* warp, unsigned, int) { resolve(warp); });
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32, d = a b + d.
inline void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2],
                             SHIM_CALLER) {
    struct Fragments {
        float* d;
        const float *a, *b;
    };
    matrix_product(Site{"mma.m16n8k8", file, line}, Fragments{d, a, b}, [](Fiber* warp) {
        double A[16][8], B[8][8];
        for (int lane = 0; lane < kWarp; ++lane) {
            const Fragments& x = fragments_of<Fragments>(warp[lane]);
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) A[g + i % 2 * 8][t + i / 2 * 4] = tf32(x.a[i]);
            for (int i = 0; i < 2; ++i) B[t + i * 4][g] = tf32(x.b[i]);
        }
        for (int lane = 0; lane < kWarp; ++lane) {
            const Fragments& x = fragments_of<Fragments>(warp[lane]);
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
                double terms[9];
                for (int k = 0; k < 8; ++k) terms[k] = A[row][k] * B[k][column];
                terms[8] = x.d[i];
                x.d[i] = sum_of_tensor_core(terms);
            }
        }
    });
}

// mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64, d = a b + d in fused multiply-adds.
inline void mma_m8n8k4_f64(double& d0, double& d1, double a, double b, SHIM_CALLER) {
    struct Fragments {
        double *d0, *d1, a, b;
    };
    matrix_product(Site{"mma.m8n8k4", file, line}, Fragments{&d0, &d1, a, b}, [](Fiber* warp) {
        for (int lane = 0; lane < kWarp; ++lane) {
            const Fragments& x = fragments_of<Fragments>(warp[lane]);
            for (int k = 0; k < 4; ++k) {
                const double left = fragments_of<Fragments>(warp[lane / 4 * 4 + k]).a;
                const int column = 2 * (lane % 4);
                *x.d0 = std::fma(left, fragments_of<Fragments>(warp[4 * column + k]).b, *x.d0);
                *x.d1 = std::fma(left, fragments_of<Fragments>(warp[4 * column + 4 + k]).b, *x.d1);
            }
        }
    });
}

}  // namespace shim
