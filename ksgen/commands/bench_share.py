"""`ksgen bench share`."""

from dataclasses import asdict
from pathlib import Path

import click

from ksgen.commands.bench_common import check_library, json_file_option, print_table, repeats_option, words_from
from ksgen.commands.common import json_option, json_text, print_json, say_if_busy
from ksgen.files import check_writable, write

MODELS = ("ViT-S/16", "ViT-B/16", "ViT-L/16", "ViT-H/14")
PRECISIONS = ("float32", "float16", "bfloat16")
GPU_IMAGES, CPU_IMAGES = 128, 2
GPU_REPEATS, CPU_REPEATS = 20, 5


@click.command("share", short_help="Measure which share of a vision transformer's time its linear layers take.")
@click.option(
    "--models",
    type=words_from(MODELS, "model"),
    metavar="WORDS",
    help=f"Default: {','.join(MODELS)}; on a processor the first.",
)
@click.option(
    "--precision",
    "precisions",
    type=words_from(PRECISIONS, "precision"),
    default="float32",
    show_default=True,
    metavar="WORDS",
    help="Precisions.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help=f"Images.  [default: {GPU_IMAGES} on a GPU, {CPU_IMAGES} on a processor]",
)
@repeats_option(GPU_REPEATS, CPU_REPEATS)
@json_file_option
@json_option
def command(
    models: tuple[str, ...] | None, precisions: tuple[str, ...], batch: int | None, repeats: int | None,
    output: Path | None, as_json: bool
) -> None:  # fmt: skip
    """Time dense vision transformers, and their feed-forward linear layers alone (the paper's Table 6).

    \b
    Examples:
      ksgen bench share
      ksgen bench share --models ViT-S/16,ViT-B/16 --precision float32,float16 --json
    """
    check_library("torch", "`ksgen bench share`", "bench")
    import torch

    from ksgen.bench.linear_share import measure
    from ksgen.bench.tables import shares as table

    if output:
        check_writable(output)
    on_gpu = torch.cuda.is_available()
    where = torch.device("cuda" if on_gpu else "cpu")
    images = batch or (GPU_IMAGES if on_gpu else CPU_IMAGES)
    rounds = repeats or (GPU_REPEATS if on_gpu else CPU_REPEATS)
    say_if_busy()
    shares = list(measure(models or (MODELS if on_gpu else MODELS[:1]), precisions, where, images, rounds))
    device = torch.cuda.get_device_name() if on_gpu else "a processor"
    found = {"device": device, "batch": images, "repeats": rounds, "shares": list(map(asdict, shares))}
    if output:
        write(output, json_text(found) + "\n")
    if as_json:
        print_json(found)
    else:
        print_table(table(found))
