"""`python -m arraylogchain`: what is available here, and a chain solved.

Without files: the case that started the project, with time, memory and error. With files: the
user's own chain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from arraylogchain import __version__
from arraylogchain._cli.demo import FULL_SIZE, Size, print_demo
from arraylogchain._cli.environment import UnavailableError, describe
from arraylogchain._cli.files import FileProblemError, solve

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_ARRAYS = ("transitions", "log_transitions", "initial", "log_initial", "final", "log_final")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    paths = {name: getattr(args, name) for name in ("log_potentials", *_ARRAYS, "lengths")}
    paths = {name: path for name, path in paths.items() if path is not None}
    _check_combination(parser, args, has_files=bool(paths))
    try:
        if args.check:
            from arraylogchain._cli.check import print_check

            return 0 if print_check() else _EXIT_FAILED
        if paths:
            solve(paths, args.operation, args.output, args.device)
        else:
            print(describe(), end="\n\n", flush=True)
            print_demo(args.size or FULL_SIZE, args.seed or 0, args.device)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except UnavailableError as error:
        return _fail(f"--device {args.device}: CuPy is {error}")
    except MemoryError as error:
        return _fail(f"not enough memory: {error}")
    except FileProblemError as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print(f"arraylogchain: {message}", file=sys.stderr)
    return _EXIT_USAGE


def _check_combination(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *, has_files: bool
) -> None:
    """Leave with a usage error where options of the two uses are mixed."""
    if args.check and args.device != "cuda":
        parser.error("--check is about kernels; it needs --device cuda")
    if args.check and (has_files or args.size is not None or args.seed is not None):
        parser.error("--check takes no other options than --device cuda")
    if has_files and args.log_potentials is None:
        parser.error("the file of log potentials is missing")
    if has_files and (args.size is not None or args.seed is not None):
        parser.error("--size and --seed belong to the forum's case, not to files")
    if not has_files and args.output is not None:
        parser.error("-o needs a file of log potentials to solve")
    if not has_files and args.operation != "log_partition":
        parser.error(f"--{args.operation} needs a file of log potentials")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m arraylogchain",
        description=(
            "Without files: print what is available here and solve the forum's case, with time, "
            "memory and error. With files: compute log_partition of your own chain, its marginals "
            "or its best path."
        ),
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--check",
        action="store_true",
        help="check and time the CUDA kernels, for a report; takes some minutes",
    )
    demo = parser.add_argument_group("the forum's case")
    demo.add_argument(
        "--size",
        type=_size,
        metavar="n,t,v,c",
        help="batch, parameter sets, steps, states (default: 500,1,40,200)",
    )
    demo.add_argument("--seed", type=int, help="of the random inputs (default: 0)")
    files = parser.add_argument_group("your own chain, arrays in .npy files")
    files.add_argument(
        "log_potentials", nargs="?", type=Path, metavar="x.npy", help="log potentials [..., T, K]"
    )
    for name, file, help_text in (
        ("transitions", "P.npy", "weights [..., T-1 or 1, K, K] or [K, K]"),
        ("initial", "p0.npy", "weights [..., K] (default: ones)"),
        ("final", "p1.npy", "weights [..., K] (default: ones)"),
    ):
        either = files.add_mutually_exclusive_group()
        either.add_argument(f"--{name}", type=Path, metavar=file, help=help_text)
        either.add_argument(f"--log-{name}", type=Path, metavar=file, help="their logs")
    files.add_argument(
        "--lengths", type=Path, metavar="n.npy", help="numbers of real steps [...] (default: all)"
    )
    wanted = files.add_mutually_exclusive_group()
    for name, help_text in (
        ("marginals", "compute the probability of each state at each step"),
        ("viterbi", "compute the states of the best path"),
    ):
        wanted.add_argument(
            f"--{name}", dest="operation", action="store_const", const=name, help=help_text
        )
    parser.set_defaults(operation="log_partition")
    files.add_argument("-o", "--output", type=Path, metavar="out.npy", help="write results there")
    return parser


def _size(text: str) -> Size:
    try:
        n, t, v, c = (int(part) for part in text.split(","))
    except ValueError:
        n = t = v = c = 0
    if min(n, t, v, c) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not four integers of at least 1, like 500,1,40,200"
        )
    return n, t, v, c


if __name__ == "__main__":
    sys.exit(main())
