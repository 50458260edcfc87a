"""A kernel made ready on one device: chosen, rendered, built, loaded. Knows devices' buffers, never users' arrays.

The order of choice is DESIGN's: wisdom for this batch, wisdom for the nearest batch, the family's default.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ksgen.build.build import Request, build, default_caches
from ksgen.build.bundle import Bundle, open_bundle
from ksgen.build.request import Binary
from ksgen.devices.base import Buffer, Device, KernelHandle, Stream
from ksgen.devices.base import Limits as DeviceLimits
from ksgen.emit.render import Source, render
from ksgen.errors import ConstantsError, LaunchError
from ksgen.families import Geometry, Limits, Pass, TensorMap, check, cuda_limits, families_for, family_for, family_named
from ksgen.launch.threads import groups_for
from ksgen.spec import KernelSpec
from ksgen.wisdom.store import Wisdom, file_name, load_wisdom

MOST_BLOCKS = 2**31 - 1  # of a launch's first dimension
MOST_PLANS = 4096  # that are kept: one a batch, and cheap to make again
NEAR = 4  # a search says something of batches so many times longer or shorter
MOST_ENCODED = 1024  # maps that a plan keeps: one for each place of what they describe
ARGUMENTS = {"x": 0, "y": 2, "workspace": 3}  # where a launch has what maps describe

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Which family and constants serve a kernel, and who says so."""

    family: str
    constants: Any
    why: str
    misfit: bool = False  # wisdom had constants that this device cannot run
    from_wisdom: bool = False  # a search found these constants, for this batch or another, for this template or an older one
    is_measured: bool = False  # on this device, as the template is now, at this batch or a near one


class Step(NamedTuple):
    """One of several launches, which all take the same arguments."""

    handle: KernelHandle
    grid: int
    block: int
    shared_bytes: int


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
    grid: int
    block: int
    shared_bytes: int
    pack_handle: KernelHandle
    pack_grid: int
    pack_block: int
    packed_bytes: int
    packing: str  # equal for plans whose packed weights are the same bytes
    maps: tuple[TensorMap, ...] = ()
    workspace_bytes: int = 0  # of memory that several launches hand on what they found in
    steps: tuple[Step, ...] = ()  # those launches, in order
    walks: bool = False  # whether its blocks share out the work among them, however many there are
    _encoded: dict[tuple[int, ...], tuple[bytes, ...]] = field(default_factory=dict)  # by where what they describe is

    def __repr__(self) -> str:
        return f"Plan({self})"

    def __str__(self) -> str:
        return f"{self.kernel.name} at batch {self.batch} by {self.choice.family} on {self.device.name}"

    def __reduce__(self) -> NoReturn:
        raise LaunchError(f"{self!r} belongs to this process, where its kernel is loaded: copy or send the launcher")

    def pack(self, weights: Buffer, stream: Stream, into: Buffer = None) -> Buffer:
        """Enqueue the packing of canonical weights; the packed ones are complete in the stream's order."""
        packed = self.device.allocate(self.packed_bytes) if into is None else into
        self.device.launch(self.pack_handle, self.pack_grid, self.pack_block, 0, (weights, packed), stream)
        return packed

    def launch(self, arguments: tuple[Any, ...], stream: Stream) -> None:
        """`arguments`: x, packed weights, y, the workspace where there is one, then the bias and residual that the epilogue
        wants, then the batch. A gradient's: x, the gradient of y, that of the weights, the workspace or None, the batch."""
        if self.steps:
            self._launch_steps(arguments, stream)
            return
        if self.maps:
            arguments = (*self._encode(arguments), *arguments)
        self.device.launch(self.multiply, self._blocks(), self.block, self.shared_bytes, arguments, stream)

    def _launch_steps(self, arguments: tuple[Any, ...], stream: Stream) -> None:
        for step in self.steps:
            maps = self._encode(arguments) if step.handle is self.multiply else ()
            grid = self._blocks() if step.handle is self.multiply else step.grid
            self.device.launch(step.handle, grid, step.block, step.shared_bytes, (*maps, *arguments), stream)

    def _blocks(self) -> int:
        """Of the launch that multiplies: on a processor, no more than it may take threads."""
        return groups_for(self.grid, self.device.limits.multiprocessors) if self.walks and self.device.limits.is_cpu else self.grid

    def workspace(self, stream: Stream = None) -> tuple[Buffer, ...]:
        """Memory to give launches on that stream: one buffer, or none. Freeing it waits for all launches."""
        return (self.device.workspace(self.workspace_bytes, stream),) if self.workspace_bytes else ()

    def _encode(self, arguments: tuple[Any, ...]) -> tuple[bytes, ...]:
        """The maps of what is at these places, encoded at the first launch on it."""
        places = tuple([index(arguments[ARGUMENTS[each.operand]]) for each in self.maps])
        encoded = self._encoded.get(places)
        if encoded is None:
            if len(self._encoded) >= MOST_ENCODED:
                self._encoded.clear()
            encoded = tuple(self.device.encode_map(each, place) for each, place in zip(self.maps, places, strict=True))
            self._encoded[places] = encoded
        return encoded


def limits_of(device: Device) -> Limits:
    """A device's limits as families see them."""
    return limits_from(device.kind, device.target, device.limits)


def limits_from(kind: str, target: str, told: DeviceLimits) -> Limits:
    """The target's table, where the device itself does not say less."""
    if kind == "cuda":
        table = cuda_limits(target)
        shared = min(table.shared_bytes, told.shared_bytes_per_block)
        return replace(table, shared_bytes=shared, threads=min(table.threads, told.threads_per_block))
    return Limits(
        told.shared_bytes_per_block, told.threads_per_block, registers=0, is_cpu=told.is_cpu, async_copies=False,
        vector_bytes=told.vector_bytes, multiprocessors=told.multiprocessors,
    )  # fmt: skip


def choose(kernel: KernelSpec, batch: int, limits: Limits, wisdom: Wisdom, aligned: bool = True) -> Choice:
    """The family and constants for a kernel at a batch, of arrays that begin at a multiple of 16 bytes or do not."""
    found = wisdom.lookup(kernel, batch, aligned)
    why = "the family's default: no search has been run for this kernel on this device"
    if found:
        try:
            check_fit(found.family, found.constants, kernel, limits)
        except ConstantsError as error:
            why = f"the family's default: what wisdom has does not fit this device ({error})"
        else:
            where = f"batch {batch}" if found.batch == batch else f"batch {found.batch}, the nearest to {batch}"
            who = "wisdom of another template version, a first guess: tune again;" if found.is_stale else "wisdom,"
            is_near = max(found.batch, batch) <= NEAR * min(found.batch, batch)
            said, is_measured = f"{who} measured at {where}", is_near and not found.is_stale
            return Choice(found.family, found.constants, said, from_wisdom=True, is_measured=is_measured)
    family = family_for(kernel, limits, batch, aligned)
    return Choice(family.name, family.default(kernel, limits, batch), why, misfit=found is not None)


def choice_by_name(name: str, kernel: KernelSpec, batch: int, limits: Limits) -> Choice:
    """A family's default for a kernel at a batch, measured or not."""
    family = family_named(name)
    if family not in families_for(kernel, limits, batch):
        raise ConstantsError(f"{kernel.name} at batch {batch}: {name} does not serve it on this device (it is for: {family.why})")
    return Choice(name, family.default(kernel, limits, batch), "the family's default: it was asked for by name")


def check_fit(family_name: str, constants: Any, kernel: KernelSpec, limits: Limits) -> None:
    """Raise `ConstantsError` where a device cannot run a kernel under these constants."""
    family = family_named(family_name)
    check(family, kernel, constants, limits)
    if not family.serves(kernel, limits):
        raise ConstantsError(f"{kernel.name}: {family.name} does not run on this device ({family.why})")
    if not limits.async_copies and getattr(constants, "copy", None) == "async":
        raise ConstantsError(f"{kernel.name}: the device has no asynchronous copies: {constants}")


@dataclass(frozen=True, eq=False)
class Loaded:
    """One source on one device. It serves every batch that its constants were chosen for."""

    source: Source
    binary: Binary
    handles: Mapping[str, KernelHandle]  # by entry


def load(device: Device, source: Source, binary: Binary) -> Loaded:
    """A source's binary on the device, with the shared memory that its constants ask for."""
    launched = family_named(source.family).geometry(source.kernel, source.constants, 1)
    others = {each: device.load(binary, each, 0) for each in source.entries if each != source.entry}
    own = device.load(binary, source.entry, launched.shared_bytes, launched.starts_early)
    return Loaded(source, binary, {source.entry: own, **others})


def check_grid(kernel: KernelSpec, family: str, constants: Any, batch: int) -> None:
    """Raise `LaunchError` where one launch cannot have as many blocks as the batch needs."""
    if (grid := family_named(family).geometry(kernel, constants, batch).grid) > MOST_BLOCKS:
        raise LaunchError(f"{kernel.name}: a batch of {batch} needs {grid} blocks; a launch has at most {MOST_BLOCKS}")


def make_plan(device: Device, kernel: KernelSpec, batch: int, choice: Choice, loaded: Loaded) -> Plan:
    """What launching a loaded kernel at a batch takes."""
    family = family_named(choice.family)
    geometry = family.geometry(kernel, choice.constants, batch)
    packing = family.pack_geometry(kernel, choice.constants)
    source = loaded.source

    def step(entry: str, launched: Geometry) -> Step:
        return Step(loaded.handles[entry], launched.launched(device.limits.multiprocessors), launched.block, launched.shared_bytes)

    def steps(passes: tuple[Pass, ...]) -> list[Step]:
        return [step(source.entry_of(each.name), each.geometry) for each in passes]

    multiply, before, after = step(source.entry, geometry), steps(geometry.before), steps(geometry.after)
    return Plan(
        device, kernel, batch, choice, source, loaded.binary, *multiply,
        loaded.handles.get(source.pack_entry), packing.grid, packing.block, family.packed_bytes(kernel, choice.constants),
        f"{kernel.pattern} {kernel.precision} {kernel.layout} {choice.family} {choice.constants!r}",
        family.maps(kernel, choice.constants, batch), geometry.workspace_bytes + geometry.group_bytes * multiply.grid,
        (*before, multiply, *after) if before or after else (), bool(geometry.at_once),
    )  # fmt: skip


class Planner:
    """Makes plans and keeps them: one lookup for a plan that was made before. Devices live as long as the process."""

    def __init__(self) -> None:
        self.generation = 0  # grows when what was planned before no longer holds
        self._plans: dict[tuple[Device, KernelSpec, int, bool], Plan] = {}
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

    def plan(self, device: Device, kernel: KernelSpec, batch: int, aligned: bool = True) -> Plan:
        """The plan for a kernel at a batch; builds and loads at first use. `aligned`: arrays begin at a multiple of 16 bytes."""
        key = (device, kernel, batch, aligned)
        with self._guard:
            if key not in self._plans:
                if len(self._plans) >= MOST_PLANS:
                    self._plans.clear()
                self._plans[key] = self.plan_of(device, kernel, batch, self.choice(device, kernel, batch, aligned))
            return self._plans[key]

    def is_loaded(self, device: Device, kernel: KernelSpec, batch: int, aligned: bool = True) -> bool:
        """Whether the kernel that serves the batch is on the device, so that its plan compiles and loads nothing."""
        choice = self.choice(device, kernel, batch, aligned)
        return (device, kernel, choice.family, choice.constants) in self._loaded

    def choice(self, device: Device, kernel: KernelSpec, batch: int, aligned: bool = True) -> Choice:
        """The family and constants that serve a kernel at a batch on a device."""
        return choose(kernel, batch, limits_of(device), self._wisdom_of(device), aligned)

    def _wisdom_of(self, device: Device) -> Wisdom:
        with self._guard:
            if device.name not in self._wisdom:
                name = file_name(device.name)
                packed = [text for bundle in self._bundles for each, text in bundle.wisdom().items() if each == name]
                # The newest bundle wins: it comes last.
                texts = [text.decode(errors="replace") for text in reversed(packed)]
                self._wisdom[device.name] = load_wisdom(device.name, texts)
            return self._wisdom[device.name]

    def plan_of(self, device: Device, kernel: KernelSpec, batch: int, choice: Choice) -> Plan:
        """The plan that a choice asks for, whoever made it; kept by the caller."""
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
