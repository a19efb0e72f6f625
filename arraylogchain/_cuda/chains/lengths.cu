// Whole numbers about rows, handed over as an argument of the launch. Memory of the host would have
// to be there still when the device gets to copying it, and each time that a graph is replayed.

constexpr int kCount = 1000;  // of one launch: all arguments together may have 4096 bytes

struct Numbers {
    int at[kCount];
};

__global__ void __launch_bounds__(256, 1)
chain_lengths(const __grid_constant__ Numbers numbers, int count, long long* out) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = numbers.at[i];
}
