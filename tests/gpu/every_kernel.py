"""A script that runs every kernel on small arrays, for compute-sanitizer to look at.

Each array is an allocation of its own: within a pool, an access that leaves one array would find
the next one.
"""

from collections.abc import Iterable

import cupy

from tests.conftest import make_backend
from tests.gpu.calls import CALLS, Call
from tests.gpu.tensor_cores import tensor_cores


def main() -> None:
    cupy.cuda.set_allocator(None)
    count = run(CALLS.values())
    with tensor_cores():
        count += run(call for name, call in CALLS.items() if name.startswith("logmatmulexp"))
    print(f"{count} calls have returned")


def run(calls: Iterable[Call]) -> int:
    backend, count = make_backend("cupy"), 0
    for call in calls:
        for dtype in backend.dtypes:
            call.run(*call.arguments(backend, dtype))
            cupy.cuda.Device().synchronize()
            count += 1
    return count


if __name__ == "__main__":
    main()
