// Filtered probabilities of a segment's states, and the log normalizers of its steps.
#include "chain.cuh"

// The log of a warp's sum of exponentials, an integer and the remainder; NaN if a log is.
template <class T> struct LogSum {
    T top;
    double remainder;
    __device__ LogSum(const T* logs, int states, int lane) {
        top = -infinity<T>();
        for (int k = lane; k < states; k += 32) top = larger(logs[k], top);
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) top = larger(__shfl_xor_sync(~0u, top, by), top);
        top = rounded(finite_or_zero(top));
        T sum = 0;
        for (int k = lane; k < states; k += 32) sum += exponential(logs[k] - top);
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
        remainder = log(double(sum));
    }
};

// updated: messages of the steps, one before the first included; the scale of each step begins with 0.
// One warp for each step of a row.
template <class Out>
__global__ void __launch_bounds__(256, 2)
filtered(Rows n, Messages<Compute<Out>> updated, Out* probabilities, Strides p, Out* log_normalizers, Strides z) {
    using T = Compute<Out>;
    const int lane = threadIdx.x % 32;
    const long long term = blockIdx.x * 8LL + threadIdx.x / 32, rows = (long long)n.groups * n.rows;
    if (term >= rows * n.steps) return;
    const long long row = term % rows, t = term / rows, at = term + rows;
    const int time = n.time + t, length = n.length(row);
    const Origin origin(n.order, n.rows, row);
    probabilities += origin.group * p.group + origin.row * p.row + t * p.step;
    log_normalizers += origin.group * z.group + origin.row * z.row + t * z.step;
    const T* logs = updated.logs + at * n.states;
    const LogSum<T> sum(logs, n.states, lane), before(logs - (time ? rows * n.states : 0), n.states, lane);
    const bool is_past = time >= length, has_none = is_past || (!is_finite(sum.remainder) && !is_nan(sum.remainder));
    for (int k = lane; k < n.states; k += 32) {
        const T share = exponential(T(double(logs[k] - sum.top) - sum.remainder));
        store(probabilities + k * p.state, has_none ? T(0) : share);
    }
    if (lane) return;
    // Large numbers cancel first; nothing comes before the chain's first step.
    const double exponent = updated.exponents[at];
    const double high = sum.top - (time ? before.top : T(0)), low = sum.remainder - (time ? before.remainder : 0.0);
    const double ratio = ((updated.shifts[at] + exponent * LN2_HIGH + high) + low) + exponent * LN2_LOW;
    // After an infinite sum all later ones are infinite.
    store(log_normalizers, is_past ? T(0) : T(is_finite(sum.remainder) ? ratio : sum.remainder));
}
