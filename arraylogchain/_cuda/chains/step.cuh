// The rows of one block at one step: what follows the product.
//
// A warp takes an owned row through stages, some of them in rows.cuh, each a loop over the
// row's columns and a function of its own. What one leaves for the next lies in shared memory, as
// does what all of them know: handed over as arguments it would take a stack, which the driver
// reserves for every thread that a device can have.
#pragma once
#include "rows.cuh"

// The arrays that stages read and write. Those that are not wanted are null.
template <class T>
struct ChainArrays {
    const T* shift;
    const void *logs, *start, *end;
    Scale* history_scale;
    void* messages;
    const Total* total;
    const T* forward;  // for marginals: the other direction's history
    const Scale* forward_scale;
    const void* cotangent;
    void* marginals;
};

// What the stages know of the launch and of the block: the beginning of its shared memory.
template <class T>
struct ChainBlock {
    Recursion c;
    ChainArrays<T> arrays;
    const Axes *rows, *outputs;
    Columns own;  // the columns of this slice
    Row<T>* row;
    T* states;
    int padded;  // numbers of a state, those beyond the last one included

    __device__ __forceinline__ long long number(int r) const { return row[r].number; }
    // Two states of each row: the present one, and where the next one goes.
    __device__ __forceinline__ Entries<T> state(int r, int which) const {
        return {states + (2 * r + which) * 2 * padded, padded};
    }
    // Where the entries of a row at time t lie in a history that begins at `begin`.
    __device__ __forceinline__ long long place(int t, long long begin, int r) const {
        return (t - begin) * c.groups * c.rows + number(r);
    }
};

template <class T>
__device__ __forceinline__ ChainBlock<T>& chain_block() {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    return *reinterpret_cast<ChainBlock<T>*>(shared_memory);
}

// Set the scales of row r after a step, by lane 0: the one it begins with, or one that goes on, by
// `shift` nats.
template <class T>
__device__ __noinline__ void set_scales_here(int r, int t, bool begins, T shift) {
    const ChainBlock<T>& block = chain_block<T>();
    Row<T>& row = block.row[r];
    if (begins) row.scale = {0.0, 0.0, 0.0};
    if (!begins) row.scale.bits += row.top;
    row.scale.add_nats(shift);
    row.bare = row.scale;
    row.scale.add_nats(row.potential_shift);
    if (block.arrays.history_scale != nullptr && block.own.first == 0) {
        block.arrays.history_scale[block.place(t, block.c.history_time, r)] = row.scale;
    }
    if (block.arrays.marginals != nullptr) {
        const Scale& forward = block.arrays.forward_scale[block.place(t, block.c.other_time, r)];
        row.posterior = posterior<T>(forward, row.bare, block.arrays.total[block.number(r)]);
    }
}

// The first state of row r, without potentials. All of it is looked at, for NaN.
template <class T>
__device__ __noinline__ void begin(int r, int t, int lane, const Entries<T> to) {
    const ChainBlock<T>& block = chain_block<T>();
    const Recursion& c = block.c;
    const int form = c.start_form;
    const void* start = block.arrays.start;
    const long long start_at = row_offset<1>(*block.rows, block.number(r));
    const auto given = [&](int k) {
        return load_any<T>(start, start_at + k * c.start_stride, c.dtype);
    };
    bool has_nan = false;
    T shift = T(0);
    if (form == kLogs) {
        const WholeMaximum<T> top =
            whole_maximum<T>(start, start_at, c.start_stride, c.dtype, c.size, lane);
        shift = top.value;
        has_nan = top.has_nan;
    }
    if (lane == 0) set_scales_here(r, t, true, shift);
    #pragma unroll 1
    for (int j = lane; j < c.size; j += 32) {
        Extended<T> v = {T(1), T(0)};
        if (form != kOnes) v = first_weight(form, given(j), shift);
        has_nan |= is_nan(v.m);
        if (j >= block.own.first && j < block.own.last) to.set(j, v);
    }
    if (__any_sync(kAllLanes, has_nan) && lane == 0) block.row[r].broken = 1;
}

// The sum over paths, from the last state of row r and the weights after it, whose shift goes to the
// scale.
template <class T>
__device__ __noinline__ Extended<T> sum_over_paths(int r, int lane, const Entries<T> state) {
    const ChainBlock<T>& block = chain_block<T>();
    const Recursion& c = block.c;
    const void* end = block.arrays.end;
    const long long end_at = row_offset<2>(*block.rows, block.number(r));
    T shift = T(0);
    if (c.end_form == kLogs) {
        shift = whole_maximum<T>(end, end_at, c.end_stride, c.dtype, c.size, lane).value;
    }
    bool has_nan = false;
    ExtendedSum<T> sum;
    #pragma unroll 1
    for (int k = lane; k < c.size; k += 32) {
        Extended<T> v = state.get(k);
        if (c.end_form != kOnes) {
            const T given = load_any<T>(end, end_at + k * c.end_stride, c.dtype);
            const Extended<T> w = first_weight(c.end_form, given, shift);
            has_nan |= is_nan(w.m);
            v = {v.m * w.m, v.e + w.e};
        }
        sum.add(v.m, v.e);
    }
    has_nan = __any_sync(kAllLanes, has_nan);
    if (lane == 0) {
        block.row[r].scale.add_nats(shift);
        if (has_nan) block.row[r].broken = 1;
    }
    T value, exponent;
    sum.over_lanes(value, exponent);
    return extended(value, exponent);
}

// Other blocks' columns make a row's gradients NaN as well.
template <class T>
__device__ __forceinline__ void look_at_all_lines(int r, int lane, const T* line, int size) {
    bool is_broken = false;
    #pragma unroll 1
    for (int j = lane; j < size; j += 32) is_broken |= is_nan(line[j]);
    if (__any_sync(kAllLanes, is_broken) && lane == 0) chain_block<T>().row[r].broken = 1;
}

// Column j of a matrix times a state, from the extended numbers, by all lanes.
template <class T>
__device__ __forceinline__ Extended<T> exact_sum(const T* matrix, long long logs_at,
                                                 long long facts_at, const Entries<T>& from,
                                                 int j, int lane) {
    const ChainBlock<T>& block = chain_block<T>();
    const Recursion& c = block.c;
    ExtendedSum<T> sum;
    T shift = T(0);
    if (c.in_logs) shift = block.arrays.shift[facts_at + j];
    shift = is_finite(shift) ? shift : T(0);
    #pragma unroll 1
    for (int k = lane; k < c.size; k += 32) {
        const Extended<T> s = from.get(k);
        const Extended<T> p =
            weight_of(c, matrix, block.arrays.logs, logs_at, shift, k, j);
        sum.add(s.m * p.m, s.e + p.e);
    }
    T value, exponent;
    sum.over_lanes(value, exponent);
    return extended(value, exponent);
}

// Compute what is open again, one entry after another by all lanes.
template <class T>
__device__ __noinline__ void repair(int r, const T* matrix, long long logs_at, long long facts_at,
                                    int lane, const Entries<T> from, const Entries<T> to) {
    const ChainBlock<T>& block = chain_block<T>();
    const Columns own = block.own;
    #pragma unroll 1
    for (int j0 = own.first; j0 < own.last; j0 += 32) {
        const bool is_open = j0 + lane < own.last && to.m[j0 + lane] == kOpen<T>;
        unsigned open = __ballot_sync(kAllLanes, is_open);
        #pragma unroll 1
        for (; open != 0; open &= open - 1) {
            const int owner = __ffs((int)open) - 1;
            Extended<T> v = exact_sum(matrix, logs_at, facts_at, from, j0 + owner, lane);
            if (v.is_regular()) v.e -= block.row[r].top;
            // In every stage an entry is written by the same lane.
            if (lane == owner) to.set(j0 + owner, v);
        }
    }
}

// Write messages, with the scale of the row before or after its potentials.
template <class T>
__device__ __noinline__ void write_messages(int r, bool is_bare, long long out_at, int lane,
                                            const Entries<T> from) {
    const ChainBlock<T>& block = chain_block<T>();
    const Scale& scale = is_bare ? block.row[r].bare : block.row[r].scale;
    #pragma unroll 1
    for (int j = block.own.first + lane; j < block.own.last; j += 32) {
        store_any<T>(block.arrays.messages, out_at + j * block.c.out_stride, block.c.out_dtype,
                     log_of(from.get(j), scale));
    }
}

// The posterior probabilities of states, times the row's cotangent, from both directions.
template <class T>
__device__ __noinline__ void write_marginals(int r, int t, long long out_at, int lane,
                                             const Entries<T> back) {
    const ChainBlock<T>& block = chain_block<T>();
    const Recursion& c = block.c;
    const T* forward = block.arrays.forward + block.place(t, c.other_time, r) * 2 * c.size;
    const Posterior<T> posterior = block.row[r].posterior;
    T g = T(1);
    if (block.arrays.cotangent != nullptr) {
        const long long at = row_offset<2>(*block.outputs, block.number(r));
        g = load_any<T>(block.arrays.cotangent, at, c.dtype);
    }
    #pragma unroll 1
    for (int j = block.own.first + lane; j < block.own.last; j += 32) {
        const T p = posterior.of(forward[j], forward[c.size + j], back.get(j));
        store_any<T>(block.arrays.marginals, out_at + j * c.out_stride, c.out_dtype,
                     p == T(0) ? T(0) : g * p);
    }
}

// What is written at steps that row r does not have.
template <class T>
__device__ __noinline__ void fill_past_end(int r, int t, int lane) {
    const ChainBlock<T>& block = chain_block<T>();
    const Recursion& c = block.c;
    const long long out_at = block.row[r].out_at + (t - c.out_time) * c.out_time_stride;
    #pragma unroll 1
    for (int j = block.own.first + lane; j < block.own.last; j += 32) {
        const long long at = out_at + j * c.out_stride;
        if (block.arrays.messages != nullptr) {
            store_any<T>(block.arrays.messages, at, c.out_dtype, -Number<double>::infinity());
        }
        if (block.arrays.marginals != nullptr) {
            store_any<T>(block.arrays.marginals, at, c.out_dtype, 0.0);
        }
    }
}
