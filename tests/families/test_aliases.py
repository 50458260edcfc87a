"""Earlier names of families and of their constants: a caller or a file that gives one means the present one."""

import json
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ksgen.bench.rows import read_rows, write_csv
from ksgen.emit.render import render
from ksgen.errors import ConstantsError, KsgenError, KsgenWarning
from ksgen.families import ALIASES, FAMILIES, Limits, cuda_limits, family_named, family_of, present_names
from ksgen.families.amx.chain import AmxChainConstants
from ksgen.families.expected import expected_us
from ksgen.families.mma.chain import MmaChainConstants
from ksgen.families.simt.shape import SimtConstants
from ksgen.families.tiles import read_constants
from ksgen.families.vector.chain import VectorChainConstants
from ksgen.launch.choice import choice_by_name
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN
from ksgen.tuning.job import Job
from ksgen.tuning.model import Machine
from ksgen.tuning.pool import list_space
from ksgen.tuning.trials import Trial, TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner
from ksgen.wisdom import Entry, Wisdom, dump, parse_export
from tests.support.bench_rows import row
from tests.support.fake_gpu import FakeGpu
from tests.support.program import ksgen_program
from tests.support.tuning_search import TimedEngine

CPU = Limits(
    2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, async_copies=False, tiles=("bf16", "f16")
)
GPU = cuda_limits("sm_90a")
FACTOR, LAST = Pattern(1, 64, 48, 2), Pattern(2, 24, 64, 1)
KERNELS = {
    "multiply": KernelSpec(FACTOR, "bfloat16"),
    CHAIN: KernelSpec((FACTOR, LAST), "bfloat16"),
    "gradient": KernelSpec(FACTOR, "bfloat16", job="gradient"),
}
NARROW = (Pattern(2, 48, 64, 1), FACTOR)  # the second factor's a divides the first one's
OF_ALIASES = {
    "few": KERNELS["multiply"],
    "few_chain": KernelSpec(NARROW, "bfloat16"),
    "few_group": KernelSpec((NARROW, NARROW[:1]), "bfloat16"),
    "simt_chain": replace(KERNELS[CHAIN], precision="float32"),
    "wgmma_shared": replace(KERNELS["multiply"], layout="bsl"),
    "wgmma_registers": KERNELS["multiply"],
    "wgmma_permuted": KERNELS["multiply"],
}
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")


def kernel_of(alias: str) -> KernelSpec:
    return OF_ALIASES.get(alias, KERNELS["gradient" if "gradient" in alias else CHAIN])


def limits_of(alias: str) -> Limits:
    return CPU if family_named(alias).name in ("vector", "amx", "cpu_gradient") else GPU


def entry_of(alias: str) -> Entry:
    kernel = kernel_of(alias)
    return Entry(
        kernel,
        40,
        family_named(alias).name,
        family_named(alias).default(kernel, limits_of(alias), 40),
        {"median_us": 1.5},
    )


def deprecation_of(alias: str) -> str:
    return f"kernel family {alias} is deprecated and will be removed; use {family_named(alias).name}"


def test_no_alias_is_the_name_of_a_family_and_each_means_one() -> None:
    assert not set(ALIASES) & set(FAMILIES)
    assert all(family_named(name).name in FAMILIES for name in ALIASES)
    assert present_names("vector_chain, mma_chain, mma, vector, other") == "vector, mma, other"
    with pytest.raises(ConstantsError, match=r"unknown kernel family 'vector_chains'; known: amx, vector, "):
        family_named("vector_chains")


@pytest.mark.parametrize("alias", ALIASES)
def test_a_family_asked_for_by_an_earlier_name_is_chosen_by_its_present_one(alias: str) -> None:
    """A name that stands for one variant does not warn, because no other name selects it."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = choice_by_name(alias, kernel_of(alias), 40, limits_of(alias))
    is_whole = alias.startswith("few") or alias.endswith("_chain")
    assert [str(each.message) for each in warned] == [deprecation_of(alias)] * is_whole
    assert all(issubclass(each.category, DeprecationWarning) for each in warned)
    assert found.family == family_named(alias).name
    assert family_of(found.constants) is FAMILIES[found.family]
    assert alias in (found.constants.entry_family, found.family)


def test_each_place_where_a_user_names_a_family_warns_of_an_earlier_name(tmp_path: Path) -> None:
    kernel, store = kernel_of("few"), TrialStore(tmp_path / "trials.sqlite")
    engine = TimedEngine(FakeGpu(), lambda *_: 1.0)
    calls = (
        lambda name: render(kernel, family=name),
        lambda name: Tuner(engine, store, SearchOptions(family=name)),
        lambda name: choice_by_name(name, kernel, 40, GPU),
    )
    for call in calls:
        with pytest.warns(KsgenWarning, match=deprecation_of("few")) as warned:
            call("few")
        assert (len(warned), warned[0].filename) == (1, __file__)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call("gemv")


def test_the_command_line_shows_that_a_familys_name_is_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("kernels: [{pattern: [1,64,48,2], precision: bfloat16}]\n")
    for name, lines in (("few", [f"ksgen: {deprecation_of('few')}"]), ("gemv", [])):
        done = ksgen_program("emit", "small.yaml", "--family", name, cwd=tmp_path)
        assert (done.returncode, done.stderr.splitlines()) == (0, lines)


@pytest.mark.parametrize("alias", ALIASES)
def test_wisdom_of_an_earlier_name_is_read_and_written_by_the_present_one(alias: str) -> None:
    entry = entry_of(alias)
    row = json.loads(text := dump("a device", Wisdom([entry])))["entries"][0]
    assert (row["family"], row["constants"]) == (family_named(alias).name, asdict(entry.constants))
    earlier = text.replace(f'"family": "{entry.family}"', f'"family": "{alias}"')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_export(earlier, "a file") == {"a device": [entry]}


@pytest.mark.parametrize("alias", ALIASES)
def test_trials_of_an_earlier_name_are_read(alias: str, tmp_path: Path) -> None:
    entry = entry_of(alias)
    trial = Trial(entry.kernel, 40, "a device", alias, entry.constants, "01234567", "measured", median_us=1.5)
    store = TrialStore(tmp_path / "trials.sqlite")
    store.add(trial)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TrialStore(tmp_path / "trials.sqlite").trials() == [replace(trial, family=entry.family)]


def test_results_of_an_earlier_name_are_read(tmp_path: Path) -> None:
    write_csv([row(family="amx_chain"), row(family="vector_chain, mma, vector")], tmp_path / "rows.csv")
    assert [each.family for each in read_rows(tmp_path / "rows.csv")] == ["amx", "vector, mma"]


@pytest.mark.parametrize("alias", ["vector_chain", "amx_chain"])
def test_wisdom_with_earlier_names_of_constants_is_read(alias: str) -> None:
    entry = entry_of(alias)
    text = dump("a device", Wisdom([entry]))
    assert parse_export(text.replace('"streaming": ', '"past": '), "a file") == {"a device": [entry]}
    assert '"past"' not in text
    with pytest.raises(
        ConstantsError, match=r"vector constants are along, .*, streaming, pairs; .*; got past, streaming"
    ):
        family_named("vector").constants({"past": 1, "streaming": 1})


@dataclass(frozen=True)
class RenamedConstants(SimtConstants):
    entry_family: ClassVar[str] = "plain"
    more: int = 0


def test_a_family_reads_the_constants_that_have_the_names_given() -> None:
    values: dict[str, Any] = vars(CONSTANTS)
    kinds = (SimtConstants, RenamedConstants)
    assert read_constants("simt", kinds, values) == CONSTANTS
    assert read_constants("simt", kinds, values | {"more": 1}) == RenamedConstants(*values.values(), more=1)
    with pytest.raises(
        ConstantsError, match=r"simt constants are tile_batch, .*, copy; or tile_batch, .*, copy, more; got less"
    ):
        read_constants("simt", kinds, {"less": 1})


ENTRIES = {  # of the time when these families had these names
    "vector_chain": "ks_1x64x48x2_2x24x64x1_bfloat16_bsf_65fc0b30",
    "amx_chain": "ks_1x64x48x2_2x24x64x1_bfloat16_bsf_db6c997e",
    "few": "ks_1x64x48x2_bfloat16_bsf_cc986d89",
    "few_chain": "ks_2x48x64x1_1x64x48x2_bfloat16_bsf_ea88a312",
    "few_group": "ks_2x48x64x1_1x64x48x2_and_2x48x64x1_bfloat16_bsf_33324dc9",
    "mma_chain": "ks_1x64x48x2_2x24x64x1_bfloat16_bsf_4ac62e8f",
    "simt_chain": "ks_1x64x48x2_2x24x64x1_float32_bsf_80283b09",
    "wgmma_shared": "ks_1x64x48x2_bfloat16_bsl_7044759a",
    "wgmma_registers": "ks_1x64x48x2_bfloat16_bsf_b78935c8",
    "wgmma_permuted": "ks_1x64x48x2_bfloat16_bsf_0fa5acd5",
    "gradient_mma": "ks_1x64x48x2_bfloat16_bsf_gradient",
    "vector_gradient": "ks_1x64x48x2_bfloat16_bsf_gradient_3f9234ae",
    "amx_gradient": "ks_1x64x48x2_bfloat16_bsf_gradient_7116e612",
}
# constants of that time where the default has changed since
EARLIER = {
    "amx_chain": AmxChainConstants(64, "64 1 2, 32 0 2", 0),
    "mma_chain": MmaChainConstants(96, "64 16 2 4 1 1 0, 32 32 1 4 1 1 0", 4, 3, 0),
    "vector_chain": VectorChainConstants(96, "outputs 16 6 4 1, batch 16 12 2 1", 0, 0),
}


@pytest.mark.parametrize(("alias", "entry"), ENTRIES.items())
def test_entries_keep_the_name_that_they_had_under_an_earlier_family(alias: str, entry: str) -> None:
    assert set(ENTRIES) == set(ALIASES)
    kernel, limits = kernel_of(alias), limits_of(alias)
    dialect = "opencl" if limits.is_cpu else "cuda"
    constants = EARLIER.get(alias) or family_named(alias).default(kernel, limits, 4096)
    assert render(kernel, constants, dialect=dialect).entry == entry


@pytest.mark.parametrize(
    "alias", ["amx_gradient", "vector_gradient", "gradient_mma", "wgmma_registers", "wgmma_permuted"]
)
def test_a_search_by_an_earlier_name_has_the_constants_that_it_meant(alias: str) -> None:
    family, job = family_named(alias).name, Job(kernel_of(alias), 40)
    machine = Machine("", limits_of(alias), 2, {family: None})  # type: ignore[dict-item]
    listed = list_space(job, machine, alias)
    assert {each.family for each in listed} == {family}
    assert {type(each.constants) for each in listed} == {type(entry_of(alias).constants)}
    assert len(list_space(job, machine)) > len(listed)


def test_a_family_of_several_variants_has_a_default_of_each_and_takes_the_fastest() -> None:
    family, kernel = FAMILIES["wgmma"], KERNELS["multiply"]
    each = family.defaults(kernel, GPU, 4096)
    assert [own.x_from for own in each] == ["registers", "permuted"]
    assert family.default(kernel, GPU, 4096) == min(each, key=lambda own: expected_us(family, kernel, GPU, 4096, own))
    assert [family_named(f"wgmma_{own.x_from}").default(kernel, GPU, 4096) for own in each] == each


@pytest.mark.parametrize("alias", ["gradient_mma", "wgmma_registers"])
def test_what_a_device_cannot_run_has_no_default(alias: str) -> None:
    kernel = kernel_of(alias)
    with pytest.raises(
        ConstantsError,
        match=rf"^{kernel.name}: not supported by ({family_named(alias).name}) on this device; \1 is for: ",
    ):
        family_named(alias).default(kernel, cuda_limits("sm_75"))


def test_wisdom_from_before_x_from_was_a_constant_is_read() -> None:
    entry = entry_of("wgmma_permuted")
    text = dump("a device", Wisdom([entry])).replace(', "x_from": "permuted"', "")
    assert "x_from" not in text
    assert parse_export(text.replace('"family": "wgmma"', '"family": "wgmma_permuted"'), "a file") == {
        "a device": [entry]
    }
    with pytest.raises(KsgenError, match=r"wgmma constant x_from=None; accepted: shared, registers, permuted"):
        parse_export(text, "a file")
    with pytest.raises(ConstantsError, match=r"wgmma constant x_from='memory'; accepted: shared, registers, permuted"):
        FAMILIES["wgmma"].constants(asdict(entry.constants) | {"x_from": "memory"})
