"""What the hot loops of kernels consist of, and the times that predicts.

Instructions are counted in the disassembly, wavefronts of shared memory in a run on the CPU.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from arraylogchain._cuda import chains
from arraylogchain._cuda.chains import reductions
from arraylogchain._cuda.chains.geometry import Geometry, choose
from arraylogchain._cuda.products import gradients, log_product, maxplus
from arraylogchain._cuda.products.tiles import PRODUCT_TILES, SHORT, TileShape
from arraylogchain._fold import fold
from arraylogchain._text import duration
from tests.cuda import nvrtc
from tests.cuda.chain_checks import make
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.product_checks import context

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
    "DFMA": ("DFMA", "DADD", "DMUL", "DSETP"),
    "HMMA": ("HMMA",),
    "DMMA": ("DMMA",),
    "FADD": ("FADD", "FMUL"),
    "ALU": (
        *("FMNMX", "FSETP", "FSEL", "FSET", "ISETP", "SEL", "IMNMX", "VIMNMX", "IADD3", "IADD"),
        *("VIADD", "LEA", "LOP3", "PLOP3", "SHF", "PRMT", "IABS", "SGXT", "BMSK"),
    ),
    "MUFU": ("MUFU",),
    "LDS": ("LDS", "LDSM"),
    "LDG": ("LDG", "LD", "LDGSTS"),
    "STS": ("STS",),
}
# Cycles that a scheduler's own unit is busy with one instruction of a warp, where it is not one.
# For tensor cores that is of one product of 16 x 8 x 8: of TF32 at 60 % of their peak, which is
# said to be what this way of calling them reaches, of float64 at their peak.
CYCLES = {"DFMA": 2.0, "ALU": 2.0, "MUFU": 8.0, "HMMA": 6.5, "DMMA": 32.0}


@dataclass(frozen=True)
class Loop:
    """A hot loop, and how often it runs in a case.

    Attributes
    ----------
    source, kernel : str
        As in `Launch`.
    work : str
        The loop with the most of these opcodes is meant, without loops in it; all of the kernel if
        there are none in a loop.
    case : str
        What is predicted.
    threads, shared_memory : int
        Of a block; bytes, besides the static ones.
    blocks : int
        Of the case.
    passes : float
        How often a warp goes through the loop, all warps of the case together.
    run : callable
        Runs a small case on a device, of two lengths of the loop: 1 or 2.
    run_passes : float
        How many more passes the longer one has.
    bytes : float
        That the case reads and writes.
    seldom : float
        In what share of passes instructions are executed that a branch jumps over.
    """

    source: str
    kernel: str
    work: str
    case: str
    threads: int
    shared_memory: int
    blocks: int
    passes: float
    run: Callable[[CpuDevice, int], object]
    run_passes: float
    bytes: float = 0
    seldom: float = 1.0

    def count(self) -> Counter[str]:
        """Return the instructions of a pass by unit."""
        text = disassembled(self.source, self.kernel)
        body = max(loops(text), key=lambda body: body.counts()[self.work], default=None)
        if body is None or not body.counts()[self.work]:
            return by_unit(all_opcodes(text))
        return body.counts(self.seldom)

    def wavefronts(self) -> float:
        """Return the wavefronts of shared memory of a pass, counted on the CPU."""
        counts = []
        for length in (1, 2):
            device = CpuDevice(counts_wavefronts=True)
            device.multiprocessors = 1
            self.run(device, length)
            of_kernel = [
                n for access, n in device.wavefronts.items() if access.kernel == self.kernel
            ]
            counts.append(sum(n[1] for n in of_kernel))
        return float(counts[1] - counts[0]) / self.run_passes

    def blocks_at_once(self, usage: nvrtc.Usage) -> int:
        """Return how many blocks a multiprocessor holds."""
        shared = usage.shared_memory + self.shared_memory
        warps = self.threads // 32
        # Registers are handed out to warps in units of 256, shared memory in units of 1 KiB.
        registers = -(-usage.registers * 32 // 256) * 256 * warps
        by_shared = SHARED // (-(-(shared + 1024) // 1024) * 1024)
        return min(WARPS // warps, REGISTERS // registers, by_shared)

    def seconds(self, counts: Counter[str], wavefronts: float) -> float:
        """Return the time of the case if issue, units and bandwidths alone limit it."""
        issued = max(sum(counts.values()), *(n * counts[unit] for unit, n in CYCLES.items()))
        cycles = max(issued / SCHEDULERS, wavefronts)
        waves = -(-self.blocks // MULTIPROCESSORS)
        return max(waves * self.passes / self.blocks * cycles / CLOCK, self.bytes / BANDWIDTH)


def _cube(
    kernel: str,
    tile: TileShape,
    work: str,
    template: str = "",
    summed: str = "terms",
    n: int = 4096,
) -> Loop:
    """Return the loop of a product of n x n x n, which takes a tile's terms in a pass."""
    blocks = (n // tile.rows) * (n // tile.columns)
    passes = blocks * (tile.threads // 32) * n / tile.terms
    number = "double" if work in ("DFMA", "DMMA") else "float"
    name = f"{kernel}<{number}, {tile}{template}>"
    # Sums are put by once in so many terms.
    seldom = tile.terms / SHORT if tile.totals("float32", n) and kernel != "maxplus" else 1.0

    def run(device: CpuDevice, length: int) -> None:
        lines = {"rows": tile.rows, "terms": 128, "columns": tile.columns}
        lines[summed] = 128 * length
        _run_product(device, kernel, number, tile.tensor_cores, **lines)

    return Loop(
        f"products/{kernel}.cu",
        name,
        work,
        f"{n}³",
        tile.threads,
        tile.totals("float64" if number == "double" else "float32", n),
        blocks,
        passes,
        run,
        128 / tile.terms * (tile.threads // 32),
        seldom=seldom,
    )


def _run_product(
    device: CpuDevice,
    kernel: str,
    number: str,
    tensor_cores: bool,
    rows: int,
    terms: int,
    columns: int,
) -> None:
    """Run a kernel that has a tile of a product; what it computes does not matter."""
    dtype = "float64" if number == "double" else "float32"
    a, b = np.zeros((rows, terms), dtype), np.zeros((terms, columns), dtype)
    ctx, layout, workspace = context(device, dtype), fold(a.shape, b.shape), 1 << 24
    if kernel == "logmatmulexp":
        log_product.multiply(ctx, layout, a, b, workspace, tensor_cores=tensor_cores)
    elif kernel == "maxplus":
        maxplus.maxplus_matmul(ctx, layout, a, b, workspace)
    else:
        out = np.full((rows, columns), np.log(terms), dtype)
        gradients.logmatmulexp_gradients(ctx, layout, a, b, out, out, workspace)


def _chain(operation: str, size: int, count: int, rows: int) -> Loop:
    """Return the loop of a chain in float32, all rows with the same matrices."""
    for_best = operation == "viterbi"
    geometry = choose(size, 1, rows, 4, MULTIPROCESSORS, SHARED, for_best)
    assert geometry is not None
    blocks = geometry.blocks(1, rows)
    # Either two parts of four terms a pass, or all terms of a step.
    split = isinstance(geometry, Geometry)
    each = geometry.column_warps * -(-size // 4) / 2 if split else geometry.threads / 32
    return Loop(
        geometry.source,
        geometry.kernel("float"),
        "FADD" if for_best else "FFMA",
        f"{operation}, {rows} rows, {count} steps, {size} states",
        geometry.threads,
        geometry.shared_memory(size, 4),
        blocks,
        blocks * (count - 1) * each,
        partial(_run_chain, operation, size, geometry.rows if split else 4),
        4 * each,
        4.0 * rows * count * size,
    )


def _run_chain(operation: str, size: int, rows: int, device: CpuDevice, length: int) -> None:
    weights = {"transitions": np.full((1, size, size), 1 / size, np.float32)}
    case = make("float32", np.zeros((rows, 4 * length + 1, size)), **weights)
    getattr(chains, operation)(context(device, "float32"), case.chain, 1 << 24)


def _pairs(size: int, count: int, rows: int) -> Loop:
    """Return the loop of sums over pairs of states, in float32, with a matrix for each step."""
    side, warps, each = reductions.SIDE, reductions.THREADS // 32, 4  # rows of a pass
    blocks = (-(-size // side)) ** 2 * (count - 1)

    def run(device: CpuDevice, length: int) -> None:
        weights = {"transitions": np.full((1, side, side), 1 / side, np.float32)}
        case = make("float32", np.zeros((16 * length, 2, side)), **weights)
        chains.expected_transitions(context(device, "float32"), case.chain, 1 << 24)

    return Loop(
        "chains/pairs.cu",
        "chain_pairs<float>",
        "FFMA",
        f"expected transitions, {rows} rows, {count} steps, {size} states",
        reductions.THREADS,
        4 * side * side,
        blocks,
        blocks * warps * rows / each,
        run,
        16 / each * warps,
    )


def _many(kernel: str, batch: int, size: int, arrays: int) -> Loop:
    """Return the loop of many small products in float32, a warp for each of them."""
    name = f"{kernel}<float, {size}, 4>"
    case, moved = f"{batch} of {size}³", 4.0 * batch * arrays * size**2

    def run(device: CpuDevice, length: int) -> None:
        a = np.zeros((4 * length, size, size), np.float32)
        ctx, layout = context(device, "float32"), fold(a.shape, a.shape)
        out = log_product.logmatmulexp(ctx, layout, a, a, 1 << 20)
        gradients.logmatmulexp_gradients(ctx, layout, a, a, out, out, 1 << 20)

    source = f"products/{kernel}.cu"
    return Loop(source, name, "FFMA", case, 128, 0, batch // 4, batch, run, 4, moved)


_PLAIN, _TENSOR = PRODUCT_TILES, log_product.TENSOR_TILES
LOOPS = (
    _cube("logmatmulexp", _PLAIN["float32"][0], "FFMA"),
    _cube("logmatmulexp", _PLAIN["float32"][1], "FFMA", n=1024),
    _cube("logmatmulexp", _TENSOR["float32"][0], "HMMA"),
    _cube("logmatmulexp", _PLAIN["float64"][0], "DFMA"),
    _cube("logmatmulexp", _TENSOR["float64"][0], "DMMA"),
    _cube("maxplus", maxplus.TILES["float32"][0], "FADD"),
    _cube("posterior_sums", gradients.TILES["float32"][0], "FFMA", ", true", "columns"),
    _cube("posterior_sums", gradients.TILES["float32"][0], "FFMA", ", false", "rows"),
    _many("small", 100_000, 16, 3),
    _many("small_gradients", 100_000, 16, 5),
    _chain("log_partition", 200, 40, 500),
    _pairs(200, 40, 500),
    _chain("viterbi", 200, 40, 500),
    _chain("log_partition", 8, 100, 100_000),
)

NOTES = """\
A scheduler starts one instruction of a warp a cycle, and there are four in each of the 132
multiprocessors; the clock is taken as 1.755 GHz, the bandwidth as the 4.3 TB/s of a copy. Longer
than a cycle take instructions of float64, and integer arithmetic, logic, comparisons, selections,
minima and maxima (ALU; 2), exponentials and the like (8), products of TF32 on tensor cores (6.5 for
one of 16 x 8 x 8: 60 % of their peak, which is said to be what this way of calling them reaches)
and of float64 (32). The shared memory of a multiprocessor serves a wavefront a cycle, for all four
schedulers: 128 bytes, or twice that for lanes that read the same in pairs. Wavefronts are counted
on the CPU, those of a whole product where it is small. Blocks are taken in whole waves. What the
loop of a product does once in 64 terms counts as an eighth. What comes before and after a loop is
not in it: for small products, exponentials, logarithms and the proof, which are more than the
loop.

log Z and its gradients for 500 rows, 40 steps and 200 states go through the loop of the chain twice
and through that of pairs of states once: 248 µs in all. States of both directions are written and
read twice, 32 MB each time; with marginals, matrices and gradients 230 MB, 53 µs if nothing else
goes on meanwhile. That leaves 100 of 400 µs for what is not in the loops.

What these counts say of changes that were not made:

- *Clusters of four blocks for that chain.* It has 63 blocks for 132 multiprocessors. Four blocks
  that share 16 rows, a quarter of the columns each, and hand each other their states would take 46
  instead of 81 µs in the loop, and two barriers of a cluster for each step. They need capability
  9.0, a kernel of their own, and blocks side by side, for which the CPU run has no proof.
- *Scales of `chain_small` as whole numbers.* Of the 92 instructions of float64 in its loop, a step
  that writes nothing executes 15: 8 of 336 cycles. A device with a 64th of the rate for float64
  takes 240 cycles for them, beside the other instructions.
- *A tile of 128 x 64 for float32.* It starts as many instructions for a multiplication as that of
  128 x 128, which is 6 % less than that of 64 x 64: 44 instead of 47 µs for 1024³. Devices of 8.0
  to 8.9 hold one block of 128 x 128 at a time: 8 warps, each with 64 sums that need not wait.
- *Max-plus products with few rows, their terms shared out.* 16 x 4096 x 4096 has 32 blocks, which
  take 4 times as long as 132 would. Maxima of parts, with their indices, would have to be kept and
  joined by a further kernel."""


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


_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>.*)"
)
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


@dataclass(frozen=True)
class Body:
    """The opcodes of a loop, without those of loops in it."""

    always: list[str]
    jumped_over: list[str]  # by a branch forward, some of the time

    def counts(self, share: float = 1.0) -> Counter[str]:
        """Return how many instructions a pass has, of what is jumped over a share."""
        counts, seldom = by_unit(self.always), by_unit(self.jumped_over)
        return counts + Counter({unit: round(share * n) for unit, n in seldom.items()})


def loops(text: str) -> Iterable[Body]:
    """Yield the loops of a kernel: what branches back jump over."""
    opcodes: list[str] = []
    places: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for name, rest in _lines(text):
        if name.startswith(".L"):
            places[name] = len(opcodes)
            continue
        opcodes.append(name)
        target = re.search(r"\.L_x_\d+", rest) if name == "BRA" else None
        if target is not None:
            branches.append((len(opcodes), target[0]))
    spans = [(at, places[target]) for at, target in branches if target in places]
    back = [(start, end) for end, start in spans if start < end]
    for start, end in back:
        inner = {
            i
            for other in back
            if other != (start, end) and start <= other[0] and other[1] <= end
            for i in range(*other)
        }
        jumped = {
            i
            for after, target in spans
            if start <= after < target <= end
            for i in range(after, target)
        }
        own = [i for i in range(start, end) if i not in inner]
        yield Body(
            [opcodes[i] for i in own if i not in jumped], [opcodes[i] for i in own if i in jumped]
        )


def by_unit(opcodes: Iterable[str]) -> Counter[str]:
    """Return how many of the opcodes there are for each of `UNITS`, and of others."""
    unit_of = {opcode: unit for unit, names in UNITS.items() for opcode in names}
    return Counter(unit_of.get(opcode, "other") for opcode in opcodes)


def write() -> None:
    """Disassemble the kernels of `LOOPS`; write the record and the page."""
    found = {
        loop.kernel: {
            "digest": digest(loop),
            "instructions": dict(loop.count()),
            "wavefronts": loop.wavefronts(),
        }
        for loop in LOOPS
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
        f"for compute capability {ARCHITECTURE // 10}.{ARCHITECTURE % 10}; the blocks that a "
        "multiprocessor holds; and the time of a case on an H200 if nothing limits it but the "
        "start of instructions, units that take longer for one, wavefronts of shared memory, and "
        "the bytes that are read and written. **Predicted, not measured.** Written by "
        "`python -m tests.cuda.loops`.",
        "",
        f"| kernel | {' | '.join(UNITS)} | other | wavefronts | blocks | case | predicted |",
        f"|---|{'--:|' * (len(UNITS) + 3)}---|--:|",
    ]
    for loop in LOOPS:
        counts = Counter(record[loop.kernel]["instructions"])
        usage = nvrtc.record()[f"{loop.source}, {ARCHITECTURE}"]["usage"][loop.kernel]
        numbers = [str(counts[unit] or "") for unit in (*UNITS, "other")]
        wavefronts = record[loop.kernel]["wavefronts"]
        numbers += [f"{wavefronts:.4g}", str(loop.blocks_at_once(nvrtc.Usage(**usage)))]
        time = duration(loop.seconds(counts, wavefronts))
        lines.append(f"| `{loop.kernel}` | {' | '.join(numbers)} | {loop.case} | {time} |")
    return "\n".join([*lines, "", NOTES, ""])


if __name__ == "__main__":
    write()
