"""Stores what was measured of a device, so that later processes need not measure it.

`ksgen.torch.calibrate` stores the times of a processor's methods for `backend="auto"`, and `propose` a processor's
rates. Each kind has a file in the folder of the cache. A file is valid for one device, target, compiler, version of
PyTorch, version of ksgen and set of templates. Unreliable figures are not stored. A file that cannot be read is
ignored, and its figures are measured again.
"""

import json
import os
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from ksgen import __version__
from ksgen.devices import find_device
from ksgen.emit.templates import digest_of_all
from ksgen.errors import DeviceError, KsgenError, warn
from ksgen.files import read, replaced_in_turn
from ksgen.paths import cache_dir
from ksgen.wisdom import file_name

MOST_BYTES = 2**26
METHODS = "methods"  # kind of the times of methods
Figures = dict[str, float]  # by name


def times_of(key: Hashable, methods: Iterable[str]) -> Figures:
    """Stored seconds of a job's methods by name; empty if none are stored, or if one of them is not among `methods`."""
    found = _stored(os.environ.get("KSGEN_DEVICE", ""), cache_dir()).get(repr(key), {})
    return found if found and found.keys() <= set(methods) else {}


def save(times: Mapping[Hashable, Mapping[str, float]]) -> Path | None:
    """Add times of methods, and return the file's path; None without a device or a folder, with a warning."""
    try:
        path = store(METHODS, times)
    except (OSError, KsgenError) as error:
        warn(f"times of PyTorch's methods are not stored, so that each process takes them again: {error}")
        return None
    forget()
    return path


def store(kind: str, figures: Mapping[Hashable, Mapping[str, float]]) -> Path:
    """Add figures to the file of a kind, and return its path.

    Raises `OSError` or `KsgenError` without a device or a folder to write to.
    """
    stamp, path = _stamp(), _path(kind)
    with replaced_in_turn(path) as new_file:
        could_run = {repr(key): {name: n for name, n in each.items() if isfinite(n)} for key, each in figures.items()}
        stored = stored_figures(kind) | could_run
        new_file.write_text(json.dumps({"stamp": stamp, "figures": stored}, indent=0, sort_keys=True))
    return path


def forget() -> None:
    """Drop the times from memory, so that the next look-up reads the file again."""
    _stored.cache_clear()


@cache
def _stored(asked: str, folder: Path) -> dict[str, Figures]:
    """Times in the file of the device `asked`, the value of KSGEN_DEVICE; read once per process."""
    with suppress(DeviceError):
        return stored_figures(METHODS)
    return {}


def _stamp() -> dict[str, str]:
    """Everything that figures depend on, other than their keys."""
    device = find_device()
    return {
        "device": device.name,
        "target": device.target,
        "runtime": device.runtime,
        "driver": device.driver_version,
        "torch": torch.__version__,
        "ksgen": __version__,
        "templates": digest_of_all(),
    }


def _path(kind: str) -> Path:
    return cache_dir() / f"{kind}-{file_name(find_device().name)}"


def stored_figures(kind: str) -> dict[str, Figures]:
    """Content of the file of a kind by `repr` of the keys, if it has the stamp of this process."""
    path = _path(kind)
    with suppress(OSError, ValueError, RecursionError):
        content: Any = json.loads(read(path, MOST_BYTES, is_own=True))
        if isinstance(content, dict) and isinstance(content.get("figures"), dict) and content.get("stamp") == _stamp():
            rows = {key: each for key, each in content["figures"].items() if isinstance(each, dict)}
            return {key: row for key, row in rows.items() if all(type(n) is float and n > 0 for n in row.values())}
    return {}
