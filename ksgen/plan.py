"""A kernel made ready on one device: chosen, rendered, built, loaded. Knows devices' buffers, never users' arrays.

The order of choice is DESIGN's: wisdom for this batch, wisdom for the nearest batch, the family's default.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ksgen.build import Request, build, default_caches
from ksgen.bundle import Bundle, open_bundle
from ksgen.devices.base import Buffer, Device, KernelHandle, Stream
from ksgen.emit import Source, render
from ksgen.errors import ConstantsError, LaunchError
from ksgen.families import Limits, check, cuda_limits, family_for, family_named
from ksgen.resources import Binary
from ksgen.spec import KernelSpec
from ksgen.wisdom import Wisdom, file_name, load_wisdom

MOST_BLOCKS = 2**31 - 1  # of a launch's first dimension


@dataclass(frozen=True)
class Choice:
    """Which family and constants serve a kernel, and who says so."""

    family: str
    constants: Any
    why: str


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that a launch needs but the arrays."""

    device: Device
    kernel: KernelSpec
    batch: int
    choice: Choice
    source: Source
    binary: Binary
    multiply: KernelHandle
    pack_handle: KernelHandle
    grid: int
    block: int
    shared_bytes: int
    pack_grid: int
    pack_block: int
    packed_bytes: int
    packing: Hashable  # equal for plans whose packed weights are the same bytes

    def pack(self, weights: Buffer, stream: Stream) -> Buffer:
        """Enqueue the packing of canonical weights; the packed ones are complete in the stream's order."""
        packed = self.device.allocate(self.packed_bytes)
        self.device.launch(self.pack_handle, self.pack_grid, self.pack_block, 0, (weights, packed), stream)
        return packed

    def launch(self, arguments: tuple[Any, ...], stream: Stream) -> None:
        """`arguments`: x, packed weights, y, then the bias and residual that the epilogue wants, then the batch."""
        self.device.launch(self.multiply, self.grid, self.block, self.shared_bytes, arguments, stream)


def limits_of(device: Device) -> Limits:
    """A device's limits as families see them: the target's table, where the device itself does not say less."""
    told = device.limits
    if device.kind == "cuda":
        table = cuda_limits(device.target)
        shared = min(table.shared_bytes, told.shared_bytes_per_block)
        return Limits(shared, min(1024, told.threads_per_block), async_copies=table.async_copies)
    return Limits(told.shared_bytes_per_block, told.threads_per_block, registers=0, is_cpu=told.is_cpu, async_copies=False)


def choose(kernel: KernelSpec, batch: int, limits: Limits, wisdom: Wisdom) -> Choice:
    """The family and constants for a kernel at a batch."""
    if found := wisdom.lookup(kernel, batch):
        try:
            check(family_named(found.family), kernel, found.constants, limits)
        except ConstantsError as error:
            why = f"the family's default: what wisdom has does not fit this device ({error})"
        else:
            where = f"batch {batch}" if found.batch == batch else f"batch {found.batch}, the nearest to {batch}"
            return Choice(found.family, found.constants, f"wisdom, measured at {where}")
    else:
        why = "the family's default: no search has been run for this kernel on this device"
    family = family_for(kernel)
    return Choice(family.name, family.default(kernel, limits), why)


class Planner:
    """Makes plans and keeps them: one lookup for a plan that was made before."""

    def __init__(self) -> None:
        self.generation = 0  # grows when what was planned before no longer holds
        self._plans: dict[Hashable, Plan] = {}
        self._loaded: dict[Hashable, tuple[Binary, KernelHandle, KernelHandle]] = {}
        self._wisdom: dict[str, Wisdom] = {}
        self._bundles: list[Bundle] = []
        self._guard = threading.RLock()

    def use_bundle(self, path: str | Path) -> None:
        """Take binaries and wisdom from a bundle first, from now on."""
        with self._guard:
            self._bundles.insert(0, open_bundle(path))
            self._plans.clear()
            self._wisdom.clear()
            self.generation += 1

    def has(self, device: Device, kernel: KernelSpec, batch: int) -> bool:
        return (id(device), kernel, batch) in self._plans

    def plan(self, device: Device, kernel: KernelSpec, batch: int) -> Plan:
        """The plan for a kernel at a batch; builds and loads at first use. Devices live as long as the process."""
        with self._guard:
            key = (id(device), kernel, batch)
            if key not in self._plans:
                self._plans[key] = self._make(device, kernel, batch)
            return self._plans[key]

    def choice(self, device: Device, kernel: KernelSpec, batch: int) -> Choice:
        return choose(kernel, batch, limits_of(device), self._wisdom_of(device))

    def _wisdom_of(self, device: Device) -> Wisdom:
        if device.name not in self._wisdom:
            packed = [text for bundle in self._bundles for name, text in bundle.wisdom().items() if name == file_name(device.name)]
            self._wisdom[device.name] = load_wisdom(device.name, [text.decode() for text in packed])
        return self._wisdom[device.name]

    def _make(self, device: Device, kernel: KernelSpec, batch: int) -> Plan:
        choice = self.choice(device, kernel, batch)
        source = render(kernel, choice.constants, family=choice.family, dialect=device.dialect)
        family = family_named(choice.family)
        geometry = family.geometry(kernel, choice.constants, batch)
        if geometry.grid > MOST_BLOCKS:
            raise LaunchError(f"{source.entry}: a batch of {batch} needs {geometry.grid} blocks; a launch has at most {MOST_BLOCKS}")
        packing = family.pack_geometry(kernel, choice.constants)
        loaded = (id(device), source.digest)
        if loaded not in self._loaded:
            binary = self._binary(device, source)
            multiply = device.load(binary, source.entry, geometry.shared_bytes)
            self._loaded[loaded] = (binary, multiply, device.load(binary, source.pack_entry, 0))
        binary, multiply, pack = self._loaded[loaded]
        return Plan(
            device, kernel, batch, choice, source, binary, multiply, pack,
            geometry.grid, geometry.block, geometry.shared_bytes,
            packing.grid, packing.block, family.packed_bytes(kernel, choice.constants),
            (kernel.pattern, kernel.precision, kernel.layout, choice.family, choice.constants),
        )  # fmt: skip

    def _binary(self, device: Device, source: Source) -> Binary:
        request = Request(source.text, source.entry, device.target)
        packed = (found for bundle in self._bundles if (found := bundle.get(request)))
        compiler = device.compiler() if device.kind == "opencl" else None
        return next(packed, None) or build(source.text, source.entry, device.target, compiler, default_caches())


PLANNER = Planner()
