"""OpenCL drivers: which are found, which are used, and what to install where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ksgen
from ksgen.devices import opencl, opencl_drivers
from ksgen.devices.base import UnavailableError
from tests.support.mounts import fill, mounted


def selectors(**variables):
    """What a fresh process finds, and whether its environment is as it was; the loader looks only once in each."""
    script = (
        "import os; from ksgen.devices import list_devices;"
        "print([d.selector for d in list_devices() if hasattr(d, 'selector') and d.runtime == 'opencl']);"
        "print([d.why + '; ' + d.remedy for d in list_devices() if hasattr(d, 'why') and d.runtime == 'opencl']);"
        "print('OCL_ICD_VENDORS' in os.environ)"
    )
    root = str(Path(ksgen.__file__).parents[1])
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH")
    }
    environment |= {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), **variables}
    finished = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
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


def test_the_systems_drivers_are_shown_with_the_cpu_driver(monkeypatch, tmp_path):
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
    monkeypatch.setattr(
        opencl_drivers, "_library", lambda package, name: there("tbb", name) if package == "tbb" else None
    )
    monkeypatch.setattr(opencl_drivers.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(opencl_drivers.sys, "platform", "linux")
    with pytest.raises(UnavailableError) as caught:
        opencl_drivers.load_cpu_driver()
    assert "no driver is installed" in caught.value.why
    assert "intel-cmplr-lib-rt intel-opencl-rt" in caught.value.remedy


def test_other_processors_are_advised_to_install_a_driver(monkeypatch):
    monkeypatch.setattr(opencl_drivers.platform, "machine", lambda: "aarch64")
    assert opencl_drivers.packages_line("tbb") == "install your device's OpenCL driver, or PoCL"


def test_a_driver_that_cannot_be_loaded_is_reported(monkeypatch, tmp_path):
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


def test_a_process_takes_the_path_that_another_has_made_meanwhile(tmp_path, monkeypatch):
    spaced, link, others = tmp_path / "a b", opencl_drivers._link, []
    spaced.mkdir()
    (spaced / "libtbb.so.12").write_bytes(b"code")

    def link_late(file, to):
        if not others:
            others.append(None)
            others[0] = opencl_drivers._spaceless({spaced})  # the other process
        link(file, to)

    monkeypatch.setattr(opencl_drivers, "_link", link_late)
    monkeypatch.setattr(opencl_drivers, "temporary_root", lambda: str(tmp_path))
    place = opencl_drivers._spaceless({spaced})
    assert [place] == others
    assert place.is_relative_to(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ["size=64k,ro", "size=64k"])
def test_a_home_that_takes_nothing_costs_one_warning(device, options, tmp_path):
    unset = ("XDG_CACHE_HOME", "KSGEN_CACHE_DIR", "PYOPENCL_NO_CACHE")
    with mounted(tmp_path / "home", options) as home:
        fill(home)
        done = subprocess.run(
            [sys.executable, "-m", "ksgen", "run", "--device", "opencl", "--pattern", "1,16,16,1", "--batch", "64"],
            env={name: value for name, value in os.environ.items() if name not in unset}
            # PoCL, where it is the driver, runs nothing without one
            | {"HOME": str(home), "POCL_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        left = [path for path in home.rglob("*") if path.is_file() and path.name != "filler"]
    assert (done.returncode, "passed" in done.stdout, left) == (0, True, []), done.stderr
    assert done.stderr.count("kernels are not cached, and are compiled again next time") == 1
    assert "Traceback" not in done.stderr
    # a warning on a busy machine is not counted
    told = [line for line in done.stderr.splitlines() if not line.startswith("other processes keep ")]
    assert len(told) == 1


def test_only_the_drivers_of_others_may_show_a_gpu(tmp_path, monkeypatch):
    for name in ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "OCL_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(opencl_drivers, "_SYSTEM_DRIVERS", tmp_path / "system")
    assert not opencl_drivers.may_show_gpus()
    (tmp_path / "system").mkdir()
    assert not opencl_drivers.may_show_gpus()
    for file in ("system/radeon.icd", "conda-meta"):
        (tmp_path / file).touch()
        assert opencl_drivers.may_show_gpus()
        (tmp_path / file).unlink()
    monkeypatch.setattr(opencl_drivers, "_LIBRARIES", tmp_path / "lib")
    driver, libraries = tmp_path / "system" / "pocl.icd", tmp_path / "lib" / "x86_64-linux-gnu" / "pocl"
    driver.write_text("libpocl.so.2.10.0\n")
    assert opencl_drivers.may_show_gpus()  # its libraries are unknown
    libraries.mkdir(parents=True)
    for name in ("libpocl-devices-basic.so", "libpocl-devices-pthread.so"):
        (libraries / name).touch()
    assert not opencl_drivers.may_show_gpus()
    (libraries / "libpocl-devices-cuda.so").touch()
    assert opencl_drivers.may_show_gpus()
    (libraries / "libpocl-devices-cuda.so").unlink()
    for other in ("/opt/pocl/lib/libpocl.so\n", "libnvidia-opencl.so.1\n"):
        driver.write_text(other)
        assert opencl_drivers.may_show_gpus()
    driver.unlink()
    for name in ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "OCL_ICD_FILENAMES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "libradeon.so")
            assert opencl_drivers.may_show_gpus()
    monkeypatch.setattr(sys, "platform", "darwin")  # whose drivers are the system's own
    assert opencl_drivers.may_show_gpus()


def test_a_folder_for_temporary_files_that_is_full_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("OCL_ICD_VENDORS", raising=False)
    monkeypatch.setattr(opencl_drivers, "load_cpu_driver", lambda: Path("/here/libintelocl.so"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with (
        pytest.raises(UnavailableError, match=r"OpenCL: temporary files cannot be written \(.*none") as caught,
        opencl_drivers.drivers_shown(),
    ):
        pass
    assert caught.value.remedy == "set TMPDIR to a writable folder"


def test_links_to_a_driver_lie_in_no_folder_of_another_user(monkeypatch, tmp_path):
    """The folder's name can be computed, so another user could create it, or a link in its place."""
    spaced, theirs = tmp_path / "a b", tmp_path / "theirs"
    for folder in (spaced, theirs):
        folder.mkdir()
    (spaced / "libtbb.so.12").write_bytes(b"code")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / f"ksgen-{os.geteuid()}").symlink_to(theirs)
    place = opencl_drivers._spaceless({spaced})
    assert list(theirs.iterdir()) == []
    assert not place.is_relative_to(tmp_path)
    shutil.rmtree(place)
