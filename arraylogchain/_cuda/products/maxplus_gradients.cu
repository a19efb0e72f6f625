// Gradients of a max-plus product: every cotangent goes to the two entries that its value is the
// sum of. Added atomically, so the order, and with it the rounding, differs from run to run.
#include "panel.cuh"
#include "numbers.cuh"

constexpr int THREADS = 256;

// values, indices: the product, in the layout of value_view. h: cotangents, in that of h_view.
// left, right: sums to add to. There is no gradient through a value that is not finite, or whose
// index is negative; values may be null, and then only the latter counts.
template <class In>
__global__ void __launch_bounds__(THREADS)
maxplus_gradients(const In* values, const long long* indices, ProductView value_view,
                  const In* h, ProductView h_view, long long batches, long long rows,
                  long long columns, ComputeOf<In>* left, View left_view, ComputeOf<In>* right,
                  View right_view) {
    const long long count = batches * rows * columns;
    const long long step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const long long rest = quotient(i, columns), batch = quotient(rest, rows);
        const long long column = i - rest * columns, row = rest - batch * rows;
        const long long at = offset_of<0>(value_view.batch, batch) +
                             offset_of<0>(value_view.rows, row) +
                             offset_of<0>(value_view.columns, column);
        const long long k = indices[at];
        if (k < 0 || (values && !is_finite(load(values + at)))) continue;
        const auto cotangent =
            load(h + offset_of<0>(h_view.batch, batch) + offset_of<0>(h_view.rows, row) +
                 offset_of<0>(h_view.columns, column));
        atomicAdd(left + offset_of<0>(left_view.batch, batch) +
                      offset_of<0>(left_view.lines, row) + k * left_view.step,
                  cotangent);
        atomicAdd(right + offset_of<0>(right_view.batch, batch) +
                      offset_of<0>(right_view.lines, column) + k * right_view.step,
                  cotangent);
    }
}
