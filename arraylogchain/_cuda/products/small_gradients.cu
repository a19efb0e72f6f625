// Gradients of many small log products, a warp for each: factors, sums and their proof as in
// small.cu, weights h / S as in posterior_weights.cu, what is not proved as in exact_posterior.cu,
// and the sums of all that, on chip. Both operands lie as [line, term] there.
#include "certificate.cuh"
#include "panel.cuh"
#include "small.cuh"

// Offsets of the lines of a matrix, or of its entries along them: in equal steps, or along axes.
struct Steps {
    long long step;
    __device__ __forceinline__ bool is_even() const { return true; }
    __device__ __forceinline__ long long inner() const { return step; }
    __device__ __forceinline__ long long at(int i) const { return i * step; }
};
struct Along {
    const Axes& axes;
    __device__ __forceinline__ bool is_even() const { return axes.count <= 1; }
    __device__ __forceinline__ long long inner() const {
        return axes.stride[0][axes.count > 1 ? axes.count - 1 : 0];
    }
    __device__ __forceinline__ long long at(int i) const { return offset_of<0>(axes, i); }
};

// Calls visit(place in a tile, offset in memory, whether there is an entry) for all P x P places,
// so that neighbours in memory fall to neighbouring lanes.
template <int P, int PITCH, class Down, class Across, class Visit>
__device__ __forceinline__ void walk(const Down& down, const Across& across, int rows, int columns,
                                     Visit visit) {
    constexpr int EACH = P * P / 32, UNROLLED = EACH < 8 ? EACH : 8;
    const long long row_step = down.inner(), column_step = across.inner();
    const bool turned = llabs(row_step) < llabs(column_step);  // neighbours are rows
    const int inner = threadIdx.x % P, outer = threadIdx.x % 32 / P;
    if (down.is_even() && across.is_even()) {
        const long long outer_step = turned ? column_step : row_step;
        const int outer_place = turned ? 1 : PITCH;
        const int left = (turned ? columns : rows) - outer;
        const bool inside = inner < (turned ? rows : columns);
        long long offset = inner * (turned ? row_step : column_step) + outer * outer_step;
        int place = inner * (turned ? PITCH : 1) + outer * outer_place;
        #pragma unroll UNROLLED
        for (int i = 0; i < EACH; ++i) {
            visit(place, offset, inside && i * (32 / P) < left);
            place += 32 / P * outer_place;
            offset += 32 / P * outer_step;
        }
    } else {
        #pragma unroll 1
        for (int i = 0; i < EACH; ++i) {
            const int other = outer + 32 / P * i;
            const int row = turned ? inner : other, column = turned ? other : inner;
            visit(row * PITCH + column, down.at(row) + across.at(column),
                  row < rows && column < columns);
        }
    }
}

// A product whose shifts add up to less is finite in this dtype, if its sum is proved.
template <class In> __device__ __forceinline__ ComputeOf<In> finite_below() {
    return 1 / Number<ComputeOf<In>>::tiny;
}
template <> __device__ __forceinline__ float finite_below<__half>() { return 0x1.fp+15f; }

// P: rows, columns and terms at most; WARPS: of a block.
//
// product, h: results of the product, and cotangents. spoils: as in posterior_weights.cu.
// left_out, right_out: gradients, null for one that is not wanted.
template <class In, int P, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 1)
small_gradients(const In* left, View left_view, const In* right, View right_view, int terms,
                long long first_batch, long long batches, const In* product,
                ProductView product_view, const In* h, ProductView h_view, int spoils, In* left_out,
                View left_out_view, In* right_out, View right_out_view) {
    using T = ComputeOf<In>;
    // A vector is what one instruction moves. With one between lines, those of eight lanes that
    // read a line each come from different banks.
    constexpr int VECTOR = 16 / sizeof(T), PITCH = P + VECTOR;
    // A lane's part of a product: lanes are 8 x 4. Entries that adjoin are PIECE and PIECE.
    constexpr int TM = P / 8, TN = P / 4, PIECE = TN < VECTOR ? TN : VECTOR;
    __shared__ __align__(16) T tiles[WARPS][3][P][PITCH];
    __shared__ T all_shifts[WARPS][2 * P];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_row = lane / 4, lane_column = lane % 4;
    const long long number = (long long)blockIdx.x * WARPS + warp;
    if (number >= batches) return;
    const long long batch = first_batch + number;
    T(*const left_tile)[PITCH] = tiles[warp][0];
    T(*const right_tile)[PITCH] = tiles[warp][1];
    T(*const weights)[PITCH] = tiles[warp][2];
    T* const shifts = all_shifts[warp];
    const int rows = int(left_view.count), columns = int(right_view.count);

    left += offset_of<0>(left_view.batch, batch);
    right += offset_of<0>(right_view.batch, batch);
    h += offset_of<0>(h_view.batch, batch);
    const auto fetch = [](T* tile, const In* x, T missing) {
        return [=](int place, long long offset, bool inside) {
            tile[place] = inside ? load(x + offset) : missing;
        };
    };
    // What is missing at the edges makes factors of 0.
    walk<P, PITCH>(Along{left_view.lines}, Steps{left_view.step}, rows, terms,
                   fetch(left_tile[0], left, -Number<T>::infinity()));
    walk<P, PITCH>(Along{right_view.lines}, Steps{right_view.step}, columns, terms,
                   fetch(right_tile[0], right, -Number<T>::infinity()));
    walk<P, PITCH>(Along{h_view.rows}, Along{h_view.columns}, rows, columns,
                   fetch(weights[0], h, T(0)));
    __syncwarp();

    // A lane for each line of either side, or two.
    constexpr int SHARE = P < 16 ? 2 : 1, LANE_TERMS = P / SHARE;
    #pragma unroll 1
    for (int l = lane / SHARE; l < 2 * P; l += 32 / SHARE) {
        auto* const entries = reinterpret_cast<Neighbours<T, VECTOR>*>(
            left_tile[0] + l * PITCH + lane % SHARE * LANE_TERMS);
        T top = -Number<T>::infinity();
        #pragma unroll
        for (int k = 0; k < LANE_TERMS / VECTOR; ++k) {
            #pragma unroll
            for (int v = 0; v < VECTOR; ++v) top = larger(top, entries[k].at[v]);
        }
        if (SHARE > 1) top = larger(top, __shfl_xor_sync(~0u, top, 1));
        const T shift = rint(top);
        shifts[l] = shift;
        // What rounding the difference costs is a small part of a probability.
        #pragma unroll 2
        for (int k = 0; k < LANE_TERMS / VECTOR; ++k) {
            Neighbours<T, VECTOR> x = entries[k];
            #pragma unroll
            for (int v = 0; v < VECTOR; ++v) x.at[v] = exponential(x.at[v] - shift);
            entries[k] = x;
        }
    }
    __syncwarp();

    // Rows lane_row + 8 m, columns lane_column + 4 n.
    T sums[TM][TN] = {};
    #pragma unroll 2
    for (int k = 0; k < terms; k += VECTOR) {
        Neighbours<T, VECTOR> x[TM];
        #pragma unroll
        for (int m = 0; m < TM; ++m) {
            x[m] = *reinterpret_cast<const Neighbours<T, VECTOR>*>(&left_tile[lane_row + 8 * m][k]);
        }
        #pragma unroll
        for (int n = 0; n < TN; ++n) {
            const auto y = *reinterpret_cast<const Neighbours<T, VECTOR>*>(
                &right_tile[lane_column + 4 * n][k]);
            #pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                #pragma unroll
                for (int m = 0; m < TM; ++m) sums[m][n] = fma(x[m].at[v], y.at[v], sums[m][n]);
            }
        }
    }

    // Cotangents become weights; where that is not proved, they stay for now.
    const T line = provable_from<T>(terms);
    // As in posterior_weights.cu.
    const T limit = T(1) / (Number<T>::tiny * T(1 << 30));
    unsigned mine = 0;  // bit TN m + n: this lane's entry is not proved
    #pragma unroll
    for (int m = 0; m < TM; ++m) {
        #pragma unroll
        for (int n = 0; n < TN; ++n) {
            const int row = lane_row + 8 * m, column = lane_column + 4 * n;
            T& weight = weights[row][column];
            const T quotient = weight / sums[m][n];
            const T shift = fabs(shifts[row] + shifts[P + column]);
            // A NaN among the cotangents stays.
            const bool proved =
                sums[m][n] >= line && !(fabs(quotient) > limit) && shift < finite_below<In>();
            weight = proved ? quotient : weight;
            const bool is_open = !proved && row < rows && column < columns;
            mine |= unsigned(is_open) << (TN * m + n);
        }
    }
    const bool any_open = __any_sync(~0u, mine != 0);
    if (any_open) {
        #pragma unroll 1
        for (unsigned rest = mine; rest; rest &= rest - 1) {
            const int bit = __ffs(rest) - 1;
            const int row = lane_row + 8 * (bit / TN), column = lane_column + 4 * (bit % TN);
            const bool nan = is_nan(shifts[row]) || is_nan(shifts[P + column]);
            const bool has_posterior =
                weights[row][column] != T(0) &&
                is_finite(load(product + offset_of<0>(product_view.batch, batch) +
                               offset_of<0>(product_view.rows, row) +
                               offset_of<0>(product_view.columns, column)));
            weights[row][column] = nan && spoils ? Number<T>::nan() : T(0);
            if (!has_posterior) mine &= ~(1u << bit);
        }
    }
    __syncwarp();

    // Terms of lane_column: PIECE neighbours, and those 4 PIECE further on.
    // Of the left gradient, rows lane_row + 8 m.
    T left_sums[TM][TN] = {};
    if (left_out) {
        #pragma unroll 2
        for (int j = 0; j < columns; j += VECTOR) {
            Neighbours<T, VECTOR> w[TM];
            #pragma unroll
            for (int m = 0; m < TM; ++m) {
                w[m] =
                    *reinterpret_cast<const Neighbours<T, VECTOR>*>(&weights[lane_row + 8 * m][j]);
            }
            #pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                #pragma unroll
                for (int n = 0; n < TN; n += PIECE) {
                    const auto y = *reinterpret_cast<const Neighbours<T, PIECE>*>(
                        &right_tile[j + v][PIECE * lane_column + 4 * n]);
                    #pragma unroll
                    for (int e = 0; e < PIECE; ++e) {
                        #pragma unroll
                        for (int m = 0; m < TM; ++m) {
                            left_sums[m][n + e] = fma(w[m].at[v], y.at[e], left_sums[m][n + e]);
                        }
                    }
                }
            }
        }
    }
    // Of the right one, columns TM lane_row + m.
    T right_sums[TM][TN] = {};
    if (right_out) {
        #pragma unroll 4
        for (int i = 0; i < rows; ++i) {
            const auto w =
                *reinterpret_cast<const Neighbours<T, TM>*>(&weights[i][TM * lane_row]);
            #pragma unroll
            for (int n = 0; n < TN; n += PIECE) {
                const auto x = *reinterpret_cast<const Neighbours<T, PIECE>*>(
                    &left_tile[i][PIECE * lane_column + 4 * n]);
                #pragma unroll
                for (int e = 0; e < PIECE; ++e) {
                    #pragma unroll
                    for (int m = 0; m < TM; ++m) {
                        right_sums[m][n + e] = fma(w.at[m], x.at[e], right_sums[m][n + e]);
                    }
                }
            }
        }
    }
    __syncwarp();
    // Gradients take the place of the factors.
    #pragma unroll
    for (int m = 0; m < TM; ++m) {
        #pragma unroll
        for (int n = 0; n < TN; n += PIECE) {
            const int term = PIECE * lane_column + 4 * n;
            auto& x = *reinterpret_cast<Neighbours<T, PIECE>*>(&left_tile[lane_row + 8 * m][term]);
            auto& y = *reinterpret_cast<Neighbours<T, PIECE>*>(&right_tile[TM * lane_row + m][term]);
            #pragma unroll
            for (int e = 0; e < PIECE; ++e) {
                x.at[e] *= left_sums[m][n + e];
                y.at[e] *= right_sums[m][n + e];
            }
        }
    }
    if (any_open) {
        // Only the cotangents of what is open are left.
        #pragma unroll 1
        for (int bit = 0; bit < TM * TN; ++bit) {
            const int row = lane_row + 8 * (bit / TN), column = lane_column + 4 * (bit % TN);
            T value = 0;
            if (mine >> bit & 1) {
                value = load(h + offset_of<0>(h_view.rows, row) +
                             offset_of<0>(h_view.columns, column));
            }
            weights[row][column] = value;
        }
        __syncwarp();
        // P lanes take an entry, a lane each of its terms. Groups of lanes work on different rows
        // and, as each begins one column further on, on different columns.
        constexpr int GROUPS = 32 / P;
        constexpr unsigned ALL = ~0u >> (32 - P);
        const int group = lane / P, term = lane % P;
        #pragma unroll 1
        for (int row0 = 0; row0 < rows; row0 += GROUPS) {
            const int row = row0 + group;
            const unsigned found = __ballot_sync(~0u, weights[row][term] != T(0));
            unsigned steps = found & ALL;
            #pragma unroll
            for (int g = 1; g < GROUPS; ++g) {
                const unsigned open = found >> g * P & ALL;
                steps |= (open >> g | open << (P - g)) & ALL;
            }
            if (!steps) continue;
            T own = -Number<T>::infinity();
            if (row < rows && term < terms) {
                own = load(left + offset_of<0>(left_view.lines, row) + term * left_view.step) -
                      shifts[row];
            }
            #pragma unroll 1
            for (; steps; steps &= steps - 1) {
                const int column = (__ffs(steps) - 1 + group) % P;
                const T cotangent = weights[row][column];
                T x = -Number<T>::infinity();
                if (cotangent != T(0) && term < terms) {
                    x = own + (load(right + offset_of<0>(right_view.lines, column) +
                                    term * right_view.step) -
                               shifts[P + column]);
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
                left_tile[row][term] += share;
                right_tile[column][term] += share;
                __syncwarp();
            }
        }
    }
    __syncwarp();

    const auto write = [](In* out, const T* tile) {
        return [=](int place, long long offset, bool inside) {
            if (inside) store(out + offset, tile[place]);
        };
    };
    if (left_out) {
        left_out += offset_of<0>(left_out_view.batch, batch);
        walk<P, PITCH>(Along{left_out_view.lines}, Steps{left_out_view.step}, rows, terms,
                       write(left_out, left_tile[0]));
    }
    if (right_out) {
        right_out += offset_of<0>(right_out_view.batch, batch);
        walk<P, PITCH>(Along{right_out_view.lines}, Steps{right_out_view.step}, columns, terms,
                       write(right_out, right_tile[0]));
    }
}
