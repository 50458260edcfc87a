"""The search for the fastest constants of a kernel on a device: `ksgen.tune`. The command `ksgen tune` does the
same."""

from collections.abc import Callable, Sequence

from ksgen.errors import KsgenError, SpecError
from ksgen.pattern import Chain, Patterns
from ksgen.spec import Activation, ByteStorage, Epilogue, Job, KernelSpec, Layout, PrecisionName, WeightStorage
from ksgen.spec.kernel import is_layer, layer_launch
from ksgen.spec.storage import SAME, Same
from ksgen.tuning.search import Progress, Tuned
from ksgen.values import excerpt

__all__ = ["Progress", "Tuned", "tune"]


def tune(
    pattern: Patterns | Sequence[Chain], *, precision: PrecisionName = "float32", layout: Layout = "bsf", epilogue: Epilogue | None = None,
    batch: int | None = None, budget: str | int | None = None, strategy: str = "model", family: str | None = None,
    device: str | None = None, scheduler: str | None = None, progress: Callable[[Progress], None] | None = None,
    job: Job = "multiply", weights: WeightStorage | Same = SAME, inputs: ByteStorage | Same = SAME,
    between: Activation = "none", out_layout: Layout | None = None,
) -> Tuned:  # fmt: skip
    """Find the fastest constants of one kernel, and put them into the user's wisdom. Launchers of this process use them
    at once.

    `pattern` may have any form, such as "1,192,48,2". Of a `Chain`: of all its factors in one launch, with the
    activation `between` them and the layout of y that `out_layout` names. Of a list of chains: of a group, all of them
    in one launch. Once each factor was tuned too, with the activation that follows it, the way that was measured to be
    faster is taken. `job` is "multiply", or "gradient" (of the weights). `weights` says how they are stored, such as
    "int8", and `inputs` how x is. `batch` is 25088 on a GPU and 1568 on a processor unless given. `budget` is a time
    such as "60s", or a number of candidates. `progress` is called after each candidate, in a thread of its own. An
    interrupt saves the best so far, and then continues as `KeyboardInterrupt`.
    """
    from ksgen.devices.base import default_batch
    from ksgen.launch.planner import PLANNER
    from ksgen.tuning.job import Job
    from ksgen.tuning.trials import TrialStore
    from ksgen.tuning.tuner import SearchOptions, Tuner, open_engine, parse_budget

    epilogue = epilogue or Epilogue()
    chains = _chains(pattern)
    if is_layer(chains, layout, out_layout):
        if job != "multiply":
            raise SpecError(f"job={excerpt(job)} of a chain; accepted: multiply")
        if len(chains) > 1 and out_layout:
            raise SpecError(f"out_layout={excerpt(out_layout)} of a group of chains; accepted: of one chain")
        kernel = layer_launch(
            chains, precision, layout, epilogue, between=between, out_layout=out_layout, weights=weights, inputs=inputs
        )  # fmt: skip
    else:
        kernel = KernelSpec(chains[0][0], precision, layout, epilogue, job=job, between=between, weights=weights, inputs=inputs)
    options = SearchOptions(parse_budget(budget), strategy, family)
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


def _chains(given: object) -> tuple[Chain, ...]:
    """Chains of a layer or a group."""
    if isinstance(given, list | tuple) and given and all(isinstance(each, Chain) for each in given):
        return tuple(given)
    return (Chain.read(given),)
