// Messages normalised at every step, from the states that the recursion has kept: a warp for each
// step of a row.
#include "entries.cuh"

constexpr int kThreads = 256;

// The sum of a state's entries, by all lanes.
template <class T>
__device__ __noinline__ Extended<T> sum_of(const T* state, int size, int lane) {
    ExtendedSum<T> sum;
    #pragma unroll 1
    for (int k = lane; k < size; k += 32) sum.add(state[k], state[size + k]);
    T value, exponent;
    sum.over_lanes(value, exponent);
    return extended(value, exponent);
}

// The states and scales are those of the steps from `first` on; `state_before` and `scale_before` of
// the step before these, null if there is none. Both results have the time axis, and the states,
// innermost.
template <class T>
__global__ void __launch_bounds__(kThreads)
filtered(int size, int first, int steps, long long all_rows, int dtype,
         const __grid_constant__ Axes rows, const T* states, const Scale* scales,
         const T* state_before, const Scale* scale_before, const long long* lengths,
         void* probabilities, void* log_normalizers) {
    const int lane = threadIdx.x % 32;
    const long long at = (blockIdx.x * (long long)kThreads + threadIdx.x) / 32;
    if (at >= steps * all_rows) return;
    const long long step = quotient(at, all_rows), number = at - step * all_rows;
    const long long t = first + step;
    Extended<T> total = {T(0), T(0)};
    const T* const state = states + at * 2 * size;
    double log = 0.0;
    if (lengths == nullptr || t < lengths[number]) {
        total = sum_of(state, size, lane);
        Scale scale = scales[at];
        Extended<T> ratio = total;
        // After 0, infinity or NaN it is the same at all later steps.
        if (t > 0 && total.is_regular()) {
            const bool is_here = step > 0;
            const T* const from = is_here ? state - all_rows * 2 * size
                                          : state_before + number * 2 * size;
            const Scale before = is_here ? scales[at - all_rows] : scale_before[number];
            const Extended<T> divisor = sum_of(from, size, lane);
            ratio = {total.m / divisor.m, total.e - divisor.e};
            scale = {scale.bits - before.bits, scale.nats - before.nats, scale.rest - before.rest};
        }
        log = log_of(ratio, scale);
    }
    if (lane == 0) {
        store_any<T>(log_normalizers, row_offset<1>(rows, number) + t, dtype, log);
    }
    const long long out = row_offset<0>(rows, number) + t * size;
    #pragma unroll 1
    for (int k = lane; k < size; k += 32) {
        T share = is_nan(total.m) ? total.m : T(0);
        if (total.is_regular() && state[k] != T(0)) {
            share = state[k] * power_of_two(state[size + k] - total.e) / total.m;
        }
        store_any<T>(probabilities, out + k, dtype, share);
    }
}
