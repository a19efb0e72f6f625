// Gradients of many small log products, a warp for each: factors, sums and their proof as in
// small.cu, weights h / S as in posterior_weights.cu, what is not proved as in exact_posterior.cu,
// and the sums of all that, on chip. Both operands lie as [line, term] there.
#include "certificate.cuh"
#include "matrix_copies.cuh"
#include "panel.cuh"
#include "warp_product.cuh"

// x / y to 2 ulp, for y below 2^126.
__device__ __forceinline__ float ratio(float x, float y) { return __fdividef(x, y); }
__device__ __forceinline__ double ratio(double x, double y) { return x / y; }

// A product whose shifts add up to less is finite in this dtype, if its sum is proved.
template <class In> __device__ __forceinline__ ComputeOf<In> finite_below() {
    return 1 / Number<ComputeOf<In>>::tiny;
}
template <> __device__ __forceinline__ float finite_below<__half>() { return 0x1.fp+15f; }

// What a warp holds of one product. Factors become gradients, and cotangents weights, in place.
template <class T, int P> struct SmallProduct {
    static constexpr int PITCH = WarpProduct<T, P>::PITCH;
    alignas(16) T left[P][PITCH];
    T right[P][PITCH];
    T weights[P][PITCH];
    T shifts[2 * P];  // of rows, then of columns
};

// Makes factors of entries, and shifts. What is missing at the edges is -inf.
template <class T, int P>
__device__ __forceinline__ void make_factors(SmallProduct<T, P>& product) {
    constexpr int VECTOR = WarpProduct<T, P>::VECTOR;
    // A lane for each line of either side, or two.
    constexpr int LANES = P < 16 ? 2 : 1, VECTORS = P / LANES / VECTOR;
    #pragma unroll 1
    for (int l = threadIdx.x % 32 / LANES; l < 2 * P; l += 32 / LANES) {
        auto* const entries = reinterpret_cast<Neighbours<T, VECTOR>*>(
            (l < P ? product.left[l] : product.right[l - P]) +
            threadIdx.x % LANES * VECTORS * VECTOR);
        T top = -Number<T>::infinity();
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            #pragma unroll
            for (int v = 0; v < VECTOR; ++v) top = larger(top, entries[k].at[v]);
        }
        if (LANES > 1) top = larger(top, __shfl_xor_sync(~0u, top, 1));
        const T shift = rint(top);
        product.shifts[l] = shift;
        // What rounding the difference costs is a small part of a probability.
        #pragma unroll 2
        for (int k = 0; k < VECTORS; ++k) {
            Neighbours<T, VECTOR> x = entries[k];
            #pragma unroll
            for (int v = 0; v < VECTOR; ++v) x.at[v] = exponential(x.at[v] - shift);
            entries[k] = x;
        }
    }
}

// Adds what hangs on entries whose weights are still cotangents; all other weights are 0. left(row,
// term), right(column, term): entries of the operands.
template <class T, int P, class Left, class Right>
__device__ __forceinline__ void add_open(SmallProduct<T, P>& product, int rows, int terms,
                                         Left left, Right right) {
    // P lanes take an entry, a lane each of its terms. Groups of lanes work on different rows and,
    // as each begins one column further on, on different columns.
    constexpr int GROUPS = 32 / P;
    constexpr unsigned ALL = ~0u >> (32 - P);
    const int group = threadIdx.x % 32 / P, term = threadIdx.x % P;
    #pragma unroll 1
    for (int row0 = 0; row0 < rows; row0 += GROUPS) {
        const int row = row0 + group;
        const unsigned found = __ballot_sync(~0u, product.weights[row][term] != T(0));
        unsigned steps = found & ALL;
        #pragma unroll
        for (int g = 1; g < GROUPS; ++g) {
            const unsigned open = found >> g * P & ALL;
            steps |= (open >> g | open << (P - g)) & ALL;
        }
        if (!steps) continue;
        T own = -Number<T>::infinity();
        if (row < rows && term < terms) own = left(row, term) - product.shifts[row];
        #pragma unroll 1
        for (; steps; steps &= steps - 1) {
            const int column = (__ffs(steps) - 1 + group) % P;
            const T cotangent = product.weights[row][column];
            T x = -Number<T>::infinity();
            if (cotangent != T(0) && term < terms) {
                x = own + (right(column, term) - product.shifts[P + column]);
            }
            T top = x;
            #pragma unroll
            for (int other = P / 2; other > 0; other /= 2) {
                top = larger(top, __shfl_xor_sync(~0u, top, other));
            }
            const T p = exponential(x - top);
            T sum = p;
            #pragma unroll
            for (int other = P / 2; other > 0; other /= 2) {
                sum += __shfl_xor_sync(~0u, sum, other);
            }
            // Nothing weighs nothing, even times infinity.
            const T share = p > T(0) ? cotangent / sum * p : T(0);
            product.left[row][term] += share;
            product.right[column][term] += share;
            __syncwarp();
        }
    }
}

// Blocks that registers must leave room for on a multiprocessor: without a number the assembler uses
// more of them for 16 x 16 than pays.
template <class T, int P> constexpr int room_for() { return sizeof(T) == 4 && P == 16 ? 6 : 1; }

// P: rows, columns and terms at most; WARPS: of a block.
//
// product, h: results of the product, and cotangents. spoils: as in posterior_weights.cu.
// left_out, right_out: gradients, null for one that is not wanted.
template <class In, int P, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, room_for<ComputeOf<In>, P>())
small_gradients(const In* left, View left_view, const In* right, View right_view, int terms,
                long long first_batch, long long batches, const In* product,
                ProductView product_view, const In* h, ProductView h_view, int spoils, In* left_out,
                View left_out_view, In* right_out, View right_out_view) {
    using T = ComputeOf<In>;
    using Product = WarpProduct<T, P>;
    constexpr int TM = Product::TM, TN = Product::TN, PIECE = Product::PIECE;
    __shared__ SmallProduct<T, P> all_held[WARPS];
    const int warp = threadIdx.x / 32;
    const long long number = (long long)blockIdx.x * WARPS + warp;
    if (number >= batches) return;
    const long long batch = first_batch + number;
    SmallProduct<T, P>& held = all_held[warp];
    const int rows = int(left_view.count), columns = int(right_view.count);

    left += offset_of<0>(left_view.batch, batch);
    right += offset_of<0>(right_view.batch, batch);
    h += offset_of<0>(h_view.batch, batch);
    // What is missing at the edges makes factors of 0.
    const T missing = -Number<T>::infinity();
    copy_matrix<P>(Fetch<T, In>{held.left[0], missing}, left, Along{left_view.lines},
                   Steps{left_view.step}, rows, terms, !left_view.terms_adjoin);
    copy_matrix<P>(Fetch<T, In>{held.right[0], missing}, right, Along{right_view.lines},
                   Steps{right_view.step}, columns, terms, !right_view.terms_adjoin);
    const Along h_down{h_view.rows}, h_across{h_view.columns};
    copy_matrix<P>(Fetch<T, In>{held.weights[0], T(0)}, h, h_down, h_across, rows, columns,
                   llabs(h_down.inner()) < llabs(h_across.inner()));
    __syncwarp();
    make_factors(held);
    __syncwarp();
    Product found;
    found.of_rows_and_rows(held.left, held.right, terms);

    // Cotangents become weights; where that is not proved, they stay for now.
    const T line = provable_from<T>(terms);
    // As in posterior_weights.cu.
    const T limit = T(1) / (Number<T>::tiny * T(1 << 30));
    unsigned mine = 0;  // bit TN m + n: this lane's entry is not proved
    #pragma unroll
    for (int m = 0; m < TM; ++m) {
        #pragma unroll
        for (int n = 0; n < TN; ++n) {
            const int row = Product::spread_row(m), column = Product::spread_column(n);
            T& weight = held.weights[row][column];
            const T sum = found.sums[m][n], quotient = ratio(weight, sum);
            const T shift = fabs(held.shifts[row] + held.shifts[P + column]);
            // Not &&: there is nothing to branch for. A NaN among the cotangents stays.
            const bool proved = int(sum >= line) & int(!(fabs(quotient) > limit)) &
                                int(shift < finite_below<In>());
            weight = proved ? quotient : weight;
            mine |= unsigned(!proved & (row < rows) & (column < columns)) << (TN * m + n);
        }
    }
    const bool any_open = __any_sync(~0u, mine != 0);
    if (any_open) {
        product += offset_of<0>(product_view.batch, batch);
        #pragma unroll 1
        for (unsigned rest = mine; rest; rest &= rest - 1) {
            const int bit = __ffs(rest) - 1;
            const int row = Product::spread_row(bit / TN), column = Product::spread_column(bit % TN);
            const bool nan = is_nan(held.shifts[row]) || is_nan(held.shifts[P + column]);
            T& weight = held.weights[row][column];
            const bool is_open =
                weight != T(0) && is_finite(load(product + offset_of<0>(product_view.rows, row) +
                                                 offset_of<0>(product_view.columns, column)));
            weight = nan && spoils ? Number<T>::nan() : T(0);
            if (!is_open) mine &= ~(1u << bit);
        }
    }
    __syncwarp();

    Product of_left = {}, of_right = {};
    if (left_out) of_left.of_rows_and_columns(held.weights, held.right, columns);
    if (right_out) of_right.of_columns_and_columns(held.weights, held.left, rows);
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < TM; ++m) {
        #pragma unroll
        for (int n = 0; n < TN; n += PIECE) {
            const int term = Product::adjoining_column(n);
            auto& of_x = Product::template at<PIECE>(held.left[Product::spread_row(m)][term]);
            auto& of_y = Product::template at<PIECE>(held.right[Product::adjoining_row(m)][term]);
            auto x = of_x, y = of_y;
            #pragma unroll
            for (int e = 0; e < PIECE; ++e) {
                x.at[e] *= of_left.sums[m][n + e];
                y.at[e] *= of_right.sums[m][n + e];
            }
            of_x = x, of_y = y;
        }
    }
    if (any_open) {
        #pragma unroll 1
        for (int bit = 0; bit < TM * TN; ++bit) {
            const int row = Product::spread_row(bit / TN), column = Product::spread_column(bit % TN);
            T cotangent = 0;
            if (mine >> bit & 1) {
                cotangent = load(h + offset_of<0>(h_view.rows, row) +
                                 offset_of<0>(h_view.columns, column));
            }
            held.weights[row][column] = cotangent;
        }
        __syncwarp();
        add_open(
            held, rows, terms,
            [&](int row, int term) {
                return load(left + offset_of<0>(left_view.lines, row) + term * left_view.step);
            },
            [&](int column, int term) {
                return load(right + offset_of<0>(right_view.lines, column) +
                            term * right_view.step);
            });
    }
    __syncwarp();
    if (left_out) {
        left_out += offset_of<0>(left_out_view.batch, batch);
        copy_matrix<P>(Write<T, In>{held.left[0]}, left_out, Along{left_out_view.lines},
                       Steps{left_out_view.step}, rows, terms, !left_out_view.terms_adjoin);
    }
    if (right_out) {
        right_out += offset_of<0>(right_out_view.batch, batch);
        copy_matrix<P>(Write<T, In>{held.right[0]}, right_out, Along{right_out_view.lines},
                       Steps{right_out_view.step}, columns, terms, !right_out_view.terms_adjoin);
    }
}
