// What kernels know that go along single paths of a chain, a warp for each.
#pragma once
#include "rows.cuh"

constexpr int kThreads = 256;

// Plain numbers of a launch; paths.py's PATHS. Strides are in numbers.
struct Paths {
    int size;                     // K
    int count;                    // T
    int first, last;              // steps of this launch, in the order of time
    int dtype;                    // of what is given
    int form, start_form, end_form;     // of transitions, and of initial and final weights
    long long rows, groups;       // rows in each group
    long long paths;
    long long matrix_stride, row_stride, column_stride;
    long long potentials_time_stride, potentials_stride, start_stride, end_stride;
    long long history_time;       // the step of time that the history begins at
    long long time_stride, sample_stride;              // of states
    long long uniform_time_stride, uniform_sample_stride;

    __device__ __forceinline__ long long all_rows() const { return rows * groups; }
};

// The number of the path that this warp is for.
__device__ __forceinline__ long long own_path() {
    return (blockIdx.x * (long long)kThreads + threadIdx.x) / 32;
}

// Where column j of the matrix that leads from step t on begins.
__device__ __forceinline__ long long column_at(const Paths& c, int t, int j) {
    return t * c.matrix_stride + j * c.column_stride;
}
