"""`ksgen bench layers`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from ksgen.bench.roster import FORWARD, METHODS, STEPS_OF_LAYERS
from ksgen.commands import bench_common, common
from ksgen.commands.common import ACTIVATION, BATCHES, REPLACED, renamed_option
from ksgen.errors import DeviceError, SpecError
from ksgen.files import write
from ksgen.spec import LAYOUTS, Epilogue
from ksgen.spec.kernel import hint
from ksgen.values import excerpt

if TYPE_CHECKING:
    from ksgen.bench.chains import MeasuredLayer
    from ksgen.devices.base import Device

LOG = Path("layers.jsonl")
SETS = ("transformers", "structures", "random", "named")


@click.command("layers", short_help="Time layers: one launch against one per factor, PyTorch and the dense layer.")
@click.argument("named", nargs=-1, metavar="[transformers|structures|random|named|SPEC]...")
@click.option(
    "--batch", "batches", type=common.batches_in, metavar="NUMBERS",
    help=f"Batch sizes.  [default: the spec's, or {BATCHES}]",
)  # fmt: skip
@bench_common.precisions_option("the spec's, or float32")
@bench_common.words_option("--layout", "layouts", LAYOUTS, "Layouts.  [default: the spec's, or both]", what="layout")
@bench_common.words_option(
    "--steps", "steps", STEPS_OF_LAYERS, "One or both of forward and training, separated by a comma.", FORWARD
)
@common.number_option("--subset", help_text="Measure only this many layers, the first ones.")
@common.number_option(
    "--group-size",
    help_text="Also measure groups of this many equal layers on one x, such as 3 for q, k and v.",
    least=2,
)
@click.option("--beside", "group_size_before", type=click.IntRange(min=2), hidden=True)
@click.option("--between", type=ACTIVATION, help="Activation between factors.  [default: the spec's, or none]")
@click.option("--bias", is_flag=True, help="Add a bias to each output, also for layers that have none in their spec.")
@click.option("--activation", type=ACTIVATION, help="Activation after the bias.  [default: the spec's, or none]")
@click.option(
    "--residual",
    is_flag=True,
    help="Add a residual after the activation, also for layers that have none in their spec.",
)
@bench_common.contender_options(METHODS, "one_launch,bmm.  [default: all]", "layer")
@bench_common.measurements_option(10)
@bench_common.runs_option(10)
@bench_common.seconds_option(0.5)
@bench_common.time_limit_option()
@bench_common.log_option(LOG)
@click.option("--page", is_flag=True, help=f"Also write the page of the results next to the log; {REPLACED}.")
@common.device_option
@bench_common.seed_option
@common.json_option
def command(
    named: tuple[str, ...], batches: tuple[int, ...] | None, precisions: tuple[str, ...] | None, layouts: tuple[str,
        ...] | None,
    steps: tuple[str, ...],
    subset: int | None, group_size: int | None, group_size_before: int | None, between: str | None, bias: bool,
    activation: str | None, residual: bool,
    names: tuple[str, ...] | None, without: tuple[str, ...] | None, measurements: int, runs: int, most_seconds: float,
    seconds: float | None, output: Path, page: bool, device: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Time layers with several contenders, alternately. ksgen's contenders are one launch of all factors, one launch
    per factor, and KSLinear. PyTorch's contenders multiply factor by factor, by a dense matrix of the same size, or by
    the published form of a structure. Libraries take part where they are installed. Every result is checked against
    float64. A job is one layer in one precision, layout, batch size and step.

    A training step computes y, and then the gradients of x, of all weights and of the bias, without an optimizer. Its
    KSLinear is not frozen. Contenders that record no gradients are reported as unsupported.

    transformers (the default) names 24 chains with the sizes of layers in transformers. structures names layers of
    ksgen.structures, at least one per structure. random names 24 random pairs of the paper's patterns, from every class
    of size. named stands for layers of ViT, GPT-2 and Llama as structures with published numbers of blocks and ranks. A
    spec names its layers, groups and sums, with its options. A run that was stopped or killed continues when the same
    command is run again.

    \b
    Examples:
      ksgen bench layers --precision float32,bfloat16 --time-limit 8m
      ksgen bench layers specs/vit.yaml --batch 16,25088 --group-size 3 --device cuda
      ksgen bench layers random --seed 1 --between gelu --bias
      ksgen bench layers named --steps forward,training --time-limit 90m
      ksgen bench report layers.jsonl --markdown -
    `ksgen bench mine.yaml` means `ksgen bench layers mine.yaml -o mine.jsonl --page`.
    """
    deadline = bench_common.ends_at(monotonic(), seconds)
    bench_common.check_torch("`ksgen bench layers`")
    bench_common.check_log_name(output)
    methods = bench_common.contenders_left(names or METHODS, without)
    layers = _layers(named or SETS[:1], seed)[:subset]
    layers = [_with(layer, between, activation, Epilogue(bias, residual=residual)) for layer in layers]
    size = group_size or renamed_option("--beside", "--group-size", group_size_before)
    # in a group, y has the layout of x
    layers += [each.group_of(size) for each in layers if size and each.out_layout is None and not each.is_sum]
    from ksgen.bench.problem import LayerJob
    from ksgen.bench.timing import Protocol, Times

    jobs = [
        LayerJob(each, precision, layout, batch, step)
        for each in layers
        for precision in precisions or each.precisions or ("float32",)
        for layout, batch, step in product(
            layouts or each.layouts or LAYOUTS, batches or each.batches or common.batches_in(BATCHES), steps
        )
    ]
    protocol = Protocol(methods, measurements, runs, most_seconds, seed)
    unfit = "none of these contenders supports these layers; name other contenders"
    parts = [bench_common.Part(protocol, jobs)]
    done = bench_common.measure_by(output, find_sharing(device), Times(), parts, deadline, unfit)
    from ksgen.bench.tables import headlines, layers_summary

    if page:
        from ksgen.bench import report
        from ksgen.bench.rows import read_rows

        done = replace(done, page=output.with_suffix(".html"))
        write(output.with_suffix(".html"), report.page(read_rows(output), machine=report.machine_of(output)))
    bench_common.print_results(done, as_json, lambda rows: [headlines(rows), layers_summary(rows)])


def _layers(named: Sequence[str], seed: int) -> list["MeasuredLayer"]:
    from ksgen.bench.chains import MeasuredLayer, drawn, named_layers, of_spec, structured, transformers

    found: list[MeasuredLayer] = []
    for word in dict.fromkeys(named):
        if word.endswith((".yaml", ".yml")):
            found += of_spec(common.find_spec(Path(word)))
        elif word == "structures":
            found += structured()
        elif word == "named":
            found += named_layers()
        elif word in SETS:
            chains = transformers() if word == "transformers" else drawn(seed)
            found += [MeasuredLayer(name, (chain,)) for name, chain in chains.items()]
        else:
            raise SpecError(f"{excerpt(word)} names no layers; {hint(word, SETS)}, or a spec such as specs/vit.yaml")
    if not found:
        products = f"`ksgen bench paper --patterns {named[0]}` times its kernels"
        raise SpecError(f"{named[0]} has no layers; accepted: a spec with `layers:`, {', '.join(SETS)}; {products}")
    return found


def _with(layer: "MeasuredLayer", between: str | None, activation: str | None, added: Epilogue) -> "MeasuredLayer":
    """Return the layer with the activations that the command names, if any, in place of its own.

    It also gets the bias and residual that the command names.
    """
    given = layer.epilogue
    epilogue = Epilogue(
        given.bias or added.bias,
        given.activation if activation is None else activation,
        given.residual or added.residual,
        given.residual_first or layer.is_sum,
    )
    has_between = any(len(chain) > 1 for chain in layer.chains)
    return replace(layer, between=between if between and has_between else layer.between, epilogue=epilogue)


def find_sharing(named: str | None) -> "Device":
    """Find a device that works on PyTorch's own arrays. `DeviceError` if the named one does not."""
    from ksgen.devices import find_device

    device = find_device(named)
    if device.kind != "cuda" and not device.shares_host:
        copies = f"{device.name} ({device.runtime}) works on copies"
        raise DeviceError(f"layers are measured on PyTorch's own arrays, and {copies}; accepted: --device native, cuda")
    return device
