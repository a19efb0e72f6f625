// log(exp(left) @ exp(right)) where the left operand has few rows: matrix times vector, and such.
//
// Reading the right operand is all the time there is, so it is read once, and every entry is summed
// with its own maximum: nothing is left to prove.
#include "certificate.cuh"
#include "panel.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;

// R: rows that a block computes, at the cost of R exponentials per entry that is read.
//
// How threads are spread over columns and terms is said by columns_per_block, as in maxima.cu:
//   columns adjoin:              32 columns a block, the lanes; terms are dealt out to the warps.
//   terms adjoin, many columns:  16 columns a block, the warps; terms are dealt out to the lanes.
//   terms adjoin, few columns:   one column a block; terms are dealt out to all threads.
template <class In, int R>
__global__ void __launch_bounds__(THREADS, 1)
thin(const In* left, View left_view, const In* right, View right_view, long long terms, In* out,
     ProductView view, int columns_per_block, long long first_block) {
    using T = ComputeOf<In>;
    __shared__ T tops[WARPS][32], sums[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool adjoin = right_view.terms_adjoin;
    const long long column_blocks =
        (right_view.count + columns_per_block - 1) / columns_per_block;
    const long long row_blocks = (left_view.count + R - 1) / R;
    const long long block = first_block + blockIdx.x;
    const long long rest = quotient(block, column_blocks);
    const long long batch = quotient(rest, row_blocks);
    const long long row0 = (rest - batch * row_blocks) * R;
    const int own = !adjoin ? lane : columns_per_block == 1 ? 0 : warp;
    const long long column = (block - rest * column_blocks) * columns_per_block + own;
    const int first = !adjoin ? warp : columns_per_block == 1 ? int(threadIdx.x) : lane;
    const int stride = !adjoin ? WARPS : columns_per_block == 1 ? THREADS : 32;

    left += offset_of<0>(left_view.batch, batch);
    const In* of_row[R];
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        of_row[r] = left + offset_of<0>(left_view.lines, min(row0 + r, left_view.count - 1)) +
                    first * left_view.step;
    }
    out += offset_of<0>(view.batch, batch) +
           (column < right_view.count ? offset_of<0>(view.columns, column) : 0);
    LogSum<T> part[R];
    if (column < right_view.count) {
        right += offset_of<0>(right_view.batch, batch) + offset_of<0>(right_view.lines, column) +
                 first * right_view.step;
        const long long left_step = stride * left_view.step, right_step = stride * right_view.step;
        // More than one read is on its way at a time.
        #pragma unroll (R * sizeof(T) == 4 ? 4 : R * sizeof(T) <= 8 ? 2 : 1)
        for (long long k = first; k < terms; k += stride) {
            const T y = load(right);
            right += right_step;
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                part[r].add(load(of_row[r]) + y);
                of_row[r] += left_step;
            }
        }
    }
    // Whoever writes an entry: a lane of the first warp, or the first lane of its own.
    const bool writes = adjoin ? lane == 0 && (columns_per_block > 1 || warp == 0) : warp == 0;
    #pragma unroll
    for (int r = 0; r < R; ++r) {
        if (row0 + r >= left_view.count) break;
        LogSum<T> sum = part[r];
        if (adjoin) {
            #pragma unroll 1
            for (int other = 16; other > 0; other /= 2) {
                const T top = __shfl_xor_sync(~0u, sum.top, other);
                sum.merge(top, __shfl_xor_sync(~0u, sum.sum, other));
            }
        }
        if (columns_per_block != WARPS) {
            __syncthreads();
            tops[warp][lane] = sum.top;
            sums[warp][lane] = sum.sum;
            __syncthreads();
            #pragma unroll 1
            for (int w = 1; writes && w < WARPS; ++w) sum.merge(tops[w][lane], sums[w][lane]);
        }
        if (!writes || column >= right_view.count) continue;
        store(out + offset_of<0>(view.rows, row0 + r), sum.value());
    }
}
