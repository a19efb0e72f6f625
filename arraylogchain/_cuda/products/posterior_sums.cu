// Sums over the posterior from weights and factors: gradients of a log product.
//
//   OfLeft:  x_ik = A_ik sum_j W_ij B_kj, for the left operand
//   else:    x_jk = B_kj sum_i W_ij A_ik, for the right one
#include "panel.cuh"
#include "tile_product.cuh"

// T, BM, BN, BK, TM, TN: tile of a product of lines by terms (OfLeft), or of terms by lines.
//
// weights [batches, rows, weight_pitch]; own, other [batches, terms, pitch]: factors of the operand
// that the sums are for, and of the other one.
// out: in the layout of `view`, terms from first_term on. adds: to what is there.
template <class T, int BM, int BN, int BK, int TM, int TN, bool OfLeft>
__global__ void __launch_bounds__((BM / TM) * (BN / TN),
                                  TileProduct<T, BM, BN, BK, TM, TN, true, OfLeft>::BLOCKS)
posterior_sums(const T* weights, long long weight_pitch, const T* own, long long own_pitch,
               const T* other, long long other_pitch, Panel panel, long long first_term, int terms,
               T* out, View view, int adds) {
    using Tile = TileProduct<T, BM, BN, BK, TM, TN, true, OfLeft>;
    __shared__ typename Tile::Shared shared;
    __shared__ long long offsets[OfLeft ? BM : BN];
    __shared__ TilePlace place_after;  // for what follows the loop, which needs all registers

    Panel tiles = panel;  // how tiles lie in the result
    tiles.rows = OfLeft ? panel.rows : terms;
    tiles.columns = OfLeft ? terms : panel.columns;
    const TilePlace place(tiles, BM, BN, blockIdx.x);
    if (threadIdx.x == 0) place_after = place;
    int row0 = place.tile_row * BM, column0 = place.tile_column * BN;
    int rows = min(tiles.rows - row0, BM), columns = min(tiles.columns - column0, BN);
    int line0 = OfLeft ? row0 : column0;
    const int lines = OfLeft ? rows : columns;
    const long long first_line = (OfLeft ? panel.first_row : panel.first_column) + line0;
    for (int i = threadIdx.x; i < lines; i += Tile::THREADS) {
        offsets[i] = offset_of<0>(view.lines, first_line + i);
    }
    weights += (long long)place.batch * panel.rows * weight_pitch;
    other += (long long)place.batch * terms * other_pitch;

    Tile tile;
    if constexpr (OfLeft) {
        tile.run(shared, {weights + row0 * weight_pitch, weight_pitch, rows},
                 {other + column0 * other_pitch, other_pitch, columns}, panel.columns);
    } else {
        tile.run(shared, {other + row0 * other_pitch, other_pitch, rows},
                 {weights + column0, weight_pitch, columns}, panel.rows);
    }
    row0 = place_after.tile_row * BM, column0 = place_after.tile_column * BN;
    rows = min(tiles.rows - row0, BM), columns = min(tiles.columns - column0, BN);
    line0 = OfLeft ? row0 : column0;
    own += (long long)place_after.batch * terms * own_pitch;
    out += offset_of<0>(view.batch, panel.first_batch + place_after.batch);
    #pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int row = tile.row(i);
        #pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int column = tile.column(j);
            if (row >= rows || column >= columns) continue;
            const int line = OfLeft ? row : column;
            const long long term = OfLeft ? column0 + column : row0 + row;
            const T value = tile.sums[i][j] * own[term * own_pitch + line0 + line];
            T& at = out[offsets[line] + (first_term + term) * view.step];
            at = adds ? at + value : value;
        }
    }
}
