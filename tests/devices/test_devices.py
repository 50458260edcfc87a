"""Tests of devices: which one is chosen, the message if there is none, and how a CUDA device runs a kernel."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ksgen import devices
from ksgen.build.build import build
from ksgen.devices import Found, Missing, base, device_for, find_device, list_devices
from ksgen.devices.base import UnavailableError
from ksgen.errors import DeviceError, KsgenWarning


@pytest.fixture
def machine(monkeypatch):
    """A machine with the runtimes given: runtime -> the names of its devices, or why it has none."""

    def make(**runtimes):
        for runtime, module in devices._MODULES.items():
            names = runtimes.get(runtime, f"{runtime} is not here")

            def found(runtime=runtime, names=names):
                if isinstance(names, str):
                    raise UnavailableError(names, f"pip install {runtime}")
                return [Found(f"{runtime}:{index}", runtime, name, "sm_90a") for index, name in enumerate(names)]

            def open_device(index, runtime=runtime, found=found):
                known = [each.name for each in found()]
                base.check_index(runtime, index, known)
                kind = "cuda" if runtime in ("pycuda", "driver") else runtime
                limits = SimpleNamespace(is_cpu="EPYC" in known[index])
                return SimpleNamespace(runtime=runtime, index=index, kind=kind, limits=limits, is_open=True)

            stand_in = SimpleNamespace(
                found=found, open_device=open_device, for_context=lambda context: ("of", context)
            )
            monkeypatch.setitem(sys.modules, f"ksgen.devices.{module}", stand_in)
        monkeypatch.delenv("KSGEN_DEVICE", raising=False)
        devices._find.cache_clear()

    yield make
    devices._find.cache_clear()


def chosen(name=None):
    device = find_device(name)
    return f"{device.runtime}:{device.index}"


def test_gpus_come_first_then_the_processor_by_its_own_compiler_then_by_opencl(machine, monkeypatch):
    monkeypatch.setattr(devices, "may_show_gpus", lambda: True)
    machine(pycuda=["H200"], driver=["H200"], opencl=["EPYC"])
    assert chosen() == "pycuda:0"
    machine(driver=["H200"], opencl=["EPYC"])
    assert chosen() == "driver:0"
    machine(native=["EPYC"], opencl=["Radeon", "EPYC"])
    assert chosen() == "opencl:0"
    machine(native=["EPYC"], opencl=["EPYC"])
    assert chosen() == "native:0"
    machine(native=["EPYC"])
    assert chosen() == "native:0"
    machine(opencl=["EPYC"])
    with pytest.warns(KsgenWarning, match="^native is not here; pip install native. OpenCL runs the kernels instead"):
        assert chosen() == "opencl:0"
    assert (chosen(), chosen("opencl")) == (
        "opencl:0",
        "opencl:0",
    )  # a fallback speaks once; one that is asked for, never


def test_opencl_is_not_opened_in_addition_to_a_processor_if_it_cannot_have_a_gpu(machine, monkeypatch):
    machine(native=["EPYC"], opencl=["EPYC"])
    opened = []
    monkeypatch.setattr(sys.modules["ksgen.devices.opencl"], "open_device", opened.append)
    monkeypatch.setattr(devices, "may_show_gpus", lambda: False)
    assert chosen() == "native:0"
    assert not opened


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("cuda", "pycuda:0"),
        ("cuda:1", "driver:1"),  # PyCUDA has one here
        ("driver", "driver:0"),
        ("OpenCL", "opencl:0"),
        ("opencl:1", "opencl:1"),
        ("epyc", "opencl:1"),
        ("h200", "pycuda:0"),
    ],
)
def test_the_variable_and_the_argument_ask_alike(machine, monkeypatch, asked, got):
    machine(pycuda=["H200"], driver=["H200", "H100"], opencl=["Radeon", "AMD EPYC"])
    assert chosen(asked) == got
    monkeypatch.setenv("KSGEN_DEVICE", asked)
    assert chosen() == got


def test_the_same_device_comes_back_at_every_call(machine):
    machine(opencl=["EPYC"])
    assert find_device() is find_device()
    assert find_device("epyc") is find_device("opencl:0")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("opencl:2", r"opencl:2: no such device; there is opencl:0 \(Radeon\), opencl:1 \(EPYC\)"),
        (f"opencl:{'9' * 5000}", "is not a number; accepted"),
        ("opencl:one", "device 'opencl:one': 'one' is not a number; accepted, also as KSGEN_DEVICE: cuda, pycuda"),
        ("tesla", r"device 'tesla': none is called that; found: opencl:0 \(Radeon\), opencl:1 \(EPYC\); accepted"),
        ("pycuda", "pycuda is not here; pip install pycuda"),
        ("cuda", r"no device: pycuda is not here; pip install pycuda\. driver is not here; pip install driver"),
    ],
)
def test_an_unavailable_device_is_reported_with_the_remedy(machine, asked, told, monkeypatch):
    monkeypatch.setattr(devices, "supported_cuda", lambda: 13000)
    machine(opencl=["Radeon", "EPYC"])
    with pytest.raises(DeviceError, match=told):
        find_device(asked)


@pytest.mark.parametrize("asked", ["cuda", "cuda:1", "pycuda", "driver"])
def test_a_machine_without_a_driver_says_that_first_of_all(machine, monkeypatch, asked):
    monkeypatch.setattr(devices, "supported_cuda", lambda: 0)
    machine(native=["EPYC"])
    with pytest.raises(
        DeviceError, match=r"^no CUDA device: this machine has no NVIDIA driver; install it, or take native or opencl$"
    ):
        find_device(asked)


def test_a_machine_without_devices_gets_every_remedy(machine):
    machine()
    with pytest.raises(
        DeviceError,
        match=r"no device: pycuda .*pip install pycuda\. driver .*\. native .*\. opencl .*pip install opencl",
    ):
        find_device()


def test_an_array_goes_to_the_device_that_holds_it(machine, monkeypatch):
    machine(pycuda=["H200", "H200"], driver=["H200", "H200"], opencl=["EPYC"])
    assert device_for("host").runtime == "pycuda"
    assert device_for(("cuda", 1)).index == 1
    assert device_for(("cuda", None)).index == 0
    assert device_for(("opencl", "context")) == ("of", "context")
    monkeypatch.setenv("KSGEN_DEVICE", "driver:0")
    assert (device_for(("cuda", 1)).runtime, device_for(("cuda", 1)).index) == ("driver", 1)


def test_the_list_shows_what_is_there_and_why_the_rest_is_not(machine, monkeypatch):
    machine(opencl=["EPYC"])

    def break_down():
        raise OSError("half a driver")

    monkeypatch.setattr(sys.modules["ksgen.devices.cuda_driver"], "found", break_down)
    assert list_devices() == [
        Missing("pycuda", "pycuda is not here", "pip install pycuda"),
        Missing("driver", "OSError: half a driver", ""),
        Missing("native", "native is not here", "pip install native"),
        Found("opencl:0", "opencl", "EPYC", "sm_90a"),
    ]


def test_the_list_of_this_very_machine_does_not_raise():
    assert {line.runtime for line in list_devices()} == {"pycuda", "driver", "native", "opencl"}


TELL = """
extern "C" __global__ void tell(long long *out, long long first, const long long *nothing)
{
    extern __shared__ __align__(16) unsigned char shared_memory[];
    long long *last = reinterpret_cast<long long *>(shared_memory) + 8 * 1024 - 1;
    *last = first + (nothing ? 1 : 0);
    out[0] = *last;
    out[1] = gridDim.x * 1000 + blockDim.x;
}
"""


@pytest.mark.gpu
@pytest.mark.stand_in
@pytest.mark.parametrize("runtime", ["pycuda", "driver"])
def test_a_gpu_runs_what_was_built_for_it(runtime):
    try:
        device = find_device(runtime)
    except DeviceError as absent:
        pytest.skip(str(absent))
    kernel = device.load(build(TELL, "tell", device.target, device.compiler()), "tell", 64 * 1024)
    out, memory = np.zeros(2, np.int64), device.allocate(16)
    device.upload(memory, out)
    device.launch(kernel, 3, 1, 64 * 1024, (memory, -(7 << 33), None), None)
    device.download(out, memory)
    assert out.tolist() == [-(7 << 33), 3001]
    assert all(
        0 < each < 1
        for each in device.time(lambda: device.launch(kernel, 1, 1, 65536, (memory, 1, 0), None), None, 3, 1)
    )
    assert not device.is_capturing(None)
