// Both operands of a log product in one launch: the maxima of a's rows and b's columns and, if they
// are needed, the factors exp(a - row_max) and exp(b - column_max), in the layout of their operand.
#pragma once
#include "tile.cuh"

// Lines of a block: one to a warp where terms are contiguous, else one to a lane.
constexpr int LINES[2] = {8, 32};

// row_max [batch, rows], column_max [batch, columns]. left, right: factors [batch, lines, terms], or
// [batch, terms, lines] where terms are not contiguous; or null. is_finite_only: lines with +inf or
// NaN have factors 0, for gradients. Grid: `left_blocks` blocks of a's lines, then b's.
template <class In>
__global__ void __launch_bounds__(THREADS, 4)
prepare_factors(Operand<In> a, Operand<In> b, In* row_max, In* column_max, Compute<In>* left, Compute<In>* right,
                Sizes sizes, long long batch, long long left_blocks, int is_finite_only) {
    using T = Compute<In>;
    __shared__ T partial[8][32];
    const bool is_right = blockIdx.x >= left_blocks;
    const Operand<In> side = is_right ? b : a;
    const int lines = is_right ? sizes.columns : sizes.rows, terms = sizes.terms;
    In* maxima = is_right ? column_max : row_max;
    T* factors = is_right ? right : left;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool is_contiguous = side.term_stride == 1;
    const long long block = blockIdx.x - (is_right ? left_blocks : 0);
    const long long line = block * LINES[!is_contiguous] + (is_contiguous ? warp : lane);
    const bool exists = line < batch * lines;
    const long long product = exists ? line / lines : 0, number = exists ? line % lines : 0;
    const In* entries = side.line(product, number);
    const int first = is_contiguous ? lane : warp, step = is_contiguous ? 32 : 8;
    T top = -infinity<T>();
    #pragma unroll 8
    for (int k = first; k < terms; k += step) top = larger(load(entries + k * side.term_stride), top);
    if (is_contiguous) {
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) top = larger(__shfl_xor_sync(~0u, top, by), top);
    } else {
        partial[warp][lane] = top;
        __syncthreads();
        #pragma unroll
        for (int w = 0; w < 8; ++w) top = larger(partial[w][lane], top);
    }
    if (!exists) return;
    if (first == 0) store(maxima + line, top);
    if (!factors) return;
    const T shift = finite_or_zero(top);
    const bool is_zero = is_finite_only && !(top < infinity<T>());
    factors += product * lines * terms + (is_contiguous ? number * terms : number);
    #pragma unroll 4
    for (int k = first; k < terms; k += step) {
        const T factor = exponential(load(entries + k * side.term_stride) - shift);
        factors[(long long)k * (is_contiguous ? 1 : lines)] = is_zero ? T(0) : factor;
    }
}
