"""What the hot loops of kernels consist of, from the disassembly, and the times that predicts.

``python -m tests.cuda.loops`` writes docs/hot_loops.md. It needs NVIDIA's disassembler (the package
nvidia-cuda-nvdisasm) and no device.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from arraylogchain._text import duration
from tests.cuda import nvrtc

RECORD = Path(__file__).with_name("loops.json")
PAGE = Path(__file__).parents[2] / "docs" / "hot_loops.md"
ARCHITECTURE = 90

# An H200: multiprocessors, the clock, bytes a second that a copy moves; and what a multiprocessor
# has of schedulers, each of which starts an instruction of a warp per cycle, of warps, registers
# and shared memory.
MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.755e9, 4.3e12
SCHEDULERS, WARPS, REGISTERS, SHARED = 4, 64, 65536, 227 << 10

# Opcodes by what executes them.
UNITS = {
    "FFMA": ("FFMA",),
    "DFMA": ("DFMA",),
    "tensor": ("HMMA", "DMMA"),
    "FADD": ("FADD", "FMUL", "DADD", "DMUL", "FMNMX", "FSETP", "FSEL", "DSETP"),
    "MUFU": ("MUFU",),
    "LDS": ("LDS", "LDSM"),
    "LDG": ("LDG", "LD", "LDGSTS"),
    "STS": ("STS",),
}
# Cycles that a scheduler's own unit is busy with one instruction of a warp, where it is not one.
CYCLES = {"DFMA": 2, "MUFU": 8}


@dataclass(frozen=True)
class Loop:
    """A hot loop, and how often it runs in a case.

    Attributes
    ----------
    source, kernel : str
        As in `Launch`.
    work : str
        Of the loops without another in them, the one with the most of these opcodes is meant; all
        of the kernel if there is none in a loop.
    case : str
        What is predicted.
    threads, shared_memory : int
        Of a block; bytes, besides the static ones.
    blocks : int
        Of the case.
    passes : float
        How often a warp goes through the loop, all warps of the case together.
    bytes : float
        That the case reads and writes.
    """

    source: str
    kernel: str
    work: str
    case: str
    threads: int
    shared_memory: int
    blocks: int
    passes: float
    bytes: float = 0

    def count(self) -> Counter[str]:
        """Return the instructions of a pass by unit."""
        text = disassembled(self.source, self.kernel)
        loops = list(innermost_loops(text))
        opcodes = max(loops, key=self._work_in, default=[])
        return by_unit(opcodes if self._work_in(opcodes) else list(all_opcodes(text)))

    def _work_in(self, opcodes: list[str]) -> int:
        return by_unit(opcodes)[self.work]

    def blocks_at_once(self, usage: nvrtc.Usage) -> int:
        """Return how many blocks a multiprocessor holds."""
        shared = usage.shared_memory + self.shared_memory
        warps = self.threads // 32
        # Registers are handed out to warps in units of 256, shared memory in units of 1 KiB.
        registers = -(-usage.registers * 32 // 256) * 256 * warps
        by_shared = SHARED // (-(-(shared + 1024) // 1024) * 1024)
        return min(WARPS // warps, REGISTERS // registers, by_shared)

    def seconds(self, counts: Counter[str]) -> float:
        """Return the time of the case if nothing but issue, units and bandwidth limits it."""
        cycles = max(sum(counts.values()), *(n * counts[unit] for unit, n in CYCLES.items()))
        waves = -(-self.blocks // MULTIPROCESSORS)
        per_block = self.passes / self.blocks
        return max(waves * per_block * cycles / SCHEDULERS / CLOCK, self.bytes / BANDWIDTH)


def disassembled(source: str, kernel: str) -> str:
    """Return the instructions of a kernel, as text."""
    binary = nvrtc.machine_code(source, kernel, ARCHITECTURE)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [_disassembler(), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _disassembler() -> str:
    for folder in map(Path, sys.path):
        for found in folder.glob("nvidia/*/bin/nvdisasm"):
            return str(found)
    return "nvdisasm"


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>.*)")
_LABEL = re.compile(r"^(?P<label>\.L_x_\d+):")


def _lines(text: str) -> Iterable[tuple[str, str]]:
    """Yield labels, with an empty text, and opcodes with what they are given."""
    for line in text.splitlines():
        if label := _LABEL.match(line):
            yield label["label"], ""
        elif found := _INSTRUCTION.match(line):
            yield found["opcode"].partition(".")[0], found["rest"]


def all_opcodes(text: str) -> Iterable[str]:
    return (name for name, _ in _lines(text) if not name.startswith(".L"))


def innermost_loops(text: str) -> Iterable[list[str]]:
    """Yield the opcodes of each loop that has no other in it: what a branch back jumps over."""
    opcodes: list[str] = []
    places: dict[str, int] = {}
    last_end = 0
    for name, rest in _lines(text):
        if name.startswith(".L"):
            places[name] = len(opcodes)
            continue
        opcodes.append(name)
        target = re.search(r"\.L_x_\d+", rest) if name == "BRA" else None
        if target is None or target[0] not in places:
            continue
        start = places[target[0]]
        if start >= last_end:
            yield opcodes[start:]
        last_end = len(opcodes)


def by_unit(opcodes: Iterable[str]) -> Counter[str]:
    """Return how many of the opcodes there are for each of `UNITS`, and of others."""
    unit_of = {opcode: unit for unit, names in UNITS.items() for opcode in names}
    return Counter(unit_of.get(opcode, "other") for opcode in opcodes)


def write() -> None:
    """Disassemble the kernels of `LOOPS`; write the record and the page."""
    found = {
        loop.kernel: {"digest": digest(loop), "instructions": dict(loop.count())} for loop in LOOPS
    }
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE}, {RECORD}")


def digest(loop: Loop) -> str:
    return nvrtc.digest(loop.source, (loop.kernel,), ARCHITECTURE)


def page() -> str:
    """Return the record as a page of the documentation."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [
        "# Hot loops",
        "",
        "Instructions of one pass through the hot loop of a kernel, by what executes them, in code "
        f"for compute capability {ARCHITECTURE // 10}.{ARCHITECTURE % 10}; blocks that a "
        "multiprocessor holds; and the time of a case on an H200 if nothing limits it but the start "
        "of instructions (one a cycle for each of four schedulers), units that take longer for "
        "one (float64: 2 cycles, exponentials: 8, tensor cores: see below), and the bytes that are "
        "read and written at the bandwidth of a copy. What comes before and after the loop is not in "
        "it. **Predicted, not measured.** Written by `python -m tests.cuda.loops`.",
        "",
        f"| kernel | {' | '.join(UNITS)} | other | blocks | case | predicted |",
        f"|---|{'--:|' * (len(UNITS) + 2)}---|--:|",
    ]
    for loop in LOOPS:
        counts = Counter(record[loop.kernel]["instructions"])
        usage = nvrtc.record()[f"{loop.source}, {ARCHITECTURE}"]["usage"][loop.kernel]
        numbers = [str(counts[unit] or "") for unit in (*UNITS, "other")]
        numbers.append(str(loop.blocks_at_once(nvrtc.Usage(**usage))))
        time = duration(loop.seconds(counts))
        lines.append(f"| `{loop.kernel}` | {' | '.join(numbers)} | {loop.case} | {time} |")
    return "\n".join([*lines, "", *NOTES, ""])


if __name__ == "__main__":
    write()
