"""Finding a compiler, running it, and what it says when it refuses."""

import os
import shutil
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ksgen.build import toolchain
from ksgen.build.children import Children, current_children
from ksgen.build.request import Resources, read_notes, read_resources
from ksgen.build.toolchain import Nvcc, Nvrtc, find_compiler, first_error, parse_targets
from ksgen.errors import ToolchainError

SOURCE = """
extern "C" __global__ void scale(float* y, const float* x) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = 2.0f * tile[31 - threadIdx.x];
}
extern "C" __global__ void scale_pack(float* y) { y[0] = 0.0f; }
"""

# Stands in for nvcc: says what nvcc says, keeps a journal of its calls and does what its last line is told to do.
FAKE_NVCC = """#!/bin/sh
echo "$*" >> {journal}
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;;
--list-gpu-code) printf 'sm_75\\nsm_90\\nsm_100\\ncompute_90\\n'; exit 0;;
esac
{action}
"""


def fake_nvcc(folder: Path, action: str = "exit 0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvcc"
    program.write_text(FAKE_NVCC.format(journal=folder / "journal", action=action))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture(autouse=True)
def _nothing_found_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("KSGEN_NVCC", "CUDA_HOME", "NVCC_CCBIN", "KSGEN_COMPILE_SECONDS"):
        monkeypatch.delenv(variable, raising=False)
    toolchain._find.cache_clear()


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A machine with a host compiler on PATH, and no other toolchain at all."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "gcc").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.setattr(toolchain, "_packaged_toolkits", list)
    monkeypatch.setattr(toolchain, "_has_nvrtc", lambda: False)
    return bare


def test_named_nvcc_wins(alone, monkeypatch, tmp_path):
    named, on_path = fake_nvcc(tmp_path / "named"), fake_nvcc(tmp_path / "path")
    monkeypatch.setenv("PATH", f"{alone}{os.pathsep}{on_path.parent}")
    assert find_compiler() == Nvcc(str(on_path))
    monkeypatch.setenv("KSGEN_NVCC", str(named))
    assert find_compiler() == Nvcc(str(named))


def test_named_nvcc_that_does_not_run(monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_NVCC", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match=r"KSGEN_NVCC=.*/nowhere names nothing that runs; give the path of nvcc"):
        find_compiler()


def test_path_comes_before_cuda_home_and_that_before_packages(alone, monkeypatch, tmp_path):
    packaged = fake_nvcc(tmp_path / "nvidia" / "cu13" / "bin")
    monkeypatch.setattr(toolchain, "_packaged_toolkits", lambda: [packaged.parent.parent])
    assert find_compiler() == Nvcc(str(packaged))
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
        match=r"no CUDA compiler found \(KSGEN_NVCC.*pip install .*\[cuda\].* brings NVRTC; pip install .*\[nvcc\].* brings nvcc",
    ):
        find_compiler()


def test_nvcc_without_host_compiler_gives_way_to_nvrtc(alone, monkeypatch, tmp_path):
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


def test_compilers_by_name(alone, monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_NVCC", str(fake_nvcc(tmp_path / "named")))
    monkeypatch.setattr(toolchain, "_has_nvrtc", lambda: True)
    assert (find_compiler("nvcc").name, find_compiler("nvrtc").name) == ("nvcc", "nvrtc")
    with pytest.raises(ToolchainError, match="no compiler is called 'clang'; try nvcc or nvrtc"):
        find_compiler("clang")


def test_a_program_that_is_not_nvcc(tmp_path):
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o700)
    with pytest.raises(ToolchainError, match=r"nvcc --version says 'hello'; that is not nvcc"):
        Nvcc(str(program)).version  # noqa: B018 (reading it raises)


def test_version_is_read_once(tmp_path):
    program = fake_nvcc(tmp_path / "nvcc")
    assert {Nvcc(str(program)).version for _ in range(3)} == {"13.0.88"}
    assert (program.parent / "journal").read_text().splitlines() == ["--version"]


def test_targets_and_their_variants(tmp_path):
    compiler = Nvcc(str(fake_nvcc(tmp_path / "nvcc")))
    assert compiler.targets() == ("sm_75", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f")
    assert parse_targets(" sm_90a,sm_75, sm_90a,", compiler) == ("sm_90a", "sm_75")
    offered = "sm_75, sm_90, sm_90a, sm_100, sm_100a, sm_100f"
    with pytest.raises(ToolchainError, match=f"'sm_75a' is no target of nvcc 13.0.88; it offers {offered}"):
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


def test_refused_source_is_kept_elsewhere_where_the_cache_cannot(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"source: .*/scale-[0-9a-f]{8}\.cu"):
        Nvcc(str(fake_nvcc(tmp_path / "nvcc", "exit 1"))).compile(SOURCE, "scale", "sm_90a")
    assert len(list(tmp_path.glob("scale-*.cu"))) == 1


def test_silent_failure_and_killed_compiler(tmp_path):
    with pytest.raises(ToolchainError, match="exit status 3, and not a word"):
        Nvcc(str(fake_nvcc(tmp_path / "a", "exit 3"))).compile(SOURCE, "scale", "sm_90a")
    with pytest.raises(ToolchainError, match="fatal: killed by signal 9"):
        Nvcc(str(fake_nvcc(tmp_path / "b", "kill -9 $$"))).compile(SOURCE, "scale", "sm_90a")


def test_compiler_past_its_time_is_ended_with_what_it_started(monkeypatch, tmp_path):
    compiler = Nvcc(str(fake_nvcc(tmp_path / "nvcc", f"sleep 600 & echo $! > {tmp_path}/pid; wait")))
    assert compiler.targets()
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "0.5")
    with pytest.raises(ToolchainError, match=r"it had not finished after 0.5 s \(KSGEN_COMPILE_SECONDS\)"):
        compiler.compile(SOURCE, "scale", "sm_90a")
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_time_limit_must_be_a_number(monkeypatch):
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "soon")
    with pytest.raises(ToolchainError, match="KSGEN_COMPILE_SECONDS='soon' must be a number of seconds"):
        Children().run(("true",))


def test_stopped_children_end_and_no_other_starts(tmp_path):
    children = Children()
    started = tmp_path / "started"
    ended = []
    script = f"touch {started}; exec sleep 600"
    thread = threading.Thread(target=lambda: ended.append(children.run(("sh", "-c", script))))
    thread.start()
    while not started.exists():
        pass
    children.stop()
    thread.join()
    assert ended[0].returncode == -9
    with pytest.raises(ToolchainError, match="true was not started: the build is being stopped"):
        children.run(("true",))


def test_command_that_does_not_exist():
    with pytest.raises(ToolchainError, match=r"/no/such/nvcc does not run: .*No such file"):
        Children().run(("/no/such/nvcc",))


def test_source_without_the_entry(tmp_path):
    compiler = Nvcc(str(fake_nvcc(tmp_path / "nvcc", 'for last; do :; done; echo "not empty" > "$last"')))
    with pytest.raises(ToolchainError, match="scale: the source compiles, but holds no __global__ function of that"):
        compiler.compile(SOURCE, "scale", "sm_90a")


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'scale_pack' for 'sm_90a'
ptxas info    : Function properties for scale_pack
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.786 ms
ptxas info    : Compiling entry function 'scale' for 'sm_90a'
ptxas info    : Function properties for helper
    512 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for scale
{indent}64 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size, 49152 bytes smem, 8 bytes cmem[2]
"""


@pytest.mark.parametrize("indent", ["    ", "ptxas         .     "], ids=["nvcc", "nvrtc"])
def test_resources_of_each_entry(indent):
    report = REPORT.format(indent=indent)
    assert read_resources(report, "scale") == Resources(255, 49152, 40, 64)
    assert read_resources(report, "scale_pack") == Resources(8, 0, 0, 0)
    assert read_resources(report, "other") == Resources(None, None, None, None)
    advice = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert list(read_notes(report)) == [advice]


def test_first_error_of_a_log():
    assert first_error("In file included from a.h\nptxas x.ptx, line 28; error   : Unknown modifier\n") == (
        "ptxas x.ptx, line 28; error   : Unknown modifier"
    )
    assert first_error("\n something else \n") == "something else"
    assert first_error("") == "no output"


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


def test_nvcc_gives_the_same_bytes_again():
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on PATH")
    compiler = real("nvcc")
    assert len({compiler.compile(SOURCE, "scale", "sm_80").data for _ in range(2)}) == 1


def is_gone(process: int) -> bool:
    """Ended; a process that nobody waits for may stay listed as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_tmpdir_that_is_none_is_passed_over_or_named(tmp_path, monkeypatch):
    """Python takes another folder where it finds one; nvcc by itself would fail."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\ntest -d "$TMPDIR" && echo "release 13.0, V13.0.88"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert Nvcc(str(nvcc)).version == "13.0.88"
    toolchain._nvcc_version.cache_clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(ToolchainError, match=r"no room for temporary files \(.*\); TMPDIR=.*none; accepted: a folder that takes files"):
        _ = Nvcc(str(nvcc)).version
