// What a block has in shared memory, and what a warp does with one of its rows.
#pragma once
#include "entries.cuh"

// What is known of a row, in shared memory.
template <class T>
struct Row {
    Scale scale, bare;  // of its state, and of the state before its potentials
    long long number;   // counted through all groups
    T top;              // the largest exponent
    T smallest;         // the smallest scaled entry that is not 0; 0 if one became 0
    T potential_shift, matrix_shift;
    Posterior<T> posterior;
    int length, broken;
    long long potentials_at, out_at;  // where its potentials, and messages or marginals, begin
};

template <class T>
struct WholeMaximum {
    T value;
    bool has_nan;
};

// The largest finite of n logs, rounded to a whole number; 0 if there is none.
template <class T>
__device__ __noinline__ WholeMaximum<T> whole_maximum(const void* logs, long long at,
                                                      long long stride, int dtype, int n,
                                                      int lane) {
    T top = -Number<T>::infinity();
    bool nan = false;
    #pragma unroll 4
    for (int k = lane; k < n; k += 32) {
        const T x = load_any<T>(logs, at + k * stride, dtype);
        if (is_finite(x)) top = fmax(top, x);
        nan |= is_nan(x);
    }
    nan = __any_sync(kAllLanes, nan);
    return {shift_for(warp_max(top)), nan};
}

// A row's state: `size` mantissas, and their exponents after them at a distance of `stride`.
template <class T>
struct Entries {
    T* m;
    int stride;
    __device__ __forceinline__ Extended<T> get(int k) const { return {m[k], m[stride + k]}; }
    __device__ __forceinline__ void set(int k, Extended<T> v) const {
        m[k] = v.m;
        m[stride + k] = v.e;
    }
};

// Scale a row's state to ordinary numbers with the largest near 2^kTop, for the product; `padded`
// of them, zeros at the end.
template <class T>
__device__ __noinline__ void scale_row(Row<T>& row, const Entries<T> state, int size, int padded,
                                       int lane, T* scaled) {
    T top = -Number<T>::infinity();
    #pragma unroll 2
    for (int k = lane; k < size; k += 32) {
        const Extended<T> v = state.get(k);
        if (v.is_regular()) top = fmax(top, v.e);
    }
    top = warp_max(top);
    top = is_finite(top) ? top : T(0);
    T smallest = Number<T>::infinity();
    #pragma unroll 2
    for (int k = lane; k < padded; k += 32) {
        T s = T(0);
        if (k < size) {
            const Extended<T> v = state.get(k);
            s = v.m;
            if (v.is_regular()) {
                s *= power_of_two<T>(v.e - top + T(Format<T>::kTop));
                smallest = fmin(smallest, s);
            }
        }
        scaled[k] = s;
    }
    smallest = lanes_min<32>(smallest);
    if (lane == 0) {
        row.top = top;
        row.smallest = smallest;
    }
}

// What is to be known of a column range of one row.
struct Columns {
    int first, last;
};

// The next state of a row from the sums of its product, where these are proved.
//
//   sums        of the first column, the parts of each a distance of `part_stride` apart
//   line, least, smallest
//               see prepare.cu and Row
//
// Returns two bits: 1 if some entry is open, 2 if some weight of these columns is NaN or negative.
template <class T>
__device__ __noinline__ int prove(const T* sums, int parts, int part_stride, const T* line,
                                  const T* least, T smallest, Columns columns, int lane,
                                  const Entries<T> to) {
    constexpr int U = 4;
    bool is_open = false, is_broken = false;
    #pragma unroll 1
    for (int j0 = columns.first + lane; j0 < columns.last; j0 += 32 * U) {
        T own_line[U], total[U];
        #pragma unroll
        for (int u = 0; u < U; ++u) {
            own_line[u] = j0 + 32 * u < columns.last ? line[j0 + 32 * u] : T(0);
            total[u] = T(0);
        }
        const T* from = sums + (j0 - columns.first);
        #pragma unroll 2
        for (int part = 0; part < parts; ++part) {
            #pragma unroll
            for (int u = 0; u < U; ++u) {
                if (j0 + 32 * u < columns.last) total[u] += from[32 * u];
            }
            from += part_stride;
        }
        #pragma unroll
        for (int u = 0; u < U; ++u) {
            const int j = j0 + 32 * u;
            if (j >= columns.last) break;
            is_broken |= is_nan(own_line[u]);
            const Extended<T> v = proved(total[u], own_line[u], least + j, smallest);
            is_open |= v.m == kOpen<T>;
            to.set(j, v);
        }
    }
    const int open = __any_sync(kAllLanes, is_open), broken = __any_sync(kAllLanes, is_broken);
    return (open != 0) | (broken != 0) << 1;
}

// What was taken off a matrix's columns, as far as it is not `common` to them.
template <class T>
__device__ __noinline__ void put_back_shifts(const T* shifts, T common, Columns columns, int lane,
                                             const Entries<T> to) {
    #pragma unroll 1
    for (int j = columns.first + lane; j < columns.last; j += 32) {
        to.set(j, put_back(to.get(j), shifts[j], common));
    }
}

// Multiply a row by exp(potentials - shift).
template <class T>
__device__ __noinline__ void weigh(const void* potentials, long long at, long long stride,
                                   int dtype, T shift, Columns columns, int lane,
                                   const Entries<T> to) {
    #pragma unroll 4
    for (int j = columns.first + lane; j < columns.last; j += 32) {
        const T x = load_any<T>(potentials, at + j * stride, dtype);
        to.set(j, times_exp(to.get(j), x - shift));
    }
}

// Copy a part of a state, or of a history, to where mantissas lie beside each other.
template <class T>
__device__ __noinline__ void write_state(const Entries<T> from, Columns columns, int size, int lane,
                                         T* to) {
    #pragma unroll 1
    for (int j = columns.first + lane; j < columns.last; j += 32) {
        const Extended<T> v = from.get(j);
        to[j] = v.m;
        to[size + j] = v.e;
    }
}
