// One entry of a state, and what is known of its row: the mathematics of a chain's recursion, for
// kernels that have the entries of a row in shared memory (chain.cu) or in registers (small.cu).
#pragma once
#include "any_dtype.cuh"
#include "axes.cuh"
#include "extended.cuh"

// The form of the weights that a chain begins with.
enum StartForm { kOnes, kWeights, kLogs };

// Plain numbers of a launch; recursion.py's RECURSION. Strides are in numbers.
struct Recursion {
    int size;           // K
    int count;          // T
    int first, last;    // steps of this launch, in the order in which they are computed
    int backward;       // whether that is from the last step of time to the first one
    int start_form, end_form;  // of the weights before the first and after the last step
    int dtype;          // of what is given, and of sums over all paths
    int out_dtype;      // of messages or marginals
    int in_logs;        // whether matrices are given as logs
    int slices;         // blocks that share the columns of the same rows
    int column_warps;   // warps of a block side by side; the others share the sums' terms
    int matrices;       // made ready in each group
    int first_matrix;   // the step that the first of them is for
    long long rows;     // in each group
    long long groups;
    long long matrix_stride, matrix_row_stride;       // of what is multiplied
    long long logs_stride, logs_row_stride, logs_column_stride;
    long long potentials_time_stride, potentials_stride, start_stride, end_stride;
    long long out_time_stride, out_stride;            // of messages or marginals
    long long out_time, history_time, other_time;     // the steps of time that those begin at
};

// Sums over all paths, m times a scale; whether something of the row was NaN or negative.
struct Total {
    Scale scale;
    double m, broken;
};

// Compiled once: the division of large numbers takes many instructions.
template <int Operand>
__device__ __noinline__ long long row_offset(const Axes& axes, long long index) {
    return offset_of<Operand>(axes, index);
}

// The largest or smallest of the numbers of neighbouring lanes, as many as a power of two.
template <int Lanes, class T>
__device__ __forceinline__ T lanes_max(T x) {
    for (int o = Lanes / 2; o > 0; o >>= 1) x = fmax(x, __shfl_xor_sync(kAllLanes, x, o));
    return x;
}

template <int Lanes, class T>
__device__ __forceinline__ T lanes_min(T x) {
    for (int o = Lanes / 2; o > 0; o >>= 1) x = fmin(x, __shfl_xor_sync(kAllLanes, x, o));
    return x;
}

template <class T>
__device__ __forceinline__ T warp_max(T x) {
    return lanes_max<32>(x);
}

// What logs with this maximum are shifted by: a whole number, 0 if none of them is finite.
template <class T>
__device__ __forceinline__ T shift_for(T top) {
    top = rint(top);
    return is_finite(top) ? top : T(0);
}

// The weight of a state before its first potential.
template <class T>
__device__ __forceinline__ Extended<T> first_weight(int form, T given, T shift) {
    if (form == kLogs) return times_exp<T>({T(1), T(0)}, given - shift);
    return split(given);
}

// The log of a weight as it is given, in the precision X; NaN for a negative one.
template <class X, class T>
__device__ __forceinline__ X log_of_weight(int form, T given) {
    constexpr X kLog2 = X(0.69314718055994530942);
    if (form == kLogs) return X(given);
    if (given >= Number<T>::tiny) return log(X(given));
    const Extended<T> v = split(given);  // a subnormal number would be taken for zero
    if (!v.is_regular()) return v.m == T(0) ? -Number<X>::infinity() : X(v.m);
    return fma(X(v.e), kLog2, log(X(v.m)));
}

// Entries that are not proved have this mantissa until they are computed again.
template <class T>
constexpr T kOpen = T(-1);

// An entry of the next state from the sum of its product, if that is proved.
//
//   line, least    of its column, see prepare.cu
//   smallest       at most the smallest scaled entry that is not 0; 0 if one became 0
template <class T>
__device__ __forceinline__ Extended<T> proved(T sum, T line, const T* least, T smallest) {
    if (sum >= line && sum <= Format<T>::kLargest) {
        Extended<T> v = split_normal(sum);
        v.e -= T(Format<T>::kTop);
        return v;
    }
    const bool is_zero = sum == T(0) && (*least > Format<T>::kLargest ||
                                         smallest * *least >= Number<T>::tiny);
    return {is_zero ? T(0) : kOpen<T>, T(0)};
}

// Entry [k][j] of a matrix as it was given, but for the shift of its column.
template <class T>
__device__ __forceinline__ Extended<T> weight_of(const Recursion& c, const T* matrix,
                                                 const void* logs, long long logs_at, T shift,
                                                 int k, int j) {
    if (!c.in_logs) return split(matrix[k * c.matrix_row_stride + j]);
    const long long at = logs_at + k * c.logs_row_stride + j * c.logs_column_stride;
    return times_exp<T>({T(1), T(0)}, load_any<T>(logs, at, c.dtype) - shift);
}

// What was taken off a column of a matrix is put back, as far as it is not `common` to all.
template <class T>
__device__ __forceinline__ Extended<T> put_back(Extended<T> v, T shift, T common) {
    return is_finite(shift) ? times_exp(v, shift - common) : v;
}

// A forward times a backward entry, times factor * 2^power, is a posterior probability. The factor
// is 0 where nothing has a gradient, though states may be infinite, and NaN where all gradients
// are.
template <class T>
struct Posterior {
    T factor, power;

    __device__ __forceinline__ T of(T m, T e, Extended<T> back) const {
        if (is_nan(factor)) return factor;
        if (factor == T(0) || m == T(0) || back.m == T(0)) return T(0);
        return m * back.m * power_of_two<T>(e + back.e + power) * factor;
    }
};

// `back` is the scale of the backward entries, without the potentials of their step.
template <class T>
__device__ __forceinline__ Posterior<T> posterior(const Scale& forward, const Scale& back,
                                                  const Total& total) {
    const double nats = (forward.nats - total.scale.nats) + back.nats +
                        ((forward.rest - total.scale.rest) + back.rest);
    const Power<double> power(nats);
    const bool is_valid = total.m != 0.0 && is_finite(total.m);
    Posterior<T> out;
    out.factor = is_valid ? T(power.factor / total.m)
                 : total.broken != 0.0 ? Number<T>::nan() : T(0);
    out.power =
        is_valid ? T((forward.bits - total.scale.bits) + back.bits + power.n) : T(0);
    return out;
}

// Write a row's sum over paths and its log. `sum` goes with the scale of the row's state.
template <class T>
__device__ __forceinline__ void write_total(const Scale& scale, bool is_broken, Extended<T> sum,
                                         Total* total, void* log, long long at, int dtype) {
    *total = {{scale.bits + sum.e, scale.nats, scale.rest}, sum.m, double(is_broken)};
    if (log != nullptr) store_any<T>(log, at, dtype, log_of(sum, scale));
}
