// The backtrace of best paths: one warp for each row, from the last step of a segment to its first.
#include "chain.cuh"

// A predecessor and its weight. Of two, that of larger weight or NaN is better; of equal weights,
// the smaller state.
template <class T> struct Candidate {
    T weight;
    int from;
    __device__ bool is_worse_than(const Candidate& other) const {
        if (is_nan(weight) || is_nan(other.weight)) {
            return is_nan(other.weight) && (!is_nan(weight) || other.from < from);
        }
        return weight < other.weight || (weight == other.weight && other.from < from);
    }
};

// The best candidate of a warp.
template <class T> __device__ __forceinline__ Candidate<T> best_of_warp(Candidate<T> best) {
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        const Candidate<T> candidate{__shfl_xor_sync(~0u, best.weight, by), __shfl_xor_sync(~0u, best.from, by)};
        if (best.is_worse_than(candidate)) best = candidate;
    }
    return best;
}

// states [groups, rows]: the last states of best paths, -1 where no path has a positive weight, and
// -2 where the weight is NaN; weights [groups, rows]: their logs. last: the message after the last step; final: weights of last
// states. One warp for each row.
template <class T>
__global__ void __launch_bounds__(128)
best_last_states(Rows n, Messages<T> last, Weights<T> final, long long* states, double* weights) {
    const int lane = threadIdx.x % 32;
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32;
    if (row >= (long long)n.groups * n.rows) return;
    const Origin origin(n.order, n.rows, row);
    Candidate<double> best{-infinity<double>(), n.states};
    for (int k = lane; k < n.states; k += 32) {
        const SplitLog weight(exact(final.at(origin.group, origin.row, k)), final.is_log);
        const Candidate<double> candidate{(double(last.logs[row * n.states + k]) + weight.high) + weight.remainder, k};
        if (best.is_worse_than(candidate)) best = candidate;
    }
    best = best_of_warp(best);
    if (lane) return;
    states[row] = is_nan(best.weight) ? -2 : best.weight == -infinity<double>() ? -1 : best.from;
    const double exponent = last.exponents[row];
    weights[row] = (last.shifts[row] + exponent * LN2_HIGH + best.weight) + exponent * LN2_LOW;
}

// updated [steps, groups, rows, states]: stored by the recursion. logs: of the matrices, each
// transposed, [..., to, from]; matrix t leads from step t to the next. after [groups, rows]: the
// states of the step after these or, of rows that end here, of their last step, -1 for none, -2 for
// a row of NaN weight; then their first step's states. path: their states, 0 where there is none, -1
// in a row of NaN weight; steps past a row's end are -1.
template <class T>
__global__ void __launch_bounds__(128)
chain_trace(Chain<T> chain, const T* updated, long long* after, long long* path, Strides strides) {
    const int K = chain.states, lane = threadIdx.x % 32;
    const int rows = chain.groups * chain.rows;
    const int row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= rows) return;
    const Origin origin(chain.order, chain.rows, row);
    path += origin.group * strides.group + origin.row * strides.row;
    const T* logs = chain.logs + row / chain.rows * chain.matrices * K * K;
    const int length = chain.length(row);
    long long state = after[row];
    for (int t = chain.steps - 1; t >= 0; --t) {
        if (chain.time + t + 1 < length && state >= 0) {
            const T* from = updated + ((long long)t * rows + row) * K;
            const T* to_state = logs + (t * chain.matrix_step * K + state) * K;
            Candidate<T> best{-infinity<T>(), K};
            for (int k = lane; k < K; k += 32) {
                const Candidate<T> candidate{from[k] + to_state[k], k};
                if (best.is_worse_than(candidate)) best = candidate;
            }
            state = best_of_warp(best).from;
        }
        const bool is_none = state == -2 || chain.time + t >= length;
        if (lane == 0) path[t * strides.step] = is_none ? -1 : max(state, 0LL);
    }
    if (lane == 0) after[row] = state;
}
