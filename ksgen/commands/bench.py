"""`ksgen bench` and `ksgen bench model`. Each other subcommand has a module of its own in this package."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ksgen.bench.roster import LAYERS
from ksgen.bench.tables import STEP_TITLES, models
from ksgen.commands import bench_energy, bench_layers, bench_paper, bench_report, bench_share
from ksgen.commands.bench_common import json_file_option, print_table, repeats_option, words_from, words_in
from ksgen.commands.common import json_option, json_text, print_json, progress, say_if_busy
from ksgen.errors import DeviceError, SpecError, ToolchainError
from ksgen.files import check_writable, write
from ksgen.spec.kernel import hint
from ksgen.values import excerpt
from ksgen.words import counted

if TYPE_CHECKING:
    from ksgen.bench.model import ModelJob, ModelRow

PRECISIONS = ("float32", "float16", "bfloat16", "float64")
GPU_SEQUENCES, CPU_SEQUENCES = 128, 8
GPU_TOKENS, CPU_TOKENS = 196, 64  # 196 as in the paper
GPU_REPEATS, CPU_REPEATS = 30, 7


class _OrSpec(click.Group):
    """A spec in the place of a subcommand: its layers are measured, and shown on a page."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0].endswith((".yaml", ".yml")):
            return "layers", bench_layers.command, ["-o", f"{Path(args[0]).stem}.jsonl", "--page", *args]
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise click.UsageError(
                f"no command {excerpt(args[0])}; {hint(args[0], self.commands)}, or a spec such as specs/vit.yaml", ctx
            )
        return super().resolve_command(ctx, args)


@click.group(
    "bench",
    cls=_OrSpec,
    subcommand_metavar="SPEC|COMMAND [ARGS]...",
    short_help="Compare with other libraries, and report the results.",
)
def command() -> None:
    """Measure the layers of a spec on this machine, repeat the paper's experiments (products, energy, whole models),
    and report the results.

    \b
    Examples:
      ksgen bench specs/vit.yaml
      ksgen bench paper --subset 60 --time-limit 8m
      ksgen bench report paper.jsonl
      ksgen bench layers
      ksgen bench model vit-s16
    """


for subcommand in (
    bench_paper.command,
    bench_layers.command,
    bench_energy.command,
    bench_report.command,
    bench_share.command,
):
    command.add_command(subcommand)


@command.command("model", short_help="Time a model with sparse layers against its dense form.")
@click.argument("model", metavar="vit-s16|gpt2-medium")
@click.option(
    "--precision",
    "precisions",
    type=words_from(PRECISIONS, "--precision"),
    metavar="WORDS",
    default="float32",
    show_default=True,
    help=f"One or more of {', '.join(PRECISIONS)}, separated by commas.",
)
@click.option(
    "--backend", default="auto", show_default=True, help="One or more backends of KSLinear, such as ksgen,bmm."
)
@click.option(
    "--steps",
    type=words_from(STEP_TITLES, "--steps"),
    metavar="WORDS",
    default="forward",
    show_default=True,
    help="One or more of forward, training and decode, separated by commas.",
)
@click.option(
    "--layers",
    type=words_from(LAYERS, "--layers"),
    metavar="WORDS",
    default=",".join(LAYERS),
    show_default=True,
    help="Which linear layers are sparse, such as down.",
)
@click.option("--device", help="cpu, cuda or cuda:1.  [default: a GPU if there is one]")
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help=f"Sequences.  [default: {GPU_SEQUENCES} on a GPU, {CPU_SEQUENCES} on a processor]",
)
@repeats_option(GPU_REPEATS, CPU_REPEATS)
@json_file_option
@json_option
def model_command(
    model: str, precisions: tuple[str, ...], backend: str, steps: tuple[str, ...], layers: tuple[str, ...],
    device: str | None, batch: int | None, repeats: int | None, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Time a model and its modules with dense and with Kronecker-sparse layers, taking turns, and show the ratios.

    Forward passes use frozen sparse layers; training steps do not. decode is a forward pass of one token per sequence,
    as in decoding, without the keys and values of earlier tokens.

    \b
    Examples:
      ksgen bench model vit-s16
      ksgen bench model vit-s16 --device cpu --precision float32,bfloat16 --steps forward,training
      ksgen bench model gpt2-medium --layers down
      ksgen bench model gpt2-medium --device cpu --batch 1 --steps forward,decode
      ksgen bench model gpt2-medium --precision float16,bfloat16 --backend ksgen,bmm -o gpt2.json
    """
    if output:
        check_writable(output)
    job = replace(_job(model, precisions, backend, device, batch, repeats), steps=steps, layers=layers)
    if "decode" in job.steps and not model.startswith("gpt2"):
        raise SpecError(f"--steps decode of {model}, which takes images whole; accepted: forward, training")
    say_if_busy()
    rows = []
    for row in _measured(job):
        rows.append(row)
        if output:  # after each: a kill loses none
            write(output, json_text(_report(job, rows)) + "\n")
    if as_json:
        print_json(_report(job, rows))
    else:
        for table in models(_report(job, rows)):
            print_table(table)


def _job(
    model: str, precisions: tuple[str, ...], backend: str, device: str | None, batch: int | None, repeats: int | None
) -> "ModelJob":
    try:
        import torch
    except ModuleNotFoundError as error:
        from ksgen.install import install_line

        raise ToolchainError(f"ksgen bench model needs PyTorch; {install_line('torch')}") from error
    from ksgen.bench.model import ModelJob
    from ksgen.bench.models import MODELS
    from ksgen.torch.operators.backends import NAMES

    if model not in MODELS:
        raise SpecError(f"model {excerpt(model)}; {hint(model, MODELS)}")

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"--device {excerpt(name)}; accepted: cpu, cuda, cuda:1") from error
    on_gpu = where.type == "cuda"
    if where.type not in ("cpu", "cuda") or (on_gpu and (where.index or 0) >= torch.cuda.device_count()):
        raise DeviceError(
            f"--device {name}: PyTorch sees {counted(torch.cuda.device_count(), 'GPU')}; accepted: cpu, cuda, cuda:1"
        )
    batch = batch or (GPU_SEQUENCES if on_gpu else CPU_SEQUENCES)
    repeats = repeats or (GPU_REPEATS if on_gpu else CPU_REPEATS)
    tokens = GPU_TOKENS if on_gpu else CPU_TOKENS
    return ModelJob(model, precisions, words_in(backend, NAMES, "--backend"), where, batch, tokens, repeats)


def _measured(job: "ModelJob") -> Iterator["ModelRow"]:
    from ksgen.bench.model import measure, modules_of

    with progress() as bar:
        task = bar.add_task(
            "timing",
            total=len(job.precisions) * len(job.steps) * len(modules_of(job)) * len(job.backends),
            now="building the models",
        )
        try:
            for row in measure(job):
                yield row
                bar.update(task, advance=1, now=f"{row.precision} {row.step} {row.module}")
        except NotImplementedError as error:
            raise DeviceError(f"PyTorch on {job.device}: {error}; take another --backend or --precision") from error
        except RuntimeError as error:
            if "memory" in str(error):
                raise MemoryError(f"--batch {job.batch}: {str(error).splitlines()[0]}") from error
            raise


def _report(job: "ModelJob", rows: list["ModelRow"]) -> dict[str, Any]:
    return {**_facts(job), "rows": list(map(asdict, rows))}


def _facts(job: "ModelJob") -> dict[str, Any]:
    import torch

    from ksgen import __version__

    on_gpu = job.device.type == "cuda"
    processor = f"a processor with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {
        "model": job.model,
        "device": torch.cuda.get_device_name(job.device) if on_gpu else processor,
        "layers": list(job.layers),
        "batch": job.batch,
        "repeats": job.repeats,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ksgen": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
    }
