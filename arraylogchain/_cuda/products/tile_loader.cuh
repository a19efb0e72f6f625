// What all tiled products share: how a tile's factors come into shared memory, ahead of their use.
#pragma once
#include "numbers.cuh"

// A matrix of factors, or of weights, that one side of a product is read from.
template <class T> struct Side {
    const T* entries;
    long long pitch;  // a multiple of 4, and entries beyond the last line are zeros
    int lines;        // that exist, from the tile's first on
};

// Neighbours that are read and written at once.
template <class T> struct alignas(16) Vector {
    static constexpr int SIZE = 16 / sizeof(T);
    T at[SIZE];
};

// What one of THREADS threads brings of a side's next tile: B lines, BK terms. In shared memory a
// term's lines adjoin, and terms are PITCH apart.
//
// A side lies as [terms, lines], or, turned, as [lines, terms].
template <class T, int B, int BK, int THREADS, int PITCH, bool Turned> struct TileLoader {
    static constexpr int SIZE = Vector<T>::SIZE;
    static_assert(BK % SIZE == 0 && B % SIZE == 0, "whole vectors");
    static constexpr int VECTORS = B * BK / SIZE;
    static constexpr int EACH = (VECTORS + THREADS - 1) / THREADS;
    // From one of a thread's vectors to the next: lines if turned, else terms.
    static constexpr int ALONG = (Turned ? BK : B) / SIZE, GAP = THREADS / ALONG;
    static_assert(THREADS % ALONG == 0, "a thread's vectors differ in one of both");
    Vector<T> held[EACH];
    const T* next;
    long long pitch;
    int lines;

    // Line and term of the first of a vector.
    static __device__ __forceinline__ int line(int i) {
        return Turned ? threadIdx.x / ALONG + i * GAP : threadIdx.x % ALONG * SIZE;
    }
    static __device__ __forceinline__ int term(int i) {
        return Turned ? threadIdx.x % ALONG * SIZE : threadIdx.x / ALONG + i * GAP;
    }
    static __device__ __forceinline__ bool is_mine(int i) {
        return VECTORS % THREADS == 0 || int(threadIdx.x) + i * THREADS < VECTORS;
    }

    __device__ __forceinline__ explicit TileLoader(const Side<T>& side)
        : next(side.entries + (Turned ? line(0) * side.pitch + term(0)
                                      : term(0) * side.pitch + line(0))),
          pitch(side.pitch), lines(side.lines) {}
    // Reads the next BK terms, of which `left` are there; the others are zeros.
    __device__ __forceinline__ void fetch(int left) {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            held[i] = Vector<T>{};
            // Padding ends lines or terms at a multiple of 4.
            if (is_mine(i) && line(i) < lines && term(i) < left) {
                held[i] = *reinterpret_cast<const Vector<T>*>(next + i * GAP * pitch);
            }
        }
        next += Turned ? BK : BK * pitch;
    }
    __device__ __forceinline__ bool has_nan_or_infinity() const {
        bool has = false;
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            #pragma unroll
            for (int v = 0; v < SIZE; ++v) has = has || !(held[i].at[v] < Number<T>::infinity());
        }
        return has;
    }
    __device__ __forceinline__ void put(T* tile) const {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (!is_mine(i)) continue;
            T* at = tile + term(i) * PITCH + line(i);
            if constexpr (Turned) {
                #pragma unroll
                for (int v = 0; v < SIZE; ++v) at[v * PITCH] = held[i].at[v];
            } else {
                *reinterpret_cast<Vector<T>*>(at) = held[i];
            }
        }
    }
};

// Calls multiply(buffer) for each BK of the terms, once their tiles lie in that buffer of `left`
// and `right`, and then finish(terms that are left), while the loaders hold nothing in registers.
// The shared memory is free again afterwards.
template <int BK, class T, int M, int N, class OfLeft, class OfRight, class Multiply, class Finish>
__device__ __forceinline__ void for_each_tile(T (&left)[2][M], T (&right)[2][N], OfLeft& of_left,
                                              OfRight& of_right, int terms, Multiply multiply,
                                              Finish finish) {
    of_left.fetch(terms);
    of_right.fetch(terms);
    of_left.put(left[0]);
    of_right.put(right[0]);
    __syncthreads();
    int now = 0;
    while (terms > 0) {
        terms -= BK;
        // The next tile is on its way while this one is worked on. Past the end it is zeros.
        of_left.fetch(terms);
        of_right.fetch(terms);
        multiply(now);
        // The other buffer was read up to the barrier before this tile.
        now ^= 1;
        of_left.put(left[now]);
        of_right.put(right[now]);
        __syncthreads();
        finish(terms);
    }
}
