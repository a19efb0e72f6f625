// What all tiled products share: how a tile's factors come into shared memory, ahead of their use.
#pragma once
#include "numbers.cuh"

// A matrix of factors, or of weights, that one side of a product is read from.
template <class T> struct Side {
    const T* entries;
    long long pitch;  // a multiple of 4, and entries beyond the last line are zeros
    int lines;        // that exist, from the tile's first on
};

// Four neighbours, read and written at once.
template <class T> struct alignas(16) Four {
    T at[4];
};

// What one of THREADS threads brings of a side's next tile: B lines, BK terms. In shared memory a
// term's lines adjoin, and terms are PITCH apart.
//
// A side lies as [terms, lines], or, turned, as [lines, terms].
template <class T, int B, int BK, int THREADS, int PITCH, bool Turned> struct TileLoader {
    static_assert(BK % 4 == 0 && B % 4 == 0, "whole vectors");
    static constexpr int FOURS = B * BK / 4;
    static constexpr int EACH = (FOURS + THREADS - 1) / THREADS;
    Four<T> held[EACH];
    const T* next[EACH];  // null where there is nothing to read
    long long step;

    // Line and term of the first of four.
    static __device__ __forceinline__ int line(int i) {
        const int four = threadIdx.x + i * THREADS;
        return Turned ? four / (BK / 4) : four % (B / 4) * 4;
    }
    static __device__ __forceinline__ int term(int i) {
        const int four = threadIdx.x + i * THREADS;
        return Turned ? four % (BK / 4) * 4 : four / (B / 4);
    }
    static __device__ __forceinline__ bool is_mine(int i) {
        return FOURS % THREADS == 0 || int(threadIdx.x) + i * THREADS < FOURS;
    }

    __device__ __forceinline__ explicit TileLoader(const Side<T>& side)
        : step(Turned ? BK : BK * side.pitch) {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long at = Turned ? line(i) * side.pitch + term(i)
                                        : term(i) * side.pitch + line(i);
            // Padding ends lines or terms at a multiple of 4.
            next[i] = is_mine(i) && line(i) < side.lines ? side.entries + at : nullptr;
        }
    }
    // Reads the next BK terms, of which `left` are there; the others are zeros.
    __device__ __forceinline__ void fetch(int left) {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            held[i] = Four<T>{};
            if (next[i] && term(i) < left) held[i] = *reinterpret_cast<const Four<T>*>(next[i]);
            if (next[i]) next[i] += step;
        }
    }
    __device__ __forceinline__ bool has_nan_or_infinity() const {
        bool has = false;
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            #pragma unroll
            for (int v = 0; v < 4; ++v) has = has || !(held[i].at[v] < Number<T>::infinity());
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
                for (int v = 0; v < 4; ++v) at[v * PITCH] = held[i].at[v];
            } else {
                *reinterpret_cast<Four<T>*>(at) = held[i];
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
