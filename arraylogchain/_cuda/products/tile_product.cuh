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
    // The totals of `run` leave room in shared memory for one block of the large tile before 9.0.
#ifdef __CUDA_ARCH__  // where it is tight from 10.0 on, the assembler reports
    static constexpr bool IS_TIGHT =
        (__CUDA_ARCH__ < 900 && BM * BN >= 128 * 128) || __CUDA_ARCH__ >= 1200 ||
        ((LeftTurned || RightTurned) && __CUDA_ARCH__ >= 1000);
#else
    static constexpr bool IS_TIGHT = false;
#endif
    static constexpr int BLOCKS = sizeof(T) > 4 || IS_TIGHT ? 1
                                  : BM * BN >= 128 * 128    ? 2
                                  : TM * TN <= 16           ? 3
                                                            : 4;
    static constexpr int PIECE = 16 / sizeof(T);  // neighbours that one instruction moves
    static constexpr int M_PIECES = TM / PIECE, N_PIECES = TN / PIECE;
    // Lanes of a warp are spread 4 x 8 over the tile.
    static constexpr int WARPS_N = (BN / TN) / 8;
    // 4 more than needed: what a warp writes turned lies in different banks.
    static constexpr int M_PITCH = BM + 4, N_PITCH = BN + 4;
    static_assert(TM % PIECE == 0 && TN % PIECE == 0, "threads own whole pieces");
    static_assert(BM / TM % 4 == 0 && BN / TN % 8 == 0, "whole warps");
    static_assert(BK % 4 == 0 && BM % 4 == 0 && BN % 4 == 0, "whole vectors");

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
        // Lanes whose numbers differ by 1 read the same columns, those that differ by 2 the same
        // rows: then shared memory serves 16 lanes at a time rather than 8.
        m_thread = warp / WARPS_N * 4 + lane / 16 * 2 + lane % 2;
        n_thread = warp % WARPS_N * 8 + lane / 2 % 8;
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

    // Adds to what this thread has in dynamic shared memory for each of its sums, which start again.
    __device__ __forceinline__ void put_by(Piece* totals) {
        #pragma unroll
        for (int i = 0; i < TM; ++i) {
            #pragma unroll
            for (int p = 0; p < N_PIECES; ++p) {
                Piece& total = totals[(i * N_PIECES + p) * THREADS + threadIdx.x];
                Piece piece = total;
                #pragma unroll
                for (int v = 0; v < PIECE; ++v) {
                    piece.at[v] += sums[i][p * PIECE + v];
                    sums[i][p * PIECE + v] = T(0);
                }
                total = piece;
            }
        }
    }

    // Sets the sums to those of `terms` products. The shared memory is free again afterwards.
    //
    // Terms that are about equal, added to one sum, are rounded to the same side again and again. So
    // the sums of SHORT terms are added up apart, where there are more: in TM * TN numbers for each
    // thread of dynamic shared memory.
    static constexpr int SHORT = 64;
    __device__ __forceinline__ void run(Shared& shared, const Side<T>& left, const Side<T>& right,
                                        int terms) {
        extern __shared__ __align__(16) unsigned char dynamic_memory[];
        Piece* totals = reinterpret_cast<Piece*>(dynamic_memory);
        const bool is_long = terms > SHORT;
        if (is_long) {
            #pragma unroll
            for (int i = 0; i < TM * N_PIECES; ++i) totals[i * THREADS + threadIdx.x] = Piece{};
        }
        Loader<BM, LeftTurned> of_left(left);
        Loader<BN, RightTurned> of_right(right);
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
        }, [&](int remaining) {
            // Once in SHORT terms.
            if (is_long && unsigned(remaining) % SHORT < BK) put_by(totals);
        });
        if (!is_long) return;
        #pragma unroll
        for (int i = 0; i < TM; ++i) {
            #pragma unroll
            for (int j = 0; j < TN; ++j) {
                sums[i][j] += totals[(i * N_PIECES + j / PIECE) * THREADS + threadIdx.x].at[j % PIECE];
            }
        }
    }
};

// Both sides as factors.cu leaves them.
template <class T, int BM, int BN, int BK, int TM, int TN>
using PlainTile = TileProduct<T, BM, BN, BK, TM, TN, false, false>;
