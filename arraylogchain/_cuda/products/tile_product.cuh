// The loop that all tiled products share: a block's tile of a matrix product, in registers.
#pragma once
#include "tile_loader.cuh"

// BM x BN entries of a product in blocks of (BM / TM) x (BN / TN) threads, BK terms at a time; each
// thread holds TM x TN sums. A side lies as [terms, lines], or, turned, as [lines, terms].
template <class T, int BM, int BN, int BK, int TM, int TN, bool LeftTurned, bool RightTurned>
struct TileProduct {
    static constexpr int THREADS = (BM / TM) * (BN / TN);
    // Blocks that registers must leave room for on a multiprocessor. Without any number the
    // assembler aims at more, and spills for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
    static constexpr bool IS_TIGHT = true;  // as the assembler reports
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    static constexpr bool IS_TIGHT = LeftTurned || RightTurned;
#else
    static constexpr bool IS_TIGHT = false;
#endif
    static constexpr int BLOCKS = sizeof(T) > 4 || IS_TIGHT ? 1
                                  : BM * BN >= 128 * 128    ? 2
                                  : TM * TN <= 16           ? 3
                                                            : 1;
    static constexpr int PIECE = 16 / sizeof(T);  // neighbours that one instruction moves
    static constexpr int M_PIECES = TM / PIECE, N_PIECES = TN / PIECE;
    // Lanes of a warp are spread 4 x 8 over the tile, where it is that wide: they read 64 and 128
    // different bytes of shared memory per instruction, without conflicts of banks.
    static constexpr int LANES_N = BN / TN < 8 ? BN / TN : 8;
    static constexpr int WARPS_N = (BN / TN) / LANES_N;
    // 4 more than needed: what a warp writes turned lies in different banks.
    static constexpr int M_PITCH = BM + 4, N_PITCH = BN + 4;
    static_assert(TM % PIECE == 0 && TN % PIECE == 0, "threads own whole pieces");
    static_assert(THREADS % 32 == 0 && BK % 4 == 0 && BM % 4 == 0 && BN % 4 == 0, "whole vectors");

    struct Shared {
        alignas(16) T left[2][BK * M_PITCH];
        alignas(16) T right[2][BK * N_PITCH];
    };

    template <int B, bool Turned>
    using Loader = TileLoader<T, B, BK, THREADS, B + 4, Turned>;

    T sums[TM][TN] = {};
    int m_thread, n_thread;

    __device__ __forceinline__ TileProduct() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        m_thread = warp / WARPS_N * (32 / LANES_N) + lane / LANES_N;
        n_thread = warp % WARPS_N * LANES_N + lane % LANES_N;
    }

    // The row of the tile that sums[i] belongs to, and the column of sums[...][j].
    __device__ __forceinline__ int row(int i) const {
        return i / PIECE * (BM / M_PIECES) + m_thread * PIECE + i % PIECE;
    }
    __device__ __forceinline__ int column(int j) const {
        return j / PIECE * (BN / N_PIECES) + n_thread * PIECE + j % PIECE;
    }

    struct alignas(16) Piece {
        T at[PIECE];
    };

    // Reads what this thread needs of one term of a tile in shared memory.
    __device__ __forceinline__ void read(const Shared& shared, int buffer, int k, T (&x)[TM],
                                         T (&y)[TN]) const {
        const T* left = shared.left[buffer] + k * M_PITCH + m_thread * PIECE;
        const T* right = shared.right[buffer] + k * N_PITCH + n_thread * PIECE;
        #pragma unroll
        for (int p = 0; p < M_PIECES; ++p) {
            *reinterpret_cast<Piece*>(x + p * PIECE) =
                *reinterpret_cast<const Piece*>(left + p * (BM / M_PIECES));
        }
        #pragma unroll
        for (int p = 0; p < N_PIECES; ++p) {
            *reinterpret_cast<Piece*>(y + p * PIECE) =
                *reinterpret_cast<const Piece*>(right + p * (BN / N_PIECES));
        }
    }

    // Adds the products of `terms` terms to the sums. The shared memory is free again afterwards.
    __device__ __forceinline__ void run(Shared& shared, const Side<T>& left, const Side<T>& right,
                                        int terms) {
        Loader<BM, LeftTurned> of_left(left, terms);
        Loader<BN, RightTurned> of_right(right, terms);
        for_each_tile<BK>(shared.left, shared.right, of_left, of_right, terms, [&](int now) {
            #pragma unroll
            for (int k = 0; k < BK; ++k) {
                alignas(16) T x[TM], y[TN];
                read(shared, now, k, x, y);
                #pragma unroll
                for (int i = 0; i < TM; ++i) {
                    #pragma unroll
                    for (int j = 0; j < TN; ++j) {
                        sums[i][j] = fma(x[i], y[j], sums[i][j]);
                    }
                }
            }
        });
    }
};

// Both sides as factors.cu leaves them.
template <class T, int BM, int BN, int BK, int TM, int TN>
using PlainTile = TileProduct<T, BM, BN, BK, TM, TN, false, false>;
