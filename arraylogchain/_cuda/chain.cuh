// What the kernels of chains share: where arrays are, which thread has which row and state, and how
// the threads of a row exchange what they have.
//
// A group of threads works on R rows that share their matrices, a thread for each state: `lanes`
// threads of a warp (InWarp: up to 32 states, one row; a warp has several groups), or a whole block.
#pragma once
#include "numbers.cuh"

// A block of steps of a chain. Steps are numbered s = 0, 1, ... in the order in which they are
// taken: backward that is against time, and strides of steps are negative. Strides are in entries.
template <class T> struct Chain {
    const T* potentials;  // logs, at step 0
    long long x_group, x_row, x_step, x_state;
    // Matrices [groups, matrices of a group, states, states], from the state before to the next,
    // contiguous. `factors` are weights, of columns scaled to a largest of about 1, and `logs` their
    // logarithms. `shifts` [..., states, 2] are the logs of the columns' scales: multiples of 2^-9,
    // and what is left, small, which is part of `logs` already. What a whole matrix is scaled by is
    // taken off these: `scales` [..., 2], whole numbers of nats and powers of 2.
    const T *factors, *shifts, *logs;
    const double* scales;
    long long matrices, matrix_step, matrix;  // of a group; from step to step; that into step 0
    const int* lengths;  // [groups, rows], or null: all steps of the chain
    int groups, rows, steps, states, lanes;
    int time, direction, chain_steps;  // of step 0; 1 or -1; of the longest row
    T threshold;  // see is_proved
};

// Logs near 0 of rows [groups, rows, states] and what has been taken off them, [groups, rows]; at
// several steps, one behind the other, `step` rows apart. Null where nothing is to be read or kept.
template <class T> struct Messages {
    T* logs;
    double *shifts, *powers;
    long long step;
};

// Threads of a block: four rows take more registers.
constexpr int threads_at_most(bool in_warp, int rows) {
    return in_warp ? 128 : rows > 1 ? 512 : 1024;
}

// Numbers of a group's rows side by side in shared memory, read by one instruction or two.
template <class T, int R> struct alignas(sizeof(T) * R < 16 ? sizeof(T) * R : 16) Rows { T at[R]; };

// Dynamic shared memory, in this order: logs and weights of the states of each group of threads,
// what warps exchange, and the one matrix of all steps where it is kept on chip.
template <class T, bool InWarp, int R> struct Shared {
    Rows<T, R> *logs, *weights;
    T *exchange, *matrix;
    __device__ Shared(unsigned char* memory, const Chain<T>& chain) {
        const int slots = InWarp ? blockDim.x / chain.lanes : 1, slot = InWarp ? threadIdx.x / chain.lanes : 0;
        Rows<T, R>* rows = reinterpret_cast<Rows<T, R>*>(memory);
        logs = rows + slot * 2 * chain.states;
        weights = logs + chain.states;
        exchange = reinterpret_cast<T*>(rows + slots * 2 * chain.states);
        matrix = exchange + 32 * R;
    }
    __device__ void copy_matrix(const T* from, int entries) const {
        constexpr int AT_A_TIME = 8;  // loads on their way
        for (int first = threadIdx.x; first < entries; first += AT_A_TIME * blockDim.x) {
            T held[AT_A_TIME];
            #pragma unroll
            for (int e = 0; e < AT_A_TIME; ++e) held[e] = from[min(first + e * int(blockDim.x), entries - 1)];
            #pragma unroll
            for (int e = 0; e < AT_A_TIME; ++e) {
                const int i = first + e * blockDim.x;
                if (i < entries) matrix[i] = held[e];
            }
        }
        __syncthreads();
    }
};

template <class T, bool InWarp, int R> struct Group {
    static_assert(!InWarp || R == 1, "lanes of a warp have one row");
    const Chain<T>& chain;
    int state;
    bool has_state;
    long long set;                    // the number of the rows' matrices
    long long row[R];                 // through all groups
    bool exists[R];
    int begin[R], end[R];             // the row's steps; it may have begun before
    const T* potentials[R];

    __device__ Group(const Chain<T>& chain) : chain(chain) {
        const int lanes = InWarp ? chain.lanes : blockDim.x;
        state = threadIdx.x % lanes;
        has_state = state < chain.states;
        const int of_set = (chain.rows + R - 1) / R;  // groups of threads
        const int number = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
        set = min(number / of_set, chain.groups - 1);
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            const int in_set = (number - int(set) * of_set) * R + r;
            exists[r] = in_set < chain.rows;
            row[r] = set * chain.rows + (exists[r] ? in_set : 0);
            potentials[r] = chain.potentials + set * chain.x_group + in_set * chain.x_row + state * chain.x_state;
            // A row begins at its first step in time or, backward, at its last.
            const int length = chain.lengths ? chain.lengths[row[r]] : chain.chain_steps;
            const bool forward = chain.direction > 0;
            begin[r] = forward ? -chain.time : chain.time - (length - 1);
            end[r] = !exists[r] ? 0 : forward ? min(length - chain.time, chain.steps) : chain.steps;
        }
    }
    // Whether anything comes to a step from its neighbour, through a matrix.
    __device__ bool is_reached(int r, int s) const { return begin[r] < s && s < end[r]; }
    __device__ T potential(int r, int s) const {
        return has_state && begin[r] <= s && s < end[r] ? potentials[r][s * chain.x_step] : T(0);
    }
    // Waits until all threads of the group have written what others read.
    __device__ void sync() const {
        if (InWarp) __syncwarp(); else __syncthreads();
    }
    // The largest x[r] of all states, for each thread. sync() between two calls.
    __device__ void largest(T (&x)[R], T* exchange) const {
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            for (int by = (InWarp ? chain.lanes : 32) / 2; by > 0; by /= 2) {
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
    // Sums of 16 terms are added up apart: many of equal size would all be rounded to one side.
    __device__ void multiply(const Rows<T, R>* weights, const T* matrix, T (&sums)[R]) const {
        const int K = chain.states;
        #pragma unroll
        for (int r = 0; r < R; ++r) sums[r] = 0;
        for (int k0 = 0; k0 < K; k0 += 16) {
            T part[R] = {};
            const auto add = [&](int k) {
                const Rows<T, R> of_rows = weights[k];
                const T entry = matrix[k * K + state];
                #pragma unroll
                for (int r = 0; r < R; ++r) part[r] = fma(of_rows.at[r], entry, part[r]);
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
    // best[r] = the largest of logs[k].at[r] + matrix[k][state], or NaN if one is.
    __device__ void maximise(const Rows<T, R>* logs, const T* matrix, T (&best)[R]) const {
        #pragma unroll
        for (int r = 0; r < R; ++r) best[r] = -infinity<T>();
        #pragma unroll 8
        for (int k = 0; k < chain.states; ++k) {
            const Rows<T, R> of_rows = logs[k];
            const T entry = matrix[k * chain.states + state];
            #pragma unroll
            for (int r = 0; r < R; ++r) best[r] = larger(of_rows.at[r] + entry, best[r]);
        }
    }
};
