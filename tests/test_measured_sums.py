"""The rules of tensor-core sums, by cases whose results follow from the rule by hand, and the comparison with
measurements.
"""

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import measured_sums
from tests.emulator import SimtError, is_installed, run_cuda
from tests.measured_sums import FORMATS, Sums

pytestmark = pytest.mark.skipif(not is_installed("none"), reason="no g++ to run CUDA text with")

VOLTA, AMPERE, ADA, HOPPER, DATACENTER, CONSUMER = "sm_70", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"
SINCE_AMPERE = (AMPERE, "sm_86", ADA, HOPPER, DATACENTER, CONSUMER)
FEW_BITS, MORE_BITS = (AMPERE, "sm_86", ADA), (HOPPER, DATACENTER, CONSUMER)
ULP = 2.0**-23  # of 1

# Products are written as pairs of operands, in order of k. A product's exponent is the sum of its operands'; `kept`
# bits below the largest exponent count: 23 on Volta, 24 on Ampere and Ada, 25 since Hopper, 13 of operands in eight
# bits on Ada and Hopper.
Pairs = Sequence[tuple[float, float]]
ONE, NOTHING = (1.0, 1.0), (0.0, 0.0)
# name, format, targets, products, sum so far, result
CASES: list[tuple[str, str, tuple[str, ...], Pairs, float, float]] = [
    # The largest exponent is 0. 2^-24 is the last bit kept with 24 bits: two of them make an ULP. With 23 both are cut
    # off.
    ("one bit below float32's last", "fp16", SINCE_AMPERE, [ONE, (2.0**-12, 2.0**-12), (2.0**-12, 2.0**-12)], 0,
        1 + ULP),
    ("no bit below float32's last", "fp16", (VOLTA,), [ONE, (2.0**-12, 2.0**-12), (2.0**-12, 2.0**-12)], 0, 1),
    # Four times 2^-25, the last bit kept with 25 bits.
    ("two bits below float32's last", "fp16", MORE_BITS, [ONE, *[(2.0**-12, 2.0**-13)] * 4], 0, 1 + ULP),
    ("two bits below float32's last", "bf16", MORE_BITS, [ONE, *[(2.0**-12, 2.0**-13)] * 4], 0, 1 + ULP),
    ("not the second bit", "fp16", FEW_BITS, [ONE, *[(2.0**-12, 2.0**-13)] * 4], 0, 1),
    ("not the second bit", "bf16", FEW_BITS, [ONE, *[(2.0**-12, 2.0**-13)] * 4], 0, 1),
    # Seven times 2^-26: 7 / 8 of an ULP, of which nothing is kept.
    ("not a third bit", "fp16", SINCE_AMPERE, [ONE, *[(2.0**-13, 2.0**-13)] * 7], 0, 1),
    # 1 + 2^-24 + 2^-24 - 2^-25 would be rounded up. The sum of what is kept is cut off, towards zero for either sign.
    ("the sum is cut off", "fp16", MORE_BITS, [ONE, (2.0**-12, 2.0**-12), (2.0**-12, 2.0**-13)], 0, 1),
    ("the sum is cut off", "fp16", MORE_BITS, [(-1.0, 1.0), (-(2.0**-12), 2.0**-12), (-(2.0**-12), 2.0**-13)], 0, -1),
    # Each term is cut off towards zero by itself: 1 - 2^-26 - 2^-26 is 1, and not the float below.
    ("terms are cut off towards zero", "fp16", SINCE_AMPERE, [ONE, *[(-(2.0**-13), 2.0**-13)] * 2], 0, 1),
    # 1.5 * 1.5 = 2.25 has exponent 0 + 0: four times 2^-24 are kept, an ULP of 2.25. Normalised to exponent 1, Ampere
    # would keep none.
    ("products are not normalised", "fp16", FEW_BITS, [(1.5, 1.5), *[(2.0**-12, 2.0**-12)] * 4], 0, 2.25 + 2 * ULP),
    ("products are not normalised", "fp16", MORE_BITS, [(1.5, 1.5), *[(2.0**-12, 2.0**-13)] * 8], 0, 2.25 + 2 * ULP),
    # The sum so far has exponent 1, and so 2^-23 is Ampere's last bit and 2^-24 Hopper's.
    ("the sum so far counts", "fp16", FEW_BITS, [*[(2.0**-12, 2.0**-12)] * 4], 2, 2),
    ("the sum so far counts", "fp16", MORE_BITS, [*[(2.0**-12, 2.0**-12)] * 4], 2, 2 + 2 * ULP),
    # A subnormal operand has exponent -14: 2^-24 * 2^14 = 2^-10 counts as exponent 0. 2^-25 is Ampere's first bit cut
    # off, 2^-26 Hopper's.
    ("exponents of subnormals", "fp16", FEW_BITS, [(2.0**-24, 2.0**14), *[(2.0**-11, 2.0**-14)] * 4], 0, 2.0**-10),
    ("exponents of subnormals", "fp16", MORE_BITS, [(2.0**-24, 2.0**14), *[(2.0**-12, 2.0**-14)] * 4], 0, 2.0**-10),
    # A product of zero has no exponent: 0 * 2^15 would cut off all of 2^-25.
    ("zeros have no exponent", "fp16", SINCE_AMPERE, [(0.0, 2.0**15), (2.0**-12, 2.0**-13)], 0, 2.0**-25),
    ("zeros have no exponent", "tf32", SINCE_AMPERE, [(0.0, 2.0**120), (2.0**-20, 2.0**-20)], 0, 2.0**-40),
    # Ampere adds 8 products at a time: eight times 2^-26 are an ULP of 1 before the 1 comes. After it they are cut off
    # one by one.
    ("steps of eight, in order", "fp16", FEW_BITS, [*[(2.0**-13, 2.0**-13)] * 8, ONE], 0, 1 + ULP),
    ("steps of eight, in order", "bf16", FEW_BITS, [*[(2.0**-13, 2.0**-13)] * 8, ONE], 0, 1 + ULP),
    ("steps of eight, in order", "fp16", FEW_BITS, [ONE, *[NOTHING] * 7, *[(2.0**-13, 2.0**-13)] * 8], 0, 1),
    ("a step of sixteen", "fp16", MORE_BITS, [*[(2.0**-13, 2.0**-13)] * 8, ONE], 0, 1),
    # Volta 4: four times 2^-25 are an ULP before the 1 comes in the second step.
    ("steps of four", "fp16", (VOLTA,), [*[(2.0**-12, 2.0**-13)] * 4, ONE], 0, 1 + ULP),
    ("steps of four", "fp16", (VOLTA,), [*[(2.0**-12, 2.0**-13)] * 3, ONE, (2.0**-12, 2.0**-13)], 0, 1),
    # The same of tf32, whose steps are half as long: 4 before Hopper, 8 since.
    ("steps of four", "tf32", FEW_BITS, [*[(2.0**-12, 2.0**-13)] * 4, ONE], 0, 1 + ULP),
    ("steps of four", "tf32", FEW_BITS, [*[(2.0**-12, 2.0**-13)] * 3, ONE], 0, 1),
    ("a step of eight", "tf32", MORE_BITS, [*[(2.0**-13, 2.0**-13)] * 4, ONE], 0, 1),
    ("two bits below float32's last", "tf32", MORE_BITS, [ONE, *[(2.0**-12, 2.0**-13)] * 4], 0, 1 + ULP),
    # 1 - 1 leaves what is kept of the rest: 2^-24 on Ampere, and nothing of 2^-25; 2^-25 since Hopper, and nothing of
    # 2^-26.
    ("one bit below float32's last", "tf32", FEW_BITS, [ONE, (-1.0, 1.0), (2.0**-12, 2.0**-12), (2.0**-12, 2.0**-13)],
        0, 2.0**-24),
    ("not a third bit", "tf32", MORE_BITS, [ONE, (-1.0, 1.0), (2.0**-12, 2.0**-13), (2.0**-13, 2.0**-13)], 0, 2.0**-25),
    # In eight bits: 2 * 2 has exponent 2, and 13 bits are kept, down to 2^-11. Operands of e4m3 are at least 2^-6 if
    # normal.
    ("thirteen bits", "E4M3", (ADA, HOPPER), [(2.0, 2.0), (2.0**-5, 2.0**-6)], 0, 4 + 2.0**-11),
    ("thirteen bits", "E4M3", (ADA, HOPPER), [(2.0, 2.0), *[(2.0**-6, 2.0**-6)] * 15], 0, 4),
    ("thirteen bits", "E5M2", (ADA, HOPPER), [(2.0, 2.0), (2.0**-5, 2.0**-6), *[(2.0**-6, 2.0**-6)] * 8], 0,
        4 + 2.0**-11),
    # The sum has 13 bits behind its first: 8 + 2^-11 would have 14.
    ("a sum of thirteen bits", "E4M3", (ADA, HOPPER), [(2.0, 2.0), (2.0, 2.0), (2.0**-5, 2.0**-6)], 0, 8),
    ("a sum of thirteen bits", "E4M3", (ADA,), [*[NOTHING] * 16, (2.0, 2.0), (2.0, 2.0), (2.0**-5, 2.0**-6)], 0, 8),
    ("a sum so far of thirteen bits", "E4M3", (ADA, HOPPER), [ONE], 1 + 2.0**-14, 2),
    # Ada adds 16 at a time: sixteen times 2^-12 are 2^-8 before the 4 comes. Hopper adds all 32.
    ("steps of sixteen", "E4M3", (ADA,), [*[(2.0**-6, 2.0**-6)] * 16, (2.0, 2.0)], 0, 4 + 2.0**-8),
    ("a step of thirty-two", "E4M3", (HOPPER,), [*[(2.0**-6, 2.0**-6)] * 16, (2.0, 2.0)], 0, 4),
    # Datacenter Blackwell adds products by themselves, and their sum to the one so far: 64 has an ULP of 2^-17, half of
    # which is a tie.
    ("added after, ties to even", "E4M3", (DATACENTER,), [(2.0**-9, 2.0**-9)], 64 + 2.0**-17, 64 + 2.0**-16),
    ("added after, ties to even", "E4M3", (DATACENTER,), [(2.0**-9, 2.0**-9)], 64, 64),
    # Assumed of sm_120: one sum, cut off.
    ("cut off", "E4M3", (CONSUMER,), [(2.0**-9, 2.0**-9)], 64 + 2.0**-17, 64 + 2.0**-17),
    ("two bits below float32's last", "E5M2", (DATACENTER, CONSUMER), [ONE, *[(2.0**-12, 2.0**-13)] * 4], 0, 1 + ULP),
]  # fmt: skip
BY_TARGET = sorted({(target, kind) for _, kind, targets, *_ in CASES for target in targets})


def sums_of(target: str, kind: str) -> Sums:
    """The cases of a target and format, as a set of measurements."""
    own = [case for case in CASES if case[1] == kind and target in case[2]]
    dtype = np.dtype(FORMATS[kind][1])
    operands = np.zeros((2, len(own), measured_sums.ROW_BYTES // dtype.itemsize), dtype)
    for row, (_, _, _, pairs, _, _) in enumerate(own):
        operands[:, row, : len(pairs)] = np.array(pairs).T.astype(dtype)
    so_far, results = (np.array([case[place] for case in own], np.float32) for place in (4, 5))
    return Sums(target, kind, operands[0], operands[1], so_far, results)


@pytest.mark.parametrize(("target", "kind"), BY_TARGET)
def test_sums_are_what_the_rule_says(target: str, kind: str) -> None:
    own = sums_of(target, kind)
    for (name, *_, wanted), found in zip(
        (case for case in CASES if case[1] == kind and target in case[2]), own.emulated(target), strict=True
    ):
        assert found == np.float32(wanted), (name, float(found), wanted)


def test_a_target_is_refused_what_it_has_no_products_for() -> None:
    for target, kind, says in (
        (
            "sm_80",
            "E4M3",
            r"sm_80 has no tensor-core products of e4m3; f16 begins with sm_70, .*, e4m3 and e5m2 with sm_89",
        ),
        ("sm_75", "bf16", r"sm_75 has no tensor-core products of bf16; .* bf16 and tf32 with sm_80"),
        ("sm_70", "tf32", r"sm_70 has no tensor-core products of tf32"),
    ):
        with pytest.raises(SimtError, match=says):
            sums_of("sm_89", kind).emulated(target)


@pytest.mark.parametrize("target", ["sm_61", "hopper", "90"])
def test_targets_without_tensor_cores_are_refused(target: str) -> None:
    with pytest.raises(
        ValueError, match=rf"target='{target}'; sm_70 and later are accepted, such as 'sm_80' or 'sm_90a'"
    ):
        run_cuda('extern "C" __global__ void nothing() {}', "nothing", 1, 32, 0, [], target=target)


def write_set(path: Path, sums: Sums) -> None:
    def words(values: np.ndarray) -> str:
        return " ".join(f"{word:08x}" for word in np.atleast_1d(values).astype(np.float32).view(np.uint32))

    with gzip.open(path, "wt", encoding="ascii", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("abcd")
        writer.writerows([words(each) for each in row] for row in zip(sums.a, sums.b, sums.c, sums.d, strict=True))


def test_measurements_are_compared_to_the_last_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = sums_of("sm_80", "fp16")
    write_set(tmp_path / "A100_fp16.csv.gz", right)
    write_set(tmp_path / "L40S_E4M3.csv.gz", sums_of("sm_89", "E4M3"))
    write_set(tmp_path / "MI300_fp16.csv.gz", right)
    assert measured_sums.main(str(tmp_path)) == 0
    rows = len(right.d)
    assert capsys.readouterr().out.splitlines() == [
        f"A100_fp16    sm_80   {rows} of {rows} rows agree",
        "L40S_E4M3    sm_89   6 of 6 rows agree",
        "MI300_fp16   no rule is known",
        "2 of 2 sets agree in every row; 1 of unknown GPUs or formats",
    ]
    right.d.view(np.uint32)[3] ^= 1
    write_set(tmp_path / "A100_fp16.csv.gz", right)
    assert measured_sums.main(str(tmp_path)) == 1
    assert f"{rows - 1} of {rows} rows agree" in capsys.readouterr().out


def test_sums_that_were_measured_from_zero_are_added_to_nothing(tmp_path: Path) -> None:
    own = sums_of("sm_90a", "E4M3")
    write_set(tmp_path / "H100_E4M3.csv.gz", own)  # whose c was not given to the instruction
    assert (measured_sums.read_sums(tmp_path / "H100_E4M3.csv.gz").c == 0).all()
    write_set(tmp_path / "Ada_E4M3.csv.gz", own)
    assert (measured_sums.read_sums(tmp_path / "Ada_E4M3.csv.gz").c == own.c).all()
