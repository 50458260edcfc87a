"""Where ksgen finds what it ships and keeps what it makes. Never creates a folder."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


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


def _own_folder(variable: str, fallback: str) -> Path:
    if named := os.environ.get(variable):
        return Path(os.path.expanduser(named))  # an unknown user's ~ stays as it is
    import platformdirs

    folder: Path = getattr(platformdirs, fallback)("ksgen", appauthor=False)
    return folder
