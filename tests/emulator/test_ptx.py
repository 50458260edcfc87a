"""Inline PTX becomes calls with its operands in their places; what is unknown, or would mislead the compiler, is
refused by name.
"""

import re

import pytest

from ksgen.emit.templates import environment
from tests.emulator import SimtError
from tests.emulator.ptx import INSTRUCTIONS, translate
from tests.ptx.cases import all_cases

WAIT = 'asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(n) : "memory");'


def test_operands_stand_in_their_places() -> None:
    text = 'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(pair(high, 1)), "f"(low)); next();'
    assert translate(text) == (
        "({ auto& ptx_0 = ::ptx::result<unsigned>(both); auto&& ptx_1 = pair(high, 1); auto&& ptx_2 = low;"
        " ::ptx::narrow_f16x2(ptx_0, ::ptx::f(ptx_1), ::ptx::f(ptx_2)); (void)0; }); next();"
    )
    text = (
        'asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %2, %1, %3}, [%4];"\n: "=r"(w[0]), '
        '"=r"(w[1]), '
    )
    text += '"=r"(w[2]), "=r"(w[3]) : "r"(row) : "memory");'
    assert "ptx::load_matrices<4, true, false>({&ptx_0, &ptx_2, &ptx_1, &ptx_3}, ::ptx::r(ptx_4));" in translate(text)
    assert translate(text).count("\n") == 1  # so that later lines stay where they are
    assert translate('asm volatile("" : "+f"(x)::"memory");') == "((void)0);"


def test_predicates_and_branches_become_those_of_the_language() -> None:
    text = 'asm volatile("{\\n.reg .pred p;\\nAGAIN:\\nsetp.ne.b32 p, %0, 0x10;\\n@!p bra AGAIN;\\n}" ::"r"(x));'
    code = translate(text)
    assert (
        "({ __label__ AGAIN_; auto&& ptx_0 = x;  bool p_; AGAIN_:; ::ptx::set_if_not_equal(p_, ::ptx::r(ptx_0), 0x10);"
        in code
    )
    assert "if (!p_) goto AGAIN_;" in code


def test_other_statements_stay_where_only_some_are_asked_for() -> None:
    text = f'asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half)); {WAIT}'
    kept = translate(text, only=lambda opcodes: "cvt.f32.f16" in opcodes)
    assert kept.endswith(WAIT)
    assert "::ptx::widen_f16(ptx_0, ::ptx::h(ptx_1))" in kept


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("mbarrier.init", "mbarrier.inval", "mbarrier.inval.shared.b64: no instruction that is known here"),
        ("[%0], %1", "%0, %1", r"mbarrier.init.shared.b64 %0, %1: the operands are r,r; it takes \[r\],r"),
        ("[%0], %1", "[%0]", r"the operands are \[r\]; it takes \[r\],r"),
        ("[%0], %1", "[%0], %2", r"the operands are \[r\],%2; it takes \[r\],r"),
        ('"r"(n)', '"l"(n)', r"the operands are \[r\],l; it takes \[r\],r"),
        ('"r"(n)', '"d"(n)', r'the operand "d"\(n\); constraints are r, l, h, f, of results with = or \+, and n'),
        ('"r"(n)', '"=r"(n)', r'the operand "=r"\(n\)'),
        ('"r"(n)', '[count] "r"(n)', r'the operand \[count\] "r"\(n\)'),
        (
            ' : "memory"',
            "",
            'mbarrier.init.shared.b64: the statement does not list "memory", so that accesses may be moved across it',
        ),
        ('"r"(at), "r"(n)', '"r"(at)', r"the operands are \[r\],%1"),
        ("%1;", "%1; bra OUT;", "bra OUT: the statement has no such label"),
        ("%1;", "%1; .reg .v4 x;", "the type of .reg .v4 x; known are pred, b16, b32, b64"),
        ("%1;", "%1; ?", r"cannot read the PTX \?;"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(right: str, wrong: str, says: str) -> None:
    text = f'# 3 "kernel.cu"\n\n{WAIT}'
    assert "ptx::mbarrier_init(" in translate(text, "kernel.cu")
    assert text.count(right) == 1
    with pytest.raises(SimtError, match=says) as caught:
        translate(text.replace(right, wrong), "kernel.cu")
    assert (caught.value.kind, caught.value.line) == ("ptx", 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(n));',
            "mapa.shared::cluster.u32: the statement is not volatile",
        ),
        ('asm("cvt.f32.f16 %0, %1;" : "=f"(y), "=h"(x));', "cvt.f32.f16: reads %1, which nothing has written"),
        ('asm("cvt.f32.f16 %1, %0;" : "=f"(z) : "f"(y), "h"(x));', r"the operands are f,f; it takes =f,h"),
        ('asm("cvt.rna.tf32.f32 %1, %0;" :: "f"(y), "r"(x));', "cvt.rna.tf32.f32: writes %1, an input"),
        (
            'asm("mov.b64 x, {%0, %1};" :: "f"(y), "f"(z));',
            r"the operands are x,\{f,f\}; it takes =l,\{f,f\} or \{=f,=f\},l",
        ),
    ],
)
def test_registers_that_are_read_or_written_wrongly_are_refused(text: str, says: str) -> None:
    with pytest.raises(SimtError, match=says):
        translate(text)


def test_each_ptx_function_has_a_case() -> None:
    """Each function over PTX is in the source of a launch, and these sources have more than 60 known instructions."""
    blocks = {
        block.partition("__")[0]
        for block in environment().get_template("include/snippets/ptx.j2").blocks
        if block[0] != "_"
    }
    texts = "\n".join(case.text for case in all_cases())
    defined = set(re.findall(r"(?m)^DEVICE [\w ]+ (\w+)\(|^struct alignas\(64\) (\w+)", texts))
    assert blocks - {name for names in defined for name in names} == set()
    statements = re.findall(r"asm(?: volatile)?\(\s*((?:\"[^\"]*\"\s*)+)", texts)
    opcodes = {found for statement in statements for found in re.findall(r"[a-z]\w*(?:(?:\.|::)\w+)+", statement)}
    assert len([opcode for opcode in opcodes if opcode.replace(".shared::cta", ".shared") in INSTRUCTIONS]) > 60
