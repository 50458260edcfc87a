"""The search for the fastest constants of a kernel on a device: `ksgen.tune`. The command `ksgen tune` does the
same."""

from collections.abc import Callable, Sequence
from contextlib import closing

from ksgen.errors import KsgenError, SpecError
from ksgen.pattern import Chain, Patterns
from ksgen.spec import Activation, ByteStorage, Epilogue, Job, Layout, PrecisionName, WeightStorage
from ksgen.spec.kernel import is_layer, layer_launch
from ksgen.spec.storage import SAME, Same
from ksgen.tuning.search import Progress, Tuned
from ksgen.tuning.strategies import StrategyName
from ksgen.values import excerpt

__all__ = ["Progress", "Tuned", "tune"]


def tune(
    pattern: Patterns | Sequence[Chain], *, precision: PrecisionName = "float32", layout: Layout = "bsf",
    epilogue: Epilogue | None = None, batch: int | None = None, budget: str | int | None = None,
    strategy: StrategyName = "model", family: str | None = None,
    device: str | None = None, scheduler: str | None = None, progress: Callable[[Progress], None] | None = None,
    job: Job = "multiply", weights: WeightStorage | Same = SAME, inputs: ByteStorage | Same = SAME,
    between: Activation = "none", out_layout: Layout | None = None,
) -> Tuned:  # fmt: skip
    """Find the fastest constants of one kernel, and save them in the user's wisdom.

    Launchers of this process use them immediately. An interrupt saves the best result so far, and then raises
    `KeyboardInterrupt`.

    Args:
        pattern: A pattern in any form, such as "1,192,48,2". A `Chain` or a list of patterns means one launch of all
            factors; a list of `Chain`s means one launch of a group. If the factors are tuned separately too, launchers
            choose between both by their measured times.
        precision: Arithmetic, such as "float16" or "tf32x3".
        layout: Layout of x: "bsf" or "bsl".
        epilogue: `ksgen.spec.Epilogue` with bias, activation and residual. None: none of them.
        batch: Batch size. None: 25088 on a GPU and 1568 on a processor.
        budget: Time, such as "60s", or number of candidates. None: until the strategy ends. On a processor, "model"
            then ends after at most 13 candidates.
        strategy: Order of the candidates: "model" (by the cost model), "random" or "exhaustive".
        family: Name of the only family to search. None: all that are made for the kernel, the batch and the device.
        device: Device, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
        scheduler: Address of a Dask scheduler whose workers measure. None: this machine.
        progress: Function that is called after each candidate, in a separate thread.
        job: "multiply", or "gradient" for the kernel of `Launcher.gradient`.
        weights: Storage of the weights: "same", "int8", "e4m3", "e5m2" or "bfloat16".
        inputs: Storage of x: "same", "int8", "e4m3" or "e5m2".
        between: Activation between the factors of a chain.
        out_layout: Layout of y, if it differs from that of x.

    Returns:
        `Tuned`: the best trial, the default's trial, and the number of candidates.

    Raises:
        PatternError: The pattern or the chain is invalid.
        SpecError: An option of the kernel is unknown, or two options exclude each other.
        ConstantsError: The family is unknown.
        KsgenError: `budget` or `strategy` is not accepted, the family does not support the kernel, or wisdom cannot be
            written.
        DeviceError: The device does not exist.
        ToolchainError: No compiler is available.

    Examples:
        >>> import ksgen
        >>> found = ksgen.tune("1,5,2,2", batch=4, budget=1)
        >>> found.looked, found.best.family
        (1, 'vector')
    """
    from ksgen.devices.base import default_batch
    from ksgen.launch.planner import PLANNER
    from ksgen.tuning.job import Job, chains_of
    from ksgen.tuning.trials import TrialStore
    from ksgen.tuning.tuner import SearchOptions, Tuner, open_engine, parse_budget

    epilogue = Epilogue() if epilogue is None else epilogue
    chains = chains_of(pattern)
    if is_layer(chains, layout, out_layout):
        if job != "multiply":
            raise SpecError(f"job={excerpt(job)} of a chain; accepted: multiply")
        if len(chains) > 1 and out_layout:
            raise SpecError(f"out_layout={excerpt(out_layout)} of a group of chains; accepted: out_layout of one chain")
    kernel = layer_launch(
        chains, precision, layout, epilogue, job=job, between=between, out_layout=out_layout, weights=weights,
        inputs=inputs,
    )  # fmt: skip
    options = SearchOptions(parse_budget(budget), strategy, family)
    with closing(open_engine(device, scheduler)) as engine, closing(TrialStore()) as store:
        tuner = Tuner(engine, store, options)
        rows = default_batch(engine.facts.limits) if batch is None else batch
        (found,) = tuner.run([Job(kernel, rows)], progress)
    PLANNER.forget()
    if tuner.stop.is_set():
        raise KeyboardInterrupt
    if isinstance(found, KsgenError):
        raise found
    return found
