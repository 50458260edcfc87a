"""Kernels as functions of shared libraries: right in every type, on any number of threads, in children, and refused
in words.
"""

import ctypes
import gc
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ksgen import devices
from ksgen.build import processors
from ksgen.build.cache import Cache
from ksgen.build.host import find_host_compiler
from ksgen.build.processors import INSTRUCTION_SETS, instruction_sets_here
from ksgen.build.request import Binary, Request
from ksgen.devices import native, threads
from ksgen.devices.base import Device, Launch, UnavailableError
from ksgen.errors import DeviceError, KsgenWarning, LaunchError, ToolchainError
from ksgen.launch import planner as planner_module
from ksgen.launch.choice import choose, choose_for_many, limits_of
from ksgen.launch.planner import Planner
from ksgen.launcher import Launcher
from ksgen.measure.verify import compare, make_problem, measure, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import ACTIVATIONS, LAYOUTS, Epilogue, KernelSpec
from ksgen.wisdom import Wisdom
from tests.families import test_vector as vector
from tests.families import test_vector_slices as slices
from tests.support.libraries import library
from tests.support.native import chosen_native

FE_INVALID = 1  # on x86 and ARM


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return chosen_native(monkeypatch)


# ---- right


@pytest.mark.exhaustive
@pytest.mark.parametrize("along", vector.WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "precision",
    ["float32", "float16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("float64", "bfloat16"))],
)
def test_every_type_and_variant(precision: str, layout: str, along: str) -> None:
    """Every type and vectorization has ragged edges, a panel or none, and each processor's number of lanes."""
    for lanes, shape, batch in (
        (2, (2, 3, 5, 2), 9),
        (4, (1, 9, 5, 4), 33),
        (8, (1, 6, 7, 24), 17),
        (16, (2, 24, 5, 16), 50),
    ):
        kernel = vector.kernel_of(shape, precision, layout, Epilogue(True, "none", True))
        vector.agrees(kernel, vector.constants_of(kernel, along, lanes), batch)
        slices.agrees(
            slices.of_slices(kernel), vector.constants_of(kernel, along, lanes), batch, slices.GAPS[batch % 2]
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(2, 48, 192, 1), (1, 192, 48, 2), (1, 24, 32, 3), (1, 40, 16, 24), (2, 37, 50, 1), (1, 13, 50, 7)]
)
def test_what_memory_held_before_is_not_computed_with(
    shape: tuple[int, ...], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subnormal values in unread sums would take eight times as long. Signalling NaNs raise a flag if they are used."""
    monkeypatch.setattr(threads, "threads_of_environment", lambda: 1)
    flags = ctypes.CDLL("libm.so.6" if sys.platform == "linux" else None)
    launcher = Launcher(*shape)
    for batch in (1, 2, 3, 5, 17, 33, 50):
        problem = make_problem(vector.kernel_of(shape, layout=layout), batch)
        call = launcher.prepare(problem.x, launcher.pack(problem.weights), layout=layout)
        if call.plan.workspace_bytes:
            at = call.plan.workspace(None).pointer
            np.ctypeslib.as_array((ctypes.c_uint32 * (call.plan.workspace_bytes // 4)).from_address(at))[:] = 0x7FA00000
        flags.feclearexcept(FE_INVALID)
        call()
        assert not flags.fetestexcept(FE_INVALID), (call.plan.choice.constants, batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_activations_are_right_everywhere(precision: str, activation: str) -> None:
    values = np.concatenate(
        [np.linspace(-12, 12, 20001), [0.0, -0.0, 1e-30, 90, -90, 1e30, -1e30, np.nan, np.inf]]
    ).astype(precision)
    got = np.asarray(Launcher(1, 1, 1, 1)(values[:, None], np.ones((1, 1, 1, 1), precision), activation=activation))[
        :, 0
    ]
    wide = values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = {
            "none": lambda x: x,
            "relu": lambda x: np.where(x < 0, 0, x),
            "gelu": lambda x: 0.5 * x * np.array([math.erfc(-each * math.sqrt(0.5)) for each in x.tolist()]),
            "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
            "silu": lambda x: x / (1 + np.exp(-x)),
        }[activation](wide)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    size = np.maximum(np.abs(wanted[finite]), 1)
    assert (np.abs(got[finite] - wanted[finite]) / size).max() < (1e-6 if precision == "float32" else 1e-14)


def test_silu_is_right_until_it_vanishes() -> None:
    """Below -88, e^-x is within a factor of two of the largest float32."""
    values = np.linspace(-88.72, -80, 10001, dtype=np.float32)
    got = np.asarray(Launcher(1, 1, 1, 1)(values[:, None], np.ones((1, 1, 1, 1), np.float32), activation="silu"))[:, 0]
    wide = values.astype(np.float64)
    np.testing.assert_allclose(got, wide / (1 + np.exp(-wide)), rtol=1e-6)


def test_all_halves_are_themselves() -> None:
    """Each of the 65536, in vectors of sixteen lanes and one by one."""
    bits = np.arange(65536, dtype=np.uint16)
    values = bits.view(np.float16)
    for shape in ((len(bits), 1), (16, len(bits) // 16)):
        got = np.asarray(Launcher(1, 1, 1, 1)(values.reshape(-1, 1), np.ones((1, 1, 1, 1), np.float16))).reshape(-1)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(values))
        kept = ~np.isnan(values)
        np.testing.assert_array_equal(got.view(np.uint16)[kept] & 0x7FFF, bits[kept] & 0x7FFF, err_msg=str(shape))


@pytest.mark.second
@pytest.mark.slow
def test_no_access_beyond_the_ends_of_arrays() -> None:
    code = "from tests.families.test_vector import run_fenced; run_fenced()"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, ""), finished


# ---- threads

KERNEL = KernelSpec(Pattern(2, 48, 32, 4))
BATCH = 700


def product() -> np.ndarray:
    problem = make_problem(KERNEL, BATCH)
    return np.asarray(Launcher(*KERNEL.pattern.shape)(problem.x, problem.weights))


@pytest.mark.parametrize("wanted_threads", [1, 2, 7])
def test_any_number_of_threads_gives_the_same_bits(wanted_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = product()
    error, _ = compare(make_problem(KERNEL, BATCH), wanted)
    assert error <= tolerance("float32", 32)
    monkeypatch.setattr(threads, "threads_of_environment", lambda: wanted_threads)
    np.testing.assert_array_equal(product(), wanted)


def wrong_at_once(calls: Sequence[Callable[[], Any]], wanted: np.ndarray) -> int:
    """How many results differ from what is wanted, where each call runs again and again in a thread of its own."""
    wrong: list[int] = []

    def again(call: Callable[[], Any]) -> None:
        wrong.extend(1 for _ in range(40) if not np.array_equal(call(), wanted))

    crew = [threading.Thread(target=again, args=(call,)) for call in calls]
    for each in crew:
        each.start()
    for each in crew:
        each.join(60)
    assert not any(each.is_alive() for each in crew)
    return len(wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_openmp", [True, False])
def test_many_threads_of_python_at_once(has_openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's threads run the calls, or a pool that serves one of them at a time."""
    if not has_openmp:
        monkeypatch.setattr(native, "_openmp", lambda: None)
    monkeypatch.setattr(threads, "threads_of_environment", lambda: 3)
    assert wrong_at_once([product] * 5, product()) == 0


@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_calls_prepared_by_one_thread_run_in_several_at_once(layout: str) -> None:
    """Each works in memory of the thread that runs it."""
    problem = make_problem(replace(KERNEL, layout=layout), BATCH)
    calls = [Launcher(*KERNEL.pattern.shape).prepare(problem.x, problem.weights, layout=layout) for _ in range(4)]
    assert wrong_at_once(calls, np.array(calls[0]())) == 0


SUMS = """
#define ENTRY(X, Y) __kernel
ENTRY(1, 1)
void sums(const long* given, long* out, const long count) {
    long sum = (long)get_group_id(0);
    for (volatile int round = 0; round < 2000; ++round);  // microseconds, for which other threads are woken
    for (long at = 0; at < count; ++at) sum += given[at];
    out[get_group_id(0)] = sum;
}
"""


@pytest.mark.parametrize("has_openmp", [True, False])
@pytest.mark.parametrize("count", [1, 3, 60])
def test_recorded_launches_wait_for_each_other(
    device: Any, has_openmp: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sums up all that the one before it wrote; threads are gathered for eight of the 19 at a time."""
    if not has_openmp:
        monkeypatch.setattr(native, "_openmp", lambda: None)
    monkeypatch.setattr(threads, "threads_of_environment", lambda: 4)
    kernel = device.load(device.compiler().compile(SUMS, "sums", device.target), "sums", 0)
    steps, places = 19, [np.arange(count) for _ in range(20)]
    launches = [Launch(kernel, count, 1, 0, (None, None, count)) for _ in range(steps)]
    moved = [pair for at in range(steps) for pair in ((3 * at, at), (3 * at + 1, at + 1))]
    recording, addresses = device.record(launches, None, moved), [each.ctypes.data for each in places]
    for _ in range(50):
        wanted = np.arange(count, dtype=np.uint64)
        recording(addresses)
        for place in places[1:]:
            wanted = wanted.sum(dtype=np.uint64) + np.arange(count, dtype=np.uint64)
            np.testing.assert_array_equal(place.view(np.uint64), wanted)
    others = [np.ones(count, np.int64), np.zeros(count, np.int64)]
    device.record(launches[:1], None, [(0, 1), (1, 0)])([each.ctypes.data for each in reversed(others)])
    np.testing.assert_array_equal(others[1], count + np.arange(count))


def test_recordings_of_the_same_launches_share_the_fastest_number_of_threads(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", lambda: 2)
    kernel = device.load(device.compiler().compile(SUMS, "sums", device.target), "sums", 0)
    x, *ys = [np.zeros(5, np.int64) for _ in range(3)]
    one, other = (device.record([Launch(kernel, 5, 1, 0, (x.ctypes.data, y.ctypes.data, 5))], None) for y in ys)
    sizes = (4, 5), (5, 4)  # numbers of groups, and of rows
    others = [
        device.record([Launch(kernel, grid, 1, 0, (x.ctypes.data, ys[0].ctypes.data, rows))], None)
        for grid, rows in sizes
    ]
    assert other.settled() is None
    for _ in range(threads.WARM_UP + 2 * threads.SAMPLES):
        one()
    assert other.settled()[2:] == one.settled()[2:]  # all but where its arguments are
    assert [each.settled() for each in others] == [None, None]


def test_a_launch_gives_its_batch(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches whose grids are equal do not share their times."""
    kernel = device.load(device.compiler().compile(SUMS, "sums", device.target), "sums", 0)
    given = list[Any]()
    monkeypatch.setattr(device, "_launcher", lambda *args: given.append(args))
    for batch in (3, 4):
        device.launch(kernel, 2, 1, 0, (0, 0, batch), None)
    assert [each[2:4] for each in given] == [(2, 3), (2, 4)]


def test_a_recording_works_in_memory_of_the_thread_that_runs_it(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its launches in the same, where the first needs less than a later one, and none where another thread
    works.
    """
    kernel = device.load(device.compiler().compile(SUMS, "sums", device.target), "sums", 0)
    small, large = device.workspace(40, None), device.workspace(2**20, None)
    launches = [Launch(kernel, 5, 1, 0, (small, small, 0)), Launch(kernel, 5, 1, 0, (large, None, 5))]
    recording, made, outs = (
        device.record(launches, None, [(4, 0)]),
        list[Any](),
        [np.zeros(5, np.int64), np.zeros(5, np.int64)],
    )
    allocated = native.host_memory
    monkeypatch.setattr(native, "host_memory", lambda nbytes: made.append(allocated(nbytes)) or made[-1])
    held = (ctypes.c_int64 * 5).from_address(large.pointer)  # of this thread
    for number, out in enumerate(outs):
        held[:] = [7] * 5
        worker = threading.Thread(target=recording, args=([out.ctypes.data],))
        worker.start()
        worker.join()
        assert list(held) == [7] * 5
        assert [each.nbytes for each in made] == [2**20] * (number + 1)
        assert made[-1].ctypes.data != large.pointer
        np.testing.assert_array_equal(out, 10 + np.arange(5))


IN_A_CHILD = """
import os, signal
from tests.devices.test_native import product
wanted = product().tobytes()
child = os.fork()
if not child:
    signal.alarm(30)
    os._exit(product().tobytes() != wanted or product().tobytes() != wanted)
assert os.waitpid(child, 0)[1] == 0
assert product().tobytes() == wanted
"""


@pytest.mark.parametrize("torch", ["", pytest.param("import torch", marks=pytest.mark.libraries)])
def test_a_child_has_threads_of_its_own(torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has no threads of its parent, nor those of PyTorch. It would wait for them forever."""
    if torch:
        library("torch")
    monkeypatch.setenv("KSGEN_THREADS", "3")
    code = torch + IN_A_CHILD
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr


FEW_THREADS = """
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
typedef int (*Create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
static int started = 0;
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*function)(void*), void* given) {
    if (started >= atoi(getenv("MOST_THREADS"))) return EAGAIN;  // as where a container's limit is reached
    ++started;
    return ((Create)dlsym(RTLD_NEXT, "pthread_create"))(thread, how, function, given);
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD puts a function before the C library's on Linux alone")
@pytest.mark.parametrize("most", ["0", "1"])
def test_launches_go_on_with_the_threads_that_can_be_started(
    most: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, shared = tmp_path / "few.cpp", tmp_path / "few.so"
    source.write_text(FEW_THREADS)
    subprocess.run(
        [*find_host_compiler().command, "-shared", "-fPIC", str(source), "-o", str(shared), "-ldl"], check=True
    )
    code = f"""
import numpy as np
from ksgen.launcher import Launcher
from ksgen.measure.verify import compare, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
ks, problem = Launcher{KERNEL.pattern.shape}, make_problem(KernelSpec(Pattern{KERNEL.pattern.shape}), {BATCH})
for _ in range(5):
    assert compare(problem, np.asarray(ks(problem.x, problem.weights)))[0] <= tolerance("float32", 32)
"""
    product()  # compiled before, as compilers start processes and threads
    monkeypatch.setenv("KSGEN_THREADS", "7")
    monkeypatch.setenv("MOST_THREADS", most)
    monkeypatch.setenv("LD_PRELOAD", str(shared))
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr


CORES = """
int main(int count, char** arguments) {
    const int core = atoi(arguments[1]), other = atoi(arguments[2]);
    cpu_set_t one, both, after;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    both = one;
    CPU_SET(other, &both);
    Cores cores;
    if (sched_setaffinity(0, sizeof one, &one)) return 1;
    cores.take();
    if (sched_getcpu() != core) return 2;
    cores.take();  // no other core is allowed
    sched_setaffinity(0, sizeof both, &both);  // and stays where it is
    cores.take();
    if (sched_getcpu() != other) return 3;
    if (sched_getaffinity(0, sizeof after, &after) || !CPU_EQUAL(&both, &after)) return 4;
    cores.take();  // all are taken
    return 0;
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads do not choose their cores")
def test_a_thread_leaves_the_core_of_another_of_its_launch(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core has no other")
    source, program = tmp_path / "cores.cpp", tmp_path / "cores"
    source.write_text(f'#include <stdlib.h>\n#include "{native.THREADS}"\n{CORES}')
    subprocess.run([*find_host_compiler().command, "-pthread", str(source), "-o", str(program)], check=True)
    assert subprocess.run([str(program), str(cores[0]), str(cores[1])], check=False).returncode == 0


ASLEEP = """
static std::atomic<bool> may_wake{false};
static std::atomic<long> asleep{0}, joined{0};
static const pthread_t launching = pthread_self();

static int wait_until_it_may(pthread_cond_t*, pthread_mutex_t* mutex) {
    const bool is_member = !pthread_equal(pthread_self(), launching);
    pthread_mutex_unlock(mutex);
    asleep.fetch_add(is_member);
    do sched_yield();
    while (is_member && !may_wake.load());
    return pthread_mutex_lock(mutex);
}

static void alone(const int64_t*, long, long, long) { spend_microseconds(); }
static void together(const int64_t*, long, long, long) {
    spend_microseconds();
    joined.fetch_add(1);
    while (joined.load() < 2) sched_yield();
}

int main() {
    ksgen_launch(alone, nullptr, 2, 0, 2, nullptr);
    while (asleep.load() < 1) sched_yield();
    for (int launch = 0; launch < 100; ++launch) ksgen_launch(alone, nullptr, 2, 0, 2, nullptr);
    may_wake.store(true);
    for (int launch = 0; launch < 100; ++launch) {
        joined.store(0);
        ksgen_launch(together, nullptr, 2, 0, 2, nullptr);
    }
    return 0;
}
"""


SPEND = """
static void spend_microseconds() {  // so that a launch wakes other threads
    const int64_t begin = Pace::now_ns();
    while (Pace::now_ns() < begin + 2 * ALONE_NS);
}
"""

SHORT = """
static long regions = 0;
static void parallel(void (*function)(void*), void* data, unsigned, unsigned) {
    ++regions;
    function(data);
}
static void brief(const int64_t*, long, long, long) {}
static void lengthy(const int64_t*, long, long, long) { spend_microseconds(); }
static void sized_walk(const int64_t* size, long, long, long) {
    if (*size > 1) spend_microseconds();
}
static long regions_of(Walk walk, const long groups) {
    regions = 0;
    for (int launch = 0; launch < 1000; ++launch) ksgen_launch(walk, nullptr, groups, 0, 2, parallel);
    return regions;
}

int main() {
    const Step both[] = {{lengthy, 0, 2, 0}, {brief, 0, 2, 0}};
    const Recorded recorded{parallel, both, 2, nullptr, 0, nullptr, 0};
    const Repeat repeat{&recorded, 2};
    const long first = regions_of(brief, 2);
    if (first < 1 || first > 100) return 1;  // the first launch, and those after one that was interrupted
    if (regions_of(lengthy, 2) != 1000 || regions_of(brief, 1) != 0) return 2;
    regions = 0;
    ksgen_launch_all(&repeat);
    if (regions != 1) return 3;
    // equal numbers of groups, but other sizes: what is brief for one batch is lengthy for another
    const Step sized[] = {{sized_walk, 0, 2, 1}, {sized_walk, 0, 2, 2}};
    const int64_t sizes[] = {1, 2};
    for (int launch = 0; launch < 10; ++launch)
        for (int each = 0; each < 2; ++each) {
            const Recorded one{parallel, sized + each, 1, sizes + each, 1, nullptr, 0};
            const Repeat again{&one, 2};
            regions = 0;
            if (launch % 2) ksgen_launch_all(&again);
            else ksgen_launch(sized_walk, sizes + each, 2, sizes[each], 2, parallel);
            if (launch > 0 && regions != each) return 4;
        }
    return 0;
}
"""


def test_launches_of_a_few_microseconds_wake_no_threads(tmp_path: Path) -> None:
    source, program = tmp_path / "short.cpp", tmp_path / "short"
    source.write_text(f'#include "{native.THREADS}"\n{SPEND}{SHORT}')
    subprocess.run([*find_host_compiler().command, "-O2", "-pthread", str(source), "-o", str(program)], check=True)
    assert subprocess.run([str(program)], check=False, timeout=30).returncode == 0


def test_no_launch_waits_for_a_thread_that_sleeps(tmp_path: Path) -> None:
    """It ends before that thread wakes, which then takes part in later launches."""
    source, program = tmp_path / "asleep.cpp", tmp_path / "asleep"
    declared = "static int wait_until_it_may(pthread_cond_t*, pthread_mutex_t*);"
    hooked = "#define pthread_cond_wait wait_until_it_may"
    source.write_text(f'#include <pthread.h>\n{declared}\n{hooked}\n#include "{native.THREADS}"\n{SPEND}{ASLEEP}')
    subprocess.run([*find_host_compiler().command, "-pthread", str(source), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True, timeout=30)


MODES = """
static std::atomic<long> joined{0};
static float thirds[2];

static void divide(const int64_t*, const long group, long, long) {
    spend_microseconds();
    joined.fetch_add(1);
    while (joined.load() < 2) sched_yield();  // so that each thread takes one group
    volatile float one = 1, three = 3;
    thirds[group] = one / three;
}

static bool keeps_its_modes = false;
static void (*work)(void*) = nullptr;
static void* in_modes_of_its_own(void* data) {
    fesetround(FE_TONEAREST);
    work(data);
    keeps_its_modes = fegetround() == FE_TONEAREST;
    return nullptr;
}
static void as_openmp(void (*function)(void*), void* data, unsigned, unsigned) {
    pthread_t thread;
    work = function;
    pthread_create(&thread, nullptr, in_modes_of_its_own, data);
    function(data);
    pthread_join(thread, nullptr);
}

static bool both_are(const float wanted, const Parallel parallel) {
    joined.store(0);
    ksgen_launch(divide, nullptr, 2, 0, 2, parallel);
    return thirds[0] == wanted && thirds[1] == wanted;
}

int main() {
    const float nearest = 0x1.555556p-2f, below = 0x1.555554p-2f;
    if (!both_are(nearest, nullptr)) return 1;
    fesetround(FE_DOWNWARD);
    if (!both_are(below, nullptr)) return 2;
    if (!both_are(below, as_openmp) || !keeps_its_modes) return 3;
    fesetround(FE_TONEAREST);
    return both_are(nearest, nullptr) ? 0 : 4;
}
"""


def test_all_threads_compute_in_the_modes_of_the_caller(tmp_path: Path) -> None:
    """Else results would depend on which thread takes a group. OpenMP's threads keep their own modes."""
    source, program = tmp_path / "modes.cpp", tmp_path / "modes"
    source.write_text(f'#include "{native.THREADS}"\n{SPEND}{MODES}')
    subprocess.run([*find_host_compiler().command, "-pthread", str(source), "-o", str(program)], check=True)
    assert subprocess.run([str(program)], check=False, timeout=30).returncode == 0


@pytest.mark.libraries
def test_pytorch_s_threads_do_the_work_where_it_has_them() -> None:
    torch = library("torch")
    if not torch.backends.openmp.is_available():
        pytest.skip("this PyTorch has no OpenMP")
    assert native._openmp()
    assert native._parallel_of(None) is None


@pytest.mark.parametrize("torch", [None, ModuleType("torch")])
def test_calls_go_on_while_another_thread_imports_pytorch(
    torch: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None in the place of the module, which forbids its import, is no obstacle either."""
    wanted = product()
    monkeypatch.setattr(threads, "threads_of_environment", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]  # None, as Python takes it
    np.testing.assert_array_equal(product(), wanted)


# ---- libraries


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps is Linux's")
def test_a_kernel_is_one_library_which_goes_when_the_kernel_does(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded() -> list[str]:
        gc.collect()  # a plan in a cycle of references, such as a caught exception's, goes with it
        maps = {
            line.split(maxsplit=5)[5]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "ksgen-native-" in line
        }
        return [path for path in maps if any(f"/ks_{number}x3x5x1_" in path for number in range(2, 6))]

    monkeypatch.setattr(planner_module, "MOST_LOADED", 2)
    own = Planner()
    for number in range(2, 6):
        plan = own.plan(device, KernelSpec(Pattern(number, 3, 5, 1)), 40)
        assert plan.multiply.library is plan.pack_handle.library
    assert len(loaded()) == 2
    for number in (2, 3):
        own.plan(device, KernelSpec(Pattern(number, 3, 5, 1)), 40)
    assert len(loaded()) == 3  # `plan` keeps its own
    del plan
    assert len(loaded()) == 2


# ---- refused in words


def test_what_needs_a_driver_is_refused(device: Device) -> None:
    with pytest.raises(ToolchainError, match=r"only an OpenCL driver runs such kernels"):
        measure(device, KERNEL, 64, family="simt")


def test_there_are_no_streams(device: Device) -> None:
    problem = make_problem(KERNEL, 5)
    with pytest.raises(LaunchError, match=r"has no streams: a call returns when it is done; omit stream="):
        Launcher(*KERNEL.pattern.shape)(problem.x, problem.weights, stream=7)
    plan = measure(device, KERNEL, 5, runs=0).plan
    with pytest.raises(DeviceError, match=r"launching ks_\w+: .* has no streams; give None"):
        device.record([Launch(plan.multiply, 1, 1, 0, ())], 7)
    with pytest.raises(DeviceError, match=r"launching ks_\w+: 32 work items per group need an OpenCL driver"):
        device.record([Launch(plan.multiply, 1, 32, 0, ())], None)


def test_another_processor_s_library_is_not_loaded(device: Device) -> None:
    plan = measure(device, KERNEL, 9, runs=0).plan
    with pytest.raises(DeviceError, match=r"a binary for host Linux m68k does not run here: this is host "):
        device.load(replace(plan.binary, target="host Linux m68k"), plan.source.entry, 0)
    with pytest.raises(DeviceError, match=r"loading ks_gone: .*set TMPDIR to a folder whose files may be executed"):
        device.load(Binary(b"no library", "ks_gone", device.target), "ks_gone", 0)
    with pytest.raises(DeviceError, match=r"ks_gone: the library holds no such kernel; build it again"):
        device.load(plan.binary, "ks_gone", 0)


def test_where_files_may_not_be_run_libraries_come_from_memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = measure(device, KERNEL, 9, runs=0).plan.binary
    opened, real = [], ctypes.CDLL

    def no_files(name: str, *given: object, **named: object) -> ctypes.CDLL:
        opened.append(name)
        if name and "ksgen-native-" in name:
            raise OSError(f"{name}: failed to map segment from shared object")
        return real(name, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(native.ctypes, "CDLL", no_files)
    files = len(os.listdir("/proc/self/fd"))
    new = [replace(binary, data=binary.data + bytes(number)) for number in (1, 2)]  # which are not loaded yet
    kernels = [device.load(each, binary.entry, 0) for each in new]
    assert [each.entry for each in kernels] == [binary.entry] * 2
    assert kernels[0].library._handle != kernels[1].library._handle
    assert any(str(name).startswith("/proc/self/fd/") for name in opened)
    assert len(os.listdir("/proc/self/fd")) <= files


def test_nothing_is_left_in_the_folder_of_temporary_files(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    binary = measure(device, KERNEL, 9, runs=0).plan.binary
    device.load(replace(binary, data=binary.data + bytes(1)), binary.entry, 0)  # which is not loaded yet
    assert list(tmp_path.glob("*/*")) == [], "nothing but the user's own folder, which is empty"


# ---- built elsewhere


def test_another_instruction_set_s_library_is_not_loaded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process by an instruction that is not there."""
    binary = measure(device, KERNEL, 9, runs=0).plan.binary
    for each in INSTRUCTION_SETS.values():
        built = replace(binary, target=each.target)
        if each in instruction_sets_here():
            assert device.load(built, binary.entry, 0).entry == binary.entry
            monkeypatch.setattr(processors, "processor_features", lambda: frozenset())
        with pytest.raises(
            DeviceError,
            match=rf"{binary.entry}: a binary for {each.target} does not run here: this processor (is|lacks) ",
        ):
            device.load(built, binary.entry, 0)
        monkeypatch.undo()


def test_what_was_built_for_this_very_processor_serves_every_batch(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch's own constants may differ from those of the power of two above it."""
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    kernel, limits, wisdom = KernelSpec(Pattern(1, 48, 48, 2)), limits_of(device), Wisdom()
    choices = (
        (batch, choose(kernel, batch, limits, wisdom), choose_for_many(kernel, batch, limits, wisdom))
        for batch in range(2, 1000)
    )
    batch, _, shared = next((batch, own, shared) for batch, own, shared in choices if own.constants != shared.constants)
    built = Planner().plan_of(device, kernel, batch, shared)
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    found = Planner().plan(device, kernel, batch)
    assert (found.binary.target, found.binary.data) == (device.target, built.binary.data)
    with pytest.raises(ToolchainError, match="KSGEN_NO_COMPILE forbids compiling it"):
        Planner().plan(device, replace(kernel, layout="bsl"), batch)


def test_foreign_and_damaged_entries_of_the_cache_are_built_again(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose bytes changed, and one that another processor's machine left under its own target."""
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))

    def built() -> Binary:
        return Planner().plan(device, KERNEL, 9).binary

    first = built()
    (entry,) = [each for each in Cache(tmp_path).entries() if each.entry == first.entry]
    for damage in (first.data[: len(first.data) // 2], first.data[:-1] + b"?", b""):
        (entry.path / "binary").write_bytes(damage)
        assert built().data == first.data
        assert (entry.path / "binary").read_bytes() == first.data
    request = Request(Planner().plan(device, KERNEL, 9).source.text, first.entry, "host Linux m68k")
    Cache(tmp_path).put(request, replace(first, target="host Linux m68k", data=b"of another"))
    assert built().data == first.data


# ---- chosen


def test_a_machine_without_a_compiler_takes_opencl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    monkeypatch.setattr("ksgen.build.host.importlib.util.find_spec", lambda name: None)
    native.open_device.cache_clear()
    with pytest.raises(
        UnavailableError,
        match=r"native: no C\+\+ compiler found .*install g\+\+ \(12 and up\) or clang \(14 and up\), or pip install "
        r"ziglang",
    ):
        native.open_device(0)
    native.open_device.cache_clear()


REFUSES = """#!/bin/sh
case "$*" in *--version) echo "g++ (Ubuntu 11.4.0) 11.4.0"; exit;; esac
echo "ks_trial.cpp:9:1: error: '__builtin_shufflevector' was not declared in this scope;" \
    "did you mean '__builtin_shuffle'?" >&2
exit 1
"""
WHY = (
    r"ks_trial: \S+c\+\+ refused it: ks_trial.cpp:9:1: error: '__builtin_shufflevector' was not declared in this "
    r"scope; .*"
)


def old_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Alone on PATH, with nothing cached."""
    made = folder / "c++"
    made.write_text(REFUSES)
    made.chmod(0o755)
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    monkeypatch.setattr("ksgen.build.host.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("ksgen.build.host.CANDIDATES", ("c++", "own-c++"))
    native.open_device.cache_clear()
    return made


def test_a_compiler_that_refuses_falls_back_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        serves = find_host_compiler()
    except ToolchainError as absent:
        pytest.skip(str(absent))
    old_compiler(tmp_path, monkeypatch)
    (tmp_path / "own-c++").symlink_to(serves.command[0])
    with pytest.warns(KsgenWarning, match=rf"{WHY}; \S+own-c\+\+ is used instead"):
        device = native.open_device(0)
    assert Path(device.compiler().command[0]).name == "own-c++"
    native.open_device.cache_clear()


def test_the_next_runtime_serves_where_every_compiler_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = old_compiler(tmp_path, monkeypatch)
    with pytest.raises(UnavailableError, match=rf"native: {WHY}; install g\+\+ \(12 and up\) or clang \(14 and up\)"):
        native.open_device(0)
    monkeypatch.setenv("KSGEN_CXX", str(made))
    with pytest.raises(
        UnavailableError,
        match=rf"native: {WHY}; KSGEN_CXX names it, so no other is tried; unset it, or set it to another compiler",
    ):
        native.open_device(0)
    with suppress(DeviceError):  # where there is no OpenCL either
        assert next(devices._opened(("native", "opencl"), 0, [])).runtime == "opencl"
    native.open_device.cache_clear()
