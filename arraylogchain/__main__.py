"""`python -m arraylogchain`: what is available here, and the case that started the project."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from arraylogchain import __version__
from arraylogchain._cli.demo import FULL_SIZE, Size, print_demo
from arraylogchain._cli.environment import compile_loops, describe

_EXIT_FAILED, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.check and (args.device != "cuda" or args.size):
        parser.error("--check is about kernels; it needs --device cuda, and no --size")
    try:
        if args.check:
            from arraylogchain._cuda.self_check import report

            return 0 if report() else _EXIT_FAILED
        print(describe(), flush=True)
        print(compile_loops(), end="\n\n", flush=True)
        print_demo(args.size or FULL_SIZE, args.device)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        reason = "not enough memory: " if isinstance(error, MemoryError) else ""
        print(f"arraylogchain: {reason}{error}", file=sys.stderr)
        return _EXIT_USAGE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m arraylogchain",
        description="Print what is available here, compile all loops, and solve the case that "
        "started the project, with time, memory and error.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--check", action="store_true", help="check and time the CUDA kernels")
    what = "batch, parameter sets, steps, states (default: 500,1,40,200)"
    parser.add_argument("--size", type=_size, metavar="n,t,v,c", help=what)
    return parser


def _size(text: str) -> Size:
    try:
        n, t, v, c = (int(part) for part in text.split(","))
    except ValueError:
        n = t = v = c = 0
    if min(n, t, v, c) < 1:
        reason = f"{text!r} is not four integers of at least 1, like 500,1,40,200"
        raise argparse.ArgumentTypeError(reason)
    return n, t, v, c


if __name__ == "__main__":
    sys.exit(main())
