// The product of a few rows' states with a part of a matrix: the hot loop of a chain.
#pragma once
#include "numbers.cuh"

// As many numbers as one load from shared memory takes.
template <class T>
struct Pack;

template <>
struct Pack<float> {
    static constexpr int kNumbers = 4;
    float4 v;
    __device__ __forceinline__ float operator[](int i) const {
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }
};

template <>
struct Pack<double> {
    static constexpr int kNumbers = 2;
    double2 v;
    __device__ __forceinline__ double operator[](int i) const { return i == 0 ? v.x : v.y; }
};

// A pointer of which the compiler knows nothing. It would rather compute every address of the hot
// loop from scratch than add constants to a common one.
template <class T>
__device__ __forceinline__ const T* opaque(const T* p) {
#ifndef ALC_CPU_SHIM
    asm("" : "+l"(p));
#endif
    return p;
}

// As many rows of the matrix as there are numbers in a Pack, of which a lane has C columns at a
// stride of 32.
template <class T, int C>
struct MatrixPart {
    T p[Pack<T>::kNumbers][C];

    __device__ __forceinline__ MatrixPart() {
        #pragma unroll
        for (int i = 0; i < Pack<T>::kNumbers; ++i) {
            #pragma unroll
            for (int c = 0; c < C; ++c) p[i][c] = T(0);
        }
    }

    // `rows` of them are there; the others stay as they were. Moves on to the next part.
    __device__ __forceinline__ void load(const T*& matrix, long long row_stride,
                                         const bool (&inside)[C],
                                         int rows = Pack<T>::kNumbers) {
        #pragma unroll
        for (int i = 0; i < Pack<T>::kNumbers; ++i) {
            #pragma unroll
            for (int c = 0; c < C; ++c) {
                if (inside[c] && i < rows) p[i][c] = __ldg(matrix + 32 * c);
            }
            matrix = opaque(matrix + row_stride);
        }
    }
};

// What a product adds up: sums of products, or the largest sums.
template <class T>
struct PlusTimes {
    static __device__ __forceinline__ T zero() { return T(0); }
    static __device__ __forceinline__ T add(T sum, T s, T p) { return fma(s, p, sum); }
};

template <class T>
struct MaxPlus {
    static __device__ __forceinline__ T zero() { return -Number<T>::infinity(); }
    static __device__ __forceinline__ T add(T sum, T s, T p) { return larger(sum, s + p); }
};

// Add the products of R rows of states, `stride` numbers apart, with a part of the matrix.
template <class Ring, class T, int R, int C>
__device__ __forceinline__ void multiply_part(const MatrixPart<T, C>& part, const T* states,
                                              int stride, T (&sums)[R][C]) {
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        const Pack<T> s = *reinterpret_cast<const Pack<T>*>(states + r * stride);
        #pragma unroll
        for (int i = 0; i < Pack<T>::kNumbers; ++i) {
            #pragma unroll
            for (int c = 0; c < C; ++c) sums[r][c] = Ring::add(sums[r][c], s[i], part.p[i][c]);
        }
    }
}

// sums[r][c] = sum over k in [begin, end) of states[r][k] * matrix[k][c]
//
//   matrix    begins at the lane's first column, of which `inside` tells which there are; it has
//             `size` rows
//   states    rows of `stride` numbers, zeros of the ring beyond `size`, which all lanes read alike;
//             aligned to a Pack, as `begin` and `end` are
template <class T, int R, int C, class Ring = PlusTimes<T>>
__device__ __forceinline__ void multiply(const T* matrix, long long row_stride,
                                         int size, const bool (&inside)[C], const T* states,
                                         int stride, int begin, int end, T (&sums)[R][C]) {
    constexpr int V = Pack<T>::kNumbers;
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        #pragma unroll
        for (int c = 0; c < C; ++c) sums[r][c] = Ring::zero();
    }
    if (begin >= end) return;
    const int whole = end <= size ? end : end - V;  // where whole parts end
    matrix = opaque(matrix + begin * row_stride);
    states += begin;
    // Loaded a round ahead: what comes from far off arrives while the part before is used.
    MatrixPart<T, C> even, odd;
    int left = (whole - begin) / V;
    if (left > 0) even.load(matrix, row_stride, inside);
    while (left > 0) {
        if (left > 1) odd.load(matrix, row_stride, inside);
        multiply_part<Ring>(even, states, stride, sums);
        states += V;
        if (--left == 0) break;
        if (left > 1) even.load(matrix, row_stride, inside);
        multiply_part<Ring>(odd, states, stride, sums);
        states += V;
        --left;
    }
    if (whole < end) {
        MatrixPart<T, C> last;
        last.load(matrix, row_stride, inside, size - whole);
        multiply_part<Ring>(last, states, stride, sums);
    }
}
