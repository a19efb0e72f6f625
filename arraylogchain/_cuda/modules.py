"""The kernels' source text, and kernels compiled from it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17",)

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')


@cache
def source_text(source: str, folder: Path = FOLDER) -> str:
    """Return a source file with the project's own headers put in where they are included.

    CuPy's cache of compiled kernels does not look into headers: kept apart, a change to one would
    leave yesterday's kernels in use. Line directives make compilers speak of the files as they are.

    Parameters
    ----------
    source : str
        Name of the file within `folder`.
    folder : Path
        Headers are looked for beside the file, then here, then in this package.
    """
    seen: set[str] = set()

    def expand(name: str, path: Path) -> list[str]:
        seen.add(name)
        text = [f'#line 1 "{name}"']
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include is None:
                text.append("" if line.strip() == "#pragma once" else line)
                continue
            header, found = _find(include[1], name, folder)
            if header not in seen:
                text.extend(expand(header, found))
            text.append(f'#line {number + 1} "{name}"')
        return text

    return "\n".join(expand(source, folder / source)) + "\n"


def _find(header: str, includer: str, folder: Path) -> tuple[str, Path]:
    """Return a header's name, relative to the folder of kernels that it is in, and its path."""
    beside = (PurePosixPath(includer).parent / header).as_posix()
    for name, place in ((beside, folder), (header, folder), (header, FOLDER)):
        if (place / name).exists():
            return name, place / name
    raise FileNotFoundError(f"{includer} includes {header}, which is not there")


@cache
def compiled(source: str, kernel: str, device_id: int, dynamic_shared_memory: int) -> Any:
    """Return a kernel of CuPy's, compiled for the current device when it is first asked for.

    Each instantiation is a module of its own, so that a call waits for what it needs only.

    Parameters
    ----------
    source, kernel : str
        As in `Launch`.
    device_id : int
        The number of the current device.
    dynamic_shared_memory : int
        Bytes that a block may have on this device, static shared memory included.
    """
    import cupy

    module = cupy.RawModule(code=source_text(source), options=OPTIONS, name_expressions=(kernel,))
    function = module.get_function(kernel)
    # What a block may use beyond 48 KiB has to be asked for. This does not reserve anything.
    function.max_dynamic_shared_size_bytes = dynamic_shared_memory - function.shared_size_bytes
    return function
