// Kernels with one fault each that the shim must report.

// Each thread reads its neighbour's number before the neighbour need have written it.
__global__ void missing_barrier(const float* x, float* y) {
    __shared__ float shared[64];
    shared[threadIdx.x] = x[threadIdx.x];
#ifdef WITH_BARRIER
    __syncthreads();
#endif
    y[threadIdx.x] = shared[threadIdx.x ^ NEIGHBOUR];
}

// Numbers of the next step overwrite the last ones, which other threads may still need.
__global__ void missing_second_barrier(float* y, int steps) {
    __shared__ float shared[64];
    float sum = 0;
    for (int step = 0; step < steps; ++step) {
        shared[threadIdx.x] = step + threadIdx.x;
        __syncthreads();
        sum += shared[threadIdx.x ^ NEIGHBOUR];
#ifdef WITH_BARRIER
        __syncthreads();
#endif
    }
    y[threadIdx.x] = sum;
}

__global__ void barrier_in_a_branch() {
    if (threadIdx.x < 40)
        __syncthreads();
    else
        __syncwarp(0xffffff00u);
    __shfl_xor_sync(0xffffffffu, 1, 1);
}

__global__ void two_barriers() {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}

__global__ void shuffle_without_a_lane() {
    if (threadIdx.x == 7) return;
    __shfl_xor_sync(0xffffffffu, 1, 1);
}

__global__ void lane_outside_its_mask() { __shfl_xor_sync(0x0000ffffu, 1, 1); }

__global__ void shuffle_from_a_lane_outside(float* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, threadIdx.x < 12 ? 1 : 16);
}

__global__ void unwritten_shared_memory(float* y) {
    __shared__ float fixed[4];
    extern __shared__ float dynamic[];
    if (blockIdx.x == 0) fixed[threadIdx.x] = dynamic[threadIdx.x] = 1.0f;
    y[2 * (blockIdx.x * 4 + threadIdx.x)] = fixed[threadIdx.x];
    y[2 * (blockIdx.x * 4 + threadIdx.x) + 1] = dynamic[threadIdx.x];
}

__global__ void depends_on_earlier_blocks(int* count, int* y) { y[blockIdx.x] = (*count)++; }

__global__ void trapped() {
    if (threadIdx.x == 3) __trap();
}

__global__ void reads_beyond(const float* x, float* y, int count) {
    y[threadIdx.x] = x[threadIdx.x + count];
}

__global__ void writes_beyond_static_shared_memory(float* y, int count) {
    __shared__ float shared[32];
    shared[threadIdx.x + count] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = shared[threadIdx.x];
}

__global__ void writes_beyond_dynamic_shared_memory(float* y, int count) {
    extern __shared__ float shared[];
    shared[threadIdx.x + count] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = shared[threadIdx.x];
}

__global__ void writes_beyond_a_thread_s_array(float* y, int count) {
    float local[8];
    for (int i = 0; i < 8; ++i) local[i + count] = y[i];
    y[threadIdx.x] = local[threadIdx.x % 8];
}

template <int WARPS>
__global__ void __launch_bounds__(WARPS * (16 + 16), 1)
bounded(float* y, int (*unused)(int) = nullptr) {
    y[threadIdx.x] = 1.0f;
}

__global__ void much_static_shared_memory(float* y) {
    __shared__ float shared[10 << 10];
    extern __shared__ float dynamic[];
    shared[threadIdx.x] = dynamic[threadIdx.x] = y[threadIdx.x];
    y[threadIdx.x] = shared[threadIdx.x] + dynamic[threadIdx.x];
}
