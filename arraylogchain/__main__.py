"""The command `arraylogchain`: versions, backends, and the reference workload."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from arraylogchain import _cli
from arraylogchain._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Print versions, and check kernels or solve the reference workload; return the exit code.

    It is 0 on success, 1 if the error of a kernel exceeds its bound, and 2 if something cannot run.
    """
    parser = argparse.ArgumentParser(
        prog="arraylogchain",
        description="Print what is available here, compile all loops, and solve the case that "
        "started the project, with time, memory and error.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where to solve it: on the CPU with NumPy (the default), or on a CUDA device with "
        "CuPy, of the extra cuda12 or cuda13",
    )
    parser.add_argument("--check", action="store_true", help="check and time the CUDA kernels")
    args = parser.parse_args(argv)
    if args.check and args.device != "cuda":
        parser.error("--check is about kernels; it needs --device cuda")
    try:
        if args.check:
            return 0 if _cli.report() else 1
        print(_cli.describe(), flush=True)
        with _cli.shown_progress():
            print(_cli.compile_loops(), end="\n\n", flush=True)
            _cli.show_case(args.device)
    except RuntimeError as error:
        print(f"arraylogchain: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
