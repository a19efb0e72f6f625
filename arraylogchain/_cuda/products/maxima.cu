// The shift of every line of two operands: its largest entry.
//
// A finite maximum is rounded to a whole number, so that the sum of two shifts is exact. One that
// is infinite or NaN stays: exponentials of the line are then all 0, and the product sees why.
#include "numbers.cuh"
#include "view.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;

// How the threads of a block are spread. Neighbours in a warp read neighbours in memory.
//   lines adjoin:             32 lines a block, the lanes; terms are dealt out to the warps.
//   terms adjoin, many lines: 16 lines a block, the warps; terms are dealt out to the lanes.
//   terms adjoin, few lines:  one line a block; terms are dealt out to all threads.
// `lines_per_block` says which.
//
// Where lines are few and long, blocks have terms_each of their terms. Their maxima are then
// [parts, batch, line]; of these the maxima are taken by a second launch.
template <class In>
__device__ __forceinline__ void maxima_of(const In* x, const View& view, const Part& part,
                                          ComputeOf<In>* shifts, long long terms,
                                          long long terms_each, int lines_per_block,
                                          long long block) {
    using T = ComputeOf<In>;
    __shared__ T parts[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool adjoin = view.terms_adjoin;
    const long long blocks = (part.lines + lines_per_block - 1) / lines_per_block;
    const long long of_all = quotient(block, blocks);  // over all parts of the terms
    const long long of_terms = quotient(of_all, part.batches), batch = of_all - of_terms * part.batches;
    const int own = !adjoin ? lane : lines_per_block == 1 ? 0 : warp;
    const long long line = (block - of_all * blocks) * lines_per_block + own;
    const long long first = of_terms * terms_each +
                            (!adjoin ? warp : lines_per_block == 1 ? int(threadIdx.x) : lane);
    const int stride = !adjoin ? WARPS : lines_per_block == 1 ? THREADS : 32;

    T top = -Number<T>::infinity();
    if (line < part.lines) {
        const In* start = x + offset_of<0>(view.batch, part.first_batch + batch) +
                          offset_of<0>(view.lines, part.first_line + line);
        #pragma unroll 4
        for (long long k = first; k < min(terms, (of_terms + 1) * terms_each); k += stride) {
            top = larger(top, load(start + k * view.step));
        }
    }
    if (adjoin) {
        #pragma unroll
        for (int other = 16; other > 0; other /= 2) {
            top = larger(top, __shfl_xor_sync(~0u, top, other));
        }
    }
    parts[warp][lane] = top;
    __syncthreads();
    // Whoever reads the parts of a line: a lane of the first warp, or the first lane of its own.
    const bool writes = adjoin ? lane == 0 && (lines_per_block > 1 || warp == 0) : warp == 0;
    if (!writes || line >= part.lines) return;
    if (lines_per_block != WARPS) {
        for (int w = 1; w < WARPS; ++w) top = larger(top, parts[w][lane]);
    }
    // rint keeps infinities and NaN.
    shifts[of_all * part.lines + line] = rint(top);
}

// Grid: the blocks of the left operand, then those of the right one.
template <class In>
__global__ void __launch_bounds__(THREADS, 1)
maxima(const In* left, View left_view, Part left_part, ComputeOf<In>* left_shifts,
       int left_lines_per_block, const In* right, View right_view, Part right_part,
       ComputeOf<In>* right_shifts, int right_lines_per_block, long long terms,
       long long terms_each) {
    const long long block = blockIdx.x;
    if (block < left_part.blocks) {
        maxima_of(left, left_view, left_part, left_shifts, terms, terms_each,
                  left_lines_per_block, block);
    } else {
        maxima_of(right, right_view, right_part, right_shifts, terms, terms_each,
                  right_lines_per_block, block - left_part.blocks);
    }
}
