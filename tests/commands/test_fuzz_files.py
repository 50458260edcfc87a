"""Files on disk after random damage: wisdom, cache entries, bundles.

Right answers, misses or clear errors; nothing else lost.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen import wisdom as wisdoms
from ksgen.build.bundle import Bundle, write_bundle
from ksgen.build.cache import Cache
from ksgen.build.request import Binary, Request, Resources
from ksgen.cli import cli
from ksgen.errors import KsgenError
from ksgen.families import cuda_limits, family_for
from ksgen.launch.choice import choose
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.wisdom import Entry, Wisdom, dump, dump_export, load_wisdom, parse_export, read_wisdom
from tests.support.damage import damaged, fuzzing, with_junk

pytestmark = pytest.mark.slow

# --- wisdom

GPU = cuda_limits("sm_90a")
KERNELS = [
    KernelSpec(Pattern(1, 64, 48, 2)),
    KernelSpec(Pattern(1, 64, 48, 2), "float16", "bsl", Epilogue(True, "gelu", False)),
    KernelSpec(Pattern(6, 64, 64, 1), batch=70),
]
ENTRIES = [
    Entry(
        kernel,
        kernel.batch or 64,
        family_for(kernel, GPU).name,
        family_for(kernel, GPU).default(kernel, GPU),
        {"median_us": 1.5},
    )
    for kernel in KERNELS
]
OTHERS = [Entry(KERNELS[0], 1000, "simt", replace(ENTRIES[0].constants, stages=4), {})]
WISDOM = dump("gpu", Wisdom(ENTRIES))
twice = st.sampled_from(["pattern", "batch", "family", "constants", "measured", "stages"]).map(
    lambda key: WISDOM.replace(f'"{key}": ', f'"{key}": null, "{key}": ').encode()
)
nested = st.sampled_from([1, 100, 10**5]).map(  # not near the interpreter's limit, which depends on who calls
    lambda depth: WISDOM.replace('"measured": {', '"measured": {"deep": ' + "[" * depth + "]" * depth + ", ").encode()
)
wisdom_files = st.one_of(
    damaged(WISDOM.encode()), with_junk(json.loads(WISDOM)).map(lambda rows: json.dumps(rows).encode()), twice, nested
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    shipped, own = tmp_path_factory.mktemp("shipped"), tmp_path_factory.mktemp("own")
    (shipped / "gpu.json").write_text(dump("gpu", Wisdom(OTHERS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wisdoms, "resource", lambda name: shipped)
        patch.setattr(wisdoms, "wisdom_dir", lambda: own)
        yield shipped, own


@settings(fuzzing(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wisdom_files)
def test_damaged_wisdom_costs_only_the_damaged_entries(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    path = folders[1] / "gpu.json"
    path.write_bytes(data)
    caplog.clear()
    known = load_wisdom("gpu")
    assert known.lookup(KERNELS[0], 1000) is not None
    for kernel in KERNELS:
        for batch in (1, 64, 1000, 2**40):
            assert choose(kernel, batch, GPU, known).family in {
                family_for(kernel, GPU, each).name for each in (None, batch)
            }
    try:
        strict = load_wisdom("gpu", strict=True)
    except KsgenError as error:
        check_message(error, path)
        (warning,) = caplog.messages
        assert str(path) in warning
    else:
        assert caplog.messages == []
        assert dump("gpu", strict) == dump("gpu", known)
        assert dump("gpu", Wisdom(parse_export(dump("gpu", strict), "again")["gpu"])) == dump("gpu", strict)


EXPORT = dump_export({"gpu": Wisdom(ENTRIES), "other": Wisdom(OTHERS)})
exports = st.one_of(damaged(EXPORT.encode()), with_junk(json.loads(EXPORT)).map(lambda rows: json.dumps(rows).encode()))


@settings(fuzzing(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exports)
def test_a_damaged_export_is_read_whole_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "all.json"
    path.write_bytes(data)
    try:
        devices = read_wisdom(path)
    except KsgenError as error:
        check_message(error, path)
    else:
        assert parse_export(dump_export(devices), "again") == {
            name: wisdom.entries() for name, wisdom in devices.items()
        }


# --- cache


class Compiler:
    name, version = "nvcc", "13.0.88"

    def options(self, target: str) -> tuple[str, ...]:
        return ("-O3", target)

    def compile(self, text: str, entry: str, target: str) -> Binary:
        raise AssertionError("neither caches nor bundles compile")


COMPILER = Compiler()
REQUESTS = [Request(f"text of kernel {number}", f"ks_{number}", "sm_90a") for number in range(3)]
MADE = {"compiler": "nvcc", "compiler_version": "13.0.88", "options": json.dumps(COMPILER.options("sm_90a"))}
BINARIES = [
    Binary(f"cubin {request.entry}".encode() * 20, request.entry, "sm_90a", Resources(registers=40), MADE)
    for request in REQUESTS
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = Cache(tmp_path_factory.mktemp("store") / "cache")
    for request, binary in zip(REQUESTS, BINARIES, strict=True):
        cache.put(request, binary)
    return cache.path


def to_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def to_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def entry_to_file(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("a file")


def request_to_file(path: Path) -> None:
    shutil.rmtree(path.parents[1])
    path.parents[1].write_text("a file")


def nest(path: Path) -> None:
    path.write_text('{"a": ' * 5000 + "1" + "}" * 5000)


def forget(path: Path) -> None:
    shutil.rmtree(path.parent)


ACCIDENTS: list[Callable[[Path], None]] = [
    to_folder,
    to_loop,
    entry_to_file,
    request_to_file,
    nest,
    forget,
    Path.unlink,
]


def spoil(path: Path, data: st.DataObject) -> None:
    """Damage to one file: mostly its bytes, in a JSON file also its values, else the file itself or what it lies in."""
    way = data.draw(st.sampled_from(["bytes", "bytes", "values", "file"]))
    if way == "values" and path.suffix == ".json":
        path.write_text(json.dumps(data.draw(with_junk(json.loads(path.read_bytes())))))
    elif way == "file":
        data.draw(st.sampled_from(ACCIDENTS))(path)
    else:
        path.write_bytes(data.draw(damaged(path.read_bytes())))


@fuzzing(150)
@given(st.integers(0, 2), st.sampled_from(["binary", "meta.json"]), st.sampled_from([COMPILER, None]), st.data())
def test_a_damaged_cache_entry_is_right_or_rebuilt(
    store: Path, victim: int, name: str, compiler: Compiler | None, data: st.DataObject
) -> None:
    folder = store.parent / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(store, folder)
    cache = Cache(folder)
    entry = folder / REQUESTS[victim].digest / REQUESTS[victim].key(COMPILER)
    spoil(entry / name, data)
    list(cache.entries())
    verified = CliRunner().invoke(cli, ["cache", "verify", "--folder", str(folder)])
    assert verified.exit_code in (0, 1)
    found = cache.get(REQUESTS[victim], compiler)
    if found is None:
        assert not os.path.lexists(entry), "a bad entry is set aside"
        assert (str(entry) in verified.output) == (verified.exit_code == 1)
        cache.put(REQUESTS[victim], BINARIES[victim])
    else:
        assert verified.exit_code == 0, verified.output
    assert [cache.get(request, compiler) for request in REQUESTS] == BINARIES
    assert cache.verify() == []
    assert sorted(os.listdir(folder)) == sorted(request.digest for request in REQUESTS)


# --- bundles


@fuzzing(250)
@given(st.data())
def test_a_damaged_bundle_is_right_or_a_clear_error(store: Path, data: st.DataObject) -> None:
    path = store.parent / "fuzz.ksb"
    write_bundle(path, zip(REQUESTS, BINARIES, strict=True), {"gpu.json": WISDOM.encode()}, {"ksgen": "0.1.0"})
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        bundle = Bundle(path)
    except KsgenError as error:
        check_message(error, path)
        return
    assert bundle.provenance == {"ksgen": "0.1.0"}
    keys = {entry.entry: entry.key for entry in bundle.entries()}
    truths: list[tuple[Callable[[], Any], Any]] = [(bundle.wisdom, {"gpu.json": WISDOM.encode()})]
    for request, binary in zip(REQUESTS, BINARIES, strict=True):
        truths += [
            (lambda request=request: bundle.get(request), binary),
            (lambda request=request: bundle.get(request, COMPILER), binary),
            (lambda request=request: bundle.source(keys[request.entry]), request.text),
        ]
    for ask, truth in truths:
        try:
            assert ask() == truth
        except KsgenError as error:
            check_message(error, path)


def check_message(error: KsgenError, path: Path) -> None:
    assert str(error).startswith(str(path))
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 1000
