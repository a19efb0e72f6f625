// Reading and writing arrays of a dtype that is computed in T, told only when the kernel runs. For
// what is read once, where a branch costs nothing beside the memory.
#pragma once
#include "numbers.cuh"

// The numbers of chains.py's DTYPES.
enum DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

template <class T>
constexpr int kComputed = sizeof(T) == sizeof(double) ? kFloat64 : kFloat32;

template <class T>
__device__ __forceinline__ T load_any(const void* p, long long at, int dtype) {
    if constexpr (sizeof(T) == sizeof(double)) {
        return ((const double*)p)[at];
    } else {
        if (dtype == kFloat32) return ((const float*)p)[at];
        return dtype == kFloat16 ? load((const __half*)p + at)
                                 : load((const __nv_bfloat16*)p + at);
    }
}

// Write what was computed in T, and may be wider: it is rounded once, by way of float32 to a half.
template <class T>
__device__ __forceinline__ void store_any(void* p, long long at, int dtype, double x) {
    if constexpr (sizeof(T) == sizeof(double)) {
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
    const int bytes = sizeof(T) == sizeof(double) || dtype == kFloat32 ? int(sizeof(T)) : 2;
    #pragma unroll 1
    for (int k = lane; k < n; k += 32) {
        const char* address = (const char*)p + (at + k * stride) * bytes;
        asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
    }
#endif
}
