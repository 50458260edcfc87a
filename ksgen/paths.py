"""Folders in which ksgen finds what it ships and stores what it writes. Never creates a folder."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from ksgen import STARTED_IN

_PACKAGE = Path(__file__).resolve().parent
_FOLDERS, _LISTS, _PROGRAMS = ("CUDA_HOME", "CUDA_PATH"), ("PATH",), ("KSGEN_NVCC", "NVCC_CCBIN")


def resource(name: str) -> Path:
    """A shipped folder (`templates`, `specs`, `wisdom`): inside an installed wheel, or at the top of a checkout."""
    installed = _PACKAGE / "_resources" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def cache_dir() -> Path:
    """The user's cache of binaries: `KSGEN_CACHE_DIR`, else the platform's cache folder."""
    return _own_folder("KSGEN_CACHE_DIR", "user_cache_path")


def wisdom_dir() -> Path:
    """The user's own wisdom: `KSGEN_WISDOM_DIR`, else the platform's data folder."""
    return _own_folder("KSGEN_WISDOM_DIR", "user_data_path")


def from_start(path: str) -> str:
    """Make a path absolute. A relative one starts in the folder in which ksgen was imported."""
    return os.path.join(STARTED_IN, os.path.expanduser(path))  # an unknown user's ~ stays unchanged


def program(word: str) -> str:
    """Absolute path of a program; a bare name stays unchanged, because it is searched for on PATH."""
    named = os.path.expanduser(word)
    return from_start(named) if os.sep in named else named


def variable(name: str) -> str | None:
    """Value of an environment variable that locates compilers, with absolute paths; None if it is not set."""
    if not (value := os.environ.get(name)):
        return value
    if name in _LISTS:
        return os.pathsep.join(map(from_start, value.split(os.pathsep)))
    return program(value) if name in _PROGRAMS else from_start(value)


def variables_for_compilers() -> dict[str, str]:
    """Environment variables for compilers, with absolute paths because compilers run in another folder."""
    return {name: value for name in (*_FOLDERS, *_LISTS, *_PROGRAMS) if (value := variable(name))}


def _own_folder(name: str, fallback: str) -> Path:
    if named := os.environ.get(name):
        return Path(from_start(named))
    import platformdirs

    with suppress(RuntimeError):
        folder = str(getattr(platformdirs, fallback)("ksgen", appauthor=False))
        if not folder.startswith("~"):  # older platformdirs keeps the ~ if there is no home folder
            return Path(from_start(folder))
    # HOME is not set, and the user has no name and so no home folder, as in some containers.
    return Path(temporary_root(), f"ksgen-{fallback.split('_')[1]}-{os.geteuid()}")


def temporary_root() -> str:
    """The folder for temporary files, even if none can be written there."""
    try:
        return gettempdir()
    except OSError:  # no folder can be written to
        return "/tmp"
