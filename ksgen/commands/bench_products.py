"""`ksgen bench paper` and `ksgen bench energy`: times and joules of products."""

from typing import TYPE_CHECKING

import click

from ksgen.bench.roster import OTHERS, OURS
from ksgen.commands.bench_common import (
    Selection,
    check_library,
    job_options,
    measure,
    measurements_option,
    print_done,
    runs_option,
    seconds_option,
)
from ksgen.commands.common import json_option

if TYPE_CHECKING:
    from ksgen.bench.timing import Quantity
    from ksgen.devices.base import Device

MOST_SECONDS = 600  # limit of `ksgen bench energy` per contender and job
MOST_D = 64  # largest d of its patterns, unless some are named: the limit of the paper's Figure 7


@click.command("paper", short_help="Time ksgen's kernels against every baseline, as the paper does.")
@job_options
@measurements_option
@runs_option
@seconds_option(2.0)
@click.option(
    "--tune",
    metavar="BUDGET",
    help="First tune kernels without wisdom. BUDGET is the limit per kernel: 60s, or a number of candidates.",
)
@json_option
def paper(
    selection: Selection, measurements: int, runs: int, most_seconds: float, tune: str | None, as_json: bool
) -> None:
    """Time ksgen's kernels and PyTorch's methods for the same product, alternately.

    The results include errors and floors. A floor is the least time that the device's memory and arithmetic permit. A
    run that was stopped or killed continues when the same command is run again.

    \b
    Examples:
      ksgen bench paper --subset 60 --time-limit 8m -o h200.jsonl
      ksgen bench paper --patterns "1,192,48,2 2,48,192,1" --precision float32,float16 --without compiled
      ksgen bench report h200.jsonl -o h200.html
    """
    check_library("torch", "`ksgen bench paper`", "bench")
    from ksgen.bench.timing import Protocol, Times
    from ksgen.tuning.tuner import parse_budget

    parse_budget(tune)  # raises errors now, rather than at the first search
    protocol = Protocol(selection.contenders(), measurements, runs, most_seconds, selection.seed, tune)
    print_done(measure(selection, protocol, lambda device: Times()), as_json)


@click.command("energy", short_help="Measure joules per run with the GPU's own counter, minus its idle power.")
@job_options
@measurements_option
@click.option(
    "--seconds",
    "length_s",
    type=click.FloatRange(min=0.1),
    default=2.5,
    show_default=True,
    help="Seconds per measurement.",
)
@json_option
def energy(selection: Selection, measurements: int, length_s: float, as_json: bool) -> None:
    """Measure the energy per run of each contender on an NVIDIA GPU. The idle GPU's power is measured first, and its
    energy is subtracted.

    If -o names the log of `ksgen bench paper`, its rows hold both times and joules. Use the GPU for nothing else
    meanwhile.

    \b
    Examples:
      ksgen bench energy --subset 30 --precision float32,float16 --time-limit 30m -o h200.jsonl
      ksgen bench energy --patterns 1,192,48,2 --contenders ksgen,bmm,einsum --measurements 3
    """
    check_library("torch", "`ksgen bench energy`", "bench")
    from ksgen.bench.timing import Protocol

    protocol = Protocol(
        selection.contenders((OURS, *OTHERS)), measurements, most_seconds=MOST_SECONDS, seed=selection.seed
    )

    def quantity(device: "Device") -> "Quantity":
        import torch

        from ksgen.bench.contenders import torch_device
        from ksgen.bench.energy import Energies, EnergyError, Meter, find_handle, open_nvml

        if device.kind != "cuda":
            raise EnergyError(f"energy is measured on NVIDIA GPUs, by NVML; not {device.name} ({device.runtime})")
        nvml, where = open_nvml(), torch_device(device)
        uuid = getattr(torch.cuda.get_device_properties(where), "uuid", None)
        meter = Meter(nvml, find_handle(nvml, str(uuid) if uuid else None, device.index))
        return Energies(meter, meter.idle(), length_s)

    print_done(measure(selection, protocol, quantity, MOST_D), as_json)
