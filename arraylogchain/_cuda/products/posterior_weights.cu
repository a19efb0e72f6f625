// Weights h / S of the posterior of a log product, for cotangents h and sums S of factors that
// factors.cu has made. With those factors, A and B, sum_j (h_ij / S_ij) A_ik B_kj is the gradient
// for a_ik.
//
// The same sums as in logmatmulexp.cu, proved in the same way. Where they are not, or where the
// quotient would overflow, the weight is 0, and exact_posterior.cu comes right after.
#include "certificate.cuh"
#include "panel.cuh"
#include "tile_product.cuh"

// In, BM, BN, BK, TM, TN, left, right, shifts, flags, resumed, finishes: as in logmatmulexp.cu.
// weights [batches, rows, pitch]: also the sums over the terms of launches before.
// open [batches, rows, pitch]: of tiles with a flag, h where the weight is left open, else 0.
// product, h: results of the product, and cotangents. spoils: whether a NaN makes weights NaN; else
// it has no posterior, as infinities have none.
template <class In, int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN),
                                  PlainTile<ComputeOf<In>, BM, BN, BK, TM, TN>::BLOCKS)
posterior_weights(const ComputeOf<In>* left, long long left_pitch, const ComputeOf<In>* right,
                  long long right_pitch, int terms, long long all_terms, Panel panel,
                  const ComputeOf<In>* row_shifts, const ComputeOf<In>* column_shifts, int resumed,
                  int finishes, const In* product, ProductView product_view, const In* h,
                  ProductView h_view, int spoils, ComputeOf<In>* weights, ComputeOf<In>* open,
                  long long pitch, unsigned char* flags) {
    using T = ComputeOf<In>;
    using Tile = PlainTile<T, BM, BN, BK, TM, TN>;
    __shared__ typename Tile::Shared shared;
    __shared__ long long product_rows[BM], product_columns[BN], h_rows[BM], h_columns[BN];
    __shared__ bool row_is_nan[BM], column_is_nan[BN];
    __shared__ TilePlace place_after;  // for what follows the loop, which needs all registers

    const TilePlace place(panel, BM, BN, blockIdx.x);
    if (threadIdx.x == 0) place_after = place;
    int row0 = place.tile_row * BM, column0 = place.tile_column * BN;
    int rows = min(panel.rows - row0, BM), columns = min(panel.columns - column0, BN);
    for (int i = threadIdx.x; i < BM + BN; i += Tile::THREADS) {
        if (i < rows) {
            const long long row = panel.first_row + row0 + i;
            product_rows[i] = offset_of<0>(product_view.rows, row);
            h_rows[i] = offset_of<0>(h_view.rows, row);
            row_is_nan[i] = is_nan(row_shifts[(long long)place.batch * panel.rows + row0 + i]);
        } else if (i >= BM && i - BM < columns) {
            const int j = i - BM;
            const long long column = panel.first_column + column0 + j;
            product_columns[j] = offset_of<0>(product_view.columns, column);
            h_columns[j] = offset_of<0>(h_view.columns, column);
            column_is_nan[j] =
                is_nan(column_shifts[(long long)place.batch * panel.columns + column0 + j]);
        }
    }

    Tile tile;
    tile.run(shared,
             {left + (long long)place.batch * terms * left_pitch + row0, left_pitch, rows},
             {right + (long long)place.batch * terms * right_pitch + column0, right_pitch, columns},
             terms);

    const int batch = place_after.batch;
    row0 = place_after.tile_row * BM, column0 = place_after.tile_column * BN;
    rows = min(panel.rows - row0, BM), columns = min(panel.columns - column0, BN);
    product += offset_of<0>(product_view.batch, panel.first_batch + batch);
    h += offset_of<0>(h_view.batch, panel.first_batch + batch);
    const long long first = ((long long)batch * panel.rows + row0) * pitch + column0;
    weights += first;
    open += first;
    const T line = provable_from<T>(all_terms);
    // Times factors, up to 2, and summed over 2^25 of them, weights must stay finite.
    const T limit = T(1) / (Number<T>::tiny * T(1 << 30));
    bool any_open = false;
    #pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int row = tile.row(i);
        #pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int column = tile.column(j);
            if (row >= rows || column0 + column >= pitch) continue;
            T& weight = weights[row * pitch + column];
            T sum = tile.sums[i][j];
            if (resumed) sum += weight;
            T value = sum, left_open = 0;
            if (finishes) {
                value = 0;  // in the padding, and where the product is infinite
                if (column < columns) {
                    const bool nan = row_is_nan[row] || column_is_nan[column];
                    const T cotangent = load(h + h_rows[row] + h_columns[column]);
                    if (nan && spoils) {
                        value = Number<T>::nan();
                    } else if (is_finite(load(product + product_rows[row] +
                                              product_columns[column]))) {
                        const T quotient = cotangent / sum;
                        // A NaN among the cotangents stays.
                        const bool proved = sum >= line && !(fabs(quotient) > limit);
                        value = proved ? quotient : T(0);
                        left_open = proved ? T(0) : cotangent;
                    }
                }
            }
            weight = value;
            tile.sums[i][j] = left_open;
            any_open = any_open || left_open != T(0);
        }
    }
    if (!finishes) return;
    any_open = __syncthreads_or(any_open);
    if (threadIdx.x == 0) flags[place_after.number] = any_open;
    if (!any_open) return;
    #pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int row = tile.row(i);
        #pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int column = tile.column(j);
            if (row < rows && column < columns) open[row * pitch + column] = tile.sums[i][j];
        }
    }
}
