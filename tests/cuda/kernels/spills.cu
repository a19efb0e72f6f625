// Keeps more numbers at a time than the registers that it is allowed can hold.
__global__ void __launch_bounds__(1024, 2) spilling(const double* x, double* y) {
    double values[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) values[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) y[i * 1024 + threadIdx.x] = values[i] * values[63 - i];
}

__global__ void frugal(const double* x, double* y) {
    __shared__ double shared[32];
    shared[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = shared[31 - threadIdx.x];
}
