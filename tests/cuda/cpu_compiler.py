"""Kernels compiled for the CPU: the package's source text, behind tests/cuda/cuda_shim.h."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from arraylogchain._cuda import kernels

HERE = Path(__file__).parent
COMPILER = "g++"
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-w",
    "-fno-threadsafe-statics",  # there is one thread
    "-fno-strict-aliasing",  # kernels read memory through other types
    "-ffp-contract=off",  # kernels say where they fuse
    "-fvisibility=hidden",
    # Otherwise the libraries of several kernels would share the state of one scheduler.
    "-fno-gnu-unique",
)
# Its run-time library must be there before Python is: test_memory_errors.py starts such processes.
SANITIZED = "ALC_SHIM_SANITIZED"
SANITIZER_FLAGS = ("-fsanitize=address", "-O1", "-g")

_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?"
    r"(?P<type>\w[\w\s:]*?)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
_STATIC_SHARED = re.compile(r"__shared__\s+(?:__align__\(\d+\)\s+)?(?P<variables>[^;]*);")
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\(")


class KernelError(RuntimeError):
    """A kernel does not compile, does not take its arguments, or waits for ever."""


def compile_for_cpu(
    source: str, kernel: str, options: tuple[str, ...] = (), folder: Path = kernels.FOLDER
) -> Path:
    """Compile one instantiation of a kernel, or return the library of an earlier compilation."""
    optimise = SANITIZER_FLAGS if os.environ.get(SANITIZED) else ("-O1", *_fused_multiply_add())
    command = (COMPILER, *FLAGS, *optimise)
    sources = _rewritten(source, folder)
    includes = *_includes(command), "-I", str(sources), f"-fmacro-prefix-map={sources}/="
    # The compiler takes a precompiled header only before everything else.
    text = f'#include "cuda_shim.h"\nnamespace {{\n#include "{source}"\n}}\nSHIM_ENTRY({kernel})\n'
    return _build((*command, *options, "-shared", *includes), text, "kernel.so")


@cache
def _rewritten(source: str, folder: Path) -> Path:
    """Return a folder with a source file and its headers, rewritten for the shim."""
    texts = _texts(source, folder)
    target = cache_folder() / hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:32]
    target.mkdir(exist_ok=True)
    for name, text in texts.items():
        private = target / f"{name}.{os.getpid()}"
        private.write_text(_for_the_shim(text), encoding="utf-8")
        private.replace(target / name)
    return target


def _texts(source: str, folder: Path) -> dict[str, str]:
    """Return the texts of a file and of its headers, of the folder or else of the package."""
    texts: dict[str, str] = {}
    names = [source]
    for name in names:
        path = folder / name if (folder / name).exists() else kernels.FOLDER / name
        texts[name] = path.read_text(encoding="utf-8")
        headers = re.findall(r'^#include "([^"]+)"', texts[name], re.MULTILINE)
        names += [header for header in headers if header not in names]
    return texts


def _build(command: tuple[str, ...], text: str, name: str) -> Path:
    """Compile a text that begins with the shim to a file, if that has not been done before."""
    key = hashlib.sha256(repr((command, text, _shim_text())).encode()).hexdigest()[:32]
    folder = cache_folder() / key
    target = folder / name
    if target.exists():
        return target
    folder.mkdir(exist_ok=True)
    # Others may build the same: each under a name of its own, and the last one stays.
    private, source = folder / f"{os.getpid()}", folder / f"{os.getpid()}.cpp"
    source.write_text(text, encoding="utf-8")
    kind = "c++-header" if name.endswith(".gch") else "c++"
    done = subprocess.run(
        [*command, "-x", kind, str(source), "-o", str(private)],
        # The sanitizer is for the kernels, not for the compiler.
        env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"},
        capture_output=True,
        text=True,
        check=False,
    )
    source.unlink()
    if done.returncode:
        raise KernelError(f"this does not compile:\n{done.stderr[-4000:]}")
    private.replace(target)
    return target


@cache
def _includes(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return where the shim is, first of all as a precompiled header: it takes most of the time."""
    plain = ("-I", str(HERE), "-I", str(HERE / "shim"))
    # In each folder the compiler looks for cuda_shim.h.gch before it looks for cuda_shim.h.
    header = _build((*command, *plain), (HERE / "cuda_shim.h").read_text(), "cuda_shim.h.gch")
    return ("-I", str(header.parent), *plain)


def _for_the_shim(text: str) -> str:
    """Rewrite the three constructs of CUDA that macros cannot express."""
    text = _DYNAMIC_SHARED.sub(
        r"\g<type>* const \g<name> = reinterpret_cast<\g<type>*>(shim::dynamic_shared.begin);",
        text,
    )
    text = _STATIC_SHARED.sub(lambda result: _shared_variables(result["variables"]), text)
    parts, done = [], 0
    for result in _LAUNCH_BOUNDS.finditer(text):
        bounds_end = _closing(text, result.end())
        # Behind the bounds: the kernel's name, its parameters in parentheses, its body.
        parameters_end = _closing(text, text.index("(", bounds_end) + 1)
        body = text.index("{", parameters_end) + 1
        bounds = text[result.end() : bounds_end - 1]
        parts += [text[done:body], f" shim::launch_bounds({bounds});"]
        done = body
    return "".join([*parts, text[done:]])


def _shared_variables(declared: str) -> str:
    """Return C++ for a declaration "T a[2][N], b" of variables in static shared memory."""
    first, *following = re.split(r",(?![^<]*>)", declared)
    result = re.fullmatch(r"(.*\W)(\w+\s*(?:\[.*\])?)", first.strip(), re.DOTALL)
    if result is None:
        raise KernelError(f"not understood: __shared__ {declared}")
    kind, variables = result[1], [result[2], *(x.strip() for x in following)]
    return " ".join(
        f"typedef {kind} shim_{variable}; "
        f"static shim_{name}& {name} = shim::shared_variable<shim_{name}>();"
        for variable in variables
        for name in [variable.partition("[")[0].strip()]
    )


def _closing(text: str, start: int) -> int:
    """Return where the parenthesis that was opened before `start` has been closed."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise KernelError("a parenthesis behind __launch_bounds__ is not closed")


def cache_folder() -> Path:
    """Return where compiled kernels are kept between runs."""
    user = getattr(os, "getuid", int)()  # Windows has none
    folder = Path(tempfile.gettempdir()) / f"arraylogchain-kernels-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache
def _shim_text() -> str:
    return "".join(p.read_text() for p in sorted([HERE / "cuda_shim.h", *HERE.glob("shim/*.h")]))


@cache
def _fused_multiply_add() -> tuple[str, ...]:
    """Return the flag without which fma is a call of a function, where this CPU has it."""
    facts = Path("/proc/cpuinfo")
    return ("-mfma",) if facts.exists() and " fma " in facts.read_text() else ()
