"""Contenders: our kernels, by family and constants, and the baselines, each ready to run on a job's arrays.

For a product, ours are its families. For a layer, ours are one launch of all factors, one launch per layer of a group,
and one launch per factor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, product
from math import inf
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from ksgen import __version__
from ksgen.bench import roster, whole_models
from ksgen.bench.baselines import BASELINES, TRAINED, Baseline, computes_in_float32, in_float32, training_step
from ksgen.bench.libraries import UnsupportedError, library_version
from ksgen.bench.problem import LayerArrays, LayerJob
from ksgen.bench.timing import BusyCudaClock, ReadyContender
from ksgen.bench.whole_models import WholeJob
from ksgen.build.build import build
from ksgen.devices.base import Buffer, Device, uploaded
from ksgen.emit.render import Source, render
from ksgen.emit.templates import Dialect, template_digest
from ksgen.errors import KsgenError, ToolchainError, warn
from ksgen.families import family_for, family_named, meant_for, operand_of
from ksgen.families.chains import factor_kernels, layer_kernels
from ksgen.families.signature import each_chains, pitches_of, weights_of
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.fused import packing_choices, packings, verdict
from ksgen.launch.plan import Plan, check_grid, load, make_plan
from ksgen.launch.planner import PLANNER
from ksgen.launcher import Call
from ksgen.measure.trust import host_clock, rest
from ksgen.measure.verify import Packed
from ksgen.spec import PRECISIONS, KernelSpec
from ksgen.wisdom import load_wisdom

Added = Mapping[str, Sequence[Tensor | None]]  # biases and residuals, per chain

UNTRAINED = "launches record no gradients; `layer` trains with the same kernels"


@dataclass(frozen=True)
class Contender:
    """One method to compute a job.

    Measurements with equal `key` and `identity` are of the same code, whatever their date.
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
        return self.implementation in roster.PARTS

    @property
    def facts(self) -> dict[str, Any]:
        own = ("implementation", "variant", "arithmetic", "family", "constants", "why", "identity")
        return {"key": self.key, **self.job.facts, **{name: getattr(self, name) for name in own}}


def contenders(job: LayerJob, device: Device, names: Sequence[str]) -> list[Contender]:
    """All named contenders that could run the job, ours first."""
    where = torch_device(device)
    if isinstance(job, WholeJob):
        return [_whole(job, name, where) for name in roster.METHODS_OF_MODELS if name in names]
    found = list(_methods(job, device, names)) if job.layer.name else []
    if not job.layer.name and job.step == roster.FORWARD and roster.OURS in names:  # launches record no gradients
        found += ours(job, device)
    return found + [_baseline(job, BASELINES[name], where) for name in names if name in BASELINES]


def ours(job: LayerJob, device: Device) -> Iterator[Contender]:
    """Contenders of our kernels: the families' defaults, and "tuned" if wisdom has other constants.

    On a processor, the families are the one that launchers choose by default, and those that they take only on request.
    On a GPU, families that its passport has not proven yet are included, because every result is checked.
    """
    limits = limits_of(device)
    limits = replace(limits, bars=tuple(bar for bar in limits.bars if bar.is_disabled))
    for arithmetic in arithmetics(job, device):
        kernel = job.kernel(arithmetic)
        able = list(meant_for(kernel, limits, job.batch))
        if limits.is_cpu:
            usual = family_for(kernel, limits, job.batch)
            able = [
                family
                for family in able
                if family is usual or not (family.is_default(kernel, job.batch) or kernel.arithmetic.families)
            ]
        pairs = [(family.name, each) for family in able for each in family.defaults(kernel, limits, job.batch)]
        defaults = [Choice(name, constants, "the family's default") for name, constants in pairs]
        if arithmetic != kernel.dtype:  # kernels without tensor cores or matrix tiles would repeat plain float32
            requested = kernel.arithmetic.families if limits.is_cpu else ()
            on_cores = [each for each in defaults if operand_of(kernel, each.constants) or each.family in requested]
            defaults = on_cores if on_cores or arithmetic != job.precision else defaults
        chosen = PLANNER.choice(device, kernel, job.batch)
        yield from (_our(job, device, arithmetic, choice, "default") for choice in defaults)
        if chosen.from_wisdom and all(
            (chosen.family, chosen.constants) != (each.family, each.constants) for each in defaults
        ):
            yield _our(job, device, arithmetic, chosen, "tuned")


def tune(job: LayerJob, device: Device, budget: str, deadline: float = inf) -> None:
    """Search for constants of our kernels, if wisdom at this batch is missing, stale or unreliable.

    From then on, `ours` yields the result as "tuned". A search without a result only warns. After `deadline`, a time of
    `monotonic`, no search begins, and a budget of time ends there.
    """
    from ksgen.tuning import tune

    search: Callable[..., object] = tune  # untyped: a job's options are plain strings
    from ksgen.tuning.tuner import parse_budget

    selector = f"{device.runtime}:{device.index}"
    for arithmetic in arithmetics(job, device):
        known = load_wisdom(device.name, target=device.target).lookup(job.kernel(arithmetic), job.batch)
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
    """Precisions in which our kernels multiply for a job.

    Those for tensor cores or matrix tiles that the device lacks are left out: they would repeat plain float32.
    """
    limits = limits_of(device)

    def has_units(name: str) -> bool:
        precision = PRECISIONS[name]
        if precision.operand:
            return limits.tensor_cores
        tiles = precision.tiles
        return bool(limits.is_cpu and precision.families and tiles and tiles.operand.name in limits.tiles)

    return tuple(name for name in job.comparison.ours if name == job.precision or has_units(name))


def torch_device(device: Device) -> torch.device:
    """Device of the baselines: our kernels' GPU if they run on CUDA, else the processor."""
    return torch.device("cuda", device.index) if device.kind == "cuda" else torch.device("cpu")


def _our(job: LayerJob, device: Device, arithmetic: str, choice: Choice, variant: str) -> Contender:
    kernel = job.kernel(arithmetic)

    def prepare(arrays: LayerArrays) -> ReadyContender:
        check_grid(kernel, choice.family, choice.constants, job.batch)
        emitted = rendered(kernel, choice, device.dialect)
        binary = build(emitted.text, emitted.entry, device.target, device.compiler())
        plan = make_plan(device, kernel, job.batch, choice, load(device, emitted, binary))
        is_in_place = device.kind == "cuda" or device.shares_host
        return in_place([plan], arrays) if is_in_place else _on_buffers(plan, arrays)

    copies = 0 if device.kind == "cuda" or device.shares_host else job.bytes
    workspace_bytes = family_named(choice.family).geometry(kernel, choice.constants, job.batch).workspace_bytes
    return Contender(
        job, roster.OURS, variant, arithmetic, _identity([choice]), prepare, copies + workspace_bytes,
        job.pattern.weight_count, choice.family, str(choice.constants), choice.why,
        partial(_sources, device, [kernel], [choice]),
    )  # fmt: skip


def _identity(choices: Sequence[Choice]) -> str:
    """Version of ksgen, and digests of the templates of launches."""
    return " ".join(("ksgen", __version__, *dict.fromkeys(template_digest(each.family) for each in choices)))


def _methods(job: LayerJob, device: Device, names: Sequence[str]) -> Iterator[Contender]:
    """Our methods for a layer, by their number of launches. `layer` alone multiplies by a sum."""
    if job.layer.is_sum:
        return
    is_group, is_single = len(job.layer.chains) > 1, sum(map(len, job.layer.chains)) == 1
    able = {roster.ONE_LAUNCH: True, roster.EACH_FACTOR: not is_single, roster.EACH_LAYER: is_group}
    methods = [name for name in roster.OUR_METHODS if name in names and able[name]]
    for name, arithmetic in product(methods, arithmetics(job, device)):
        launches = _launches(job.kernel(arithmetic), name)
        verdicts = (verdict(device, each, job.batch, "yes") for each in launches if each.is_chain)
        unavailable = next((each.why for each in verdicts if not each.is_one), "")
        refusal = UNTRAINED if job.step == roster.TRAINING else unavailable
        for choices in [[]] if refusal else _choices(device, launches, job.batch):
            yield Contender(
                job,
                name,
                "tuned" if any(each.from_wisdom for each in choices) else "default",
                arithmetic,
                _identity(choices),
                partial(_prepare, device, launches, choices, refusal),
                extra_bytes=2 * job.bytes,
                multiplications=0 if refusal else sum(chain.weight_count for chain in job.layer.chains),
                family=", ".join(dict.fromkeys(each.family for each in choices)),
                constants="; ".join(dict.fromkeys(str(each.constants) for each in choices)),
                why=choices[0].why if choices else refusal,
                sources=partial(_sources, device, launches, choices),
            )


def _choices(device: Device, launches: Sequence[KernelSpec], batch: int) -> Iterator[list[Choice]]:
    """Yield the launchers' choices, one per launch.

    On a processor, then yield the defaults of families that launchers take only on request.
    """
    yield [PLANNER.choice(device, each, batch) for each in launches]
    limits = limits_of(device)
    if limits.is_cpu:
        usual = [family_for(each, limits, batch) for each in launches]
        families = [family_for(each, limits, batch, all_families=True) for each in launches]
        if families != usual:
            pairs = zip(launches, families, strict=True)
            yield [
                Choice(family.name, family.default(each, limits, batch), "the family's default")
                for each, family in pairs
            ]


def _prepare(
    device: Device, launches: Sequence[KernelSpec], choices: Sequence[Choice], refusal: str, arrays: LayerArrays
) -> ReadyContender:
    """Prepare calls on PyTorch's own memory, with weights packed once. Several launches are separate calls."""
    if refusal:
        raise UnsupportedError(refusal)
    pairs, batch = zip(launches, choices, strict=True), arrays.job.batch
    plans = [PLANNER.plan_of(device, kernel, batch, choice) for kernel, choice in pairs]
    return in_place(plans, arrays)


def _launches(kernel: KernelSpec, name: str) -> list[KernelSpec]:
    """Kernels in the order of their launches, chain by chain.

    The last kernel of each chain writes its outputs with the strides of `kernel`, as one launch would.
    """
    if name == roster.ONE_LAUNCH or not kernel.is_chain:
        return [kernel]
    if name == roster.EACH_LAYER:
        return layer_kernels(kernel)
    ends = set(accumulate(map(len, kernel.chains)))
    return [
        replace(each, stride=kernel.stride) if number in ends else each
        for number, each in enumerate(factor_kernels(kernel), 1)
    ]


def _sources(device: Device, launches: Sequence[KernelSpec], choices: Sequence[Choice]) -> list[Source]:
    """Sources of the launches, and of the kernels that pack weights for them."""
    found = []
    for kernel, choice in zip(launches, choices, strict=False):  # without choices there is nothing to launch
        packed = packing_choices(kernel, choice.family, choice.constants) if kernel.is_chain else []
        found += [rendered(each, chosen, device.dialect) for each, chosen in ((kernel, choice), *packed)]
    return found


@lru_cache(maxsize=1024)
def rendered(kernel: KernelSpec, choice: Choice, dialect: Dialect) -> Source:
    return render(kernel, choice.constants, family=choice.family, dialect=dialect)


def address_of(device: Device, tensor: Tensor) -> Any:
    """Address of a tensor as a launch's argument, on CUDA or on a device that shares the host's memory."""
    return device.shared(tensor.data_ptr()) if device.shares_host else tensor.data_ptr()


def by_calls(
    run: Callable[[int], Any],
    on_cuda: bool,
    wait: Callable[[], None] = lambda: None,
    convert: Callable[[], object] | None = None,
) -> ReadyContender:
    """Contender whose calls work on PyTorch's own memory.

    On CUDA they run in PyTorch's default stream, like all other work.
    """
    if on_cuda:
        return ReadyContender(run, lambda y: y, BusyCudaClock(), torch.cuda.synchronize, convert=convert)
    return ReadyContender(run, lambda y: y, host_clock, wait, rest, convert=convert)


def in_place(plans: Sequence[Plan], arrays: LayerArrays) -> ReadyContender:
    """Contender whose calls are prepared on PyTorch's own memory, with weights packed once."""
    device, pack = plans[0].device, _packing(plans, arrays)
    launches = list(zip(plans, pack(), strict=True))
    calls = [_Calls(arrays, launches, x) for x in arrays.sets]
    return by_calls(lambda number: calls[number](), device.kind == "cuda", device.synchronize, pack)


def _packing(plans: Sequence[Plan], arrays: LayerArrays) -> Callable[[], list[Packed]]:
    """Return a function that packs the weights of each launch, by operand, and neither plans nor compiles."""
    device, parts = plans[0].device, list[list[tuple[str, Plan, Any]]]()
    remaining = iter([factor for chain in arrays.weights for factor in chain])
    for plan in plans:
        packers = packings(device, plan) if plan.kernel.is_chain else (plan,)
        pairs = zip(weights_of(plan.kernel), packers, strict=True)
        parts.append([(name, packer, address_of(device, next(remaining))) for name, packer in pairs])

    def pack() -> list[Packed]:
        packed = [{name: packer.pack(address, None) for name, packer, address in part} for part in parts]
        if device.kind != "cuda":
            device.synchronize()
        return packed

    return pack


class _Calls:
    """Launches of a layer on one set of arrays."""

    def __init__(self, arrays: LayerArrays, launches: Sequence[tuple[Plan, Packed]], x: Tensor) -> None:
        self.ys, kernel = arrays.outputs(), arrays.kernel
        added = {"bias": arrays.biases, "residual": arrays.residuals}
        self._steps: list[Callable[[], Any]] = []
        if launches[0][0].kernel.is_group:
            self._add(*launches[0], x, self.ys, added)
            return
        remaining, batch = iter(launches), arrays.job.batch
        for place, chain in enumerate(kernel.chains):
            chain_added, inputs, number = {name: [each[place]] for name, each in added.items()}, x, 0
            while number < len(chain):
                plan, weights = next(remaining)
                if not plan.kernel.is_chain and kernel.out_layout and number == chain.transposing_factor:
                    inputs = self._transposed(inputs)
                number, features = number + len(plan.kernel.factors), plan.kernel.pattern.out_features
                shape = (batch, features) if plan.kernel.y_layout == "bsf" else (features, batch)
                outputs = inputs.new_empty(shape) if number < len(chain) else self.ys[place]
                self._add(plan, weights, inputs, [outputs], chain_added)
                inputs = outputs

    def __call__(self) -> list[Tensor]:
        for step in self._steps:
            step()
        return self.ys

    def _transposed(self, intermediate: Tensor) -> Tensor:
        """Add a step that transposes an intermediate into a new array, and return that array."""
        result = intermediate.t().contiguous()
        self._steps.append(lambda: result.copy_(intermediate.t()))
        return result

    def _add(self, plan: Plan, packed: Packed, x: Tensor, ys: Sequence[Tensor], added: Added) -> None:
        """Add the launch of a plan as a step."""
        device, kernel, names = plan.device, plan.kernel, partial(each_chains, plan.kernel)
        tensors = {"x": x, **dict(zip(names("y"), ys, strict=True))}
        for name, each in added.items():
            tensors |= {operand: array for operand, array in zip(names(name), each, strict=True) if array is not None}
        operands: dict[str, Any] = {name: address_of(device, array) for name, array in tensors.items()}
        operands |= {"workspace": plan.workspace(), **packed}
        operands |= {pitch: tensors[array].stride(0) for array, pitch in pitches_of(kernel).items()}
        after = None if device.kind == "cuda" else device.synchronize
        self._steps.append(Call(plan, plan.arguments(operands), None, ys, (), after, tuple(tensors.values())))


def _on_buffers(plan: Plan, arrays: LayerArrays) -> ReadyContender:
    """Contender whose arrays are copied to the memory of an OpenCL device."""
    device = plan.device
    ((weights,),), (poisoned,) = arrays.weights, arrays.outputs()
    pack, workspace = partial(plan.pack, _uploaded(device, weights), None), plan.workspace()
    packed = pack()
    outputs = [_uploaded(device, poisoned) for _ in arrays.sets]
    inputs = [_uploaded(device, x) for x in arrays.sets]
    shared, pairs = {"weights": packed, "workspace": workspace}, zip(inputs, outputs, strict=True)
    arguments = [plan.arguments({"x": x, plan.result: y, **shared}) for x, y in pairs]

    def run(number: int) -> Buffer:
        plan.launch(arguments[number], None)
        return outputs[number]

    def y(buffer: Buffer) -> list[Tensor]:
        result = torch.empty_like(poisoned)
        device.download(result.view(torch.uint8).numpy(), buffer)
        return [result]

    return ReadyContender(
        run, y, lambda call: device.time(call, None, runs=1, warmup=0)[0], device.synchronize, convert=pack
    )


def _uploaded(device: Device, tensor: Tensor) -> Buffer:
    return uploaded(device, tensor.contiguous().view(torch.uint8).numpy())


def _whole(job: WholeJob, name: str, where: torch.device) -> Contender:
    def prepare(arrays: Any) -> ReadyContender:
        return by_calls(arrays.contender(name), where.type == "cuda")

    identity = library_version("torch" if name == whole_models.DENSE else "ksgen")
    return Contender(
        job, name, "", job.comparison.baselines, identity, prepare, job.bytes, job.multiplications(name),
        why=roster.METHODS_OF_MODELS[name],
    )  # fmt: skip


def _baseline(job: LayerJob, baseline: Baseline, where: torch.device) -> Contender:
    dtype = getattr(torch, PRECISIONS[job.comparison.baselines].dtype)
    is_in_float32 = computes_in_float32(baseline, torch.empty(0, dtype=dtype, device=where))

    def prepare(arrays: LayerArrays) -> ReadyContender:
        if job.step == roster.TRAINING:
            step, gradients = training_step(baseline.name, arrays)
            ready = by_calls(step, where.type == "cuda")
            return replace(ready, y=lambda result: result.ys, gradients=gradients)
        convert = partial(in_float32(baseline.prepare) if is_in_float32 else baseline.prepare, arrays)
        product, again = convert(), convert if baseline.only_converts else None
        return by_calls(lambda number: product(arrays.sets[number]), where.type == "cuda", convert=again)

    chains, arithmetic = job.layer.chains, job.comparison.baselines
    identity = library_version(baseline.library)
    multiplications = sum(map(baseline.multiplications, chains))
    stored_bytes = baseline.stored * multiplications * PRECISIONS[arithmetic].item_bytes
    products = 1  # per factor
    if job.step == roster.TRAINING:  # also those for the gradients of its input and weights; 0: it has no such step
        products = 3 if baseline.name in TRAINED else 0
    return Contender(
        job, baseline.name, "", arithmetic, identity, prepare, stored_bytes + 2 * job.bytes,
        products * multiplications, why=baseline.says + ", in float32" * is_in_float32,
    )  # fmt: skip
