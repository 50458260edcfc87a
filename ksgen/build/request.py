"""Defines input (`Request`, `Compiler`) and output (`Binary`, `Resources`) of a build, with their digests and records.

Runs nothing and touches no file.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from ksgen.values import excerpt

_PROVENANCE = ("compiler", "compiler_version", "options")  # a binary's key adds these to its request
FORMAT = 1  # raise it when records or digests change; older entries are then never found, and age out


@dataclass(frozen=True)
class Resources:
    """Resources of a multiprocessor that one entry uses. None: the compiler did not report them."""

    registers: int | None = None  # per thread
    shared_bytes: int | None = None  # static shared memory per block; a launch's dynamic shared memory comes on top
    spill_bytes: int | None = None  # spill stores and loads per thread, for lack of registers
    stack_bytes: int | None = None  # local memory per thread, spills included


@dataclass(frozen=True)
class Binary:
    """One compiled source. `resources` describes its entry `entry`."""

    data: bytes = field(repr=False)
    entry: str
    target: str
    resources: Resources = field(default_factory=Resources)
    provenance: Mapping[str, str] = field(default_factory=dict)


class Compiler(Protocol):
    """Compiles one source to one binary. Its name, version and options are part of a cache key."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def options(self, target: str) -> tuple[str, ...]: ...

    def compile(self, text: str, entry: str, target: str) -> Binary:
        """Compile a source. Raises `ToolchainError` with the compiler's first error if it rejects the source."""


@dataclass(frozen=True)
class Request:
    """One source, its entry that will be launched, and the target to build for."""

    text: str
    entry: str
    target: str

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(f"ksgen request {FORMAT}", self.text, self.entry, self.target)

    def key(self, compiler: Compiler) -> str:
        return key_of(self.digest, compiler_provenance(compiler, self.target))


class DamagedError(Exception):
    """An entry's content is not what was stored. ksgen's caches catch this error."""


def digest_of(*fields: str | bytes) -> str:
    """SHA-256 of the fields, each after its length, so that different fields never have the same concatenation."""
    digest = hashlib.sha256()
    for each in fields:
        data = each.encode(errors="surrogateescape") if isinstance(each, str) else each  # any bytes of a path
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def compiler_provenance(compiler: Compiler, target: str) -> dict[str, str]:
    options = json.dumps(compiler.options(target))
    return {"compiler": compiler.name, "compiler_version": compiler.version, "options": options}


def key_of(request_digest: str, provenance: Mapping[str, str]) -> str:
    return digest_of(request_digest, *(provenance[name] for name in _PROVENANCE))


def newness(provenance: Mapping[str, str]) -> tuple[list[int], str, str]:
    """Sort key: how new a binary's compiler is. Ties are resolved in the same way on every machine."""
    version = [int(part) for part in re.findall(r"\d+", provenance["compiler_version"])]
    return version, provenance["compiler"], provenance["options"]


def describe(request: Request, binary: Binary) -> dict[str, Any]:
    """Return a binary's record for `meta.json` or a bundle's index: all facts except its bytes, as JSON values."""
    return {
        "format": FORMAT,
        "request": request.digest,
        "source_sha256": hashlib.sha256(request.text.encode()).hexdigest(),
        "entry": binary.entry,
        "target": binary.target,
        "binary_bytes": len(binary.data),
        "binary_sha256": hashlib.sha256(binary.data).hexdigest(),
        "resources": asdict(binary.resources),
        "provenance": dict(binary.provenance),
    }


_RECORD = {  # fields that `describe` writes
    "request": str, "source_sha256": str, "entry": str, "target": str,
    "binary_bytes": int, "binary_sha256": str, "resources": dict, "provenance": dict,
}  # fmt: skip


def check_record(record: Any) -> None:
    """Raise DamagedError unless `describe` can have written the record, even if its hash matches."""
    if not isinstance(record, dict):
        raise DamagedError(f"a record is {excerpt(record)}, not a mapping")
    for name, kind in _RECORD.items():
        if type(record.get(name)) is not kind:
            raise DamagedError(f"{name} of a record is {excerpt(record.get(name))}")
    resources, made = record["resources"], record["provenance"]
    are_numbers = all(type(each) in (int, type(None)) for each in resources.values())
    if not are_numbers or not {*resources} <= {each.name for each in fields(Resources)}:
        raise DamagedError(f"resources of a record is {excerpt(resources)}")
    if not {*_PROVENANCE} <= {*made} or not all(isinstance(each, str) for each in made.values()):
        raise DamagedError(f"provenance of a record is {excerpt(made)}")


def restore(record: Mapping[str, Any], data: bytes) -> Binary:
    """Return the binary with this record and these bytes. Raises DamagedError if they do not match."""
    if hashlib.sha256(data).hexdigest() != record["binary_sha256"]:
        raise DamagedError("the binary is not the one that was stored")
    return Binary(data, record["entry"], record["target"], Resources(**record["resources"]), record["provenance"])


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_LOCAL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_ROUTINE = (_ENTRY, _FUNCTION, _LOCAL, _USED, re.compile(r"bytes gmem"), re.compile(r"Compile time ="))


def read_resources(log: str, entry: str) -> Resources:
    """Read the report of `ptxas -v` about one entry. Stack frames of device functions do not count as the entry's."""
    registers = shared_bytes = spill_bytes = stack_bytes = None
    compiling = function = None
    for line in log.splitlines():
        if found := _ENTRY.search(line):
            compiling = function = found[1]
        elif found := _FUNCTION.search(line):
            function = found[1]
        elif function == entry and (found := _LOCAL.search(line)):
            stack_bytes, spill_bytes = int(found[1]), int(found[2]) + int(found[3])
        elif compiling == entry and (found := _USED.search(line)):
            registers = int(found[1])
            shared = _SHARED.search(line)
            shared_bytes = int(shared[1]) if shared else 0
    return Resources(registers, shared_bytes, spill_bytes, stack_bytes)


def read_notes(log: str) -> Iterator[str]:
    """Yield ptxas's advice ("Potential Performance Loss: ..."): every line that is not part of its usual report."""
    for line in log.splitlines():
        if line.startswith("ptxas") and not any(routine.search(line) for routine in _ROUTINE):
            yield line.strip()
