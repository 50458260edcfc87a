"""What the records of precisions say; and that a precision is one record and its template, by one that only this
file knows.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen.bench import roster
from ksgen.build.build import CacheLayers, build
from ksgen.build.cache import Cache
from ksgen.build.toolchain import find_compiler
from ksgen.devices import find_device
from ksgen.emit import templates
from ksgen.emit.render import render, render_probe
from ksgen.errors import SpecError, ToolchainError
from ksgen.families import FAMILIES, Limits, cuda_limits, families_for, family_for, family_named, operand_of
from ksgen.measure.verify import measure, tolerance
from ksgen.paths import resource
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, KernelSpec, Precision, parse
from ksgen.spec.precision import BF16, OPERANDS, gradient_of, named_otherwise, on_tensor_cores, on_tiles, stored_types
from tests.measure.test_verify import needs_opencl
from tests.support import kernels
from tests.support.kernels import in_emulator, kernel_of

SM_80 = cuda_limits("sm_80")
ALL_TILES = Limits(2**18, is_cpu=True, tiles=tuple(OPERANDS))
# float32 arrays, multiplied as bfloat16
TOY = Precision("toy", "float32", 4, 2.0**-8, BF16, gradient="tf32", aliases=("trifle",))
TOY_BLOCKS = """{% block pack_weights__toy %}
DEVICE unsigned pack_weights(const float (&values)[2], const int) { return pack_bf16(values[0], values[1]); }
{% endblock %}
{% block set_operand_word__toy %}
template <int WORDS>
DEVICE void set_operand_word(unsigned (&x)[COMPONENTS][WORDS], const int word, const unsigned* words, const int first,
        const int second) {
    x[0][word] = pack_bf16(__uint_as_float(words[first]), __uint_as_float(words[second]));
}
{% endblock %}
"""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The record and its blocks of a dictionary, and nothing else."""
    shutil.copytree(resource("templates"), tmp_path / "templates")
    with (tmp_path / "templates" / "include" / "snippets" / "operands.j2").open("a") as operands:
        operands.write(TOY_BLOCKS)
    monkeypatch.setitem(PRECISIONS, TOY.name, TOY)
    monkeypatch.setattr(templates, "resource", lambda name: tmp_path / name)
    cached = (templates.environment, templates.template_digest, templates._chosen)
    for each in cached:
        each.cache_clear()
    yield TOY.name
    for each in cached:
        each.cache_clear()


# ---- the records


def test_every_record_is_found_by_its_own_name() -> None:
    assert all(name == each.name for name, each in PRECISIONS.items())
    assert all(name == each.name for name, each in OPERANDS.items())
    assert stored_types() == ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
    assert on_tensor_cores() == ("float16", "bfloat16", "tf32", "tf32x3", "fp16x3", "c64_tf32x3")
    assert on_tiles() == ("float16", "bfloat16", "tf32x3", "bf16x6")


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda each: each.name)
def test_a_record_agrees_with_itself(precision: Precision) -> None:
    assert precision.dtype in PRECISIONS
    assert precision.item_bytes == PRECISIONS[precision.dtype].item_bytes
    assert PRECISIONS[gradient_of(precision.name)].dtype == precision.dtype
    assert (precision.parts > 1) == (precision.products > 1)
    for each in (precision.coarse, precision.fine):
        assert (precision.parts > 1) == (each.few > 0) == (each.many > 0) == (each.least_in > 1)
    assert precision.promotion(has_fine_sums=True) == precision.fine
    assert precision.promotion(has_fine_sums=False) == precision.coarse
    assert precision.operand or precision.parts == 1
    assert bool(precision.of_parts) == (precision.is_complex and precision.operand is not None)
    if of_parts := PRECISIONS.get(precision.of_parts):  # an instruction takes half as many complex numbers
        assert (of_parts.parts, of_parts.products) == (precision.parts, precision.products)
        for own, theirs in ((precision.coarse, of_parts.coarse), (precision.fine, of_parts.fine)):
            assert (theirs.few, theirs.many, theirs.batch) == (2 * own.few, 2 * own.many, 2 * own.batch)
            assert theirs.few_in in (2 * own.few_in, 2 * own.few_in + 1)
    assert not precision.tiles or (precision.tiles.parts > 1) == (precision.tiles.products > 1) == (
        precision.item_bytes > precision.tiles.operand.item_bytes
    )
    for job in ("multiply", "chain", "gradient") if precision.families else ():
        factors = [Pattern(1, 512, 8, 1), Pattern(2, 48, 64, 4)][0 if job == "chain" else 1 :]
        assert any(
            FAMILIES[name].supports(KernelSpec(factors, precision.name, job=job), ALL_TILES)
            for name in precision.families
        )
    for alias in precision.aliases:
        assert alias not in PRECISIONS
        assert named_otherwise(alias) == precision.name


def test_a_gradient_may_have_products_of_another_precision() -> None:
    split = KernelSpec(Pattern(2, 48, 64, 4), "fp16x3")
    assert split.arithmetic.name == "fp16x3"
    assert replace(split, job="gradient").arithmetic.name == "tf32x3"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("job", ["multiply", "gradient"])
def test_the_operand_of_every_family_is_one_that_can_be_measured(precision: str, job: str) -> None:
    kernel = KernelSpec(Pattern(2, 48, 64, 4), precision, job=job)
    limits = cuda_limits("sm_90a")
    for constants in (each for family in families_for(kernel, limits) for each in family.defaults(kernel, limits)):
        operand = operand_of(kernel, constants)
        assert (operand in OPERANDS) == constants.on_tensor_cores
        assert operand is None or f"mma_{operand}(sums[e]" in render_probe(precision, "cuda", 256, operand).text


# ---- one from outside


def test_specs_and_messages_know_it(toy: str) -> None:
    spec = parse(f"defaults: {{precision: {toy}}}\nkernels: ['2,48,64,4']\n", "own.yaml")
    assert [kernel.name for kernel in spec.kernels] == ["ks_2x48x64x4_toy_bsf"]
    with pytest.raises(SpecError, match="did you mean toy"):
        KernelSpec(Pattern(2, 48, 64, 4), "trifle")
    assert tolerance(toy, 1000) == TOY.unit_roundoff
    assert roster.as_precise_as("float32") == ("float32", "tf32x3", "bf16x6")  # it is less precise


def test_families_serve_it_by_what_its_record_says(toy: str) -> None:
    kernel = KernelSpec(Pattern(2, 48, 64, 4), toy)
    assert family_for(kernel, SM_80).name == "mma"
    assert family_for(kernel, cuda_limits("sm_75")).name == "simt"
    assert (
        family_for(replace(kernel, job="gradient"), SM_80)
        .default(replace(kernel, job="gradient"), SM_80)
        .on_tensor_cores
    )
    assert [family.name for family in families_for(kernel, cuda_limits("sm_90a"))] == ["wgmma", "mma", "simt", "gemv"]
    # its operands are narrower
    assert not family_named("wgmma_registers").supports(replace(kernel, layout="bsl"), cuda_limits("sm_90a"))
    assert operand_of(kernel, FAMILIES["mma"].default(kernel, SM_80)) == "bf16"
    assert operand_of(kernel, FAMILIES["simt"].default(kernel, SM_80)) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_products_are_right_in_the_emulator(toy: str, layout: str) -> None:
    kernel = kernel_of((2, 37, 13, 5), toy, layout)
    constants = FAMILIES["mma"].default(kernel, SM_80)
    kernels.check(render(kernel, constants), 65, in_emulator())
    kernels.check_exact(render(kernel, constants), 65, in_emulator())


def test_its_gradient_is_that_of_the_precision_it_names(toy: str) -> None:
    kernel = replace(kernel_of((2, 37, 13, 5), toy, "bsf"), job="gradient")
    source, other = render(kernel), render(replace(kernel, precision="tf32"))
    assert (source.family, source.constants.on_tensor_cores) == ("gradient", True)
    assert source.text.splitlines()[5:] == [
        line.replace(other.entry, source.entry) for line in other.text.splitlines()[5:]
    ]


def test_it_compiles(toy: str, tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    source = render(kernel_of((2, 37, 13, 5), toy, "bsf"))
    binary = build(source.text, source.entry, "sm_80", compiler, CacheLayers((Cache(tmp_path / "cache"),)))
    assert binary.resources.spill_bytes == 0


@needs_opencl
def test_a_processor_multiplies_it_as_what_is_stored(toy: str) -> None:
    measured = measure(find_device("opencl"), kernel_of((2, 37, 13, 5), toy, "bsf"), 33, runs=0)
    assert measured.error <= tolerance("float32", 13)
