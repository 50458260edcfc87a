"""Contenders: our kernels, by family and constants, and the baselines, each ready to run on a job's arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from ksgen import __version__
from ksgen.bench.baselines import BASELINES, Baseline, library_version
from ksgen.bench.problem import LayerArrays, LayerJob
from ksgen.bench.roster import OURS, PARTS
from ksgen.build.build import build
from ksgen.devices.base import Buffer, Device, uploaded
from ksgen.emit.render import Source, render
from ksgen.emit.templates import template_digest
from ksgen.errors import KsgenError, ToolchainError, warn
from ksgen.families import family_for, family_named, meant_for, operand_of
from ksgen.families.signature import each_chains, pitches_of, weights_of
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.fused import packings
from ksgen.launch.plan import Plan, check_grid, load, make_plan
from ksgen.launch.planner import PLANNER
from ksgen.launcher import Call
from ksgen.measure.quiet import rest
from ksgen.measure.trust import host_clock
from ksgen.measure.verify import Packed
from ksgen.spec import PRECISIONS, KernelSpec
from ksgen.torch.conversion.times import cuda_clock
from ksgen.wisdom.store import load_wisdom

Clock = Callable[[Callable[[], None]], float]
Added = Mapping[str, Sequence[Tensor | None]]  # biases and residuals, per chain

_CYCLES_PER_S = 2e9  # approximate clock rate of a GPU
_LEAST_BUSY_S, _MOST_BUSY_S = 2e-4, 5e-3


class BusyCudaClock:
    """CUDA clock that excludes the host's launch time.

    The call is queued behind other work that keeps the GPU busy while the host enqueues.
    """

    def __init__(self) -> None:
        self._busy_s = _MOST_BUSY_S  # 1.5 times the last duration of enqueuing

    def __call__(self, call: Callable[[], object]) -> float:
        def enqueue() -> None:
            self._busy_s = min(max(1.5 * host_clock(call), _LEAST_BUSY_S), _MOST_BUSY_S)

        torch.cuda._sleep(int(self._busy_s * _CYCLES_PER_S))
        return cuda_clock(enqueue)


@dataclass(frozen=True)
class ReadyContender:
    """A contender that is ready to run on one problem's arrays."""

    run: Callable[[int], Any]  # one product, on that set of arrays
    y: Callable[[Any], Sequence[Tensor]]  # result of a run, per chain
    clock: Clock
    wait: Callable[[], None]  # until all runs are complete
    rest: Callable[[], None] = lambda: None  # before timing


@dataclass(frozen=True)
class Contender:
    """One method to compute a job.

    Measurements of different days with equal `identity` measure the same thing.
    """

    job: LayerJob
    implementation: str
    variant: str
    arithmetic: str
    identity: str
    prepare: Callable[[LayerArrays], ReadyContender]
    extra_bytes: int  # in addition to X, Y and the weights
    multiplications: int  # per row of the batch
    family: str = ""
    constants: str = ""
    why: str = ""
    sources: Callable[[], list[Source]] | None = None

    @property
    def key(self) -> str:
        words = (self.job.key, self.implementation, self.variant, self.arithmetic, self.family, self.constants)
        return " ".join(word for word in words if word)

    @property
    def is_part(self) -> bool:
        return self.implementation in PARTS

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "key": self.key,
            **self.job.facts,
            "implementation": self.implementation,
            "variant": self.variant,
            "arithmetic": self.arithmetic,
            "family": self.family,
            "constants": self.constants,
            "why": self.why,
            "identity": self.identity,
        }


def contenders(job: LayerJob, device: Device, names: tuple[str, ...]) -> list[Contender]:
    """All named contenders that could run the job, ours first."""
    found = list(ours(job, device)) if OURS in names else []
    return found + [_baseline(job, BASELINES[name], torch_device(device)) for name in names if name != OURS]


def ours(job: LayerJob, device: Device) -> Iterator[Contender]:
    """Contenders of our kernels: every family's default, and "tuned" if wisdom has better constants.

    On a processor, only the launchers' choice counts, and families without measurements. On a GPU, families that its
    passport has not proven yet are measured too: every result is checked.
    """
    limits = limits_of(device)
    limits = replace(limits, bars=tuple(bar for bar in limits.bars if bar.is_disabled))
    for arithmetic in arithmetics(job, device):
        kernel = job.kernel(arithmetic)
        able = list(meant_for(kernel, limits, job.batch))
        if limits.is_cpu:
            taken = family_for(kernel, limits, job.batch)
            able = [
                family
                for family in able
                if family is taken or not (family.is_default(kernel, job.batch) or kernel.arithmetic.families)
            ]
        found = [(family.name, each) for family in able for each in family.defaults(kernel, limits, job.batch)]
        defaults = [Choice(name, each, "the family's default") for name, each in found]
        if arithmetic != kernel.dtype:  # only tensor cores or tiles differ here; others would repeat plain float32
            asked = kernel.arithmetic.families if limits.is_cpu else ()
            on_cores = [each for each in defaults if operand_of(kernel, each.constants) or each.family in asked]
            defaults = on_cores if on_cores or arithmetic != job.precision else defaults
        chosen = PLANNER.choice(device, kernel, job.batch)
        yield from (_our(job, device, arithmetic, choice, "default") for choice in defaults)
        if chosen.from_wisdom and all(
            (chosen.family, chosen.constants) != (each.family, each.constants) for each in defaults
        ):
            yield _our(job, device, arithmetic, chosen, "tuned")


def tune(job: LayerJob, device: Device, budget: str, deadline: float = inf) -> None:
    """Search for constants of our kernels, if wisdom at this batch is missing, stale or unreliable.

    The result is "tuned" from then on. A search without a result only warns. A budget of seconds
    ends at the deadline, on the clock of `monotonic`.
    """
    from ksgen.tuning import tune

    search: Callable[..., object] = tune  # takes words of options that are read from a job
    from ksgen.tuning.tuner import parse_budget

    selector = f"{device.runtime}:{device.index}"
    for arithmetic in arithmetics(job, device):
        known = load_wisdom(device.name).lookup(job.kernel(arithmetic), job.batch)
        if known and known.batch == job.batch and known.is_sound:
            continue
        left = deadline - monotonic()
        if left <= 0:
            return
        if (seconds := parse_budget(budget).seconds) and left < seconds:
            budget = f"{max(left, 0.1):.1f}s"
        try:
            search(
                job.pattern, precision=arithmetic, layout=job.layout, batch=job.batch, budget=budget, device=selector
            )
        except ToolchainError:  # no search can run
            raise
        except KsgenError as error:
            warn(f"{job.key}: the search for {arithmetic} found nothing ({error})")


def arithmetics(job: LayerJob, device: Device) -> tuple[str, ...]:
    """Arithmetics of our kernels.

    Modes of absent tensor cores or matrix tiles are left out: they would repeat plain float32.
    """
    limits = limits_of(device)

    def is_there(name: str) -> bool:
        own = PRECISIONS[name]
        if own.operand:
            return limits.tensor_cores
        return bool(limits.is_cpu and own.families and own.tiles and own.tiles.operand.name in limits.tiles)

    return tuple(each for each in job.comparison.ours if each == job.precision or is_there(each))


def torch_device(device: Device) -> torch.device:
    """Device of the baselines: our kernels' GPU if they run on CUDA, else the processor."""
    return torch.device("cuda", device.index) if device.kind == "cuda" else torch.device("cpu")


def _our(job: LayerJob, device: Device, arithmetic: str, choice: Choice, variant: str) -> Contender:
    kernel = job.kernel(arithmetic)

    def source() -> Source:
        return rendered(kernel, choice, device.dialect)

    def prepare(arrays: LayerArrays) -> ReadyContender:
        check_grid(kernel, choice.family, choice.constants, job.batch)
        text = source()
        binary = build(text.text, text.entry, device.target, device.compiler())
        plan = make_plan(device, kernel, job.batch, choice, load(device, text, binary))
        is_in_place = device.kind == "cuda" or device.shares_host
        return in_place([plan], arrays) if is_in_place else _on_buffers(plan, arrays)

    identity = f"ksgen {__version__} {template_digest(choice.family)}"
    copies = 0 if device.kind == "cuda" or device.shares_host else job.bytes
    workspace_bytes = family_named(choice.family).geometry(kernel, choice.constants, job.batch).workspace_bytes
    return Contender(
        job, OURS, variant, arithmetic, identity, prepare, copies + workspace_bytes, job.pattern.weight_count,
        choice.family, str(choice.constants), choice.why, lambda: [source()],
    )  # fmt: skip


@lru_cache(maxsize=1024)
def rendered(kernel: KernelSpec, choice: Choice, dialect: str) -> Source:
    return render(kernel, choice.constants, family=choice.family, dialect=dialect)


def at(device: Device, tensor: Tensor) -> Any:
    """Address of a tensor for launches: on CUDA, or on a processor whose memory the device shares."""
    return device.shared(tensor.data_ptr()) if device.shares_host else tensor.data_ptr()


def by_calls(run: Callable[[int], Any], on_cuda: bool, wait: Callable[[], None] = lambda: None) -> ReadyContender:
    """Contender whose calls work on PyTorch's own memory.

    On CUDA they run in its default stream, like all other work.
    """
    if on_cuda:
        return ReadyContender(run, lambda y: y, BusyCudaClock(), torch.cuda.synchronize)
    return ReadyContender(run, lambda y: y, host_clock, wait, rest)


def in_place(plans: Sequence[Plan], arrays: LayerArrays) -> ReadyContender:
    """Contender with prepared calls on PyTorch's own memory, with weights packed once."""
    device, launches = plans[0].device, list(zip(plans, _packed(plans, arrays), strict=True))
    calls = [_Calls(arrays, launches, x) for x in arrays.sets]
    return by_calls(lambda number: calls[number](), device.kind == "cuda", device.synchronize)


def _packed(plans: Sequence[Plan], arrays: LayerArrays) -> Iterator[Packed]:
    """Packed weights of each launch, by operand."""
    left = iter([each for own in arrays.weights for each in own])
    for plan in plans:
        each = packings(plan.device, plan) if plan.kernel.is_chain else (plan,)
        pairs = zip(weights_of(plan.kernel), each, strict=True)
        yield {name: own.pack(at(plan.device, next(left)), None) for name, own in pairs}


class _Calls:
    """Launches of a layer on one set of arrays."""

    def __init__(self, arrays: LayerArrays, launches: Sequence[tuple[Plan, Packed]], x: Tensor) -> None:
        self.ys, kernel = arrays.outputs(), arrays.kernel
        added = {"bias": arrays.biases, "residual": arrays.residuals}
        self._steps: list[Callable[[], Any]] = []
        if launches[0][0].kernel.is_group:
            self._add(*launches[0], x, self.ys, added)
            return
        left, batch = iter(launches), arrays.job.batch
        for place, chain in enumerate(kernel.chains):
            own, between, number = {name: [each[place]] for name, each in added.items()}, x, 0
            while number < len(chain):
                plan, weights = next(left)
                if not plan.kernel.is_chain and kernel.out_layout and number == chain.transposing_factor:
                    between = self._transposed(between)
                number, features = number + len(plan.kernel.factors), plan.kernel.pattern.out_features
                shape = (batch, features) if plan.kernel.y_layout == "bsf" else (features, batch)
                to = between.new_empty(shape) if number < len(chain) else self.ys[place]
                self._add(plan, weights, between, [to], own)
                between = to

    def __call__(self) -> list[Tensor]:
        for step in self._steps:
            step()
        return self.ys

    def _transposed(self, between: Tensor) -> Tensor:
        """Transpose an intermediate by a copy."""
        to = between.t().contiguous()
        self._steps.append(lambda: to.copy_(between.t()))
        return to

    def _add(self, plan: Plan, packed: Packed, x: Tensor, ys: Sequence[Tensor], added: Added) -> None:
        device, own, names = plan.device, plan.kernel, partial(each_chains, plan.kernel)
        tensors = {"x": x, **dict(zip(names("y"), ys, strict=True))}
        for name, each in added.items():
            tensors |= {operand: array for operand, array in zip(names(name), each, strict=True) if array is not None}
        operands: dict[str, Any] = {name: at(device, array) for name, array in tensors.items()}
        operands |= {"workspace": plan.workspace(), **packed}
        operands |= {pitch: tensors[array].stride(0) for array, pitch in pitches_of(own).items()}
        after = None if device.kind == "cuda" else device.synchronize
        self._steps.append(Call(plan, plan.arguments(operands), None, ys, (), after, tuple(tensors.values())))


def _on_buffers(plan: Plan, arrays: LayerArrays) -> ReadyContender:
    """Contender whose arrays are copied to the memory of an OpenCL device."""
    device = plan.device
    ((weights,),), (poisoned,) = arrays.weights, arrays.outputs()
    packed, workspace = plan.pack(_uploaded(device, weights), None), plan.workspace()
    outputs = [_uploaded(device, poisoned) for _ in arrays.sets]
    inputs = [_uploaded(device, x) for x in arrays.sets]
    own, pairs = {"weights": packed, "workspace": workspace}, zip(inputs, outputs, strict=True)
    arguments = [plan.arguments({"x": x, plan.result: y, **own}) for x, y in pairs]

    def run(number: int) -> Buffer:
        plan.launch(arguments[number], None)
        return outputs[number]

    def y(buffer: Buffer) -> list[Tensor]:
        found = torch.empty_like(poisoned)
        device.download(found.view(torch.uint8).numpy(), buffer)
        return [found]

    return ReadyContender(run, y, lambda call: device.time(call, None, runs=1, warmup=0)[0], device.synchronize)


def _uploaded(device: Device, tensor: Tensor) -> Buffer:
    return uploaded(device, tensor.contiguous().view(torch.uint8).numpy())


def _baseline(job: LayerJob, baseline: Baseline, where: torch.device) -> Contender:
    def prepare(arrays: LayerArrays) -> ReadyContender:
        product = baseline.prepare(job.pattern, job.layout, arrays.weights[0][0])

        def run(number: int) -> list[Tensor]:
            return [product(arrays.sets[number]).contiguous()]  # contiguous like ours

        return by_calls(run, where.type == "cuda")

    extra = baseline.elements(job.pattern) * job.kernel(job.comparison.baselines).item_bytes + 2 * job.bytes
    return Contender(
        job, baseline.name, "", job.comparison.baselines, library_version(baseline.library), prepare, extra,
        baseline.multiplications(job.pattern), why=baseline.says,
    )  # fmt: skip
