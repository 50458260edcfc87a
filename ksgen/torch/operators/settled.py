"""Stores the times of a processor's methods, so that `backend="auto"` does not time them in each process.

`ksgen.torch.calibrate` writes the file into the folder of the cache. The file is valid for one device, compiler,
version of PyTorch, version of ksgen and set of templates. Unreliable times are not stored. A file that cannot be read
is ignored, and methods are timed again.
"""

import json
import os
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from ksgen import __version__
from ksgen.devices import find_device
from ksgen.emit.templates import template_digest
from ksgen.errors import DeviceError, KsgenError, warn
from ksgen.families import FAMILIES
from ksgen.files import read, replaced_in_turn
from ksgen.paths import cache_dir
from ksgen.wisdom import file_name

MOST_BYTES = 2**26


def times_of(key: Hashable, methods: Iterable[str]) -> dict[str, float]:
    """Stored seconds of a job's methods by name; empty if none are stored, or if one of them is not among `methods`."""
    found = _stored(os.environ.get("KSGEN_DEVICE", ""), cache_dir()).get(repr(key), {})
    return found if found and found.keys() <= set(methods) else {}


def save(times: Mapping[Hashable, Mapping[str, float]]) -> Path | None:
    """Add times to the file, and return its path; None without a device or a folder to write to, with a warning."""
    try:
        stamp = _stamp()
        path = _path()
        with replaced_in_turn(path) as new_file:
            stored = _read(path) | {repr(key): _finite(seconds) for key, seconds in times.items()}
            new_file.write_text(json.dumps({"stamp": stamp, "seconds": stored}, indent=0, sort_keys=True))
    except (OSError, KsgenError) as error:
        warn(f"times of PyTorch's methods are not stored, so that each process takes them again: {error}")
        return None
    forget()
    return path


def forget() -> None:
    """Drop the file's content from memory, so that the next look-up reads the file again."""
    _stored.cache_clear()


@cache
def _stored(asked: str, folder: Path) -> dict[str, dict[str, float]]:
    """Times in the file of the device `asked`, the value of KSGEN_DEVICE; read once per process."""
    with suppress(DeviceError):
        return _read(_path())
    return {}


def _stamp() -> dict[str, str]:
    """Everything that the times depend on, other than the jobs themselves."""
    device = find_device()
    digests = ",".join(map(template_digest, FAMILIES))
    return {
        "device": device.name,
        "runtime": device.runtime,
        "driver": device.driver_version,
        "torch": torch.__version__,
        "ksgen": __version__,
        "templates": sha256(digests.encode()).hexdigest()[:16],
    }


def _path() -> Path:
    return cache_dir() / f"methods-{file_name(find_device().name)}"


def _read(path: Path) -> dict[str, dict[str, float]]:
    """Content of the file if it has the stamp of this process.

    The stamp takes 50 ms, so that it is made only if there is a file.
    """
    with suppress(OSError, ValueError, RecursionError):
        content: Any = json.loads(read(path, MOST_BYTES, is_own=True))
        if isinstance(content, dict) and isinstance(content.get("seconds"), dict) and content.get("stamp") == _stamp():
            return {key: each for key, each in content["seconds"].items() if _is_times(each)}
    return {}


def _is_times(given: Any) -> bool:
    return isinstance(given, dict) and all(type(each) is float and each > 0 for each in given.values())


def _finite(seconds: Mapping[str, float]) -> dict[str, float]:
    """Times of the methods that could run."""
    return {name: each for name, each in seconds.items() if isfinite(each)}
