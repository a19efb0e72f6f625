// Sums over rows, or over parts, of numbers side by side.
//
//   out[o][s] = sum over i of in[o][i][s]
//
// where o and i are index spaces of their own, and s counts numbers that lie side by side in the
// input. Template parameter T: what the input is, and is added up in.
#include "any_dtype.cuh"
#include "axes.cuh"
#include "sums.cuh"

constexpr int kWidth = 32, kParts = 8;

// Operands of `kept`: the input and the output; of `summed`: the input. Each block is for 32
// numbers of one o.
template <class T>
__global__ void __launch_bounds__(kWidth* kParts)
chain_sum(const T* __restrict__ in, const __grid_constant__ Axes kept,
          const __grid_constant__ Axes summed, long long terms, long long width,
          long long out_stride, void* out, int out_dtype) {
    __shared__ T totals[kParts][kWidth], rests[kParts][kWidth];
    const int x = threadIdx.x % kWidth, y = threadIdx.x / kWidth;
    const long long tiles = (width + kWidth - 1) / kWidth;
    const long long o = blockIdx.x / tiles, s = blockIdx.x % tiles * kWidth + x;
    T total = T(0), rest = T(0);
    if (s < width) {
        const T* from = in + offset_of<0>(kept, o) + s;
        #pragma unroll 4
        for (long long i = y; i < terms; i += kParts) {
            add_to(total, rest, from[offset_of<0>(summed, i)]);
        }
    }
    totals[y][x] = total;
    rests[y][x] = rest;
    __syncthreads();
    if (y != 0 || s >= width) return;
    for (int i = 1; i < kParts; ++i) {
        add_to(total, rest, totals[i][x]);
        rest += rests[i][x];
    }
    store_any<T>(out, offset_of<1>(kept, o) + s * out_stride, out_dtype, total + rest);
}
