"""CUDA's rules as the tests of the runtimes count on them.

A GPU's driver keeps them too, but where it says: the stand-in's own.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from ksgen.build.build import build
from ksgen.devices import find_device
from ksgen.devices.libcuda import context_number
from ksgen.errors import DeviceError
from tests.driver import NotHereError, run
from tests.emulator import TensorMap
from tests.ptx import render
from tests.ptx.cases import all_cases

COUNT = 32  # integers, and threads
ONE = np.int32(1)
KERNELS = """
extern "C" __global__ void __launch_bounds__(256) add(int* y, int what) { y[threadIdx.x] += what; }
extern "C" __global__ void share(int* y) {
    extern __shared__ int s[];
    s[threadIdx.x] = 1;
    y[threadIdx.x] = s[threadIdx.x];
}
"""
PAIRS = 'extern "C" __global__ void __cluster_dims__(2, 1, 1) pairs(int* y) { atomicAdd(y + threadIdx.x, 1); }'
DOUBLE = """
extern "C" __global__ void twice(int* y) {
    wait_for_previous_grid();
    y[threadIdx.x] *= 2;
    allow_next_grid();
}
"""

pytestmark = [pytest.mark.gpu, pytest.mark.stand_in]


class Cuda:
    """cuda-bindings' driver in a device's context. `cuda.cuMemAlloc(8)` gives the value; what fails raises its name."""

    def __init__(self, device: Any) -> None:
        self.device, self.cu = device, device._cu
        self.add = self.kernel(KERNELS, "add")
        self.share = self.kernel(KERNELS, "share")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.cu, name)

        def call(*args: Any) -> Any:
            status, *values = function(*args)
            if status:
                raise RuntimeError(status.name)
            return values[0] if len(values) == 1 else values

        return call if name[2:3].isupper() else function

    def kernel(self, text: str, name: str) -> Any:
        data = build(text, name, self.device.target).data
        library = self.cuLibraryLoadData(data, [], [], 0, [], [], 0)
        return self.cuKernelGetFunction(self.cuLibraryGetKernel(library, name.encode()))

    def context(self) -> Any:
        """A new context, current from then on."""
        is_new = int(metadata.version("cuda-bindings").partition(".")[0]) >= 13
        return self.cuCtxCreate(*([None] if is_new else []), 0, 0)

    def ints(self, value: int = 0) -> int:
        """Device memory of so many equal integers."""
        pointer = int(self.cuMemAlloc(4 * COUNT))
        self.cuMemcpyHtoD(pointer, np.full(COUNT, value, np.int32).ctypes.data, 4 * COUNT)
        return pointer

    def read(self, pointer: int) -> int:
        """The one value that they all have."""
        found = np.empty(COUNT, np.int32)
        self.cuMemcpyDtoH(found.ctypes.data, pointer, found.nbytes)
        assert (found == found[0]).all(), found
        return int(found[0])

    def launch(
        self, function: Any, *values: Any, threads: int = COUNT, grid: Any = (1, 1, 1), shared: int = 0, stream: Any = 0
    ) -> None:
        """`values`: NumPy scalars, or bytes; a Python int is a pointer."""
        given = [np.uint64(value) if isinstance(value, int) else value for value in values]
        blocks = [
            ctypes.create_string_buffer(value if isinstance(value, bytes) else value.tobytes()) for value in given
        ]
        addresses = (ctypes.c_void_p * len(blocks))(*map(ctypes.addressof, blocks))
        self.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, ctypes.addressof(addresses), 0)


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    try:
        device = find_device("driver")
    except DeviceError as absent:
        pytest.skip(str(absent))
    with device._current():
        yield Cuda(device)


@pytest.fixture
def stand_in(cuda: Cuda) -> None:
    if not hasattr(ctypes.CDLL("libcuda.so.1"), "ksgen_driver_faults"):
        pytest.skip("a rule of the stand-in's own")


def fails(name: str) -> Any:
    return pytest.raises(RuntimeError, match=f"^CUDA_ERROR_{name}$")


# ---- contexts and memory


def test_calls_need_a_context_of_their_own_thread(cuda: Cuda) -> None:
    told: list[str] = []

    def work() -> None:
        for call, args in ((cuda.cuMemAlloc, (8,)), (cuda.cuStreamCreate, (0,)), (cuda.cuCtxPopCurrent, ())):
            try:
                call(*args)
            except RuntimeError as error:
                told.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == ["CUDA_ERROR_INVALID_CONTEXT"] * 3


def test_a_thread_has_a_stack_of_contexts(cuda: Cuda) -> None:
    before, pointer, other = int(cuda.cuCtxGetCurrent()), cuda.ints(1), cuda.context()
    try:
        cuda.cuCtxPopCurrent()
        cuda.cuCtxPushCurrent(other)
        assert int(cuda.cuCtxGetCurrent()) == int(other)
    finally:
        cuda.cuCtxPopCurrent()
        cuda.cuCtxDestroy(other)
    assert int(cuda.cuCtxGetCurrent()) == before
    assert cuda.read(pointer) == 1


def test_a_stream_belongs_to_its_context(cuda: Cuda, stand_in: None) -> None:
    """The driver of an H100 also waits for another context's stream."""
    stream, other = cuda.cuStreamCreate(0), cuda.context()
    try:
        with fails("INVALID_HANDLE"):
            cuda.cuStreamSynchronize(stream)
    finally:
        cuda.cuCtxPopCurrent()
        cuda.cuCtxDestroy(other)


def test_a_context_has_a_number_until_it_is_destroyed(cuda: Cuda) -> None:
    one, other = int(cuda.cuCtxGetCurrent()), cuda.context()
    assert context_number(int(other)) not in (None, 0, context_number(one))
    cuda.cuCtxDestroy(other)
    assert context_number(int(other)) is None
    cuda.cuCtxSetCurrent(one)


def test_a_fork_of_a_process_that_started_the_driver_can_call_nothing(cuda: Cuda) -> None:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(
            writing,
            " ".join(str(int(status)) for status, *_ in (cuda.cu.cuInit(0), cuda.cu.cuCtxGetCurrent())).encode(),
        )
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"3 3"  # CUDA_ERROR_NOT_INITIALIZED
    os.close(reading)
    os.close(writing)


def test_copies_stay_inside_an_allocation(cuda: Cuda, stand_in: None) -> None:
    """A GPU's driver knows of pages alone."""
    pointer, host = cuda.ints(), np.zeros(2 * COUNT, np.int32)
    with fails("INVALID_VALUE"):
        cuda.cuMemcpyHtoD(pointer + 4, host.ctypes.data, 4 * COUNT)
    with fails("INVALID_VALUE"):
        cuda.cuMemcpyDtoH(host.ctypes.data, host.ctypes.data, 4)
    cuda.cuMemFree(pointer)
    with fails("INVALID_VALUE"):
        cuda.cuMemFree(pointer)


def test_memory_begins_as_nan(cuda: Cuda, stand_in: None) -> None:
    assert cuda.read(int(cuda.cuMemAlloc(4 * COUNT))) == -1  # all bits set: NaN as a float


def test_the_host_cannot_read_device_memory() -> None:
    try:
        done = run("""
            import ctypes
            from ksgen.devices import find_device
            memory = find_device().allocate(64)
            print(memory.pointer > 0, flush=True)
            ctypes.string_at(memory.pointer, 1)
        """)
    except NotHereError as error:
        pytest.skip(str(error))
    assert (done.stdout, done.returncode) == ("True\n", -11)


# ---- launches


def test_a_launch_keeps_to_the_limits(cuda: Cuda) -> None:
    y = cuda.ints()
    for options in (
        {"threads": 0},
        {"threads": 257},
        {"threads": 1025},
        {"grid": (0, 1, 1)},
        {"grid": (1, 65536, 1)},
        {"shared": 48 * 1024 + 1},
    ):
        with fails("INVALID_VALUE"):
            cuda.launch(cuda.add, y, ONE, **options)
    assert cuda.read(y) == 0


def test_a_launch_by_its_configuration(cuda: Cuda) -> None:
    config, y = cuda.cu.CUlaunchConfig(), cuda.ints()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX = COUNT
    cuda.cuLaunchKernelEx(config, cuda.add, ((y, 3), (ctypes.c_void_p, ctypes.c_int)), 0)
    assert cuda.read(y) == 3


def test_launches_that_begin_early_wait_for_what_is_before_them(cuda: Cuda) -> None:
    if cuda.device.target != "sm_90a":
        pytest.skip(f"{cuda.device.name} has no launches that begin early")
    attribute, config = cuda.cu.CUlaunchAttribute(), cuda.cu.CUlaunchConfig()
    attribute.id = cuda.cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = config.numAttrs = 1
    config.blockDimX, config.attrs, config.hStream = COUNT, [attribute], cuda.cuStreamCreate(0)
    double, y = cuda.kernel(render(DOUBLE), "twice"), cuda.ints(1)

    def launch_all() -> None:
        cuda.launch(cuda.add, y, ONE, stream=config.hStream)
        for _ in range(3):
            cuda.cuLaunchKernelEx(config, double, ((y,), (ctypes.c_void_p,)), 0)
        cuda.launch(cuda.add, y, ONE, stream=config.hStream)

    launch_all()
    assert cuda.read(y) == 17
    begin(cuda, config.hStream)
    launch_all()
    replay(cuda, cuda.cuStreamEndCapture(config.hStream), config.hStream)
    assert cuda.read(y) == 145


def test_more_than_48_kb_of_shared_memory_is_asked_for_before(cuda: Cuda) -> None:
    y, attribute = cuda.ints(), cuda.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with fails("INVALID_VALUE"):
        cuda.launch(cuda.share, y, shared=64 * 1024)
    with fails("INVALID_VALUE"):
        cuda.cuFuncSetAttribute(cuda.share, attribute, 1 << 20)
    cuda.cuFuncSetAttribute(cuda.share, attribute, 64 * 1024)
    assert cuda.cuFuncGetAttribute(attribute, cuda.share) == 64 * 1024
    cuda.launch(cuda.share, y, shared=64 * 1024)
    assert cuda.read(y) == 1


def test_a_function_tells_what_it_takes(cuda: Cuda) -> None:
    attribute = cuda.cu.CUfunction_attribute
    assert cuda.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, cuda.add) == 256
    assert 0 < cuda.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, cuda.add) < 32
    assert cuda.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, cuda.add) == 0


def test_a_refused_binary_leaves_logs_that_end(cuda: Cuda) -> None:
    load = ctypes.CDLL("libcuda.so.1").cuModuleLoadDataEx
    info, error = (ctypes.create_string_buffer(b"x" * 64) for _ in range(2))
    options = (ctypes.c_int * 4)(3, 4, 5, 6)  # CU_JIT_INFO_LOG_BUFFER, its size in bytes, and both of the errors'
    values = (ctypes.c_void_p * 4)(ctypes.addressof(info), 64, ctypes.addressof(error), 64)
    module = ctypes.c_void_p()
    assert load(ctypes.byref(module), b"no binary".ljust(64, b"\0"), 4, options, values)
    assert max(len(info.value), len(error.value)) < 64
    assert max(values[1] or 0, values[3] or 0) <= 64


# ---- streams and events


def test_work_runs_when_it_is_waited_for(cuda: Cuda, stand_in: None) -> None:
    y, stream = cuda.ints(), cuda.cuStreamCreate(cuda.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
    cuda.launch(cuda.add, y, ONE, stream=stream)
    assert cuda.read(y) == 0  # which waits for the default stream, and this one does not
    cuda.cuStreamSynchronize(stream)
    assert cuda.read(y) == 1
    cuda.launch(cuda.add, y, ONE, stream=stream)
    cuda.cuStreamQuery(stream)
    assert cuda.read(y) == 2


@pytest.mark.parametrize("is_of_thread", [False, True], ids=["made", "the thread's own"])
def test_the_default_stream_and_blocking_ones_wait_for_each_other(cuda: Cuda, is_of_thread: bool) -> None:
    y, one = cuda.ints(1), cuda.cuStreamCreate(0)
    other = cuda.cu.CU_STREAM_PER_THREAD if is_of_thread else cuda.cuStreamCreate(0)
    cuda.launch(cuda.add, y, ONE, stream=one)
    cuda.cuMemsetD32Async(y, 10, COUNT, 0)
    cuda.launch(cuda.add, y, ONE, stream=other)
    cuda.cuStreamSynchronize(other)
    assert cuda.read(y) == 11


def test_an_event_orders_streams_and_tells_the_time(cuda: Cuda) -> None:
    non_blocking = cuda.cu.CUstream_flags.CU_STREAM_NON_BLOCKING
    y, one, other = cuda.ints(1), cuda.cuStreamCreate(non_blocking), cuda.cuStreamCreate(non_blocking)
    start, end = cuda.cuEventCreate(0), cuda.cuEventCreate(0)
    with fails("INVALID_HANDLE"):
        cuda.cuEventElapsedTime(start, end)
    cuda.cuEventRecord(start, one)
    cuda.cuMemsetD32Async(y, 10, COUNT, one)
    cuda.launch(cuda.add, y, ONE, stream=one)
    cuda.cuEventRecord(end, one)
    cuda.cuStreamWaitEvent(other, end, 0)
    cuda.launch(cuda.add, y, ONE, stream=other)
    cuda.cuStreamSynchronize(other)
    assert cuda.read(y) == 12
    assert 0 < cuda.cuEventElapsedTime(start, end) < 1000


def test_an_event_without_a_wait_has_no_time(cuda: Cuda, stand_in: None) -> None:
    start, end = cuda.cuEventCreate(0), cuda.cuEventCreate(0)
    cuda.cuEventRecord(start, 0)
    cuda.cuEventRecord(end, 0)
    with fails("NOT_READY"):
        cuda.cuEventElapsedTime(start, end)
    cuda.cuEventSynchronize(end)
    assert 0 <= cuda.cuEventElapsedTime(start, end) < 0.01


def test_a_kernel_begins_when_the_host_has_queued_it(cuda: Cuda, stand_in: None) -> None:
    """The host takes 6 to 8 us for a launch, and half a one for an event; then the GPU has waited for the second."""
    y, events = cuda.ints(1), [cuda.cuEventCreate(0) for _ in range(3)]
    cuda.cuEventRecord(events[0], 0)
    for event in events[1:]:
        cuda.launch(cuda.add, y, ONE)
        cuda.cuEventRecord(event, 0)
    cuda.cuStreamSynchronize(0)
    first, second = (1e3 * cuda.cuEventElapsedTime(*each) for each in (events[:2], events[1:]))
    assert 7.5 <= first <= 11
    assert 5.5 <= second <= 9
    assert abs(2 * first - round(2 * first)) < 1e-3  # an event tells half a microsecond


# ---- capture


def begin(cuda: Cuda, stream: Any) -> None:
    cuda.cuStreamBeginCapture(stream, cuda.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)


def replay(cuda: Cuda, graph: Any, stream: Any) -> None:
    cuda.cuGraphLaunch(cuda.cuGraphInstantiate(graph, 0), stream)
    cuda.cuStreamSynchronize(stream)


def test_what_is_captured_runs_at_every_replay_and_not_before(cuda: Cuda) -> None:
    y, stream = cuda.ints(), cuda.cuStreamCreate(0)
    begin(cuda, stream)
    cuda.launch(cuda.add, y, ONE, stream=stream)
    graph = cuda.cuStreamEndCapture(stream)
    assert cuda.read(y) == 0
    for times in (1, 2):
        replay(cuda, graph, stream)
        assert cuda.read(y) == times


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda cuda, stream: cuda.cuMemAlloc(8), "STREAM_CAPTURE_UNSUPPORTED"),
        (lambda cuda, stream: cuda.cuStreamSynchronize(stream), "STREAM_CAPTURE_UNSUPPORTED"),
        (lambda cuda, stream: cuda.cuCtxSynchronize(), "STREAM_CAPTURE_UNSUPPORTED"),
        (lambda cuda, stream: cuda.cuMemsetD8Async(cuda.y, 0, 8, 0), "STREAM_CAPTURE_IMPLICIT"),
    ],
    ids=["allocation", "synchronisation", "synchronisation of all", "default stream"],
)
def test_what_no_graph_can_hold_invalidates_the_capture(cuda: Cuda, call: Any, name: str) -> None:
    cuda.y, stream = cuda.ints(), cuda.cuStreamCreate(0)
    begin(cuda, stream)
    with fails(name):
        call(cuda, stream)
    with fails("STREAM_CAPTURE_INVALIDATED"):
        cuda.launch(cuda.add, cuda.y, ONE, stream=stream)
    with fails("STREAM_CAPTURE_INVALIDATED"):
        cuda.cuStreamEndCapture(stream)
    cuda.launch(cuda.add, cuda.y, ONE, stream=stream)
    assert cuda.read(cuda.y) == 1


def test_a_capture_takes_in_streams_that_wait_for_it_and_must_wait_for_them(cuda: Cuda) -> None:
    y, one, other, event = cuda.ints(), cuda.cuStreamCreate(0), cuda.cuStreamCreate(0), cuda.cuEventCreate(0)
    for is_joined in (False, True):
        begin(cuda, one)
        cuda.cuMemsetD32Async(y, 5, COUNT, one)
        cuda.cuEventRecord(event, one)
        cuda.cuStreamWaitEvent(other, event, 0)
        cuda.launch(cuda.add, y, ONE, stream=other)
        if not is_joined:
            with fails("STREAM_CAPTURE_UNJOINED"):
                cuda.cuStreamEndCapture(one)
            continue
        cuda.cuEventRecord(event, other)
        cuda.cuStreamWaitEvent(one, event, 0)
        replay(cuda, cuda.cuStreamEndCapture(one), one)
    assert cuda.read(y) == 6


# ---- clusters and tensor maps


def encode(given: TensorMap, address: int, **changed: Any) -> bytes:
    """Encode a map through ctypes. Its address must be a multiple of 64, unlike those of cuda-bindings' objects."""
    said = {"sizes": given.sizes, "strides": given.strides, "box": given.box, "steps": [1] * len(given.box)} | changed
    room = ctypes.create_string_buffer(128 + 63)
    begin = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    wide, narrow = (ctypes.c_uint64 * len(given.sizes)), (ctypes.c_uint32 * len(given.sizes))
    numbers = [wide(*said["sizes"]), wide(*said["strides"]), narrow(*said["box"]), narrow(*said["steps"])]
    element = {1: 0, 2: 6, 4: 7, 8: 8}[given.array.itemsize]  # bytes, then floats
    plain = (0, {0: 0, 32: 1, 64: 2, 128: 3}[given.swizzle], 0, 0)  # interleaving, swizzle, promotion, filling
    place = ctypes.c_void_p(begin), element, len(given.sizes), ctypes.c_void_p(address)
    if status := ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(*place, *numbers, *plain):
        raise RuntimeError(find_device("driver")._cu.CUresult(status).name)
    return ctypes.string_at(begin, 128)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cluster", "panels", "box swizzle=128", "narrow"])
def test_launches_with_clusters_tensor_maps_and_narrow_arguments(cuda: Cuda, name: str) -> None:
    case = next(case for case in all_cases() if case.name == name)
    if cuda.device.target != "sm_90a":
        pytest.skip(f"sm_90a instructions; the device is {cuda.device.target}")
    memory: dict[int, tuple[Any, int]] = {}

    def address_of(array: Any) -> int:
        if id(array) not in memory:
            memory[id(array)] = array, int(cuda.cuMemAlloc(array.nbytes))
            cuda.cuMemcpyHtoD(memory[id(array)][1], array.ctypes.data, array.nbytes)
        return memory[id(array)][1]

    def value_of(argument: Any) -> Any:
        if isinstance(argument, TensorMap):
            return encode(argument, address_of(argument.array))
        return np.uint64(address_of(argument)) if isinstance(argument, np.ndarray) else argument

    kernel = cuda.kernel(case.text, case.entry)
    dynamic = cuda.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    cuda.cuFuncSetAttribute(kernel, dynamic, case.shared_bytes)
    values = [value_of(argument) for argument in case.args]
    cuda.launch(kernel, *values, threads=case.block, grid=(case.grid, 1, 1), shared=case.shared_bytes)
    for array, address in memory.values():
        if array.flags.writeable:
            cuda.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes)
    case.check()


def test_a_launch_is_whole_clusters(cuda: Cuda) -> None:
    if cuda.device.target != "sm_90a":
        pytest.skip("no clusters before sm_90")
    pairs, y = cuda.kernel(KERNELS + PAIRS, "pairs"), cuda.ints()
    with fails("INVALID_CLUSTER_SIZE"):
        cuda.launch(pairs, y, grid=(3, 1, 1))
    cuda.launch(pairs, y, grid=(4, 1, 1))
    assert cuda.read(y) == 4


@pytest.mark.parametrize(
    "changed",
    [{"box": [512, 8]}, {"box": [3, 8]}, {"strides": [100]}, {"sizes": [0, 8]}, {"steps": [0, 1]}],
    ids=lambda changed: next(iter(changed)),
)
def test_tensor_maps_that_make_no_sense_are_refused(cuda: Cuda, changed: dict[str, Any]) -> None:
    if cuda.device.target != "sm_90a":
        pytest.skip("no tensor maps before sm_90")
    given, address = TensorMap(np.zeros((8, 64), np.float32), [64, 8], [256], [32, 8]), int(cuda.cuMemAlloc(4 * 512))
    assert encode(given, address)
    with fails("INVALID_VALUE"):
        encode(given, address, **changed)
    with fails("INVALID_VALUE"):
        encode(given, address + 4)
