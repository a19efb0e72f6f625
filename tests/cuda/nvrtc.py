"""Compile the kernels for devices that are not there, and tell what each of them needs.

``python -m tests.cuda.nvrtc`` compiles all of them for all architectures and writes the tables of
docs/kernels.md.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from arraylogchain._cuda import kernels
from arraylogchain._cuda.kernels import INSTANTIATIONS

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
BELOW = "<!-- below: python -m tests.cuda.nvrtc -->\n"


@dataclass(frozen=True)
class Usage:
    """What a kernel needs on one architecture, as the assembler reports it."""

    registers: int
    shared_memory: int  # bytes of static shared memory
    stack: int  # bytes of a thread's local memory
    spills: int  # bytes stored to and loaded from it because registers ran out


@cache
def compile_source(
    source: str, names: tuple[str, ...], architecture: int, folder: Path = kernels.FOLDER
) -> dict[str, Usage]:
    """Compile kernels of one file as CuPy does.

    Raises
    ------
    cupy.cuda.compiler.CompileException
    """
    _, symbols, log = _compile(source, names, architecture, folder)
    return {name: _usage(log, symbol) for name, symbol in symbols.items()}


def machine_code(source: str, name: str, architecture: int) -> bytes:
    """Return a kernel compiled as CuPy does, as the contents of a .cubin file."""
    binary, _, _ = _compile(source, (name,), architecture, kernels.FOLDER)
    return binary + b"\0"  # which CuPy takes off


def _compile(
    source: str, names: tuple[str, ...], architecture: int, folder: Path
) -> tuple[bytes, dict[str, str], str]:
    """Return machine code, the symbols of the kernels in it, and what the assembler reports."""
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda.compiler import _NVRTCProgram

    # What cupy.RawModule adds by itself, but for the architecture, which it asks the device for.
    options = (
        *assemble_cupy_compiler_options(kernels.OPTIONS),
        "-ftz=true",
        f"-arch=sm_{architecture}",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
    )
    log, text = io.StringIO(), kernels.source_text(source, folder)
    program = _NVRTCProgram(text, source, name_expressions=names, method="cubin")
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


def digest() -> str:
    """Return a short text that changes with the kernels, but not with their comments."""
    text = "".join(kernels.source_text(source) for source in sorted(INSTANTIATIONS))
    code = re.sub(r"^#line .*\n|^[ \t]*(?://.*)?\n|[ \t]*//.*", "", text, flags=re.MULTILINE)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def tables() -> str:
    """Return what every kernel needs on every architecture, for the documentation."""
    from cupy_backends.cuda.libs import nvrtc

    version = ".".join(map(str, nvrtc.getVersion()))
    heads = " | ".join(f"{a // 10}.{a % 10}" for a in ARCHITECTURES)
    lines = [f"Compiled by NVRTC {version}, of sources {digest()}.", ""]
    lines += [f"| | shared | {heads} |", f"|---|--:|{'--:|' * len(ARCHITECTURES)}"]
    for source, names in INSTANTIATIONS.items():
        found = [compile_source(source, names, a) for a in ARCHITECTURES]
        for name in names:
            row = [usage[name] for usage in found]
            cells = " | ".join(
                f"{u.registers} ({u.spills})" if u.spills else str(u.registers) for u in row
            )
            lines.append(f"| `{name}` | {max(u.shared_memory for u in row)} | {cells} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    text, marker, _ = PAGE.read_text(encoding="utf-8").partition(BELOW)
    PAGE.write_text(text + marker + tables(), encoding="utf-8")
