"""`python -m arraylogchain x.npy`: a chain whose arrays are read from files."""

from __future__ import annotations

import os
import re
import secrets
import textwrap
import time
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arraylogchain._cli.environment import Device, open_device
from arraylogchain._text import duration
from arraylogchain.chain import LogChain

# Up to this many results are printed one by one.
_FEW = 8
_OPTION = re.compile(r"\b(?:(?:log_)?(?:transitions|initial|final)|lengths)\b")


class FileProblemError(Exception):
    """A file cannot be used; the message is one sentence that names it."""


def solve(paths: Mapping[str, Path], operation: str, output: Path | None, device_name: str) -> None:
    """Compute an operation on a chain stored in .npy files; print a summary.

    Parameters
    ----------
    paths : mapping of str to Path
        Files of the arguments of `LogChain`, by name.
    operation : str
        'log_partition', 'marginals' or 'viterbi', which gives states.
    output : Path or None
        The .npy file to write. It is replaced when the result is complete, or left as it is.
    device_name : str
        cpu or cuda.
    """
    device = open_device(device_name)
    if output is not None:
        output = _resolve_output(output)
    arrays = {name: _read(path) for name, path in paths.items()}
    start = time.perf_counter()
    chain = _make_chain(arrays, device)
    found = getattr(chain, operation)()
    result = device.get(found.states if operation == "viterbi" else found)
    seconds = time.perf_counter() - start
    if output is not None:
        _write(output, result)
    shape = arrays["log_potentials"].shape
    print(f"chain          {shape[-2]} steps of {shape[-1]} states, batch {shape[:-2] or 'of one'}")
    label = "states" if operation == "viterbi" else operation
    timing = f"in {duration(seconds)} on {device.name}"
    print(f"{label:<14} {result.dtype}, shape {result.shape}, {timing}")
    print(_summary(device.get(found.log_weight) if operation == "viterbi" else result))
    if output is not None:
        print(f"written to {output}")


def _read(path: Path) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise FileProblemError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, EOFError, SyntaxError, tokenize.TokenError) as error:
        # All of these come out of NumPy's parser, some with the whole header in the message.
        reason = textwrap.shorten(str(error), 120, placeholder=" ...")
        raise FileProblemError(
            f"{path} is not a .npy file of numbers, as np.save makes: {reason}"
        ) from error


def _make_chain(arrays: Mapping[str, Any], device: Device) -> LogChain:
    """Return the chain of arrays on a device; errors name the options that the arrays came by."""
    try:
        # On the host, where values can be checked.
        LogChain(**arrays)
    except (TypeError, ValueError) as error:
        message = _OPTION.sub(lambda name: "--" + name[0].replace("_", "-"), str(error))
        raise FileProblemError(message) from error
    return LogChain(**{name: device.put(x) for name, x in arrays.items()})


def _resolve_output(path: Path) -> Path:
    """Follow links, and refuse early what could not be written after a long computation."""
    resolved = path.resolve()
    if resolved.exists() and not resolved.is_file():
        raise FileProblemError(f"{path} cannot be written: it is not a regular file")
    if not resolved.parent.is_dir():
        raise FileProblemError(f"{path} cannot be written: there is no folder {resolved.parent}")
    if not os.access(resolved.parent, os.W_OK):
        raise FileProblemError(f"{path} cannot be written: no permission in {resolved.parent}")
    return resolved


def _write(path: Path, array: NDArray[Any]) -> None:
    """Write a .npy file beside `path`, then put it in place in one step."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with unfinished.open("xb") as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            unfinished.chmod(path.stat().st_mode & 0o777)
        unfinished.replace(path)
    except OSError as error:
        raise FileProblemError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        # Gone already if all went well; an interrupt, too, leaves nothing behind.
        unfinished.unlink(missing_ok=True)


def _summary(result: NDArray[Any]) -> str:
    """Describe numbers in a few aligned lines: those of a path are log weights."""
    if result.size <= _FEW:
        values = ", ".join(f"{value:.9g}" for value in result.ravel().tolist())
        return f"values         {values or 'none'}"
    lines, finite = [], result[np.isfinite(result)]
    if finite.size:
        lines.append(f"values         {finite.min():.9g} to {finite.max():.9g}")
    for label, count in (
        ("-inf", np.count_nonzero(np.isneginf(result))),
        ("+inf", np.count_nonzero(np.isposinf(result))),
        ("NaN", np.count_nonzero(np.isnan(result))),
    ):
        if count:
            lines.append(f"{label:<14} {count} of {result.size}")
    return "\n".join(lines)
