// log Z of rows, from the message after their last step and the final weights; or sums of the message
// before their first step with the initial weights.
#include "chain.cuh"

// log_sums [groups, rows, 2]: the logs of the rows' sums without the message's scale, an integer and
// the remainder, which is infinite or NaN where a sum is. log_z [groups, rows]: with the scale, or
// null. One warp for each row.
template <class T>
__global__ void __launch_bounds__(128)
log_partition(Rows n, Messages<T> last, Weights<T> boundary, double* log_sums, double* log_z) {
    const int lane = threadIdx.x % 32;
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32;
    if (row >= (long long)n.groups * n.rows) return;
    const Origin origin(n.order, n.rows, row);
    const T* a = last.logs + row * n.states;
    const auto weight_of = [&](int k) {
        return SplitLog(exact(boundary.at(origin.group, origin.row, k)), boundary.is_log);
    };
    double top = -infinity<double>(), sum = 0;
    for (int k = lane; k < n.states; k += 32) {
        top = larger(double(a[k]) + weight_of(k).high, top);
    }
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) top = larger(__shfl_xor_sync(~0u, top, by), top);
    top = rint(finite_or_zero(top));
    for (int k = lane; k < n.states; k += 32) {
        const SplitLog weight = weight_of(k);
        sum += exp((double(a[k]) + (weight.high - top)) + weight.remainder);
    }
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane) return;
    log_sums[2 * row] = top, log_sums[2 * row + 1] = log(sum);
    if (!log_z) return;
    const double exponent = last.exponents[row];
    // Large numbers cancel first.
    log_z[row] = ((last.shifts[row] + exponent * LN2_HIGH + top) + log(sum)) + exponent * LN2_LOW;
}
