"""Registers behind a setmaxnreg: from machine code exactly, from PTX as a hint. PTX manual, "setmaxnreg"."""

import pytest

from tests.emulator.kernels import kinds, launch

CODE = """
        /*0000*/                   MOV R250, 0x1 ;
        /*0010*/                   BRX R4 -0x20 ;
        /*0020*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xc0 ;
        /*0030*/              @!UP0 BRA 0x20 ;
        /*0040*/                   FADD {high}, R2, R3 ;
        /*0050*/               @P0 BRA 0x40 ;
        /*0060*/                   BRA 0xb0 ;
        /*0070*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0080*/                   LDS.128 {low}, [R3] ;
        /*0090*/                   EXIT ;
        /*00a0*/                   FADD R191, R2, R3 ;
        /*00b0*/                   EXIT ;
"""
DEC = "setmaxnreg.dec.sync.aligned.u32 24;"


def judged(high: str, low: str) -> list[str]:
    result = launch("", shared=64, sass=CODE.format(high=high, low=low))
    assert set(kinds(result)) <= {"register-budget"}
    return [r.message for r in result.reports]


def test_machine_code_within_its_budgets_is_clean():
    assert judged("R191", "R20") == []


@pytest.mark.parametrize(("high", "low", "words"), [("R192", "R20", "0x40 uses register R192"), ("R191", "R21", "0x80 uses register R24")])
def test_machine_code_over_its_budget_is_reported(high, low, words):
    """The last register of a wide load counts; code before the first setmaxnreg and behind an indirect branch is no role's."""
    (message,) = judged(high, low)
    assert words in message, message


def test_text_that_is_no_disassembly_is_refused():
    with pytest.raises(ValueError, match="cuobjdump"):
        launch("", shared=64, sass="nothing")


def test_pressure_is_told_by_name_only():
    """30 values that all live across the setmaxnreg of 24 registers."""
    fill = "".join(f"add.u32 %r{i}, %tid, {i};" for i in range(10, 40))
    use = "".join(f"add.u32 %r1, %r1, %r{i};" for i in range(10, 40))
    body = f"mov.b32 %r1, 0; {fill} {DEC} {use} st.shared.b32 [smem], %r1;"
    assert launch(body, shared=64).ok
    asked = launch(body, shared=64, checks=("register-pressure",))
    assert kinds(asked) == ["register-pressure"] and asked.reports[0].ptx.startswith("setmaxnreg")
    assert "3" in asked.reports[0].message and "liveness" in asked.reports[0].message
    few = f"mov.b32 %r1, 0; {DEC} {fill} st.shared.b32 [smem], %r1;"
    assert launch(few, shared=64, checks=("register-pressure",)).ok
