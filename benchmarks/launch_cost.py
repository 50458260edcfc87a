"""Cost of a call on the host by part, through both CUDA runtimes and on a processor.

    python -m benchmarks.launch_cost

On a machine without a GPU it runs over the stand-in driver (tests/driver), which checks launches and drops them.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter_ns
from typing import Any

import click
import numpy as np

from ksgen.devices import Found, find_device, list_devices
from ksgen.errors import DeviceError
from ksgen.launch.arrays import CallOptions, Views, view
from ksgen.launch.checks import check_memory
from ksgen.launch.choice import choice_by_name, limits_of
from ksgen.launch.planner import PLANNER
from ksgen.launch.streams import device_and_stream, in_their_context
from ksgen.launcher import Call, Launcher
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.driver import NotHereError, environment
from tests.driver.items import is_on_machine
from tests.driver.machine import RUNTIMES
from tests.support.device_arrays import CudaArray

BATCH = 64
PROCESSORS = ("native", "opencl")


def microseconds(call: Callable[[], Any], rounds: int, calls: int = 50) -> float:
    """Median over rounds of the mean over calls."""
    times = []
    for _ in range(rounds):
        begin = perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((perf_counter_ns() - begin) / calls / 1e3)
    return median(times)


def measure(rounds: int) -> dict[str, float]:
    """Measure the parts of a call in microseconds, on the device that KSGEN_DEVICE names.

    On a processor, arrays lie on the host, and every call waits for its kernel. So the time above the kernel alone is
    the launcher's.
    """
    device, ks = find_device(), Launcher(1, 192, 48, 2)
    on_processor = device.runtime in PROCESSORS
    arrays: list[Any] = [np.zeros(shape, np.float32) for shape in ((BATCH, 96), (1, 192, 48, 2), (BATCH, 384))]
    x, weights, out = arrays if on_processor else (CudaArray(device, array) for array in arrays)
    packed = ks.pack(weights, device=f"{device.runtime}:{device.index}") if on_processor else ks.pack(weights)
    call = ks.prepare(x, packed, out=out)
    views = {"x": view(x, "x"), "out": view(out, "out")}
    plan, fit = call.plan, ks._checks.find(ks, CallOptions(), views, (packed.form,))
    bare, memory, launch, more = (dict[str, Callable[[], Any]]() for _ in range(4))
    if on_processor:
        call()  # binds its arguments to an OpenCL kernel, and starts native threads
        bare["  the kernel and its binding"] = _kernel_call(device, plan, call.arguments)
        memory["  checking the memory"] = lambda: check_memory(ks, views)
        launch["  an array as an argument, each"] = lambda: device.shared(views["x"].pointer)
    else:
        bare["  the driver and its binding"] = _driver_call(device, plan, call.arguments)
        memory["  checking the memory"] = lambda: _checked(ks, device, views)
        memory["  device and stream"] = lambda: device_and_stream(ks, fit.place, None)
        launch["  arguments, block and launch"] = lambda: device.launch(
            plan.multiply, plan.grid, plan.block, plan.shared_bytes, call.arguments, None
        )
        more |= _hopper_calls(device, ks.pattern, x, weights, out)
    parts = {
        "a prepared call": call,
        **bare,
        "an ordinary call, packed weights": lambda: ks(x, packed, out=out),
        "  reading an array, each": lambda: view(x, "x"),
        "  looking up the checked arguments": lambda: ks._checks.find(ks, CallOptions(), views, (packed.form,)),
        **memory,
        "  selecting the binary": lambda: ks._plan(fit, device, None, True),
        "  packed weights": lambda: packed.use(plan, None),
        **launch,
        "an ordinary call, weights packed again": lambda: ks(x, weights, out=out),
        **more,
    }
    return {name: microseconds(part, rounds) for name, part in parts.items()}


def _checked(ks: Launcher, device: Any, views: Views) -> None:
    check_memory(ks, views)
    in_their_context(ks, device, None, views)


def _kernel_call(device: Any, plan: Any, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """Bare kernel call on a processor, with all arguments prepared."""
    if device.runtime == "native":
        values = (ctypes.c_int64 * len(arguments))(
            *(each if isinstance(each, int) else each.pointer if each else 0 for each in arguments)
        )
        launch, walk = device._launcher, plan.multiply.walk
        return lambda: launch(walk, values, plan.grid, 0, device.limits.multiprocessors, None)
    enqueue, queue, kernel = device._cl.enqueue_nd_range_kernel, device._queue, plan.multiply.kernel

    def alone() -> None:
        enqueue(queue, kernel, (plan.grid * plan.block,), (plan.block,))
        queue.finish()

    return alone


def _driver_call(device: Any, plan: Any, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """Launch of the runtime alone, with all arguments prepared."""
    grid, block, shared_bytes, kernel = plan.grid, plan.block, plan.shared_bytes, plan.multiply
    if device.runtime == "pycuda":
        device._context.push()
        values = [int(argument) for argument in arguments]
        kernel.prepare(values)
        launch = kernel.parts[0].prepared_async_call
        return lambda: launch((grid, 1), (block, 1, 1), None, *values, shared_size=shared_bytes)
    spare = kernel.spares.take()
    launch, function, address = device._cu.cuLaunchKernel, kernel.function, spare[0].pack(arguments)
    kernel.spares.put_back(spare)  # keeps its memory alive
    return lambda: launch(function, grid, 1, 1, block, 1, 1, shared_bytes, 0, address, 0)


def _hopper_calls(device: Any, pattern: Pattern, x: CudaArray, weights: CudaArray, out: CudaArray) -> dict[str, Call]:
    """Prepared calls of a kernel with a tensor map, launched early and normally; none before Hopper."""
    kernel, limits = KernelSpec(pattern, "tf32"), limits_of(device)
    if not limits.warpgroups:
        return {}
    plan = PLANNER.plan_of(device, kernel, BATCH, choice_by_name("wgmma_registers", kernel, BATCH, limits))
    late = replace(plan, multiply=device.load(plan.binary, plan.source.entry, plan.shared_bytes))
    arguments = plan.arguments({"x": x.pointer, "weights": plan.pack(weights.pointer, None), plan.result: out.pointer})
    named = {"a prepared call, one tensor map, begins early": plan, "  the same, does not begin early": late}
    return {name: Call(each, arguments, None, out, (), None, ()) for name, each in named.items()}


def measure_apart(runtime: str, rounds: int) -> dict[str, float] | str:
    """Measure in a separate process for the runtime, or return the reason why it is unavailable."""
    try:
        variables = _variables(runtime)
    except (NotHereError, DeviceError) as error:
        return str(error)
    command = [sys.executable, "-m", "benchmarks.launch_cost", "--apart", "--rounds", str(rounds)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"{runtime}: {done.stderr.strip()}")
    parts: dict[str, float] = json.loads(done.stdout)
    return parts


def _variables(runtime: str) -> dict[str, str]:
    if runtime in PROCESSORS:
        return dict(os.environ) | {"KSGEN_DEVICE": _processor(runtime)}
    if is_on_machine():
        return dict(os.environ) | {"KSGEN_DEVICE": runtime}
    return environment(runtime) | {"KSGEN_DRIVER_IDLE": "1"}


def _processor(runtime: str) -> str:
    """First device of a processor runtime that uses host memory in place."""
    listed = [each.selector for each in list_devices() if isinstance(each, Found) and each.runtime == runtime]
    found = next((each for each in listed if find_device(each).shares_host), None)
    if found is None:
        raise DeviceError("no such device uses host memory in place")
    return found


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--rounds", default=200, show_default=True, help="Rounds of 50 calls each; medians are printed.")
@click.option("--apart", is_flag=True, hidden=True, help="Measure here, on KSGEN_DEVICE.")
def main(as_json: bool, rounds: int, apart: bool) -> None:
    """Print the cost of a call by part, in microseconds."""
    if apart:
        click.echo(json.dumps(measure(rounds)))
        return
    found = {runtime: measure_apart(runtime, rounds) for runtime in (*RUNTIMES, *PROCESSORS)}
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for runtime, parts in found.items():
        if isinstance(parts, str):
            click.echo(f"{runtime}: not measured: {parts}")
            continue
        click.echo(f"{runtime}, us")
        for name, value in parts.items():
            click.echo(f"  {name:44} {value:7.2f}")


if __name__ == "__main__":
    main()
