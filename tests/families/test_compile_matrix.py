"""What the compile matrix compiles, what it calls a violation, and what it prints. `make matrix` compiles it."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
from click.testing import CliRunner

from ksgen.build.build import Binary, Request, Resources
from ksgen.emit.render import template_of
from ksgen.errors import KsgenError, ToolchainError
from ksgen.families import FAMILIES, Limits, check
from ksgen.families.gpus import GPUS, gpu_of, target_of
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, KernelSpec, stratified
from tests import compile_matrix
from tests.compile_matrix import (
    FEW,
    MAIN_TARGETS,
    MANY,
    PROMISES,
    TARGETS,
    Outcome,
    faults,
    instructions,
    kernels,
    main,
    sampled,
    sources,
    table,
    violations,
)

SOURCE = sources("simt", "sm_90a", every=1000)[0]
ESTIMATE = FAMILIES["simt"].registers(SOURCE.kernel, SOURCE.constants)
GOOD = Resources(registers=ESTIMATE, shared_bytes=0, spill_bytes=0, stack_bytes=0)
SLACK = PROMISES["simt"].register_error


def outcome(target: str = "sm_90a", notes: str = "", **changes: int | None) -> Outcome:
    resources = replace(GOOD, **changes)
    return Outcome(SOURCE, target, Binary(b"", SOURCE.entry, target, resources, {"notes": notes} if notes else {}))


def test_every_family_has_its_promise() -> None:
    rows = {(family, kind) for family in FAMILIES.values() for kind in family.kinds}
    assert set(PROMISES) == {
        kind.entry_family or family.name for family, kind in rows if template_of(family, kind).endswith(".cu.j2")
    }
    assert set(TARGETS) == {target_of(*divmod(number, 10)) for number in GPUS} - {"sm_70", "sm_87"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "target", [each if each == "sm_86" else pytest.param(each, marks=pytest.mark.slow) for each in TARGETS]
)
def test_defaults_of_the_matrix_keep_the_rules(target: str) -> None:
    """One target in the quick ring, and a third of the kernels: to choose constants for all of them takes minutes."""
    for row in PROMISES:
        for source in sources(row, target, every=3):
            check(FAMILIES[source.family], source.kernel, source.constants, compile_matrix.cuda_limits(target))


def test_what_is_compiled() -> None:
    everywhere = set(kernels(False, "sm_86"))
    assert {(each.pattern, each.precision, each.layout) for each in everywhere} >= {
        (pattern, precision, layout) for pattern in stratified(FEW) for precision in PRECISIONS for layout in LAYOUTS
    }
    assert everywhere < set(kernels(False, "sm_80")) == set(kernels(True, "sm_86"))
    assert {each.pattern for each in kernels(False, "sm_90a")} >= set(stratified(MANY))
    assert {source.constants.copy for source in sources("simt", "sm_75")} == {"registers"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["simt", "mma"])
def test_kernels_of_slices_are_compiled_for_the_main_targets(family: str) -> None:
    kinds = {(precision, layout) for precision in PROMISES[family].precisions for layout in LAYOUTS}
    if family == "mma":  # serves float32 with x in eight bits alone
        kinds -= set(product(["float32"], LAYOUTS))
    for target in MAIN_TARGETS:
        found = [each.kernel for each in sources(family, target, every=1000) if each.kernel.is_strided]
        assert {(each.precision, each.layout) for each in found} == kinds
        assert all(each.epilogue.residual for each in found)
    assert not any(each.kernel.is_strided for each in sources(family, "sm_86", every=1000))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "precisions", "layouts"),
    [("mma", ("float32", "float16", "bfloat16"), LAYOUTS), ("wgmma_shared", ("float16", "bfloat16"), ("bsf",))],
)
def test_kernels_with_x_in_eight_bits_are_compiled(
    family: str, precisions: tuple[str, ...], layouts: tuple[str, ...]
) -> None:
    """Each precision and layout of the family has a kernel for both eight-bit floats."""
    found = [each.kernel for each in sources(family, "sm_90a", every=1000) if each.kernel.has_bytes_in]
    assert {(each.precision, each.layout, each.inputs) for each in found} == {
        *product(precisions, layouts, ("e4m3", "e5m2"))
    }


@pytest.mark.parametrize(
    "good",
    [
        outcome(),
        outcome(registers=ESTIMATE + SLACK),
        outcome(registers=ESTIMATE - SLACK),
        outcome(notes="ptxas info : (C7519) Potential Performance Loss: something else"),
    ],
)
def test_what_is_accepted(good: Outcome) -> None:
    assert list(violations(good)) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (outcome(spill_bytes=8, stack_bytes=4), "8 bytes spilled, 4 of local memory; none accepted"),
        (outcome(stack_bytes=64), "0 bytes spilled, 64 of local memory; none accepted"),
        (outcome(spill_bytes=None), "None bytes spilled, 0 of local memory; none accepted"),
        (
            outcome(registers=ESTIMATE + SLACK + 1),
            f"{ESTIMATE + SLACK + 1} registers; accepted: {ESTIMATE} as estimated, give or take {SLACK}",
        ),
        (
            outcome(registers=ESTIMATE - SLACK - 1),
            f"{ESTIMATE - SLACK - 1} registers; accepted: {ESTIMATE} as estimated, give or take {SLACK}",
        ),
        (outcome(registers=None), f"None registers; accepted: {ESTIMATE} as estimated, give or take {SLACK}"),
        (outcome(shared_bytes=16), "16 bytes of static shared memory; accepted: 0"),
        (
            outcome(notes="one\n(C7510) serialized\n(C7512) serialized"),
            "(C7510) serialized; 2 such notes, none accepted",
        ),
    ],
)
def test_each_violation_is_one_line(bad: Outcome, says: str) -> None:
    assert list(violations(bad)) == [f"{SOURCE.entry} for sm_90a: {says}"]


def test_an_estimate_is_of_its_target() -> None:
    """Plain kernels take more registers for some, and defaults leave them."""
    more = gpu_of("sm_100").more_registers
    assert more > 0
    assert list(violations(outcome("sm_100", registers=ESTIMATE + more + SLACK))) == []
    too_few = ESTIMATE + more - SLACK - 1
    accepted = f"{ESTIMATE + more} as estimated, give or take {SLACK}"
    assert list(violations(outcome("sm_100", registers=too_few))) == [
        f"{SOURCE.entry} for sm_100: {too_few} registers; accepted: {accepted}"
    ]


def test_what_does_not_compile_or_fit_a_block_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Outcome(SOURCE, "sm_90a", ToolchainError("refused\n  source: x.cu"))
    assert list(violations(refused)) == [f"{SOURCE.entry} for sm_90a: refused source: x.cu"]
    need = FAMILIES["simt"].shared_bytes(SOURCE.kernel, SOURCE.constants)
    monkeypatch.setattr(compile_matrix, "cuda_limits", lambda target: Limits(need - 1))
    assert list(violations(outcome())) == [
        f"{SOURCE.entry} for sm_90a: {need} bytes of shared memory; accepted: at most {need - 1}"
    ]
    monkeypatch.setattr(compile_matrix, "cuda_limits", lambda target: Limits(need))
    assert list(violations(outcome())) == []


def test_a_table_for_each_target() -> None:
    lines = list(
        table([outcome(), outcome("sm_80"), outcome(registers=ESTIMATE - 7, spill_bytes=12), outcome(notes="x")])
    )
    assert [line.split()[0] for line in lines if line] == ["sm_80", "simt", "sm_90a", "simt"]
    assert lines[-1].split()[:7] == ["simt", "float32", "bsf", "3", str(ESTIMATE), "-2.3", "-7"]
    assert lines[-1].split()[-3:] == ["0", "12", "1"]  # static, spilled, notes
    assert len({len(line) for line in lines if line}) == 1


@pytest.mark.slow
def test_a_fifth_has_all_precisions_and_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Request] = []
    monkeypatch.setattr(
        compile_matrix,
        "build_many",
        lambda jobs, *_, **__: compiled.extend(jobs) or [ToolchainError("x") for _ in jobs],
    )
    monkeypatch.setattr(compile_matrix, "find_compiler", lambda name: None)
    assert CliRunner().invoke(main, ["--target", "sm_86", "--every", "5"]).exit_code == 1
    for family in ("simt", "mma"):
        found = sources(family, "sm_86")
        kinds = {each.entry: (each.kernel.job, each.kernel.precision, each.kernel.layout) for each in found}
        taken = [kinds[each.entry] for each in compiled if each.entry in kinds]
        assert set(taken) == set(kinds.values())
        assert len(found) / 5 <= len(taken) <= len(found) / 3


def test_a_sample_has_all_there_is_in_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Request] = []
    monkeypatch.setattr(
        compile_matrix,
        "build_many",
        lambda jobs, *_, **__: compiled.extend(jobs) or [ToolchainError("x") for _ in jobs],
    )
    monkeypatch.setattr(compile_matrix, "find_compiler", lambda name: None)
    assert CliRunner().invoke(main, ["--target", "sm_80", "--family", "simt", "--sample"]).exit_code == 1
    found, taken = (
        [each.kernel for each in sources("simt", "sm_80", **how)] for how in ({"every": 1000}, {"is_sample": True})
    )
    assert len(compiled) == len(taken) <= len(found) // 2
    for name in ("job", "precision", "stride", "weights", "inputs"):
        assert {(each.layout, getattr(each, name)) for each in taken} == {
            (each.layout, getattr(each, name)) for each in found
        }, name


def test_a_sample_goes_on_until_one_is_served_and_asks_no_further() -> None:
    asked: list[KernelSpec] = []

    def supports(kernel: KernelSpec) -> bool:
        asked.append(kernel)
        return kernel.pattern.a > 1

    wanted = [KernelSpec(Pattern(a, 8, 8, 1), "float32", layout) for a in (1, 2, 3) for layout in LAYOUTS]
    assert [(each.pattern.a, each.layout) for each in sampled(wanted, supports)] == [(2, layout) for layout in LAYOUTS]
    assert asked == wanted[:4]


def test_exit_status_and_lines_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(spills: int) -> list[str]:
        def build_many(jobs: Iterable[Request], *_: object, **__: object) -> list[Binary | KsgenError]:
            made = [FAMILIES["simt"].registers(source.kernel, source.constants) for source in sources("simt", "sm_75")]
            found = [
                Binary(b"", job.entry, job.target, Resources(each, 0, 0, 0))
                for job, each in zip(jobs, made, strict=True)
            ]
            return [replace(found[0], resources=replace(found[0].resources, spill_bytes=spills)), *found[1:]]

        monkeypatch.setattr(compile_matrix, "build_many", build_many)
        monkeypatch.setattr(compile_matrix, "find_compiler", lambda name: None)
        done = CliRunner().invoke(main, ["--target", "sm_75", "--family", "simt"])
        assert done.exit_code == bool(spills)
        return done.output.splitlines()

    assert build(0)[-1] == f"{len(sources('simt', 'sm_75'))} binaries, 0 violations"
    assert build(24)[-1].endswith(" for sm_75: 24 bytes spilled, 0 of local memory; none accepted")


def listing(loop: str, entry: str = SOURCE.entry) -> str:
    """An entry with a loop of ten products and what else is given."""
    words = ["MOV R1, R2 ;", *["FFMA R1, R2, R3, R1 ;"] * 10, *loop.splitlines(), "@P0 BRA 0x10 ;", "EXIT ;"]
    lines = [
        f"        /*{16 * number:04x}*/                   {each}  /* 0x0000000000017b82 */"
        for number, each in enumerate(words)
    ]
    return "\n".join([f"\t\tFunction : {entry}", *lines, ""])


FEWEST = KernelSpec(stratified(FEW)[0], "float32", "bsf")
BFLOAT16 = KernelSpec(stratified(FEW)[0], "bfloat16", "bsf")


@pytest.mark.parametrize(
    ("kernel", "loop", "says"),
    [
        (FEWEST, "LDS.128 R4, [R5] ;", None),
        (FEWEST, "IADD3 R4, R5, 0x7fff, R6 ;", None),  # which rounds nothing in float32
        (FEWEST, "MEMBAR.ALL.CTA ;", None),
        (FEWEST, "MEMBAR.ALL.GPU ;", "has MEMBAR.ALL.GPU; no fence of the whole GPU accepted"),
        (FEWEST, "CGAERRBAR ;", "has CGAERRBAR; no fence of the whole GPU accepted"),
        (FEWEST, "STL [R1], R2 ;", "has 1 accesses to local memory; none accepted"),
        (BFLOAT16, "IADD3 R4, R5, 0x7fff, R6 ;", "rounds 1 values to bfloat16 by additions; cvt.rn.bf16 accepted"),
        (
            FEWEST,
            "IADD3 R4, R5, R6, R7 ;\n" * 9,
            "2.00 instructions per product in the main loop; accepted: the cost model's 1.09, by a factor of at most "
            "1.25",
        ),
        (
            FEWEST,
            "IADD3 R4, R5, R6, R7 ;\n" * 9,
            "multiply-adds are 0.500 of the main loop's instructions; accepted: at least 0.83",
        ),
        (replace(FEWEST, stride="any"), "IADD3 R4, R5, R6, R7 ;\n" * 9, None),
    ],
)
def test_what_machine_code_may_not_have(
    kernel: KernelSpec, loop: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Outcome(replace(SOURCE, kernel=kernel), "sm_90a", outcome().result)
    monkeypatch.setattr(compile_matrix, "listing_of", lambda _: listing(loop))
    lines = list(faults(found))
    assert bool(lines) == (says is not None)
    assert says is None or any(says in line for line in lines)


def test_a_kernel_that_was_not_read_has_no_faults() -> None:
    assert list(faults(outcome())) == []


def test_a_table_of_main_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compile_matrix, "listing_of", lambda _: listing("LDS.128 R4, [R5] ;\nBAR.SYNC 0x0 ;\nLDGSTS.E [R4], [R2.64] ;")
    )
    head, row = instructions([outcome()])
    found = dict(zip(head.split(), row.split(), strict=True))
    kinds = {"shared": "0.10", "global": "0.10", "rounding": "0.00", "waiting": "0.10", "addresses": "0.10"}
    assert {name: found[name] for name in kinds} == kinds
    own = {
        "target": "sm_90a",
        "pattern": str(SOURCE.kernel.pattern),
        "family": "simt",
        "precision": "float32",
        "layout": "bsf",
    }
    assert {name: found[name] for name in own} == own
    assert found["products"] == "10"
    assert found["bound"] in ("moving", "inside")
    assert 0 < float(found["share"]) <= 1
