// From the sums of a tile to its logarithms. Entries that are not certified are recomputed with their
// own maximum: in two more tiled passes where they are many and float, else one by one.
#pragma once
#include "tile.cuh"

// Uncertified entries of a tile from which on tiled passes recompute them all.
constexpr int MIN_TILED = 128;

// The number of uncertified entries of all threads.
__device__ __forceinline__ int block_sum(int count) {
    __shared__ int counts[THREADS / 32];
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) count += __shfl_xor_sync(~0u, count, by);
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
    __syncthreads();
    count = 0;
    #pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) count += counts[w];
    return count;
}

// Recomputes the entries of the thread whose bits are set, by maxima and sums of whole tiles.
template <class In, class T>
__device__ __forceinline__ void recompute_tile(SharedTile<T>& shared, const Operand<In>& a, const Operand<In>& b,
                                               const Place& place, const Sizes& sizes, unsigned uncertified, In* out) {
    const In *tile_rows = a.line(place.batch, place.row), *tile_columns = b.line(place.batch, place.column);
    T top[FRAGMENT][FRAGMENT], sums[FRAGMENT][FRAGMENT] = {}, outer_sums[FRAGMENT][FRAGMENT] = {};
    #pragma unroll
    for (int e = 0; e < FRAGMENT * FRAGMENT; ++e) top[e / FRAGMENT][e % FRAGMENT] = -infinity<T>();
    const auto pass = [&](const auto& accumulate, const auto& after) {
        Loader<In> left(a, tile_rows, sizes.rows - place.row, nullptr), right(b, tile_columns, sizes.columns - place.column, nullptr);
        const auto identity = [](T x, T) { return x; };
        for_each_term(shared, left, right, sizes.terms, identity, [&](int, const Fragment<T>& x, const Fragment<T>& y) {
            #pragma unroll
            for (int i = 0; i < FRAGMENT; ++i) {
                #pragma unroll
                for (int j = 0; j < FRAGMENT; ++j) accumulate(x.at[i] + y.at[j], i, j);
            }
        }, after);
    };
    pass([&](T x, int i, int j) { top[i][j] = larger(x, top[i][j]); }, [](int) {});
    const auto move_to_outer = [&] {
        #pragma unroll
        for (int e = 0; e < FRAGMENT * FRAGMENT; ++e) {
            outer_sums[e / FRAGMENT][e % FRAGMENT] += sums[e / FRAGMENT][e % FRAGMENT];
            sums[e / FRAGMENT][e % FRAGMENT] = 0;
        }
    };
    pass([&](T x, int i, int j) { sums[i][j] += exponential(x - top[i][j]); }, [&](int k0) {
        if (k0 % 64 == 64 - TILE_TERMS) move_to_outer();
    });
    move_to_outer();
    #pragma unroll
    for (int e = 0; e < FRAGMENT * FRAGMENT; ++e) {
        if (!(uncertified >> e & 1)) continue;
        const T x = top[e / FRAGMENT][e % FRAGMENT];
        store(out + (long long)(first_row() + e / FRAGMENT) * sizes.columns + first_column() + e % FRAGMENT,
              is_finite(x) ? x + logarithm(outer_sums[e / FRAGMENT][e % FRAGMENT]) : x);
    }
}

// Writes the logarithms of a thread's sums. row_max, column_max, out: of the tile.
template <class In, class T>
__device__ __forceinline__ void write_logs(SharedTile<T>& shared, const Operand<In>& a, const Operand<In>& b,
                                           const Place& place, const Sizes& sizes, const In* row_max,
                                           const In* column_max, const T (&sums)[FRAGMENT][FRAGMENT], T threshold, In* out) {
    const int rows = sizes.rows - place.row, columns = sizes.columns - place.column;  // from the tile on
    unsigned uncertified = 0;  // a bit for each entry of the thread
    int count = 0;
    #pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        const int row = first_row() + i;
        if (row >= rows) continue;
        const T r = finite_or_zero(load(row_max + row));
        #pragma unroll
        for (int j = 0; j < FRAGMENT; ++j) {
            const int column = first_column() + j;
            if (column >= columns) continue;
            if (is_certified(sums[i][j], threshold)) {
                const T c = finite_or_zero(load(column_max + column));
                store(out + (long long)row * sizes.columns + column, add_three(r, c, logarithm(sums[i][j])));
            } else {
                uncertified |= 1u << (i * FRAGMENT + j);
                ++count;
            }
        }
    }
    if constexpr (sizeof(T) == 4) {  // in double the passes would take the registers of the main loop
        if (block_sum(count) >= MIN_TILED) {
            recompute_tile(shared, a, b, place, sizes, uncertified, out);
            return;
        }
    }
    // Each lane works on an entry of its own.
    for (; uncertified; uncertified &= uncertified - 1) {
        const int e = __ffs(uncertified) - 1, row = first_row() + e / FRAGMENT, column = first_column() + e % FRAGMENT;
        const In *x = a.line(place.batch, place.row + row), *y = b.line(place.batch, place.column + column);
        store(out + (long long)row * sizes.columns + column, log_sum_exp<T>(sizes.terms, [&](int k) {
            return load(x + k * a.term_stride) + load(y + k * b.term_stride);
        }));
    }
}
