// Rounds contiguous sums to the dtype of a result.
#include "numbers.cuh"

constexpr int THREADS = 256;

template <class Out>
__global__ void __launch_bounds__(THREADS)
rounded(const ComputeOf<Out>* x, Out* out, long long count) {
    const long long step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        store(out + i, x[i]);
    }
}
