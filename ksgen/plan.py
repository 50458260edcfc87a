"""A kernel made ready on one device: chosen, rendered, built, loaded. Knows devices' buffers, never users' arrays.

The order of choice is DESIGN's: wisdom for this batch, wisdom for the nearest batch, the family's default.
"""

import logging
import threading
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
from ksgen.wisdom import Entry, Wisdom, file_name, load_wisdom

MOST_BLOCKS = 2**31 - 1  # of a launch's first dimension
MOST_PLANS = 4096  # that are kept: one a batch, and cheap to make again

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Which family and constants serve a kernel, and who says so."""

    family: str
    constants: Any
    why: str
    misfit: bool = False  # wisdom had constants that this device cannot run
    is_measured: bool = False  # on this device, at this batch or a near one


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
    pack_shared_bytes: int
    packed_bytes: int
    packing: str  # equal for plans whose packed weights are the same bytes
    left_bytes: int = 0  # of partial sums that a gradient's launch leaves

    def pack(self, weights: Buffer, stream: Stream, into: Buffer = None) -> Buffer:
        """Enqueue the packing of canonical weights; the packed ones are complete in the stream's order."""
        packed = self.device.allocate(self.packed_bytes) if into is None else into
        self.device.launch(self.pack_handle, self.pack_grid, self.pack_block, 0, (weights, packed), stream)
        return packed

    def launch(self, arguments: tuple[Any, ...], stream: Stream) -> None:
        """`arguments`: x, packed weights, y, then the bias and residual that the epilogue wants, then the batch."""
        self.device.launch(self.multiply, self.grid, self.block, self.shared_bytes, arguments, stream)

    def launch_gradient(self, arrays: tuple[Buffer, Buffer, Buffer], left: Buffer, stream: Stream) -> None:
        """`arrays`: x, the gradient of y, that of the weights. `left`: memory of `left_bytes`, None where that is 0."""
        self.launch((*arrays, left, self.batch), stream)
        if self.left_bytes:
            arguments = (left, arrays[2], self.batch)
            self.device.launch(self.pack_handle, self.pack_grid, self.pack_block, self.pack_shared_bytes, arguments, stream)


def limits_of(device: Device) -> Limits:
    """A device's limits as families see them: the target's table, where the device itself does not say less."""
    told = device.limits
    if device.kind == "cuda":
        table = cuda_limits(device.target)
        shared = min(table.shared_bytes, told.shared_bytes_per_block)
        return Limits(shared, min(1024, told.threads_per_block), async_copies=table.async_copies, tensor_cores=table.tensor_cores)
    return Limits(told.shared_bytes_per_block, told.threads_per_block, registers=0, is_cpu=told.is_cpu, async_copies=False)


def choose(kernel: KernelSpec, batch: int, limits: Limits, wisdom: Wisdom) -> Choice:
    """The family and constants for a kernel at a batch."""
    found = wisdom.lookup(kernel, batch)
    why = "the family's default: no search has been run for this kernel on this device"
    if found:
        try:
            _check_fit(found, kernel, limits)
        except ConstantsError as error:
            why = f"the family's default: what wisdom has does not fit this device ({error})"
        else:
            where = f"batch {batch}" if found.batch == batch else f"batch {found.batch}, the nearest to {batch}"
            return Choice(found.family, found.constants, f"wisdom, measured at {where}", is_measured=True)
    family = family_for(kernel, limits)
    return Choice(family.name, family.default(kernel, limits), why, misfit=found is not None)


def _check_fit(found: Entry, kernel: KernelSpec, limits: Limits) -> None:
    family = family_named(found.family)
    check(family, kernel, found.constants, limits)
    if not family.serves(kernel, limits):
        raise ConstantsError(f"{kernel.name}: {family.name} does not run on this device ({family.why})")
    if not limits.async_copies and getattr(found.constants, "copy", None) == "async":
        raise ConstantsError(f"{kernel.name}: the device has no asynchronous copies: {found.constants}")


@dataclass(frozen=True, eq=False)
class Loaded:
    """One source on one device. It serves every batch that its constants were chosen for."""

    source: Source
    binary: Binary
    multiply: KernelHandle
    pack: KernelHandle


def load(device: Device, source: Source, binary: Binary) -> Loaded:
    """A source's binary on the device, with the shared memory that its constants ask for."""
    shared_bytes = family_named(source.family).shared_bytes(source.kernel, source.constants)
    multiply = device.load(binary, source.entry, shared_bytes)
    return Loaded(source, binary, multiply, device.load(binary, source.pack_entry, 0))


def check_grid(kernel: KernelSpec, family: str, constants: Any, batch: int) -> None:
    """Raise `LaunchError` where one launch cannot have as many blocks as the batch needs."""
    if (grid := family_named(family).geometry(kernel, constants, batch).grid) > MOST_BLOCKS:
        raise LaunchError(f"{kernel.name}: a batch of {batch} needs {grid} blocks; a launch has at most {MOST_BLOCKS}")


def make_plan(device: Device, kernel: KernelSpec, batch: int, choice: Choice, loaded: Loaded) -> Plan:
    """What launching a loaded kernel at a batch takes."""
    family = family_named(choice.family)
    geometry = family.geometry(kernel, choice.constants, batch)
    packing = family.pack_geometry(kernel, choice.constants)
    return Plan(
        device, kernel, batch, choice, loaded.source, loaded.binary, loaded.multiply, loaded.pack,
        geometry.grid, geometry.block, geometry.shared_bytes,
        packing.grid, packing.block, packing.shared_bytes, family.packed_bytes(kernel, choice.constants),
        f"{kernel.pattern} {kernel.precision} {kernel.layout} {choice.family} {choice.constants!r}", geometry.left_bytes,
    )  # fmt: skip


class Planner:
    """Makes plans and keeps them: one lookup for a plan that was made before. Devices live as long as the process."""

    def __init__(self) -> None:
        self.generation = 0  # grows when what was planned before no longer holds
        self._plans: dict[tuple[Device, KernelSpec, int], Plan] = {}
        self._loaded: dict[tuple[Device, KernelSpec, str, Any], Loaded] = {}
        self._wisdom: dict[str, Wisdom] = {}
        self._bundles: list[Bundle] = []
        self._guard = threading.RLock()

    def use_bundle(self, path: str | Path) -> None:
        """Take binaries and wisdom from a bundle first, from now on."""
        bundle = open_bundle(path)
        with self._guard:
            self._bundles.insert(0, bundle)
            self.forget()

    def forget(self) -> None:
        """Read wisdom again, from now on: a search has found more."""
        with self._guard:
            self._plans.clear()
            self._wisdom.clear()
            self.generation += 1

    def plan(self, device: Device, kernel: KernelSpec, batch: int) -> Plan:
        """The plan for a kernel at a batch; builds and loads at first use."""
        key = (device, kernel, batch)
        with self._guard:
            if key not in self._plans:
                if len(self._plans) >= MOST_PLANS:
                    self._plans.clear()
                self._plans[key] = self._make(device, kernel, batch)
            return self._plans[key]

    def is_loaded(self, device: Device, kernel: KernelSpec, batch: int) -> bool:
        """Whether the kernel that serves the batch is on the device, so that its plan compiles and loads nothing."""
        choice = self.choice(device, kernel, batch)
        return (device, kernel, choice.family, choice.constants) in self._loaded

    def choice(self, device: Device, kernel: KernelSpec, batch: int) -> Choice:
        """The family and constants that serve a kernel at a batch on a device."""
        return choose(kernel, batch, limits_of(device), self._wisdom_of(device))

    def _wisdom_of(self, device: Device) -> Wisdom:
        with self._guard:
            if device.name not in self._wisdom:
                name = file_name(device.name)
                packed = [text for bundle in self._bundles for each, text in bundle.wisdom().items() if each == name]
                # The newest bundle wins: it comes last.
                texts = [text.decode(errors="replace") for text in reversed(packed)]
                self._wisdom[device.name] = load_wisdom(device.name, texts)
            return self._wisdom[device.name]

    def _make(self, device: Device, kernel: KernelSpec, batch: int) -> Plan:
        choice = self.choice(device, kernel, batch)
        check_grid(kernel, choice.family, choice.constants, batch)
        return make_plan(device, kernel, batch, choice, self._load(device, kernel, choice))

    def _load(self, device: Device, kernel: KernelSpec, choice: Choice) -> Loaded:
        key = (device, kernel, choice.family, choice.constants)
        if key not in self._loaded:
            if choice.misfit:
                _log.warning("%s: %s", kernel.name, choice.why)
            source = render(kernel, choice.constants, family=choice.family, dialect=device.dialect)
            self._loaded[key] = load(device, source, self._binary(device, source))
        return self._loaded[key]

    def _binary(self, device: Device, source: Source) -> Binary:
        request = Request(source.text, source.entry, device.target)
        packed = (found for bundle in self._bundles if (found := bundle.get(request)))
        compiler = device.compiler() if device.kind == "opencl" else None
        return next(packed, None) or build(source.text, source.entry, device.target, compiler, default_caches())


PLANNER = Planner()
