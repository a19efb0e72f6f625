// What rows' posterior weights are multiplied by, and gradients of a chain's initial and final
// weights.
#include "pairs.cuh"

constexpr int kThreads = 256;

// The factors of all rows for steps from t to t + 1; from nothing to the first step if `forward` is
// null. Rows that do not have the step get 0, and those with NaN get NaN.
template <class T>
__global__ void __launch_bounds__(kThreads)
chain_factors(const __grid_constant__ Pairs c, const __grid_constant__ Axes cotangents,
              const Scale* forward, const Scale* back, const Total* totals,
              const long long* lengths, const void* cotangent, T* factors) {
    const long long number = c.groups * c.rows;
    const long long at = blockIdx.x * (long long)kThreads + threadIdx.x;
    if (at >= c.times * number) return;
    const long long q = at % number, t = c.first + at / number;
    const Total total = totals[q];
    Factor<T> out = {T(0), T(0), T(0)};
    const bool is_there = lengths == nullptr || t + 1 < lengths[q];
    if (is_there && total.broken != 0.0) out = {Number<T>::nan(), T(0), T(1)};
    if (is_there && total.broken == 0.0 && total.m != 0.0 && is_finite(total.m)) {
        const double g = cotangent == nullptr
                             ? 1.0
                             : double(load_any<T>(cotangent, offset_of<0>(cotangents, q), c.dtype));
        Scale from = {0.0, 0.0, 0.0};
        if (forward != nullptr) from = forward[(t - c.forward_time) * number + q];
        const Scale to = back[(t + 1 - c.back_time) * number + q];
        const double nats = (from.nats - total.scale.nats) + to.nats +
                            ((from.rest - total.scale.rest) + to.rest);
        const Power<double> power(nats);
        const Extended<double> v = split(fabs(g) * power.factor / total.m);
        const double e = v.e + ((from.bits - total.scale.bits) + to.bits + power.n);
        out = {T(g < 0.0 ? -v.m : v.m), v.is_regular() ? T(e) : T(0), T(fabs(g))};
    }
    reinterpret_cast<Factor<T>*>(factors)[at] = out;
}

// The weight of the first or last state: a factor times what comes in to it, times the weight itself
// if that is given as a log. Rows side by side, [rows][K].
template <class T>
__global__ void __launch_bounds__(kThreads)
chain_start(const __grid_constant__ Pairs c, const __grid_constant__ Axes rows, const void* start,
            const T* back, const T* factors, T* out) {
    const long long at = blockIdx.x * (long long)kThreads + threadIdx.x;
    if (at >= c.groups * c.rows * c.size) return;
    const long long q = at / c.size;
    const int k = at % c.size;
    const Factor<T> factor = reinterpret_cast<const Factor<T>*>(factors)[q];
    T sum = factor.m;  // 0 and NaN stay as they are
    if (is_finite(factor.m) && factor.m != T(0)) {
        const T* to = back + (-c.back_time * c.groups * c.rows + q) * 2 * c.size;
        Extended<T> weight = {T(1), T(0)};
        if (c.start_form == kLogs) {
            const long long given = offset_of<0>(rows, q) + k * c.start_stride;
            weight = times_exp(weight, load_any<T>(start, given, c.dtype));
        }
        const T m = to[k] * weight.m * factor.m;
        sum = m == T(0) ? T(0) : ordinary(m, to[c.size + k] + weight.e + factor.e);
    }
    out[at] = sum;
}
