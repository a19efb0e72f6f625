// A chain's recursion over time. Each block keeps the states of R rows on chip through all steps of
// the launch, while the matrices that they share stream by.
//
// A state is held as extended numbers. For a step it is scaled to ordinary numbers s, the largest
// near 2^kTop, and multiplied by the matrix: sums S[j] of s[k] P[k][j] by FMA. An entry is proved
// if S[j] reaches its column's line (prepare.cu), or if it is 0 and no product can have
// underflowed: no s became 0, and the smallest s times the smallest P[k][j] is a normal number.
// Whatever is not proved is computed again from the extended numbers, by the whole warp.
//
// Template parameters:
//   T    what is computed in, float or double
//   R    rows of a block
//   C    columns that a lane adds up, at a stride of 32
//
// Warps are column_warps side by side, and as many of those as there are share the terms of sums.
// A warp owns the rows r = warp, warp + warps, ... of what is not the product.
#include "product.cuh"
#include "step.cuh"

constexpr int kMaxThreads = 256;
constexpr int kShort = 128;
// What geometry.py counts on: BLOCK_BYTES and ROW_BYTES.
static_assert(sizeof(ChainBlock<float>) == 320 && sizeof(ChainBlock<double>) == 320, "BLOCK_BYTES");
static_assert(sizeof(Row<float>) == 104 && sizeof(Row<double>) == 128, "ROW_BYTES");

template <class T, int R, int C>
__global__ void __launch_bounds__(kMaxThreads, 1)
chain(const __grid_constant__ Recursion c, const __grid_constant__ Axes rows,
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    constexpr int V = Pack<T>::kNumbers, kWidth = 32 * C;
    const int padded = (c.size + V - 1) / V * V;
    // Column tiles of this slice.
    const int tiles = (c.size + kWidth - 1) / kWidth, each = (tiles + c.slices - 1) / c.slices;
    const int slice = blockIdx.x % c.slices;
    const int tile0 = min(slice * each, tiles), tile1 = min(tile0 + each, tiles);
    const Columns own_columns = {tile0 * kWidth, min(tile1 * kWidth, c.size)};
    const long long chunks = (c.rows + R - 1) / R, chunk = blockIdx.x / c.slices;
    const long long group = chunk / chunks, row0 = group * c.rows + chunk % chunks * R;
    const int count_here = (int)min((long long)R, (group + 1) * c.rows - row0);
    const long long matrix_at = row_offset<0>(groups, group);
    const long long logs_at = row_offset<1>(groups, group);

    ChainBlock<T>& block = chain_block<T>();
    constexpr int kBlockBytes = (sizeof(ChainBlock<T>) + 15) / 16 * 16;
    constexpr int kRowBytes = (R * sizeof(Row<T>) + 15) / 16 * 16;
    unsigned char* const shared = reinterpret_cast<unsigned char*>(&block) + kBlockBytes;
    Row<T>* const own_rows = reinterpret_cast<Row<T>*>(shared);
    T* const states = reinterpret_cast<T*>(shared + kRowBytes);
    T* const scaled = states + R * 4 * padded;
    T* const all_sums = scaled + R * padded;
    const int columns = each * kWidth, parts = warps / c.column_warps;
    if (threadIdx.x == 0) {
        block.c = c;
        block.arrays = {shift,   logs,          start,     end,      history_scale, messages, total,
                        forward, forward_scale, cotangent, marginals};
        block.rows = &rows;
        block.outputs = &outputs;
        block.own = own_columns;
        block.row = own_rows;
        block.states = states;
        block.padded = padded;
    }
    __syncthreads();

    for (int r = warp; r < R; r += warps) {
        Row<T>& own = own_rows[r];
        for (int k = lane; k < 4 * padded; k += 32) block.state(r, 0).m[k] = T(0);
        for (int k = lane; k < padded; k += 32) scaled[r * padded + k] = T(0);
        const bool is_there = r < count_here;
        const long long at = is_there ? row0 + r : row0;
        const long long number = order == nullptr ? at : order[at];
        if (lane == 0) {
            own.number = number;
            own.length = !is_there            ? 0
                         : lengths == nullptr ? c.count
                                              : (int)lengths[number];
            // One of the blocks that share a row keeps what they all find.
            own.broken = is_there && slice == 0 && c.first > 0 && total != nullptr &&
                         total[number].broken != 0.0;
            own.scale = is_there && c.first > 0 ? scale_in[number] : Scale{};
            own.potentials_at = row_offset<0>(rows, number);
            own.out_at = row_offset<1>(outputs, number);
        }
        __syncwarp();
        if (is_there && c.first > 0) {
            const T* in = state_in + number * 2 * c.size;
            for (int k = lane; k < c.size; k += 32) {
                block.state(r, 0).set(k, {in[k], in[c.size + k]});
            }
        }
    }
    __syncthreads();
    int longest = 0;
    for (int r = 0; r < R; ++r) longest = max(longest, own_rows[r].length);

    int now = 0;  // which of the two states of each row is the present one
    for (int i = c.first; i < c.last; ++i) {
        const int t = c.backward ? c.count - 1 - i : i;
        if (t >= longest) {  // forward, all rows have ended; backward, none has begun
            for (int r = warp; r < count_here; r += warps) fill_past_end<T>(r, t, lane);
            continue;
        }
        const long long at = c.matrix_stride == 0 ? 0 : i - c.first_matrix;
        const T* own_matrix = matrix + matrix_at + at * c.matrix_stride;
        if (i > 0) {
            for (int r = warp; r < R; r += warps) {
                Row<T>& own = own_rows[r];
                if (t >= own.length || (c.backward && t == own.length - 1)) continue;
                // What follows the product arrives in the meantime.
                prefetch_any<T>(potentials, own.potentials_at + t * c.potentials_time_stride,
                                c.potentials_stride, c.dtype, c.size, lane);
                if (marginals != nullptr) {
                    prefetch_any<T>(forward, block.place(t, c.other_time, r) * 2 * c.size, 1,
                                    kComputed<T>, 2 * c.size, lane);
                }
                scale_row(own, block.state(r, now), c.size, padded, lane,
                          scaled + r * padded);
            }
            __syncthreads();
            const int part = warp / c.column_warps;
            const int packs = padded / V, packs_each = (packs + parts - 1) / parts;
            const int begin = min(part * packs_each, packs) * V;
            const int end = min((part + 1) * packs_each, packs) * V;
            for (int tile = tile0 + warp % c.column_warps; tile < tile1; tile += c.column_warps) {
                const int column = tile * kWidth + lane;
                bool inside[C];
                #pragma unroll
                for (int k = 0; k < C; ++k) inside[k] = column + 32 * k < c.size;
                T* to = all_sums + part * R * columns + column - own_columns.first;
                // Terms that are about equal, added to one sum, are rounded to the same side again
                // and again: those of kShort terms are added up apart.
                for (int first = begin; first < end || first == begin; first += kShort) {
                    T sums[R][C];
                    multiply<T, R, C>(own_matrix + column, c.matrix_row_stride, c.size, inside,
                                      scaled, padded, first, min(first + kShort, end), sums);
                    #pragma unroll
                    for (int r = 0; r < R; ++r) {
                        #pragma unroll
                        for (int k = 0; k < C; ++k) {
                            T& sum = to[r * columns + 32 * k];
                            sum = first == begin ? sums[r][k] : sum + sums[r][k];
                        }
                    }
                }
            }
        }
        const long long facts_at = (group * c.matrices + at) * c.size;
        // While the other warps finish their sums: what the next state is shifted by.
        for (int r = warp; r < R; r += warps) {
            Row<T>& own = own_rows[r];
            if (t >= own.length) continue;
            const long long x_at = own.potentials_at + t * c.potentials_time_stride;
            const WholeMaximum<T> top = whole_maximum<T>(
                potentials, x_at, c.potentials_stride, c.dtype, c.size, lane);
            T matrix_shift = T(0);
            if (c.in_logs && i > 0) {
                matrix_shift =
                    whole_maximum<T>(shift, facts_at, 1, kComputed<T>, c.size, lane).value;
            }
            if (lane == 0) {
                own.potential_shift = top.value;
                own.matrix_shift = matrix_shift;
                own.broken |= top.has_nan;
            }
        }
        __syncthreads();
        for (int r = warp; r < R; r += warps) {
            Row<T>& own = own_rows[r];
            const Entries<T> from = block.state(r, now), to = block.state(r, now ^ 1);
            if (t >= own.length) {
                // The state stays as it is.
                for (int k = lane; k < c.size; k += 32) to.set(k, from.get(k));
                if (r < count_here) fill_past_end<T>(r, t, lane);
                continue;
            }
            const long long x_at = own.potentials_at + t * c.potentials_time_stride;
            const long long out_at = own.out_at + (t - c.out_time) * c.out_time_stride;
            if (i == 0 || (c.backward && t == own.length - 1)) {
                begin(r, t, lane, to);
            } else {
                if (lane == 0) set_scales_here<T>(r, t, false, own.matrix_shift);
                const int found = prove(all_sums + r * columns, parts, R * columns,
                                        line + facts_at, least + facts_at, own.smallest,
                                        own_columns, lane, to);
                if (found & 2 && lane == 0) own.broken = 1;
                if (c.slices > 1) look_at_all_lines(r, lane, line + facts_at, c.size);
                if (found & 1) {
                    repair(r, own_matrix, logs_at + at * c.logs_stride, facts_at, lane, from, to);
                }
                if (c.in_logs) {
                    put_back_shifts(shift + facts_at, own.matrix_shift, own_columns, lane, to);
                }
            }
            __syncwarp();
            if (c.backward && messages != nullptr) write_messages(r, true, out_at, lane, to);
            if (marginals != nullptr) write_marginals(r, t, out_at, lane, to);
            weigh(potentials, x_at, c.potentials_stride, c.dtype, own.potential_shift, own_columns,
                  lane, to);
            if (!c.backward && messages != nullptr) write_messages(r, false, out_at, lane, to);
            if (history != nullptr) {
                T* out = history + block.place(t, c.history_time, r) * 2 * c.size;
                write_state(to, own_columns, c.size, lane, out);
            }
            __syncwarp();
        }
        now ^= 1;
    }
    for (int r = warp; r < count_here; r += warps) {
        const Row<T>& own = own_rows[r];
        const long long number = own.number;
        if (state_out != nullptr) {
            write_state(block.state(r, now), own_columns, c.size, lane,
                        state_out + number * 2 * c.size);
            if (lane == 0 && slice == 0) scale_out[number] = own.scale;
        }
        if (total == nullptr || c.backward || slice != 0) continue;
        if (c.last < c.count || c.slices > 1) {
            if (lane == 0) total[number].broken = own.broken;
            continue;
        }
        const Extended<T> sum = sum_over_paths(r, lane, block.state(r, now));
        if (lane == 0) {
            write_total(own.scale, own.broken, sum, total + number, total_log,
                        row_offset<0>(outputs, number), c.dtype);
        }
    }
}
