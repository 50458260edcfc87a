"""OpenCL end to end on whatever device is here, the CPU driver from PyPI included; and how its driver is found."""

import threading
import warnings

import ml_dtypes
import numpy as np
import pytest

from ksgen.build.request import Binary
from ksgen.devices import opencl
from ksgen.errors import DeviceError, ToolchainError

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
def binary(device):
    return device.compiler().compile(REVERSE, "reverse", device.target)


@pytest.mark.parametrize("added", [("-cl-opt-disable",), pytest.param((), marks=pytest.mark.optimized)])
def test_tests_are_compiled_as_for_users_where_they_are_marked(device, added):
    assert device.compiler().options(device.target) == ("-cl-std=CL1.2", *added)


def test_threads_build_at_the_same_time_and_leave_warnings_as_they_were(device):
    filters, built = list(warnings.filters), []
    worker = threading.Thread(
        target=lambda: built.append(device.compiler().compile(REVERSE, "reverse", device.target)), daemon=True
    )
    with opencl._quiet(device._cl):  # as in a thread that builds
        worker.start()
        worker.join(60)
        assert [each.entry for each in built] == ["reverse"]
        assert warnings.filters != filters
    assert warnings.filters == filters


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


def test_a_users_queue_is_used_directly_and_must_profile_to_be_timed(device, binary):
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
    assert (seen.kind, seen.dtype, seen.shape, seen.strides, seen.stream) == ("pyopencl", "float32", (64,), None, queue)
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


def test_a_source_that_does_not_build_is_kept_and_its_first_error_reported(device, monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    text = REVERSE.replace("0.5f", "half_of_nothing")
    with pytest.raises(ToolchainError, match=r"reverse: the OpenCL compiler refused it: .*half_of_nothing") as caught:
        device.compiler().compile(text, "reverse", device.target)
    (kept,) = tmp_path.rglob("*.cl")
    assert f"source: {kept}" in str(caught.value)
    assert kept.read_text() == text


def test_an_entry_that_the_source_lacks_is_reported(device):
    with pytest.raises(
        ToolchainError, match="multiply: the source compiles, but holds no __kernel function of that name"
    ):
        device.compiler().compile(REVERSE, "multiply", device.target)


def test_another_devices_target_is_neither_built_nor_loaded(device):
    with pytest.raises(ToolchainError, match="cannot build for sm_90a"):
        device.compiler().compile(REVERSE, "reverse", "sm_90a")
    with pytest.raises(DeviceError, match="a binary for sm_90a does not run on"):
        device.load(Binary(b"", "reverse", "sm_90a"), "reverse", 0)


def test_a_binary_that_the_driver_refuses_is_reported(device):
    with pytest.raises(DeviceError, match="loading reverse: the driver refuses the binary"):
        device.load(Binary(b"no binary", "reverse", device.target), "reverse", 0)


def test_a_lack_of_memory_is_reported(device):
    with pytest.raises(DeviceError, match="allocating 1152921504606846976 bytes"):
        device.allocate(1 << 60)


def test_a_cpus_target_names_its_instruction_set(device):
    if not device.limits.is_cpu:
        pytest.skip("the OpenCL device here is no CPU")
    assert device.target.endswith(opencl.instruction_set())
    assert device.driver_version in device.target
    assert device.limits.shared_bytes_per_block >= 32 * 1024
