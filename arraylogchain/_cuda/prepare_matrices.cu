// Transition matrices made ready for the recursion, in one launch for any number of them, from
// weights or logs, in the order of the caller or transposed: see struct Chain.
//
// Columns are shifted by integers (of nats, or of powers of two); the matrix's largest is part of
// `scales` instead.
#include "chain.cuh"

// Matrices of the caller: number n of a group, entry [from, to]. Strides are in entries.
template <class In> struct Matrices {
    const In* data;
    const long long* order;  // places of groups, or null
    long long group, matrix, from, to;
    int count, states, parts, is_log;  // count: of a group; parts: blocks of a matrix
};

// The larger of two logs, or of two weights, which are not negative; NaN if one is. Subnormal
// weights are compared by their bits: see `exact`.
__device__ __forceinline__ double larger_of(double x, double y, bool) { return larger(x, y); }
__device__ __forceinline__ float larger_of(float x, float y, bool is_log) {
    const int bits[2] = {*reinterpret_cast<const int*>(&x), *reinterpret_cast<const int*>(&y)};
    return is_log ? larger(x, y) : __int_as_float(max(bits[0], bits[1]));
}
template <class T> __device__ __forceinline__ T larger_of_warp(T x, bool is_log) {
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) x = larger_of(__shfl_xor_sync(~0u, x, by), x, is_log);
    return x;
}

__device__ __forceinline__ float power_of_two(float, int n) { return ldexpf(1.0f, n); }
__device__ __forceinline__ double power_of_two(double, int n) { return ldexp(1.0, n); }

// The largest entry of each column, in maxima[1024].
template <class T, class Get>
__device__ void column_maxima(int states, bool is_contiguous, bool is_log, T* maxima, const Get& get) {
    const int padded = (states + 31) / 32 * 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T lowest = is_log ? -infinity<T>() : T(0);
    if (is_contiguous) {
        const int slices = 1024 / padded, column = threadIdx.x % padded, slice = threadIdx.x / padded;
        T top = lowest;
        if (slice < slices && column < states) {
            #pragma unroll 8
            for (int k = slice; k < states; k += slices) top = larger_of(get(k, column), top, is_log);
        }
        maxima[threadIdx.x] = top;
        __syncthreads();
        if (threadIdx.x < padded) {
            for (int s = 1; s < slices; ++s) top = larger_of(maxima[s * padded + threadIdx.x], top, is_log);
        }
        __syncthreads();
        maxima[threadIdx.x] = top;
    } else {
        for (int j = warp; j < padded; j += 32) {
            T top = lowest;
            if (j < states) {
                #pragma unroll 8
                for (int k = lane; k < states; k += 32) top = larger_of(get(k, j), top, is_log);
            }
            top = larger_of_warp(top, is_log);
            if (lane == 0) maxima[j] = top;
        }
    }
    __syncthreads();
}

// factors, logs [matrices, states, states], each or null, `logs` transposed if asked for; shifts
// [matrices, states, 2]; scales [matrices, 2]. Grid: `parts` blocks for each matrix, which share its
// columns; all of them read the whole matrix.
template <class T, class In>
__global__ void __launch_bounds__(1024, 1)
prepare_matrices(Matrices<In> input, T* factors, T* shifts, T* logs, double* scales, int transposes_logs) {
    __shared__ T integers[1024], tile[32][33];
    const int K = input.states, padded = (K + 31) / 32 * 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long matrix = blockIdx.x / input.parts, group = matrix / input.count, number = matrix % input.count;
    const int part = blockIdx.x % input.parts;
    const In* x = input.data + (input.order ? input.order[group] : group) * input.group + number * input.matrix;
    const bool is_log = input.is_log, is_contiguous = input.to == 1;
    const auto get = [&](int k, int j) -> T {
        const T value = load(x + k * input.from + j * input.to);
        return !is_log && (value < 0 || is_nan(value)) ? nan_value<T>() : value;
    };
    const auto integer_of = [&](T top) {
        return is_log ? rounded(finite_or_zero(top)) : T(rint(finite_or_zero(log2(exact(top)))));
    };
    column_maxima(K, is_contiguous, is_log, integers, get);
    T largest = is_log ? -infinity<T>() : T(0);
    for (int j = lane; j < K; j += 32) largest = larger_of(integers[j], largest, is_log);
    largest = integer_of(larger_of_warp(largest, is_log));
    if (threadIdx.x == 0 && part == 0) {
        scales[2 * matrix + !is_log] = largest;
        scales[2 * matrix + is_log] = 0;
    }
    __syncthreads();
    if (threadIdx.x < K) integers[threadIdx.x] = integer_of(integers[threadIdx.x]);
    __syncthreads();
    // The columns of this block.
    const int share = (padded / 32 + input.parts - 1) / input.parts * 32, stop = min((part + 1) * share, K);
    for (int j0 = part * share; j0 < stop; j0 += 32) {
        const int j = j0 + lane;
        const T integer = j < K ? integers[j] : T(0), apart = integer - largest;
        const T high = is_log ? apart : apart * T(LN2_HIGH), low = is_log ? T(0) : apart * T(LN2_LOW);
        if (warp == 0 && j < K) {
            shifts[2 * (matrix * K + j)] = high;
            shifts[2 * (matrix * K + j) + 1] = low;
        }
        const int half = int(integer) / 2;  // one power alone may be out of range
        const T one = is_log ? T(1) : power_of_two(T(0), -half), other = is_log ? T(1) : power_of_two(T(0), half - int(integer));
        for (int k0 = 0; k0 < K; k0 += 32) {
            const int k = k0 + warp;
            T value = 0;
            if (is_contiguous) {
                if (k < K && j < K) value = get(k, j);
            } else {
                if (k0 + lane < K && j0 + warp < K) tile[warp][lane] = get(k0 + lane, j0 + warp);
                __syncthreads();
                value = tile[lane][warp];
                __syncthreads();
            }
            if (k >= K || j >= K) continue;
            T factor, log_factor;
            if (is_log) {
                log_factor = value - integer, factor = exponential(log_factor);
            } else {
                const bool is_exact = !is_subnormal_or_zero(value);
                factor = is_exact ? value * one * other : T(ldexp(exact(value), -int(integer)));
                // A factor that is subnormal is far from 0: its logarithm is that of the weight.
                log_factor = low + (is_exact && factor >= smallest_normal<T>()
                    ? logarithm(factor) : T(log(exact(value)) - double(integer) * LN2));
            }
            if (factors) factors[(matrix * K + k) * K + j] = factor;
            if (logs) logs[(matrix * K + (transposes_logs ? j : k)) * K + (transposes_logs ? k : j)] = log_factor;
        }
    }
}
