"""Compile the kernels for all architectures, and report their registers and memory.

``python -m tests.cuda.nvrtc`` compiles all of them for all architectures and writes the tables of
docs/kernels.md. NVRTC is that which CuPy would load, and another one where ALC_OTHER_NVRTC names
a folder: ``pip install --target FOLDER 'nvidia-cuda-nvrtc-cu12==12.9.*'
'nvidia-cuda-runtime-cu12==12.9.*'``.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from arraylogchain._cuda import kernels
from arraylogchain._cuda.kernels import INSTANTIATIONS

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
OTHER = "ALC_OTHER_NVRTC"
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
BELOW = "<!-- below: python -m tests.cuda.nvrtc -->\n"


@dataclass(frozen=True)
class Usage:
    """Registers and memory of a kernel on one architecture, as the assembler reports them."""

    registers: int
    shared_memory: int  # bytes of static shared memory
    stack: int  # bytes of a thread's local memory
    spills: int  # bytes stored to and loaded from it because registers ran out


class Nvrtc:
    """A compiler and the headers of its version of CUDA: CuPy's choice, or those in a folder."""

    def __init__(self, folder: str | None = None) -> None:
        if folder is None:
            compiler = importlib.import_module("cupy._core.core")
            find = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib
            path = find("nvrtc").abs_path
            self._options = compiler.assemble_cupy_compiler_options(kernels.options())
        else:
            (path,) = Path(folder).glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
            include = Path(folder) / "nvidia" / "cuda_runtime" / "include"
            self._options = (*kernels.options(), f"-I{include}")
        self._library = ctypes.CDLL(str(path))
        numbers = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", *map(ctypes.byref, numbers))
        self.version = ".".join(str(n.value) for n in numbers)

    def compile(
        self, source: str, names: tuple[str, ...], architecture: int, folder: Path = kernels.FOLDER
    ) -> tuple[bytes, dict[str, Usage]]:
        """Return the machine code of kernels of one file, compiled as CuPy does, and their needs.

        Raises
        ------
        RuntimeError
            If a kernel does not compile; the message is the compiler's.
        """
        # The options that cupy.RawModule adds, with a fixed architecture.
        options = (
            f"-I{folder}",
            *self._options,
            "-ftz=true",
            f"-arch=sm_{architecture}",
            "--device-as-default-execution-space",
            "--ptxas-options=-v",
        )
        text = f'#include "{source}"\n'.encode()
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, b"program.cu", 0, None, None)
        try:
            for name in names:
                self._call("nvrtcAddNameExpression", program, name.encode())
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = self._library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._bytes("nvrtcGetProgramLog", program).decode()
            if failed:
                raise RuntimeError(log)
            usage = {}
            for name in names:
                symbol = ctypes.c_char_p()
                self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(symbol))
                usage[name] = _usage(log, (symbol.value or b"").decode())
            return self._bytes("nvrtcGetCUBIN", program), usage
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, what: str, program: Any) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(what, program, text)
        return text.raw

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} returns {code}")


@cache
def library(is_other: bool = False) -> Nvrtc | None:
    """Return CuPy's compiler, or the other one, if there is one."""
    if not is_other:
        return Nvrtc()
    return Nvrtc(os.environ[OTHER]) if os.environ.get(OTHER) else None


def _usage(log: str, symbol: str) -> Usage:
    entry = re.search(rf"'{re.escape(symbol)}' for.*?(?=Compiling entry|\Z)", log, re.DOTALL)
    assert entry is not None, f"the log does not speak of {symbol}:\n{log}"

    def number(pattern: str) -> int:
        result = re.search(pattern, entry[0])
        return int(result[1]) if result else 0

    return Usage(
        registers=number(r"Used (\d+) registers"),
        shared_memory=number(r"(\d+) bytes smem"),
        stack=number(r"(\d+) bytes stack frame"),
        spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    )


def digest() -> str:
    """Return a short text that changes with the kernels, but not with their comments."""
    text = "".join(path.read_text("utf-8") for path in sorted(kernels.FOLDER.glob("*.cu*")))
    code = re.sub(r"^[ \t]*(?://.*)?\n|[ \t]*//.*", "", text, flags=re.MULTILINE)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def tables() -> str:
    """Return the tables of registers and memory for the documentation."""
    used, other = library(), library(is_other=True)
    assert used is not None
    assert other is not None, f"{OTHER} has to name the folder of another NVRTC"
    heads = " | ".join(f"{a // 10}.{a % 10}" for a in ARCHITECTURES)
    table = [f"| | shared | {heads} |", f"|---|--:|{'--:|' * len(ARCHITECTURES)}"]
    spills = []
    for source, names in INSTANTIATIONS.items():
        result, other_result = (
            [x.compile(source, names, a)[1] for a in ARCHITECTURES] for x in (used, other)
        )
        for name in names:
            row = [usage[name] for usage in result]
            cells = " | ".join(
                f"{u.registers} ({u.spills})" if u.spills else str(u.registers) for u in row
            )
            table.append(f"| `{name}` | {max(u.shared_memory for u in row)} | {cells} |")
            spilling = [
                f"{a / 10} ({usage[name].spills})"
                for a, usage in zip(ARCHITECTURES, other_result, strict=True)
                if usage[name].spills
            ]
            spills += [f"`{name}` on {', '.join(spilling)}"] if spilling else []
    lines = [
        f"Compiled by NVRTC {used.version}, of sources {digest()}.",
        "",
        *table,
        "",
        f"Spills with NVRTC {other.version}: {'; '.join(spills) or 'none'}.",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    text, marker, _ = PAGE.read_text(encoding="utf-8").partition(BELOW)
    PAGE.write_text(text + marker + tables(), encoding="utf-8")
