// The second half of log(exp(a) @ exp(b)) where cuBLAS multiplies the factors: logarithms of sums, and
// entries that are not certified. The host never needs to know which entries those are.
#include "log_epilogue.cuh"

// sums [batch, rows, columns], which may be `out`; for the other parameters see logmatmulexp.cu.
template <class In>
__global__ void __launch_bounds__(THREADS)
log_epilogue(Operand<In> a, Operand<In> b, const In* row_max, const In* column_max, In* out, Sizes sizes,
             Compute<In> threshold, const Compute<In>* sums) {
    using T = Compute<In>;
    __shared__ SharedTile<T> shared;
    const Place place(sizes);
    const long long origin = (place.batch * sizes.rows + place.row) * sizes.columns + place.column;
    T tile_sums[FRAGMENT][FRAGMENT];
    #pragma unroll
    for (int e = 0; e < FRAGMENT * FRAGMENT; ++e) {
        const int row = first_row() + e / FRAGMENT, column = first_column() + e % FRAGMENT;
        const bool exists = place.row + row < sizes.rows && place.column + column < sizes.columns;
        tile_sums[e / FRAGMENT][e % FRAGMENT] = exists ? sums[origin + (long long)row * sizes.columns + column] : T(0);
    }
    write_logs(shared, a, b, place, sizes, row_max + place.batch * sizes.rows + place.row,
               column_max + place.batch * sizes.columns + place.column, tile_sums, threshold, out + origin);
}
