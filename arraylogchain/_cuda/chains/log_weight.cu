// The logs of the weights of given paths, [..., T] states each.
#include "paths.cuh"

// A sum of logs: their whole parts, which add up exactly, apart from the rest. What is large and
// cancels leaves no rounding.
struct LogSum {
    double whole = 0.0, rest = 0.0;

    __device__ __forceinline__ void add(double x) {
        const double part = is_finite(x) ? rint(x) : 0.0;
        whole += part;
        rest += x - part;
    }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
log_weight(const __grid_constant__ Paths c, const __grid_constant__ Axes paths,
           const __grid_constant__ Axes ends, const long long* __restrict__ states,
           const void* __restrict__ potentials, const void* __restrict__ transitions,
           const void* __restrict__ start, const void* __restrict__ end,
           const long long* __restrict__ lengths, void* out) {
    const long long path = own_path();
    const int lane = threadIdx.x % 32;
    if (path >= c.paths) return;
    const int length =
        lengths == nullptr ? c.count : (int)lengths[row_offset<2>(ends, path)];
    const long long* const own = states + row_offset<0>(paths, path);
    const long long potentials_at = row_offset<1>(paths, path);
    const long long matrices = row_offset<2>(paths, path);
    LogSum sum;
    const auto add = [&](int form, const void* weights, long long at) {
        if (form != kOnes) sum.add(log_of_weight<double>(form, load_any<T>(weights, at, c.dtype)));
    };
    #pragma unroll 1
    for (int t = lane; t < length; t += 32) {
        const int k = (int)own[t * c.time_stride];
        add(kLogs, potentials,
            potentials_at + t * c.potentials_time_stride + k * c.potentials_stride);
        if (t == 0) {
            add(c.start_form, start, row_offset<0>(ends, path) + k * c.start_stride);
        } else {
            const long long before = own[(t - 1) * c.time_stride];
            add(c.form, transitions, matrices + column_at(c, t - 1, k) + before * c.row_stride);
        }
        if (t == length - 1) {
            add(c.end_form, end, row_offset<1>(ends, path) + k * c.end_stride);
        }
    }
    for (int o = 16; o > 0; o >>= 1) {
        sum.whole += __shfl_xor_sync(kAllLanes, sum.whole, o);
        sum.rest += __shfl_xor_sync(kAllLanes, sum.rest, o);
    }
    if (lane == 0) store_any<T>(out, path, c.dtype, sum.whole + sum.rest);
}
