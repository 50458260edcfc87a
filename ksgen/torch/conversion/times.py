"""Time of a chain on a device: expected by the cost model, or measured as a layer next to `nn.Linear`.

Chooses no chain.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.devices import Device, device_for
from ksgen.devices.base import CPU_BATCH, GPU_BATCH
from ksgen.errors import DeviceError, KsgenError, SpecError, ToolchainError
from ksgen.families import FAMILIES, Limits, cuda_limits, family_for, family_named, meant_for
from ksgen.families.expected import prediction, speed_of
from ksgen.families.gpus import GPUS, gpu_of, target_of
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.planner import PLANNER
from ksgen.measure.roofline import Ceilings, measure_ceilings
from ksgen.measure.trust import Timer, Watch, block_of, host_clock, take_blocks, why_unreliable
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, Job, KernelSpec
from ksgen.spec.kernel import checked_count
from ksgen.spec.precision import gradient_of
from ksgen.torch.operators import settled
from ksgen.torch.operators.checks import check_device
from ksgen.torch.operators.meanwhile import waiting
from ksgen.tuning.model import Machine, predict_us
from ksgen.values import excerpt

Us = float | None  # microseconds; None if unknown
RATES = "bytes_per_s", "flops_per_s", "products"  # stored figures of a processor
REMEMBERED = 4096  # cached kernels: candidates share many


@dataclass(frozen=True)
class Clock:
    """Expected times on one device, at a batch size."""

    where: torch.device | None  # device on which layers can be timed; None for a CUDA target
    precision: str
    batch: int
    by: str  # source of the times
    kernel_us: Callable[[KernelSpec], Us]
    floor_us: Callable[[KernelSpec], Us]  # lower bound on a kernel's time

    def sum_us(self, chains: Sequence[Chain], fused: bool = True) -> Us:
        """Expected time of a sum of chains, or of the only one. Each further chain reads the sum of those before.

        `fused`: whether to expect fused launches, too.
        """
        return _sum(self.chain_us(each, number > 0, fused) for number, each in enumerate(chains))

    def sum_step_us(self, chains: Sequence[Chain]) -> Us:
        """Expected time of a training step of a sum of chains, or of the only one.

        Each further chain reads the sum of those before, and in the backward pass the gradient of x.
        """
        return _sum(self.step_us(each, number > 0) for number, each in enumerate(chains))

    def chain_us(self, chain: Chain, adds: bool = False, fused: bool = True) -> Us:
        """Expected time of all factors, or of one fused launch if that is allowed and expected to be faster.

        `adds`: whether the last factor reads a residual.
        """
        apart = _sum(map(self.kernel_us, _kernels(chain, self.precision, adds)))
        if len(chain) == 1 or not fused:
            return apart
        whole = self.kernel_us(KernelSpec(chain, self.precision, epilogue=Epilogue(residual=adds)))
        return min((us for us in (apart, whole) if us is not None), default=None)

    def dense_us(self, whole: Chain) -> Us:
        """Lower bound on the time of a library's product with the dense matrix."""
        return self.floor_us(KernelSpec(whole[0], self.precision))

    def step_us(self, chain: Chain, adds: bool = False) -> Us:
        """Expected time of a training step: forward and backward pass of every factor.

        All intermediates are written and read. `adds`: whether y and the gradient of x are added to others.
        """
        return _sum(map(self.kernel_us, _step_kernels(chain, self.precision, adds)))

    def dense_step_us(self, whole: Chain) -> Us:
        """Lower bound on the time of a training step by a library's products with the dense matrix."""
        return _sum(map(self.floor_us, _step_kernels(whole, self.precision)))


@lru_cache(REMEMBERED)
def _kernel(pattern: Pattern, precision: str, adds: bool = False, job: Job = "multiply") -> KernelSpec:
    """Kernel of a factor. `adds`: whether it reads a residual."""
    return KernelSpec(pattern, precision, epilogue=Epilogue(residual=adds), job=job)


def _kernels(chain: Chain, precision: str, adds: bool = False) -> Iterator[KernelSpec]:
    """Kernel of each factor. `adds`: whether the last one reads a residual."""
    for number, pattern in enumerate(chain, 1):
        yield _kernel(pattern, precision, adds and number == len(chain))


def _step_kernels(chain: Chain, precision: str, adds: bool = False) -> Iterator[KernelSpec]:
    """Kernels of a training step: per factor the product and the gradients of X and of the weights."""
    backward = gradient_of(precision)
    yield from _kernels(chain, precision, adds)
    for number, pattern in enumerate(chain):
        yield _kernel(pattern.transpose, backward, adds and not number)
        yield _kernel(pattern, backward, job="gradient")


def _sum(times: Iterable[Us]) -> Us:
    """Total of the times; None if one of them is unknown."""
    listed = list(times)
    return None if None in listed else sum(us for us in listed if us is not None)


def clock_of(device: Any, precision: str, batch: int | None = None) -> Clock:
    """Clock for a tensor's device, or for the usual card of a CUDA target, such as `sm_90a`.

    A processor's rates are measured once per machine, and stored unless they are unreliable. The batch size is the
    usual one of a processor or a GPU by default.
    """
    is_target = isinstance(device, str) and device.startswith("sm_")
    if is_target and gpu_of(device).rates is None:
        known = ", ".join(target_of(*divmod(number, 10)) for number in GPUS)
        raise SpecError(f"device={excerpt(device)}: its speed is unknown; known: {known}")
    if not is_target:
        check_device(device)
    where = None if is_target else torch.device(device)
    usual = CPU_BATCH if where is not None and where.type == "cpu" else GPU_BATCH
    rows = checked_count("batch", usual if batch is None else batch)
    if where is None:
        limits = cuda_limits(device)

        def default(kernel: KernelSpec) -> Choice:
            family = family_for(kernel, limits, rows)
            return Choice(family.name, family.default(kernel, limits, rows), "the family's default")

        return _of_gpu(None, precision, rows, limits, default)
    try:
        found = device_for(("cuda", where.index) if where.type == "cuda" else "host")
        if where.type == "cpu" and not found.shares_host:
            raise DeviceError(f"{found.name} is not a processor")
        if where.type == "cuda":
            planned = partial(PLANNER.choice, found, batch=rows)
            return _of_gpu(where, precision, rows, limits_of(found), planned)
        return _of_processor(where, precision, rows, found)
    except (DeviceError, ToolchainError) as error:
        return Clock(where, precision, rows, f"no model: {str(error).splitlines()[0]}", lambda _: None, lambda _: None)


def measured_us(layers: Sequence[nn.Module], x: Tensor) -> list[tuple[float, str]]:
    """Median times of forward passes without gradients, taken alternately, each with why it is unreliable, or ""."""
    on_gpu, clock = x.device.type == "cuda", clock_on(x.device)

    def timer(layer: nn.Module) -> Timer:
        return block_of(lambda runs: [clock(lambda: layer(x)) for _ in range(runs)])

    with torch.no_grad(), waiting():
        return [
            (1e6 * each.median, each.why_unreliable)
            for each in take_blocks([timer(layer) for layer in layers], not on_gpu)
        ]


def clock_on(where: torch.device) -> Callable[[Callable[[], object]], float]:
    """Function that times a call on a device of PyTorch, in seconds."""
    return partial(cuda_clock, where=where) if where.type == "cuda" else host_clock


def cuda_clock(call: Callable[[], object], where: torch.device | None = None) -> float:
    """Time a call by events on PyTorch's stream of a GPU, or of the current GPU.

    The result includes the host's launch time if the GPU waits for it.
    """
    with torch.cuda.device(where):  # else another GPU's stream would be timed
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _of_gpu(
    where: torch.device | None, precision: str, batch: int, limits: Limits, choose: Callable[[KernelSpec], Choice]
) -> Clock:
    rates = gpu_of(limits.target).rates

    def kernel_us(kernel: KernelSpec) -> Us:
        if not any(meant_for(kernel, limits, batch)):
            return None
        choice = choose(kernel)
        family = family_named(choice.family)
        speed = speed_of(family, kernel, limits, choice.constants)
        found = speed and prediction(speed, family, kernel, choice.constants, batch)
        return found.us if found else None

    def floor_us(kernel: KernelSpec) -> Us:
        able = [family for family in FAMILIES.values() if family.supports(kernel, limits)]
        pairs = ((family, constants) for family in able for constants in family.defaults(kernel, limits, batch))
        speeds = [speed for family, constants in pairs if (speed := speed_of(family, kernel, limits, constants))]
        floors = (Ceilings(each.bytes_per_s, each.flops_per_s).floor_s(kernel, batch) for each in speeds)
        return min((1e6 * floor_s for floor_s in floors), default=None)

    by = f"no model: the speed of {limits.target} is unknown"
    if rates:
        by = f"the cost model, for {rates.card} ({limits.target})"
    return Clock(where, precision, batch, by, kernel_us, floor_us)


def _of_processor(where: torch.device, precision: str, batch: int, device: Device) -> Clock:
    limits = limits_of(device)
    ceilings, why = _ceilings(device, precision)  # type: ignore[arg-type]  # every device can be hashed

    @cache
    def kernel_us(kernel: KernelSpec) -> Us:
        if not any(meant_for(kernel, limits, batch)):
            return None
        choice = PLANNER.choice(device, kernel, batch)
        machine = Machine(limits.target, limits, limits.multiprocessors, {choice.family: ceilings})
        return predict_us(machine, family_named(choice.family), kernel, choice.constants, batch)

    by = f"the cost model, at rates measured on this processor{why and f', which are unreliable ({why})'}"
    return Clock(where, precision, batch, by, kernel_us, lambda kernel: 1e6 * ceilings.floor_s(kernel, batch))


@cache
def _ceilings(device: Device, precision: str) -> tuple[Ceilings, str]:
    """Rates of a processor, stored or measured.

    Also returns why they are unreliable, if other programs used the processor meanwhile.
    """
    key = precision, device.limits.multiprocessors, torch.get_num_threads()
    known = settled.stored_figures("rates").get(repr(key), {})
    if known.keys() == set(RATES):
        return Ceilings(known["bytes_per_s"], known["flops_per_s"], int(known["products"])), ""
    watch = Watch()
    found = measure_ceilings(device, precision)
    if not (why := why_unreliable([1.0], [watch.others_share()])):
        with suppress(OSError, KsgenError):  # each process measures
            settled.store("rates", {key: {name: float(getattr(found, name)) for name in RATES}})
    return found, why
