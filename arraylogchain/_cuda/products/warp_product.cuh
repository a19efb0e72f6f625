// Products of matrices of up to P x P by a warp, from tiles in shared memory into registers.
#pragma once
#include "small.cuh"

// A lane's part of a product is TM x TN sums; lanes are spread 8 x 4 over it. Which rows and columns
// these are depends on how the operands lie: each is read in vectors, along its rows, and those that
// the lanes read at once come from different banks.
template <class T, int P> struct WarpProduct {
    // What one instruction moves. With a vector between rows, those of eight rows do not collide.
    static constexpr int VECTOR = 16 / sizeof(T), PITCH = P + VECTOR;
    static constexpr int TM = P / 8, TN = P / 4;
    static constexpr int PIECE = TN < VECTOR ? TN : VECTOR;  // columns of a lane that adjoin
    using Matrix = T (*)[PITCH];
    using Vector = Neighbours<T, VECTOR>;

    T sums[TM][TN];

    // Every second lane reads the same columns: shared memory serves twice as many at a time.
    static __device__ __forceinline__ int lane_row() {
        return threadIdx.x % 32 / 8 * 2 + threadIdx.x % 2;
    }
    static __device__ __forceinline__ int lane_column() { return threadIdx.x / 2 % 4; }
    static __device__ __forceinline__ int spread_row(int m) { return lane_row() + 8 * m; }
    static __device__ __forceinline__ int adjoining_row(int m) { return TM * lane_row() + m; }
    static __device__ __forceinline__ int spread_column(int n) { return lane_column() + 4 * n; }
    // Of the first of a piece; n is a multiple of PIECE.
    static __device__ __forceinline__ int adjoining_column(int n) {
        return PIECE * lane_column() + 4 * n;
    }
    template <int N> static __device__ __forceinline__ Neighbours<T, N>& at(T& first) {
        return *reinterpret_cast<Neighbours<T, N>*>(&first);
    }

    // sum_k x[i][k] y[j][k] for spread rows i and spread columns j. Here and below, what lies
    // between the end of a sum and the next whole vector has to be 0.
    __device__ __forceinline__ void of_rows_and_rows(Matrix x, Matrix y, int terms) {
        clear();
        #pragma unroll 2
        for (int k = 0; k < terms; k += VECTOR) {
            Vector of_x[TM];
            #pragma unroll
            for (int m = 0; m < TM; ++m) of_x[m] = at<VECTOR>(x[spread_row(m)][k]);
            #pragma unroll
            for (int n = 0; n < TN; ++n) {
                const Vector of_y = at<VECTOR>(y[spread_column(n)][k]);
                #pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    #pragma unroll
                    for (int m = 0; m < TM; ++m) {
                        sums[m][n] = fma(of_x[m].at[v], of_y.at[v], sums[m][n]);
                    }
                }
            }
        }
    }

    // sum_k x[i][k] y[k][j] for spread rows i and adjoining columns j.
    __device__ __forceinline__ void of_rows_and_columns(Matrix x, Matrix y, int terms) {
        clear();
        #pragma unroll 2
        for (int k = 0; k < terms; k += VECTOR) {
            Vector of_x[TM];
            #pragma unroll
            for (int m = 0; m < TM; ++m) of_x[m] = at<VECTOR>(x[spread_row(m)][k]);
            #pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                T factors[TM];
                #pragma unroll
                for (int m = 0; m < TM; ++m) factors[m] = of_x[m].at[v];
                add(factors, y[k + v]);
            }
        }
    }

    // sum_k x[k][i] y[k][j] for adjoining rows i and adjoining columns j.
    __device__ __forceinline__ void of_columns_and_columns(Matrix x, Matrix y, int terms) {
        clear();
        #pragma unroll 4
        for (int k = 0; k < terms; ++k) add(at<TM>(x[k][adjoining_row(0)]).at, y[k]);
    }

  private:
    __device__ __forceinline__ void clear() {
        #pragma unroll
        for (int m = 0; m < TM; ++m) {
            #pragma unroll
            for (int n = 0; n < TN; ++n) sums[m][n] = 0;
        }
    }

    __device__ __forceinline__ void add(const T (&factors)[TM], T* y) {
        #pragma unroll
        for (int n = 0; n < TN; n += PIECE) {
            const Neighbours<T, PIECE> of_y = at<PIECE>(y[adjoining_column(n)]);
            #pragma unroll
            for (int e = 0; e < PIECE; ++e) {
                #pragma unroll
                for (int m = 0; m < TM; ++m) {
                    sums[m][n + e] = fma(factors[m], of_y.at[e], sums[m][n + e]);
                }
            }
        }
    }
};
