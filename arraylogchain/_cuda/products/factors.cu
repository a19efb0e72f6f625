// A part of two operands as tile kernels want it: in the precision of the computation, lines
// adjoining, every term's lines padded with zeros to a multiple of 4.
//
// SHIFTED: exp(x - shift of the line), for sums. Otherwise the entries as they are, for maxima.
// Here is all that strides, dtypes and exponentials cost: O(1) per entry, not per block of the
// product that it takes part in.
#include "numbers.cuh"
#include "view.cuh"

// A block turns SIDE lines by SIDE terms with SIDE * ROWS threads.
constexpr int SIDE = 32, ROWS = 8;

template <class In, bool Shifted>
__device__ __forceinline__ void factors_of(const In* x, const View& view,
                                           const ComputeOf<In>* shifts, const Part& part,
                                           ComputeOf<In>* out, long long first_term,
                                           long long terms, long long block) {
    using T = ComputeOf<In>;
    __shared__ T turned[SIDE][SIDE + 1];
    const int inner = threadIdx.x % SIDE, outer = threadIdx.x / SIDE;
    const long long line_blocks = (part.pitch + SIDE - 1) / SIDE;
    const long long term_blocks = (terms + SIDE - 1) / SIDE;
    const long long rest = quotient(block, line_blocks);
    const long long batch = quotient(rest, term_blocks);
    const long long line0 = (block - rest * line_blocks) * SIDE;
    const long long term0 = (rest - batch * term_blocks) * SIDE;
    x += offset_of<0>(view.batch, part.first_batch + batch) + first_term * view.step;
    shifts += Shifted ? batch * part.lines : 0;

    const auto factor = [&](const In* at, long long line) {
        return Shifted ? exponential_of_difference(load(at), shifts[line]) : load(at);
    };
    T value[SIDE / ROWS];
    if (view.terms_adjoin) {
        const long long term = term0 + inner;
        #pragma unroll
        for (int i = 0; i < SIDE / ROWS; ++i) {
            const long long line = line0 + outer + i * ROWS;
            T v = 0;
            if (line < part.lines && term < terms) {
                v = factor(x + offset_of<0>(view.lines, part.first_line + line) + term * view.step,
                           line);
            }
            turned[outer + i * ROWS][inner] = v;
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < SIDE / ROWS; ++i) value[i] = turned[inner][outer + i * ROWS];
    } else {
        const long long line = line0 + inner;
        const bool inside = line < part.lines;
        if (inside) x += offset_of<0>(view.lines, part.first_line + line);
        #pragma unroll
        for (int i = 0; i < SIDE / ROWS; ++i) {
            const long long term = term0 + outer + i * ROWS;
            value[i] = inside && term < terms ? factor(x + term * view.step, line) : T(0);
        }
    }
    if (line0 + inner >= part.pitch) return;
    out += batch * terms * part.pitch + line0 + inner;
    #pragma unroll
    for (int i = 0; i < SIDE / ROWS; ++i) {
        const long long term = term0 + outer + i * ROWS;
        if (term < terms) out[term * part.pitch] = value[i];
    }
}

// Grid: the blocks of the left operand, then those of the right one. Terms `first_term` up to
// `first_term + terms` of each batch entry lie at [batch, term, line] in the results.
template <class In, bool Shifted>
__global__ void __launch_bounds__(SIDE * ROWS, 1)
factors(const In* left, View left_view, const ComputeOf<In>* left_shifts, Part left_part,
        ComputeOf<In>* left_out, const In* right, View right_view,
        const ComputeOf<In>* right_shifts, Part right_part, ComputeOf<In>* right_out,
        long long first_term, long long terms) {
    const long long block = blockIdx.x;
    if (block < left_part.blocks) {
        factors_of<In, Shifted>(left, left_view, left_shifts, left_part, left_out, first_term,
                                terms, block);
    } else {
        factors_of<In, Shifted>(right, right_view, right_shifts, right_part, right_out, first_term,
                                terms, block - left_part.blocks);
    }
}
