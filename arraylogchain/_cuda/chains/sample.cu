// Samples of paths, drawn from their last states back to the first: given the state that follows,
// state k is drawn in proportion to what leads to it times the weight of going on from there.
#include "paths.cuh"

// A weight as it was given, with the digits of a double.
template <class T>
__device__ __forceinline__ Extended<double> wide_weight(int form, T given) {
    if (form == kOnes) return {1.0, 0.0};
    if (form == kLogs) return times_exp<double>({1.0, 0.0}, double(given));
    const Extended<T> v = split(given);
    return {double(v.m), double(v.e)};
}

// The first k up to which state[k] times weight k add up to more than `u` of all, or the last one
// that adds something. Each lane has as many k, one after another.
template <class T>
__device__ __forceinline__ int draw(const T* state, const void* weights, long long at,
                                 long long stride, int form, int dtype, int size, double u,
                                 int lane) {
    const int each = (size + 31) / 32;
    const int first = min(lane * each, size), stop = min(first + each, size);
    const auto product = [&](int k) {
        const T given = form == kOnes ? T(1) : load_any<T>(weights, at + k * stride, dtype);
        const Extended<double> w = wide_weight(form, given);
        return Extended<double>{double(state[k]) * w.m, double(state[size + k]) + w.e};
    };
    ExtendedSum<double> sum;
    #pragma unroll 1
    for (int k = first; k < stop; ++k) {
        const Extended<double> v = product(k);
        sum.add(v.m, v.e);
    }
    const double top = shift_for(warp_max(sum.any ? sum.e : -Number<double>::infinity()));
    const double own = sum.any ? sum.sum * power_of_two(sum.e - top) : 0.0;
    double below = own;
    for (int o = 1; o < 32; o *= 2) {
        const double before = __shfl_up_sync(kAllLanes, below, o);
        if (lane >= o) below += before;
    }
    const double limit = u * __shfl_sync(kAllLanes, below, 31);
    const unsigned beyond = __ballot_sync(kAllLanes, own > 0.0 && below > limit);
    const unsigned any = __ballot_sync(kAllLanes, own > 0.0);
    if (any == 0) return 0;
    const int owner = beyond != 0 ? __ffs((int)beyond) - 1 : 31 - __clz((int)any);
    double total = __shfl_up_sync(kAllLanes, below, 1);
    if (lane == 0) total = 0.0;
    int found = first;
    if (lane == owner) {
        #pragma unroll 1
        for (int k = first; k < stop; ++k) {
            const Extended<double> v = product(k);
            const double weight = v.m * power_of_two(v.e - top);
            if (!(weight > 0.0)) continue;
            total += weight;
            found = k;
            if (total > limit) break;
        }
    }
    return __shfl_sync(kAllLanes, found, owner);
}

// Write the states of samples at some steps: -1 past a row's end, 0 where no path has a weight or
// one's is infinite. Those of the step after them are there already. Numbers in [0, 1) may be where
// states are written.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
sample(const __grid_constant__ Paths c, const __grid_constant__ Axes rows,
       const __grid_constant__ Axes groups, const T* __restrict__ history,
       const Total* __restrict__ totals, const void* __restrict__ transitions,
       const void* __restrict__ end, const long long* __restrict__ lengths,
       const long long* uniforms, long long* states) {
    const long long path = own_path(), all_rows = c.all_rows();
    const int lane = threadIdx.x % 32;
    if (path >= c.paths) return;
    const long long copy = quotient(path, all_rows), number = path - copy * all_rows;
    const int length = lengths == nullptr ? c.count : (int)lengths[number];
    const long long matrices = row_offset<0>(groups, quotient(number, c.rows));
    const long long end_at = row_offset<2>(rows, number);
    long long* const own = states + copy * c.sample_stride + row_offset<0>(rows, number);
    const long long* const numbers =
        uniforms + copy * c.uniform_sample_stride + row_offset<1>(rows, number);
    const double total = totals[number].m;
    const bool is_possible = total > 0.0 && is_finite(total);
    int state = is_possible && c.last < length ? (int)own[c.last * c.time_stride] : 0;
    #pragma unroll 1
    for (int t = c.last - 1; t >= c.first; --t) {
        if (is_possible && t < length) {
            const T* const before = history + ((t - c.history_time) * all_rows + number) * 2 * c.size;
            const double u = __longlong_as_double(numbers[t * c.uniform_time_stride]);
            const bool is_last = t == length - 1;
            state = draw(before, is_last ? end : transitions,
                         is_last ? end_at : matrices + column_at(c, t, state),
                         is_last ? c.end_stride : c.row_stride, is_last ? c.end_form : c.form,
                         c.dtype, c.size, u, lane);
        }
        if (lane == 0) own[t * c.time_stride] = t < length ? state : -1;
    }
}
