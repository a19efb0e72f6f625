"""Loops are found in a disassembly, and the page about them is of the kernels as they are."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.cuda import loops, nvrtc

needs_nvrtc = pytest.mark.usefixtures("nvrtc_library")

TEXT = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDS.128 R4, [R2] ;
.L_x_2:
        /*0020*/                   FFMA R8, R4, R5, R8 ;
        /*0030*/                   FFMA.FTZ R9, R4, R6, R9 ;
        /*0040*/              @!P0 MUFU.EX2 R10, R10 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0070*/               @P0 BRA `(.L_x_1) ;
.L_x_4:
        /*0080*/                   FFMA R8, R4, R5, R8 ;
        /*0090*/               @P0 BRA `(.L_x_4) ;
        /*00a0*/                   EXIT ;
"""


def test_loops_are_taken_without_those_in_them() -> None:
    inner, outer, last = loops.loops(TEXT)
    assert inner.always == ["FFMA", "FFMA", "MUFU", "BRA"]
    assert outer.always == ["LDS", "BRA", "BRA"]
    assert last.always == ["FFMA", "BRA"]
    assert loops.by_unit(inner.always) == {"FFMA": 2, "MUFU": 1, "other": 1}
    assert len(list(loops.all_opcodes(TEXT))) == 11


def test_what_is_jumped_over_counts_as_often_as_it_is_executed() -> None:
    text = TEXT.replace(
        "              @!P0 MUFU",
        "               @P2 BRA `(.L_x_5) ;\n" + 8 * " " + "/*0048*/                   MUFU",
    )
    text = text.replace("        /*0050*/", ".L_x_5:\n        /*0050*/")
    inner, *_ = loops.loops(text)
    assert inner.always == ["FFMA", "FFMA", "BRA", "BRA"]
    assert inner.jumped_over == ["MUFU"]
    assert inner.counts(0.0) == {"FFMA": 2, "other": 2}
    assert inner.counts() == {"FFMA": 2, "other": 2, "MUFU": 1}


def test_what_limits_a_case() -> None:
    def seconds(opcodes: list[str], wavefronts: float = 0) -> float:
        return loop.seconds(loops.by_unit(opcodes), wavefronts)

    loop = loops.Loop("", "", "FFMA", "", 256, 0, 264, 1e6, lambda device, length: None, 1)
    per_cycle = 1e6 / 132 / loops.CLOCK
    assert seconds(["FFMA"] * 100) == pytest.approx(per_cycle * 100 / 4)
    # Exponentials take longer than all else, then maxima, then shared memory.
    assert seconds(["FFMA"] * 100 + ["MUFU"] * 20) == pytest.approx(per_cycle * 160 / 4)
    assert seconds(["FADD", "FMNMX"] * 50 + ["SEL"] * 5) == pytest.approx(per_cycle * 110 / 4)
    assert seconds(["FFMA"] * 100, 30) == pytest.approx(per_cycle * 30)
    assert loop.blocks_at_once(nvrtc.Usage(127, 16 << 10, 0, 0)) == 2  # by registers
    assert loop.blocks_at_once(nvrtc.Usage(32, 100 << 10, 0, 0)) == 2  # by shared memory
    assert loop.blocks_at_once(nvrtc.Usage(32, 0, 0, 0)) == 8  # by warps


QUICK = ("logmatmulexp<float, 128, 128, 8, 8, 8>", "maxplus<float, 64, 64, 16, 4, 4>")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(x, id=x.kernel, marks=() if x.kernel in QUICK else pytest.mark.exhaustive)
        for x in loops.LOOPS
    ],
)
def test_wavefronts_are_those_of_the_record(loop: loops.Loop) -> None:
    record = json.loads(loops.RECORD.read_text(encoding="utf-8"))
    assert loop.wavefronts() == record[loop.kernel]["wavefronts"]


def test_hot_loops_keep_to_their_limits() -> None:
    """Of 4096 x 4096 x 4096: neither shared memory nor comparisons take what they once took."""
    record = json.loads(loops.RECORD.read_text(encoding="utf-8"))
    product, best = (record[kernel] for kernel in QUICK)
    assert product["wavefronts"] / 8 <= 12  # of a warp, for a term; a multiplier takes 16 cycles
    [loop] = [x for x in loops.LOOPS if x.kernel == QUICK[1]]
    assert loop.seconds(Counter(best["instructions"]), best["wavefronts"]) <= 7e-3


@needs_nvrtc
def test_the_page_is_up_to_date() -> None:
    record = json.loads(loops.RECORD.read_text(encoding="utf-8"))
    now = {loop.kernel: loops.digest(loop) for loop in loops.LOOPS}
    why = "run python -m tests.cuda.loops"
    assert {kernel: found["digest"] for kernel, found in record.items()} == now, why
    assert loops.PAGE.read_text(encoding="utf-8") == loops.page(), why
