"""`ksgen bundle`."""

from pathlib import Path

import click

from ksgen.commands.common import (
    REPLACED,
    SPEC,
    arch_option,
    find_spec,
    first_failure,
    json_option,
    named_file,
    print_json,
)
from ksgen.spec import load
from ksgen.values import counted


@click.command("bundle")
@click.argument("spec", type=SPEC)
@arch_option
@click.option(
    "-o", "--output", type=named_file, metavar="FILE", help=f"File to write; {REPLACED}.  [default: <spec name>.ksb]"
)
@click.option(
    "--device-name",
    multiple=True,
    help="Also pack the constants tuned for this device, such as 'NVIDIA H200'. May be repeated.",
)
@json_option
def command(spec: Path, arch: str, output: Path | None, device_name: tuple[str, ...], as_json: bool) -> None:
    """Pack the sources, binaries and wisdom of a spec into one file. Launchers use it on a machine that has a driver
    and no compiler, after ksgen.use_bundle("vit.ksb").

    \b
    Examples:
      ksgen bundle specs/vit.yaml --arch sm_80,sm_90a -o vit.ksb
      ksgen bundle specs/vit.yaml --arch x86-64-v3,x86-64-v4,aarch64 -o vit.ksb
    """
    from ksgen import __version__
    from ksgen.build.bundle import write_bundle
    from ksgen.commands.compiling import compile_proofs, compile_spec, compile_threads
    from ksgen.files import check_writable
    from ksgen.wisdom.store import dump, file_name, load_wisdom

    loaded = load(find_spec(spec))
    path = output or Path(f"{loaded.name}.ksb")
    check_writable(path)
    compiled = {job.request: job for name in device_name or (None,) for job in compile_spec(loaded, arch, name)}
    first_failure([job.result for job in compiled.values()])
    wisdom = {file_name(name): dump(name, load_wisdom(name, strict=True)).encode() for name in device_name}
    write_bundle(
        path,
        [
            *((request, job.binary) for request, job in compiled.items()),
            *compile_threads(arch),
            *compile_proofs(compiled.values()),
        ],
        wisdom,
        {"ksgen": __version__, "spec": loaded.name},
    )
    if as_json:
        print_json({"file": str(path), "bytes": path.stat().st_size, "binaries": len(compiled)})
    else:
        click.echo(
            f"{counted(len(compiled), 'binary', 'binaries')} of {loaded.name} for {arch} in {path} "
            f"({path.stat().st_size / 1e6:.1f} MB)"
        )
