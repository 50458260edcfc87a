"""Other people's machines: drivers of other versions, contexts and streams that others made.

All on the stand-in machine.
"""

import re

import pytest

from ksgen.build.toolchain import Nvrtc
from ksgen.errors import ToolchainError
from tests.launch.test_faults import on_both, script

pytestmark = pytest.mark.slow

DRIVERS = {535: 12020, 550: 12040, 570: 12080}  # and the CUDA that each serves; 580 serves the stand-in's own


@pytest.mark.exhaustive
@pytest.mark.parametrize(("driver", "runtime"), [(535, "pycuda"), (550, "driver"), (570, "driver")])
def test_a_binary_of_a_newer_cuda_than_the_drivers_is_reported_with_both_versions(driver: int, runtime: str) -> None:
    served = DRIVERS[driver]
    lines = script("multiply()", runtime, KSGEN_DRIVER_CUDA=str(served))
    assert len(lines) == 1, lines
    (told,) = lines
    assert re.fullmatch(
        rf"ToolchainError: .*, loading ks_2x9x5x3_float32_bsf_?\w*: .*; nvcc 1[3-9][.\d]* built it for sm_90a, and "
        rf"the driver is .*CUDA "
        rf"12\.{served % 1000 // 10}, which loads no binaries of a later CUDA; update the driver, or take a compiler "
        rf"of CUDA 12: "
        r"pip install .*\[cuda12\].*",
        told,
    ), told


@on_both
def test_a_driver_that_is_new_enough(runtime: str) -> None:
    assert script("print(find_device().driver_version)\nmultiply()", runtime, KSGEN_DRIVER_CUDA="13000") == [
        "CUDA 13.0",
        "right",
    ]


def test_nvrtc_works_with_the_driver_that_it_asks() -> None:
    try:
        Nvrtc().targets()
    except ToolchainError as error:
        pytest.skip(str(error))
    program = "from ksgen.build.toolchain import Nvrtc, trial; print(trial(Nvrtc(), 'sm_90a') or 'compiles')"
    assert script(program, "driver", KSGEN_DRIVER_CUDA="13000") == ["compiles"]


EARLY_IN_A_GRAPH = """
import ctypes
from tests.launch.test_driver import DOUBLE
from tests.launch.test_runtimes import captured, new_stream, handle_of
from tests.ptx import render
device = find_device()
kernel = device.load(build(render(DOUBLE), "twice", device.target, device.compiler()), "twice", 0, True)
memory, y = device.allocate(4 * 32), np.ones(32, np.int32)
device.upload(memory, y)
with new_stream(device) as stream:
    device.launch(kernel, 1, 32, 0, (memory,), stream)
    with captured(device, handle_of(stream)) as replay:
        for _ in range(3):
            device.launch(kernel, 1, 32, 0, (memory,), stream)
    replay()
    device.launch(kernel, 1, 32, 0, (memory,), stream)
    device.download(y, memory, stream)
print(set(y.tolist()))
"""


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize("served", ["13000", "12030+", "12020+"])
def test_early_launches_in_a_graph_are_plain_where_the_driver_cannot_record_them(served: str, runtime: str) -> None:
    """Graphs record them from CUDA 12.3 on."""
    assert script(EARLY_IN_A_GRAPH, runtime, KSGEN_DRIVER_CUDA=served) == ["{32}"]


# ---- contexts


CONTEXTS = """
from tests.launch.test_runtimes import out_like
from tests.support.device_arrays import CudaArray

def report(call):
    try:
        call()
    except KsgenError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("no error")

def in_primary():
    device = find_device("driver")
    return [CudaArray(device, each) for each in (*inputs(), out_like())]
"""
REMEDY = "import pycuda.autoprimaryctx in the place of pycuda.autoinit"
OTHER = f"lies in another CUDA context than the one that PyCUDA had current when ksgen first used the GPU; {REMEDY}"
CALLED = "LaunchError: Launcher(2, 9, 5, 3): "

IN_THE_USERS = """
import pycuda.autoinit
from pycuda import driver, gpuarray
multiply()
print(find_device().runtime)
ks, (x, weights, out) = Launcher(*SHAPE), in_primary()
call = ks.prepare(x, weights, out=out)
print(call.plan.device.runtime)
call()
check(out.content(), *inputs())
kept = ks.pack(weights)
print(kept.device.runtime)
ks(x, kept, out=out)
check(out.content(), *inputs())
own_x, own_weights = map(gpuarray.to_gpu, inputs())
own_kept = ks.pack(own_weights)
check(ks(own_x, own_kept).get(), *inputs())
report(lambda: ks(own_x, weights))
report(lambda: ks(x, own_weights, out=out))
report(lambda: ks(x, weights, out=out, stream=driver.Stream()))
report(lambda: ks(own_x, kept))
report(lambda: ks(x, own_kept, out=out))
"""


def test_arrays_of_the_primary_context_and_of_a_users_own() -> None:
    """PyCUDA adopts what `pycuda.autoinit` made; PyTorch's, CuPy's and Numba's arrays lie in the primary one."""
    packed = f"{CALLED}packed weights lie in another CUDA context than x; pack an array of x's library"
    assert script(CONTEXTS + IN_THE_USERS, "pycuda") == [
        "right", "pycuda", "driver", "driver", f"{CALLED}weights {OTHER}", f"{CALLED}x {OTHER}", f"{CALLED}x {OTHER}",
        packed, packed
    ]  # fmt: skip


AFTER_KSGEN = """
multiply()
import pycuda.autoinit
from pycuda import gpuarray
x, weights = map(gpuarray.to_gpu, inputs())
report(lambda: Launcher(*SHAPE)(x, weights))
report(lambda: Launcher(*SHAPE).pack(weights))
multiply()
"""


def test_a_context_that_a_user_makes_after_ksgens_first_call() -> None:
    assert script(CONTEXTS + AFTER_KSGEN, "pycuda") == [
        "right",
        f"{CALLED}x {OTHER}",
        f"{CALLED}weights {OTHER}",
        "right",
    ]


WITHOUT_BINDINGS = """
import sys
import pycuda.autoinit
from pycuda import driver, gpuarray
multiply()
primary = driver.Device(0).retain_primary_context()
primary.push()
x, weights = map(gpuarray.to_gpu, inputs())
primary.pop()
sys.modules["cuda.bindings"] = None
report(lambda: Launcher(*SHAPE)(x, weights))
del x, weights
primary.detach()
"""


def test_arrays_of_the_primary_context_without_the_driver_runtime() -> None:
    right, told = script(CONTEXTS + WITHOUT_BINDINGS, "pycuda")
    assert right == "right"
    assert told.startswith(
        f"{CALLED}x lies in another CUDA context than PyCUDA's, and the driver runtime is not there: CUDA driver"
    )
