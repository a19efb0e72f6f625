// Contributions of steps to the entropy of the posterior over paths: the entropy of the state before,
// given the state at the step, averaged over the marginals of the latter; at a row's last step also the
// entropy of its marginals. Every entropy is that of logs with their own maximum, so that nothing
// cancels.
#include "chain.cuh"

// The entropy of the distribution in proportion to exp(log_weight(k)); 0 where no state has a weight.
template <class T, class LogWeight> __device__ __forceinline__ T entropy_of(int states, const LogWeight& log_weight) {
    T top = -infinity<T>();
    #pragma unroll 8
    for (int k = 0; k < states; ++k) top = larger(log_weight(k), top);
    if (top == -infinity<T>()) return 0;
    T sum = 0, product = 0;
    #pragma unroll 4
    for (int k = 0; k < states; ++k) {
        const T x = log_weight(k) - top, weight = exponential(x);
        sum += weight;
        product += weight > 0 ? weight * x : T(0);
    }
    return logarithm(sum) - product / sum;
}

// Both are for all threads of a block; scratch[32].
template <class T> __device__ T block_max(T x, T* scratch) {
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) x = larger(x, __shfl_xor_sync(~0u, x, by));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) x = larger(x, scratch[warp]);
    return x;
}
template <class T> __device__ T block_sum(T x, T* scratch) {
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) x += scratch[warp];
    return x;
}

// alpha, beta [steps, groups, rows, states]: the updated messages forward, and those predicted
// backward; before [groups, rows, states]: alpha of the step before, or null. log_sums: see
// log_partition.cu. out [steps, groups, rows]. Grid: one block for each step of each row, with a thread
// for each state.
template <class T>
__global__ void __launch_bounds__(1024, 1)
entropies(Chain<T> chain, const T* alpha, const T* before, const T* beta, const double* log_sums, double* out) {
    __shared__ T logs_before[1024], scratch[32];
    __shared__ double sums[32];
    const int K = chain.states, j = threadIdx.x;
    const long long rows = (long long)chain.groups * chain.rows, row = blockIdx.x % rows;
    const int t = blockIdx.x / rows, time = chain.time + t;
    const int length = chain.length(row);
    const double log_sum = log_sums[2 * row + 1];
    if (time >= length || !is_finite(log_sum)) {  // no path: no entropy; infinitely heavy ones: not known
        if (j == 0) out[blockIdx.x] = time >= length || log_sum == -infinity<double>() ? 0.0 : double(nan_value<T>());
        return;
    }
    const long long at = (long long)blockIdx.x * K;
    const bool has_before = time > 0, has_state = j < K;
    const T* from = t ? alpha + at - rows * K : before + row * K;
    const T x = has_state ? alpha[at + j] + beta[at + j] : -infinity<T>();
    const T top = block_max(x, scratch);
    const T weight = has_state ? exponential(x - top) : T(0);
    const T total = block_sum(weight, scratch);
    if (has_state && has_before) logs_before[j] = from[j];
    __syncthreads();
    double entropy = 0;
    if (has_state && has_before && weight > 0) {
        const T* logs = chain.logs
            + ((row / chain.rows) * chain.matrices + chain.matrix + t * chain.matrix_step) * (long long)K * K;
        entropy = double(weight / total) * entropy_of<T>(K, [&](int k) { return logs_before[k] + logs[k * K + j]; });
    }
    if (time == length - 1 && has_state && weight > 0) {
        entropy += double(weight / total) * (log(double(total)) - double(x - top));
    }
    entropy = block_sum(entropy, sums);
    if (j == 0) out[blockIdx.x] = entropy;
}
