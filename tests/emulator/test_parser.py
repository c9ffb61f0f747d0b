"""PTX text to instructions: structure, and errors that name the line."""

import pytest

from tandem_attn.emulator import LaunchError, ParseError, UnsupportedInstruction, run
from tandem_attn.emulator.ptx.nodes import Imm, Memory, Pair, Reg, Vector
from tandem_attn.emulator.ptx.parser import parse
from tandem_attn.emulator.ptx.program import EXIT, build
from tests.emulator.kernels import kernel


def lines(body, params=0):
    return parse(kernel(body, params)).code[1:]


def test_operands_and_their_kinds():
    code = lines("""
    shfl.sync.idx.b32 %r1|%p1, %r2, 0, 31, -1;
    ld.shared.v2.b32 {%r3, %r4}, [%r5+16];
    @!%p2 add.f32 %f1, %f2, 0f3F800000;
    mov.b32 %r6, smem;
    """)
    pair, _, zero, _, minus = code[0].operands
    assert isinstance(pair, Pair) and isinstance(pair.first, Reg) and pair.second.cls == "p"
    assert zero == Imm(0) and minus == Imm(-1)
    vector, memory = code[1].operands
    assert isinstance(vector, Vector) and [r.name for r in vector.items] == ["%r3", "%r4"]
    assert isinstance(memory, Memory) and memory.offset == 16
    assert code[2].predicate.name == "%p2" and code[2].negated
    assert code[2].operands[2].as_float() == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1 << 5) | 3", 35), ("-(7 - 2) * 3", -15), ("7 / -2", -3), ("-7 % 3", -1), ("~0 & 0xFF", 255), ("1 + 2 * 3 == 7", 1),
        ("5 > 3 ? 10 : 20", 10), ("0 || 4", 1), ("2 && 0", 0), ("!3", 0), ("(.u64)-1 >> 60", 15), ("-1 >> 60", -1), ("-1 < 1", 1),
        ("-1 < 1U", 0), ("1 ^ 3 | 4", 6), ("WARP_SZ * 4", 128), ("10 - 4 - 3", 3), ("0x10 + 010", 24), ("+5", 5), ("1 << 64", 0),
    ],
)  # fmt: skip
def test_constant_expressions(text, value):
    """PTX manual, "Constant Expressions", "Summary of Constant Expression Evaluation Rules": C's precedence, 64 bits."""
    assert lines(f"    mov.b64 %rd1, {text};")[0].operands[1] == Imm(value)
    address = lines(f"    ld.shared.b32 %r1, [%r2+({text})];")[0].operands[1]
    assert address.offset == value


def test_constant_expressions_of_floats_sizes_and_data():
    assert lines("    mov.f64 %rd1, 1.5 * 2.0 - 0.5;")[0].operands[1].as_float() == 2.5
    assert lines("    mov.f32 %f1, -0.5;")[0].operands[1].as_float() == -0.5
    assert lines("    mov.b32 %r1, smem+4*(2+1);")[0].operands[1].offset == 12
    module = parse(kernel("    .shared .b8 room[4 * 16 + 1];") + ".global .b32 data[2] = {1 << 4, -(2 + 3)};\n")
    assert next(v for v in module.variables.values() if v.name.startswith("room")).size == 65
    assert module.variables["data"].data == (16).to_bytes(4, "little") + (2**32 - 5).to_bytes(4, "little")


def test_scopes_shadow_registers_and_labels():
    module = parse(
        kernel("""
    { .reg .pred p; .reg .b32 %r1; AGAIN: mov.b32 %r1, 7; @p bra AGAIN; }
    { .reg .pred p; AGAIN: mov.b32 %r1, 9; @p bra AGAIN; }
    """)
    )
    moves = [ins for ins in module.code if ins.text.startswith("mov.b32 %r1")]
    branches = [ins for ins in module.code if ins.name == "bra"]
    assert moves[0].operands[0].slot != moves[1].operands[0].slot
    assert branches[0].operands != branches[1].operands


def test_source_lines_come_from_loc_whatever_the_order_of_file():
    text = kernel("    .loc 1 42 7\n    mov.b32 %r1, 1;\n    .loc 1 0 0\n    mov.b32 %r2, 2;") + '.file 1 "/somewhere/k.py"\n'
    code = parse(text).code
    assert str(code[1].source) == "/somewhere/k.py:42"
    assert str(code[2].source) == "/somewhere/k.py:42", "line 0 keeps the last known line"
    assert text.splitlines()[code[1].line - 1].strip() == "mov.b32 %r1, 1;"


def test_data_and_branch_targets():
    text = """.version 9.0
.target sm_90a
.address_size 64
.global .align 4 .b32 table[3] = {1, -2, 0x10};
.global .align 1 .b8 name[4] = {104, 105, 0};
.visible .entry k()
{
    .reg .b32 %r<3>;
T: .branchtargets A, B;
    mov.u32 %r1, %tid.x;
    brx.idx %r1, T;
A:  ret;
B:  ret;
}
"""
    module = parse(text)
    assert module.variables["table"].data == (1).to_bytes(4, "little") + (2**32 - 2).to_bytes(4, "little") + (16).to_bytes(4, "little")
    assert module.variables["name"].data == b"hi\0\0"
    program = build(module)
    table = next(s for s in program.segments if s.kind == "table")
    assert len(table.targets) == 2 and table.reconverge == EXIT


def test_reconvergence_is_the_immediate_post_dominator():
    program = build(
        parse(
            kernel("""
    setp.eq.u32 %p1, %tid, 0;
    @%p1 bra A;
    mov.b32 %r1, 1;
    bra JOIN;
A:  mov.b32 %r1, 2;
JOIN: mov.b32 %r2, %r1;
    """)
        )
    )
    branch = next(s for s in program.segments if s.kind == "branch")
    assert program.code[program.segments[branch.reconverge].start].text == "mov.b32 %r2, %r1;"


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("    add.s32 %r1, %r2, %nothere;", ParseError, "%nothere is not declared"),
        ("    bra NOWHERE;", ParseError, "label 'NOWHERE'"),
        ("    add.s32 %r1 %r2;", ParseError, "expected ','"),
        ("    .mystery 3;", ParseError, "unknown directive"),
        ("    mov.b32 %r1, #;", ParseError, "unexpected character"),
        ("    mov.b32 %r1, 4 / (2 - 2);", ParseError, "division by zero"),
        ("    mov.b32 %r1, 4 + 1.5;", ParseError, "integer and floating-point"),
        ("    mov.b32 %r1, (4 + 2;", ParseError, "expected ')'"),
        ("    frobnicate.b32 %r1, %r2;", UnsupportedInstruction, "frobnicate.b32 is not known"),
        ("    mov.b32 %r1, undefined_symbol;", ParseError, "'undefined_symbol' is not defined"),
        ("    tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r4], %r2, %p1;", UnsupportedInstruction, "sparse tcgen05.mma"),
        ("    tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r3], %rd2, %r2, %p1;", UnsupportedInstruction, "convolution tcgen05.mma"),
        (
            "    tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
            UnsupportedInstruction,
            "no scale vector size",
        ),
        (
            "    wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, %r1, 0, 1, 1, 1, 0, 0;",
            UnsupportedInstruction,
            "sparse wgmma",
        ),
        (
            "    mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, "
            "{%f1, %f2, %f3, %f4}, %r1, 0;",
            UnsupportedInstruction,
            "sparse mma",
        ),
    ],
)
def test_errors_name_the_line(body, error, message):
    text = kernel("    mov.b32 %r1, 0;\n" + body)
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row == body.splitlines()[0])
    with pytest.raises(error) as caught:
        run(text, [], (1,), block=(32,))
    assert f"line {line}" in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_ends_early_is_an_error():
    with pytest.raises(ParseError, match="not closed"):
        parse(".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k()\n{\n ret;\n")
    with pytest.raises(LaunchError, match="PTX text is expected"):
        run(42, [], (1,), block=(32,))
