// The backtrace of samples: from the last step of a segment to its first, a state k before state j is
// drawn in proportion to exp(updated_k) P_kj. One warp for each sample of each row.
#include "chain.cuh"

// The sum of x over a warp, and over its threads up to each.
struct PrefixSum {
    double total, up_to_lane;
    __device__ PrefixSum(double x, int lane) : total(x), up_to_lane(x) {
        #pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const double other = __shfl_xor_sync(~0u, total, by);
            if (lane & by) up_to_lane += other;
            total += other;
        }
    }
};

// A state in proportion to exp(log_weight(k)): the first whose sum of weights exceeds `uniform` times
// the total, so that its weight is not zero; -1 where no state has one, -2 where the total is NaN.
template <class T, class LogWeight>
__device__ __forceinline__ int draw(int states, int lane, double uniform, const LogWeight& log_weight) {
    T top = -infinity<T>();
    for (int k = lane; k < states; k += 32) top = larger(log_weight(k), top);
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) top = larger(__shfl_xor_sync(~0u, top, by), top);
    top = finite_or_zero(top);
    double total = 0, sum = 0;
    for (int first = 0; first < states; first += 32) {
        const int k = first + lane;
        total += PrefixSum(k < states ? double(exponential(log_weight(k) - top)) : 0.0, lane).total;
    }
    if (total == 0) return -1;
    if (is_nan(total)) return -2;
    // Should the product be rounded up to the total, the last state that adds to the sum is drawn.
    const double level = uniform * total;
    int state = states;
    for (int first = 0; first < states && state == states; first += 32) {
        const int k = first + lane;
        const PrefixSum prefix(k < states ? double(exponential(log_weight(k) - top)) : 0.0, lane);
        const double below = sum + prefix.up_to_lane;
        sum += prefix.total;
        // The last lane has the sum to the bit that `total` has.
        const double rounded_below = lane == 31 ? sum : below;
        if (k < states && (rounded_below > level || rounded_below >= total)) state = k;
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) state = min(state, __shfl_xor_sync(~0u, state, by));
    }
    return state == states ? states - 1 : state;
}

// updated [steps, groups, rows, states]; logs of the matrices, each transposed, as for chain_trace.
// final: weights of last states. after [groups, rows, samples]: states of the step after these, -1 for
// none, -2 in a row of NaN weight; then their first step's states. states, uniforms: the samples (0
// where there is no state, -1 in a row of NaN weight), and the numbers that they are drawn with,
// which may share memory; samples are their last axis.
template <class T>
__global__ void __launch_bounds__(128, 4)
sample_paths(Chain<T> chain, Weights<T> final, const T* updated, long long* after, long long* states, Strides s,
             const double* uniforms, Strides u, long long count) {
    const int K = chain.states, lane = threadIdx.x % 32;
    const long long rows = (long long)chain.groups * chain.rows, number = blockIdx.x * 4LL + threadIdx.x / 32;
    if (number >= rows * count) return;
    const long long row = number / count, sample = number % count;
    const Origin origin(chain.order, chain.rows, row);
    states += origin.group * s.group + origin.row * s.row + sample * s.state;
    uniforms += origin.group * u.group + origin.row * u.row + sample * u.state;
    const T* logs = chain.logs + row / chain.rows * chain.matrices * K * K;
    const int length = chain.length(row);
    int state = chain.time + chain.steps < length ? int(after[number]) : -1;
    for (int t = chain.steps - 1; t >= 0; --t) {
        const int time = chain.time + t;
        const T* message = updated + (t * rows + row) * K;
        const double uniform = time < length ? uniforms[t * u.step] : 0;
        if (time == length - 1) {
            state = draw<T>(K, lane, uniform, [&](int k) {
                const SplitLog weight(exact(final.at(origin.group, origin.row, k)), final.is_log);
                return T((double(message[k]) + weight.high) + weight.remainder);
            });
            if (uniform < 0 && state >= 0) state = int(-1 - uniform);  // the caller has chosen it
        } else if (time < length && state >= 0) {
            const T* into = logs + (t * chain.matrix_step * K + state) * K;
            state = draw<T>(K, lane, uniform, [&](int k) { return message[k] + into[k]; });
        }
        __syncwarp();
        if (lane == 0) states[t * s.step] = time >= length || state == -2 ? -1 : max(state, 0);
    }
    if (lane == 0) after[number] = state;
}
