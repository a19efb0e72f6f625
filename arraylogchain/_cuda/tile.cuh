// A tiled product: a block computes 64 x 64 entries, each of its 256 threads 4 x 4 of them in
// registers, 8 terms at a time through shared memory. What happens to an entry when it is loaded,
// and how two of them meet, is the kernels' own: logmatmulexp.cu and maxplus_matmul.cu.
#pragma once
#include "numbers.cuh"

constexpr int TILE = 64, PART = 4, DEPTH = 8, THREADS = 256;

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

// Neighbouring entries of shared memory, read by one or two instructions.
template <class T> struct alignas(16) Part { T at[PART]; };

// Two buffers: one is filled while the other is used. Lines are padded, so that neighbouring
// threads, which write terms of a line, write to different banks.
template <class T> struct alignas(16) SharedTile {
    T left[2][DEPTH][TILE + PART];
    T right[2][DEPTH][TILE + PART];
};

// What a thread brings of one side's next terms: two entries. Neighbouring threads take what is
// adjacent in memory, lines or terms.
template <class In> struct Loader {
    using T = Compute<In>;
    const In* next;
    long long line_stride, term_stride;
    int line, term, line_gap, term_gap, lines;
    T held[2], shift[2];

    // `lines` of the operand are left, from its first line in the tile on; `shifts`, of these
    // lines, are taken off, or null.
    __device__ Loader(const Operand<In>& side, const In* first, int lines, const In* shifts)
        : line_stride(side.line_stride), term_stride(side.term_stride), lines(lines) {
        const bool terms_adjoin = term_stride == 1;
        line = terms_adjoin ? threadIdx.x / DEPTH : threadIdx.x % TILE;
        term = terms_adjoin ? threadIdx.x % DEPTH : threadIdx.x / TILE;
        line_gap = terms_adjoin ? THREADS / DEPTH : 0;
        term_gap = terms_adjoin ? 0 : THREADS / TILE;
        next = first + line * line_stride + term * term_stride;
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int at = line + e * line_gap;
            shift[e] = shifts && at < lines ? finite_or_zero(load(shifts + at)) : T(0);
        }
    }
    // What lies beyond the operand is -inf: a term that adds nothing.
    __device__ void fetch(int terms_left) {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool exists = line + e * line_gap < lines && term + e * term_gap < terms_left;
            const long long gap = e * (line_gap * line_stride + term_gap * term_stride);
            held[e] = exists ? load(next + gap) : -infinity<T>();
        }
        next += DEPTH * term_stride;
    }
    template <class Prepare>
    __device__ void put(T (*tile)[TILE + PART], const Prepare& prepare) const {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            tile[term + e * term_gap][line + e * line_gap] = prepare(held[e], shift[e]);
        }
    }
};

// A thread's first row and column in the tile. A warp covers 4 x 8 threads' parts, and neighbouring
// lanes read the same columns, those two apart the same rows: shared memory then serves more lanes
// at a time.
__device__ __forceinline__ int first_row() {
    return (threadIdx.x / 64 * 4 + threadIdx.x % 32 / 16 * 2 + threadIdx.x % 2) * PART;
}
__device__ __forceinline__ int first_column() {
    return (threadIdx.x / 32 % 2 * 8 + threadIdx.x / 2 % 8) * PART;
}

// Calls meet(k, x, y) with a thread's 4 rows' and 4 columns' entries for each term k, as `prepare`
// has made them of what is in memory and the shift of its line; and after(k) behind every 8 terms.
template <class In, class T, class Prepare, class Meet, class After>
__device__ __forceinline__ void for_each_term(SharedTile<T>& shared, Loader<In>& left,
                                              Loader<In>& right, int terms, const Prepare& prepare,
                                              const Meet& meet, const After& after) {
    const int row = first_row(), column = first_column();
    left.fetch(terms);
    right.fetch(terms);
    left.put(shared.left[0], prepare);
    right.put(shared.right[0], prepare);
    __syncthreads();
    int now = 0;
    for (int k0 = 0; k0 < terms; k0 += DEPTH, now ^= 1) {
        // The next terms are on their way while these are worked on; past the end, -inf.
        left.fetch(terms - k0 - DEPTH);
        right.fetch(terms - k0 - DEPTH);
        #pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const auto x = *reinterpret_cast<const Part<T>*>(&shared.left[now][k][row]);
            const auto y = *reinterpret_cast<const Part<T>*>(&shared.right[now][k][column]);
            meet(k0 + k, x, y);
        }
        // The other buffer was last read before the barrier behind us.
        left.put(shared.left[now ^ 1], prepare);
        right.put(shared.right[now ^ 1], prepare);
        after(k0);
        __syncthreads();
    }
}
