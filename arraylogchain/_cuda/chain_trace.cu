// The way back along best paths: a warp for each row, from the last step of a block to its first.
#include "chain.cuh"

// The better of two ways: of a larger weight, or NaN, and of those alike that from a smaller state.
template <class T> struct Way {
    T weight;
    int from;
    __device__ bool is_worse_than(const Way& other) const {
        if (is_nan(weight) || is_nan(other.weight)) {
            return is_nan(other.weight) && (!is_nan(weight) || other.from < from);
        }
        return weight < other.weight || (weight == other.weight && other.from < from);
    }
};

// left [steps, groups, rows, states]: what the recursion kept, in time. logs: those of the matrices
// that chain_steps.cu has read, each transposed, [..., to, from]; number t leads from step t on.
// after [groups, rows]: the states behind these steps; of rows whose last step is here, those there.
// path [steps, groups, rows].
template <class T>
__global__ void __launch_bounds__(128)
chain_trace(Chain<T> chain, const T* left, const long long* after, long long* path) {
    const int K = chain.states, lane = threadIdx.x % 32;
    const int rows = chain.groups * chain.rows;
    const int row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= rows) return;
    const T* logs = chain.logs + row / chain.rows * chain.matrices * K * K;
    const int length = chain.lengths ? chain.lengths[row] : chain.chain_steps;
    long long state = after[row];
    for (int t = chain.steps - 1; t >= 0; --t) {
        if (chain.time + t + 1 < length) {
            const T* from = left + ((long long)t * rows + row) * K;
            const T* to_state = logs + (t * chain.matrix_step * K + state) * K;
            Way<T> best{-infinity<T>(), K};
            for (int k = lane; k < K; k += 32) {
                const Way<T> way{from[k] + to_state[k], k};
                if (best.is_worse_than(way)) best = way;
            }
            #pragma unroll
            for (int by = 16; by > 0; by /= 2) {
                const Way<T> way{__shfl_xor_sync(~0u, best.weight, by), __shfl_xor_sync(~0u, best.from, by)};
                if (best.is_worse_than(way)) best = way;
            }
            state = best.from;
        }
        if (lane == 0) path[(long long)t * rows + row] = state;
    }
}
