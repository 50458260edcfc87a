"""`ksgen build` and `ksgen bundle`: compile a whole spec for several targets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ksgen import __version__
from ksgen.build.build import Binary, Compiler, Request, build, build_many, default_caches
from ksgen.build.bundle import write_bundle
from ksgen.build.host import HostCompiler, compiler_for
from ksgen.build.processors import INSTRUCTION_SETS
from ksgen.build.toolchain import find_compiler, parse_targets
from ksgen.calibration.proof import cases_of
from ksgen.commands import common
from ksgen.devices.native import ThreadsCompiler, limits_for, open_device, threads_request, working_compiler
from ksgen.emit.render import Source, render
from ksgen.emit.templates import Dialect
from ksgen.errors import KsgenError, ToolchainError
from ksgen.families import Limits, cuda_limits, family_named
from ksgen.families.expected import CLASSES, LARGE, SMALL
from ksgen.families.gpus import asked_for
from ksgen.files import check_writable
from ksgen.launch.choice import LARGEST_CPU_BATCH, Choice, choose_for_many, limits_from
from ksgen.launch.fused import packing_choices, shared_out, verdict_for
from ksgen.passport import needs_proof, unproven
from ksgen.paths import cache_dir
from ksgen.spec import KernelSpec, Spec, load
from ksgen.values import counted, excerpt
from ksgen.wisdom import Wisdom, dump, file_name, known_devices, load_wisdom


@click.command("build")
@click.argument("spec", type=common.PATH)
@common.arch_option
@click.option("--device-name", type=common.WORD, help="Use the constants tuned for this device, such as 'NVIDIA H200'.")
@common.number_option("--jobs", help_text="Compilers to run at once.  [default: one per core]")
@common.json_option
def command(spec: Path, arch: str, device_name: str | None, jobs: int | None, as_json: bool) -> None:
    """Compile the kernels of a spec into the cache, for every target. Launchers then find them there.

    \b
    Examples:
      ksgen build specs/vit.yaml --arch sm_80,sm_90a
      ksgen build specs/vit.yaml --arch host
      KSGEN_CACHE_DIR=./cache ksgen build specs/gpt2.yaml --arch sm_90a --device-name "NVIDIA H200"
    """
    loaded = load(common.find_spec(spec))
    compiled, _ = compile_all(loaded, arch, [device_name], jobs)
    made, caches = counted(len(compiled), "binary", "binaries"), default_caches()
    if lost := sum(not caches.get(job.request) for job in compiled):
        raise KsgenError(
            f"{lost} of {made} not in the cache {cache_dir()}; accepted: a folder that only you can write to, with "
            "room for all (KSGEN_CACHE_DIR, KSGEN_CACHE_MAX_BYTES)"
        )
    spilling = [job for job in compiled if job.binary.resources.spill_bytes]
    if as_json:
        common.print_json(
            [
                {
                    **common.kernel_figures(job.source.kernel, job.source.kernel.batch),
                    **common.choice_figures(job.source.family, job.source.constants),
                    "entry": job.source.entry,
                    "target": job.target,
                    "registers": job.binary.resources.registers,
                    "spill_bytes": job.binary.resources.spill_bytes,
                    "bytes": len(job.binary.data),
                    "compiler": dict(job.binary.provenance),
                }
                for job in compiled
            ]
        )
        return
    kernels = counted(len(loaded.kernels), "kernel")
    click.echo(f"{kernels} of {loaded.name} for {arch}: {made} in the cache, {len(spilling)} with spilled registers")
    if len(compiled) > len(loaded.kernels):
        click.echo(
            "Each kernel has one binary per target and class of batch sizes. Fused layers have further binaries."
        )
    for job in spilling:
        click.echo(f"  {job.source.entry} for {job.target}: {job.binary.resources.spill_bytes} bytes")


@click.command("bundle")
@click.argument("spec", type=common.PATH)
@common.arch_option
@common.file_option("-o", "--output", help_text="File to write", usual="<spec name>.ksb")
@click.option(
    "--device-name",
    type=common.WORD,
    multiple=True,
    help="Also pack the constants tuned for this device, such as 'NVIDIA H200'. May be repeated.",
)
@common.json_option
def bundle(spec: Path, arch: str, output: Path | None, device_name: tuple[str, ...], as_json: bool) -> None:
    """Pack the sources, binaries and wisdom of a spec into one file. Launchers use it on a machine that has a driver
    and no compiler, after ksgen.use_bundle("vit.ksb").

    \b
    Examples:
      ksgen bundle specs/vit.yaml --arch sm_80,sm_90a -o vit.ksb
      ksgen bundle specs/vit.yaml --arch x86-64-v3,x86-64-v4,aarch64 -o vit.ksb
    """
    loaded = load(common.find_spec(spec))
    path = output or Path(f"{loaded.name}.ksb")
    check_writable(path, spec)
    compiled, helpers = compile_all(loaded, arch, [None, *device_name])
    wisdom = {file_name(name): dump(name, load_wisdom(name, strict=True)).encode() for name in device_name}
    binaries = [*((job.request, job.binary) for job in compiled), *helpers]
    write_bundle(path, binaries, wisdom, {"ksgen": __version__, "spec": loaded.name})
    if as_json:
        common.print_json({"file": str(path), "bytes": path.stat().st_size, "binaries": len(compiled)})
    else:
        click.echo(
            f"{counted(len(compiled), 'binary', 'binaries')} of {loaded.name} for {arch} in {path} "
            f"({path.stat().st_size / 1e6:.1f} MB)"
        )


HOST = "host"  # target that means this machine's processor


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target: its binary, or the error."""

    source: Source
    target: str
    result: Binary | KsgenError

    @property
    def request(self) -> Request:
        return Request(self.source.text, self.source.entry, self.target)

    @property
    def binary(self) -> Binary:
        if isinstance(self.result, KsgenError):
            raise self.result
        return self.result


@dataclass(frozen=True)
class _Setup:
    """A target, its compiler, and the facts by which launchers choose and render its sources."""

    target: str
    compiler: Compiler
    dialect: Dialect
    limits: Limits
    device_name: str | None = None  # device whose wisdom launchers will follow, if known


def compile_all(
    spec: Spec, arch: str, device_names: Sequence[str | None], jobs: int | None = None
) -> tuple[list[Compiled], list[tuple[Request, Binary]]]:
    """Compile a spec as `compile_spec` does, and all other functions and proofs that launchers need."""
    found = {job.request: job for job in compile_spec(spec, arch, device_names, jobs)}
    compiled = list(found.values())
    common.first_failure([job.result for job in compiled])
    return compiled, [*compile_threads(arch), *compile_proofs(compiled, jobs)]


def compile_spec(spec: Spec, arch: str, device_names: Sequence[str | None], jobs: int | None = None) -> list[Compiled]:
    """Compile every kernel and every fused layer of the spec, for every target, with the named devices' constants.

    None stands for the default constants, and for this processor also for the constants tuned for it.
    """
    setups = _setups(arch)
    for setup in setups:
        if setup.dialect == "cuda" and (asked := asked_for(setup.target)) != setup.target:
            click.echo(
                f"--arch {setup.target}: launchers on such a GPU ask for {asked}, and take no other binary", err=True
            )
    # This may warn, so it follows `_setups`, which may raise an error.
    known = {name: _wisdom(name) if name else Wisdom() for name in device_names}
    wanted = [(setup, _sources_for(spec, setup, known)) for setup in setups]
    finished: list[Compiled] = []
    with common.progress() as bar:
        task = bar.add_task(f"compiling {spec.name}", total=sum(len(sources) for _, sources in wanted), now="")
        for setup, sources in wanted:
            if bar.disable:  # no terminal: print a line, because this may take minutes
                click.echo(f"compiling {counted(len(sources), 'source')} of {spec.name} for {setup.target}", err=True)
            results = build_many(
                [Request(source.text, source.entry, setup.target) for source in sources],
                setup.compiler,
                workers=jobs,
                on_done=lambda request, _: bar.update(task, advance=1, now=f"{request.entry} {request.target}"),
            )
            finished += [
                Compiled(source, setup.target, result) for source, result in zip(sources, results, strict=True)
            ]
    return finished


def compile_threads(arch: str) -> list[tuple[Request, Binary]]:
    """Compile the function that distributes a kernel's work over threads, for each processor target."""
    wanted = [
        (threads_request(setup.target), ThreadsCompiler(setup.compiler.command, setup.compiler.builds_for))
        for setup in _setups(arch)
        if isinstance(setup.compiler, HostCompiler)
    ]
    return [(request, build(request.text, request.entry, request.target, compiler)) for request, compiler in wanted]


def compile_proofs(compiled: Iterable[Compiled], jobs: int | None = None) -> list[tuple[Request, Binary]]:
    """Compile the small kernels that prove a family on a GPU, for each compiled family that needs a proof there."""
    families = {(job.source.family, job.target) for job in compiled}
    cases = [
        (case, target)
        for name, target in sorted(families)
        if needs_proof(name, target)
        for case in cases_of(family_named(name), target)
    ]
    needed = (Request(each.text, each.entry, target) for case, target in cases for each in case.sources)
    requests = list(dict.fromkeys(needed))
    if requests:
        names = ", ".join(dict.fromkeys(case.candidate.family for case, _ in cases))
        click.echo(f"compiling {counted(len(requests), 'small source')} that prove {names} on a GPU", err=True)
    results = build_many(requests, workers=jobs)
    common.first_failure(results)
    return [(request, each) for request, each in zip(requests, results, strict=True) if isinstance(each, Binary)]


def _setups(arch: str) -> list[_Setup]:
    """Read targets such as `host,x86-64-v3,sm_90a`. Processors' targets come before GPUs'."""
    words = list(dict.fromkeys(word for part in arch.split(",") if (word := part.strip())))
    processors = [word for word in words if word in (HOST, *INSTRUCTION_SETS)]
    gpus = [word for word in words if word not in processors]
    if unknown := next((word for word in gpus if not word.startswith("sm_")), None):
        raise ToolchainError(
            f"{excerpt(unknown)} is not a target; accepted: {', '.join((HOST, *INSTRUCTION_SETS))}, and targets of "
            "GPUs, such as sm_90a"
        )
    setups = [_processor_setup(word) for word in processors]
    if gpus or not processors:
        compiler = find_compiler()
        setups += [
            _Setup(target, compiler, "cuda", cuda_limits(target)) for target in parse_targets(",".join(gpus), compiler)
        ]
    return setups


def _processor_setup(word: str) -> _Setup:
    if word == HOST:
        device = open_device(0)
        limits = limits_from("native", device.target, device.limits)
        return _Setup(device.target, working_compiler(), device.dialect, limits, device.name)
    named = INSTRUCTION_SETS[word]
    return _Setup(
        named.target, compiler_for(named.target), "opencl", limits_from("native", named.target, limits_for(named))
    )


def _wisdom(device_name: str) -> Wisdom:
    """The wisdom of a device. Warns if there is none: the name may be misspelt."""
    wisdom = load_wisdom(device_name, strict=True)
    if not wisdom.entries():
        known = ", ".join(known_devices()) or "none"
        click.echo(
            f"--device-name {excerpt(device_name)}: no wisdom of that name, so constants are the defaults; known: "
            f"{known}",
            err=True,
        )
    return wisdom


def _sources_for(spec: Spec, setup: _Setup, known: Mapping[str | None, Wisdom]) -> list[Source]:
    """Return a spec's sources with the constants of each wisdom, by device name.

    For a GPU, sources are added that launchers take until its families are proven. If None is among the names, sources
    with the constants tuned for the setup's device are added, too.
    """
    found = [*known.values()]
    if None in known and setup.device_name:
        found.append(load_wisdom(setup.device_name, target=setup.target))
    bars = unproven(setup.target)
    limits = [setup.limits, *([replace(setup.limits, bars=bars)] if bars else [])]
    pairs = [(each, wisdom) for wisdom in found for each in limits]
    sources = (source for each, wisdom in pairs for source in _sources(spec, each, setup.dialect, wisdom))
    return list({source.digest: source for source in sources}.values())


def _sources(spec: Spec, limits: Limits, dialect: Dialect, wisdom: Wisdom) -> Iterator[Source]:
    """Yield the sources that launchers with these limits will render, for batches in wisdom and classes of batches.

    Equal sources may be yielded several times.
    """
    classes = (
        [1 << power for power in range(LARGEST_CPU_BATCH.bit_length())] if limits.is_cpu else [LARGE, *CLASSES, *SMALL]
    )
    chosen: list[tuple[KernelSpec, Choice]] = []
    for kernel in spec.kernels:
        for batch in sorted({*wisdom.batches(kernel.untied), *([kernel.batch] if kernel.batch else classes)}):
            chosen.append((kernel, choose_for_many(kernel, batch, limits, wisdom)))
    for kernel, batch in _launches(spec, limits, classes, wisdom):
        choice = choose_for_many(kernel, batch, limits, wisdom)
        chosen += [(kernel, choice), *packing_choices(kernel, choice.family, choice.constants)]
    for kernel, choice in chosen:
        yield render(kernel, choice.constants, family=choice.family, dialect=dialect)


def _launches(spec: Spec, limits: Limits, classes: Sequence[int], wisdom: Wisdom) -> Iterator[tuple[KernelSpec, int]]:
    """Yield the fused launches of layers and groups, each with a batch at which launchers may take it.

    Launchers take a fused launch if it is expected or measured to be faster, or if the layer's `fuse` demands it.
    """
    kind = "processor" if limits.is_cpu else "cuda"
    for name, launches in spec.launches.items():
        fuse = spec.options_of(name).fuse
        for asked in launches:
            dense = replace(asked.untied, batch=None, stride="dense")
            known = wisdom.batches(dense)
            for batch in sorted({*known, *([asked.batch] if asked.batch else classes)}):
                # whether processors of every number of cores, even one, divide the factors' outputs at this batch
                is_small = limits.is_cpu and bool(shared_out(dense, 1, batch))
                if not verdict_for(dense, limits, kind, batch, "yes").is_one or (fuse == "auto" and is_small):
                    continue
                if batch in known or verdict_for(dense, limits, kind, batch, fuse).is_one:
                    # on a GPU, a group's outputs may also be separate dense arrays
                    apart = () if limits.is_cpu else ("dense",)
                    strides = ("any", *apart) if asked.is_group else (asked.stride,)
                    yield from ((replace(dense, stride=stride, tied=asked.tied), batch) for stride in strides)
