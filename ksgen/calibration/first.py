"""Checks the first result of a source on the device that has just loaded it: `KSGEN_CHECK=first`."""

from ksgen.calibration.cases import BATCHES
from ksgen.devices.base import Device, RefusedError
from ksgen.families import family_named
from ksgen.launch.choice import Choice
from ksgen.launch.plan import Loaded, make_plan
from ksgen.measure.verify import Bench, exact_problem, fault_of


def check_result(device: Device, loaded: Loaded, choice: Choice) -> None:
    """Raise `RefusedError` if a source gives wrong results at a ragged batch.

    The operands are small integers if their sums are exact; results must then have the bits of the float64 reference.
    """
    kernel, family = loaded.source.kernel, family_named(choice.family)
    batches = (kernel.batch,) if kernel.batch else BATCHES[::-1] if family.for_small_batches else BATCHES
    batch = next(each for each in batches if family.takes(kernel, each, aligned=True))
    problem = exact_problem(kernel, batch)
    plan = make_plan(device, kernel, batch, choice, loaded)
    if fault := fault_of(problem, *Bench(device, problem).results(plan)):
        raise RefusedError(f"{choice.family} is wrong on {device.name}: {fault}")
