// The entropy of a chain's paths: that of the last state, and of each other state given the next
// one, averaged over the posterior probabilities p[j] of the next one,
//
//   sum over j of p[j] h[j],    h[j] = log(S) - sum over k of w[k] log(w[k]) / S,    S = sum of w[k]
//
// where w[k] is the weight of coming to state j by way of state k. All of it is computed in double.
#include "rows.cuh"

constexpr int kThreads = 256;
constexpr double kLog2 = 0.69314718055994530942;

// Matrices, and states that are scaled as chain.cu does: the largest near 2^kTop.
struct Column {
    const double *weights, *logs;  // from its first row on, but for the column's shift
    long long row_stride;          // of the weights
    const double *scaled, *scaled_logs;
    const double* state;           // as extended numbers
    int size;

    // h[j] if S reaches `line`, below which products may have underflowed; else NaN.
    __device__ __forceinline__ double proved(double line) const {
        double sum = 0.0, of_logs = 0.0;
        #pragma unroll 4
        for (int k = 0; k < size; ++k) {
            const double w = scaled[k] * weights[k * row_stride];
            sum += w;
            of_logs = fma(w, w > 0.0 ? scaled_logs[k] + logs[k * (long long)size] : 0.0, of_logs);
        }
        if (!(sum >= line && sum <= Format<double>::kLargest)) return Number<double>::nan();
        const Extended<double> v = split_normal(sum);
        return fma(v.e - Format<double>::kTop, kLog2, log(v.m)) - of_logs / sum;
    }

    __device__ __forceinline__ double exact() const {
        double top = -Number<double>::infinity();
        for (int k = 0; k < size; ++k) {
            const Extended<double> w = weight(k);
            if (w.is_regular()) top = fmax(top, w.e);
        }
        double sum = 0.0, of_logs = 0.0;
        for (int k = 0; k < size; ++k) {
            const Extended<double> w = weight(k);
            if (w.m == 0.0) continue;
            const double x = w.m * power_of_two(w.e - top);
            sum += x;
            of_logs = fma(x, fma(w.e - top, kLog2, log(w.m)), of_logs);
        }
        return log(sum) - of_logs / sum;
    }

    __device__ __forceinline__ Extended<double> weight(int k) const {
        return times_exp<double>({state[k], state[size + k]}, logs[k * (long long)size]);
    }
};

// The largest or the sum of what all threads have; `room` has a number for each warp.
template <class Join>
__device__ __forceinline__ double over_block(double x, double* room, Join join) {
    for (int o = 16; o > 0; o >>= 1) x = join(x, __shfl_xor_sync(kAllLanes, x, o));
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = room[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) x = join(x, room[warp]);
    return x;
}

// A block adds up, in float64, what some steps of one row add to its entropy: every so many of the
// launch's, to a number of `parts` [blocks of a row][rows].
//
//   forward      a history
//   marginals    [rows][steps][K], of which `row_stride` is the distance of rows
__global__ void __launch_bounds__(kThreads, 1)
entropy(const __grid_constant__ Recursion c, const __grid_constant__ Axes groups,
        const double* __restrict__ matrix, const double* __restrict__ line,
        const double* __restrict__ logs, const double* __restrict__ forward,
        const double* __restrict__ marginals, long long row_stride,
        const Total* __restrict__ totals, const long long* __restrict__ lengths, int goes_on,
        double* parts) {
    extern __shared__ __align__(16) double shared_numbers[];
    __shared__ double room[kThreads / 32];
    double* const scaled = shared_numbers;
    double* const scaled_logs = scaled + c.size;
    const long long all_rows = c.rows * c.groups;
    const long long number = blockIdx.x % all_rows, group = quotient(number, c.rows);
    const int split = blockIdx.x / all_rows, splits = gridDim.x / all_rows;
    const int length = lengths == nullptr ? c.count : (int)lengths[number];
    const long long matrices = row_offset<0>(groups, group);
    double sum = 0.0;
    #pragma unroll 1
    for (int t = c.first + split; t < min(c.last, length); t += splits) {
        const double* const p = marginals + number * row_stride + (t - c.out_time) * c.size;
        if (t > 0) {
            const double* const state =
                forward + ((t - 1 - c.history_time) * all_rows + number) * 2 * c.size;
            double top = -Number<double>::infinity();
            for (int k = threadIdx.x; k < c.size; k += blockDim.x) {
                const Extended<double> v = {state[k], state[c.size + k]};
                if (v.is_regular()) top = fmax(top, v.e);
            }
            top = over_block(top, room, [](double x, double y) { return fmax(x, y); });
            for (int k = threadIdx.x; k < c.size; k += blockDim.x) {
                const Extended<double> v = {state[k], state[c.size + k]};
                const bool is_regular = v.is_regular();
                const double below = is_regular ? v.e - top : 0.0;
                scaled[k] = is_regular ? v.m * power_of_two(below + Format<double>::kTop) : 0.0;
                scaled_logs[k] = is_regular ? fma(below, kLog2, log(v.m)) : 0.0;
            }
            __syncthreads();
            const long long at = c.matrix_stride == 0 ? 0 : t - c.first_matrix;
            const long long facts_at = (group * c.matrices + at) * c.size;
            for (int j = threadIdx.x; j < c.size; j += blockDim.x) {
                if (p[j] == 0.0) continue;
                const Column column = {matrix + matrices + at * c.matrix_stride + j,
                                       logs + facts_at * c.size + j,
                                       c.matrix_row_stride,
                                       scaled,
                                       scaled_logs,
                                       state,
                                       c.size};
                double h = column.proved(line[facts_at + j]);
                if (is_nan(h)) h = column.exact();
                sum += p[j] * (h < 0.0 ? 0.0 : h);
            }
            __syncthreads();
        }
        if (t == length - 1) {
            for (int j = threadIdx.x; j < c.size; j += blockDim.x) {
                if (p[j] != 0.0) sum -= p[j] * log(p[j]);
            }
        }
    }
    sum = over_block(sum, room, [](double x, double y) { return x + y; });
    if (threadIdx.x != 0) return;
    double* const part = parts + split * all_rows + number;
    // Infinite weights have no entropy.
    *part = is_finite(totals[number].m) ? (goes_on ? *part + sum : sum) : Number<double>::nan();
}
