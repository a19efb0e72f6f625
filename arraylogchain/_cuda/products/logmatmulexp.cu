// log(exp(left) @ exp(right)) from factors that factors.cu has made, as far as it is proved.
//
// One multiply and add per term: no exponential in the loop. What a block cannot prove it writes as
// NaN, and sets the flag of its tile; exact.cu comes right after.
#include "certificate.cuh"
#include "panel.cuh"
#include "tensor_product.cuh"
#include "tile_product.cuh"

// The loop of a tile.
template <class T, int BM, int BN, int BK, int TM, int TN, bool TensorCores>
struct LogTile : PlainTile<T, BM, BN, BK, TM, TN> {};
template <class T, int BM, int BN, int BK, int TM, int TN>
struct LogTile<T, BM, BN, BK, TM, TN, true> : TensorProduct<T, BM, BN, BK, TM, TN> {};

// In, BM, BN, BK, TM, TN: dtype of the result; tile, terms at a time, and a thread's part of the
// tile, see tile_product.cuh. TensorCores: whether they multiply, see tensor_product.cuh.
//
// left [batches, terms, left_pitch], right [batches, terms, right_pitch]: factors of the panel.
// partial [parts, batches, rows, pitch] or null: where a block leaves sums over terms_each of the
// terms, added to those of launches before (`resumed`), for settle.cu or posterior_weights.cu; else
// these are all terms.
// Grid: the tiles of the first part, then those of the next.
// flags: a byte for each tile.
// adjoin: whether columns of the result adjoin, and its other strides are multiples of 4.
template <class In, int BM, int BN, int BK, int TM, int TN, bool TensorCores = false>
__global__ void
__launch_bounds__((BM / TM) * (BN / TN),
                  LogTile<ComputeOf<In>, BM, BN, BK, TM, TN, TensorCores>::BLOCKS)
logmatmulexp(const ComputeOf<In>* left, long long left_pitch, const ComputeOf<In>* right,
             long long right_pitch, int terms, int terms_each, Panel panel,
             const ComputeOf<In>* row_shifts, const ComputeOf<In>* column_shifts,
             ComputeOf<In>* partial, int resumed, In* out, ProductView view, int adjoin,
             unsigned char* flags) {
    using T = ComputeOf<In>;
    using Tile = LogTile<T, BM, BN, BK, TM, TN, TensorCores>;
    __shared__ typename Tile::Shared shared;
    __shared__ long long row_offsets[BM], column_offsets[BN];
    __shared__ T row_shift[BM], column_shift[BN];
    __shared__ int any_unproved;

    const unsigned tiles = number_of_tiles(panel, BM, BN);
    const unsigned part = blockIdx.x / tiles;
    const TilePlace place(panel, BM, BN, blockIdx.x - part * tiles);
    const int row0 = place.tile_row * BM, column0 = place.tile_column * BN;
    const int rows = min(panel.rows - row0, BM), columns = min(panel.columns - column0, BN);
    if (threadIdx.x == 0) any_unproved = 0;
    for (int i = threadIdx.x; i < BM + BN; i += Tile::THREADS) {
        if (i < rows) {
            row_offsets[i] = offset_of<0>(view.rows, panel.first_row + row0 + i);
            row_shift[i] = row_shifts[(long long)place.batch * panel.rows + row0 + i];
        } else if (i >= BM && i - BM < columns) {
            const int column = column0 + i - BM;
            column_offsets[i - BM] = offset_of<0>(view.columns, panel.first_column + column);
            column_shift[i - BM] = column_shifts[(long long)place.batch * panel.columns + column];
        }
    }
    const long long first = (long long)part * terms_each;
    const long long first_of_batch = (long long)place.batch * terms + first;
    Tile tile;
    tile.run(shared, {left + first_of_batch * left_pitch + row0, left_pitch, rows},
             {right + first_of_batch * right_pitch + column0, right_pitch, columns},
             int(min(terms - first, (long long)terms_each)));

    if (partial) {
        const long long lines = ((long long)part * panel.batches + place.batch) * panel.rows + row0;
        const long long pitch = pitch_of(panel);
        partial += lines * pitch + column0;
        #pragma unroll
        for (int i = 0; i < TM; ++i) {
            #pragma unroll
            for (int j = 0; j < TN; ++j) {
                const int row = tile.row(i), column = tile.column(j);
                if (row >= rows || column >= columns) continue;
                T& kept = partial[row * pitch + column];
                kept = resumed ? kept + tile.sums[i][j] : tile.sums[i][j];
            }
        }
        if (threadIdx.x == 0) flags[place.number] = 0;
        return;
    }

    constexpr int PIECE = Tile::PIECE;
    struct alignas(PIECE * sizeof(In)) OutPiece {
        In at[PIECE];
    };
    const T line = line_of_certificate<T>(terms);
    out += offset_of<0>(view.batch, panel.first_batch + place.batch);
    const bool whole_pieces = adjoin && reinterpret_cast<size_t>(out) % sizeof(OutPiece) == 0;
    bool unproved = false;
    #pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int row = tile.row(i);
        if (row >= rows) continue;
        #pragma unroll
        for (int p = 0; p < TN; p += PIECE) {
            OutPiece piece;
            const bool whole = whole_pieces && tile.column(p) + PIECE <= columns;
            #pragma unroll
            for (int v = 0; v < PIECE; ++v) {
                const int column = tile.column(p + v);
                if (column >= columns) continue;
                const T x = settled(tile.sums[i][p + v], row_shift[row], column_shift[column],
                                    line, unproved);
                store(&piece.at[v], x);
                if (!whole) out[row_offsets[row] + column_offsets[column]] = piece.at[v];
            }
            if (whole) {
                *reinterpret_cast<OutPiece*>(out + row_offsets[row] +
                                             column_offsets[tile.column(p)]) = piece;
            }
        }
    }
    if (unproved) any_unproved = 1;
    __syncthreads();
    if (threadIdx.x == 0) flags[place.number] = any_unproved;
}
