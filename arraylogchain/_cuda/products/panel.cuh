// Which part of a product a launch computes, and how its tiles are numbered.
#pragma once
#include "view.cuh"

// A product [*batch, *rows, *columns], or what is read or written in its place.
struct ProductView {
    Axes batch, rows, columns;
};

// Shifts and factors are those of the panel, and numbered within it.
struct Panel {
    long long first_batch, first_row, first_column;
    int batches, rows, columns;
};

__device__ __forceinline__ unsigned number_of_tiles(const Panel& panel, int BM, int BN) {
    return unsigned(panel.batches) * (unsigned(panel.rows + BM - 1) / BM) *
           (unsigned(panel.columns + BN - 1) / BN);
}

// The tile of one block. Neighbouring blocks share rows and columns: what they read stays in L2.
struct TilePlace {
    int batch, tile_row, tile_column;  // within the panel
    long long number;                  // of the tile, in row-major order

    TilePlace() = default;
    __device__ __forceinline__ TilePlace(const Panel& panel, int BM, int BN, unsigned block) {
        constexpr unsigned GROUP = 8;  // rows of tiles that are walked together
        const unsigned down = unsigned(panel.rows + BM - 1) / BM;
        const unsigned across = unsigned(panel.columns + BN - 1) / BN;
        const unsigned in_batch = block / (down * across);
        const unsigned tile = block - in_batch * (down * across);
        const unsigned group = tile / (GROUP * across);
        const unsigned within = tile - group * GROUP * across;
        const unsigned height = min(down - group * GROUP, GROUP);
        batch = int(in_batch);
        tile_column = int(within / height);
        tile_row = int(group * GROUP + within % height);
        number = (long long)(block - tile) + (long long)tile_row * across + tile_column;
    }
};

// Sums over parts of the terms: [parts, batches, rows, pitch], with rows padded to whole vectors.
__device__ __forceinline__ int pitch_of(const Panel& panel) { return (panel.columns + 3) / 4 * 4; }

// The sum of one entry over all parts.
template <class T>
__device__ __forceinline__ T sum_of_parts(const T* partial, int parts, const Panel& panel,
                                          long long index) {
    const long long step = (long long)panel.batches * panel.rows * pitch_of(panel);
    T sum = 0, excess = 0;  // Kahan: parts may be many, and equal
    #pragma unroll 8
    for (int part = 0; part < parts; ++part) {
        const T corrected = partial[part * step + index] - excess;
        const T next = sum + corrected;
        excess = (next - sum) - corrected;
        sum = next;
    }
    return sum;
}

// An entry of a panel, by its index in such an array.
struct EntryPlace {
    long long index, line;  // line: of the rows of all of the batch
    long long batch;
    int row, column;

    __device__ __forceinline__ EntryPlace(const Panel& panel, long long index)
        : index(index), line(quotient(index, pitch_of(panel))),
          batch(quotient(line, panel.rows)), row(int(line - batch * panel.rows)),
          column(int(index - line * pitch_of(panel))) {}

    __device__ __forceinline__ long long offset_in(const ProductView& view,
                                                   const Panel& panel) const {
        return offset_of<0>(view.batch, panel.first_batch + batch) +
               offset_of<0>(view.rows, panel.first_row + row) +
               offset_of<0>(view.columns, panel.first_column + column);
    }
    // The number of its tile.
    __device__ __forceinline__ long long tile(const Panel& panel, int BM, int BN) const {
        const int down = (panel.rows + BM - 1) / BM, across = (panel.columns + BN - 1) / BN;
        return (batch * down + row / BM) * across + column / BN;
    }
};
