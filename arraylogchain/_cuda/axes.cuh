// Index spaces of strided arrays: `pack_axes` in launch.py fills them in.
#pragma once

constexpr int MAX_AXES = 8;

struct Axes {
    int count;
    long long extent[MAX_AXES];
    long long stride[3][MAX_AXES];  // of up to three operands, in elements
};

// n / d for n >= 0, d > 0. Long division where 32 bits do not do: it is rare, and the compiler's
// own is a function whose call costs the caller registers.
__device__ __forceinline__ long long quotient(long long n, long long d) {
    if (((n | d) >> 32) == 0) return unsigned(n) / unsigned(d);
    unsigned long long result = 0, rest = 0;
    #pragma unroll 1
    for (int bit = 62; bit >= 0; --bit) {
        rest = rest << 1 | (n >> bit & 1);
        const bool fits = rest >= (unsigned long long)d;
        rest -= fits ? d : 0;
        result = result << 1 | (unsigned long long)fits;
    }
    return (long long)result;
}

// Where the entry `index`, counted with the last axis fastest, lies in one of the operands.
template <int Operand>
__device__ __forceinline__ long long offset_of(const Axes& axes, long long index) {
    long long offset = 0;
    #pragma unroll 1
    for (int axis = axes.count - 1; axis > 0; --axis) {
        const long long extent = axes.extent[axis], rest = quotient(index, extent);
        offset += (index - rest * extent) * axes.stride[Operand][axis];
        index = rest;
    }
    return offset + index * axes.stride[Operand][0];
}
