// The other half of log(exp(a) @ exp(b)) where cuBLAS multiplies: from sums to logarithms.
//
// sums = exp(a - row_max) @ exp(b - column_max). A thread for each entry: of what is proved it takes
// the logarithm and adds what was taken off (see logmatmulexp.cu); what is not, it adds up with the
// entry's own maximum. The host never has to know which entries these are.
#include "tile.cuh"

// sums, out [batch, rows, columns]; the other parameters are those of logmatmulexp.cu. Three blocks
// to a multiprocessor: for more, some compilers run out of registers in float64.
template <class In>
__global__ void __launch_bounds__(THREADS, 3)
settle(Operand<In> a, Operand<In> b, const In* row_max, const In* column_max, In* out, Sizes sizes,
       Compute<In> threshold, const Compute<In>* sums, long long entries) {
    using T = Compute<In>;
    const long long at = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (at >= entries) return;
    const long long line = at / sizes.columns, column = at % sizes.columns, batch = line / sizes.rows;
    const T sum = sums[at];
    T x;
    if (is_proved(sum, threshold)) {
        const T r = load(row_max + line), c = load(column_max + batch * sizes.columns + column);
        x = add_three(finite_or_zero(r), finite_or_zero(c), logarithm(sum));
    } else {
        const In *of_row = a.line(batch, line % sizes.rows), *of_column = b.line(batch, column);
        x = log_sum_exp<T>(sizes.terms, [&](int k) {
            return load(of_row + k * a.term_stride) + load(of_column + k * b.term_stride);
        });
    }
    store(out + at, x);
}
