// What a chain has to know of its matrices before it multiplies states by them.
//
// For each column j of each matrix:
//   line[j]     sums of a product from here on are proved right; infinite where a weight is, NaN
//               where one is NaN or negative
//   least[j]    the smallest weight that is not zero; infinity if all are zero, and 0 if some may
//               have become zero on the way or are infinite, NaN or negative
//   shift[j]    for logs: what was taken off the column, a whole number; -inf if all are -inf
// And if asked for, a copy of the weights themselves, rows side by side: exp(logs - shift[j]), or
// linear weights that are transposed or narrow as they are given.
//
// A sum S of K products of scaled states s <= 2^(kTop + 1) and weights p <= `most` may have lost
//   products below `tiny`                  at most tiny each
//   states s that were below it            at most tiny * most each
//   weights p that were below it, if any   at most tiny * 2^(kTop + 1) each
// So S >= K tiny (1 + most + 2^(kTop + 1) if any) / eps lost less than one eps of itself.
//
// Or, where sums are not asked for, copies of the weights' logs, logs - shift[j].
#include "entries.cuh"

constexpr int kTile = 32, kLanesOfRows = 8;

// What one thread, and then one column, has seen.
template <class T>
struct ColumnFacts {
    T most = T(0), least = Number<T>::infinity();
    bool invalid = false, infinite = false, lost = false;

    __device__ __forceinline__ void see(T p, bool is_lost) {
        using F = Format<T>;
        lost |= is_lost;
        if (is_nan(p) || (F::bits(p) >> (8 * sizeof(T) - 1) && !is_zero(p))) {
            invalid = true;
        } else if (!is_finite(p)) {
            infinite = true;
        } else if (!is_zero(p)) {
            // A flushed zero counts as lost.
            lost |= p < Number<T>::tiny;
            most = fmax(most, p);
            least = fmin(least, p);
        }
    }
};

// Template parameter T: what is computed in. Blocks of 32 * 8 threads, each for 32 columns of one
// matrix; blockIdx.x counts column tiles fastest, then matrices of a group, then groups.
template <class T>
__global__ void __launch_bounds__(kTile* kLanesOfRows)
chain_prepare(const void* given, int dtype, Axes groups, long long matrix_stride,
              long long row_stride, long long column_stride, int matrices, int size, int in_logs,
              T* copy, T* line, T* least, T* shift) {
    const bool as_logs = line == nullptr;
    using F = Format<T>;
    __shared__ T tile[kTile][kTile + 1];
    __shared__ T most_of[kLanesOfRows][kTile], least_of[kLanesOfRows][kTile];
    __shared__ int flags_of[kLanesOfRows][kTile];
    __shared__ T shift_of[kTile];
    const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
    const int tiles = (size + kTile - 1) / kTile;
    const long long at = blockIdx.x / tiles;  // group * matrices + matrix
    const int column0 = blockIdx.x % tiles * kTile, column = column0 + x;
    const long long origin =
        offset_of<0>(groups, at / matrices) + at % matrices * matrix_stride;
    // Lanes read along the axis whose entries lie closer together.
    const bool by_rows = (row_stride < 0 ? -row_stride : row_stride) <
                         (column_stride < 0 ? -column_stride : column_stride);

    // Calls visit(row, entry) for the thread's entries of its column, all threads together.
    const auto for_column = [&](auto visit) {
        for (int row0 = 0; row0 < size; row0 += kTile) {
            for (int i = y; i < kTile; i += kLanesOfRows) {
                const int k = by_rows ? x : i, j = by_rows ? i : x;
                if (row0 + k < size && column0 + j < size) {
                    const long long entry =
                        origin + (row0 + k) * row_stride + (column0 + j) * column_stride;
                    tile[k][j] = load_any<T>(given, entry, dtype);
                }
            }
            __syncthreads();
            for (int i = y; i < kTile; i += kLanesOfRows) {
                if (row0 + i < size && column < size) visit(row0 + i, tile[i][x]);
            }
            __syncthreads();
        }
    };

    if (in_logs) {
        T top = -Number<T>::infinity();
        for_column([&](int, T p) {
            if (is_finite(p)) top = fmax(top, p);
        });
        most_of[y][x] = top;
        __syncthreads();
        if (y == 0) {
            for (int i = 1; i < kLanesOfRows; ++i) top = fmax(top, most_of[i][x]);
            shift_of[x] = rint(top);
        }
        __syncthreads();
    }
    ColumnFacts<T> facts;
    const T own_shift = in_logs && is_finite(shift_of[x]) ? shift_of[x] : T(0);
    for_column([&](int row, T p) {
        bool lost = false;
        if (as_logs) {
            p = in_logs ? p - own_shift : log_of_weight<T>(kWeights, p);
        } else if (in_logs) {
            const Extended<T> weight = times_exp<T>({T(1), T(0)}, p - own_shift);
            p = weight.is_regular() ? weight.m * power_of_two<T>(weight.e) : weight.m;
            lost = weight.m != T(0) && p == T(0);
        }
        facts.see(p, lost);
        if (copy != nullptr) copy[(at * size + row) * size + column] = p;
    });
    most_of[y][x] = facts.most;
    least_of[y][x] = facts.least;
    flags_of[y][x] = facts.invalid | facts.infinite << 1 | facts.lost << 2;
    __syncthreads();
    if (y != 0 || column >= size) return;
    if (in_logs) shift[at * size + column] = shift_of[x];
    if (as_logs) return;
    int flags = 0;
    for (int i = 0; i < kLanesOfRows; ++i) {
        facts.most = fmax(facts.most, most_of[i][x]);
        facts.least = fmin(facts.least, least_of[i][x]);
        flags |= flags_of[i][x];
    }
    const bool invalid = flags & 1, infinite = flags & 2, lost = flags & 4;
    const T most_lost = lost ? power_of_two<T>(T(F::kTop + 1)) : T(0);
    const T unit = T(size) * (Number<T>::tiny / Number<T>::eps);
    line[at * size + column] = invalid    ? Number<T>::nan()
                               : infinite ? Number<T>::infinity()
                                          : unit * (T(1) + facts.most + most_lost);
    least[at * size + column] = invalid || infinite || lost ? T(0) : facts.least;
}
