// Gradients of log(exp(a) @ exp(b)). With factors A, B and their sums S (see prepare_factors.cuh), the
// weights W = g / S of certified entries give da = A * (W @ B'), db = B * (A' @ W), by cuBLAS. Other
// entries are added term by term, g_ij exp(a_ik + b_kj - out_ij), without the rounding error of
// `out`: a softmax weight of 1 would otherwise err by eps * |out|. Infinite entries have no gradient.
#include "tile.cuh"

// Up to here a weight stays finite in sums of many terms.
template <class T> __device__ __forceinline__ T largest_weight() { return T(sizeof(T) == 4 ? 1.2676506e30 : 6.6e299); }

// Replaces sums by W. remainders [batch, rows, columns]: log S - out of entries that are not
// certified, else NaN. has_uncertified: for each tile. g, out, sums are contiguous. Grid: tiles.
template <class In>
__global__ void __launch_bounds__(THREADS)
gradient_weights(Operand<In> a, Operand<In> b, const In* out, const In* g, Compute<In>* sums, Compute<In>* remainders,
                 unsigned char* has_uncertified, Sizes sizes, Compute<In> threshold) {
    using T = Compute<In>;
    __shared__ int is_any;
    if (threadIdx.x == 0) is_any = 0;
    __syncthreads();
    const Place place(sizes);
    for (int e = threadIdx.x; e < TILE * TILE; e += THREADS) {
        const int row = place.row + e / TILE, column = place.column + e % TILE;
        if (row >= sizes.rows || column >= sizes.columns) continue;
        const long long at = (place.batch * sizes.rows + row) * sizes.columns + column;
        const T sum = sums[at], weight = load(g + at) / sum;
        const bool has_gradient = is_finite(load(out + at)) && load(g + at) != T(0);
        // A NaN in g stays.
        const bool certified = sum >= threshold && !(fabs(weight) > largest_weight<T>());
        sums[at] = has_gradient && certified ? weight : T(0);
        remainders[at] = nan_value<T>();
        if (!has_gradient || certified) continue;
        is_any = 1;
        const In *x = a.line(place.batch, row), *y = b.line(place.batch, column);
        remainders[at] = T(log_sum_exp<double>(sizes.terms, [&](int k) {
            return double(load(x + k * a.term_stride)) + double(load(y + k * b.term_stride)) - double(load(out + at));
        }));
    }
    __syncthreads();
    if (threadIdx.x == 0) has_uncertified[blockIdx.x] = is_any;
}

// The product: entries [batch, rows, columns], contiguous.
template <class In> struct Entries {
    const In *out, *g;
    const Compute<In>* remainders;
    const unsigned char *has_uncertified, *has_nan;  // has_nan: one flag, or null: true
    int propagates_nan;  // whether NaN in operands show
};

// One operand: its entries, maxima and factors, and the memory of its gradient, [batch, lines, terms]
// of these strides. It holds W times the other operand's factors first.
template <class In> struct Side {
    Operand<In> entries;
    Operand<Compute<In>> factors;
    const In* maxima;
    Compute<In>* gradient;
    long long line_stride, term_stride;
};

// A block of 32 lines and 32 terms of one side. Its entries are at line * other_lines + other or, of b's
// side, at other * lines + line.
template <class In>
__device__ void finish_side(const Side<In>& side, const Side<In>& other, const Entries<In>& product, int lines,
                            int other_lines, int terms, long long block, bool is_left) {
    using T = Compute<In>;
    __shared__ int has_nan;
    const long long across = (terms + 31) / 32, down = (lines + 31) / 32, batch = block / across / down;
    const int term = block % across * 32 + threadIdx.x % 32, first = block / across % down * 32 + threadIdx.x / 32 * 4;
    if (threadIdx.x == 0) has_nan = 0;
    __syncthreads();
    for (int j = threadIdx.x; j < other_lines; j += THREADS) {
        if (is_nan(load(other.maxima + batch * other_lines + j))) has_nan = 1;
    }
    __syncthreads();
    T sums[4] = {};  // of entries that are not certified
    const int tiles = (other_lines + TILE - 1) / TILE, line_tiles = (lines + TILE - 1) / TILE, line_tile = first / TILE;
    const long long origin = batch * lines * other_lines;
    const bool propagates_nan = product.propagates_nan && (!product.has_nan || *product.has_nan);
    for (int tile = 0; tile < tiles; ++tile) {
        const int number = is_left ? line_tile * tiles + tile : tile * line_tiles + line_tile;
        if (term >= terms || first >= lines || !product.has_uncertified[batch * tiles * line_tiles + number]) continue;
        for (int j = tile * TILE; j < min(other_lines, tile * TILE + TILE); ++j) {
            const T y = load(other.entries.line(batch, j) + term * other.entries.term_stride);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + i >= lines) continue;
                const long long at = origin + (is_left ? (first + i) * (long long)other_lines + j : j * (long long)lines + first + i);
                const T remainder = product.remainders[at];
                if (is_nan(remainder)) continue;
                const double x = load(side.entries.line(batch, first + i) + term * side.entries.term_stride);
                const T weight = exponential(T(x + double(y) - double(load(product.out + at))) - remainder);
                if (weight > 0) sums[i] += load(product.g + at) * weight;  // 0 * inf is no weight
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int line = first + i;
        if (line >= lines || term >= terms) continue;
        const long long at = batch * lines * terms + line * side.line_stride + term * side.term_stride;
        const T factor = *(side.factors.line(batch, line) + term * side.factors.term_stride);
        const bool is_nan_line = has_nan || is_nan(load(side.maxima + batch * lines + line));
        side.gradient[at] = propagates_nan && is_nan_line ? nan_value<T>() : side.gradient[at] * factor + sums[i];
    }
}

// Grid: `left_blocks` blocks of a's side, then b's.
template <class In>
__global__ void __launch_bounds__(THREADS, 2)
finish_gradients(Side<In> left, Side<In> right, Entries<In> product, Sizes sizes, long long left_blocks) {
    if (blockIdx.x < left_blocks) {
        finish_side(left, right, product, sizes.rows, sizes.columns, sizes.terms, blockIdx.x, true);
    } else {
        finish_side(right, left, product, sizes.columns, sizes.rows, sizes.terms, blockIdx.x - left_blocks, false);
    }
}
