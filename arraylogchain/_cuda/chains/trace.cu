// Best paths, from their last states back to the first: which state each of them came from is found
// from the logs that viterbi.cu kept.
#include "paths.cuh"

template <class T>
struct Best {
    T value;
    int state;
};

// Whether a is larger; NaN is larger than all numbers.
template <class T>
__device__ __forceinline__ bool beats(T a, T b) {
    return a > b || (is_nan(a) && !is_nan(b));
}

// The first of the largest logs, each of them times a weight. A shift of logs is taken off first, so
// that large ones do not swallow small differences.
template <class T>
__device__ __noinline__ Best<T> best_of(const T* logs, const void* weights, long long at,
                                        long long stride, int form, int dtype, int size, int lane) {
    T shift = T(0);
    if (form == kLogs) shift = whole_maximum<T>(weights, at, stride, dtype, size, lane).value;
    Best<T> best = {-Number<T>::infinity(), size};
    #pragma unroll 2
    for (int k = lane; k < size; k += 32) {
        T v = logs[k];
        if (form != kOnes) {
            v += log_of_weight<T>(form, load_any<T>(weights, at + k * stride, dtype)) - shift;
        }
        if (beats(v, best.value)) best = {v, k};
    }
    for (int o = 16; o > 0; o >>= 1) {
        const Best<T> other = {__shfl_xor_sync(kAllLanes, best.value, o),
                               __shfl_xor_sync(kAllLanes, best.state, o)};
        const bool is_first = other.state < best.state && !beats(best.value, other.value);
        if (is_first || beats(other.value, best.value)) best = other;
    }
    if (best.state == size) best.state = 0;  // all are -inf
    return best;
}

// Write the states of rows at some steps: -1 past a row's end, 0 where no path has a weight, for
// which `possible` is 0. The state of a path at the step after them is there already.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
trace(const __grid_constant__ Paths c, const __grid_constant__ Axes rows,
      const __grid_constant__ Axes groups, const T* __restrict__ history,
      const void* __restrict__ transitions, const void* __restrict__ end,
      const long long* __restrict__ lengths, int* possible, long long* states) {
    const long long number = own_path();
    const int lane = threadIdx.x % 32;
    if (number >= c.paths) return;
    const int length = lengths == nullptr ? c.count : (int)lengths[number];
    const long long matrices = row_offset<0>(groups, quotient(number, c.rows));
    const long long end_at = row_offset<1>(rows, number);
    long long* const own = states + row_offset<0>(rows, number);
    bool is_possible = c.last < length && possible[number] != 0;
    int state = is_possible ? (int)own[c.last * c.time_stride] : 0;
    #pragma unroll 1
    for (int t = c.last - 1; t >= c.first; --t) {
        const T* const logs = history + ((t - c.history_time) * c.all_rows() + number) * c.size;
        if (t == length - 1) {
            const Best<T> best =
                best_of(logs, end, end_at, c.end_stride, c.end_form, c.dtype, c.size, lane);
            is_possible = best.value != -Number<T>::infinity();
            state = best.state;
        } else if (is_possible) {
            state = best_of(logs, transitions, matrices + column_at(c, t, state), c.row_stride,
                            c.form, c.dtype, c.size, lane)
                        .state;
        }
        if (lane == 0) own[t * c.time_stride] = t < length ? state : -1;
    }
    if (lane == 0) possible[number] = is_possible;
}
