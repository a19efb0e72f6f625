// What kernels share that give each product a warp.
#pragma once

// Neighbours in shared memory, read at once.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Neighbours {
    T at[N];
};
