"""`ksgen bench table`: all contenders on products, layers and whole models, in one log."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from ksgen.bench.roster import COMPARISONS, METHODS, METHODS_OF_MODELS, NAMES, STEPS_OF_LAYERS, TRAINING
from ksgen.commands import bench_common
from ksgen.commands.bench_layers import find_sharing
from ksgen.commands.bench_models import CPU_SEQUENCES, CPU_TOKENS, GPU_SEQUENCES, GPU_TOKENS
from ksgen.commands.common import batches_in, device_option, json_option, number_option
from ksgen.spec import LAYOUTS, stratified

if TYPE_CHECKING:
    from ksgen.bench.problem import LayerJob
    from ksgen.bench.rows import ResultRow
    from ksgen.bench.tables import ResultTable
    from ksgen.devices.base import Device

LOG = Path("table.jsonl")
KINDS = {"patterns": NAMES, "layers": METHODS, "models": METHODS_OF_MODELS}  # parts, and their contenders
MODELS = ("vit-s16", "gpt2-medium")
PATTERNS = 60
PRECISIONS = ("float32", "bfloat16")
BATCHES = "1568,16,1,25088"  # in this order, so that a short run has rows of one batch size
TOKENS = GPU_TOKENS  # rows of a batch per sequence of a model
LIMITS = {"patterns": 1.0, "layers": 1.0, "models": 20.0}  # seconds per contender and forward job
TRAINING_LIMIT = 3  # factor of these limits for training jobs, since a step computes three products per forward product


@click.command("table", short_help="Measure every contender on patterns, layers and whole models, in one file.")
@bench_common.words_option("--parts", "kinds", KINDS, "One or more of patterns, layers and models.", ",".join(KINDS))
@bench_common.words_option("--steps", "steps", STEPS_OF_LAYERS, "One or both steps.", ",".join(STEPS_OF_LAYERS))
@bench_common.words_option("--precision", "precisions", COMPARISONS, "Precisions.", ",".join(PRECISIONS), "precision")
@click.option(
    "--batch", "batches", type=batches_in, metavar="NUMBERS", default=BATCHES, show_default=True,
    help=f"Batch sizes in rows, in the order of measurement. Models take one sequence per {TOKENS} rows, at most "
         f"{CPU_SEQUENCES} on processors and {GPU_SEQUENCES} on GPUs.",
)  # fmt: skip
@number_option("--subset", help_text="Measure only this many patterns, layers and models, the first ones.")
@bench_common.contender_options(dict.fromkeys((*NAMES, *METHODS)), "layer,bmm.  [default: all]", "compiled")
@bench_common.measurements_option(7)
@bench_common.runs_option(3)
@bench_common.time_limit_option("90m")
@bench_common.log_option(LOG)
@device_option
@bench_common.seed_option
@json_option
def command(
    kinds: tuple[str, ...], steps: tuple[str, ...], precisions: tuple[str, ...], batches: tuple[int, ...],
    subset: int | None, names: tuple[str, ...] | None, without: tuple[str, ...] | None, measurements: int, runs: int,
    seconds: float, output: Path, device: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Time all contenders on the same work, in one log. The work consists of 60 patterns of the paper, the layers of
    `ksgen bench layers named`, and ViT-S and GPT-2 medium as whole models.

    Forward passes of patterns, layers and models are measured first, then their training steps. Each of these parts
    gets an equal share of the time limit. Time that a part does not use goes to the others. If the command is stopped
    by the limit or killed, run it again: it continues with what the log lacks. `ksgen bench report` shows the results.

    \b
    Examples:
      ksgen bench table
      ksgen bench table --time-limit 20m --steps forward --batch 1568
      ksgen bench table --parts models --without bmm
      ksgen bench report table.jsonl
    """
    deadline = bench_common.ends_at(monotonic(), seconds)
    bench_common.check_torch("`ksgen bench table`")
    bench_common.check_log_name(output)
    from ksgen.bench.timing import Protocol, Times

    parts, found = list[bench_common.Part](), find_sharing(device)
    left = {kind: [each for each in KINDS[kind] if each in (names or KINDS[kind])] for kind in kinds}
    bench_common.contenders_left([each for some in left.values() for each in some], without)
    for step, kind in product(steps, kinds):
        some = tuple(each for each in left[kind] if each not in (without or ()))
        limit = LIMITS[kind] * (TRAINING_LIMIT if step == TRAINING else 1)
        protocol = Protocol(some, measurements, runs, limit, seed)
        if some:
            parts.append(bench_common.Part(protocol, _jobs(kind, step, found, batches, precisions, subset)))
    unfit = "none of these contenders supports this work; name other contenders"
    done = bench_common.measure_by(output, found, Times(), parts, deadline, unfit, takes_all=True)
    bench_common.print_results(done, as_json, _summaries)


def _jobs(
    kind: str, step: str, device: "Device", batches: Sequence[int], precisions: Sequence[str], subset: int | None
) -> "list[LayerJob]":
    """Jobs of a part, batch by batch, so that a time limit leaves complete patterns, layers or models."""
    from ksgen.bench.chains import named_layers
    from ksgen.bench.problem import LayerJob, product_job
    from ksgen.bench.whole_models import whole_job

    if kind == "patterns":
        each = product(batches, stratified(subset or PATTERNS), precisions, LAYOUTS)
        return [product_job(pattern, precision, layout, batch, step) for batch, pattern, precision, layout in each]
    if kind == "layers":
        layers = product(batches, named_layers()[:subset], precisions)
        return [LayerJob(layer, precision, "bsf", batch, step) for batch, layer, precision in layers]
    tokens, most = (CPU_TOKENS, CPU_SEQUENCES) if device.limits.is_cpu else (GPU_TOKENS, GPU_SEQUENCES)
    sequences = dict.fromkeys(min(max(1, batch // TOKENS), most) for batch in batches)
    wholes = product(sequences, MODELS[:subset], precisions)
    return [whole_job(model, precision, batch, tokens, step) for batch, model, precision in wholes]


def _summaries(rows: "Sequence[ResultRow]") -> "list[ResultTable]":
    from ksgen.bench import tables
    from ksgen.bench.rows import kinds_of

    found = kinds_of(rows)
    return [tables.overview(found.products), tables.headlines(found.without_models), tables.wholes(found.models)]
