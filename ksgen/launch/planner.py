"""Cached plans: read wisdom, choose constants, render a source, find or build its binary, and load it.

Binaries of bundles precede those of caches and compilers. Wisdom of bundles precedes the shipped wisdom, but not the
user's own. A planner never launches. While it compiles or loads a kernel, it does not block the planning of others.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ksgen import passport
from ksgen.build.background import PendingError, outcome
from ksgen.build.build import AbsentCompiler, Request, build, default_caches, put_in_use
from ksgen.build.bundle import Bundle
from ksgen.build.request import Binary
from ksgen.devices.base import Device, RefusedError
from ksgen.emit.render import Source, render
from ksgen.errors import ConstantsError, KsgenError, ToolchainError
from ksgen.families import family_named
from ksgen.launch.choice import Choice, built_beforehand, check_fit, choose, choose_for_many, fallback_choice, limits_of
from ksgen.launch.plan import Loaded, Plan, check_grid, check_launchable, load, make_plan
from ksgen.locks import new_reentrant_lock
from ksgen.spec import KernelSpec
from ksgen.values import excerpt
from ksgen.wisdom import Entry, Wisdom, file_name, load_wisdom

MOST_PLANS = 4096  # cached plans: one per kernel and batch size, and cheap to rebuild
MOST_LOADED = 1024  # loaded kernels: each takes about ten of the 65,530 memory maps that Linux allows a process
MOST_DERIVED = 1024  # cached data that callers derive from plans: one per layer and batch size

_Key = tuple[Device, KernelSpec, str, Any]  # identifies a loaded kernel: device, kernel, family, source constants

Watcher = Callable[[Device, KernelSpec, int, Choice | None], None]
# called with each kernel that is planned (with its choice), or considered for a fused launch (with None)
WATCHERS: list[Watcher] = []

_log = logging.getLogger(__name__)


class Planner:
    """Creates and caches plans: a known plan costs one lookup. Devices live as long as the process."""

    def __init__(self) -> None:
        self.generation = 0  # incremented when callers must look up their plans again
        self.earlier: list[int] = []  # earlier generations whose plans some calls may still use
        self._earlier_plans: list[dict[Any, Any]] = []  # keeps the plans of these generations alive
        self._plans: dict[tuple[Device, KernelSpec, int, bool], Plan] = {}
        self.derived: dict[Any, Any] = {}  # data that callers derive from plans; dropped with them
        self._loaded: dict[_Key, Loaded] = {}  # the least recently used come first
        self._refused: dict[_Key, str] = {}  # kernels that a device cannot launch, each with the reason
        self._loading: dict[_Key, Any] = {}  # a lock per kernel that is being loaded
        self._wisdom: dict[tuple[str, str], Wisdom] = {}  # by name and target of a device
        self._bundles: list[Bundle] = []
        self._guard = new_reentrant_lock()

    def use_bundle(self, path: str | Path) -> None:
        """Search a bundle's binaries first from now on, and its wisdom before the shipped wisdom."""
        bundle = Bundle(path)
        with self._guard:
            self._bundles.insert(0, bundle)
            put_in_use(bundle)  # also for binaries that a runtime builds for itself; `build` searches its caches first
            self.forget()

    def forget(self) -> None:
        """Drop all plans, and read wisdom and passports again, because a search or a proof has changed them."""
        with self._guard:
            self._plans.clear()
            self.derived.clear()
            self._wisdom.clear()
            passport.forget()
            self.earlier, self._earlier_plans = [], []
            self.generation += 1

    def renew(self) -> None:
        """Read wisdom again like `forget`, but keep earlier plans alive for calls that must not change kernels."""
        with self._guard:
            earlier = [*self.earlier, self.generation]
            plans = [*self._earlier_plans, dict(self._plans), dict(self.derived)]
            self.forget()
            self.earlier, self._earlier_plans = earlier, plans

    def plan(
        self,
        device: Device,
        kernel: KernelSpec,
        batch: int,
        aligned: bool = True,
        before_loading: Callable[[], object] | None = None,
    ) -> Plan:
        """Plan for a kernel at a batch size. The first call builds and loads the kernel.

        `aligned` says whether arrays begin at a multiple of 16 bytes. `before_loading` is called if the kernel is not
        loaded yet, and may raise an error instead.
        """
        key = (device, kernel, batch, aligned)
        if found := self._plans.get(key):
            return found
        generation, choice = self.generation, self.choice(device, kernel, batch, aligned)
        self.report(device, kernel.untied, batch, choice)
        kernel = as_read(kernel, choice)
        is_loaded = _key(device, kernel, choice) in self._loaded
        if before_loading and not is_loaded:
            before_loading()
        make = partial(self.plan_or_fallback, device, kernel, batch, aligned, choice)
        must_end = device.runtime == "opencl"
        try:
            made: Plan = outcome((generation, *key), kernel.name, make, at_once=is_loaded, must_end=must_end)
        finally:
            with contextlib.suppress(PendingError, KsgenError):  # launches report errors
                device.prepare_launches()
        with self._guard:
            if generation != self.generation:  # chosen by outdated wisdom, so only this call uses it
                return made
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            return self._plans.setdefault(key, made)

    def derive(self, generation: int, key: Any, found: Any) -> None:
        """Cache data that a caller derived from plans, unless their generation is over."""
        with self._guard:
            if generation != self.generation:
                return
            if len(self.derived) >= MOST_DERIVED:
                self.derived.clear()
            self.derived[key] = found

    def report(self, device: Device, kernel: KernelSpec, batch: int, choice: Choice | None = None) -> None:
        """Call the watchers with a kernel that a call may use; without a choice, it is only considered."""
        for each in tuple(WATCHERS):
            each(device, kernel, batch, choice)

    def choice(self, device: Device, kernel: KernelSpec, batch: int, aligned: bool = True) -> Choice:
        """Family and constants for a kernel at a batch size, among those that the device has not refused.

        Raises `DeviceError` if the device has refused all families.
        """
        limits, kernel = limits_of(device), kernel.untied  # the choice does not depend on ties
        found = choose(kernel, batch, limits, self._wisdom_of(device), aligned)
        while self._refused and (why := self._refused.get(_key(device, kernel, found))):
            found, limits = fallback_choice(found, kernel, batch, limits, aligned, why)
        return found

    def refuse(self, plan: Plan, why: str, aligned: bool = True) -> None:
        """Replace a plan's kernel by another one from now on, because the device refuses its launches.

        Plans with other kernels stay. `aligned` says whether the refused call's arrays were aligned. Raises
        `DeviceError` if no kernel is left for such arrays.
        """
        key = _key(plan.device, plan.kernel.untied, plan.choice)
        with self._guard:
            if key in self._refused:
                return
            self._refused[key], plan.loaded.is_refused = why, True
            self._loaded.pop(key, None)
            for each in [each for each, known in self._plans.items() if known.loaded is plan.loaded]:
                del self._plans[each]
            for each in [each for each, known in self.derived.items() if getattr(known, "loaded", None) is plan.loaded]:
                del self.derived[each]
            self.earlier.append(self.generation)
            self.generation += 1  # callers look up their plans again, and find all except the removed ones
        _report_refusal(plan.kernel, why, plan.choice, self.choice(plan.device, plan.kernel, plan.batch, aligned))

    def measured(self, device: Device, kernel: KernelSpec, batch: int) -> Entry | None:
        """Entry of the device's wisdom for a kernel at this batch size, or at the nearest one that counts as alike.

        None unless its time is reliable and was measured with the current template, and the device may run its choice.
        """
        found = self._wisdom_of(device).lookup(kernel, batch)
        if found is None or not found.is_sound or not found.median_us:
            return None
        limits = limits_of(device)
        if limits.bar_of(found.family):
            return None
        try:
            check_fit(found.family, found.constants, kernel, limits)
        except ConstantsError:
            return None
        return found

    def plan_or_fallback(self, device: Device, kernel: KernelSpec, batch: int, aligned: bool, choice: Choice) -> Plan:
        """Plan of a choice, or of another choice if its kernel cannot be built or launched.

        If the build fails, prebuilt kernels are tried. They were chosen for the target's usual GPU, or for a processor
        with a subset of this one's instructions. For tied weights, kernels that read one slice are tried before those
        that read all weights.
        """
        while True:
            try:
                return self.plan_of(device, kernel, batch, choice)
            except RefusedError as error:
                why = str(error)
            except ToolchainError:
                for target, limits in built_beforehand(device):
                    usual = choose_for_many(kernel, batch, limits, self._wisdom_of(device), aligned)
                    key = _key(device, as_read(kernel, usual), usual)
                    has_failed = target == device.target and key == _key(device, kernel, choice)
                    if has_failed or (device, key[1].untied, *key[2:]) in self._refused:
                        continue
                    with contextlib.suppress(ToolchainError):
                        return self.plan_of(device, kernel, batch, usual, target)
                if not kernel.tied:
                    raise
                kernel = kernel.untied
                continue
            instead = self.choice(device, kernel, batch, aligned)
            _report_refusal(kernel, why, choice, instead)
            choice = instead

    def _wisdom_of(self, device: Device) -> Wisdom:
        with self._guard:
            key = device.name, device.target  # native and OpenCL may give a processor the same name
            if key not in self._wisdom:
                name = file_name(device.name)
                packed = [text for bundle in self._bundles for each, text in bundle.wisdom().items() if each == name]
                # Later texts take precedence, so the newest bundle comes last.
                texts = [text.decode(errors="replace") for text in reversed(packed)]
                self._wisdom[key] = load_wisdom(device.name, texts, target=device.target)
            return self._wisdom[key]

    def plan_of(
        self, device: Device, kernel: KernelSpec, batch: int, choice: Choice, target: str | None = None
    ) -> Plan:
        """Plan of a given choice. It is not cached here, but its loaded kernel is.

        `target` is the target of the binary; None: the device's.
        """
        check_grid(kernel, choice.family, choice.constants, batch)
        kernel = as_read(kernel, choice)
        key, target = _key(device, kernel, choice), target or device.target
        load_it = partial(self._load, device, kernel, choice, target)
        must_end = device.runtime == "opencl"
        loaded = outcome((key, target), kernel.name, load_it, at_once=key in self._loaded, must_end=must_end)
        return make_plan(device, kernel, batch, choice, loaded)

    def _load(self, device: Device, kernel: KernelSpec, choice: Choice, target: str) -> Loaded:
        """Return the loaded kernel of a choice; build and load it first if needed.

        Threads that need the same kernel wait for the thread that loads it. Other threads do not wait.
        """
        key = _key(device, kernel, choice)
        with self._guard:
            lock = self._loading.setdefault(key, new_reentrant_lock())
        try:
            with lock:
                found = self._loaded.get(key)
                if found is None:
                    # A good moment to start the passport: no CUDA graph is being recorded, and loading is slow anyway.
                    passport.begin(device)
                    if choice.misfit:
                        _log.warning("%s: %s", kernel.name, choice.why)
                    source = render(kernel, choice.constants, family=choice.family, dialect=device.dialect)
                    found = load(device, source, self._binary(device, source, target))
                    self._check(key, found, choice)
                with self._guard:
                    self._keep(key, found)
        finally:
            self._loading.pop(key, None)
        return found

    def _check(self, key: _Key, loaded: Loaded, choice: Choice) -> None:
        """Raise `RefusedError` if the device cannot launch a kernel, or `KSGEN_CHECK=first` finds its result wrong."""
        try:
            check_launchable(device := key[0], loaded)
            if checks_first_results():
                # of a higher layer, so it cannot be imported at the top
                import_module("ksgen.calibration.proof").check_result(device, loaded, choice)
        except RefusedError as error:
            self._refused[device, key[1].untied, *key[2:]] = str(error)
            raise

    def _keep(self, key: _Key, loaded: Loaded) -> None:
        """Cache a kernel, and drop the least recently used ones beyond `MOST_LOADED`.

        Prepared calls that still use a dropped kernel keep it loaded, also for graphs that recorded them. A graph that
        recorded another call keeps nothing.
        """
        self._loaded.pop(key, None)
        self._loaded[key] = loaded
        while len(self._loaded) > MOST_LOADED:
            oldest, unused = next(iter(self._loaded.items()))
            del self._loaded[oldest]
            if unused.is_used:  # used since the last check: it stays for another round
                unused.is_used = False
                self._loaded[oldest] = unused
                continue
            for each in [each for each, plan in self._plans.items() if plan.loaded is unused]:
                del self._plans[each]
            self.derived.clear()

    def _binary(self, device: Device, source: Source, target: str) -> Binary:
        request = Request(source.text, source.entry, target)
        packed = (found for bundle in self._bundles if (found := bundle.get(request)))
        is_own = target == device.target
        compiler = device.compiler() if is_own else AbsentCompiler(f"only prebuilt binaries are used for {target}")
        return next(packed, None) or build(source.text, source.entry, target, compiler, default_caches())


def _key(device: Device, kernel: KernelSpec, choice: Choice) -> _Key:
    return device, kernel, choice.family, family_named(choice.family).source_constants(kernel, choice.constants)


def as_read(kernel: KernelSpec, choice: Choice) -> KernelSpec:
    """The kernel as a choice reads its weights: with their ties if it reads one slice of tied weights, else untied."""
    return family_named(choice.family).as_read(kernel, choice.constants)


def _report_refusal(kernel: KernelSpec, why: str, refused: Choice, instead: Choice) -> None:
    remark = " without clusters" if instead.family == refused.family else ""
    _log.warning("%s: %s; launchers take %s%s", kernel.name, why, instead.family, remark)


def checks_first_results() -> bool:
    """Whether `KSGEN_CHECK` asks to check the first result of each new source."""
    asked = os.environ.get("KSGEN_CHECK", "")
    if asked not in ("", "first"):
        raise ConstantsError(f"KSGEN_CHECK={excerpt(asked)}; accepted: first, or unset")
    return bool(asked)


PLANNER = Planner()
