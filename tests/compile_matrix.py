"""The compile matrix: what every kernel family takes by default is what its resource model said, on every target. Runs
no kernel.

    python -m tests.compile_matrix [--target sm_90a]... [--family simt]... [--compiler nvrtc] [--every 5] [--sample]
                                   [--everything] [--instructions]

For every target of a family: the kernels of specs/vit.yaml, and the first FEW stratified patterns in every precision
and layout; for families of chains, the layers of both models instead. For sm_80 and sm_90a also: the first SLICED for
slices, with a residual, which has a pitch too, and a pattern of exchanged inputs, of exchanged outputs, and of weights
tied along a and d; for them and sm_89, those with weights in eight bits, where they have texts of their own, and with X
so the first SLICED that the family serves; and, where a family says so, the first MANY in float32, float16 and tf32x3.
sm_75, sm_86 and sm_89 add little: sm_86 and sm_89 gave the same registers for every kernel, and sm_75 went no further
from the estimate with forty patterns than with ten. sm_103, sm_110 and sm_121 are left out. `--everything` takes all
targets, and MANY everywhere; `--every 5` takes the first of each precision and layout, for each way to store weights, X
and slices, XX

Machine code is read where cuobjdump and nvdisasm are installed. `--instructions` prints the main loop of each kernel,
as instructions per product by kind, next to what bounds the kernel by the cost model and its share of the floor.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice, product
from statistics import mean
from typing import Any

import click

from ksgen.build.build import Request, build_many
from ksgen.build.request import Binary
from ksgen.build.toolchain import find_compiler
from ksgen.commands.common import progress
from ksgen.emit.render import Source, render
from ksgen.errors import KsgenError
from ksgen.families import FAMILIES, cuda_limits, family_named
from ksgen.families.expected import LARGE, gpu_us, multiplying_warps, speed_of, terms_of
from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.plain import GradientConstants
from ksgen.families.mma.shape import MmaConstants, MmaTiling
from ksgen.families.slots import in_loop, issued_by
from ksgen.paths import resource
from ksgen.pattern import Pattern
from ksgen.spec import JOBS, LAYOUTS, PRECISIONS, STORAGES, Epilogue, KernelSpec, load, stratified
from ksgen.spec.kernel import activations_of
from ksgen.spec.storage import STORED as STORED_WEIGHTS
from ksgen.spec.storage import x_precisions
from tests.rings import covering
from tests.support import sass
from tests.support.exchange import SINGLE_INPUTS, SINGLE_OUTPUTS

FEW, MANY, SLICED = 6, 40, 2
SAMPLE = Pattern(1, 768, 192, 2)  # d = 2, everything even: no access is narrow for want of alignment
SAMPLE_OF_TIES, SAMPLE_OF_EXCHANGES = Pattern(3, 64, 48, 4), Pattern.parse("j.l.i@3,64,48,4@j.k.i")
BLACKWELL = ("sm_100", "sm_103", "sm_110", "sm_120", "sm_121")  # no wgmma: what serves there is what serves on sm_80
SELDOM = ("sm_103", "sm_110", "sm_121")  # like sm_100 and sm_120; compiled only if named, or with --everything
MAIN_TARGETS = ("sm_80", "sm_90a")
MAIN_PRECISIONS = ("float32", "float16", "tf32x3")
SERIALISED = ("C7510", "C7511", "C7512")  # ptxas waits for each wgmma before the next, for one reason or another


@dataclass(frozen=True)
class Promise:
    """What a family says of its defaults."""

    targets: tuple[str, ...]
    register_error: int  # how far its estimate is from ptxas, at most
    precisions: tuple[str, ...]  # those whose texts differ
    is_broad: bool = True  # takes MANY patterns on the main targets
    static_shared_bytes: int = 0  # the rest is asked for at the launch
    batches: tuple[int | None, ...] = (None,)  # that its defaults are chosen for, by turns
    stored: tuple[str, ...] = ()  # how weights are stored, where kernels read them so; none where those are alike
    inputs: tuple[str, ...] = ()  # how X is stored, where it is in eight bits as the weights are


STORED = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
MULTIPLIED = ("float16", "bfloat16", "tf32", "tf32x3", "fp16x3", "c64_tf32x3")
PROMISES = {  # by the names that families had before one took any number of factors
    "wgmma_shared": Promise(("sm_90a",), register_error=0, precisions=("float16", "bfloat16"), inputs=("e4m3", "e5m2")),
    "wgmma_registers": Promise(("sm_90a",), register_error=0, precisions=MULTIPLIED),
    "wgmma_permuted": Promise(("sm_90a",), register_error=0, precisions=("float16", "bfloat16"), is_broad=False),
    # by up to 63 where tf32x3's sums are promoted, in 3 of some 770 kernels
    "mma": Promise(
        ("sm_80", "sm_86", "sm_89", "sm_90a", *BLACKWELL),
        register_error=64,
        precisions=("float32", *MULTIPLIED),
        inputs=("e4m3", "e5m2"),
    ),
    # by up to 42, in float64: on sm_103 and sm_110 fewer, on sm_86 and sm_89 40 more; in other precisions by up to 32
    # by up to 66 in a group of three layers of two factors, in bsl
    "mma_chain": Promise(("sm_80", "sm_90a"), register_error=72, precisions=MULTIPLIED),
    "simt_chain": Promise(("sm_80", "sm_90a"), register_error=42, precisions=("float32", "float64")),
    # by up to 80 where the loop of a block of two warps is unrolled, on sm_120; elsewhere by up to 43
    "simt": Promise(
        ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", *BLACKWELL),
        register_error=84,
        precisions=STORED,
        stored=("e4m3",),
        inputs=("e4m3",),
    ),
    # where c is not known to ptxas to be few it reads more of X ahead, or less, in some 5 of 320 kernels by more than
    # 64 of sm_89, whose conversions it has, weights in eight bits are what differs
    "few": Promise(
        ("sm_80", "sm_89", "sm_90a"),
        register_error=80,
        precisions=STORED,
        batches=(1, 8, None),
        stored=tuple(STORED_WEIGHTS),
        inputs=tuple(STORAGES),
    ),
    # by up to 100 with X in eight bits, of which ptxas widens the pieces of several steps at a time
    "few_chain": Promise(
        ("sm_80", "sm_90a"),
        register_error=104,
        precisions=("float32", "float64", "float16", "bfloat16"),
        batches=(1, 8, None),
        stored=("bfloat16",),
        inputs=tuple(STORAGES),
    ),
    # two layers of two factors and one of one factor, with their sources side by side
    "few_group": Promise(
        ("sm_80", "sm_90a"),
        register_error=104,
        precisions=("float32", "float64", "float16", "bfloat16"),
        batches=(1, 8, None),
        inputs=tuple(STORAGES),
    ),
    "gradient_mma": Promise(
        ("sm_80", "sm_90a"),
        register_error=32,
        precisions=("float16", "bfloat16", "tf32", "tf32x3", "c64_tf32x3"),
        is_broad=False,
    ),
    "gradient": Promise(("sm_75", "sm_80", "sm_90a"), register_error=32, precisions=STORED, is_broad=False),
}
# Instructions of a main loop over those that the cost model's table has for its constants, and the other way round: the
# most that SAMPLE and the first FEW stratified patterns had on the main targets, and a little more. A smaller figure is
# progress: write it down.
OFF = 1.25
# Rounds of copies differ in number, and those of unaligned rows in length.
OFF_OF = {("mma", precision, "bsf"): 1.5 for precision in ("bfloat16", "float16", "tf32x3")}
# Least share of multiply-adds in the main loop of `simt` in float32 for sm_90a, over the first COUNTED stratified
# patterns.
COUNTED, SHARES = 24, {"bsf": 0.83, "bsl": 0.88}
TARGETS = sorted(
    {target for promise in PROMISES.values() for target in promise.targets}, key=lambda target: (len(target), target)
)


@dataclass(frozen=True)
class Outcome:
    """One kernel for one target: the binary, or why there is none."""

    source: Source
    target: str
    result: Binary | KsgenError

    @property
    def row(self) -> str:
        """Key in PROMISES."""
        return self.source.constants.entry_family or self.source.family

    @property
    def group(self) -> tuple[str, str, str, str]:
        return self.target, self.row, self.source.kernel.precision, self.source.kernel.layout

    @property
    def estimate(self) -> int:
        return FAMILIES[self.source.family].registers(self.source.kernel, self.source.constants, self.target)

    @property
    def launch_bytes(self) -> int:
        """Shared memory that a launch asks for."""
        return FAMILIES[self.source.family].geometry(self.source.kernel, self.source.constants, 1).shared_bytes


def kernels(everything: bool, target: str, is_broad: bool = True) -> list[KernelSpec]:
    found = list(load(resource("specs") / "vit.yaml").kernels)
    found += [KernelSpec(*each) for each in product(stratified(FEW), PRECISIONS, LAYOUTS)]
    if everything or (is_broad and target in MAIN_TARGETS):
        found += [KernelSpec(*each) for each in product(stratified(MANY), MAIN_PRECISIONS, LAYOUTS)]
    if everything or target in MAIN_TARGETS:
        exchanged = (SAMPLE_OF_EXCHANGES, *(Pattern.parse(each) for each in (SINGLE_INPUTS, SINGLE_OUTPUTS)))
        tied = SAMPLE_OF_EXCHANGES, SAMPLE_OF_TIES
        found += [KernelSpec(*each, tied=("ad",)) for each in product(tied, PRECISIONS, LAYOUTS)]
        found += [KernelSpec(*each) for each in product(exchanged, PRECISIONS, LAYOUTS)]
        residual = Epilogue(residual=True)
        found += [
            KernelSpec(*each, residual, stride="any") for each in product(stratified(SLICED), PRECISIONS, LAYOUTS)
        ]
    return list(dict.fromkeys(found))


def chains(precisions: Iterable[str]) -> list[KernelSpec]:
    """The layers of both models, plain; one with an epilogue, on slices; and groups of the first, as q, k and v."""
    layers = dict.fromkeys(
        chain.factors for name in ("vit", "gpt2") for chain in load(resource("specs") / f"{name}.yaml").layers.values()
    )
    found = [
        KernelSpec(factors, precision, layout) for factors, precision, layout in product(layers, precisions, LAYOUTS)
    ]
    first = found[: len(tuple(precisions)) * len(LAYOUTS)]
    more = [Epilogue(True, "gelu" if "gelu" in activations_of(each.precision) else "none", True) for each in first]
    ended = [replace(each, epilogue=epilogue, stride="any") for each, epilogue in zip(first, more, strict=True)]
    return [*found, *ended, *map(_group, first)]


def _group(kernel: KernelSpec) -> KernelSpec:
    """The layer twice, and its first factor alone."""
    (chain,) = kernel.chains
    return replace(kernel, chains=(chain, chain, (chain[0],)), epilogue=Epilogue(bias=True), stride="any")


def sources(
    family: str, target: str, everything: bool = False, every: int = 1, is_sample: bool = False
) -> list[Source]:
    chosen: Any = Gradient(GradientConstants) if family == "gradient" else family_named(family)
    promise, limits = PROMISES[family], cuda_limits(target)

    def serves(kernel: KernelSpec) -> bool:
        is_read = not kernel.tied or chosen.reads_ties(kernel, None)  # else a kernel without ties takes its place
        return bool(is_read and chosen.supports(kernel, limits))

    def rendered(wanted: Iterable[KernelSpec]) -> list[Source]:
        taken = sampled(wanted, serves) if is_sample else thinned(filter(serves, wanted), every)
        return [
            render(kernel, chosen.default(kernel, limits, batch), family=family)
            for kernel, batch in zip(taken, cycle(promise.batches), strict=False)
        ]

    wanted = [
        kernel for kernel in kernels(everything, target, promise.is_broad) if kernel.precision in promise.precisions
    ]
    if family.endswith(("_chain", "_group")):
        wanted = [
            each
            for each in chains(promise.precisions)
            if not family.startswith("few") or each.is_group == (family == "few_group")
        ]
        plain = [kernel for kernel in wanted if kernel.precision in x_precisions()]
        wanted += [replace(kernel, weights=storage, inputs=storage) for storage in promise.inputs for kernel in plain]
        wanted += [
            replace(each, weights=storage)
            for storage in promise.stored
            for each in plain
            if each.precision in x_precisions(storage)
        ]
        return rendered(wanted)
    jobs = [
        replace(kernel, job=job)
        for job in JOBS
        for kernel in wanted
        if job == "multiply" or not (kernel.is_strided or kernel.tied)
    ]
    if everything or target in (*MAIN_TARGETS, "sm_89", "sm_120"):  # the last two multiply eight bits directly
        many = product(stratified(SLICED), set(x_precisions()) & set(promise.precisions), LAYOUTS, promise.stored)
        jobs += [
            KernelSpec(*each, weights=weights) for *each, weights in sorted(many) if each[1] in x_precisions(weights)
        ]
        for storage, precision, layout in product(
            promise.inputs, sorted(set(x_precisions()) & set(promise.precisions)), LAYOUTS
        ):
            many = (KernelSpec(each, precision, layout, weights=storage, inputs=storage) for each in stratified(MANY))
            jobs += islice((each for each in many if chosen.supports(each, limits)), SLICED)
    return rendered(jobs)


def sampled(wanted: Iterable[KernelSpec], supports: Callable[[KernelSpec], bool]) -> Iterator[KernelSpec]:
    """A few kernels with all layouts, jobs, precisions, strides and storages, and with ties and exchanges."""

    def values_of(kernel: KernelSpec) -> set[object]:
        own = {(name, getattr(kernel, name)) for name in ("job", "precision", "stride", "weights", "inputs")}
        return {(kernel.layout, *each) for each in (*own, ("group", kernel.is_group), *kinds_of(kernel))}

    return covering({kernel: values_of(kernel) for kernel in wanted}, supports)


def kinds_of(kernel: KernelSpec) -> list[tuple[str, bool]]:
    """Whether a kernel has ties, exchanged inputs and exchanged outputs, by name."""
    has = {
        "tie": kernel.tied,
        "exchanged inputs": kernel.reads_exchanged,
        "exchanged outputs": kernel.pattern.store,
    }
    return [(name, bool(each)) for name, each in has.items()]


def thinned(wanted: Iterable[KernelSpec], every: int) -> list[KernelSpec]:
    """Each so many-th kernel of a job, stride, precision and layout, with or without ties and exchanges."""
    seen: Counter[tuple[object, ...]] = Counter()
    found = []
    for kernel in wanted:
        group = (
            kernel.job, kernel.stride, kernel.precision, kernel.layout, kernel.weights, kernel.inputs, *kinds_of(kernel)
        )  # fmt: skip
        if seen[group] % every == 0:
            found.append(kernel)
        seen[group] += 1
    return found


def violations(outcome: Outcome) -> Iterator[str]:
    """A line for each thing that is not as promised."""
    name, promise, result = f"{outcome.source.entry} for {outcome.target}", PROMISES[outcome.row], outcome.result
    if isinstance(result, KsgenError):
        yield f"{name}: {' '.join(str(result).split())}"
        return
    found, limit = result.resources, cuda_limits(outcome.target).shared_bytes
    if found.spill_bytes != 0 or found.stack_bytes != 0:
        yield f"{name}: {found.spill_bytes} bytes spilled, {found.stack_bytes} of local memory; none accepted"
    if found.registers is None or abs(found.registers - outcome.estimate) > promise.register_error:
        yield (
            f"{name}: {found.registers} registers; accepted: {outcome.estimate} as estimated, give or take "
            f"{promise.register_error}"
        )
    if found.shared_bytes != promise.static_shared_bytes:
        yield f"{name}: {found.shared_bytes} bytes of static shared memory; accepted: {promise.static_shared_bytes}"
    if (need := outcome.launch_bytes + promise.static_shared_bytes) > limit:
        yield f"{name}: {need} bytes of shared memory; accepted: at most {limit}"
    if serialised := [note for note in notes_of(outcome) if any(code in note for code in SERIALISED)]:
        yield f"{name}: {serialised[0]}; {len(serialised)} such notes, none accepted"


def listing_of(outcome: Outcome) -> str:
    """The machine code; empty if there is none or nothing here can read it."""
    data = outcome.result.data if isinstance(outcome.result, Binary) else b""
    return sass.listing_of(data) if data and sass.find_cuobjdump() else ""


def faults(outcome: Outcome) -> Iterator[str]:
    """A line for each thing in the machine code that costs time for nothing, or that the cost model counts
    otherwise.
    """
    if not (listing := listing_of(outcome)):
        return
    name, source = f"{outcome.source.entry} for {outcome.target}", outcome.source
    for entry, counts in sass.read(listing).items():
        if fences := sass.wide_fences(counts):
            yield f"{name}: {entry} has {', '.join(fences)}; no fence of the whole GPU accepted"
        if local := sass.local_accesses(counts):
            yield f"{name}: {entry} has {local} accesses to local memory; none accepted"
        rounds = (
            sass.software_rounding(listing, entry)
            if source.kernel.dtype == "bfloat16" and outcome.target != "sm_75"
            else 0
        )
        if rounds:
            yield f"{name}: {entry} rounds {rounds} values to bfloat16 by additions; cvt.rn.bf16 accepted"
    if is_plain(source.kernel) and (off := off_the_table(outcome, listing)):
        yield f"{name}: {off}"
    if is_counted(source, outcome.target):
        loop, least = sass.main_loop(listing, source.entry), SHARES[source.kernel.layout]
        if (share := sass.products(loop) / loop.total()) < least:
            yield f"{name}: multiply-adds are {share:.3f} of the main loop's instructions; accepted: at least {least}"


def is_counted(source: Source, target: str) -> bool:
    """Whether SHARES holds for the kernel: a plain product in float32 whose stages are not all copied before the
    loop.
    """
    kernel, constants = source.kernel, source.constants
    if source.family != "simt" or target != "sm_90a" or kernel != KernelSpec(kernel.pattern, "float32", kernel.layout):
        return False
    return kernel.pattern in stratified(COUNTED) and FAMILIES["simt"].shape(kernel, constants).steps > constants.stages


def is_plain(kernel: KernelSpec) -> bool:
    """Whether the kernel is a product of one of the first patterns, without options: OFF holds for those."""
    plain = KernelSpec(kernel.pattern, kernel.precision, kernel.layout)
    return kernel == plain and kernel.pattern in (SAMPLE, *stratified(FEW))


def off_the_table(outcome: Outcome, listing: str) -> str:
    """How the instructions per product of the main loop differ from the cost model's; empty if they do not, or if
    the loop stores too.
    """
    source, loop, modelled = (
        outcome.source,
        sass.main_loop(listing, outcome.source.entry),
        modelled_per_product(outcome),
    )
    if not modelled or sass.count(loop, "STG") or sass.count(loop, "UTMASTG"):
        return ""
    counted = (loop.total() - skipped(outcome, sass.products(loop))) / max(1, sass.products(loop))
    off = OFF_OF.get((source.family, source.kernel.precision, source.kernel.layout), OFF)
    # Where all stages are copied before the loop, it has fewer instructions than the table says.
    copies = FAMILIES[source.family].by_warpgroups or sass.count(loop, "LDGSTS") > 0
    if (1 / off if copies else 0) <= counted / modelled <= off:
        return ""
    accepted = f"the cost model's {modelled:.2f}, by a factor of at most {off}"
    return f"{counted:.2f} instructions per product in the main loop; accepted: {accepted}"


def skipped(outcome: Outcome, products: int) -> float:
    """Instructions of a promotion that a turn of the loop, with so many products, does not execute on average.

    They add the sums of a thread to totals, one by one, and set them to zero, two at a time.
    """
    kernel, constants = outcome.source.kernel, outcome.source.constants
    if not (isinstance(constants, MmaConstants) and constants.promote):
        return 0
    family = FAMILIES[outcome.source.family]
    work, geometry = (each(kernel, constants, LARGE) for each in (family.work, family.geometry))
    stages = products * work.stages * multiplying_warps(family, geometry) / work.products  # per turn
    turns = constants.promote / constants.tile_in / stages
    return 1.5 * MmaTiling.of(kernel, constants).sums * max(0, 1 - 1 / turns)


def modelled_per_product(outcome: Outcome) -> float | None:
    """Instructions of the main loop per product by the cost model's table (`ksgen/families/slots.py`); None if it
    has no row.
    """
    source, kernel = outcome.source, outcome.source.kernel
    family, issued = FAMILIES[source.family], issued_by(outcome.row, kernel, outcome.target)
    if issued is None:
        return None
    work, geometry = (each(kernel, source.constants, LARGE) for each in (family.work, family.geometry))
    return in_loop(issued, work, multiplying_warps(family, geometry)) / work.products


_INSTRUCTIONS = "{:8} {:16} {:16} {:10} {:6} {:>8}" + " {:>9}" * (len(sass.KINDS)) + "  {:9} {:>5}"


def instructions(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """A table of main loops: products, other instructions per product by kind, what bounds the kernel, and its share
    of the floor.
    """
    kinds = [*(kind for kind in sass.KINDS if kind != "products"), "addresses"]
    yield _INSTRUCTIONS.format(
        "target", "pattern", "family", "precision", "layout", "products", *kinds, "bound", "share"
    )
    for outcome in outcomes:
        if not (listing := listing_of(outcome)):
            continue
        kernel, loop = outcome.source.kernel, sass.main_loop(listing, outcome.source.entry)
        found, number = sass.by_kind(loop), max(1, sass.products(loop))
        per_product = (f"{found[kind] / number:.2f}" for kind in kinds)
        words = (outcome.target, str(kernel.pattern), outcome.row, kernel.precision, kernel.layout, sass.products(loop))
        yield _INSTRUCTIONS.format(*words, *per_product, *bound_of(outcome))


def bound_of(outcome: Outcome) -> tuple[str, str]:
    """What bounds a kernel of a large batch by the cost model, and its share of the floor of its own instructions."""
    source, limits = outcome.source, cuda_limits(outcome.target)
    family, kernel = FAMILIES[source.family], source.kernel
    speed = speed_of(family, kernel, limits, source.constants)
    terms = terms_of(speed, family, kernel, source.constants, LARGE) if speed else None
    if speed is None or terms is None:
        return "-", "-"
    products = kernel.arithmetic.products if source.constants.on_tensor_cores else 1
    floor = max(kernel.bytes(LARGE) / speed.bytes_per_s, products * kernel.flops(LARGE) / speed.flops_per_s) * 1e6
    share = floor / gpu_us(speed, family, kernel, source.constants, LARGE)
    return "moving" if terms.moving > terms.inside else "inside", f"{share:.2f}"


def notes_of(outcome: Outcome) -> list[str]:
    """Return the advice of ptxas, without its report on every kernel."""
    return outcome.result.provenance.get("notes", "").splitlines() if isinstance(outcome.result, Binary) else []


_HEAD = "{:22} kernels  registers  - estimate: mean  worst   shared   limit  static  spilled  notes"
_ROW = "{:22}{:8}{:11}{:+18.1f}{:+7}{:9}{:8}{:8}{:9}{:7}"


def table(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """A table for each target, with a row for each family, precision and layout: numbers are the most there is of
    each.
    """
    built = sorted((each for each in outcomes if isinstance(each.result, Binary)), key=lambda each: each.group)
    for target, of_target in groupby(built, lambda each: each.target):
        yield ""
        yield _HEAD.format(target)
        for (_, *words), of_row in groupby(of_target, lambda each: each.group):
            row = list(of_row)
            found = [each.result.resources for each in row if isinstance(each.result, Binary)]
            errors = [(each.registers or 0) - outcome.estimate for each, outcome in zip(found, row, strict=True)]
            yield _ROW.format(
                " ".join(words),
                len(row),
                max(each.registers or 0 for each in found),
                mean(errors),
                max(errors, key=abs),
                max(each.launch_bytes for each in row),
                cuda_limits(target).shared_bytes,
                max(each.shared_bytes or 0 for each in found),
                max(each.spill_bytes or 0 for each in found),
                sum(len(notes_of(each)) for each in row),
            )


@click.command()
@click.option(
    "--target", "targets", type=click.Choice(TARGETS), multiple=True, help="Only this target; may be given again."
)
@click.option(
    "--family",
    "families",
    type=click.Choice(list(PROMISES)),
    multiple=True,
    help="Only this family; may be given again.",
)
@click.option("--compiler", type=click.Choice(["nvcc", "nvrtc"]), help="The machine's own unless given.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at a time; all cores unless given.")
@click.option(
    "--every", type=click.IntRange(min=1), default=1, help="Only each so many-th kernel of a precision and layout."
)
@click.option(
    "--sample",
    "is_sample",
    is_flag=True,
    help="Only a few kernels with all precisions, strides and storages, in each layout.",
)
@click.option("--everything", is_flag=True, help="All patterns for all targets.")
@click.option("--instructions", "has_loops", is_flag=True, help="Print each kernel's main loop too.")
def main(
    targets: tuple[str, ...],
    families: tuple[str, ...],
    compiler: str | None,
    jobs: int | None,
    every: int,
    is_sample: bool,
    everything: bool,
    has_loops: bool,
) -> None:
    """Compile the matrix, print what it takes, and exit with 1 where that is not as promised."""
    wanted = [
        (source, target)
        for family in families or PROMISES
        for target in PROMISES[family].targets
        if target in targets or (not targets and (everything or target not in SELDOM))
        for source in sources(family, target, everything, every, is_sample)
    ]
    with progress() as bar:
        task = bar.add_task("compiling", total=len(wanted), now="")
        results = build_many(
            [Request(source.text, source.entry, target) for source, target in wanted],
            find_compiler(compiler),
            workers=jobs,
            on_done=lambda request, _: bar.update(task, advance=1, now=f"{request.entry} {request.target}"),
        )
    outcomes = [Outcome(source, target, result) for (source, target), result in zip(wanted, results, strict=True)]
    for line in (*table(outcomes), *(("", *instructions(outcomes)) if has_loops else ())):
        click.echo(line)
    with ThreadPoolExecutor(jobs) as pool:  # which wait for cuobjdump
        read = pool.map(lambda outcome: list(faults(outcome)), outcomes)
        broken = [
            line for outcome, found in zip(outcomes, read, strict=True) for line in (*violations(outcome), *found)
        ]
    click.echo(f"\n{len(outcomes)} binaries, {len(broken)} violations")
    for line in broken:
        click.echo(line)
    raise SystemExit(bool(broken) or not outcomes)


if __name__ == "__main__":
    main()
