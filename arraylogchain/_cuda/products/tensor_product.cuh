// The loop of tiled products over tensor cores, in the place of TileProduct's.
//
// Tensor cores have no products of float32 numbers, but of numbers of 11 bits. With x = high + low,
// three products of such numbers take the place of one, and what is left out is low times low.
#pragma once
#include "tensor_cores.cuh"
#include "tile_loader.cuh"

// BM x BN entries of a product in blocks of (BM / TM) x (BN / TN) threads, BK terms at a time; each
// thread holds TM x TN sums, each warp those of 8 TM x 4 TN entries. Sides lie as [terms, lines].
template <class T, int BM, int BN, int BK, int TM, int TN> struct TensorProduct {
    static constexpr int THREADS = (BM / TM) * (BN / TN);
    // Blocks that registers must leave room for on a multiprocessor.
    static constexpr int BLOCKS = THREADS > 128 ? 1 : 2;
    static constexpr int PIECE = 16 / sizeof(T);  // neighbours that one instruction moves
    // Lines that the 8 groups of a warp read at once, a piece each; the four lanes of a group read
    // those of four terms. Shared memory serves 8 lanes at a time: two groups, half a span apart, at
    // four terms, a piece further each. Those are 8 different pieces of all banks: no conflicts.
    static constexpr int SPAN = 8 * PIECE;
    static constexpr int M_PITCH = BM + PIECE, N_PITCH = BN + PIECE;
    static constexpr int ROW_TILES = TM / 2, COLUMN_TILES = TN / 2;  // 16 x 8 entries each
    static constexpr int WARPS_N = BN / (4 * TN);
    static_assert(TM % PIECE == 0 && TN % (2 * PIECE) == 0, "threads own whole pieces");
    static_assert(BM % (8 * TM) == 0 && BN % (4 * TN) == 0, "warps own whole tiles");
    static_assert(BM % SPAN == 0 && BN % SPAN == 0, "pitches are a piece above whole spans");
    // Tensor cores cut float32 sums off, so that errors do not cancel but grow with each product
    // that is added. Sums of BK terms are theirs, 16 as docs/numerics.md counts; the sums of those
    // are rounded.
    static_assert(BK % 8 == 0 && BK <= 16, "whole products, and few of them in a sum");

    struct Shared {
        alignas(16) T left[2][BK * M_PITCH];
        alignas(16) T right[2][BK * N_PITCH];
    };

    T sums[TM][TN] = {};
    int group, member;   // of the lane: g and t of tensor_cores.cuh
    int m_warp, n_warp;  // where the warp's entries begin

    __device__ __forceinline__ TensorProduct() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        group = lane / 4;
        member = lane % 4;
        m_warp = warp / WARPS_N * (8 * TM);
        n_warp = warp % WARPS_N * (4 * TN);
    }

    // Where in a span the lines lie that one of 8 groups reads.
    static __device__ __forceinline__ int piece_of(int g) {
        return g % 2 * (SPAN / 2) + g / 2 * PIECE;
    }

    // The row of the tile that sums[i] belongs to, and the column of sums[...][j].
    //
    // Each piece of rows that a lane has read for `a` is one of what it has of `d`. Its columns of
    // d are 2 t and 2 t + 1, for which groups 2 t and 2 t + 1 have read pieces of b: it gets an
    // entry of each piece from each product, and in the end whole pieces.
    __device__ __forceinline__ int row(int i) const {
        return m_warp + i / PIECE * SPAN + piece_of(group) + i % PIECE;
    }
    __device__ __forceinline__ int column(int j) const {
        const int piece = j / PIECE;
        return n_warp + piece / 2 * SPAN + piece_of(2 * member + piece % 2) + j % PIECE;
    }
    // Which of a lane's sums, column by column, a product of 8 columns adds to.
    static __device__ __forceinline__ int sum_column(int tile, int odd) {
        return (tile / PIECE * 2 + odd) * PIECE + tile % PIECE;
    }

    struct alignas(16) Piece {
        T at[PIECE];
    };

    // Reads COUNT lines, two terms of each, from terms k0 to k0 + 7.
    template <int PITCH, int COUNT>
    __device__ __forceinline__ void read(const T* tile, int k0, T (&x)[2][COUNT]) const {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            #pragma unroll
            for (int p = 0; p < COUNT / PIECE; ++p) {
                const T* at = tile + (k0 + 4 * half + member) * PITCH + p * SPAN + piece_of(group);
                *reinterpret_cast<Piece*>(x[half] + p * PIECE) =
                    *reinterpret_cast<const Piece*>(at);
            }
        }
    }

    // The operands of 16 rows by 8 terms, and of 8 terms by 8 columns.
    template <int COUNT>
    static __device__ __forceinline__ void rows_of(const T (&x)[2][COUNT], int tile, T (&a)[4]) {
        a[0] = x[0][2 * tile], a[1] = x[0][2 * tile + 1];
        a[2] = x[1][2 * tile], a[3] = x[1][2 * tile + 1];
    }
    template <int COUNT>
    static __device__ __forceinline__ void columns_of(const T (&x)[2][COUNT], int tile, T (&b)[2]) {
        b[0] = x[0][tile], b[1] = x[1][tile];
    }

    // Adds a product of 16 rows and 8 columns to the sums.
    __device__ __forceinline__ void add(int row_tile, int column_tile, const T (&d)[4]) {
        #pragma unroll
        for (int v = 0; v < 4; ++v) {
            sums[2 * row_tile + v / 2][sum_column(column_tile, v % 2)] += d[v];
        }
    }

    // float64: products straight into the sums.
    __device__ __forceinline__ void multiply(const double* left, const double* right) {
        #pragma unroll
        for (int k0 = 0; k0 < BK; k0 += 8) {
            alignas(16) double x[2][TM], y[2][TN / 2];
            read<M_PITCH>(left, k0, x);
            read<N_PITCH>(right, k0, y);
            #pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) {
                double a[4];
                rows_of(x, i, a);
                #pragma unroll
                for (int j = 0; j < COLUMN_TILES; ++j) {
                    double b[2], d[4];
                    columns_of(y, j, b);
                    #pragma unroll
                    for (int v = 0; v < 4; ++v) d[v] = sums[2 * i + v / 2][sum_column(j, v % 2)];
                    multiply_add(d, a, b);
                    #pragma unroll
                    for (int v = 0; v < 4; ++v) sums[2 * i + v / 2][sum_column(j, v % 2)] = d[v];
                }
            }
        }
    }

    // float32: the small products first, so that little is cut off while sums are small.
    __device__ __forceinline__ void multiply(const float* left, const float* right) {
        constexpr int STEPS = BK / 8;
        alignas(16) float y[STEPS][2][TN / 2], y_low[STEPS][2][TN / 2];
        #pragma unroll
        for (int s = 0; s < STEPS; ++s) read_split<N_PITCH>(right, 8 * s, y[s], y_low[s]);
        #pragma unroll
        for (int p = 0; p < TM / PIECE; ++p) {
            alignas(16) float x[STEPS][2][PIECE], x_low[STEPS][2][PIECE];
            #pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                read_split<M_PITCH>(left + p * SPAN, 8 * s, x[s], x_low[s]);
            }
            #pragma unroll
            for (int i = 0; i < PIECE / 2; ++i) {
                float d[COLUMN_TILES][4] = {};
                #pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    multiply_tiles(d, x_low[s], i, y[s]);
                    multiply_tiles(d, x[s], i, y_low[s]);
                }
                #pragma unroll
                for (int s = 0; s < STEPS; ++s) multiply_tiles(d, x[s], i, y[s]);
                #pragma unroll
                for (int j = 0; j < COLUMN_TILES; ++j) add(p * (PIECE / 2) + i, j, d[j]);
            }
        }
    }
    template <int PITCH, int COUNT>
    __device__ __forceinline__ void read_split(const float* tile, int k0, float (&high)[2][COUNT],
                                               float (&low)[2][COUNT]) const {
        read<PITCH>(tile, k0, high);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) split(high[half][i], high[half][i], low[half][i]);
        }
    }
    static __device__ __forceinline__ void multiply_tiles(float (&d)[COLUMN_TILES][4],
                                                          const float (&x)[2][PIECE], int i,
                                                          const float (&y)[2][TN / 2]) {
        float a[4], b[2];
        rows_of(x, i, a);
        #pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            columns_of(y, j, b);
            multiply_add(d[j], a, b);
        }
    }

    // Adds the products of `terms` terms to the sums. The shared memory is free again afterwards.
    __device__ __forceinline__ void run(Shared& shared, const Side<T>& left, const Side<T>& right,
                                        int terms) {
        TileLoader<T, BM, BK, THREADS, M_PITCH, false> of_left(left);
        TileLoader<T, BN, BK, THREADS, N_PITCH, false> of_right(right);
        for_each_tile<BK>(shared.left, shared.right, of_left, of_right, terms, [&](int now) {
            multiply(shared.left[now] + m_warp, shared.right[now] + n_warp);
        }, [](int) {});
    }
};
