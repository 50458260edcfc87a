"""The check of foreign kernels tells right from wrong, on a repository and a kernel of our own."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.emulator import is_installed
from tests.foreign import Case, Change, ForeignError, Operands, Piece, judge
from tests.foreign import __main__ as command
from tests.foreign.cases import CASES

pytestmark = pytest.mark.skipif(not is_installed("none"), reason="no g++ to run CUDA text with")

BUILDS = ("none",)
KERNEL = """
#include <cuda_runtime.h>
template <int THREADS>
__global__ void reversed(const float* x, float* y) {
  __shared__ float s[32];
  const unsigned at = (unsigned)__cvta_generic_to_shared(s + threadIdx.x);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(x + threadIdx.x));
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  y[threadIdx.x] = 2 * s[THREADS - 1 - threadIdx.x];
}
void launch() { reversed<32><<<1, 32>>>(nullptr, nullptr); }
"""
TILE = Change(r"template <int THREADS>", "constexpr int THREADS = 32;")
SAYS_MEMORY = Change(r'("l"\(x \+ threadIdx\.x\))\)', r'\1 : "memory")', 'does not list "memory"')
DAMAGE = ("cp.async.wait_all;", "")


def operands() -> Operands:
    x, y = np.arange(32, dtype=np.float32), np.full(32, np.nan, np.float32)
    return Operands([x, y], lambda: y, 2 * x[::-1].astype(np.float64))


CASE = Case(
    "reversed", "own", [Piece("kernel.cu", r".*?(?=^void launch)")], "reversed", 1, 32, operands, 1e-6, [DAMAGE],
    [TILE, SAYS_MEMORY],
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "kernel.cu").write_text(KERNEL, encoding="utf-8")
    return tmp_path


def test_a_right_kernel_is_judged_right(folder: Path) -> None:
    verdict = judge(CASE, folder, BUILDS)
    assert (verdict.complaints, verdict.error, verdict.refusals, verdict.damages) == ([], 0, 1, 1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tolerance": -1.0}, r"none build: error 0.0e\+00"),
        ({"damages": [("__syncthreads", "__syncwarp")]}, "not seen, error 0.0"),  # one warp
        ({"damages": [("float s", "floats s")]}, "does not compile"),
        ({"changes": [TILE, replace(SAYS_MEMORY, refused="no such reason")]}, "expected 'no such reason'"),
        (
            {"changes": [*CASE.changes, Change("= 2", "= 2.0f", "anything")]},
            "without .*: error 0.0e\\+00; expected 'anything'",
        ),
    ],
)
def test_what_a_case_claims_wrongly_is_a_complaint(folder: Path, changed: dict[str, object], says: str) -> None:
    (complaint,) = judge(replace(CASE, **changed), folder, BUILDS).complaints  # type: ignore[arg-type]
    assert re.search(says, complaint), complaint


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"pieces": [Piece("kernel.cu", "no such text")]},
            "kernel.cu has no 'no such text'; another version of the repository",
        ),
        ({"changes": [Change("absent", "")]}, "nothing matches 'absent'; another version of the repository"),
    ],
)
def test_another_version_of_a_repository_is_named(folder: Path, changed: dict[str, object], says: str) -> None:
    with pytest.raises(ForeignError, match=says):
        judge(replace(CASE, **changed), folder, BUILDS)  # type: ignore[arg-type]


def test_the_command_says_what_is_missing_and_what_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "judge", lambda case, where: judge(case, where, BUILDS))
    monkeypatch.setattr(command, "CASES", [replace(CASE, repository="elsewhere"), CASE])
    assert command.main(str(folder)) == 0
    said = capsys.readouterr().out
    assert f"elsewhere      not in {folder}" in said
    assert "error 0.0e+00 of at most 1e-06; refused unchanged 1, damages seen 1" in said
    monkeypatch.setattr(command, "CASES", [replace(CASE, changes=[Change("absent", "")])])
    assert command.main(str(folder)) == 1
    assert "NOT AS EXPECTED\n    nothing matches 'absent'" in capsys.readouterr().out
    monkeypatch.setattr(command, "CASES", [replace(CASE, repository="elsewhere")])
    assert command.main(str(folder)) == 1
    assert "has none of elsewhere: clone them there" in capsys.readouterr().out


def test_a_piece_may_come_from_another_repository(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own" / "kernel.cu").write_text(
        KERNEL.replace("2 * s", "twice(s").replace("threadIdx.x];\n}", "threadIdx.x]);\n}"), "utf-8"
    )
    case = replace(
        CASE,
        pieces=[Piece("twice.h", ".*", "more", "other"), *CASE.pieces],
        before="namespace more {} using namespace more;",
    )
    monkeypatch.setattr(command, "judge", lambda case, where: judge(case, where, BUILDS))
    monkeypatch.setattr(command, "CASES", [case])
    assert command.main(str(folder)) == 0
    assert capsys.readouterr().out == f"other          not in {folder}\n"
    (folder / "other").mkdir()
    (folder / "other" / "twice.h").write_text("inline float twice(float x) { return 2 * x; }", encoding="utf-8")
    assert command.main(str(folder)) == 0
    assert "error 0.0e+00" in capsys.readouterr().out


def test_every_case_has_a_damage_and_a_name_of_its_own() -> None:
    assert len({(case.repository, case.name) for case in CASES}) == len(CASES)
    assert all(case.damages for case in CASES)
    assert len({case.repository for case in CASES}) == 8
