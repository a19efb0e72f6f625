// Runs the source of a CUDA kernel on a CPU, one block after another. For tests only.
//
// It finds a missing barrier (under some order of threads: try several seeds), barriers that not
// all threads reach, collectives that not all lanes of the mask join, and reads of shared memory
// before the first write, as it starts as NaN. Compiled with AddressSanitizer it finds
// accesses out of bounds, in shared memory as well. On request subnormal numbers are flushed to zero.
//
// It does not show weakly ordered memory, blocks that run at the same time, time, or where NVRTC
// would merge a multiplication and an addition. It takes some C++ that NVRTC would
// not; test_compile.py sees to that.
//
// cpu_compiler.py puts this before a kernel's source, and the source into a nameless namespace.
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <new>
#include <utility>

#include "shim/blocks.h"
#include "shim/fibers.h"
#include "shim/halves.h"
#include "shim/intrinsics.h"
#include "shim/warps.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// cpu_compiler.py rewrites __shared__: one block runs at a time, and its variables are static.

#define threadIdx (shim::current->position)
#define blockIdx (shim::block_position)
#define blockDim (shim::block_size)

namespace shim {

// Arguments come as cuLaunchKernel takes them: a pointer to each, read by the kernel's signature.
template <class... P, size_t... I>
inline int call(void (*function)(P...), const Launch& launch, void** arguments,
                std::index_sequence<I...>) {
    return run(launch, [&] { function(*static_cast<std::remove_cv_t<P>*>(arguments[I])...); });
}

template <class... P>
inline int call(void (*function)(P...), const Launch& launch, void** arguments, int count,
                const int* sizes) {
    const int parameter_sizes[] = {static_cast<int>(sizeof(P))..., 0};
    bool fits = count == static_cast<int>(sizeof...(P));
    for (int i = 0; fits && i < count; ++i) fits = sizes[i] == parameter_sizes[i];
    if (!fits) {
        failure = "arguments do not fit the kernel's parameters, which have these sizes:";
        for (size_t i = 0; i < sizeof...(P); ++i) failure += " " + std::to_string(parameter_sizes[i]);
        return 1;
    }
    return call(function, launch, arguments, std::index_sequence_for<P...>{});
}

}  // namespace shim

#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))
#define SHIM_ENTRY(...)                                                                        \
    SHIM_EXPORT int shim_launch(const shim::Launch* launch, void** arguments, int count,       \
                                const int* sizes) {                                            \
        return shim::call(&__VA_ARGS__, *launch, arguments, count, sizes);                     \
    }                                                                                          \
    SHIM_EXPORT const char* shim_failure() { return shim::failure.c_str(); }
