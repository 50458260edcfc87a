"""Which device is chosen, what is told when there is none, and the CUDA runtimes against a driver made of host memory.

The stand-in driver is a libcuda.so.1 compiled here: cuda-bindings, and PyCUDA where it is installed, run on it unchanged.
"""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import ksgen
from ksgen import devices
from ksgen.devices import Found, Missing, base, cuda_driver, cuda_pycuda, device_for, find_device, list_devices
from ksgen.devices.base import UnavailableError
from ksgen.errors import DeviceError
from ksgen.resources import Binary

# The choice


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
                base.check_index(runtime, index, [each.name for each in found()])
                return SimpleNamespace(runtime=runtime, index=index)

            stand_in = SimpleNamespace(found=found, open_device=open_device, for_context=lambda context: ("of", context))
            monkeypatch.setitem(sys.modules, f"ksgen.devices.{module}", stand_in)
        monkeypatch.delenv("KSGEN_DEVICE", raising=False)
        devices._find.cache_clear()

    yield make
    devices._find.cache_clear()


def chosen(name=None):
    device = find_device(name)
    return f"{device.runtime}:{device.index}"


def test_pycuda_comes_first_then_the_driver_then_opencl(machine):
    machine(pycuda=["H200"], driver=["H200"], opencl=["EPYC"])
    assert chosen() == "pycuda:0"
    machine(driver=["H200"], opencl=["EPYC"])
    assert chosen() == "driver:0"
    machine(opencl=["EPYC"])
    assert chosen() == "opencl:0"


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
        (f"opencl:{'9' * 5000}", "is no number; accepted"),
        ("opencl:one", "device 'opencl:one': 'one' is no number; accepted, also as KSGEN_DEVICE: cuda, pycuda"),
        ("tesla", r"device 'tesla': none is called that; found: opencl:0 \(Radeon\), opencl:1 \(EPYC\); accepted"),
        ("pycuda", "pycuda is not here; pip install pycuda"),
        ("cuda", r"no device: pycuda is not here; pip install pycuda\. driver is not here; pip install driver"),
    ],
)
def test_a_wish_that_cannot_be_met_is_told_with_what_could(machine, asked, told):
    machine(opencl=["Radeon", "EPYC"])
    with pytest.raises(DeviceError, match=told):
        find_device(asked)


def test_a_machine_with_nothing_is_told_every_way_to_something(machine):
    machine()
    with pytest.raises(DeviceError, match=r"no device: pycuda .*pip install pycuda\. driver .*\. opencl .*pip install opencl"):
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
        Found("opencl:0", "opencl", "EPYC", "sm_90a"),
    ]


def test_the_list_of_this_very_machine_does_not_raise():
    assert {line.runtime for line in list_devices()} == {"pycuda", "driver", "opencl"}


# What is absent


def test_a_missing_pycuda_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(UnavailableError, match=r"PyCUDA: it cannot be imported .*; pip install pycuda, beside a CUDA toolkit"):
        cuda_pycuda._pycuda.__wrapped__()


def test_missing_bindings_are_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnavailableError, match=r"CUDA driver: cuda-bindings cannot be imported .*; pip install cuda-bindings"):
        cuda_driver._driver.__wrapped__()


def test_a_missing_driver_is_told(monkeypatch):
    def no_library(flags):
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    stand_in = SimpleNamespace(driver=SimpleNamespace(cuInit=no_library))
    monkeypatch.setitem(sys.modules, "cuda.bindings", stand_in)
    with pytest.raises(UnavailableError, match=r"libcuda cannot be loaded \(libcuda\.so\.1.*\); install NVIDIA's driver"):
        cuda_driver._driver.__wrapped__()


# What devices share


def test_targets_name_hoppers_own_instructions():
    assert [base.cuda_target(*capability) for capability in ((8, 0), (9, 0), (12, 0))] == ["sm_80", "sm_90a", "sm_120"]


def test_the_driver_version_tells_the_newest_cuda():
    assert base.cuda_driver_version(12080).endswith("CUDA 12.8")


def test_bytes_of_an_array_are_its_own_memory():
    x = np.zeros((2, 2), ml_dtypes.bfloat16)
    base.as_bytes(x)[:] = 255
    assert np.isnan(x.astype(np.float32)).all()
    with pytest.raises(DeviceError, match="only row-major arrays are copied"):
        base.as_bytes(np.zeros((2, 2)).T)


# The CUDA runtimes on a driver made of host memory

DRIVER_OF_HOST_MEMORY = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t Word;
#define ALSO_V2(name) __typeof__(name) name##_v2 __attribute__((alias(#name)));
#define FAILS(name) do { int code = failure(name); if (code) return code; } while (0)
#define NEEDS_CONTEXT do { if (!depth) return 201; } while (0)
static _Thread_local void *contexts[8];
static _Thread_local int depth;
static int asked_shared_bytes;

/* FAILURE=cuLaunchKernel:700 makes that call return that code. */
static int failure(const char *name) {
    const char *wanted = getenv("FAILURE");
    size_t length = strlen(name);
    return wanted && !strncmp(wanted, name, length) && wanted[length] == ':' ? atoi(wanted + length + 1) : 0;
}
static void tell(const char *what) { puts(what); fflush(stdout); }

int cuInit(unsigned flags) { FAILS("cuInit"); return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = getenv("HIDDEN") ? 0 : 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Paper H200"); return 0; }
int cuDeviceComputeCapability(int *major, int *minor, int device) { *major = 9; *minor = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 232448 : attribute == 1 ? 1024 : 132;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x1234; return 0; }
int cuDevicePrimaryCtxRelease(int device) { return 0; } ALSO_V2(cuDevicePrimaryCtxRelease)
int cuCtxGetCurrent(void **context) { *context = depth ? contexts[depth - 1] : 0; return 0; }
int cuCtxSetCurrent(void *context) { depth += !depth; contexts[depth - 1] = context; return 0; }
int cuCtxPushCurrent(void *context) { contexts[depth++] = context; return 0; } ALSO_V2(cuCtxPushCurrent)
int cuCtxPopCurrent(void **context) { NEEDS_CONTEXT; *context = contexts[--depth]; return 0; } ALSO_V2(cuCtxPopCurrent)
int cuCtxGetDevice(int *device) { NEEDS_CONTEXT; *device = 0; return 0; }
int cuCtxSynchronize(void) { FAILS("cuStreamSynchronize"); return 0; }

int cuMemAlloc(Word *pointer, size_t bytes) {
    FAILS("cuMemAlloc"); NEEDS_CONTEXT; *pointer = (Word)malloc(bytes); return 0;
} ALSO_V2(cuMemAlloc)
int cuMemFree(Word pointer) { NEEDS_CONTEXT; free((void *)pointer); tell("freed"); return 0; } ALSO_V2(cuMemFree)
int cuMemcpyHtoDAsync(Word to, void *from, size_t bytes, void *stream) {
    NEEDS_CONTEXT; memcpy((void *)to, from, bytes); return 0;
} ALSO_V2(cuMemcpyHtoDAsync)
int cuMemcpyDtoHAsync(void *to, Word from, size_t bytes, void *stream) {
    NEEDS_CONTEXT; memcpy(to, (void *)from, bytes); return 0;
} ALSO_V2(cuMemcpyDtoHAsync)

static int load(void **loaded, const void *code) { *loaded = (void *)7; return memcmp(code, "CUBIN", 5) ? 200 : 0; }
static int find(void **found, const char *name) { *found = (void *)8; return strcmp(name, "multiply") ? 500 : 0; }
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    return load(library, code);
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return find(kernel, name); }
int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return 0; }
int cuLibraryUnload(void *library) { tell("unloaded"); return 0; }
int cuModuleLoadDataEx(void **module, const void *code, unsigned a, void *b, void *c) { return load(module, code); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return find(function, name); }
int cuModuleUnload(void *module) { tell("unloaded"); return 0; }
int cuFuncSetBlockShape(void *function, int x, int y, int z) { return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) {
    asked_shared_bytes = value;
    return attribute == 8 && value <= 232448 ? 0 : 1;
}
/* The kernel writes its two numbers and all that it knows of its launch to its first argument. */
int cuLaunchKernel(void *function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, void **extra) {
    FAILS("cuLaunchKernel"); NEEDS_CONTEXT;
    Word given[3];
    for (int number = 0; number < 3; number++)
        given[number] = parameters ? *(Word *)parameters[number] : ((Word *)extra[1])[number];
    Word seen[] = {given[1], given[2], (Word)grid * grid_y * grid_z, (Word)block * block_y * block_z, shared_bytes,
                   (Word)stream, asked_shared_bytes, (Word)contexts[depth - 1]};
    memcpy((void *)given[0], seen, sizeof seen);
    return 0;
}
int cuStreamSynchronize(void *stream) { FAILS("cuStreamSynchronize"); return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = stream == (void *)99; return 0; }
int cuEventCreate(void **event, unsigned flags) { *event = (void *)5; return 0; }
int cuEventRecord(void *event, void *stream) { NEEDS_CONTEXT; return 0; }
int cuEventDestroy(void *event) { return 0; } ALSO_V2(cuEventDestroy)
int cuEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 2; return 0; } ALSO_V2(cuEventElapsedTime)
int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 200
          ? "CUDA_ERROR_INVALID_IMAGE" : code == 500 ? "CUDA_ERROR_NOT_FOUND" : code == 700
          ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 700 ? "an illegal memory access was encountered" : "as the driver puts it";
    return 0;
}
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW), symbol);
    if (status) *status = !*function;
    return *function ? 0 : 500;
}
"""

PREAMBLE = """
import gc, os, threading
import numpy as np
from ksgen.devices import cuda_driver, find_device
from ksgen.resources import Binary

def refused(action):
    try:
        action()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

binary = Binary(b"CUBIN and more", "multiply", "sm_90a")
seen = np.zeros(8, np.int64)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A folder with a libcuda.so.1 for a process of its own."""
    if sys.platform != "linux" or not (compiler := shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the stand-in driver needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "driver.c"
    source.write_text(DRIVER_OF_HOST_MEMORY)
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1"]
    subprocess.run([compiler, *options, source.name, "-ldl"], cwd=folder, check=True)
    return folder


@pytest.fixture
def run(stand_in):
    """Runs a script in a process where that driver is the driver; gives what it printed."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    root = str(Path(ksgen.__file__).parents[1])

    def run_script(script, **variables):
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(stand_in),
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
            "KSGEN_DEVICE": "driver",
        }
        command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(script)]
        finished = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout.splitlines()

    return run_script


LAUNCH = """
device = find_device()
kernel, memory = device.load(binary, "multiply", 100 * 1024), device.allocate(64)
device.upload(memory, seen)
device.launch(kernel, 10, 128, 2048, (memory, None, -(5 << 40)), {stream})
device.download(seen, memory)
print(*seen)
"""


def test_the_driver_tells_its_gpu(run):
    printed = run("""
        device = find_device()
        print(device.name, device.target, device.driver_version.rpartition(", ")[2], device.kind, device.runtime, device.index)
        print(device.limits)
        print([found.selector for found in cuda_driver.found()])
    """)
    assert printed == [
        "Paper H200 sm_90a CUDA 13.0 cuda driver 0",
        "Limits(shared_bytes_per_block=232448, threads_per_block=1024, multiprocessors=132, is_cpu=False)",
        "['driver:0']",
    ]


def test_a_launch_hands_over_64_bit_arguments_on_the_callers_stream(run):
    assert run(LAUNCH.format(stream=0x55)) == [f"0 {-(5 << 40)} 10 128 2048 {0x55} {100 * 1024} {0x1234}"]
    assert run(LAUNCH.format(stream=None)) == [f"0 {-(5 << 40)} 10 128 2048 0 {100 * 1024} {0x1234}"]


def test_portable_shared_memory_is_not_asked_for(run):
    assert run(LAUNCH.replace("100 * 1024", "48 * 1024").format(stream=None))[0].split()[6] == "0"


def test_another_thread_launches_and_times_and_frees(run):
    printed = run("""
        device = find_device()
        kernel, memory = device.load(binary, "multiply", 0), device.allocate(64)
        def work():
            device.launch(kernel, 2, 1, 0, (int(memory), 3, 4), None)
            device.download(seen, memory)
            print(*device.time(lambda: device.launch(kernel, 2, 1, 0, (memory, 3, 4), None), None, 2, 1))
            device.allocate(8)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print(*seen[:3])
        del kernel, memory
        gc.collect()
        print("end")
    """)
    assert printed[:3] == ["0.002 0.002", "freed", "3 4 2"]
    assert sorted(printed[3:5]) == ["freed", "unloaded"]
    assert printed[5:] == ["end"]


def test_another_context_comes_back_after_the_call(run):
    assert (
        run("""
        from cuda.bindings import driver as cu
        device = find_device()
        other = cu.CUcontext(0x4321)
        cu.cuCtxPushCurrent(other)
        kernel, memory = device.load(binary, "multiply", 0), device.allocate(64)
        device.launch(kernel, 1, 1, 0, (memory, 0, 0), None)
        device.download(seen, memory)
        print(seen[7] == 0x1234, int(cu.cuCtxGetCurrent()[1]) == 0x4321)
    """)[0]
        == "True True"
    )


def test_capture_is_asked_of_real_streams_only(run):
    printed = run("device = find_device(); print(*(device.is_capturing(stream) for stream in (None, 0, 1, 98, 99)))")
    assert printed == ["False False False False True"]


def test_errors_of_the_driver_are_told_by_name_with_what_was_being_done(run):
    printed = run("""
        device = find_device()
        refused(lambda: device.load(Binary(b"no cubin", "multiply", "sm_90a"), "multiply", 0))
        refused(lambda: device.load(binary, "divide", 0))
        refused(lambda: device.load(binary, "multiply", 1 << 20))
        refused(lambda: find_device("driver:1"))
        os.environ["FAILURE"] = "cuMemAlloc:2"
        refused(lambda: device.allocate(1 << 50))
    """)
    assert printed[:5] == [
        "DeviceError: CUDA, loading multiply: CUDA_ERROR_INVALID_IMAGE (as the driver puts it)",
        "DeviceError: CUDA, finding divide: CUDA_ERROR_NOT_FOUND (as the driver puts it)",
        "DeviceError: CUDA, asking for 1048576 bytes of shared memory for multiply: CUDA_ERROR_INVALID_VALUE (as the driver puts it)",
        "DeviceError: driver:1: no such device; there is driver:0 (Paper H200)",
        "DeviceError: CUDA, allocating 1125899906842624 bytes: CUDA_ERROR_OUT_OF_MEMORY (as the driver puts it)",
    ]


def test_a_lost_context_is_told_as_the_end_of_the_process(run):
    (told,) = run("""
        device = find_device()
        kernel = device.load(binary, "multiply", 0)
        os.environ["FAILURE"] = "cuLaunchKernel:700"
        refused(lambda: device.launch(kernel, 3, 64, 0, (0, 0, 0), None))
        os._exit(0)
    """)
    assert told == (
        "DeviceError: CUDA, launching multiply (3 blocks of 64, 0 bytes): CUDA_ERROR_ILLEGAL_ADDRESS "
        "(an illegal memory access was encountered); the GPU context is lost, and only a new process can use the GPU again"
    )


def test_a_driver_without_a_gpu_is_told(run):
    assert run("refused(find_device)", FAILURE="cuInit:100") == [
        "DeviceError: CUDA, starting the driver: CUDA_ERROR_NO_DEVICE (as the driver puts it); nvidia-smi shows whether a GPU is there"
    ]
    assert "CUDA driver: it shows no GPU; CUDA_VISIBLE_DEVICES may hide it" in run("refused(find_device)", HIDDEN="1")[0]


# PyCUDA, played by as much of it as is used


class PyCuda:
    """Like PyCUDA, it makes events, modules and memory only inside a context, and drops them only there."""

    class Error(Exception):
        pass

    class Stream:
        handle = 5

    def __init__(self):
        self.launches, self.dropped, self.detached, self.pushed = [], [], [], threading.local()
        fake, inside = self, self.inside

        class Context:
            def push(self):
                fake.stack().append(self)

            def detach(self):
                fake.detached.append(self)

            pop = staticmethod(lambda: fake.stack().pop())
            get_current = staticmethod(lambda: fake.stack()[-1] if fake.stack() else None)
            get_device = staticmethod(lambda: device)
            synchronize = staticmethod(inside)

        class Device:
            count = staticmethod(lambda: 1)
            compute_capability = staticmethod(lambda: (9, 0))
            max_shared_memory_per_block_optin, max_threads_per_block, multiprocessor_count = 232448, 1024, 132

            def __new__(cls, index):
                return device

            def name(self):
                return "Paper H200"

            def retain_primary_context(self):
                return Context()

        class Part:
            def __init__(self, *_):
                inside()

            def __del__(self):
                fake.dropped.append((type(self).__name__, bool(fake.stack())))

        class Memory(Part):
            __int__ = staticmethod(lambda: 4096)

        class Function(Part):
            def set_attribute(self, attribute, value):
                fake.launches.append((attribute, value))

            def prepare(self, formats):
                self.formats = formats

            def prepared_async_call(self, grid, block, stream, *args, shared_size):
                inside()
                fake.launches.append((grid, block, stream, self.formats, args, shared_size))

        class Module(Part):
            get_function = Function

        class Event(Part):
            def record(self, stream):
                inside()

            def time_since(self, other):
                return 2.0

        device = object.__new__(Device)
        self.Context, self.Device, self.Event, self.get_driver_version = Context, Device, Event, lambda: 13000
        self.module_from_buffer, self.mem_alloc = Module, Memory
        self.function_attribute = SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def stack(self):
        if not hasattr(self.pushed, "stack"):
            self.pushed.stack = []
        return self.pushed.stack

    def inside(self):
        if not self.stack():
            raise self.Error("no currently active context?")

    def memcpy_htod_async(self, pointer, source, stream):
        self.inside()
        self.memory = source.tobytes()

    def memcpy_dtoh_async(self, target, pointer, stream):
        self.inside()
        target[:] = np.frombuffer(self.memory, np.uint8)


@pytest.fixture
def pycuda(monkeypatch):
    fake = PyCuda()
    monkeypatch.setattr(cuda_pycuda, "_pycuda", lambda: fake)
    cuda_pycuda.open_device.cache_clear()
    yield fake
    cuda_pycuda.open_device.cache_clear()


def test_pycuda_tells_its_gpu(pycuda):
    device = cuda_pycuda.open_device(0)
    assert (device.name, device.target, device.limits) == ("Paper H200", "sm_90a", base.Limits(232448, 1024, 132))
    assert cuda_pycuda.found() == [Found("pycuda:0", "pycuda", "Paper H200", "sm_90a")]
    with pytest.raises(DeviceError, match=r"pycuda:1: no such device; there is pycuda:0 \(Paper H200\)"):
        cuda_pycuda.open_device(1)


def test_pycuda_launches_inside_its_context_on_any_thread_and_leaves_it(pycuda):
    device, stream = cuda_pycuda.open_device(0), PyCuda.Stream()

    def work():
        kernel, memory = device.load(Binary(b"CUBIN", "multiply", "sm_90a"), "multiply", 100 * 1024), device.allocate(8)
        device.launch(kernel, 10, 128, 2048, (memory, None, -3), stream)
        device.launch(kernel, 10, 128, 2048, (512, 1, -3), 0)
        assert device.time(lambda: None, None, runs=2, warmup=0) == [0.002, 0.002]
        del kernel, memory
        assert pycuda.stack() == []

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert pycuda.launches == [
        ("shared", 100 * 1024),
        ((10, 1), (128, 1, 1), stream, "qqq", (4096, 0, -3), 2048),
        ((10, 1), (128, 1, 1), None, "qqq", (512, 1, -3), 2048),
    ]
    assert sorted(pycuda.dropped) == [("Event", True)] * 4 + [("Function", True), ("Memory", True), ("Module", True)]


def test_pycuda_copies_bfloat16_and_nothing_at_all(pycuda):
    device, x = cuda_pycuda.open_device(0), np.arange(4).astype(ml_dtypes.bfloat16)
    y = np.zeros_like(x)
    device.upload(device.allocate(8), x)
    device.download(y, 4096)
    assert (x == y).all()
    device.upload(4096, x[:0])
    assert len(pycuda.memory) == 8


def test_pycuda_stays_in_the_context_that_the_user_has(pycuda):
    theirs = pycuda.Context()
    theirs.push()
    assert cuda_pycuda.open_device(0)._context is theirs


def test_pycuda_refuses_streams_that_it_did_not_make(pycuda):
    device = cuda_pycuda.open_device(0)
    assert not device.supports_foreign_streams
    with pytest.raises(DeviceError, match="stream 140: PyCUDA launches on its own streams only; KSGEN_DEVICE=driver launches on any"):
        device.synchronize(140)


def test_pycudas_errors_are_told_with_what_was_being_done(pycuda, monkeypatch):
    def lost(nbytes):
        raise pycuda.Error("cuMemAlloc failed: an illegal memory access was encountered")

    monkeypatch.setattr(pycuda, "mem_alloc", lost)
    told = "PyCUDA on Paper H200, allocating 8 bytes: Error: cuMemAlloc failed: .*; the GPU context is lost"
    with pytest.raises(DeviceError, match=told):
        cuda_pycuda.open_device(0).allocate(8)
    assert pycuda.stack() == []


# The real thing

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
    kernel = device.load(device.compiler().compile(TELL, "tell", device.target), "tell", 64 * 1024)
    out, memory = np.zeros(2, np.int64), device.allocate(16)
    device.upload(memory, out)
    device.launch(kernel, 3, 1, 64 * 1024, (memory, -(7 << 33), None), None)
    device.download(out, memory)
    assert out.tolist() == [-(7 << 33), 3001]
    assert all(0 < each < 1 for each in device.time(lambda: device.launch(kernel, 1, 1, 65536, (memory, 1, 0), None), None, 3, 1))
    assert not device.is_capturing(None)
