"""OpenCL end to end on whatever device is here, the CPU driver from PyPI included; and how its driver is found."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ksgen
from ksgen.build.request import Binary
from ksgen.devices import find_device, opencl, opencl_drivers
from ksgen.devices.base import UnavailableError
from ksgen.errors import DeviceError, ToolchainError
from tests.support.mounts import fill, mounted

REVERSE = """
__kernel void reverse(__global const float *x, __global float *y, __global const float *bias, long offset)
{
    __local float tile[64];
    const size_t here = get_local_id(0);
    tile[here] = x[get_global_id(0)];
    barrier(CLK_LOCAL_MEM_FENCE);
    y[get_global_id(0)] = tile[63 - here] + (bias ? bias[here] : 0.5f) + (float)(offset >> 32);
}
__kernel void borrow(__global float *y, long value, __local float *tile)
{
    tile[get_local_id(0)] = (float)value;
    barrier(CLK_LOCAL_MEM_FENCE);
    y[get_global_id(0)] = tile[get_local_size(0) - 1 - get_local_id(0)];
}
"""


@pytest.fixture(scope="module")
def device():
    try:
        return find_device("opencl")
    except DeviceError as absent:
        pytest.skip(str(absent))


@pytest.fixture(scope="module")
def binary(device):
    return device.compiler().compile(REVERSE, "reverse", device.target)


def expected(x, bias, offset):
    return x.reshape(-1, 64)[:, ::-1].reshape(-1) + bias + offset


def test_a_binary_makes_the_round_trip_through_bytes(device, binary):
    copied = Binary(bytes(binary.data), "reverse", binary.target)
    kernel = device.load(copied, "reverse", 0)
    x, y = np.arange(256, dtype=np.float32), np.empty(256, np.float32)
    x_buffer, y_buffer = device.allocate(x.nbytes), device.allocate(y.nbytes)
    device.upload(x_buffer, x)
    device.launch(kernel, 4, 64, 0, (x_buffer, y_buffer, None, 5 << 32), None)
    device.download(y, y_buffer)
    np.testing.assert_array_equal(y, expected(x, 0.5, 5))


def test_one_kernel_takes_a_buffer_after_a_null_pointer_and_a_negative_number(device, binary):
    kernel = device.load(binary, "reverse", 0)
    x, bias, y = np.ones(64, np.float32), np.full(64, 3, np.float32), np.empty(64, np.float32)
    x_buffer, bias_buffer, y_buffer = (device.allocate(array.nbytes) for array in (x, bias, y))
    device.upload(x_buffer, x)
    device.upload(bias_buffer, bias)
    for pointer, offset, value in ((None, 0, 1.5), (bias_buffer, -(2 << 32), 2), (None, 1 << 32, 2.5)):
        device.launch(kernel, 1, 64, 0, (x_buffer, y_buffer, pointer, offset), None)
        device.download(y, y_buffer)
        np.testing.assert_array_equal(y, np.full(64, value))


def test_shared_memory_is_handed_to_a_last_local_parameter(device):
    binary = device.compiler().compile(REVERSE, "borrow", device.target)
    kernel = device.load(binary, "borrow", 4 * 32)
    y, buffer = np.empty(64, np.float32), device.allocate(256)
    device.launch(kernel, 2, 32, 4 * 32, (buffer, 7), None)
    device.download(y, buffer)
    np.testing.assert_array_equal(y, np.full(64, 7))


def test_resources_tell_the_static_local_memory(binary):
    assert binary.resources.shared_bytes == 64 * 4
    assert binary.resources.registers is None


def test_threads_share_a_kernel_without_mixing_arguments(device, binary):
    kernel = device.load(binary, "reverse", 0)
    x_buffer = device.allocate(256)
    device.upload(x_buffer, np.zeros(64, np.float32))
    outcomes = {}

    def work(number):
        y, y_buffer = np.empty(64, np.float32), device.allocate(256)
        outcomes[number] = True
        for _ in range(20):
            device.launch(kernel, 1, 64, 0, (x_buffer, y_buffer, None, number << 32), None)
            device.download(y, y_buffer)
            outcomes[number] &= bool((y == number + 0.5).all())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == dict.fromkeys(range(4), True)


def test_time_gives_seconds_of_each_run_by_the_devices_clock(device, binary):
    kernel = device.load(binary, "reverse", 0)
    x_buffer, y_buffer, calls = device.allocate(256), device.allocate(256), []

    def call():
        calls.append(None)
        device.launch(kernel, 1, 64, 0, (x_buffer, y_buffer, None, 0), None)

    seconds = device.time(call, None, runs=3, warmup=2)
    assert len(calls) == 5
    assert len(seconds) == 3
    assert all(0 < each < 60 for each in seconds)


def test_timing_a_call_that_launches_nothing_is_refused(device):
    with pytest.raises(DeviceError, match="the call launched nothing on this device"):
        device.time(lambda: None, None, runs=1, warmup=0)


def test_a_users_queue_is_used_as_it_is_and_must_profile_to_be_timed(device, binary):
    import pyopencl as cl

    queue = cl.CommandQueue(device.allocate(4).get_info(cl.mem_info.CONTEXT))
    kernel, buffer, y = device.load(binary, "reverse", 0), device.allocate(256), np.zeros(64, np.float32)
    device.upload(buffer, y, queue)
    device.launch(kernel, 1, 64, 0, (buffer, buffer, None, 0), queue)
    device.download(y, buffer, queue)
    device.synchronize(queue)
    assert (y == 0.5).all()
    with pytest.raises(DeviceError, match="needs a queue made with PROFILING_ENABLE"):
        device.time(lambda: None, queue, runs=1, warmup=0)


def test_a_users_context_is_its_own_device_and_takes_its_arrays(device, binary):
    import pyopencl as cl
    import pyopencl.array

    from ksgen.devices import device_for
    from ksgen.launch.arrays import view

    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    queue = cl.CommandQueue(context)
    x, y = cl.array.to_device(queue, np.ones(64, np.float32)), cl.array.empty(queue, 64, np.float32)
    seen = view(y)
    assert (seen.kind, seen.dtype, seen.shape, seen.contiguous, seen.stream) == ("pyopencl", "float32", (64,), True, queue)
    theirs = device_for(seen.device)
    assert theirs is device_for(seen.device)
    built = theirs.compiler().compile(REVERSE, "reverse", theirs.target)
    theirs.launch(theirs.load(built, "reverse", 0), 1, 64, 0, (view(x).pointer, seen.pointer, None, 0), seen.stream)
    assert (y.get() == 1.5).all()


def test_bfloat16_and_empty_arrays_are_copied(device):
    x = np.arange(8).astype(ml_dtypes.bfloat16)
    y, buffer = np.zeros_like(x), device.allocate(x.nbytes)
    device.upload(buffer, x)
    device.download(y, buffer)
    assert (x == y).all()
    nothing = np.empty((0, 4), np.float32)
    device.upload(device.allocate(0), nothing)
    device.download(nothing, device.allocate(0))


def test_a_column_is_not_copied_as_if_it_were_a_row(device):
    with pytest.raises(DeviceError, match=r"shape \(4,\) and strides \(16,\): only row-major arrays are copied"):
        device.upload(device.allocate(16), np.zeros((4, 4), np.float32)[:, 0])


def test_a_source_that_does_not_build_is_kept_and_its_first_error_told(device, monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    text = REVERSE.replace("0.5f", "half_of_nothing")
    with pytest.raises(ToolchainError, match=r"reverse: the OpenCL compiler refused it: .*half_of_nothing") as caught:
        device.compiler().compile(text, "reverse", device.target)
    (kept,) = tmp_path.rglob("*.cl")
    assert f"source: {kept}" in str(caught.value)
    assert kept.read_text() == text


def test_an_entry_that_the_source_lacks_is_told(device):
    with pytest.raises(ToolchainError, match="multiply: the source compiles, but holds no __kernel function of that name"):
        device.compiler().compile(REVERSE, "multiply", device.target)


def test_another_devices_target_is_neither_built_nor_loaded(device):
    with pytest.raises(ToolchainError, match="cannot build for sm_90a"):
        device.compiler().compile(REVERSE, "reverse", "sm_90a")
    with pytest.raises(DeviceError, match="a binary for sm_90a does not run on"):
        device.load(Binary(b"", "reverse", "sm_90a"), "reverse", 0)


def test_a_binary_that_the_driver_refuses_is_told(device):
    with pytest.raises(DeviceError, match="loading reverse: the driver refuses the binary"):
        device.load(Binary(b"no binary", "reverse", device.target), "reverse", 0)


def test_more_memory_than_there_is_is_told(device):
    with pytest.raises(DeviceError, match="allocating 1152921504606846976 bytes"):
        device.allocate(1 << 60)


def test_a_cpus_target_names_its_instruction_set(device):
    if not device.limits.is_cpu:
        pytest.skip("the OpenCL device here is no CPU")
    assert device.target.endswith(opencl._instruction_set())
    assert device.driver_version in device.target
    assert device.limits.shared_bytes_per_block >= 32 * 1024


# How drivers are found


def selectors(**variables):
    """What a fresh process finds, and whether its environment is as it was; the loader looks only once in each."""
    script = (
        "import os; from ksgen.devices import list_devices;"
        "print([d.selector for d in list_devices() if hasattr(d, 'selector') and d.runtime == 'opencl']);"
        "print([d.why + '; ' + d.remedy for d in list_devices() if hasattr(d, 'why') and d.runtime == 'opencl']);"
        "print('OCL_ICD_VENDORS' in os.environ)"
    )
    root = str(Path(ksgen.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name not in ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH")}
    environment |= {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), **variables}
    finished = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return finished.stdout.splitlines()


def test_a_fresh_environment_finds_its_driver_and_leaves_no_variable(device):
    found, missing, left = selectors()
    assert "opencl:0" in found
    assert (missing, left) == ("[]", "False")


def test_a_users_folder_without_drivers_is_respected_and_named(device, tmp_path):
    found, missing, _ = selectors(OCL_ICD_VENDORS=str(tmp_path))
    assert found == "[]"
    assert f"OCL_ICD_VENDORS={tmp_path} shows no device; unset it" in missing


def test_a_users_folder_with_a_driver_is_used(device, tmp_path):
    library = opencl_drivers._library("intel-opencl-rt", "libintelocl.so")
    if library is None:
        pytest.skip("the CPU driver of PyPI is not installed")
    (tmp_path / "own.icd").write_text(f"{library}\n")
    found, _, left = selectors(OCL_ICD_VENDORS=str(tmp_path))
    assert (found, left) == ("['opencl:0']", "True")


def test_the_systems_drivers_are_shown_beside_the_cpu_driver(monkeypatch, tmp_path):
    (tmp_path / "nvidia.icd").write_text("libnvidia-opencl.so.1\n")
    (tmp_path / "intel.icd").write_text("/opt/intel/libintelocl.so\n")
    monkeypatch.delenv("OCL_ICD_VENDORS", raising=False)
    monkeypatch.setattr(opencl_drivers, "_SYSTEM_DRIVERS", tmp_path)
    monkeypatch.setattr(opencl_drivers, "load_cpu_driver", lambda: Path("/here/libintelocl.so"))
    with opencl_drivers.drivers_shown():
        folder = Path(os.environ["OCL_ICD_VENDORS"])
        shown = {icd.name: icd.read_text().strip() for icd in folder.iterdir()}
    assert shown == {"nvidia.icd": "libnvidia-opencl.so.1", "ksgen-cpu.icd": "/here/libintelocl.so"}
    assert "OCL_ICD_VENDORS" not in os.environ
    assert not folder.exists()


def test_the_packages_that_the_cpu_driver_lacks_are_named(monkeypatch):
    there = opencl_drivers._library
    monkeypatch.setattr(opencl_drivers, "_library", lambda package, name: there("tbb", name) if package == "tbb" else None)
    monkeypatch.setattr(opencl_drivers.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(opencl_drivers.sys, "platform", "linux")
    with pytest.raises(UnavailableError) as caught:
        opencl_drivers.load_cpu_driver()
    assert "no driver is installed" in caught.value.why
    assert "intel-cmplr-lib-rt intel-opencl-rt" in caught.value.remedy


def test_other_processors_are_told_to_install_a_driver(monkeypatch):
    monkeypatch.setattr(opencl_drivers.platform, "machine", lambda: "aarch64")
    assert opencl_drivers.packages_line("tbb") == "install your device's OpenCL driver, or PoCL"


def test_a_driver_that_cannot_be_loaded_is_told(monkeypatch, tmp_path):
    broken = tmp_path / "libtbb.so.12"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(opencl_drivers, "_library", lambda package, name: broken)
    with pytest.raises(UnavailableError, match=r"the CPU driver cannot be loaded \(.*libtbb"):
        opencl_drivers.load_cpu_driver()


def test_a_missing_pyopencl_is_named_with_the_line_that_installs_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(UnavailableError, match="PyOpenCL cannot be imported") as caught:
        opencl._pyopencl.__wrapped__()
    assert caught.value.remedy == "pip install pyopencl intel-opencl-rt intel-cmplr-lib-rt tbb"


def test_a_driver_below_a_path_with_a_space_is_used_by_another_path(tmp_path):
    plain, spaced = tmp_path / "plain", tmp_path / "a b"
    for folder in (plain, spaced):
        folder.mkdir()
        (folder / "libtbb.so.12").write_bytes(b"code")
    assert opencl_drivers._spaceless({plain}) is None
    place = opencl_drivers._spaceless({plain, spaced})
    assert " " not in str(place)
    assert (place / "libtbb.so.12").read_bytes() == b"code"
    assert opencl_drivers._spaceless({plain, spaced}) == place
    shutil.rmtree(place)


@pytest.mark.parametrize("options", ["size=64k,ro", "size=64k"])
def test_a_home_that_takes_nothing_costs_one_warning(device, options, tmp_path):
    unset = ("XDG_CACHE_HOME", "KSGEN_CACHE_DIR", "PYOPENCL_NO_CACHE")
    with mounted(tmp_path / "home", options) as home:
        fill(home)
        done = subprocess.run(
            [sys.executable, "-m", "ksgen", "run", "--device", "opencl", "--pattern", "1,16,16,1", "--batch", "64"],
            env={name: value for name, value in os.environ.items() if name not in unset}
            | {"HOME": str(home), "POCL_CACHE_DIR": str(tmp_path)},  # PoCL, where it is the driver, runs nothing without one
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        left = [path for path in home.rglob("*") if path.is_file() and path.name != "filler"]
    assert (done.returncode, "passed" in done.stdout, left) == (0, True, []), done.stderr
    assert done.stderr.count("ksgen works without its cache, and compiles again next time") == 1
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith("others keep ")]  # of a busy machine
    assert len(told) == 2  # the warning, and the line that it comes from
