// Sums over rows of posterior weights of pairs of states: expected transitions, and gradients.
//
//   out[k][j] = P[k][j] * sum over rows r of c[r] * forward[r][k] * back[r][j]
//
// at a step from time t to t + 1, without P for derivatives by linear weights. Both states and the
// rows' factors c = cotangent / Z are extended numbers. They are scaled by powers of two, one for
// each k and one for each j, such that the largest over the rows is about 1, and multiplied as
// ordinary numbers, a <= 4 and b <= 2. What underflow may have cost a sum of n terms:
//   products below `tiny`, or a or b that were     at most 8 n tiny in all
// So a sum S is proved if abs(S) >= 8 n tiny / eps; terms of either sign only make S smaller. With
// P, a posterior that is off by less than an eps of the largest cotangent is right as it is. What
// is not proved is computed again from the extended numbers, by a warp for each entry.
#include "pairs.cuh"
#include "product.cuh"

constexpr int kSide = 64, kThreads = 256, kRowsAtOnce = 16, kEach = 4;
// Terms that are about equal, added to one sum, are rounded to the same side again and again. So the
// sums of so many rows are added up apart, where there are more.
constexpr int kShort = 128;

// What a block's entries have in common at one step of time.
template <class T>
struct PairStep {
    const Pairs* c;
    const void* matrices;
    const T *forward, *back;   // states of the group's rows at time t and at t + 1
    const Factor<T>* factors;  // of the group's rows
    long long matrix, row0, row1;
    T size;                    // of the largest cotangent

    // Entries of a row's states; the forward one with the row's factor.
    __device__ __forceinline__ Extended<T> left(long long r, const Factor<T>& f, int k) const {
        const T* from = forward + r * 2 * c->size;
        return {from[k] * f.m, from[c->size + k] + f.e};
    }
    __device__ __forceinline__ Extended<T> right(long long r, int j) const {
        const T* from = back + r * 2 * c->size;
        return {from[j], from[c->size + j]};
    }
};

// The sum of one entry from the extended numbers, by all lanes of a warp.
template <class T>
__device__ __forceinline__ void exact_pair(const PairStep<T>& step, int k, int j, int lane, T& m,
                                           T& e) {
    ExtendedSum<T> sum;
    #pragma unroll 1
    for (long long r = step.row0 + lane; r < step.row1; r += 32) {
        const Factor<T> factor = step.factors[r];
        if (factor.m == T(0)) continue;
        const Extended<T> left = step.left(r, factor, k), right = step.right(r, j);
        sum.add(left.m * right.m, left.e + right.e);
    }
    sum.over_lanes(m, e);
}

// A thread's entry, from its sum m and the exponents that were taken off: proved, or made again.
// All threads of a warp call it together.
template <class T>
__device__ __noinline__ T settled(const PairStep<T>& step, int k, int j, T m, T top_a, T top_b) {
    using F = Format<T>;
    const Pairs& c = *step.c;
    const bool is_there = k < c.size && j < c.size && !is_nan(m);
    // No row has a term where one of them is -inf.
    const bool is_none = !is_finite(top_a) || !is_finite(top_b);
    T e = is_none ? T(0) : top_a + top_b;
    Extended<T> p = {T(1), T(0)};
    if (is_there && c.with_weights) {
        const T given = load_any<T>(step.matrices,
                                    step.matrix + k * c.row_stride + j * c.column_stride, c.dtype);
        p = c.in_logs ? times_exp(p, given) : split(given);
    }
    const T lost = T(8) * T(step.row1 - step.row0) * Number<T>::tiny, loss = e + p.e;
    const bool is_small = c.with_weights && loss < T(F::kBias - 4) &&
                          lost * power_of_two<T>(loss) * T(16) <= Number<T>::eps * step.size;
    const bool is_proved = fabs(m) >= lost / Number<T>::eps || is_none || is_small;
    const int lane = threadIdx.x % 32;
    unsigned open = __ballot_sync(kAllLanes, is_there && !is_proved && p.m != T(0));
    #pragma unroll 1
    for (; open != 0; open &= open - 1) {
        const int owner = __ffs((int)open) - 1;
        T value, exponent;
        exact_pair(step, __shfl_sync(kAllLanes, k, owner), __shfl_sync(kAllLanes, j, owner), lane,
                   value, exponent);
        if (lane == owner) {
            m = value;
            e = exponent;
        }
    }
    if (is_nan(m)) return m;
    // Nothing times an infinite weight is nothing.
    return !is_there || m == T(0) || p.m == T(0) ? T(0) : ordinary(m * p.m, e + p.e);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = 1;  // with more, registers run out
#else
constexpr int kBlocks = 2;
#endif

// Template parameter T: what is computed in. Each block has 64 x 64 entries of one matrix, each
// thread 4 x 4 of them; of the rows, and of steps that are added up, it has those of its split.
// Dynamic shared memory: a number for each entry, if the split has more than kShort rows.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? kBlocks : 1)
chain_pairs(const __grid_constant__ Pairs c, const __grid_constant__ Axes groups,
            const void* __restrict__ matrices, const T* __restrict__ forward,
            const T* __restrict__ back, const T* __restrict__ all_factors, void* out) {
    __shared__ __align__(16) T a[kRowsAtOnce][kSide], b[kRowsAtOnce][kSide];
    // Handed over as an argument it would take a stack.
    __shared__ PairStep<T> step;
    __shared__ T tops[2][kThreads / kSide][kSide], sizes[kThreads / 32];
    const int tid = threadIdx.x;
    const int tiles = (c.size + kSide - 1) / kSide;
    long long index = blockIdx.x;
    const int j0 = index % tiles * kSide;
    index /= tiles;
    const int k0 = index % tiles * kSide;
    index /= tiles;
    const int row_split = index % c.row_splits;
    index /= c.row_splits;
    const int slots = c.time_splits > 0 ? c.time_splits : c.times;
    const int slot = index % slots;
    const long long group = index / slots;
    const int times_each = (c.times + slots - 1) / slots;
    const int time0 = slot * times_each, time1 = min(time0 + times_each, c.times);
    const long long rows_each = (c.rows + c.row_splits - 1) / c.row_splits;
    const long long number = c.groups * c.rows, first_row = group * c.rows;

    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    T* const wholes = reinterpret_cast<T*>(dynamic_memory) + tid;  // this thread's, kThreads apart
    const bool is_long = rows_each > kShort;

    T total[kEach][kEach] = {}, rest[kEach][kEach] = {};  // what sums rounded off is added at last
    // A warp has 4 x 8 threads' entries. Those of neighbouring lanes have a column in common, so that
    // two lanes are served as one.
    const int lane = tid % 32, warp = tid / 32;
    const int y = (warp / 2 * 4 + lane / 16 * 2 + lane % 2) * kEach;
    const int x = (warp % 2 * 8 + lane / 2 % 8) * kEach;
    #pragma unroll 1
    for (int i = time0; i < time1; ++i) {
        const long long t = c.first + i;
        if (tid == 0) {
            step.c = &c;
            step.matrices = matrices;
            step.matrix = offset_of<0>(groups, group) + t * c.matrix_stride;
            step.forward = forward + ((t - c.forward_time) * number + first_row) * 2 * c.size;
            step.back = back + ((t + 1 - c.back_time) * number + first_row) * 2 * c.size;
            step.factors = reinterpret_cast<const Factor<T>*>(all_factors) + i * number + first_row;
            step.row0 = row_split * rows_each;
            step.row1 = min(step.row0 + rows_each, c.rows);
        }
        __syncthreads();

        // The largest exponents over the rows, and the largest cotangent.
        const int column = tid % kSide, part = tid / kSide;
        T top_a = -Number<T>::infinity(), top_b = top_a, size = T(0);
        #pragma unroll 2
        for (long long r = step.row0 + part; r < step.row1; r += kThreads / kSide) {
            const Factor<T> factor = step.factors[r];
            size = fmax(size, factor.size);
            if (!is_finite(factor.m) || factor.m == T(0)) continue;
            if (k0 + column < c.size) {
                const Extended<T> v = step.left(r, factor, k0 + column);
                if (v.m != T(0)) top_a = fmax(top_a, v.e);
            }
            if (j0 + column < c.size) {
                const Extended<T> v = step.right(r, j0 + column);
                if (v.m != T(0)) top_b = fmax(top_b, v.e);
            }
        }
        tops[0][part][column] = top_a;
        tops[1][part][column] = top_b;
        size = warp_max(size);
        if (tid % 32 == 0) sizes[tid / 32] = size;
        __syncthreads();
        if (tid < 2 * kSide) {
            T* own = &tops[tid / kSide][0][column];
            // Stays -inf where there is no term; what is scaled by it is 0 then.
            for (int p = 1; p < kThreads / kSide; ++p) own[0] = fmax(own[0], own[p * kSide]);
        }
        for (int w = 0; w < kThreads / 32; ++w) size = fmax(size, sizes[w]);
        if (tid == 0) step.size = size;
        __syncthreads();

        T sums[kEach][kEach] = {};
        if (is_long) {
            #pragma unroll
            for (int e = 0; e < kEach * kEach; ++e) wholes[e * kThreads] = T(0);
        }
        #pragma unroll 1
        for (long long r0 = step.row0; r0 < step.row1; r0 += kRowsAtOnce) {
            #pragma unroll
            for (int e = tid; e < kRowsAtOnce * kSide; e += kThreads) {
                const int at = e % kSide;
                const long long r = r0 + e / kSide;
                T left = T(0), right = T(0);
                const Factor<T> factor =
                    r < step.row1 ? step.factors[r] : Factor<T>{T(0), T(0), T(0)};
                if (is_nan(factor.m)) {
                    left = right = factor.m;
                } else if (factor.m != T(0)) {
                    if (k0 + at < c.size) {
                        const Extended<T> v = step.left(r, factor, k0 + at);
                        if (v.m != T(0)) left = v.m * power_of_two<T>(v.e - tops[0][0][at]);
                    }
                    if (j0 + at < c.size) {
                        const Extended<T> v = step.right(r, j0 + at);
                        if (v.m != T(0)) right = v.m * power_of_two<T>(v.e - tops[1][0][at]);
                    }
                }
                a[e / kSide][at] = left;
                b[e / kSide][at] = right;
            }
            __syncthreads();
            #pragma unroll 4
            for (int r = 0; r < kRowsAtOnce; ++r) {
                constexpr int V = Pack<T>::kNumbers;
                Pack<T> left[kEach / V], right[kEach / V];
                #pragma unroll
                for (int p = 0; p < kEach / V; ++p) {
                    left[p] = *reinterpret_cast<const Pack<T>*>(&a[r][y + p * V]);
                    right[p] = *reinterpret_cast<const Pack<T>*>(&b[r][x + p * V]);
                }
                #pragma unroll
                for (int u = 0; u < kEach; ++u) {
                    #pragma unroll
                    for (int v = 0; v < kEach; ++v) {
                        sums[u][v] = fma(left[u / V][u % V], right[v / V][v % V], sums[u][v]);
                    }
                }
            }
            __syncthreads();
            const bool is_last = r0 + kRowsAtOnce >= step.row1;
            if (!is_long || (!is_last && (r0 - step.row0 + kRowsAtOnce) % kShort != 0)) continue;
            #pragma unroll
            for (int u = 0; u < kEach; ++u) {
                #pragma unroll
                for (int v = 0; v < kEach; ++v) {
                    T& whole = wholes[(u * kEach + v) * kThreads];
                    whole += sums[u][v];
                    sums[u][v] = is_last ? whole : T(0);
                }
            }
        }
        #pragma unroll
        for (int u = 0; u < kEach; ++u) {
            #pragma unroll
            for (int v = 0; v < kEach; ++v) {
                add_to(total[u][v], rest[u][v],
                       settled(step, k0 + y + u, j0 + x + v, sums[u][v], tops[0][0][y + u],
                               tops[1][0][x + v]));
            }
        }
        __syncthreads();
    }
    const long long out_at =
        group * c.out_step + slot * (long long)c.size * c.size + row_split * c.out_split;
    #pragma unroll
    for (int u = 0; u < kEach; ++u) {
        #pragma unroll
        for (int v = 0; v < kEach; ++v) {
            const int k = k0 + y + u, j = j0 + x + v;
            if (k >= c.size || j >= c.size) continue;
            const long long at = out_at + (long long)k * c.size + j;
            T sum = total[u][v] + rest[u][v];
            if (c.accumulate) sum += ((const T*)out)[at];
            store_any<T>(out, at, c.out_dtype, sum);
        }
    }
}
