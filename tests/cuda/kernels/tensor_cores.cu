#include "products/tensor_cores.cuh"

// One warp: d [16, 8] += a [16, 8] b [8, 8], by tensor cores.
template <class T> __global__ void matrix_product(const T* a, const T* b, T* d) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const T left[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
    const T right[2] = {b[t * 8 + g], b[(t + 4) * 8 + g]};
    T own[4];
    for (int i = 0; i < 4; ++i) own[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    multiply_add(own, left, right);
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = own[i];
}
