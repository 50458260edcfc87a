"""Tests of faults on a GPU: each ends in one clear KsgenError, which reports if the process cannot go on.

All on the stand-in machine, whose driver fails on request. What ends a process's use of the GPU has a process of its
own.
"""

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ksgen.build.request import Binary
from ksgen.devices import find_device
from ksgen.errors import DeviceError
from ksgen.launcher import Launcher
from ksgen.measure.verify import measure
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.driver import NotHereError, environment, run
from tests.launch.test_runtimes import BATCH, SHAPE, check, inputs

pytestmark = pytest.mark.slow

on_both = pytest.mark.parametrize("runtime", ["pycuda", "driver"])
on_machine = pytest.mark.stand_in


def script(text: str, runtime: str, **variables: str) -> list[str]:
    """The lines that a process on the stand-in machine prints: one that ends as it should."""
    try:
        done = run(f"{PREAMBLE}\n{text}", runtime, **variables)
    except NotHereError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


PREAMBLE = """
import numpy as np
from ksgen import use_bundle
from ksgen.build.build import build
from ksgen.devices import find_device, list_devices
from ksgen.errors import KsgenError
from ksgen.launcher import Launcher
from tests.launch.test_runtimes import SHAPE, check, inputs

def multiply(precision="float32"):
    try:
        x, weights = inputs(precision)
        y = Launcher(*SHAPE)(x, weights)
        check(y, x, weights, precision=precision)
    except KsgenError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("right")
"""


# ---- faults that a process survives


@pytest.fixture
def device(runtime: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if not hasattr(ctypes.CDLL("libcuda.so.1"), "ksgen_driver_faults"):
        pytest.skip("a real driver has no faults on request")
    monkeypatch.setenv("KSGEN_DEVICE", runtime)
    return find_device(runtime)


@pytest.fixture
def faults(device: Any) -> Iterator[Callable[[str], None]]:
    """Sets the driver's faults, which end with the test."""
    request = ctypes.CDLL("libcuda.so.1").ksgen_driver_faults
    yield lambda text: request(text.encode())
    request(b"")


FAILING = {  # call -> status, message, and the runtime's own words
    "cuMemAlloc": (2, "allocating 4440 bytes", "out.of.memory"),
    "cuMemcpyHtoDAsync": (1, "uploading 4440 bytes", "invalid.(argument|value)"),
    "cuMemcpyDtoHAsync": (1, "downloading 7992 bytes", "invalid.(argument|value)"),
    "cuLaunchKernel": (
        701,
        r"launching ks_2x9x5x3_float32_bsf_pack \(3 blocks of 256, 0 bytes\)",
        "out.of.resources|too many resources",
    ),
}


@on_machine
@on_both
@pytest.mark.parametrize("call", FAILING)
def test_a_call_that_fails_is_reported_and_the_next_one_works(
    call: str, device: Any, faults: Callable[[str], None]
) -> None:
    code, doing, words = FAILING[call]
    ks, (x, weights) = Launcher(*SHAPE), inputs()
    ks(x, weights)
    faults(f"{call}:{code}")  # every time: PyCUDA asks again for memory
    with pytest.raises(DeviceError, match=f"(CUDA|PyCUDA on .*), {doing}: .*(?i:{words})") as told:
        ks(x, weights)
    assert "the GPU context is lost" not in str(told.value)
    faults("")
    check(ks(x, weights), x, weights)


@on_machine
@on_both
def test_more_memory_than_there_is(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"allocating 1125899906842624 bytes: .*(?i:out.of.memory)"):
        device.allocate(1 << 50)
    device.allocate(1 << 10)


@on_machine
@on_both
def test_a_damaged_binary_is_refused(device: Any) -> None:
    plan = Launcher(*SHAPE).prepare(*inputs()).plan
    data, entry = plan.binary.data, plan.source.entry
    flipped = bytes([*data[:9000], data[9000] ^ 1, *data[9001:]])
    for early in (False, True):
        for damaged in (b"", b"no cubin", data[:50], data[: len(data) // 2], flipped):
            with pytest.raises(DeviceError, match=rf"loading {entry}: .*(?i:image)"):
                device.load(Binary(damaged, entry, device.target), entry, 0, early)
        with pytest.raises(DeviceError, match=r"divide: .*(?i:not.found)"):
            device.load(plan.binary, "divide", 0, early)
    device.load(plan.binary, entry, plan.shared_bytes)


@on_machine
@on_both
def test_more_shared_memory_than_there_is(device: Any) -> None:
    plan = Launcher(*SHAPE).prepare(*inputs()).plan
    for early in (False, True):
        with pytest.raises(DeviceError, match=plan.source.entry + ".*(?i:invalid.(argument|value))"):
            device.load(plan.binary, plan.source.entry, 1 << 20, early)


@on_machine
@on_both
def test_an_early_launch_that_fails_is_reported_and_the_next_one_works(
    device: Any, faults: Callable[[str], None]
) -> None:
    if device.target != "sm_90a":
        pytest.skip(f"{device.name} has no launches that begin early")
    kernel = KernelSpec(Pattern(2, 24, 16, 4), "float16")
    faults("cuLaunchKernelEx:701")
    words = (
        r"launching ks_2x24x16x4_float16_bsf_\w+ \(2 blocks of 384, \d+ bytes\): .*(?i:out.of.resources|too many "
        r"resources)"
    )
    with pytest.raises(DeviceError, match=f"(CUDA|PyCUDA on .*), {words}"):
        measure(device, kernel, 80, runs=0, family="wgmma_registers")
    faults("")
    assert measure(device, kernel, 80, runs=0, family="wgmma_registers").passed


@on_machine
@on_both
def test_a_kernel_that_is_wrong_does_not_pass(device: Any, faults: Callable[[str], None]) -> None:
    kernel = KernelSpec(Pattern(*SHAPE))
    assert measure(device, kernel, BATCH, runs=1).passed
    faults("ks_2x9x5x3_float32_bsf:wrong")
    assert not measure(device, kernel, BATCH, runs=1).passed


# ---- faults that end a process's use of the GPU


LOST = "the GPU context is lost, and only a new process can use the GPU again"
ENDING = {
    214: "ECC",
    700: "illegal.(memory access|address)",
    702: "launch.timed.out|launch.timeout",
    716: "misaligned.address",
    717: "address.space",
    719: "launch.fail",
}


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize("code", ENDING)
def test_a_kernel_that_fails_ends_the_use_of_the_gpu(code: int, runtime: str) -> None:
    for told in script("multiply()\nmultiply()", runtime, KSGEN_DRIVER_FAULTS=f"ks_*_bsf:{code}"):
        assert told.startswith("DeviceError: ")
        assert told.endswith(LOST)
        assert re.search(ENDING[code], told, re.IGNORECASE), told


OUT_OF_BOUNDS = """
text = 'extern "C" __global__ void stray(int* y) { y[threadIdx.x + 1] = 1; }'
device = find_device()
kernel, memory = device.load(build(text, "stray", device.target, device.compiler()), "stray", 0), device.allocate(128)
early = device.load(build(text, "stray", device.target, device.compiler()), "stray", 0, True)
device.launch(kernel, 1, 32, 0, (memory,), None)
print("launched")
for _ in range(2):
    try:
        {call}
    except KsgenError as error:
        print(error)
"""


@on_both
def test_a_store_outside_its_array_is_an_illegal_address(runtime: str) -> None:
    launched, *told = script(OUT_OF_BOUNDS.replace("{call}", "device.synchronize()"), runtime)
    assert launched == "launched"
    assert len(told) == 2
    assert all(
        re.search(rf"waiting for the stream: .*{ENDING[700]}.*; {LOST}$", each, re.IGNORECASE) for each in told
    ), told


@on_both
def test_direct_driver_calls_report_code_and_name_of_a_lost_context(runtime: str) -> None:
    text = OUT_OF_BOUNDS.replace("{call}", "device.synchronize()") + AFTER
    *_, told, name = script(text, runtime)
    who = "CUDA" if runtime == "driver" else f"PyCUDA on {name}"
    words = "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)"
    assert told.startswith(f"{who}, ")
    assert told.endswith(f": {words}; {LOST}")


AFTER = """
try:
    device.launch(early, 1, 32, 0, (memory,), None)
except KsgenError as error:
    print(error)
print(device.name)
"""
EARLY = """
text = 'extern "C" __global__ void touch(int* y) { y[threadIdx.x] = 1; }'
device = find_device()
kernel = device.load(build(text, "touch", device.target, device.compiler()), "touch", 0, True)
memory = device.allocate(128)
try:
    device.launch(kernel, 1, 32, 0, (memory,), None)
    device.synchronize()
    print("launched plainly")
except KsgenError as error:
    print(error)
"""


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize(
    ("gpu", "words"),
    [("H200", f"waiting for the stream: .*{ENDING[719]}.*"), ("A100", "^launched plainly$")],
)
def test_an_early_launch_of_a_kernel_that_does_not_wait_or_on_a_gpu_that_has_none(
    runtime: str, gpu: str, words: str
) -> None:
    (told,) = script(EARLY, runtime, KSGEN_DRIVER_GPUS=gpu)
    assert re.search(words, told, re.IGNORECASE), told


@on_both
def test_a_kernel_that_hangs_is_ended_from_outside(runtime: str) -> None:
    try:
        variables = environment(runtime) | {"KSGEN_DRIVER_FAULTS": "ks_*_bsf:hang"}
    except NotHereError as error:
        pytest.skip(str(error))
    command = [
        sys.executable,
        "-c",
        f"{PREAMBLE}\nx, weights = inputs(); ks = Launcher(*SHAPE).prepare(x, weights); print(1, flush=True); ks()",
    ]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "1\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
    assert script("multiply()", runtime) == ["right"]


# ---- machines


@on_both
def test_a_machine_without_a_gpu_is_reported(runtime: str) -> None:
    (told,) = script("multiply()", runtime, KSGEN_DRIVER_GPUS="")
    assert re.match(
        r"DeviceError: (CUDA, starting the driver|PyCUDA): .*no.(CUDA-capable )?device.*nvidia-smi shows whether a "
        r"GPU is there",
        told,
    )


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize(("gpu", "target"), [("A100", "sm_80"), ("RTX4090", "sm_89")])
def test_other_gpus(gpu: str, target: str, runtime: str) -> None:
    assert script("print(find_device().target)\nmultiply('float16')", runtime, KSGEN_DRIVER_GPUS=gpu) == [
        target,
        "right",
    ]


@on_both
def test_each_of_several_gpus(runtime: str) -> None:
    text = """
for line in list_devices():
    if line.runtime == os.environ["KSGEN_DEVICE"].partition(":")[0]:
        print(line.selector, line.target)
multiply()
print(find_device().name)
"""
    variables = {"KSGEN_DRIVER_GPUS": "H200,A100", "KSGEN_DEVICE": f"{runtime}:1"}
    assert script(f"import os\n{text}", runtime, **variables) == [
        f"{runtime}:0 sm_90a", f"{runtime}:1 sm_80", "right", "NVIDIA A100-SXM4-80GB"
    ]  # fmt: skip


@on_both
def test_a_binary_for_another_gpu_is_refused(runtime: str) -> None:
    text = """
one, other = find_device(), find_device(f"{find_device().runtime}:1")
plan = Launcher(*SHAPE).prepare(*inputs()).plan
try:
    other.load(plan.binary, plan.source.entry, 0)
except KsgenError as error:
    print(error)
"""
    (told,) = script(text, runtime, KSGEN_DRIVER_GPUS="H200,A100")
    assert re.search("loading ks_2x9x5x3_float32_bsf: .*(no kernel image is available|NO_BINARY_FOR_GPU)", told), told


# ---- caches


@pytest.mark.exhaustive
@on_both
def test_cold_warm_and_damaged_caches(runtime: str, tmp_path: Path) -> None:
    cold = {"KSGEN_CACHE_DIR": str(tmp_path / "cache")}
    closed = cold | {"KSGEN_NO_COMPILE": "1"}
    (told,) = script("multiply()", runtime, **closed)
    assert re.match(
        "ToolchainError: ks_2x9x5x3_float32_bsf: no cache holds it for sm_90a, and KSGEN_NO_COMPILE forbids compiling "
        "it",
        told,
    )
    assert script("multiply()", runtime, **cold) == ["right"]
    assert script("multiply()", runtime, **closed) == ["right"]
    (kept,) = (tmp_path / "cache").glob("*/*/binary")
    kept.chmod(0o600)
    kept.write_bytes(kept.read_bytes()[:-1])
    assert script("multiply()", runtime, **closed)[0].startswith(
        "ToolchainError: ks_2x9x5x3_float32_bsf: no cache holds it"
    )
    assert script("multiply()", runtime, **cold) == ["right"]


@pytest.mark.exhaustive
@on_both
def test_a_bundle_is_all_that_a_machine_needs(runtime: str, tmp_path: Path) -> None:
    spec, bundle = tmp_path / "one.yaml", tmp_path / "one.ksb"
    spec.write_text("kernels:\n  - 2,9,5,3\n", encoding="utf-8")
    command = ["ksgen", "bundle", str(spec), "--arch", "sm_90a", "-o", str(bundle)]
    script(f"import sys\nfrom ksgen.cli import main\nsys.argv = {command}\nmain()", runtime)
    use = f"use_bundle({str(bundle)!r})\nmultiply()"
    assert script(use, runtime, KSGEN_CACHE_DIR=str(tmp_path / "empty"), KSGEN_NO_COMPILE="1") == ["right"]


@on_both
def test_the_background_builds_and_loads_a_kernel(runtime: str, tmp_path: Path) -> None:
    """The caller goes on meanwhile, and launches the kernel later."""
    text = """
import time
from ksgen.build.background import PendingError, deferred, unfinished
begun = 0
while not begun or unfinished():
    try:
        with deferred(lambda: True):
            multiply()
        break  # the background ended since it was asked
    except PendingError:
        begun += 1
        time.sleep(0.01)
else:
    with deferred(lambda: True):
        multiply()
print(begun > 0)
"""
    assert script(text, runtime, KSGEN_CACHE_DIR=str(tmp_path / "cache")) == ["right", "True"]


@on_both
def test_a_call_compiles_nothing_after_a_build(runtime: str, tmp_path: Path) -> None:
    text = f"""
import os
Launcher(*SHAPE).build({BATCH})
os.environ.update(KSGEN_NO_COMPILE="1", KSGEN_CACHE_DIR={str(tmp_path / "none")!r})
multiply()
"""
    assert script(text, runtime, KSGEN_CACHE_DIR=str(tmp_path / "cache")) == ["right"]


# ---- contexts of the user's


IN_THEIR_CONTEXT = """
import pycuda.{how}
from pycuda import driver, gpuarray
multiply()
x, weights = inputs()
ks, stream = Launcher(*SHAPE), driver.Stream()
given, own = gpuarray.to_gpu(x), gpuarray.to_gpu(weights)
y = ks(given, own, stream=stream)
stream.synchronize()
check(y.get(), x, weights)
print(driver.Context.get_current() is not None)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["autoinit", "autoprimaryctx"])
def test_contexts_that_pycuda_makes(how: str) -> None:
    assert script(IN_THEIR_CONTEXT.format(how=how), "pycuda") == ["right", "True"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("device", "call"),
    [("pycuda", "(x, weights, stream=stream.handle)"), ("driver", "(x, weights)"), ("driver", ".pack(weights)")],
)
def test_arrays_in_a_context_of_pycudas_own_are_not_the_driver_runtimes(device: str, call: str) -> None:
    text = f"""
import pycuda.autoinit
from pycuda import driver, gpuarray
x, weights = map(gpuarray.to_gpu, inputs())
stream = driver.Stream()
try:
    Launcher(*SHAPE){call}
except KsgenError as error:
    print(error)
"""
    name = "x" if call.startswith("(x") else "weights"
    (told,) = script(text, "pycuda", KSGEN_DEVICE=device)
    assert told == (
        f"Launcher(2, 9, 5, 3): {name} lies in a CUDA context of PyCUDA's own, and the driver runtime works in the "
        "primary one; "
        "import pycuda.autoprimaryctx in the place of pycuda.autoinit"
    )


ON_THE_SECOND_GPU = """
from pycuda import driver, gpuarray
driver.init()
context = driver.Device(1).retain_primary_context()
context.push()
x, weights = inputs()
y = Launcher(*SHAPE)(gpuarray.to_gpu(x), gpuarray.to_gpu(weights))
check(y.get(), x, weights)
print("right")
del y
context.pop()
context.detach()
"""


def test_gpuarrays_go_to_the_gpu_that_holds_them() -> None:
    assert script(ON_THE_SECOND_GPU, "pycuda", KSGEN_DRIVER_GPUS="H200,A100") == ["right"]


@on_both
def test_cuda_arrays_go_to_the_gpu_that_holds_them(runtime: str) -> None:
    text = """
from tests.support.device_arrays import CudaArray
from tests.launch.test_runtimes import out_like
device = find_device(f"{find_device().runtime}:1")
x, weights = inputs()
out = CudaArray(device, out_like())
Launcher(*SHAPE)(CudaArray(device, x), CudaArray(device, weights), out=out)
check(out.content(), x, weights)
print("right")
"""
    assert script(text, runtime, KSGEN_DRIVER_GPUS="H200,A100") == ["right"]


def test_another_context_comes_back_after_a_call() -> None:
    text = """
from cuda.bindings import driver as cu
cu.cuInit(0)
_, theirs = cu.cuCtxCreate(None, 0, 0)
multiply()
print(int(cu.cuCtxGetCurrent()[1]) == int(theirs))
"""
    assert script(text, "driver") == ["right", "True"]


# ---- contexts that their users detach


A_CONTEXT_FOR_EACH = """
import gc
from pycuda import driver, gpuarray
from ksgen import quantize
driver.init()
x, weights = inputs()
ks, stored = Launcher(*SHAPE), quantize(weights, "int8")
kept = call = None

def report(work):
    try:
        work()
    except KsgenError as error:
        print(f"{type(error).__name__}: {error}")

for number in range(3):
    context = driver.Device(0).make_context()
    if kept:
        report(lambda: ks(x, kept))
        report(call)
        find_device().allocate(8)  # the user's context is still current
    multiply()
    ks(x, stored)
    given = gpuarray.to_gpu(x)
    check(ks(given, gpuarray.to_gpu(weights)).get(), x, weights)
    kept, call, device = ks.pack(weights), ks.prepare(x, weights), find_device()
    assert device is find_device() and driver.Context.get_current() == context
    if number == 1:
        device._number = -1  # as if another context had come to the address of its own
        assert find_device() is not device
        report(lambda: device.allocate(8))
    context.pop()
    context.detach()
    device = given = None
context = driver.Device(0).make_context()
del kept, call
gc.collect()
print(driver.Context.get_current() == context, int(driver.mem_alloc(8)) > 0)
context.pop()
"""


def test_each_context_of_pycudas_user_serves_until_it_is_detached() -> None:
    gone = (
        "the CUDA context that this was made in is gone, detached by its user; "
        "call launchers, which open the current context, and pack weights and prepare calls again"
    )
    packed = (
        "LaunchError: Launcher(2, 9, 5, 3): packed weights lie in a CUDA context that is gone, detached by its "
        "user; pack them again"
    )
    uploading, allocating = (
        f"DeviceError: PyCUDA on NVIDIA H200, {doing} bytes: {gone}" for doing in ("uploading 4440", "allocating 8")
    )
    after = [packed, uploading, "right"]
    assert script(A_CONTEXT_FOR_EACH, "pycuda") == ["right", *after, allocating, *after, "True True"]


LAUNCHED_IN_A_DEAD_CONTEXT = """
from pycuda import driver
driver.init()
first = driver.Device(0).make_context()
device = find_device()
text = 'extern "C" __global__ void touch(int* y) { y[threadIdx.x] = 1; }'
kernel, memory = device.load(build(text, "touch", device.target, device.compiler()), "touch", 0), device.allocate(128)
first.detach()
second = driver.Device(0).make_context()
try:
    device.launch(kernel, 1, 32, 0, (memory,), None)
except KsgenError as error:
    print(error)
del memory
print(driver.Context.get_current() == second, int(driver.mem_alloc(8)) > 0)
second.pop()
"""


def test_a_launch_in_a_detached_context_leaves_the_users_own_current() -> None:
    told, after = script(LAUNCHED_IN_A_DEAD_CONTEXT, "pycuda")
    assert told.startswith(
        "PyCUDA on NVIDIA H200, launching touch (1 blocks of 32, 0 bytes): the CUDA context that this was made in is "
        "gone"
    )
    assert after == "True True"


GPUARRAYS_ELSEWHERE = """
import threading
import pycuda.autoinit
from pycuda import driver, gpuarray
multiply()
x, weights = map(gpuarray.to_gpu, inputs())
ks, out = Launcher(*SHAPE), gpuarray.empty((x.shape[0], 54), np.float32)

def work():
    try:
        ks(x, weights)
    except KsgenError as error:
        print(error)
    ks(x, weights, out=out)

thread = threading.Thread(target=work)
thread.start()
thread.join()
check(out.get(), *inputs())
other = driver.Device(0).make_context()
work()
other.pop()
check(out.get(), *inputs())
"""


def test_a_thread_outside_the_context_of_gpuarrays_is_reported_before_a_new_one_is_made() -> None:
    told = "x is a GPUArray of a context that is not current on this thread; push() it before the call, or give out="
    assert script(GPUARRAYS_ELSEWHERE, "pycuda") == ["right", told, told]


IN_A_FORK = """
import gc, os
x, weights = inputs()
ks = Launcher(*SHAPE)
kept = [ks.pack(weights), find_device().allocate(8), ks.prepare(x, weights)]
check(ks(x, weights), x, weights)
if child := os.fork():
    print(os.waitpid(child, 0)[1])
else:
    kept.clear()
    ks = None
    from ksgen.launch.planner import PLANNER
    PLANNER.__dict__.clear()
    gc.collect()
    os._exit(0)
"""


@on_both
def test_a_forked_child_drops_memory_and_kernels_in_silence(runtime: str) -> None:
    try:
        done = run(f"{PREAMBLE}\n{IN_A_FORK}", runtime)
    except NotHereError as error:
        pytest.skip(str(error))
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)
