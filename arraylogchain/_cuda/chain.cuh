// Declarations shared by the kernels of chains: arrays, the row and state of each thread, and
// exchange among the threads of a row.
//
// A group of threads works on R rows that share their matrices, one thread for each state: part of
// a warp (InWarp: up to 32 states, one row; a warp has several groups), or a whole block.
#pragma once
#include "numbers.cuh"

// The rows of a shard, in order of length, and the steps of a segment.
struct Rows {
    const long long* lengths;  // [groups, rows], or null: all steps of the chain
    const long long* order;    // the place of each row in the caller's arrays, or null: the same
    int groups, rows, steps, states, time, chain_steps;  // time: of step 0; chain_steps: of the longest row
    __device__ int length(long long row) const { return lengths ? int(lengths[row]) : chain_steps; }
};

// Strides of an array of the caller, in entries.
struct Strides {
    long long group, row, step, state;
};

// The steps of a segment. `chain_steps` numbers them s = 0, 1, ... in the order in which it processes
// them: backward that is against time, and strides of steps are negative. Strides are in entries.
template <class T> struct Chain : Rows {
    const T* potentials;  // logs, at step 0
    long long x_group, x_row, x_step, x_state;
    // Matrices prepared by prepare_matrices.cu, [groups, matrices of a group, states, states], from
    // the state before to the next. `factors` are weights of columns scaled to a maximum of about 1,
    // `logs` their logarithms. `shifts` [..., states, 2] are logs of the columns' scales: a multiple
    // of 2^-9, and a small remainder that `logs` include. `scales` [..., 2] of whole matrices are
    // not part of these: whole nats and powers of two.
    const T *factors, *shifts, *logs;
    const double* scales;
    long long matrices, matrix_step, matrix;  // of a group; from step to step; that into step 0
    int threads_per_row, direction;  // direction of `chain_steps` in time: 1 or -1
    int restarts_scales;             // whether the scale of each step, but the chain's first, begins with 0
    T threshold;                     // see is_certified
};

// Logs near 0 of rows [groups, rows, states] and their scales, [groups, rows]; in several
// steps they are `step` rows apart. Null pointers where messages are neither read nor stored.
template <class T> struct Messages {
    T* logs;
    double *shifts, *exponents;
    long long step;
};

// Weights [groups, rows, states] or their logs; ones where data is null. Strides are in entries.
template <class T> struct Weights {
    const T* data;
    long long group, row, state, is_log;
    __device__ T at(long long group_number, long long row_number, int k) const {
        if (!data) return is_log ? T(0) : T(1);
        const T x = data[group_number * group + row_number * row + k * state];
        return !is_log && x < 0 ? nan_value<T>() : x;
    }
};

// The log of a weight: a multiple of 2^-9, which may be large and cancel, and the remainder.
struct SplitLog {
    double high, remainder;
    __device__ SplitLog(double x, bool is_log) {
        const double integer = rint(is_log ? x : log2(x));
        high = is_log ? integer : integer * LN2_HIGH, remainder = 0;
        if (is_finite(integer)) remainder = is_log ? x - integer : log(ldexp(x, -int(integer))) + integer * LN2_LOW;
    }
};

// The place of a row in the caller's arrays.
struct Origin {
    long long group, row;
    __device__ Origin(const long long* order, int rows, long long row_number) {
        const long long place = order ? order[row_number] : row_number;
        group = place / rows, row = place % rows;
    }
};

// Threads of a block: four rows take more registers.
constexpr int threads_at_most(bool in_warp, int rows) {
    return in_warp ? 128 : rows > 1 ? 512 : 1024;
}

// Numbers of a group's rows, adjacent in shared memory, so that one instruction or two read them.
template <class T, int R> struct alignas(sizeof(T) * R < 16 ? sizeof(T) * R : 16) RowValues { T at[R]; };

// Dynamic shared memory, in this order: logs and weights of the states of each group of threads,
// scratch for exchange among warps, and the one matrix of all steps if it is on chip.
template <class T, bool InWarp, int R> struct Shared {
    RowValues<T, R> *logs, *weights;
    T *exchange, *matrix;
    __device__ Shared(unsigned char* memory, const Chain<T>& chain) {
        const int slots = InWarp ? blockDim.x / chain.threads_per_row : 1, slot = InWarp ? threadIdx.x / chain.threads_per_row : 0;
        RowValues<T, R>* rows = reinterpret_cast<RowValues<T, R>*>(memory);
        logs = rows + slot * 2 * chain.states;
        weights = logs + chain.states;
        exchange = reinterpret_cast<T*>(rows + slots * 2 * chain.states);
        matrix = exchange + 32 * R;
    }
    __device__ void copy_matrix(const T* from, int entries) const {
        constexpr int AT_A_TIME = 8;  // loads in flight
        for (int first = threadIdx.x; first < entries; first += AT_A_TIME * blockDim.x) {
            T entries_read[AT_A_TIME];
            #pragma unroll
            for (int e = 0; e < AT_A_TIME; ++e) entries_read[e] = from[min(first + e * int(blockDim.x), entries - 1)];
            #pragma unroll
            for (int e = 0; e < AT_A_TIME; ++e) {
                const int i = first + e * blockDim.x;
                if (i < entries) matrix[i] = entries_read[e];
            }
        }
        __syncthreads();
    }
};

template <class T, bool InWarp, int R> struct Group {
    static_assert(!InWarp || R == 1, "part of a warp has one row");
    const Chain<T>& chain;
    int state;
    bool has_state;
    long long set;                    // the number of the rows' matrices
    long long row[R];                 // through all groups
    long long origin_group[R], origin_row[R];  // in the caller's arrays
    bool exists[R];
    int first[R], stop[R];            // the row's steps; the first may be in a segment before
    const T* potentials[R];

    __device__ Group(const Chain<T>& chain) : chain(chain) {
        const int width = InWarp ? chain.threads_per_row : blockDim.x;
        state = threadIdx.x % width;
        has_state = state < chain.states;
        const int set_size = (chain.rows + R - 1) / R;  // groups of threads
        const int number = blockIdx.x * (blockDim.x / width) + threadIdx.x / width;
        set = min(number / set_size, chain.groups - 1);
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            const int in_set = (number - int(set) * set_size) * R + r;
            exists[r] = in_set < chain.rows;
            row[r] = set * chain.rows + (exists[r] ? in_set : 0);
            origin_group[r] = set, origin_row[r] = exists[r] ? in_set : 0;
            if (chain.order) {
                const Origin origin(chain.order, chain.rows, row[r]);
                origin_group[r] = origin.group, origin_row[r] = origin.row;
            }
            potentials[r] = chain.potentials + origin_group[r] * chain.x_group + origin_row[r] * chain.x_row
                + state * chain.x_state;
            // A row's first step is its first in time or, backward, its last.
            const int length = chain.length(row[r]);
            const bool forward = chain.direction > 0;
            first[r] = forward ? -chain.time : chain.time - (length - 1);
            stop[r] = !exists[r] ? 0 : forward ? min(length - chain.time, chain.steps) : chain.steps;
        }
    }
    // Whether a transition leads into a step.
    __device__ bool is_reached(int r, int s) const { return first[r] < s && s < stop[r]; }
    __device__ T potential(int r, int s) const {
        return has_state && first[r] <= s && s < stop[r] ? potentials[r][s * chain.x_step] : T(0);
    }
    // Barrier of the group's threads.
    __device__ void sync() const {
        if (InWarp) __syncwarp(); else __syncthreads();
    }
    // The largest x[r] of all states, for each thread. sync() between two calls.
    __device__ void largest(T (&x)[R], T* exchange) const {
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            for (int by = (InWarp ? chain.threads_per_row : 32) / 2; by > 0; by /= 2) {
                x[r] = larger(x[r], __shfl_xor_sync(~0u, x[r], by));
            }
        }
        if (InWarp) return;
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32 * R + r] = x[r];
        }
        __syncthreads();
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            x[r] = exchange[r];
            for (int warp = 1; warp < blockDim.x / 32; ++warp) x[r] = larger(x[r], exchange[warp * R + r]);
        }
    }
    // sums[r] = sum over k of weights[k].at[r] * matrix[k][state].
    // Partial sums of 16 terms: many equal terms added to one sum would all be rounded to one side.
    __device__ void multiply(const RowValues<T, R>* weights, const T* matrix, T (&sums)[R]) const {
        const int K = chain.states;
        #pragma unroll
        for (int r = 0; r < R; ++r) sums[r] = 0;
        for (int k0 = 0; k0 < K; k0 += 16) {
            T part[R] = {};
            const auto add = [&](int k) {
                const RowValues<T, R> entries = weights[k];
                const T entry = matrix[k * K + state];
                #pragma unroll
                for (int r = 0; r < R; ++r) part[r] = fma(entries.at[r], entry, part[r]);
            };
            if (k0 + 16 <= K) {  // unrolled, so that entries are read ahead of their use
                #pragma unroll
                for (int k = 0; k < 16; ++k) add(k0 + k);
            } else {
                #pragma unroll 4
                for (int k = k0; k < K; ++k) add(k);
            }
            #pragma unroll
            for (int r = 0; r < R; ++r) sums[r] += part[r];
        }
    }
    // maxima[r] = the largest of logs[k].at[r] + matrix[k][state], or NaN if one is.
    __device__ void maximize(const RowValues<T, R>* logs, const T* matrix, T (&maxima)[R]) const {
        #pragma unroll
        for (int r = 0; r < R; ++r) maxima[r] = -infinity<T>();
        #pragma unroll 8
        for (int k = 0; k < chain.states; ++k) {
            const RowValues<T, R> entries = logs[k];
            const T entry = matrix[k * chain.states + state];
            #pragma unroll
            for (int r = 0; r < R; ++r) maxima[r] = larger(entries.at[r] + entry, maxima[r]);
        }
    }
};
