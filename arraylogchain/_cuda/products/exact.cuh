// Sums of exponentials of single entries of a tile, each with its own maximum.
#pragma once
#include "certificate.cuh"
#include "panel.cuh"

// A block computes what is needed of SIDE x SIDE entries; a thread has PART x PART of them. One
// exponential per term. What no lane of a warp needs is skipped, entry by entry of a thread's part.
//
// Relative: entries are taken less the shifts of their lines, and the sums come out so. Then only
// how far entries lie below the largest of their line is rounded, not what they have in common.
template <class In, bool Relative> struct ExactSums {
    using T = ComputeOf<In>;
    static constexpr int SIDE = 64, DEPTH = 16, PART = 4, THREADS = 256;

    struct Shared {
        T left[DEPTH][SIDE + 1], right[DEPTH][SIDE + 1];
        long long left_offsets[SIDE], right_offsets[SIDE];
        T row_shifts[SIDE], column_shifts[SIDE];
    };

    int rows, columns;  // of the block's entries

    static __device__ __forceinline__ int row(int e) { return threadIdx.x / 16 + e / PART * 16; }
    static __device__ __forceinline__ int column(int e) { return threadIdx.x % 16 + e % PART * 16; }

    // Reads SIDE lines by DEPTH terms of an operand; what is missing at the edges is -inf.
    static __device__ __forceinline__ void fetch(T (*tile)[SIDE + 1], const In* x,
                                                 const long long* offsets, const T* shifts,
                                                 const View& view, int lines, long long first_term,
                                                 long long terms) {
        for (int e = threadIdx.x; e < SIDE * DEPTH; e += THREADS) {
            const int line = view.terms_adjoin ? e / DEPTH : e % SIDE;
            const int term = view.terms_adjoin ? e % DEPTH : e / SIDE;
            T value = -Number<T>::infinity();
            if (line < lines && first_term + term < terms) {
                value = load(x + offsets[line] + (first_term + term) * view.step);
                if (Relative) value -= shifts[line];
            }
            tile[term][line] = value;
        }
    }

    // is_needed(row, column) is asked once per entry; done(row, column, sum) gets what is needed.
    template <class IsNeeded, class Done>
    __device__ __forceinline__ void run(Shared& shared, const In* left, const View& left_view,
                                        const In* right, const View& right_view, long long terms,
                                        const Panel& panel, const TilePlace& place,
                                        const T* row_shifts, const T* column_shifts,
                                        IsNeeded is_needed, Done done) {
        const int row0 = place.tile_row * SIDE, column0 = place.tile_column * SIDE;
        rows = min(panel.rows - row0, SIDE);
        columns = min(panel.columns - column0, SIDE);
        for (int i = threadIdx.x; i < 2 * SIDE; i += THREADS) {
            const int line = i % SIDE;
            if (i < SIDE && line < rows) {
                shared.left_offsets[line] =
                    offset_of<0>(left_view.lines, panel.first_row + row0 + line);
                shared.row_shifts[line] =
                    row_shifts[(long long)place.batch * panel.rows + row0 + line];
            } else if (i >= SIDE && line < columns) {
                shared.right_offsets[line] =
                    offset_of<0>(right_view.lines, panel.first_column + column0 + line);
                shared.column_shifts[line] =
                    column_shifts[(long long)place.batch * panel.columns + column0 + line];
            }
        }
        __syncthreads();
        left += offset_of<0>(left_view.batch, panel.first_batch + place.batch);
        right += offset_of<0>(right_view.batch, panel.first_batch + place.batch);

        LogSum<T> sums[PART * PART];
        unsigned mine = 0, needed = 0;  // bits: entries of this thread, and of its warp
        // Loops over entries are not unrolled: the code would take seconds to compile.
        #pragma unroll 1
        for (int e = 0; e < PART * PART; ++e) {
            sums[e] = {};
            const bool own = row(e) < rows && column(e) < columns && is_needed(row(e), column(e));
            mine |= unsigned(own) << e;
            needed |= unsigned(__ballot_sync(~0u, own) != 0) << e;
        }
        for (long long k0 = 0; k0 < terms; k0 += DEPTH) {
            __syncthreads();
            fetch(shared.left, left, shared.left_offsets, shared.row_shifts, left_view, rows, k0,
                  terms);
            fetch(shared.right, right, shared.right_offsets, shared.column_shifts, right_view,
                  columns, k0, terms);
            __syncthreads();
            #pragma unroll 1
            for (unsigned rest = needed; rest; rest &= rest - 1) {
                const int e = __ffs(rest) - 1;
                LogSum<T> sum = sums[e];
                // Past the end, terms are -inf.
                #pragma unroll 4
                for (int k = 0; k < DEPTH; ++k) {
                    sum.add(shared.left[k][row(e)] + shared.right[k][column(e)]);
                }
                sums[e] = sum;
            }
        }
        #pragma unroll 1
        for (; mine; mine &= mine - 1) {
            const int e = __ffs(mine) - 1;
            done(row(e), column(e), sums[e]);
        }
    }
};

// Whether a tile that reaches over these rows and columns of a panel has a flag. Flags are of tiles
// of other sides: tile_rows by tile_columns.
__device__ __forceinline__ bool is_flagged(const unsigned char* flags, const Panel& panel,
                                           int batch, int tile_rows, int tile_columns, int row0,
                                           int rows, int column0, int columns) {
    const int down = (panel.rows + tile_rows - 1) / tile_rows;
    const int across = (panel.columns + tile_columns - 1) / tile_columns;
    bool flagged = false;
    for (int i = row0 / tile_rows; i <= (row0 + rows - 1) / tile_rows; ++i) {
        for (int j = column0 / tile_columns; j <= (column0 + columns - 1) / tile_columns; ++j) {
            flagged = flagged || flags[((long long)batch * down + i) * across + j];
        }
    }
    return flagged;
}
