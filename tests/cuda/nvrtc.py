"""Compile the kernels for devices that are not there, and tell what each of them needs.

``python -m tests.cuda.nvrtc`` compiles all of them for all architectures, and writes
docs/kernels.md and kernels.json, the record of which sources gave these figures.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from arraylogchain._cuda import modules
from tests.cuda.cpu_compiler import cache_folder
from tests.cuda.instantiations import HOT, INSTANTIATIONS

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
TABLE = Path(__file__).parents[2] / "docs" / "kernels.md"
RECORD = Path(__file__).with_name("kernels.json")

_NO_CODE = re.compile(r"^#line .*\n|^[ \t]*(?://.*)?\n|[ \t]*//.*", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """What a kernel needs on one architecture, as the assembler reports it."""

    registers: int
    shared_memory: int  # bytes of static shared memory
    stack: int  # bytes of a thread's local memory
    spills: int  # bytes stored to and loaded from it because registers ran out


def compile_source(
    source: str, kernels: tuple[str, ...], architecture: int, folder: Path = modules.FOLDER
) -> dict[str, Usage]:
    """Compile kernels of one file as CuPy does; what has been compiled before is found on disk.

    Raises
    ------
    cupy.cuda.compiler.CompileException
    """
    path = cache_folder() / f"{digest(source, kernels, architecture, folder)}.json"
    if not path.exists():
        text = modules.source_text(source, folder)
        _, symbols, log = _compile(source, text, kernels, architecture)
        usage = {name: _usage(log, symbol) for name, symbol in symbols.items()}
        path.write_text(json.dumps({name: asdict(u) for name, u in usage.items()}))
    return {name: Usage(**u) for name, u in json.loads(path.read_text()).items()}


def digest(
    source: str, kernels: tuple[str, ...], architecture: int, folder: Path = modules.FOLDER
) -> str:
    """Return a short text that changes with all of what the compiler is given that is code."""
    from cupy_backends.cuda.libs import nvrtc

    text = code_of(modules.source_text(source, folder))
    key = repr((text, kernels, architecture, modules.OPTIONS, nvrtc.getVersion()))
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def code_of(text: str) -> str:
    """Return a source text without comments, empty lines and line directives."""
    return _NO_CODE.sub("", text)


@cache
def record() -> dict[str, dict[str, Any]]:
    """Return what was recorded, by `source, architecture`: a digest, and the usage of kernels."""
    content: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def recorded(source: str, architecture: int) -> dict[str, Usage] | None:
    """Return what all kernels of a file need, if it was recorded for them as they are now."""
    found = record().get(f"{source}, {architecture}")
    if found is None or found["digest"] != digest(source, INSTANTIATIONS[source], architecture):
        return None
    return {name: Usage(**usage) for name, usage in found["usage"].items()}


def machine_code(source: str, kernel: str, architecture: int) -> bytes:
    """Return a kernel compiled as CuPy does, as the contents of a .cubin file."""
    binary, _, _ = _compile(source, modules.source_text(source), (kernel,), architecture)
    return binary + b"\0"  # which CuPy takes off


def _compile(
    source: str, text: str, kernels: tuple[str, ...], architecture: int
) -> tuple[bytes, dict[str, str], str]:
    """Return machine code, the symbols of the kernels in it, and what the assembler reports."""
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda.compiler import _NVRTCProgram

    # What cupy.RawModule adds by itself, but for the architecture, which it asks the device for.
    options = (
        *assemble_cupy_compiler_options(modules.OPTIONS),
        "-ftz=true",
        f"-arch=sm_{architecture}",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
    )
    log = io.StringIO()
    program = _NVRTCProgram(text, source, name_expressions=kernels, method="cubin")
    binary, symbols = program.compile(options, log)
    return binary, symbols, log.getvalue()


def _usage(log: str, symbol: str) -> Usage:
    entry = re.search(rf"'{re.escape(symbol)}' for.*?(?=Compiling entry|\Z)", log, re.DOTALL)
    assert entry is not None, f"the log does not speak of {symbol}:\n{log}"

    def number(pattern: str) -> int:
        found = re.search(pattern, entry[0])
        return int(found[1]) if found else 0

    return Usage(
        registers=number(r"Used (\d+) registers"),
        shared_memory=number(r"(\d+) bytes smem"),
        stack=number(r"(\d+) bytes stack frame"),
        spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    )


def is_hot(kernel: str) -> bool:
    return kernel.partition("<")[0] in HOT


def table(found: dict[str, dict[str, Usage]]) -> str:
    """Return what every kernel needs on every architecture, as a page of the documentation."""
    from cupy_backends.cuda.libs import nvrtc

    version = ".".join(map(str, nvrtc.getVersion()))
    lines = [
        "# Kernels",
        "",
        "Bytes of static shared memory of a block, and registers of a thread by compute "
        "capability; in parentheses bytes of a thread's local memory, and bytes written and read "
        f"there because registers ran out. Compiled by NVRTC {version} with CuPy's options; "
        "written by `python -m tests.cuda.nvrtc`.",
        "",
        "Each of them is in a case of the [check](backends.md#self-check) that kernels go through "
        "on the device where they run, before their first results are handed out.",
        "",
    ]
    for source, kernels in sorted(INSTANTIATIONS.items()):
        usage = {a: found[f"{source}, {a}"] for a in ARCHITECTURES}
        lines += [
            f"## {source}",
            "",
            f"| | shared | {' | '.join(f'{a // 10}.{a % 10}' for a in ARCHITECTURES)} |",
            f"|---|--:|{'--:|' * len(ARCHITECTURES)}",
        ]
        for kernel in kernels:
            row = [usage[a][kernel] for a in ARCHITECTURES]
            shared = max(u.shared_memory for u in row)
            lines.append(f"| `{kernel}` | {shared} | {' | '.join(map(_cell, row))} |")
        lines.append("")
    return "\n".join(lines)


def _cell(usage: Usage) -> str:
    return (
        f"{usage.registers} ({usage.stack}, {usage.spills})"
        if usage.stack
        else f"{usage.registers}"
    )


def _compile_all(task: tuple[str, int]) -> tuple[str, str, dict[str, Usage]]:
    source, architecture = task
    kernels = INSTANTIATIONS[source]
    usage = compile_source(source, kernels, architecture)
    return f"{source}, {architecture}", digest(source, kernels, architecture), usage


def main() -> None:
    """Compile everything; write the table and the record."""
    tasks = [(source, a) for source in sorted(INSTANTIATIONS) for a in ARCHITECTURES]
    with Pool() as pool:
        done = pool.map(_compile_all, tasks, chunksize=1)
    TABLE.write_text(table({name: usage for name, _, usage in done}), encoding="utf-8")
    content = {
        name: {"digest": text, "usage": {kernel: asdict(u) for kernel, u in usage.items()}}
        for name, text, usage in done
    }
    RECORD.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"written: {TABLE}, {RECORD}")


if __name__ == "__main__":
    main()
