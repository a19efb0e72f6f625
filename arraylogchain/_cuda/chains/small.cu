// A chain's recursion over time for few states: each lane has one entry of one row's state, and
// goes through all steps of the launch without a barrier of its block.
//
// What is computed, and what proves it, is as in chain.cu. Lanes of a row hand each other the
// scaled states through shared memory; everything else stays in registers, the lane's column of the
// matrix among it. An entry that is not proved is computed again by its own lane.
//
// Template parameters:
//   T    what is computed in, float or double
//   G    lanes of a row, at least as many as there are states: 4, 8, 16 or 32
#include "entries.cuh"
#include "product.cuh"

constexpr int kMaxThreads = 256;

// What a lane needs of its column of a matrix for the product. Nothing is there beyond the last
// state and the last row.
template <class T, int G>
struct MatrixColumn {
    T p[G], line = T(0), shift = T(0);

    __device__ __forceinline__ MatrixColumn() {
        #pragma unroll
        for (int k = 0; k < G; ++k) p[k] = T(0);
    }

    __device__ __forceinline__ void load(const T* matrix, long long row_stride, int size,
                                         const T* lines, const T* shifts) {
        #pragma unroll
        for (int k = 0; k < G; ++k) {
            if (k < size) p[k] = __ldg(matrix + k * row_stride);
        }
        line = __ldg(lines);
        if (shifts != nullptr) shift = __ldg(shifts);
    }
};

// The sum over k of the row's scaled states times p[k]: `own` is the lane's own scaled state, and
// `row` where the row has them in shared memory.
template <class T, int G>
__device__ __forceinline__ T product_of(T own, T* row, const T (&p)[G]) {
    constexpr int V = Pack<T>::kNumbers;
    row[threadIdx.x % G] = own;
    __syncwarp();
    T even = T(0), odd = T(0);
    #pragma unroll
    for (int k = 0; k < G; k += V) {
        const Pack<T> s = *reinterpret_cast<const Pack<T>*>(row + k);
        #pragma unroll
        for (int i = 0; i < V; i += 2) {
            even = fma(s[i], p[k + i], even);
            odd = fma(s[i + 1], p[k + i + 1], odd);
        }
    }
    __syncwarp();  // before the next states take their place
    return even + odd;
}

// A weight before the first or after the last step, but for a shift of its row's.
template <class T>
struct EndWeight {
    Extended<T> weight = {T(1), T(0)};
    T shift = T(0);
};

// The weight of a lane's state, where it has one; by all lanes.
template <class T, int G>
__device__ __noinline__ EndWeight<T> end_weight(int form, const void* weights, long long at,
                                                   int dtype, bool is_there) {
    EndWeight<T> out;
    T given = form == kLogs ? -Number<T>::infinity() : T(0);
    if (is_there) given = load_any<T>(weights, at, dtype);
    if (form == kLogs) {
        out.shift = shift_for(lanes_max<G>(is_finite(given) ? given : -Number<T>::infinity()));
    }
    out.weight = first_weight(form, given, out.shift);
    return out;
}

template <class T, int G>
__global__ void __launch_bounds__(kMaxThreads, sizeof(T) * G > 128 ? 1 : 2)
chain_small(const __grid_constant__ Recursion c, const __grid_constant__ Axes rows,
            const __grid_constant__ Axes outputs, const __grid_constant__ Axes groups,
            const T* __restrict__ matrix, const T* __restrict__ line, const T* __restrict__ least,
            const T* __restrict__ shift, const void* __restrict__ logs,
            const void* __restrict__ potentials, const void* __restrict__ start,
            const void* __restrict__ end,
            const long long* __restrict__ lengths, const long long* __restrict__ order,
            const T* state_in, const Scale* scale_in, T* state_out, Scale* scale_out, T* history,
            Scale* history_scale, void* messages, void* total_log, Total* total,
            const T* __restrict__ forward, const Scale* __restrict__ forward_scale,
            const void* __restrict__ cotangent, void* marginals) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    T* const scaled = reinterpret_cast<T*>(shared_memory) + threadIdx.x / G * G;
    const int j = threadIdx.x % G;
    const long long all_rows = c.groups * c.rows;
    const long long at_row = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / G;
    // Lanes beyond the last row go through all steps with a row of length 0, for the collectives.
    const bool is_row = at_row < all_rows, is_there = is_row && j < c.size;
    const long long number = !is_row ? 0 : order == nullptr ? at_row : order[at_row];
    const int length = !is_row ? 0 : lengths == nullptr ? c.count : (int)lengths[number];
    int longest = length;
    for (int o = 16; o > 0; o >>= 1) {
        longest = max(longest, __shfl_xor_sync(kAllLanes, longest, o));
    }
    const long long group = quotient(number, c.rows);
    const long long potentials_at = row_offset<0>(rows, number) + j * c.potentials_stride;
    const long long out_at = row_offset<1>(outputs, number) + j * c.out_stride;
    const long long logs_at = row_offset<1>(groups, group);
    const T* const own_matrix = matrix + row_offset<0>(groups, group) + j;
    T g = T(1);
    if (marginals != nullptr && cotangent != nullptr) {
        g = load_any<T>(cotangent, row_offset<2>(outputs, number), c.dtype);
    }

    Extended<T> v = {T(0), T(0)};
    Scale scale = {0.0, 0.0, 0.0};
    bool is_broken = false;
    if (c.first > 0 && is_row) {
        const T* in = state_in + number * 2 * c.size;
        if (is_there) v = {in[j], in[c.size + j]};
        scale = scale_in[number];
        is_broken = !c.backward && total != nullptr && total[number].broken != 0.0;
    }

    // What a step needs is loaded when the step before it has used its own.
    MatrixColumn<T, G> column;
    T x = -Number<T>::infinity();
    const auto facts_at = [&](int i) {
        const long long at = c.matrix_stride == 0 ? 0 : i - c.first_matrix;
        return (group * c.matrices + at) * c.size + j;
    };
    const auto matrix_of = [&](int i) {
        return own_matrix + (c.matrix_stride == 0 ? 0 : i - c.first_matrix) * c.matrix_stride;
    };
    const auto load_matrix = [&](int i) {
        if (!is_there || i == 0 || i >= c.last) return;
        const long long at = facts_at(i);
        column.load(matrix_of(i), c.matrix_row_stride, c.size, line + at,
                    c.in_logs ? shift + at : nullptr);
    };
    const auto load_potential = [&](int i) {
        const int t = c.backward ? c.count - 1 - i : i;
        if (is_there && t < length && i < c.last) {
            x = load_any<T>(potentials, potentials_at + t * c.potentials_time_stride, c.dtype);
        }
    };
    load_matrix(max(c.first, 1));
    load_potential(c.first);

    #pragma unroll 1
    for (int i = c.first; i < c.last; ++i) {
        const int t = c.backward ? c.count - 1 - i : i;
        const bool is_on = is_there && t < length;
        const long long own_out = out_at + (t - c.out_time) * c.out_time_stride;
        if (is_there && !is_on) {
            if (messages != nullptr) {
                store_any<T>(messages, own_out, c.out_dtype, -Number<double>::infinity());
            }
            if (marginals != nullptr) store_any<T>(marginals, own_out, c.out_dtype, 0.0);
        }
        if (t >= longest) {  // forward, all rows of the warp have ended; backward, none has begun
            load_potential(i + 1);
            continue;
        }
        const bool begins = i == 0 || (c.backward && t == length - 1);
        Extended<T> next = {T(1), T(0)};
        T top = T(0), common = T(0);  // what the scale goes on by
        if (i > 0) {
            top = v.is_regular() ? v.e : -Number<T>::infinity();
            T lowest = v.is_regular() ? v.e : Number<T>::infinity();
            T largest = is_there && is_finite(column.shift) ? column.shift
                                                            : -Number<T>::infinity();
            top = shift_for(lanes_max<G>(top));
            lowest = lanes_min<G>(lowest);
            if (c.in_logs) common = shift_for(lanes_max<G>(largest));
            // Of the exponents alone, it may be up to twice as small as the smallest entry.
            T smallest = lowest;
            if (is_finite(lowest)) {
                smallest = power_of_two<T>(lowest - top + T(Format<T>::kTop));
            }
            T own = v.m;
            if (v.is_regular()) own *= power_of_two<T>(v.e - top + T(Format<T>::kTop));
            const T sum = product_of(own, scaled, column.p);
            const bool is_used = is_on && !begins;
            Extended<T> found = {T(0), T(0)};
            if (is_used) {
                found = proved(sum, column.line, least + facts_at(i), smallest);
                is_broken |= is_nan(column.line);
            }
            const bool is_open = is_used && found.m == kOpen<T>;
            if (__any_sync(kAllLanes, is_open)) {
                const long long step = c.matrix_stride == 0 ? 0 : i - c.first_matrix;
                const T own_shift = c.in_logs && is_finite(column.shift) ? column.shift : T(0);
                ExtendedSum<T> exact;
                #pragma unroll 1
                for (int k = 0; k < c.size; ++k) {
                    const T m = __shfl_sync(kAllLanes, v.m, k, G);
                    const T e = __shfl_sync(kAllLanes, v.e, k, G);
                    if (!is_open) continue;
                    const Extended<T> p =
                        weight_of(c, matrix_of(i) - j, logs, logs_at + step * c.logs_stride,
                                  own_shift, k, j);
                    exact.add(m * p.m, e + p.e);
                }
                T value, exponent;
                exact.template over_lanes<1>(value, exponent);
                if (is_open) {
                    found = extended(value, exponent);
                    if (found.is_regular()) found.e -= top;
                }
            }
            if (c.in_logs && is_used) found = put_back(found, column.shift, common);
            next = found;
        }
        EndWeight<T> first;
        if (c.start_form != kOnes && __any_sync(kAllLanes, begins)) {
            const long long at = row_offset<1>(rows, number) + j * c.start_stride;
            first = end_weight<T, G>(c.start_form, start, at, c.dtype, is_there && begins);
        }
        if (begins) {
            next = first.weight;
            common = first.shift;
            is_broken |= is_there && is_nan(next.m);
        }
        if (c.matrix_stride != 0 && i > 0) load_matrix(i + 1);

        const T potential = is_on ? x : -Number<T>::infinity();
        const T potential_shift =
            shift_for(lanes_max<G>(is_finite(potential) ? potential : -Number<T>::infinity()));
        load_potential(i + 1);
        if (t >= length) continue;
        is_broken |= is_nan(potential);
        if (begins) scale = {0.0, 0.0, 0.0};
        if (!begins) scale.bits += top;
        scale.add_nats(common);
        const Scale bare = scale;
        scale.add_nats(potential_shift);
        if (!is_there) continue;
        v = times_exp(next, potential - potential_shift);
        const long long place = (t - c.history_time) * all_rows + number;
        if (history != nullptr) {
            history[place * 2 * c.size + j] = v.m;
            history[place * 2 * c.size + c.size + j] = v.e;
            if (j == 0) history_scale[place] = scale;
        }
        if (messages != nullptr) {
            store_any<T>(messages, own_out, c.out_dtype,
                         c.backward ? log_of(next, bare) : log_of(v, scale));
        }
        if (marginals != nullptr) {
            const long long other = (t - c.other_time) * all_rows + number;
            const T* from = forward + other * 2 * c.size + j;
            const Posterior<T> of_row = posterior<T>(forward_scale[other], bare, total[number]);
            const T p = of_row.of(from[0], from[c.size], next);
            store_any<T>(marginals, own_out, c.out_dtype, p == T(0) ? T(0) : g * p);
        }
    }
    __syncwarp();  // all lanes of a row have read what its first lane writes
    if (state_out != nullptr && is_there) {
        state_out[number * 2 * c.size + j] = v.m;
        state_out[number * 2 * c.size + c.size + j] = v.e;
        if (j == 0) scale_out[number] = scale;
    }
    if (total == nullptr || c.backward) return;
    const bool is_last = c.last == c.count;
    EndWeight<T> last;
    if (is_last && c.end_form != kOnes) {
        const long long at = row_offset<2>(rows, number) + j * c.end_stride;
        last = end_weight<T, G>(c.end_form, end, at, c.dtype, is_there);
        is_broken |= is_there && is_nan(last.weight.m);
        scale.add_nats(last.shift);
    }
    const bool row_is_broken = lanes_max<G>(is_broken ? T(1) : T(0)) != T(0);
    if (!is_last) {
        if (is_row && j == 0) total[number].broken = row_is_broken;
        return;
    }
    ExtendedSum<T> sum;
    if (is_there) sum.add(v.m * last.weight.m, v.e + last.weight.e);
    T value, exponent;
    sum.template over_lanes<G>(value, exponent);
    if (is_row && j == 0) {
        write_total(scale, row_is_broken, extended(value, exponent), total + number, total_log,
                    row_offset<0>(outputs, number), c.dtype);
    }
}
