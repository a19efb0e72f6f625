// out = log(exp(a) @ exp(b)), in one kernel: at the speed of a matrix product where it is certified.
//
// With the row maxima r of a and the column maxima c of b, S = exp(a - r) @ exp(b - c) has
// nonnegative terms up to 1: nothing cancels, and S is wrong only where terms underflowed. Entries
// that are certified are log S + r + c; log_epilogue.cuh recomputes the others.
#include "log_epilogue.cuh"
#include "prepare_factors.cuh"

// row_max [batch, rows], column_max [batch, columns] and out [batch,
// rows, columns] are contiguous. Grid: one block for each tile of each product.
template <class In>
__global__ void __launch_bounds__(THREADS)
logmatmulexp(Operand<In> a, Operand<In> b, const In* row_max, const In* column_max, In* out,
             Sizes sizes, Compute<In> threshold) {
    using T = Compute<In>;
    __shared__ SharedTile<T> shared;
    const Place place(sizes);
    const int rows = sizes.rows - place.row, columns = sizes.columns - place.column;  // from the tile on
    const In *tile_rows = a.line(place.batch, place.row), *tile_columns = b.line(place.batch, place.column);
    row_max += place.batch * sizes.rows + place.row;
    column_max += place.batch * sizes.columns + place.column;
    out += (place.batch * sizes.rows + place.row) * sizes.columns + place.column;

    // Partial sums of 64 terms: many equal terms added to one sum would all be rounded to one side.
    T sums[FRAGMENT][FRAGMENT] = {}, outer_sums[FRAGMENT][FRAGMENT] = {};
    const auto move_to_outer = [&] {
        #pragma unroll
        for (int e = 0; e < FRAGMENT * FRAGMENT; ++e) {
            outer_sums[e / FRAGMENT][e % FRAGMENT] += sums[e / FRAGMENT][e % FRAGMENT];
            sums[e / FRAGMENT][e % FRAGMENT] = 0;
        }
    };
    Loader<In> left(a, tile_rows, rows, row_max), right(b, tile_columns, columns, column_max);
    for_each_term(
        shared, left, right, sizes.terms, [](T x, T shift) { return exponential(x - shift); },
        [&](int, const Fragment<T>& x, const Fragment<T>& y) {
            #pragma unroll
            for (int i = 0; i < FRAGMENT; ++i) {
                #pragma unroll
                for (int j = 0; j < FRAGMENT; ++j) sums[i][j] = fma(x.at[i], y.at[j], sums[i][j]);
            }
        },
        [&](int k0) {
            if (k0 % 64 == 64 - TILE_TERMS) move_to_outer();
        });
    move_to_outer();

    write_logs(shared, a, b, place, sizes, row_max, column_max, outer_sums, threshold, out);
}
