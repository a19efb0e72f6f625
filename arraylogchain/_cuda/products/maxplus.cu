// max_k(left[i, k] + right[k, j]), and the smallest k that reaches it, from entries that factors.cu
// has laid out. A NaN term wins, the first of them.
//
// Two instructions per term, an addition and a maximum, and a comparison per CHUNK of them: of the
// chunk that has the largest term, the terms are computed once more for its number. That is enough
// unless a sum can be NaN, which takes a NaN or +inf; from there on terms go through a second loop.
#include "panel.cuh"
#include "tile_product.cuh"

constexpr int CHUNK = 8;

__device__ __forceinline__ float larger_number(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double larger_number(double x, double y) { return x > y ? x : y; }

// In, BM, BN, BK, TM, TN, resumed: as in logmatmulexp.cu; `partial` holds the values so far.
// first_term: number of the first of these terms in the whole sums.
template <class In, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN), 1)
maxplus(const ComputeOf<In>* left, long long left_pitch, const ComputeOf<In>* right,
        long long right_pitch, int terms, long long first_term, Panel panel,
        ComputeOf<In>* partial, int resumed, In* values, long long* indices, ProductView view) {
    using T = ComputeOf<In>;
    using Tile = PlainTile<T, BM, BN, BK, TM, TN>;
    __shared__ typename Tile::Shared shared;
    __shared__ long long row_offsets[BM], column_offsets[BN];

    const TilePlace place(panel, BM, BN, blockIdx.x);
    const int row0 = place.tile_row * BM, column0 = place.tile_column * BN;
    const int rows = min(panel.rows - row0, BM), columns = min(panel.columns - column0, BN);
    for (int i = threadIdx.x; i < BM + BN; i += Tile::THREADS) {
        if (i < rows) {
            row_offsets[i] = offset_of<0>(view.rows, panel.first_row + row0 + i);
        } else if (i >= BM && i - BM < columns) {
            column_offsets[i - BM] =
                offset_of<0>(view.columns, panel.first_column + column0 + i - BM);
        }
    }
    const Side<T> left_side{left + (long long)place.batch * terms * left_pitch + row0, left_pitch,
                            rows};
    const Side<T> right_side{right + (long long)place.batch * terms * right_pitch + column0,
                             right_pitch, columns};
    typename Tile::template Loader<BM, false> of_left(left_side);
    typename Tile::template Loader<BN, false> of_right(right_side);

    Tile tile;  // its sums are the largest terms so far
    int found[TM][TN];  // the first term of their chunks
    const T infinity = Number<T>::infinity();
    #pragma unroll
    for (int i = 0; i < TM; ++i) {
        #pragma unroll
        for (int j = 0; j < TN; ++j) {
            tile.sums[i][j] = -infinity;
            found[i][j] = 0;
        }
    }
    int now = 0;
    const auto bring = [&](int left_terms) {
        of_left.fetch(left_terms);
        of_right.fetch(left_terms);
    };
    const auto put = [&] {
        of_left.put(shared.left[now]);
        of_right.put(shared.right[now]);
        return __syncthreads_or(of_left.has_nan_or_infinity() || of_right.has_nan_or_infinity());
    };
    bring(terms);
    bool special = put();
    for (int k0 = 0; k0 < terms; k0 += BK) {
        bring(terms - k0 - BK);
        if (!special && k0 + BK <= terms) {
            #pragma unroll
            for (int first = 0; first < BK; first += CHUNK) {
                T top[TM][TN];
                #pragma unroll
                for (int k = first; k < first + CHUNK; ++k) {
                    alignas(16) T x[TM], y[TN];
                    tile.read(shared, now, k, x, y);
                    #pragma unroll
                    for (int i = 0; i < TM; ++i) {
                        #pragma unroll
                        for (int j = 0; j < TN; ++j) {
                            const T before = k == first ? tile.sums[i][j] : top[i][j];
                            top[i][j] = larger_number(before, x[i] + y[j]);
                        }
                    }
                }
                #pragma unroll
                for (int i = 0; i < TM; ++i) {
                    #pragma unroll
                    for (int j = 0; j < TN; ++j) {
                        found[i][j] = top[i][j] != tile.sums[i][j] ? k0 + first : found[i][j];
                        tile.sums[i][j] = top[i][j];
                    }
                }
            }
        } else {
            #pragma unroll 1
            for (int k = 0; k < min(BK, terms - k0); ++k) {
                alignas(16) T x[TM], y[TN];
                tile.read(shared, now, k, x, y);
                #pragma unroll
                for (int i = 0; i < TM; ++i) {
                    #pragma unroll
                    for (int j = 0; j < TN; ++j) {
                        const T term = x[i] + y[j], best = tile.sums[i][j];
                        const bool wins = term > best || (is_nan(term) && !is_nan(best));
                        tile.sums[i][j] = wins ? term : best;
                        found[i][j] = wins ? k0 + k / CHUNK * CHUNK : found[i][j];
                    }
                }
            }
        }
        now ^= 1;
        special |= put();
    }

    partial += partial ? ((long long)place.batch * panel.rows + row0) * panel.columns + column0 : 0;
    const long long batch_offset = offset_of<0>(view.batch, panel.first_batch + place.batch);
    #pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int row = tile.row(i);
        if (row >= rows) continue;
        #pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int column = tile.column(j);
            if (column >= columns) continue;
            const T value = tile.sums[i][j];
            const long long at = batch_offset + row_offsets[row] + column_offsets[column];
            if (partial) {
                T& best = partial[(long long)row * panel.columns + column];
                const bool wins = value > best || (is_nan(value) && !is_nan(best));
                if (resumed && !wins) continue;
                best = value;
            }
            store(values + at, value);
            int number = 0;
            #pragma unroll
            for (int k = CHUNK - 1; k >= 0; --k) {  // all of them are read at once
                const long long of_chunk = min(found[i][j] + k, terms - 1);
                const T term = left_side.entries[of_chunk * left_side.pitch + row] +
                               right_side.entries[of_chunk * right_side.pitch + column];
                if (term == value || (is_nan(term) && is_nan(value))) number = int(of_chunk);
            }
            indices[at] = first_term + number;
        }
    }
}
