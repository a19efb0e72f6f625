"""A script that runs every kernel on its hard case, for compute-sanitizer to look at.

Each array is an allocation of its own: within a pool, an access that leaves one array would find
the next one.
"""

import cupy

from arraylogchain._arrays import prepare_inputs
from arraylogchain._cuda.self_check import kernels_of_cupy, largest_error


def main() -> None:
    cupy.cuda.set_allocator(None)
    count = 0
    for dtype, kernel in kernels_of_cupy():
        ctx, _ = prepare_inputs({"a": cupy.zeros(1, dtype)})
        assert largest_error(ctx, kernel) <= 1
        cupy.cuda.Device().synchronize()
        count += 1
    print(f"{count} kernels are right")


if __name__ == "__main__":
    main()
