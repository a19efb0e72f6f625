// Reading and writing arrays of a dtype that is computed in T, at least as wide as it, told only when the kernel runs. For
// what is read once, where a branch costs nothing beside the memory.
#pragma once
#include "numbers.cuh"

// The numbers of chains.py's DTYPES.
enum DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

template <class T>
constexpr int kComputed = sizeof(T) == sizeof(double) ? kFloat64 : kFloat32;

template <class T>
__device__ __forceinline__ T load_any(const void* p, long long at, int dtype);

template <>
__device__ __forceinline__ float load_any<float>(const void* p, long long at, int dtype) {
    if (dtype == kFloat32) return ((const float*)p)[at];
    return dtype == kFloat16 ? load((const __half*)p + at) : load((const __nv_bfloat16*)p + at);
}

// What is narrower, for the few results that float64 makes of it. By its bits: a conversion would
// take a subnormal float for zero.
__device__ __noinline__ double load_narrow(const void* p, long long at, int dtype) {
    const float x = load_any<float>(p, at, dtype);
    const unsigned bits = __float_as_uint(x);
    if (bits & 0x7f800000u) return x;
    const double size = double(bits & 0x7fffffu) * 0x1p-149;
    return bits >> 31 ? -size : size;
}

template <>
__device__ __forceinline__ double load_any<double>(const void* p, long long at, int dtype) {
    return dtype == kFloat64 ? ((const double*)p)[at] : load_narrow(p, at, dtype);
}

// Write what was computed in T, and may be wider: it is rounded once, by way of float32 to a half.
template <class T>
__device__ __forceinline__ void store_any(void* p, long long at, int dtype, double x) {
    if (sizeof(T) == sizeof(double) && dtype == kFloat64) {
        ((double*)p)[at] = x;
    } else if (dtype == kFloat32) {
        ((float*)p)[at] = float(x);
    } else if (dtype == kFloat16) {
        store((__half*)p + at, float(x));
    } else {
        store((__nv_bfloat16*)p + at, float(x));
    }
}

// Bring numbers of an array, n of them from `at` on, to the L2 cache, by all lanes of a warp.
template <class T>
__device__ __forceinline__ void prefetch_any(const void* p, long long at, long long stride,
                                             int dtype, int n, int lane) {
#ifndef ALC_CPU_SHIM
    const int bytes = dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2;
    #pragma unroll 1
    for (int k = lane; k < n; k += 32) {
        const char* address = (const char*)p + (at + k * stride) * bytes;
        asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
    }
#endif
}
