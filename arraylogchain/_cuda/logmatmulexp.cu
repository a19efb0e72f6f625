// out = log(exp(a) @ exp(b)), in one kernel: at the speed of a matrix product where that is proved.
//
// With r the maxima of a's rows and c those of b's columns, S = exp(a - r) @ exp(b - c) has
// nonnegative terms up to 1: nothing cancels, and S is wrong only where terms underflowed. What
// `is_proved` is log S + r + c. The thread that has another entry computes it again, with the
// entry's own maximum, from global memory: slow, where it must be.
#include "tile.cuh"

// In: what is read and written. row_max [batch, rows], column_max [batch, columns] and out [batch,
// rows, columns] are contiguous. Grid: one block for each tile of each product.
template <class In>
__global__ void __launch_bounds__(THREADS)
logmatmulexp(Operand<In> a, Operand<In> b, const In* row_max, const In* column_max, In* out,
             Sizes sizes, Compute<In> threshold) {
    using T = Compute<In>;
    __shared__ SharedTile<T> shared;
    const Place place(sizes);
    const int rows = sizes.rows - place.row, columns = sizes.columns - place.column;  // left
    const In *rows_of_a = a.line(place.batch, place.row), *columns_of_b = b.line(place.batch, place.column);
    row_max += place.batch * sizes.rows + place.row;
    column_max += place.batch * sizes.columns + place.column;
    out += (place.batch * sizes.rows + place.row) * sizes.columns + place.column;

    // Many terms of about the same size, added to one sum, would be rounded to the same side again
    // and again: every 64 terms the sums are added to `totals`, and start again.
    T sums[PART][PART] = {}, totals[PART][PART] = {};
    const auto move_to_totals = [&] {
        #pragma unroll
        for (int e = 0; e < PART * PART; ++e) {
            totals[e / PART][e % PART] += sums[e / PART][e % PART];
            sums[e / PART][e % PART] = 0;
        }
    };
    Loader<In> left(a, rows_of_a, rows, row_max), right(b, columns_of_b, columns, column_max);
    for_each_term(
        shared, left, right, sizes.terms, [](T x, T shift) { return exponential(x - shift); },
        [&](int, const Part<T>& x, const Part<T>& y) {
            #pragma unroll
            for (int i = 0; i < PART; ++i) {
                #pragma unroll
                for (int j = 0; j < PART; ++j) sums[i][j] = fma(x.at[i], y.at[j], sums[i][j]);
            }
        },
        [&](int k0) {
            if (k0 % 64 == 64 - DEPTH) move_to_totals();
        });
    move_to_totals();

    const int first = first_row(), first_of_columns = first_column();
    unsigned unproved = 0;  // a bit for each entry of the thread
    #pragma unroll
    for (int i = 0; i < PART; ++i) {
        const int row = first + i;
        if (row >= rows) continue;
        const T r = finite_or_zero(load(row_max + row));
        #pragma unroll
        for (int j = 0; j < PART; ++j) {
            const int column = first_of_columns + j;
            if (column >= columns) continue;
            if (is_proved(totals[i][j], threshold)) {
                const T c = finite_or_zero(load(column_max + column));
                store(out + (long long)row * sizes.columns + column, add_three(r, c, logarithm(totals[i][j])));
            } else {
                unproved |= 1u << (i * PART + j);
            }
        }
    }
    // Lanes work on one entry each, whichever it is.
    for (; unproved; unproved &= unproved - 1) {
        const int e = __ffs(unproved) - 1, row = first + e / PART, column = first_of_columns + e % PART;
        const In *of_row = rows_of_a + row * a.line_stride, *of_column = columns_of_b + column * b.line_stride;
        const T x = log_sum_exp<T>(sizes.terms, [&](int k) {
            return load(of_row + k * a.term_stride) + load(of_column + k * b.term_stride);
        });
        store(out + (long long)row * sizes.columns + column, x);
    }
}
