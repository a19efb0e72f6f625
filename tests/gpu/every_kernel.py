"""A script that runs the example of every kernel, for compute-sanitizer to look at.

Each array is an allocation of its own: within a pool, an access that leaves one array would find
the next one.
"""

import cupy

from arraylogchain._cli import kernels_of_cupy
from arraylogchain._cuda.self_check import largest_error
from arraylogchain._inputs.arrays import prepare_inputs


def main() -> None:
    cupy.cuda.set_allocator(None)
    count = 0
    ctx, _ = prepare_inputs({"a": cupy.zeros(1)})
    for kernel in kernels_of_cupy():
        assert largest_error(ctx, kernel) <= 1
        cupy.cuda.Device().synchronize()
        count += 1
    print(f"{count} kernels are right")


if __name__ == "__main__":
    main()
