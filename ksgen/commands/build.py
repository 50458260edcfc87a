"""`ksgen build`."""

from pathlib import Path

import click

from ksgen.commands.common import SPEC, arch_option, find_spec, first_failure, json_option, print_json
from ksgen.commands.figures import choice_figures, kernel_figures
from ksgen.spec import load
from ksgen.values import counted


@click.command("build")
@click.argument("spec", type=SPEC)
@arch_option
@click.option("--device-name", help="Use the constants tuned for this device, such as 'NVIDIA H200'.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers to run at once.  [default: one per core]")
@json_option
def command(spec: Path, arch: str, device_name: str | None, jobs: int | None, as_json: bool) -> None:
    """Compile the kernels of a spec into the cache, for every target. Launchers then find them there.

    \b
    Examples:
      ksgen build specs/vit.yaml --arch sm_80,sm_90a
      ksgen build specs/vit.yaml --arch host
      KSGEN_CACHE_DIR=./cache ksgen build specs/gpt2.yaml --arch sm_90a --device-name "NVIDIA H200"
    """
    from ksgen.commands.compiling import compile_proofs, compile_spec, compile_threads

    loaded = load(find_spec(spec))
    compiled = compile_spec(loaded, arch, device_name, jobs)
    first_failure([job.result for job in compiled])
    compile_threads(arch)
    compile_proofs(compiled, jobs)
    spilling = [job for job in compiled if job.binary.resources.spill_bytes]
    if as_json:
        print_json(
            [
                {
                    **kernel_figures(job.source.kernel, job.source.kernel.batch),
                    **choice_figures(job.source.family, job.source.constants),
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
    made = counted(len(compiled), "binary", "binaries")
    kernels = counted(len(loaded.kernels), "kernel")
    click.echo(f"{kernels} of {loaded.name} for {arch}: {made} in the cache, {len(spilling)} with spilled registers")
    if len(compiled) > len(loaded.kernels):
        click.echo(
            "Each kernel has one binary per target and class of batch sizes. Fused layers have further binaries."
        )
    for job in spilling:
        click.echo(f"  {job.source.entry} for {job.target}: {job.binary.resources.spill_bytes} bytes")
