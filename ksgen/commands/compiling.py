"""Compiles a whole spec for several targets; shared by `build`, `bundle` and `demo`."""

from collections.abc import Iterable
from dataclasses import dataclass

import click

from ksgen.build.build import Binary, Request, build_many
from ksgen.build.toolchain import find_compiler, parse_targets
from ksgen.commands.common import progress
from ksgen.emit.render import Source, render
from ksgen.errors import KsgenError
from ksgen.families import cuda_limits
from ksgen.families.expected import CLASSES, LARGE
from ksgen.families.gpus import asked_for
from ksgen.launch.choice import choose
from ksgen.spec import KernelSpec, Spec
from ksgen.values import excerpt
from ksgen.wisdom.exchange import known_devices
from ksgen.wisdom.store import Wisdom, load_wisdom


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


def compile_spec(spec: Spec, arch: str, device_name: str | None, jobs: int | None = None) -> list[Compiled]:
    """Compile every kernel of the spec for every target, with the constants tuned for the named device."""
    compiler = find_compiler()
    targets = parse_targets(arch, compiler)
    for target in targets:
        if (asked := asked_for(target)) != target:
            click.echo(f"--arch {target}: launchers on such a GPU ask for {asked}, and take no other binary", err=True)
    wisdom = _wisdom(device_name) if device_name else Wisdom()  # only now: a mistake must be reported in one line
    wanted = [(source, target) for target in targets for source in _sources(spec.kernels, target, wisdom)]
    with progress() as bar:
        task = bar.add_task(f"compiling {spec.name}", total=len(wanted), now="")
        results = build_many(
            [Request(source.text, source.entry, target) for source, target in wanted],
            compiler,
            workers=jobs,
            on_done=lambda request, _: bar.update(task, advance=1, now=f"{request.entry} {request.target}"),
        )
    return [Compiled(source, target, result) for (source, target), result in zip(wanted, results, strict=True)]


def _wisdom(device_name: str) -> Wisdom:
    """The wisdom of a device. Warns if there is none: the name may be misspelt."""
    wisdom = load_wisdom(device_name, strict=True)
    if not wisdom.entries():
        known = ", ".join(known_devices()) or "none"
        click.echo(f"--device-name {excerpt(device_name)}: no wisdom of that name, so constants are the defaults; known: {known}", err=True)
    return wisdom


def _sources(kernels: Iterable[KernelSpec], target: str, wisdom: Wisdom) -> list[Source]:
    """The sources that launchers on this target will render: one per batch that wisdom has, or one for each class of batches."""
    limits = cuda_limits(target)
    sources: dict[str, Source] = {}
    for kernel in kernels:
        for batch in wisdom.batches(kernel) or ([kernel.batch] if kernel.batch else [LARGE, *CLASSES]):
            choice = choose(kernel, batch, limits, wisdom)
            source = render(kernel, choice.constants, family=choice.family)
            sources[source.digest] = source
    return list(sources.values())
