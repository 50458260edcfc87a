"""Tests of builds from source to binary: compiling, waiting, reading, and the message if no compiler works."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from ksgen.build import build as build_module
from ksgen.build import toolchain
from ksgen.build.build import Binary, CacheLayers, Request, Resources, build, build_many, default_caches
from ksgen.build.bundle import Bundle, write_bundle
from ksgen.build.cache import Cache
from ksgen.errors import KsgenError, ToolchainError
from tests.support.compilers import write_program
from tests.support.process_state import has_ended


@dataclass(frozen=True)
class Compiler:
    """Writes a line to its journal for every compilation: what it makes is its own name and the text."""

    journal: Path
    name: str = "fake"
    version: str = "1.0"

    def options(self, target: str) -> tuple[str, ...]:
        return ("-O3", target)

    def compile(self, text: str, entry: str, target: str) -> Binary:
        with self.journal.open("a") as journal:
            journal.write(f"{entry} {target}\n")
        if "refuse" in text:
            raise ToolchainError(f"{entry}: refused")
        return Binary(f"{self.version} {text}".encode(), entry, target, Resources(registers=len(text)), {"notes": "n"})

    def count(self) -> int:
        return len(self.journal.read_text().splitlines()) if self.journal.exists() else 0


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for variable in ("KSGEN_CACHE_PATH", "KSGEN_NO_COMPILE", "KSGEN_NVCC", "KSGEN_CACHE_MAX_BYTES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(build_module, "_warned", set())


@pytest.fixture
def compiler(tmp_path):
    return Compiler(tmp_path / "journal")


@pytest.fixture
def no_compiler(monkeypatch):
    def find() -> None:
        raise ToolchainError("no CUDA compiler found")

    monkeypatch.setattr(build_module, "find_compiler", find)


def test_compiled_once_then_found(compiler):
    first = build("text", "ks_1", "sm_90a", compiler)
    assert build("text", "ks_1", "sm_90a", compiler) == first
    assert compiler.count() == 1
    assert first.data == b"1.0 text"
    assert first.provenance == {
        "compiler": "fake",
        "compiler_version": "1.0",
        "options": json.dumps(["-O3", "sm_90a"]),
        "notes": "n",
    }


def test_whatever_changes_compiles_again(compiler, tmp_path):
    newer = Compiler(tmp_path / "journal", version="1.1")
    for arguments in [("text", "ks_1", "sm_90a"), ("text2", "ks_1", "sm_90a"), ("text", "ks_2", "sm_90a")]:
        build(*arguments, compiler)
    build("text", "ks_1", "sm_80", compiler)
    assert build("text", "ks_1", "sm_90a", newer).data == b"1.1 text"
    assert compiler.count() == 5


def test_bad_entry_is_compiled_again(compiler, tmp_path):
    build("text", "ks_1", "sm_90a", compiler)
    (file,) = (tmp_path / "user").glob("*/*/binary")
    file.write_bytes(b"damaged")
    assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"
    assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"
    assert compiler.count() == 2


def test_refused_source_is_not_stored(compiler, tmp_path):
    for _ in range(2):
        with pytest.raises(ToolchainError, match="ks_1: refused"):
            build("refuse", "ks_1", "sm_90a", compiler)
    assert compiler.count() == 2
    assert list(Cache(tmp_path / "user").entries()) == []


class SlowCompiler(Compiler):
    def compile(self, text: str, entry: str, target: str) -> Binary:
        time.sleep(0.3)  # long enough for everyone to arrive
        return super().compile(text, entry, target)


def build_together(journal: Path, together: Barrier, answers: Path) -> None:
    together.wait()
    binary = build("text", "ks_1", "sm_90a", SlowCompiler(journal))
    (answers / str(os.getpid())).write_bytes(binary.data)


def test_eight_processes_compile_once(compiler, tmp_path):
    answers = tmp_path / "answers"
    answers.mkdir()
    processes = multiprocessing.get_context("fork")
    together = processes.Barrier(8)
    everyone = [processes.Process(target=build_together, args=(compiler.journal, together, answers)) for _ in range(8)]
    for each in everyone:
        each.start()
    for each in everyone:
        each.join()
    assert [file.read_bytes() for file in answers.iterdir()] == [b"1.0 text"] * 8
    assert compiler.count() == 1
    assert not list(tmp_path.glob("ksgen-locks-*/*"))


class StuckCompiler(Compiler):
    def compile(self, text: str, entry: str, target: str) -> Binary:
        super().compile(text, entry, target)
        while True:
            time.sleep(60)


def build_for_ever(journal: Path) -> None:
    build("text", "ks_1", "sm_90a", StuckCompiler(journal))


def test_lock_ends_with_its_process(compiler):
    holder = multiprocessing.get_context("fork").Process(target=build_for_ever, args=(compiler.journal,))
    holder.start()
    while not compiler.count():
        time.sleep(0.01)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"


def test_a_lock_beyond_the_time_limit_does_not_stop_the_compilation(compiler, monkeypatch):
    holder = multiprocessing.get_context("fork").Process(target=build_for_ever, args=(compiler.journal,))
    holder.start()
    while not compiler.count():
        time.sleep(0.01)
    monkeypatch.setattr(build_module, "LOCK_SECONDS", 0.2)
    assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"
    assert holder.is_alive()
    holder.kill()
    holder.join()
    assert compiler.count() == 2


def test_no_place_for_locks_is_no_obstacle(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"


def test_cache_that_cannot_be_written_warns_once(compiler, monkeypatch, tmp_path):
    (tmp_path / "user").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"kernels are not cached, and are compiled again next time: .*/user \("):
        assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"
        build("text 2", "ks_1", "sm_90a", compiler)
    assert compiler.count() == 3
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "user" / "deeper"))
    with pytest.warns(UserWarning, match=r"/user/deeper \(Not a directory\)"):
        build("text", "ks_1", "sm_90a", compiler)


def test_full_disk_warns_and_works(compiler, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match=r"kernels are not cached.*\(No space left on device\)"):
        assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"


def layered(tmp_path: Path) -> tuple[CacheLayers, Cache, Cache]:
    project, user = Cache(tmp_path / "project"), Cache(tmp_path / "own")
    return CacheLayers([project, user]), project, user


def test_first_layer_answers_first_and_takes_what_is_new(compiler, tmp_path):
    both, project, user = layered(tmp_path)
    build("old", "ks_1", "sm_90a", compiler, CacheLayers([user]))
    build("old", "ks_1", "sm_90a", compiler, both)
    assert list(project.entries()) == []
    build("new", "ks_1", "sm_90a", compiler, both)
    assert len(list(project.entries())) == 1
    assert compiler.count() == 2


def test_next_layer_takes_what_the_first_cannot(compiler, tmp_path):
    both, project, user = layered(tmp_path)
    project.path.write_text("a file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("text", "ks_1", "sm_90a", compiler, both)
    assert len(list(user.entries())) == 1


def bundle_of(path: Path, *texts: str) -> Bundle:
    old = Compiler(path.parent / "bundle journal", version="0.9")
    caches = CacheLayers([Cache(path.parent / "bundled")])
    jobs = [Request(text, "ks_1", "sm_90a") for text in texts]
    write_bundle(path, [(job, build(job.text, job.entry, job.target, old, caches)) for job in jobs])
    return Bundle(path)


def test_bundle_is_the_last_layer_and_answers_for_every_compiler(compiler, tmp_path):
    bundle = bundle_of(tmp_path / "vit.ksb", "text", "own")
    build("own", "ks_1", "sm_90a", compiler)
    assert build("text", "ks_1", "sm_90a", compiler, default_caches(bundle)).data == b"0.9 text"
    assert build("own", "ks_1", "sm_90a", compiler, default_caches(bundle)).data == b"1.0 own"
    assert compiler.count() == 1


def test_cache_path_lists_folders_and_bundles(compiler, monkeypatch, tmp_path):
    bundle_of(tmp_path / "vit.ksb", "text")
    (tmp_path / "project").mkdir()
    unknown = [tmp_path / "absent", tmp_path / ("x" * 300)]  # no file system has such a name, and says so
    listed = [tmp_path / "vit.ksb", tmp_path / "project"]
    monkeypatch.setenv("KSGEN_CACHE_PATH", os.pathsep.join(map(str, (*unknown, *listed))))
    layers = default_caches()
    assert [layer.path for layer in layers.layers] == [*listed, tmp_path / "user"]
    assert build("text", "ks_1", "sm_90a", compiler).data == b"0.9 text"
    build("new", "ks_1", "sm_90a", compiler)
    assert len(list(Cache(tmp_path / "project").entries())) == 1
    assert not (tmp_path / "user").exists()
    assert default_caches().layers[0] is layers.layers[0]


def test_a_folder_whose_name_is_not_text(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_CACHE_DIR", os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    for _ in range(2):
        assert build("text", "ks_1", "sm_90a", compiler).data == b"1.0 text"
    assert compiler.count() == 1


def test_forbidden_compiling(compiler, monkeypatch):
    build("text", "ks_1", "sm_90a", compiler)
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    newer = Compiler(compiler.journal, version="2.0")
    assert build("text", "ks_1", "sm_90a", newer).data == b"1.0 text"
    assert build("text", "ks_1", "sm_90a").data == b"1.0 text"
    with pytest.raises(ToolchainError) as caught:
        build("other", "ks_1", "sm_90a", compiler)
    what, prepare = str(caught.value).split("; ")
    assert what == "ks_1: no cache holds it for sm_90a, and KSGEN_NO_COMPILE forbids compiling it"
    assert prepare == "prepare it with: ksgen build SPEC --arch sm_90a"
    with pytest.raises(ToolchainError, match="prepare it with: ksgen build SPEC, on this device"):
        build("other", "ks_1", "Some OpenCL device 3.0", compiler)
    assert compiler.count() == 1
    monkeypatch.setenv("KSGEN_NO_COMPILE", "0")
    build("other", "ks_1", "sm_90a", compiler)


@pytest.mark.usefixtures("no_compiler")
def test_machine_without_a_compiler(compiler):
    build("text", "ks_1", "sm_90a", compiler)
    assert build("text", "ks_1", "sm_90a").data == b"1.0 text"
    with pytest.raises(ToolchainError, match="ks_1: no cache holds it for sm_80, and no CUDA compiler found; prepare"):
        build("text", "ks_1", "sm_80")


def test_many_in_order_with_errors_in_their_places(compiler):
    texts = ["a", "refuse", "b", "a", "c"]
    jobs = [Request(text, f"ks_{n}", "sm_90a") for n, text in enumerate(texts)]
    seen = []
    results = build_many(jobs, compiler, workers=3, on_done=lambda job, result: seen.append((job, result)))
    assert [result.data if isinstance(result, Binary) else str(result) for result in results] == [
        b"1.0 a",
        "ks_1: refused",
        b"1.0 b",
        b"1.0 a",
        b"1.0 c",
    ]
    assert sorted(job.entry for job, _ in seen) == [job.entry for job in jobs]
    assert all(result is results[jobs.index(job)] for job, result in seen)


@pytest.mark.parametrize("allowed", [0, 1])
def test_many_are_built_by_the_threads_that_can_be_started(compiler, monkeypatch, allowed):
    start, started = threading.Thread.start, []

    def limited(thread):
        if len(started) >= allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    jobs = [Request(f"text {number}", f"ks_{number}", "sm_90a") for number in range(5)]
    assert [result.entry for result in build_many(jobs, compiler, workers=3)] == [job.entry for job in jobs]
    assert len(started) == allowed


def test_same_job_many_times_compiles_once(compiler):
    results = build_many([Request("text", "ks_1", "sm_90a")] * 20, SlowCompiler(compiler.journal), workers=8)
    assert {result.data for result in results if isinstance(result, Binary)} == {b"1.0 text"}
    assert compiler.count() == 1


def test_nothing_to_build(compiler):
    assert build_many([], compiler) == []


class BrokenCompiler(Compiler):
    def compile(self, text: str, entry: str, target: str) -> Binary:
        raise ZeroDivisionError("a mistake in ksgen")


def test_mistakes_of_our_own_are_not_results(compiler):
    with pytest.raises(ZeroDivisionError, match="a mistake in ksgen"):
        build_many([Request("text", "ks_1", "sm_90a")], BrokenCompiler(compiler.journal))


def test_exception_of_the_callback_stops_the_build(compiler):
    jobs = [Request(f"text {n}", "ks_1", "sm_90a") for n in range(200)]

    def enough(job: Request, result: Binary | KsgenError) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_many(jobs, SlowCompiler(compiler.journal), workers=2, on_done=enough)
    assert compiler.count() < 10


class StubbornCompiler(Compiler):
    must_end = True

    def compile(self, text: str, entry: str, target: str) -> Binary:
        time.sleep(0.01 if text == "text 0" else 1.5)
        return super().compile(text, entry, target)


def test_a_compiler_that_must_end_is_waited_for(compiler):
    """An OpenCL driver aborts the process that ends while it compiles."""

    def enough(job: Request, result: Binary | KsgenError) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_many(
            [Request(f"text {n}", "ks_1", "sm_90a") for n in range(9)],
            StubbornCompiler(compiler.journal),
            workers=2,
            on_done=enough,
        )
    begun = compiler.count()
    assert begun >= 2
    time.sleep(1.6)
    assert compiler.count() == begun  # none goes on behind the caller's back


STUCK_NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;;
--list-gpu-code) echo sm_90; exit 0;;
esac
echo $$ >> {journal}
exec sleep 600
"""

INTERRUPTED = """
from ksgen.build.build import Request, build_many
from ksgen.build.toolchain import Nvcc
build_many([Request(f"text {n}", "ks_1", "sm_90") for n in range(9)], Nvcc("%s"), workers=2)
"""


def test_interrupt_ends_the_compilers(monkeypatch, tmp_path):
    journal = tmp_path / "journal"
    nvcc = write_program(tmp_path / "nvcc", STUCK_NVCC.format(journal=journal))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    checkout = Path(__file__).parents[2]
    user = subprocess.Popen((sys.executable, "-c", INTERRUPTED % nvcc), cwd=checkout, stderr=subprocess.PIPE, text=True)
    while not journal.exists() or len(journal.read_text().splitlines()) < 2:
        time.sleep(0.01)
    user.send_signal(signal.SIGINT)
    _, said = user.communicate()
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    compilers = [int(line) for line in journal.read_text().splitlines()]
    assert len(compilers) == 2
    assert all(has_ended(each) for each in compilers)
    assert not list(tmp_path.glob("ksgen-nvcc-*"))
    assert list(Cache(tmp_path / "user").entries()) == []


def test_real_compiler_through_the_cache():
    try:
        compiler = toolchain.find_compiler()
    except ToolchainError as error:
        pytest.skip(f"no compiler here: {error}")
    source = 'extern "C" __global__ void %s(float* y) { y[threadIdx.x] = 1.0f; }'
    jobs = [Request(source % f"ks_{n}", f"ks_{n}", target) for n in range(2) for target in ("sm_80", "sm_90a")]
    built = build_many(jobs)
    assert all(isinstance(each, Binary) and each.data.startswith(b"\x7fELF") for each in built)
    assert [build(job.text, job.entry, job.target, compiler) for job in jobs] == built
    assert len(list(default_caches().folders[0].entries())) == 4
