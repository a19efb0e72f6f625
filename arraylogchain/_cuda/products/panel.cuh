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
