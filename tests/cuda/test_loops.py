"""Loops are found in a disassembly, and the page about them is of the kernels as they are."""

from __future__ import annotations

import json

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
    loop = loops.Loop("", "", "FFMA", "", threads=256, shared_memory=0, blocks=264, passes=1e6)
    counts = loops.by_unit(["FFMA"] * 100)
    assert loop.seconds(counts) == pytest.approx(1e6 / 132 * 100 / 4 / loops.CLOCK)
    counts = loops.by_unit(["FFMA"] * 100 + ["MUFU"] * 20)  # exponentials take longer than all else
    assert loop.seconds(counts) == pytest.approx(1e6 / 132 * 160 / 4 / loops.CLOCK)
    assert loop.blocks_at_once(nvrtc.Usage(127, 16 << 10, 0, 0)) == 2  # by registers
    assert loop.blocks_at_once(nvrtc.Usage(32, 100 << 10, 0, 0)) == 2  # by shared memory
    assert loop.blocks_at_once(nvrtc.Usage(32, 0, 0, 0)) == 8  # by warps


@needs_nvrtc
def test_the_page_is_up_to_date() -> None:
    record = json.loads(loops.RECORD.read_text(encoding="utf-8"))
    now = {loop.kernel: loops.digest(loop) for loop in loops.LOOPS}
    why = "run python -m tests.cuda.loops"
    assert {kernel: found["digest"] for kernel, found in record.items()} == now, why
    assert loops.PAGE.read_text(encoding="utf-8") == loops.page(), why
