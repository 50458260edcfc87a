"""Number of candidates that each strategy of the tuner needs, on the selected device.

    # measures every candidate of a bounded space, for 12 kernels
    python benchmarks/tuning_strategies.py record tables.json
    # runs strategies on recorded tables: prints Markdown
    python benchmarks/tuning_strategies.py replay tables.json

On two idle cores, recording takes about five minutes and replaying takes one. `record` continues after an interruption.
The last column is Optuna's sampler (pip install optuna), on the same tables.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click

from ksgen.build.request import Binary
from ksgen.families import Limits, family_for, family_named
from ksgen.launch.choice import limits_from
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning.engine import LocalEngine
from ksgen.tuning.job import Candidate, Job, Runs
from ksgen.tuning.model import Machine, predict_us
from ksgen.tuning.pool import Pool, list_space, make_pool, supported_families
from ksgen.tuning.strategies import STRATEGIES, Listed, Strategy
from ksgen.tuning.trials import Trial

PATTERNS = (
    (1, 192, 48, 2), (2, 48, 192, 1), (6, 64, 64, 1), (1, 128, 128, 3), (1, 64, 64, 16), (4, 64, 256, 4),
    (1, 96, 96, 6), (16, 48, 48, 4), (1, 256, 64, 1), (3, 40, 72, 5), (1, 48, 48, 64), (8, 128, 32, 2),
)  # fmt: skip
LAYOUTS = ("bsf", "bsl")  # alternating over the patterns
GROUP = 8  # candidates that are measured alternately
RUNS = Runs(seconds=0.5)
MOST_UNROLLED = 512  # multiply-adds per stage and thread; compilers for processors are slow with more
WITHIN = 0.02
SEEDS = 9

Table = dict[Candidate, float | None]


@click.group()
def main() -> None:
    """Record exhaustive tables, and replay strategies on them."""


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--batch", default=392, show_default=True)
@click.option("--candidates", default=48, show_default=True, help="Candidates per kernel, including the default.")
@click.option("--kernels", default=len(PATTERNS), show_default=True)
@click.option("--precision", default="float32", show_default=True)
@click.option("--device")
def record(file: Path, batch: int, candidates: int, kernels: int, precision: str, device: str | None) -> None:
    """Measure every candidate of a bounded space."""
    engine = LocalEngine(device)
    facts = engine.facts
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"device": facts.name, "tables": []}
    if content["device"] != facts.name:
        engine.close()
        raise click.ClickException(
            f"{file} holds tables of {content['device']}, and this is {facts.name}; name another file"
        )
    limits = limits_from(facts.kind, facts.target, facts.limits)
    for number, shape in enumerate(PATTERNS[:kernels]):
        job = Job(KernelSpec(Pattern(*shape), precision, LAYOUTS[number % 2]), batch)
        if str(job) in {table["job"] for table in content["tables"]}:
            continue
        families = supported_families(job, limits)
        ceilings = {name: engine.ceilings(precision, _operand(name, job, limits)) for name in families}
        machine = Machine(facts.target, limits, facts.limits.multiprocessors, ceilings)
        chosen = _bounded(job, machine, candidates)
        times = _measured(engine, job, chosen)
        content["tables"].append(_as_json(job, machine, times))
        file.write_text(json.dumps(content, indent=1))
        fastest = min(us for us in times.values() if us)
        print(
            f"{job}: {len(times)} candidates, default {times[chosen[0]] or 0:.0f} us, fastest {fastest:.0f} us",
            file=sys.stderr,
        )
    engine.close()


def _operand(name: str, job: Job, limits: Any) -> str | None:
    family = family_named(name)
    operand: str | None = family.variables(job.kernel, family.default(job.kernel, limits)).get("operand")
    return operand


def _bounded(job: Job, machine: Machine, count: int) -> list[Candidate]:
    """The default, then a random sample of the space, the same at every call."""
    family = family_for(job.kernel, machine.limits)
    default = Candidate(family.name, family.default(job.kernel, machine.limits))
    rest = [
        each
        for each in list_space(job, machine)
        if each != default and (not machine.limits.is_cpu or _unrolled(each) <= MOST_UNROLLED)
    ]
    return [default, *random.Random(str(job)).sample(rest, min(count - 1, len(rest)))]


def _unrolled(candidate: Candidate) -> int:
    constants = candidate.constants
    return int(constants.thread_batch * constants.thread_out * constants.tile_in)


def _measured(engine: LocalEngine, job: Job, candidates: Sequence[Candidate]) -> Table:
    built = {
        each: future.result() for each, future in [(each, engine.compile(job.kernel, each)) for each in candidates]
    }
    entries = [(each, binary) for each, binary in built.items() if isinstance(binary, Binary)]
    times: Table = dict.fromkeys(candidates)
    for first in range(0, len(entries), GROUP):
        group = entries[first : first + GROUP]
        for (candidate, _), outcome in zip(group, engine.measure(job, group, RUNS).result(), strict=True):
            times[candidate] = outcome.median_us if outcome.microseconds else None
    return times


def _as_json(job: Job, machine: Machine, times: Table) -> dict[str, Any]:
    kernel = job.kernel
    return {
        "job": str(job), "pattern": kernel.pattern.shape, "precision": kernel.precision, "layout": kernel.layout,
        "batch": job.batch,
        "target": machine.target, "multiprocessors": machine.multiprocessors, "limits": asdict(machine.limits),
        "ceilings": {name: asdict(ceilings) for name, ceilings in machine.ceilings.items()},
        "candidates": [{"family": each.family, "constants": asdict(each.constants), "us": us} for each,
            us in times.items()],
    }  # fmt: skip


def _from_json(row: dict[str, Any]) -> tuple[Job, Machine, Table]:
    job = Job(KernelSpec(Pattern(*row["pattern"]), row["precision"], row["layout"]), row["batch"])
    ceilings = {name: Ceilings(**values) for name, values in row["ceilings"].items()}
    machine = Machine(row["target"], Limits(**row["limits"]), row["multiprocessors"], ceilings)
    times = {
        Candidate((family := family_named(each["family"])).name, family.constants(each["constants"])): each["us"]
        for each in row["candidates"]
    }
    return job, machine, times


@main.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.option("--within", default=WITHIN, show_default=True)
def replay(file: Path, within: float) -> None:
    """Print how many candidates each strategy needs to come within `--within` of the fastest."""
    content = json.loads(file.read_text())
    tables = [_from_json(row) for row in content["tables"]]
    rows = []
    for job, machine, times in tables:
        others = [trial for other, its, table in tables if other != job for trial in _trials(other, its, table)]
        rows.append(
            (job, len(times), _needs(_pool(job, machine, times), _pool(job, machine, times, others), times, within))
        )
    names = list(rows[0][2])
    print(
        f"Candidates that were tried until one was within {within:.0%} of the fastest, on {content['device']}; -: the "
        "strategy ended before.\n"
    )
    _print_row("kernel", "candidates", *names)
    _print_row(*["---"] * (2 + len(names)))
    for job, count, needs in rows:
        _print_row(f"{job.kernel.pattern} {job.kernel.layout}", count, *(_shown(needs[name]) for name in names))
    medians = (median(needs[name] or 10**6 for _, _, needs in rows) for name in names)
    _print_row("**median**", "", *map(_shown, medians))


def _print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _shown(count: float | None) -> str:
    return "-" if count is None or count >= 10**6 else f"{count:g}"


def _trials(job: Job, machine: Machine, times: Table) -> list[Trial]:
    return [
        Trial(
            job.kernel, job.batch, "", each.family, each.constants, "", "measured", median_us=us,
            predicted_us=predict_us(machine, family_named(each.family), job.kernel, each.constants, job.batch),
        )
        for each, us in times.items()
    ]  # fmt: skip


def _pool(job: Job, machine: Machine, times: Table, others: Sequence[Trial] = ()) -> Pool:
    default = next(iter(times))
    return make_pool(job, machine, times, [default], random.Random(0).sample(list(others), len(others)))


def _needs(cold: Pool, warm: Pool, times: Table, within: float) -> dict[str, float | None]:
    goal = (1 + within) * min(us for us in times.values() if us)

    def need(strategy: Strategy, pool: Pool) -> int | None:
        order = _order(strategy, [times[candidate] for candidate in pool.candidates])
        return next(
            (place for place, index in enumerate(order, 1) if (times[pool.candidates[index]] or goal + 1) <= goal), None
        )

    def typical(make: Callable[[int], Strategy]) -> float:
        return median(need(make(seed), cold) or len(cold) for seed in range(SEEDS))

    found: dict[str, float | None] = {
        "random": typical(lambda seed: _shuffled(cold, seed)),
        "exhaustive, in the model's order": need(STRATEGIES["exhaustive"](cold), cold),
        "model": need(STRATEGIES["model"](cold), cold),
        "model, after the others": need(STRATEGIES["model"](warm), warm),
        "tried by it in all": len(
            _order(STRATEGIES["model"](warm), [times[candidate] for candidate in warm.candidates])
        ),
    }
    try:
        import optuna
    except ImportError:
        return found
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return found | {"Optuna's TPE": typical(lambda seed: _Tpe(optuna, cold, seed))}


def _order(strategy: Strategy, times: Sequence[float | None]) -> list[int]:
    """Order in which a strategy visits the candidates."""
    order: list[int] = []
    while (index := strategy.ask()) is not None:
        order.append(index)
        strategy.tell(index, times[index])
    return order


def _shuffled(pool: Pool, seed: int) -> Strategy:
    order = list(range(1, len(pool)))
    random.Random(seed).shuffle(order)
    return Listed([0, *order])


class _Tpe:
    """Optuna's default sampler over the constants of one family, starting with the default.

    Its proposals map to the nearest candidate in the table.
    """

    def __init__(self, optuna: Any, pool: Pool, seed: int) -> None:
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True))
        self._rows = [vars(candidate.constants) for candidate in pool.candidates]
        values = {name: sorted({row[name] for row in self._rows}) for name in self._rows[0]}
        self._choices = {name: optuna.distributions.CategoricalDistribution(found) for name, found in values.items()}
        self._asked: dict[int, Any] = {}

    def ask(self) -> int | None:
        left = [index for index in range(len(self._rows)) if index not in self._asked]
        if not left:
            return None
        if not self._asked:
            self._study.enqueue_trial(self._rows[0])
        trial = self._study.ask(self._choices)
        index = min(left, key=lambda each: sum(self._rows[each][name] != value for name, value in trial.params.items()))
        self._asked[index] = trial
        return index

    def tell(self, index: int, us: float | None) -> None:
        self._study.tell(self._asked[index], us, state=None if us else self._failed)

    def left(self) -> int:
        return len(self._rows) - len(self._asked)


if __name__ == "__main__":
    main()
