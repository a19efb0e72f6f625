// Many small products log(exp(left) @ exp(right)), a warp for each: shifts, exponentials, sums,
// their proof, and what is left to compute exactly, all on chip.
#include "certificate.cuh"
#include "panel.cuh"
#include "small.cuh"

// The raw entries of one operand, [term, line]. 4 more than P: vectors stay aligned, and what lanes
// write turned lies in different banks.
template <class T, int P, class In>
__device__ __forceinline__ void fetch(T (*tile)[P + 4], const In* x, const long long* offsets,
                                      const View& view, int lines, int terms) {
    #pragma unroll 4
    for (int e = threadIdx.x % 32; e < P * P; e += 32) {
        const int line = view.terms_adjoin ? e / P : e % P;
        const int term = view.terms_adjoin ? e % P : e / P;
        if (line < lines && term < terms) {
            tile[term][line] = load(x + offsets[line] + term * view.step);
        }
    }
}

// P: rows, columns and terms at most; WARPS: of a block.
template <class In, int P, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 1)
small(const In* left, View left_view, const In* right, View right_view, int terms,
      long long first_batch, long long batches, In* out, ProductView view) {
    using T = ComputeOf<In>;
    constexpr int TM = P / 8, TN = P / 4;  // a lane's part of the product: lanes are 8 x 4
    // Half of all banks lie between lines of the two tiles that are read at once.
    __shared__ __align__(16) T tiles[WARPS][2][P * (P + 4) + 64 / sizeof(T)];
    __shared__ T shifts[WARPS][2 * P];
    __shared__ long long offsets[WARPS][2 * P], out_offsets[WARPS][2 * P];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long number = (long long)blockIdx.x * WARPS + warp;
    if (number >= batches) return;
    const long long batch = first_batch + number;
    using Line = T[P + 4];
    Line* const left_tile = reinterpret_cast<Line*>(tiles[warp][0]);
    Line* const right_tile = reinterpret_cast<Line*>(tiles[warp][1]);
    left += offset_of<0>(left_view.batch, batch);
    right += offset_of<0>(right_view.batch, batch);
    out += offset_of<0>(view.batch, batch);
    const int rows = int(left_view.count), columns = int(right_view.count);

    for (int l = lane; l < 2 * P; l += 32) {
        if (l < P && l < rows) {
            offsets[warp][l] = offset_of<0>(left_view.lines, l);
            out_offsets[warp][l] = offset_of<0>(view.rows, l);
        } else if (l >= P && l - P < columns) {
            offsets[warp][l] = offset_of<0>(right_view.lines, l - P);
            out_offsets[warp][l] = offset_of<0>(view.columns, l - P);
        }
    }
    __syncwarp();
    fetch<T, P>(left_tile, left, offsets[warp], left_view, rows, terms);
    fetch<T, P>(right_tile, right, offsets[warp] + P, right_view, columns, terms);
    __syncwarp();
    // A lane for each line of either side.
    for (int l = lane; l < 2 * P; l += 32) {
        const bool is_left = l < P;
        const int line = is_left ? l : l - P;
        if (line >= (is_left ? rows : columns)) continue;
        T* const entries = &(is_left ? left_tile : right_tile)[0][line];
        T top = -Number<T>::infinity();
        for (int k = 0; k < terms; ++k) top = larger(top, entries[k * (P + 4)]);
        const T shift = rint(top);
        shifts[warp][l] = shift;
        #pragma unroll 2
        for (int k = 0; k < terms; ++k) {
            T& x = entries[k * (P + 4)];
            x = exponential_of_difference(x, shift);
        }
    }
    __syncwarp();

    // Every second lane reads the same columns: shared memory serves twice as many at a time.
    const int row0 = (lane / 8 * 2 + lane % 2) * TM, column0 = lane / 2 % 4 * TN;
    alignas(16) T sums[TM][TN] = {};
    for (int k = 0; k < terms; ++k) {
        const auto x = *reinterpret_cast<const Neighbours<T, TM>*>(&left_tile[k][row0]);
        const auto y = *reinterpret_cast<const Neighbours<T, TN>*>(&right_tile[k][column0]);
        #pragma unroll
        for (int i = 0; i < TM; ++i) {
            #pragma unroll
            for (int j = 0; j < TN; ++j) sums[i][j] = fma(x.at[i], y.at[j], sums[i][j]);
        }
    }

    // The sums take the place of the left factors: neighbouring lanes then write neighbours, and
    // logarithms are code for one entry.
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < TM; ++i) {
        *reinterpret_cast<Neighbours<T, TN>*>(&left_tile[row0 + i][column0]) =
            *reinterpret_cast<const Neighbours<T, TN>*>(sums[i]);
    }
    __syncwarp();
    const T line = provable_from<T>(terms);
    unsigned mine = 0;  // bit i: entry lane + 32 i has to be computed again
    #pragma unroll 2
    for (int i = 0; i < P * P / 32; ++i) {
        const int row = (lane + 32 * i) / P, column = (lane + 32 * i) % P;
        if (row >= rows || column >= columns) continue;
        bool unproved = false;
        const T x = settled(left_tile[row][column], shifts[warp][row], shifts[warp][P + column],
                            line, unproved);
        store(out + out_offsets[warp][row] + out_offsets[warp][P + column], x);
        mine |= unsigned(unproved) << i;
    }
    if (!__any_sync(~0u, mine != 0)) return;

    fetch<T, P>(left_tile, left, offsets[warp], left_view, rows, terms);
    fetch<T, P>(right_tile, right, offsets[warp] + P, right_view, columns, terms);
    __syncwarp();
    for (; mine; mine &= mine - 1) {
        const int e = lane + 32 * (__ffs(mine) - 1), row = e / P, column = e % P;
        LogSum<T> sum;
        #pragma unroll 2
        for (int k = 0; k < terms; ++k) sum.add(left_tile[k][row] + right_tile[k][column]);
        store(out + out_offsets[warp][row] + out_offsets[warp][P + column], sum.value());
    }
}
