// What kernels share that give each product a warp.
#pragma once

// Neighbours in memory, read at once.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Neighbours {
    T at[N];
};

// Writes neighbours at once. Left to itself, the compiler takes them apart.
template <class T, int N>
__device__ __forceinline__ void write_at_once(T* to, const Neighbours<T, N>& from) {
    if constexpr (sizeof(from) == 16) {
        __stwb(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&from));
    } else if constexpr (sizeof(from) == 8) {
        __stwb(reinterpret_cast<uint2*>(to), *reinterpret_cast<const uint2*>(&from));
    } else {
        #pragma unroll
        for (int n = 0; n < N; ++n) to[n] = from.at[n];
    }
}
