"""The search for the fastest constants of a kernel on a device: `ksgen.tune`. The command `ksgen tune` does the same."""

from collections.abc import Callable

from ksgen.errors import KsgenError, SpecError
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.storage import SAME
from ksgen.tuning.search import Progress, Tuned
from ksgen.values import excerpt

__all__ = ["Progress", "Tuned", "tune"]


def tune(
    pattern: Pattern | Chain, *, precision: str = "float32", layout: str = "bsf", epilogue: Epilogue | None = None,
    batch: int | None = None, budget: str | int | None = None, strategy: str = "model", family: str | None = None,
    device: str | None = None, scheduler: str | None = None, progress: Callable[[Progress], None] | None = None,
    job: str = "multiply", weights: str = SAME,
) -> Tuned:  # fmt: skip
    """Find the fastest constants of one kernel, and put them into the user's wisdom. Launchers of this process use them at once.

    Of a `Chain`: of all its factors in one launch. Once each factor was tuned too, the way that was measured to be faster is taken.
    `job` is "multiply", or "gradient" (of the weights). `weights` says how they are stored, such as "int8". `batch` is 25088 on a GPU
    and 1568 on a processor unless given. `budget` is a time such as "60s", or a number of candidates. `progress` is called after each
    candidate, in a thread of its own. An interrupt saves the best so far, and then continues as `KeyboardInterrupt`.
    """
    from ksgen.devices.base import default_batch
    from ksgen.launch.fused import chain_kernel
    from ksgen.launch.planner import PLANNER
    from ksgen.tuning.job import Job
    from ksgen.tuning.trials import TrialStore
    from ksgen.tuning.tuner import Options, Tuner, open_engine, parse_budget

    epilogue = epilogue or Epilogue()
    if isinstance(pattern, Chain) and len(pattern) > 1:
        if job != "multiply":
            raise SpecError(f"job={excerpt(job)} of a chain; accepted: multiply")
        kernel = chain_kernel((pattern.factors,), precision, layout, epilogue, weights=weights)
    else:
        alone = pattern[0] if isinstance(pattern, Chain) else pattern
        kernel = KernelSpec(alone, precision, layout, epilogue, job=job, weights=weights)
    options = Options(parse_budget(budget), strategy, family)
    engine = open_engine(device, scheduler)
    store = TrialStore()
    try:
        tuner = Tuner(engine, store, options)
        (found,) = tuner.run([Job(kernel, default_batch(engine.facts.limits) if batch is None else batch)], progress or (lambda each: None))
    finally:
        engine.close()
        store.close()
    PLANNER.forget()
    if tuner.stop.is_set():
        raise KeyboardInterrupt
    if isinstance(found, KsgenError):
        raise found
    return found
