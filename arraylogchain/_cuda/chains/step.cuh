// The rows of one block at one step: what follows the product.
//
// A warp takes an owned row through stages, some of them in rows.cuh, each a loop over the
// row's columns. What one leaves for the next lies in shared memory, so that none has the code of
// another in it.
#pragma once
#include "axes.cuh"
#include "rows.cuh"

// Compiled once: the division of large numbers takes many instructions.
template <int Operand>
__device__ __noinline__ long long row_offset(const Axes& axes, long long index) {
    return offset_of<Operand>(axes, index);
}

// The arrays that stages read and write. Those that are not wanted are null.
template <class T>
struct ChainArrays {
    const T *line, *least, *shift;
    const void *logs, *potentials, *start;
    T* history;
    Scale* history_scale;
    void* messages;
    Total* total;
    const T* forward;  // for marginals: the other direction's history
    const Scale* forward_scale;
    const void* cotangent;
    void* marginals;
};

// What the stages know of the launch and of the block.
template <class T>
struct ChainBlock {
    const Recursion& c;
    ChainArrays<T> arrays;
    const Axes &rows, &outputs;
    int lane, parts, padded, columns, part_stride, first_column, last_column;
    long long row0;  // the number of its first row, counted through all groups
    Row<T>* row;
    T *states, *scaled, *sums;

    __device__ __forceinline__ long long number(int r) const { return row0 + r; }
    // Two states of each row: the present one, and where the next one goes.
    __device__ __forceinline__ Entries<T> state(int r, int which) const {
        return {states + (2 * r + which) * 2 * padded, padded};
    }
    // Where the entries of a row at time t lie in a history that begins at `begin`.
    __device__ __forceinline__ long long place(int t, long long begin, int r) const {
        return (t - begin) * c.groups * c.rows + number(r);
    }

    // Set the scales of row r after a step, by lane 0.
    __device__ __forceinline__ void set_scales_here(int r, int t, bool begins, T shift) const {
        set_scales(row[r], begins, shift);
        if (arrays.history != nullptr && first_column == 0) {
            arrays.history_scale[place(t, c.history_time, r)] = row[r].scale;
        }
        if (arrays.marginals != nullptr) {
            set_posterior(row[r], arrays.forward_scale[place(t, c.other_time, r)],
                          arrays.total[number(r)]);
        }
    }

    // The first state of row r, without potentials. All of it is looked at, for NaN.
    __device__ __forceinline__ void begin_here(int r, int t, const Entries<T>& to) const {
        const int form = c.backward ? int(kOnes) : c.start_form;
        const long long start_at = row_offset<1>(rows, number(r));
        const auto given = [&](int k) {
            return load_any<T>(arrays.start, start_at + k * c.start_stride, c.dtype);
        };
        bool has_nan = false;
        T shift = T(0);
        if (form == kLogs) {
            const WholeMaximum<T> top = whole_maximum<T>(arrays.start, start_at, c.start_stride,
                                                         c.dtype, c.size, lane);
            shift = top.value;
            has_nan = top.has_nan;
        }
        if (lane == 0) set_scales_here(r, t, true, shift);
        #pragma unroll 1
        for (int j = lane; j < c.size; j += 32) {
            Extended<T> v = {T(1), T(0)};
            if (form == kLogs) v = times_exp(v, given(j) - shift);
            if (form == kWeights) v = split(given(j));
            has_nan |= is_nan(v.m);
            if (j >= first_column && j < last_column) to.set(j, v);
        }
        if (__any_sync(kAllLanes, has_nan) && lane == 0) row[r].broken = 1;
        __syncwarp();
    }

    // Other blocks' columns make a row's gradients NaN as well.
    __device__ __forceinline__ void look_at_all_lines(int r, long long facts_at) const {
        bool is_broken = false;
        #pragma unroll 1
        for (int j = lane; j < c.size; j += 32) is_broken |= is_nan(arrays.line[facts_at + j]);
        if (__any_sync(kAllLanes, is_broken) && lane == 0) row[r].broken = 1;
    }

    // Compute what is open again, from the extended numbers, one entry after another by all lanes.
    __device__ __forceinline__ void repair_here(int r, const T* matrix, long long logs_at,
                                                long long facts_at, const Entries<T>& from,
                                                const Entries<T>& to) const {
        #pragma unroll 1
        for (int j0 = first_column; j0 < last_column; j0 += 32) {
            const bool is_open = j0 + lane < last_column && to.m[j0 + lane] == kOpen<T>;
            unsigned open = __ballot_sync(kAllLanes, is_open);
            #pragma unroll 1
            for (; open != 0; open &= open - 1) {
                const int j = j0 + __ffs((int)open) - 1;
                Extended<T> v = exact_sum(matrix, logs_at, facts_at, from, j);
                if (v.is_regular()) v.e -= row[r].top;
                if (lane == 0) to.set(j, v);
            }
        }
    }

    __device__ __forceinline__ Extended<T> exact_sum(const T* matrix, long long logs_at,
                                                     long long facts_at, const Entries<T>& from,
                                                     int j) const {
        ExtendedSum<T> sum;
        T shift = T(0);
        if (c.in_logs) shift = arrays.shift[facts_at + j];
        shift = is_finite(shift) ? shift : T(0);
        #pragma unroll 1
        for (int k = lane; k < c.size; k += 32) {
            const Extended<T> s = from.get(k);
            Extended<T> p;
            if (c.in_logs) {
                const long long at =
                    logs_at + k * c.logs_row_stride + j * c.logs_column_stride;
                p = times_exp<T>({T(1), T(0)}, load_any<T>(arrays.logs, at, c.dtype) - shift);
            } else {
                p = split(matrix[k * c.matrix_row_stride + j]);
            }
            sum.add(s.m * p.m, s.e + p.e);
        }
        T value, exponent;
        sum.over_warp(value, exponent);
        return extended(value, exponent);
    }

    __device__ __forceinline__ void write_messages_here(const Scale& scale, long long out_at,
                                                        const Entries<T>& from) const {
        #pragma unroll 1
        for (int j = first_column + lane; j < last_column; j += 32) {
            store_any<T>(arrays.messages, out_at + j * c.out_stride, c.out_dtype,
                         log_of(from.get(j), scale));
        }
    }

    // The posterior probabilities of states, times the row's cotangent, from both directions.
    __device__ __forceinline__ void write_marginals_here(int r, int t, long long out_at,
                                                         const Entries<T>& back) const {
        const T* forward = arrays.forward + place(t, c.other_time, r) * 2 * c.size;
        const T factor = row[r].factor, power = row[r].power;
        T g = T(1);
        if (arrays.cotangent != nullptr) {
            g = load_any<T>(arrays.cotangent, row_offset<2>(outputs, number(r)), c.dtype);
        }
        #pragma unroll 1
        for (int j = first_column + lane; j < last_column; j += 32) {
            const Extended<T> v = back.get(j);
            // The factor is 0 where nothing has a gradient, though states may be infinite. It is
            // NaN where all gradients are.
            T p = is_nan(factor) ? factor : T(0);
            if (!is_nan(factor) && factor != T(0) && forward[j] != T(0) && v.m != T(0)) {
                const T exponent = forward[c.size + j] + v.e + power;
                p = forward[j] * v.m * power_of_two<T>(exponent) * factor;
            }
            store_any<T>(arrays.marginals, out_at + j * c.out_stride, c.out_dtype,
                         p == T(0) ? T(0) : g * p);
        }
    }

    // What is written at steps that row r does not have.
    __device__ __forceinline__ void fill_past_end_here(int r, int t) const {
        const long long out_at = row[r].out_at + (t - c.out_time) * c.out_time_stride;
        #pragma unroll 1
        for (int j = first_column + lane; j < last_column; j += 32) {
            const long long at = out_at + j * c.out_stride;
            if (arrays.messages != nullptr) {
                store_any<T>(arrays.messages, at, c.out_dtype, -Number<double>::infinity());
            }
            if (arrays.marginals != nullptr) store_any<T>(arrays.marginals, at, c.out_dtype, 0.0);
        }
    }
};

// What few launches or few steps need is compiled once for all tiles, and called with a copy of the
// block, so that the block itself stays in registers.
template <class T>
__device__ __noinline__ void begin(const ChainBlock<T> block, int r, int t, const Entries<T> to) {
    block.begin_here(r, t, to);
}

template <class T>
__device__ __noinline__ void repair(const ChainBlock<T> block, int r, const T* matrix,
                                    long long logs_at, long long facts_at, const Entries<T> from,
                                    const Entries<T> to) {
    block.repair_here(r, matrix, logs_at, facts_at, from, to);
}

template <class T>
__device__ __noinline__ void write_messages(const ChainBlock<T> block, const Scale scale,
                                            long long out_at, const Entries<T> from) {
    block.write_messages_here(scale, out_at, from);
}

template <class T>
__device__ __noinline__ void write_marginals(const ChainBlock<T> block, int r, int t,
                                             long long out_at, const Entries<T> back) {
    block.write_marginals_here(r, t, out_at, back);
}

template <class T>
__device__ __noinline__ void fill_past_end(const ChainBlock<T> block, int r, int t) {
    block.fill_past_end_here(r, t);
}
