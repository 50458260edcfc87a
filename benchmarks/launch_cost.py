"""What a call costs on the host, by part, over a device whose launches do nothing: `python benchmarks/launch_cost.py`.

The arrays are stand-ins with `__cuda_array_interface__`, whose launches need neither a GPU nor a driver.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

import click

from ksgen import arguments
from ksgen.arguments import check_memory
from ksgen.arrays import view
from ksgen.devices.base import Limits
from ksgen.launcher import Launcher
from ksgen.resources import Binary, Resources


@dataclass(frozen=True)
class _Compiler:
    name: str = "null"
    version: str = "1"

    def options(self, target: str) -> tuple[str, ...]:
        return ()

    def compile(self, text: str, entry: str, target: str) -> Binary:
        return Binary(b"null", entry, target, Resources(), {})


class NullDevice:
    """Does nothing, at once."""

    kind, runtime, dialect, index, name, target, driver_version = "opencl", "opencl", "cuda", 0, "null", "null", "0"
    supports_foreign_streams = True
    limits = Limits(227 * 1024, 1024, 132)

    def compiler(self) -> _Compiler:
        return _Compiler()

    def load(self, binary: Binary, entry: str, shared_bytes: int) -> str:
        return entry

    def launch(self, *arguments: Any) -> None:
        pass

    def allocate(self, nbytes: int) -> int:
        return 1 << 40

    def synchronize(self, stream: Any = None) -> None:
        pass

    def is_capturing(self, stream: Any) -> bool:
        return False


class Array:
    """A CUDA array of another library."""

    def __init__(self, address: int, *shape: int) -> None:
        described = {"shape": shape, "typestr": "<f4", "data": (address, False), "version": 3, "stream": None}
        self.__cuda_array_interface__ = described


def microseconds(call: Callable[[], Any], rounds: int = 200, calls: int = 50) -> float:
    """The median over rounds of the mean over calls."""
    times = []
    for _ in range(rounds):
        begin = perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((perf_counter_ns() - begin) / calls / 1e3)
    return median(times)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(as_json: bool) -> None:
    """Print the cost of a call by part, in microseconds."""
    device = NullDevice()
    arguments.device_for = lambda place: device  # type: ignore[assignment]
    ks = Launcher(1, 192, 48, 2)
    x, weights, out = Array(1 << 20, 25088, 96), Array(1 << 30, 1, 192, 48, 2), Array(1 << 34, 25088, 384)
    kept = ks.pack(weights)
    call = ks.prepare(x, kept, out=out)
    views = {"x": view(x, "x"), "out": view(out, "out")}
    plan, fit = call.plan, ks._fit("bsf", "none", views, None)
    parts = {
        "a prepared call": microseconds(call),
        "an ordinary call, packed weights": microseconds(lambda: ks(x, kept, out=out)),
        "  reading an array": microseconds(lambda: view(x, "x")),
        "  finding what fits shapes like these": microseconds(lambda: ks._fit("bsf", "none", views, None)),
        "  checking the memory": microseconds(lambda: check_memory(ks, views)),
        "  selecting the binary": microseconds(lambda: ks._plan(fit, device, None)),
        "  packed weights": microseconds(lambda: kept.packed_for(plan, None)),
        "an ordinary call, weights packed anew": microseconds(lambda: ks(x, weights, out=out)),
    }
    if as_json:
        click.echo(json.dumps({name.strip(): round(value, 3) for name, value in parts.items()}, indent=1))
        return
    for name, value in parts.items():
        click.echo(f"{name:40} {value:7.2f} us")


if __name__ == "__main__":
    main()
