// The forward pass of best paths: the log of the largest weight of all paths up to each state.
//
// Blocks, warps and lanes share the work as in chain.cu, and a state is R rows of logs on chip. Whole
// numbers are taken off them, and forgotten: paths are told apart by differences alone. Which state
// a path came from is not kept; trace.cu finds it again where a path goes.
//
// Template parameters are those of chain.cu, and so are the arguments, of which this needs some.
#include "product.cuh"
#include "rows.cuh"

constexpr int kMaxThreads = 256;

// What is known of a row, in shared memory.
struct BestRow {
    long long number, potentials_at;
    int length;
};
static_assert(sizeof(BestRow) == 24, "ROW_BYTES of geometry.py's BestGeometry");

template <class T, int R, int C>
__global__ void __launch_bounds__(kMaxThreads, 1)
viterbi(const __grid_constant__ Recursion c, const __grid_constant__ Axes rows,
        const __grid_constant__ Axes, const __grid_constant__ Axes groups,
        const T* __restrict__ matrix, const T*, const T*, const T* __restrict__ shift, const void*,
        const void* __restrict__ potentials, const void* __restrict__ start, const void*,
        const long long* __restrict__ lengths, const long long* __restrict__ order,
        const T* state_in, const Scale*, T* state_out, Scale*, T* history, Scale*, void*, void*,
        Total*, const T*, const Scale*, const void*, void*) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    constexpr int V = Pack<T>::kNumbers, kWidth = 32 * C;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int padded = (c.size + V - 1) / V * V, tiles = (c.size + kWidth - 1) / kWidth;
    const int columns = tiles * kWidth, parts = warps / c.column_warps;
    const long long chunks = (c.rows + R - 1) / R;
    const long long group = blockIdx.x / chunks, row0 = group * c.rows + blockIdx.x % chunks * R;
    const int count_here = (int)min((long long)R, (group + 1) * c.rows - row0);
    const T* const own_matrices = matrix + row_offset<0>(groups, group);
    BestRow* const own_rows = reinterpret_cast<BestRow*>(shared_memory);
    T* const states = reinterpret_cast<T*>(shared_memory + (R * sizeof(BestRow) + 15) / 16 * 16);
    T* const all_sums = states + R * padded;

    for (int r = warp; r < R; r += warps) {
        const bool is_there = r < count_here;
        const long long number = !is_there ? row0 : order == nullptr ? row0 + r : order[row0 + r];
        if (lane == 0) {
            own_rows[r].number = number;
            own_rows[r].potentials_at = row_offset<0>(rows, number);
            own_rows[r].length = !is_there            ? 0
                                 : lengths == nullptr ? c.count
                                                      : (int)lengths[number];
        }
        for (int k = lane; k < padded; k += 32) {
            const bool is_known = is_there && k < c.size && c.first > 0;
            states[r * padded + k] =
                is_known ? state_in[number * c.size + k] : -Number<T>::infinity();
        }
    }
    __syncthreads();
    int longest = 0;
    for (int r = 0; r < R; ++r) longest = max(longest, own_rows[r].length);

    for (int i = c.first; i < min(c.last, longest); ++i) {
        const long long at = c.matrix_stride == 0 ? 0 : i - c.first_matrix;
        if (i > 0) {
            const T* const own_matrix = own_matrices + at * c.matrix_stride;
            const int packs = padded / V, packs_each = (packs + parts - 1) / parts;
            const int part = warp / c.column_warps;
            const int begin = min(part * packs_each, packs) * V;
            const int end = min((part + 1) * packs_each, packs) * V;
            for (int tile = warp % c.column_warps; tile < tiles; tile += c.column_warps) {
                const int column = tile * kWidth + lane;
                bool inside[C];
                #pragma unroll
                for (int k = 0; k < C; ++k) inside[k] = column + 32 * k < c.size;
                T sums[R][C];
                multiply<T, R, C, MaxPlus<T>>(own_matrix + column, c.matrix_row_stride, c.size,
                                              inside, states, padded, begin, end, sums);
                T* const to = all_sums + part * R * columns + column;
                #pragma unroll
                for (int r = 0; r < R; ++r) {
                    #pragma unroll
                    for (int k = 0; k < C; ++k) to[r * columns + 32 * k] = sums[r][k];
                }
            }
            __syncthreads();
        }
        for (int r = warp; r < R; r += warps) {
            const BestRow& own = own_rows[r];
            if (i >= own.length) continue;
            const long long x_at = own.potentials_at + i * c.potentials_time_stride;
            const T x_shift =
                whole_maximum<T>(potentials, x_at, c.potentials_stride, c.dtype, c.size, lane)
                    .value;
            const long long shift_at = (group * c.matrices + at) * c.size;
            const long long start_at = row_offset<1>(rows, own.number);
            T common = T(0);  // of what the entries of a step have taken off
            if (i > 0 && c.in_logs) {
                common = whole_maximum<T>(shift, shift_at, 1, kComputed<T>, c.size, lane).value;
            } else if (i == 0 && c.start_form == kLogs) {
                common = whole_maximum<T>(start, start_at, c.start_stride, c.dtype, c.size, lane)
                             .value;
            }
            T* const state = states + r * padded;
            T top = -Number<T>::infinity();
            #pragma unroll 1
            for (int j = lane; j < c.size; j += 32) {
                T v = T(0);
                if (i > 0) {
                    v = all_sums[r * columns + j];
                    for (int part = 1; part < parts; ++part) {
                        v = larger(v, all_sums[(part * R + r) * columns + j]);
                    }
                    if (c.in_logs && is_finite(shift[shift_at + j])) {
                        v += shift[shift_at + j] - common;
                    }
                } else if (c.start_form != kOnes) {
                    const T given = load_any<T>(start, start_at + j * c.start_stride, c.dtype);
                    v = log_of_weight<T>(c.start_form, given) - common;
                }
                const T x = load_any<T>(potentials, x_at + j * c.potentials_stride, c.dtype);
                // Its own shift first, so that large potentials do not swallow small differences.
                v += x - x_shift;
                state[j] = v;
                if (is_finite(v)) top = fmax(top, v);
            }
            top = shift_for(warp_max(top));
            T* const kept = history == nullptr ? nullptr
                                               : history + ((i - c.history_time) * c.groups *
                                                                c.rows + own.number) * c.size;
            #pragma unroll 1
            for (int j = lane; j < c.size; j += 32) {
                state[j] -= top;
                if (kept != nullptr) kept[j] = state[j];
            }
        }
        __syncthreads();
    }
    if (state_out == nullptr) return;
    for (int r = warp; r < count_here; r += warps) {
        for (int j = lane; j < c.size; j += 32) {
            state_out[own_rows[r].number * c.size + j] = states[r * padded + j];
        }
    }
}
