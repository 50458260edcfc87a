"""What a cubin says of its kernels: registers, shared memory, most threads, cluster, parameters.

As `cuobjdump -elf` shows it.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_MOST_THREADS, _PARAMETER, _REGISTERS, _CLUSTER = 0x05, 0x17, 0x2F, 0x3D  # attributes in .nv.info sections
_SIZED = 4  # the format of those that come with a length; all others have two bytes
_SYSTEM_SHARED_BYTES = 1024  # the system's own in each block's shared memory: .nv.shared counts them from sm_90 on


@dataclass
class Kernel:
    name: str
    registers: int = 0
    shared_bytes: int = 0  # static
    most_threads: int = 0  # 0: it does not say
    cluster: int = 0  # blocks along x; 0: it does not say
    parameters: list[tuple[int, int]] = field(default_factory=list)  # offset and bytes of each


class _Section(NamedTuple):
    name: str
    info: int
    size: int
    content: bytes


def read_target(cubin: bytes) -> int:
    """90 for sm_90 and sm_90a."""
    flags: int = struct.unpack_from("<I", cubin, 48)[0]
    return flags >> 8 & 0xFF


def read_kernels(cubin: bytes) -> list[Kernel]:
    sections = {section.name: section for section in _sections(cubin)}
    kernels: dict[int, Kernel] = {}  # by symbol, which a text section names in its info
    for section in sections.values():
        if section.name.startswith(".text."):
            kernels[section.info & 0xFFFFFF] = Kernel(section.name.removeprefix(".text."))
    for number, value in _attributes(sections[".nv.info"].content):
        if number == _REGISTERS and value[0] in kernels:
            kernels[value[0]].registers = value[1]
    system = _SYSTEM_SHARED_BYTES if read_target(cubin) >= 90 else 0
    for kernel in kernels.values():
        if shared := sections.get(f".nv.shared.{kernel.name}"):
            kernel.shared_bytes = max(0, shared.size - system)
        _read_info(kernel, sections[f".nv.info.{kernel.name}"].content)
    return list(kernels.values())


def read_code(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each kernel."""
    found = {section.name: section.content for section in _sections(cubin)}
    return {name.removeprefix(".text."): content for name, content in found.items() if name.startswith(".text.")}


def _read_info(kernel: Kernel, content: bytes) -> None:
    parameters = {}
    for number, value in _attributes(content):
        if number == _MOST_THREADS:
            kernel.most_threads = value[0] * value[1] * value[2]
        elif number == _CLUSTER:
            kernel.cluster = value[0]
        elif number == _PARAMETER:  # then ordinal and offset, then the size above 18 bits of flags
            parameters[value[1] & 0xFFFF] = (value[1] >> 16, value[2] >> 18)
    first = min((offset for offset, _ in parameters.values()), default=0)
    kernel.parameters = [(offset - first, size) for _, (offset, size) in sorted(parameters.items())]


def _attributes(content: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Number and words of each attribute that has a length."""
    at = 0
    while at < len(content):
        kind, number, length = struct.unpack_from("<BBH", content, at)
        at += 4
        if kind == _SIZED:
            yield number, struct.unpack_from(f"<{length // 4}I", content, at)
            at += length


def _sections(cubin: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    width, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + width * index) for index in range(count)]
    for name, kind, _, _, begin, size, _, info, _, _ in headers:
        start = headers[names][4] + name
        content = b"" if kind == 8 else cubin[begin : begin + size]  # 8: no content, shared memory for one
        yield _Section(cubin[start : cubin.index(b"\0", start)].decode(), info, size, content)
