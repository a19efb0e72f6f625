"""A script that runs every kernel on small arrays, for compute-sanitizer to look at.

Each array is an allocation of its own: within a pool, an access that leaves one array would find
the next one.
"""

import cupy

from tests.conftest import make_backend
from tests.gpu.calls import CALLS


def main() -> None:
    cupy.cuda.set_allocator(None)
    backend, count = make_backend("cupy"), 0
    for dtype in backend.dtypes:
        for call in CALLS.values():
            call.run(*call.arguments(backend, dtype))
            cupy.cuda.Device().synchronize()
            count += 1
    print(f"{count} calls have returned")


if __name__ == "__main__":
    main()
