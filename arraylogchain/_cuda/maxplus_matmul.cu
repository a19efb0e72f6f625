// values = max over k of a[i, k] + b[k, j], and which k: the first of several, or of NaN, as argmax.
#include "tile.cuh"

// For the parameters see logmatmulexp.cu; indices are laid out as values are.
template <class In>
__global__ void __launch_bounds__(THREADS)
maxplus_matmul(Operand<In> a, Operand<In> b, In* values, long long* indices, Sizes sizes) {
    using T = Compute<In>;
    __shared__ SharedTile<T> shared;
    const Place place(sizes);
    T best[FRAGMENT][FRAGMENT];
    int at[FRAGMENT][FRAGMENT] = {};
    #pragma unroll
    for (int e = 0; e < FRAGMENT * FRAGMENT; ++e) best[e / FRAGMENT][e % FRAGMENT] = -infinity<T>();
    Loader<In> left(a, a.line(place.batch, place.row), sizes.rows - place.row, nullptr);
    Loader<In> right(b, b.line(place.batch, place.column), sizes.columns - place.column, nullptr);
    for_each_term(
        shared, left, right, sizes.terms, [](T x, T) { return x; },
        [&](int k, const Fragment<T>& x, const Fragment<T>& y) {
            #pragma unroll
            for (int i = 0; i < FRAGMENT; ++i) {
                #pragma unroll
                for (int j = 0; j < FRAGMENT; ++j) {
                    const T sum = x.at[i] + y.at[j];
                    // Larger, or the first NaN.
                    const bool replaces = !(sum <= best[i][j]) && !is_nan(best[i][j]);
                    best[i][j] = replaces ? sum : best[i][j];
                    at[i][j] = replaces ? k : at[i][j];
                }
            }
        },
        [](int) {});

    #pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        #pragma unroll
        for (int j = 0; j < FRAGMENT; ++j) {
            const int row = place.row + first_row() + i, column = place.column + first_column() + j;
            if (row >= sizes.rows || column >= sizes.columns) continue;
            const long long where = (place.batch * sizes.rows + row) * sizes.columns + column;
            store(values + where, best[i][j]);
            indices[where] = at[i][j];
        }
    }
}
