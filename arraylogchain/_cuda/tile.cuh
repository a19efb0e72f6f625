// A tiled product: a block computes 64 x 64 entries, each of its 256 threads 4 x 4 of them in
// registers, 8 terms at a time through shared memory. Kernels define how entries are transformed
// when they are loaded, and how two of them are accumulated.
#pragma once
#include "numbers.cuh"

constexpr int TILE = 64, FRAGMENT = 4, TILE_TERMS = 8, THREADS = 256;

// One side of a batch of products in memory. Lines are rows of the left operand, columns of the
// right one; strides are in entries.
template <class In> struct Operand {
    const In* data;
    long long batch_stride, line_stride, term_stride;
    __device__ In const* line(long long batch, long long number) const {
        return data + batch * batch_stride + number * line_stride;
    }
};

// Batch, rows, columns and terms of a product; its entries are contiguous, columns fastest.
struct Sizes {
    int rows, columns, terms;
};

// Where a block's tile is: blocks are numbered through columns first, then rows, then the batch.
struct Place {
    long long batch;
    int row, column;
    __device__ Place(const Sizes& sizes) {
        const unsigned across = (sizes.columns + TILE - 1) / TILE, down = (sizes.rows + TILE - 1) / TILE;
        column = blockIdx.x % across * TILE;
        row = blockIdx.x / across % down * TILE;
        batch = blockIdx.x / across / down;
    }
};

// Neighboring entries of shared memory, read by one or two instructions.
template <class T> struct alignas(16) Fragment { T at[FRAGMENT]; };

// Two buffers: one is filled while the other is used. Lines are padded, so that neighboring
// threads, which write terms of a line, write to different banks.
template <class T> struct alignas(16) SharedTile {
    T left[2][TILE_TERMS][TILE + FRAGMENT];
    T right[2][TILE_TERMS][TILE + FRAGMENT];
};

// Loads one side's next terms, two entries for each thread. Neighboring threads load entries that
// are adjacent in memory, of one line or of one term.
template <class In> struct Loader {
    using T = Compute<In>;
    const In* next;
    long long line_stride, term_stride;
    int line, term, line_gap, term_gap, lines;
    T entries[2], shift[2];

    // `lines`: of the operand, from its first line in the tile on. `shifts`: of these lines, or null.
    __device__ Loader(const Operand<In>& side, const In* first, int lines, const In* shifts)
        : line_stride(side.line_stride), term_stride(side.term_stride), lines(lines) {
        const bool terms_adjoin = term_stride == 1;
        line = terms_adjoin ? threadIdx.x / TILE_TERMS : threadIdx.x % TILE;
        term = terms_adjoin ? threadIdx.x % TILE_TERMS : threadIdx.x / TILE;
        line_gap = terms_adjoin ? THREADS / TILE_TERMS : 0;
        term_gap = terms_adjoin ? 0 : THREADS / TILE;
        next = first + line * line_stride + term * term_stride;
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int at = line + e * line_gap;
            shift[e] = shifts && at < lines ? finite_or_zero(load(shifts + at)) : T(0);
        }
    }
    // Entries beyond the operand are -inf: their terms are zero.
    __device__ void fetch(int terms_left) {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool exists = line + e * line_gap < lines && term + e * term_gap < terms_left;
            const long long gap = e * (line_gap * line_stride + term_gap * term_stride);
            entries[e] = exists ? load(next + gap) : -infinity<T>();
        }
        next += TILE_TERMS * term_stride;
    }
    template <class Transform>
    __device__ void put(T (*tile)[TILE + FRAGMENT], const Transform& transform) const {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            tile[term + e * term_gap][line + e * line_gap] = transform(entries[e], shift[e]);
        }
    }
};

// A thread's first row and column in the tile. A warp covers 4 x 8 threads' parts, and neighboring
// lanes read the same columns, those two apart the same rows: shared memory then serves more lanes
// at a time.
__device__ __forceinline__ int first_row() {
    return (threadIdx.x / 64 * 4 + threadIdx.x % 32 / 16 * 2 + threadIdx.x % 2) * FRAGMENT;
}
__device__ __forceinline__ int first_column() {
    return (threadIdx.x / 32 % 2 * 8 + threadIdx.x / 2 % 8) * FRAGMENT;
}

// Calls accumulate(k, x, y) with the transformed entries of a thread's 4 rows and 4 columns for each
// term k, and after(k) after every 8 terms.
template <class In, class T, class Transform, class Accumulate, class After>
__device__ __forceinline__ void for_each_term(SharedTile<T>& shared, Loader<In>& left,
                                              Loader<In>& right, int terms, const Transform& transform,
                                              const Accumulate& accumulate, const After& after) {
    const int row = first_row(), column = first_column();
    left.fetch(terms);
    right.fetch(terms);
    left.put(shared.left[0], transform);
    right.put(shared.right[0], transform);
    __syncthreads();
    int now = 0;
    for (int k0 = 0; k0 < terms; k0 += TILE_TERMS, now ^= 1) {
        // The next terms are loaded while these are used.
        left.fetch(terms - k0 - TILE_TERMS);
        right.fetch(terms - k0 - TILE_TERMS);
        #pragma unroll
        for (int k = 0; k < TILE_TERMS; ++k) {
            const auto x = *reinterpret_cast<const Fragment<T>*>(&shared.left[now][k][row]);
            const auto y = *reinterpret_cast<const Fragment<T>*>(&shared.right[now][k][column]);
            accumulate(k0 + k, x, y);
        }
        // The other buffer was last read before the previous barrier.
        left.put(shared.left[now ^ 1], transform);
        right.put(shared.right[now ^ 1], transform);
        after(k0);
        __syncthreads();
    }
}
