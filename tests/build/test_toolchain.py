"""Finding a compiler, running it, and what it says when it refuses."""

import ctypes
import locale
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ksgen import install
from ksgen.build import toolchain
from ksgen.build.build import build
from ksgen.build.cache import Cache
from ksgen.build.children import current_children
from ksgen.build.request import Binary
from ksgen.build.toolchain import Nvcc, Nvrtc, find_compiler, parse_targets
from ksgen.errors import ToolchainError
from tests.support.compilers import (
    MAKE,
    NEW_HOST,
    NO_GPP,
    OF_THE_MACHINE,
    SOURCE,
    fake_nvcc,
    program,
    says,
    write_program,
)

pytestmark = pytest.mark.usefixtures("nothing_found_yet")


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A machine with a host compiler on PATH, and no other toolchain at all."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "gcc").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.setattr(toolchain, "USUAL_TOOLKITS", ())
    monkeypatch.setattr(toolchain, "_packaged_toolkits", list)
    monkeypatch.setattr(toolchain, "_has_nvrtc", lambda: False)
    monkeypatch.setattr(install, "supported_cuda", lambda: 0)
    return bare


def test_named_nvcc_wins(alone, monkeypatch, tmp_path):
    named, on_path = fake_nvcc(tmp_path / "named"), fake_nvcc(tmp_path / "path")
    monkeypatch.setenv("PATH", f"{alone}{os.pathsep}{on_path.parent}")
    assert find_compiler() == Nvcc(str(on_path))
    monkeypatch.setenv("KSGEN_NVCC", str(named))
    assert find_compiler() == Nvcc(str(named))


def test_named_nvcc_that_does_not_run(monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_NVCC", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match=r"KSGEN_NVCC=.*/nowhere is not an executable; give the path of nvcc"):
        find_compiler()


def test_path_comes_before_cuda_home_then_the_usual_folders_then_packages(alone, monkeypatch, tmp_path):
    packaged = fake_nvcc(tmp_path / "nvidia" / "cu13" / "bin")
    monkeypatch.setattr(toolchain, "_packaged_toolkits", lambda: [packaged.parent.parent])
    assert find_compiler() == Nvcc(str(packaged))
    for version in ("9.2", "12.4"):
        usual = fake_nvcc(tmp_path / f"cuda-{version}" / "bin")
    monkeypatch.setattr(toolchain, "USUAL_TOOLKITS", (str(tmp_path / "cuda"), str(tmp_path / "cuda-*")))
    toolchain._find.cache_clear()
    assert find_compiler() == Nvcc(str(usual))
    home = fake_nvcc(tmp_path / "home" / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_compiler() == Nvcc(str(home))
    on_path = fake_nvcc(tmp_path / "path")
    monkeypatch.setenv("PATH", f"{alone}{os.pathsep}{on_path.parent}")
    assert find_compiler() == Nvcc(str(on_path))


def test_packaged_toolkits_newest_first(monkeypatch, tmp_path):
    for version in ("cu9", "cu13", "cu12"):
        (tmp_path / "nvidia" / version / "bin").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    found = [toolkit.name for toolkit in toolchain._packaged_toolkits() if toolkit.is_relative_to(tmp_path)]
    assert found == ["cu13", "cu12", "cu9"]


def test_no_compiler_says_how_to_get_one(alone):
    with pytest.raises(
        ToolchainError,
        match=r"no CUDA compiler found \(KSGEN_NVCC.*pip install .*\[cuda\].* brings NVRTC; pip install .*\[nvcc\].* "
        r"brings nvcc",
    ):
        find_compiler()


def test_nvcc_without_host_compiler_falls_back_to_nvrtc(alone, monkeypatch, tmp_path):
    (alone / "gcc").unlink()
    monkeypatch.setenv("PATH", f"{alone}{os.pathsep}{fake_nvcc(tmp_path / 'path').parent}")
    with pytest.raises(ToolchainError, match=r"needs a host compiler, and there is no gcc on PATH; install g\+\+"):
        find_compiler()
    toolchain._find.cache_clear()
    monkeypatch.setattr(toolchain, "_has_nvrtc", lambda: True)
    assert find_compiler() == Nvrtc()


def test_bindings_without_their_library(monkeypatch):
    def no_library() -> None:
        raise RuntimeError("libnvrtc.so not found\nwhat was tried")

    toolchain._nvrtc_version.cache_clear()
    monkeypatch.setattr(toolchain, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=no_library))
    with pytest.raises(ToolchainError, match=r"cuda-bindings finds no NVRTC \(libnvrtc.so not found\); pip install"):
        Nvrtc().version  # noqa: B018 (reading it raises)
    assert not toolchain._has_nvrtc()


def set_c_locale(*_: object) -> tuple[int]:
    """Does to the thread's locale what a compilation by NVRTC 11.8 does."""
    libc = ctypes.CDLL(None)
    libc.newlocale.restype = ctypes.c_void_p
    libc.uselocale.argtypes = [ctypes.c_void_p]
    libc.uselocale(libc.newlocale(ctypes.c_int(0x1FBF), b"C", None))  # LC_ALL_MASK of glibc
    return (0,)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's locales")
def test_nvrtc_leaves_the_locale_as_it_was(monkeypatch):
    before = locale.getpreferredencoding(False)
    names = ("nvrtcDestroyProgram", "nvrtcGetProgramLog", "nvrtcGetCUBIN")
    library = SimpleNamespace(
        **dict.fromkeys(names, lambda *_: None),
        **dict.fromkeys(("nvrtcGetProgramLogSize", "nvrtcGetCUBINSize"), lambda _: (0, 8)),
        nvrtcGetSupportedArchs=lambda: (0, [80]),
        nvrtcCreateProgram=lambda *_: (0, None),
        nvrtcCompileProgram=set_c_locale,
        nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0),
    )
    monkeypatch.setattr(toolchain, "_nvrtc", lambda: library)
    monkeypatch.setattr(toolchain, "_binary", lambda data, entry, target, log: Binary(data, entry, target))
    Nvrtc().compile("", "k", "sm_80")
    assert locale.getpreferredencoding(False) == before != "ANSI_X3.4-1968"


# Compilers that turn out not to work here


@pytest.fixture
def two_toolkits(alone, monkeypatch, tmp_path):
    """Makes nvcc on PATH and one in a usual folder, which works; returns the first and the second."""

    def make(**first: str) -> tuple[Path, Path]:
        on_path, usual = fake_nvcc(tmp_path / "path", **first), fake_nvcc(tmp_path / "cuda-12" / "bin", MAKE, "12.8")
        monkeypatch.setenv("PATH", os.pathsep.join([str(alone), str(on_path.parent), "/usr/bin", "/bin"]))
        monkeypatch.setattr(toolchain, "USUAL_TOOLKITS", (str(tmp_path / "cuda-*"),))
        return on_path, usual

    return make


def version_of_built(target: str = "sm_90a") -> str:
    return build(SOURCE, "scale", target).provenance["compiler_version"]


@pytest.mark.parametrize("said", OF_THE_MACHINE)
def test_nvcc_that_does_not_work_here_falls_back_to_the_next(two_toolkits, said, tmp_path):
    on_path, usual = two_toolkits(action=says(said), release="11.5")
    assert find_compiler() == Nvcc(str(on_path))
    with pytest.warns(UserWarning, match=f"nvcc 11.5.88 refused it .*; {usual} is used instead") as told:
        assert version_of_built() == "12.8.88"
    assert len(told) == 1
    assert str(on_path) in str(told[0].message)
    for _ in range(2):  # nothing is tried or said again
        assert build(SOURCE + "// another", "scale", "sm_90a").provenance["compiler_version"] == "12.8.88"
    assert sum("-cubin" in line for line in (on_path.parent / "journal").read_text().splitlines()) == 1


def test_nvcc_too_old_for_the_gpu_is_replaced_for_that_gpu_alone(two_toolkits):
    on_path, usual = two_toolkits(action=MAKE, release="11.5", targets="sm_75\\nsm_86\\n")
    with pytest.warns(UserWarning, match=rf"^{on_path}: 'sm_90a' is not a target of nvcc 11.5.88; .*; {usual} is used"):
        assert version_of_built() == "12.8.88"
    assert version_of_built("sm_75") == "11.5.88"
    assert parse_targets("sm_90a,sm_86", find_compiler()) == ("sm_90a", "sm_86")
    with pytest.raises(ToolchainError, match=r"'sm_42' is not a target of nvcc 11\.5"):
        parse_targets("sm_42", find_compiler())


def test_a_script_on_path_that_is_no_nvcc_is_skipped(two_toolkits):
    on_path, _ = two_toolkits()
    on_path.write_text("#!/bin/sh\necho wrapper of nothing\n")
    with pytest.warns(UserWarning, match="says 'wrapper of nothing'; that is not nvcc; .* is used instead"):
        assert version_of_built() == "12.8.88"


def test_nvrtc_is_the_last_that_is_tried(two_toolkits, monkeypatch):
    _, usual = two_toolkits(action=says(NEW_HOST))
    fake_nvcc(usual.parent, says(NO_GPP), "12.8")
    monkeypatch.setattr(toolchain, "_has_nvrtc", lambda: True)
    monkeypatch.setattr(toolchain, "_nvrtc_version", lambda: "13.1")
    monkeypatch.setattr(Nvrtc, "compile", lambda self, text, entry, target: Binary(b"by NVRTC", entry, target))
    with pytest.warns(UserWarning, match="is used instead") as told:
        assert build(SOURCE, "scale", "sm_90a").data == b"by NVRTC"
    assert [str(each.message).rpartition("; ")[2] for each in told] == [
        f"{usual} is used instead",
        "NVRTC is used instead",
    ]


def test_a_source_that_is_refused_is_not_tried_again(two_toolkits):
    _, usual = two_toolkits(action=says("scale.cu(3): error: expected a ';'"))
    with pytest.raises(ToolchainError, match=r"refused it for sm_90a: scale.cu\(3\): error"):
        version_of_built()
    assert not (usual.parent / "journal").exists()


def test_where_none_works_each_is_named_with_its_reason(two_toolkits):
    on_path, usual = two_toolkits(action=says(NEW_HOST))
    fake_nvcc(usual.parent, says(NO_GPP), "12.8")
    with pytest.warns(UserWarning, match="used instead"), pytest.raises(ToolchainError) as caught:
        version_of_built()
    told = str(caught.value)
    assert told.startswith(f"no compiler here builds for sm_90a: {on_path}: ")
    assert all(
        each in told for each in (str(usual), "unsupported GNU version!", "cannot execute 'cc1plus'", "brings NVRTC")
    )


@pytest.mark.parametrize("target", ["sm_90a", "sm_42"])
def test_a_compiler_that_the_user_named_is_not_replaced(two_toolkits, monkeypatch, target):
    on_path, usual = two_toolkits(action=says(NEW_HOST))
    monkeypatch.setenv("KSGEN_NVCC", str(on_path))
    for given in (None, Nvcc(str(on_path))):
        with pytest.raises(
            ToolchainError, match="unsupported GNU version" if target == "sm_90a" else "not a target of nvcc"
        ) as caught:
            build(SOURCE, "scale", target, given)
        assert "no compiler here" not in str(caught.value)
        assert str(caught.value).endswith(
            "; KSGEN_NVCC names it, so no other is tried; unset it, or set it to another nvcc"
        )
    assert not (usual.parent / "journal").exists()


def test_a_cached_binary_serves_where_no_compiler_works(two_toolkits, tmp_path):
    on_path, usual = two_toolkits(action=MAKE)
    assert version_of_built() == "13.0.88"
    for each in (on_path, usual):
        fake_nvcc(each.parent, says(NEW_HOST), "12.1")
    toolchain._ask.cache_clear()
    with pytest.warns(UserWarning, match="is used instead"):
        assert version_of_built() == "13.0.88"
    assert version_of_built() == "13.0.88"  # and it still does once all are known not to work
    assert len(list(Cache(tmp_path / "cache").entries())) == 1


@pytest.mark.parametrize(("served", "taken"), [(0, "13.0.88"), (13000, "13.0.88"), (12020, "12.8.88")])
def test_a_compiler_newer_than_the_driver_comes_last(two_toolkits, monkeypatch, served, taken):
    """A driver loads binaries of its own CUDA's major version, and of those before."""
    two_toolkits(action=MAKE)
    monkeypatch.setattr(install, "supported_cuda", lambda: served)
    assert find_compiler().version == taken
    assert version_of_built() == taken


def test_a_compiler_newer_than_the_driver_is_better_than_none(two_toolkits, monkeypatch):
    _, usual = two_toolkits(action=MAKE)
    usual.unlink()
    monkeypatch.setattr(install, "supported_cuda", lambda: 12020)
    assert version_of_built() == "13.0.88"


@pytest.mark.parametrize("said", OF_THE_MACHINE)
def test_complaints_about_the_machine(said):
    assert toolchain.is_of_the_machine(said, "scale.cu")


@pytest.mark.parametrize(
    "said",
    [
        "scale.cu(3): error: expected a ';'",
        "ptxas error   : Entry function 'scale' uses too much shared data (0x10000 bytes, 0xc000 max)",
        "ptxas /tmp/tmpxft_1.ptx, line 28; error   : Unknown modifier",
        "exit status 3, and no output",
        "fatal: killed by signal 9",
    ],
)
def test_complaints_about_the_source(said):
    assert not toolchain.is_of_the_machine(said, "scale.cu")


def test_a_trial_says_why_a_compiler_does_not_work(two_toolkits):
    on_path, usual = two_toolkits(action=says(NEW_HOST))
    assert "unsupported GNU version" in toolchain.trial(Nvcc(str(on_path)), "sm_90a")
    fake_nvcc(usual.parent, MAKE.replace("scale", "trial"))
    assert toolchain.trial(Nvcc(str(usual)), "sm_90a") == ""


def test_warnings_are_errors_in_tests_alone(monkeypatch):
    assert "-Werror" in Nvcc("nvcc").options("sm_80")
    monkeypatch.delenv(toolchain.WARNINGS)
    assert "-Werror" not in Nvcc("nvcc").options("sm_80")
    assert real("nvrtc").compile(SOURCE.replace("__shared__", "int unused; __shared__"), "scale", "sm_90a").data


def test_compilers_by_name(alone, monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_NVCC", str(fake_nvcc(tmp_path / "named")))
    monkeypatch.setattr(toolchain, "_has_nvrtc", lambda: True)
    assert (find_compiler("nvcc").name, find_compiler("nvrtc").name) == ("nvcc", "nvrtc")
    with pytest.raises(ToolchainError, match="no compiler is called 'clang'; try nvcc or nvrtc"):
        find_compiler("clang")


def test_a_program_that_is_not_nvcc(tmp_path):
    nvcc = program(tmp_path, "nvcc", "hello")
    with pytest.raises(ToolchainError, match=r"nvcc --version says 'hello'; that is not nvcc"):
        Nvcc(str(nvcc)).version  # noqa: B018 (reading it raises)


def test_version_is_read_once(tmp_path):
    program = fake_nvcc(tmp_path / "nvcc")
    assert {Nvcc(str(program)).version for _ in range(3)} == {"13.0.88"}
    assert (program.parent / "journal").read_text().splitlines() == ["--version"]


def test_targets_and_their_variants(tmp_path):
    compiler = Nvcc(str(fake_nvcc(tmp_path / "nvcc")))
    assert compiler.targets() == ("sm_75", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f")
    assert parse_targets(" sm_90a,sm_75, sm_90a,", compiler) == ("sm_90a", "sm_75")
    offered = "sm_75, sm_90, sm_90a, sm_100, sm_100a, sm_100f"
    with pytest.raises(ToolchainError, match=f"'sm_75a' is not a target of nvcc 13.0.88; it offers {offered}"):
        parse_targets("sm_90,sm_75a", compiler)
    with pytest.raises(ToolchainError, match="no target in ' ,'; try sm_90a"):
        parse_targets(" ,", compiler)


def test_options_name_the_target_and_never_fast_math(tmp_path):
    for compiler in (Nvcc("nvcc"), Nvrtc()):
        options = " ".join(compiler.options("sm_90a"))
        assert "90a" in options
        assert "-std=c++17" in options
        assert "fast" not in options


def test_nvcc_gets_no_hidden_options_and_a_private_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "--use_fast_math")
    compiler = Nvcc(str(fake_nvcc(tmp_path / "nvcc", f"env > {tmp_path}/env; pwd > {tmp_path}/pwd; exit 1")))
    with pytest.raises(ToolchainError):
        compiler.compile(SOURCE, "scale", "sm_90a")
    environment = (tmp_path / "env").read_text()
    assert "fast_math" not in environment
    folder = (tmp_path / "pwd").read_text().strip()
    assert f"TMPDIR={folder}\n" in environment
    assert not Path(folder).exists()


def test_refusal_shows_kernel_error_source_and_command(tmp_path):
    action = "echo 'In file included from x'; echo 'scale.cu(3): error: expected a \";\"'; exit 1"
    program = fake_nvcc(tmp_path / "nvcc", action)
    with pytest.raises(ToolchainError) as caught:
        Nvcc(str(program)).compile(SOURCE, "scale", "sm_90a")
    head, source, repeat = str(caught.value).splitlines()
    assert head == 'scale: nvcc 13.0.88 refused it for sm_90a: scale.cu(3): error: expected a ";"'
    kept = Path(source.removeprefix("  source: "))
    assert kept.read_text() == SOURCE
    assert kept.parent == tmp_path / "cache" / "failed"
    assert repeat.startswith(f"  repeat: {program} -std=c++17")
    assert repeat.endswith(f" {kept} -o {kept}bin")


def test_silent_failure_and_killed_compiler(tmp_path):
    with pytest.raises(ToolchainError, match="exit status 3, and no output"):
        Nvcc(str(fake_nvcc(tmp_path / "a", "exit 3"))).compile(SOURCE, "scale", "sm_90a")
    with pytest.raises(ToolchainError, match="fatal: killed by signal 9"):
        Nvcc(str(fake_nvcc(tmp_path / "b", "kill -9 $$"))).compile(SOURCE, "scale", "sm_90a")


def test_source_without_the_entry(tmp_path):
    compiler = Nvcc(str(fake_nvcc(tmp_path / "nvcc", 'for last; do :; done; echo "not empty" > "$last"')))
    with pytest.raises(ToolchainError, match="scale: the source compiles, but contains no __global__ function of that"):
        compiler.compile(SOURCE, "scale", "sm_90a")


def real(name: str) -> Nvcc | Nvrtc:
    try:
        compiler = find_compiler(name)
        assert compiler.version
    except ToolchainError as error:
        pytest.skip(f"no {name} here: {error}")
    return compiler


@pytest.mark.parametrize("name", ["nvcc", "nvrtc"])
def test_real_compiler_builds_a_cubin(name):
    binary = real(name).compile(SOURCE, "scale", "sm_90a")
    assert binary.data.startswith(b"\x7fELF")
    assert (binary.entry, binary.target) == ("scale", "sm_90a")
    assert binary.resources.registers is not None
    assert 0 < binary.resources.registers < 64
    assert (binary.resources.shared_bytes, binary.resources.spill_bytes) == (128, 0)


@pytest.mark.parametrize("name", ["nvcc", "nvrtc"])
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("y[threadIdx.x] = undefined_name;", 'identifier "undefined_name" is undefined'),
        ("int never_used; y[0] = x[0];", 'variable "never_used" was declared but never referenced'),
        ('asm volatile("bogus %0;" :: "f"(x[0]));', "Not a name of any known instruction: 'bogus'"),
    ],
    ids=["error", "warning", "assembler"],
)
def test_real_compiler_refuses(name, text, complaint):
    compiler = real(name)
    with pytest.raises(ToolchainError) as caught:
        compiler.compile('extern "C" __global__ void k(float* y, const float* x) { %s }' % text, "k", "sm_90a")  # noqa: UP031
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f"k: {name} {compiler.version} refused it for sm_90a: ")


def test_command_to_repeat_repeats_the_error():
    compiler = real("nvrtc")
    with pytest.raises(ToolchainError) as caught:
        compiler.compile("bogus", "k", "sm_90a")
    repeat = str(caught.value).splitlines()[2].removeprefix("  repeat: ")
    again = current_children.get().run(("sh", "-c", repeat), str(Path(__file__).parents[2]))
    assert again.returncode != 0
    assert str(caught.value).splitlines()[0] in again.log


def test_a_toolkit_at_any_path_does_not_disturb_nvrtc(monkeypatch, tmp_path):
    compiler = real("nvrtc")
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    Path(odd, "include").mkdir(parents=True)
    for home in ("x" * 300, odd):  # the first is longer than names can be
        monkeypatch.setenv("CUDA_HOME", home)
        assert compiler.compile(SOURCE, "scale", "sm_90a").data


def test_nvcc_gives_the_same_bytes_again():
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on PATH")
    compiler = real("nvcc")
    assert len({compiler.compile(SOURCE, "scale", "sm_80").data for _ in range(2)}) == 1


def test_a_tmpdir_that_is_none_is_passed_over_or_named(tmp_path, monkeypatch):
    """Python takes another folder where it finds one; nvcc by itself would fail."""
    nvcc = write_program(tmp_path / "nvcc", '#!/bin/sh\ntest -d "$TMPDIR" && echo "release 13.0, V13.0.88"\n')
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert Nvcc(str(nvcc)).version == "13.0.88"
    toolchain._ask.cache_clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(
        ToolchainError, match=r"temporary files cannot be written \(.*\); TMPDIR=.*none; accepted: a writable folder"
    ):
        _ = Nvcc(str(nvcc)).version
