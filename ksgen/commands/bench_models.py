"""`ksgen bench model` and `ksgen bench share`: whole models, and the share of their linear layers."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ksgen import __version__
from ksgen.bench.roster import LAYERS, MODELS, STEP_TITLES
from ksgen.commands.bench_common import check_torch, memory_for, print_table, words_in, words_option
from ksgen.commands.common import (
    WORD,
    file_option,
    json_option,
    json_text,
    print_json,
    progress,
    sized_option,
    warn_if_busy,
)
from ksgen.errors import DeviceError, SpecError, ToolchainError
from ksgen.files import check_writable, write
from ksgen.install import install_line
from ksgen.spec import LAYOUTS
from ksgen.spec.kernel import hint
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from ksgen.bench.model import ModelJob, ModelRow

PRECISIONS = ("float32", "float16", "bfloat16", "float64")
GPU_SEQUENCES, CPU_SEQUENCES = 128, 8
GPU_TOKENS, CPU_TOKENS = 196, 64  # 196 as in the paper
GPU_REPEATS, CPU_REPEATS = 30, 7
# defaults of `ksgen bench share`
SHARE_MODELS = ("ViT-S/16", "ViT-B/16", "ViT-L/16", "ViT-H/14")
GPU_IMAGES, CPU_IMAGES = 128, 2
SHARE_GPU_REPEATS, SHARE_CPU_REPEATS = 20, 5


@click.command("model", short_help="Time a model with sparse layers against its dense form.")
@click.argument("model", metavar="|".join(MODELS))
@words_option(
    "--precision", "precisions", PRECISIONS, f"One or more of {', '.join(PRECISIONS)}, separated by commas.", "float32"
)
@click.option(
    "--backend", default="auto", show_default=True, help="One or more backends of KSLinear, such as ksgen,bmm."
)
@words_option(
    "--steps", "steps", STEP_TITLES, "One or more of forward, training and decode, separated by commas.", "forward"
)
@words_option("--layers", "layers", LAYERS, "Which linear layers are sparse, such as down.", ",".join(LAYERS))
@words_option(
    "--layout",
    "layouts",
    LAYOUTS,
    "Layout of the sparse model's blocks: bsf, bsl (vit-s16 only), or both, separated by commas.",
    "bsf",
)
@click.option("--device", type=WORD, help="cpu, cuda or cuda:1.  [default: a GPU if there is one]")
@sized_option("--batch", "Batch size in sequences.", GPU_SEQUENCES, CPU_SEQUENCES)
@sized_option("--repeats", "Timed rounds.", GPU_REPEATS, CPU_REPEATS)
@file_option("-o", "--output", help_text="Also write the JSON to this file")
@json_option
def model_command(
    model: str, precisions: tuple[str, ...], backend: str, steps: tuple[str, ...], layers: tuple[str, ...],
    layouts: tuple[str, ...], device: str | None, batch: int | None, repeats: int | None, output: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Time a model and its modules with dense and with Kronecker-sparse layers, alternately, and show the ratios.

    The sparse layers of llama-1b are Monarch layers, and those of llama-1b-blast are BLAST layers (specs/llama.yaml).

    A language model's forward pass is its prefill. decode computes the last token of each sequence, with the keys and
    values of the earlier tokens in a cache. Sparse layers are frozen for forward and decode, but not for training.

    \b
    Examples:
      ksgen bench model vit-s16
      ksgen bench model vit-s16 --device cpu --precision float32,bfloat16 --steps forward,training
      ksgen bench model vit-s16 --layout bsf,bsl
      ksgen bench model gpt2-medium --layers down
      ksgen bench model gpt2-medium --device cpu --batch 1 --steps forward,decode
      ksgen bench model gpt2-medium --precision float16,bfloat16 --backend ksgen,bmm -o gpt2.json
      ksgen bench model llama-1b --device cpu --batch 1 --precision float32,bfloat16 --steps forward,decode
    """
    if output:
        check_writable(output)
    job = replace(_job(model, precisions, backend, device, batch, repeats), steps=steps, layers=layers, layouts=layouts)
    if "decode" in job.steps and model.startswith("vit"):
        raise SpecError(f"--steps decode of {model}, which processes whole images; accepted: forward, training")
    if "bsl" in job.layouts and (not model.startswith("vit") or set(job.layers) != set(LAYERS)):
        raise SpecError("--layout bsl; accepted: bsl only with vit-s16 and without --layers; bsf with every model")
    warn_if_busy()
    rows = []
    for row in _measured(job):
        rows.append(row)
        if output:  # after each row, so that a killed run keeps all rows so far
            write(output, json_text(_report(job, rows)) + "\n")
    if as_json:
        print_json(_report(job, rows))
    else:
        from ksgen.bench.tables import models

        for table in models(_report(job, rows)):
            print_table(table)


def _job(
    model: str, precisions: tuple[str, ...], backend: str, device: str | None, batch: int | None, repeats: int | None
) -> "ModelJob":
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ToolchainError(f"ksgen bench model needs PyTorch; {install_line('torch')}") from error
    from ksgen.bench.model import ModelJob
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

    with memory_for(job.batch), progress() as bar:
        task = bar.add_task(
            "timing",
            total=len(job.precisions) * len(job.steps) * len(modules_of(job)) * len(job.layouts) * len(job.backends),
            now="building the models",
        )
        try:
            for row in measure(job):
                yield row
                bar.update(task, advance=1, now=f"{row.precision} {row.step} {row.module}")
        except NotImplementedError as error:
            raise DeviceError(f"PyTorch on {job.device}: {error}; choose another --backend or --precision") from error


def _report(job: "ModelJob", rows: list["ModelRow"]) -> dict[str, Any]:
    import torch

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
        "rows": list(map(asdict, rows)),
    }


@click.command("share", short_help="Measure the share of a vision transformer's time that its linear layers take.")
@words_option(
    "--models",
    "models",
    SHARE_MODELS,
    f"Models.  [default: {','.join(SHARE_MODELS)}; on a processor only the first]",
    what="model",
)
@words_option("--precision", "precisions", PRECISIONS[:3], "Precisions.", "float32", "precision")
@sized_option("--batch", "Batch size in images.", GPU_IMAGES, CPU_IMAGES)
@sized_option("--repeats", "Timed rounds.", SHARE_GPU_REPEATS, SHARE_CPU_REPEATS)
@file_option("-o", "--output", help_text="Also write the JSON to this file")
@json_option
def share_command(
    models: tuple[str, ...] | None, precisions: tuple[str, ...], batch: int | None, repeats: int | None,
    output: Path | None, as_json: bool
) -> None:  # fmt: skip
    """Time dense vision transformers, and their feed-forward linear layers alone (the paper's Table 6).

    \b
    Examples:
      ksgen bench share
      ksgen bench share --models ViT-S/16,ViT-B/16 --precision float32,float16 --json
    """
    check_torch("`ksgen bench share`")
    import torch

    from ksgen.bench.model import measure_shares
    from ksgen.bench.tables import shares as table

    if output:
        check_writable(output)
    on_gpu = torch.cuda.is_available()
    where = torch.device("cuda" if on_gpu else "cpu")
    images = batch or (GPU_IMAGES if on_gpu else CPU_IMAGES)
    rounds = repeats or (SHARE_GPU_REPEATS if on_gpu else SHARE_CPU_REPEATS)
    warn_if_busy()
    usual = SHARE_MODELS if on_gpu else SHARE_MODELS[:1]
    with memory_for(images):
        shares = list(measure_shares(models or usual, precisions, where, images, rounds))
    device = torch.cuda.get_device_name() if on_gpu else "a processor"
    content = {"device": device, "batch": images, "repeats": rounds, "shares": list(map(asdict, shares))}
    if output:
        write(output, json_text(content) + "\n")
    if as_json:
        print_json(content)
    else:
        print_table(table(content))
