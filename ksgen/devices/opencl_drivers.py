"""Shows PyOpenCL's loader the available drivers: the system's, and the CPU driver from PyPI in the running environment.

The CPU driver's packages install no usable .icd file. The driver does not work from a path with a space.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from ksgen.devices.base import UnavailableError
from ksgen.ownership import own_temporary, temporary_folder
from ksgen.paths import temporary_root

_SYSTEM_DRIVERS = Path("/etc/OpenCL/vendors")
_LIBRARIES = Path("/usr/lib")
# libraries of PoCL for processors, in its folder; libraries for GPUs have other names
_POCL_OF_PROCESSORS = {"libpocl-devices-basic.so", "libpocl-devices-pthread.so"}
_CPU_DRIVER = {  # distribution -> libraries of the CPU driver, each after its dependencies
    "tbb": ("libtbb.so.12",),
    "intel-cmplr-lib-rt": ("libintlc.so.5", "libirng.so", "libsvml.so", "libimf.so"),
    "intel-opencl-rt": ("libintelocl.so",),
}


@contextmanager
def drivers_shown() -> Iterator[None]:
    """Show the loader a temporary folder with .icd files of the system's drivers and the CPU driver.

    If the user has chosen drivers, or there is no CPU driver, nothing changes.
    """
    try:
        driver = load_cpu_driver()
    except UnavailableError:
        driver = None
    if driver is None or user_folder():
        yield
        return
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder("opencl"))
            for system in _SYSTEM_DRIVERS.glob("*.icd"):
                with suppress(OSError):
                    if driver.name not in (named := system.read_text()):
                        Path(folder, system.name).write_text(named)
            Path(folder, "ksgen-cpu.icd").write_text(f"{driver}\n")
        except OSError as error:
            raise UnavailableError(
                f"OpenCL: temporary files cannot be written ({error})", "set TMPDIR to a writable folder"
            ) from None
        os.environ["OCL_ICD_VENDORS"] = folder
        try:
            yield
        finally:
            del os.environ["OCL_ICD_VENDORS"]


def load_cpu_driver() -> Path:
    """Load the CPU driver of the running environment with its libraries, which may be in several folders."""
    libraries = {(package, name): _library(package, name) for package, names in _CPU_DRIVER.items() for name in names}
    if missing := {package: None for (package, _), path in libraries.items() if path is None}:
        raise UnavailableError("OpenCL: no driver is installed", packages_line(*missing))
    folder = _spaceless({path.parent for path in libraries.values() if path})
    path = Path()
    for found in filter(None, libraries.values()):
        path = folder / found.name if folder else found
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise UnavailableError(
                f"OpenCL: the CPU driver cannot be loaded ({error})", packages_line(*_CPU_DRIVER)
            ) from error
    return path


def _spaceless(folders: set[Path]) -> Path | None:
    """A folder of hard links to everything in `folders`, if one of them has a space in its path; else None.

    The driver finds its other files by its own real path, so symbolic links do not help.
    """
    if not any(" " in str(folder) for folder in folders):
        return None
    key = hashlib.sha256(
        "\0".join(f"{folder} {folder.stat().st_mtime_ns}" for folder in sorted(folders)).encode()
    ).hexdigest()[:16]
    for root in dict.fromkeys((temporary_root(), "/tmp", "/var/tmp")):
        if " " in root:
            continue
        with suppress(OSError):
            place = (parent := own_temporary(root)) / f"opencl-{key}"
            if not place.is_dir():
                aside = Path(mkdtemp(prefix="ksgen-opencl-", dir=parent))
                for folder in sorted(folders):
                    for file in folder.iterdir():
                        if file.is_file() and not (aside / file.name).exists():
                            _link(file, aside / file.name)
                with suppress(OSError):  # another process may have been faster
                    aside.rename(place)
            if place.is_dir():
                return place
    raise UnavailableError(
        "OpenCL: the CPU driver does not work from a path with a space",
        "install ksgen's environment elsewhere, or make /tmp writable",
    )


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # another file system
        shutil.copy2(file, to)


def _library(package: str, name: str) -> Path | None:
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(package) or ():
            if file.name == name:
                return Path(os.path.normpath(file.locate()))
    return None


def raise_no_driver() -> None:
    if folder := user_folder():
        raise UnavailableError(f"OpenCL: {folder} shows no device", "unset it to use the drivers installed here")
    load_cpu_driver()
    raise UnavailableError("OpenCL: the installed driver shows no device", packages_line(*_CPU_DRIVER))


def user_folder() -> str | None:
    """The user's own choice of drivers, from the variables that loaders read."""
    for variable in ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH"):
        if value := os.environ.get(variable):
            return f"{variable}={value}"
    return None


def may_show_gpus() -> bool:
    """Whether drivers other than PyPI's CPU driver, and a distribution's PoCL for processors, may exist.

    Loaders do not read the files of PyPI's driver in `etc`.
    """
    if sys.platform != "linux" or user_folder() or os.environ.get("OCL_ICD_FILENAMES"):
        return True
    # conda has a loader of its own
    return Path(sys.prefix, "conda-meta").exists() or not all(map(_is_pocl, _SYSTEM_DRIVERS.glob("*.icd")))


def _is_pocl(driver: Path) -> bool:
    """Whether an .icd file names the distribution's PoCL, if its libraries are for processors alone."""
    try:
        if not driver.read_text().strip().startswith("libpocl.so"):
            return False
    except (OSError, ValueError):
        return False
    libraries = {each.name for folder in _LIBRARIES.glob("*/pocl") for each in folder.iterdir()}
    return bool(libraries) and libraries <= _POCL_OF_PROCESSORS


def packages_line(*packages: str) -> str:
    if "pyopencl" not in packages and (sys.platform != "linux" or platform.machine() != "x86_64"):
        return "install your device's OpenCL driver, or PoCL"
    if "pyopencl" in packages:
        packages = ("pyopencl", *reversed(_CPU_DRIVER))
    return f"pip install {' '.join(packages)}"
