// What the shim offers to kernels, used as kernels use it.
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
    __shared__ T of_warps[32];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    dynamic[threadIdx.x] = i < count ? x[i] : T(0);
    __syncthreads();
    T sum = dynamic[blockDim.x - 1 - threadIdx.x];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < blockDim.x / 32; ++warp) sum += of_warps[warp];
    sums[blockIdx.x] = sum;
}

// For one warp of which `lanes` take part: what each collective hands to each lane.
__global__ void collectives(int* out, int lanes) {
    const int lane = threadIdx.x;
    if (lane >= lanes) return;
    const unsigned mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
    const int value = 10 * lane;
    out[0 * 32 + lane] = __shfl_sync(mask, value, 3);
    out[1 * 32 + lane] = __shfl_up_sync(mask, value, 1);
    out[2 * 32 + lane] = __shfl_down_sync(mask, value, 2, 4);
    out[3 * 32 + lane] = __shfl_sync(mask, value, 1, 4);
    out[4 * 32 + lane] = __ballot_sync(mask, lane % 3 == 0);
    out[5 * 32 + lane] = __any_sync(mask, lane == 5);
    out[6 * 32 + lane] = __all_sync(mask, lane < lanes);
    out[7 * 32 + lane] = __reduce_max_sync(mask, value);
    out[8 * 32 + lane] = __reduce_add_sync(mask, value);
    out[9 * 32 + lane] = __shfl_xor_sync(mask, value, 1, 2);
}

// Votes of a block in which some threads have returned.
__global__ void votes(int* out, int leaving) {
    const int i = threadIdx.x;
    if (i < leaving) return;
    const int count = __syncthreads_count(i % 2);
    const int any = __syncthreads_or(i == leaving);
    const int all = __syncthreads_and(i >= leaving);
    const int none = __syncthreads_or(i < leaving);
    if (i == leaving) out[0] = count, out[1] = any, out[2] = all, out[3] = none;
}

__global__ void atomics(float* f, double* d, int* largest, unsigned long long* count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(f, 1.0f);
    atomicAdd(d, 0.5);
    atomicMax(largest, i);
    atomicAdd(count, 1ull);
}

__global__ void halve(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] * 0.5f; }

// One of each kind of parameter, in an order that leaves gaps between them.
__global__ void parameters(signed char a, Pair pair, float b, const double* nothing, long long c,
                           double* out) {
    out[0] = a;
    out[1] = pair.small;
    out[2] = pair.large[1];
    out[3] = b;
    out[4] = nothing == nullptr;
    out[5] = c;
}
