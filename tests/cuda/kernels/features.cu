// The features of CUDA that the shim offers to kernels.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "included.cuh"

// Rounds numbers to T and back.
template <class In, class T>
__global__ void round_trip(const In* x, float* y, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = float(T(x[i]));
}

// Sums the numbers of each block through static and dynamic shared memory and a warp's lanes.
template <class T>
__global__ void block_sums(const T* x, T* sums, int count) {
    extern __shared__ __align__(16) unsigned char bytes[];
    T* dynamic = reinterpret_cast<T*>(bytes);
    __shared__ T warp_sums[32];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    dynamic[threadIdx.x] = i < count ? x[i] : T(0);
    __syncthreads();
    T sum = dynamic[blockDim.x - 1 - threadIdx.x];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < blockDim.x / 32; ++warp) sum += warp_sums[warp];
    sums[blockIdx.x] = sum;
}

// Exchanges values between neighbors in sections of two, in a warp with `lanes` active lanes.
__global__ void neighbours(int* out, int lanes) {
    const int lane = threadIdx.x;
    if (lane >= lanes) return;
    const unsigned mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
    out[lane] = __shfl_xor_sync(mask, 10 * lane, 1, 2);
}

__global__ void halve(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] * 0.5f; }

// One of each kind of parameter, in an order that leaves gaps between them.
__global__ void parameters(signed char a, Pair pair, float b, const double* null_pointer, long long c,
                           double* out) {
    out[0] = a;
    out[1] = pair.small;
    out[2] = pair.large[1];
    out[3] = b;
    out[4] = null_pointer == nullptr;
    out[5] = c;
}
