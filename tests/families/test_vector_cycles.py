"""Tests of the processor families' cost model, against times measured on a processor, and term by term."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ksgen.families import Limits, families_for, family_named
from ksgen.families.cpu_gradient.vectors import VectorGradientTiling
from ksgen.families.vector.cycles import Tile, conflicts, multiply_cycles
from ksgen.families.vector.shape import VectorConstants, VectorTiling
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning.job import Job
from ksgen.tuning.model import Machine, predict_us, rank_correlation
from ksgen.tuning.pool import list_space, make_pool, supported_families

LIMITS = Limits(256 * 1024, 8192, 0, is_cpu=True, async_copies=False, vector_bytes=64, multiprocessors=2)
CEILINGS = Ceilings(1e10, 2e11)
# Least microseconds of random candidates and, last, the default, in turn, on two cores with registers of 64 bytes.
RECORDED = json.loads((Path(__file__).parent / "recorded_vector_times.json").read_text())
KERNEL = KernelSpec(Pattern(1, 192, 48, 2))
OUTPUTS = VectorConstants("outputs", 16, 6, 4, 48, 1, 0, 0)
BATCHWISE = VectorConstants("batch", 16, 8, 3, 384, 1, 1, 0)
BATCH = 384 * 16
# Microseconds of a product and of its weights' gradient, of 1568 rows in batch-size-first: medians of calls in turn, on
# one core with registers of 64 bytes.
EXCHANGED = {
    "16,64,64,1": (1525, 2706), "l.i@16,64,64,1": (2445, 5641), "l1:8.i.l2@16,64,64,1": (2680, 5136),
    "16,64,64,1@k.i": (2398, 4906), "16,64,64,1@k1:8.i.k2": (2456, 4904), "1,64,64,16": (1729, 3266),
    "j.l@1,64,64,16": (2915, 7891), "1,64,64,16@j.k": (2476, 5649), "64,16,16,1": (1081, 2554),
    "l.i@64,16,16,1": (2908, 4775), "64,16,16,1@k.i": (1584, 4378),
}  # fmt: skip
ONE_CORE, ONE_CORES = replace(LIMITS, multiprocessors=1), Ceilings(1.56e10, 1.75e11)


def correlation(recorded: dict) -> float:
    kernel = KernelSpec(Pattern(*recorded["pattern"]), layout=recorded["layout"], job=recorded["job"])
    family = family_named(recorded["family"])
    machine = Machine("a processor", LIMITS, 2, {family.name: CEILINGS})
    names = recorded["constants"]
    predicted = [
        predict_us(
            machine, family, kernel, family.constants(dict(zip(names, row[:-1], strict=True))), recorded["batch"]
        )
        for row in recorded["rows"]
    ]
    return rank_correlation(predicted, [row[-1] for row in recorded["rows"]])


def test_the_model_orders_candidates_as_a_processor_did() -> None:
    found = [correlation(each) for each in RECORDED]
    assert median(found) > 0.7
    assert min(found) > 0.3


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["multiply", "gradient"])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_a_search_chooses_among_a_few_hundred(layout: str, job: str) -> None:
    for shape in ((1, 192, 48, 2), (6, 64, 64, 1), (1, 64, 64, 64)):
        kernel = KernelSpec(Pattern(*shape), layout=layout, job=job)
        wanted = Job(kernel, BATCH)
        (name,) = supported_families(wanted, LIMITS)
        assert name == ("vector" if job == "multiply" else "cpu_gradient")
        assert len(list(families_for(kernel, LIMITS, BATCH))) > 1  # others serve too, and are never better
        machine = Machine("a processor", LIMITS, 2, {name: CEILINGS})
        pool = make_pool(wanted, machine, list_space(wanted, machine))
        assert 300 < len(pool) < 2000
        assert pool.predicted_us[0] >= CEILINGS.floor_s(kernel, BATCH) * 1e6
        assert pool.predicted_us[-1] > 3.8 * pool.predicted_us[0]  # so that there is something to prune


def cycles(constants: VectorConstants, kernel: KernelSpec = KERNEL, batch: int = BATCH) -> float:
    return multiply_cycles(VectorTiling(kernel, constants), batch)


def test_tiles_cost_what_they_multiply_load_spill_and_wait_for() -> None:
    assert Tile(6, 4, 32).step == 14.0  # 12 cycles of multiply-adds, of which loads leave 9, and 5 of loads
    assert Tile(24, 1, 32).step > 1.5 * Tile(6, 4, 32).step  # as many sums, more loads
    assert Tile(6, 4, 16).step > 2 * Tile(6, 4, 32).step  # half of the sums do not fit
    assert Tile(1, 1, 32).step == 4  # nothing to do until the sum is there
    assert Tile(6, 4, 32, shuffles=6).step > Tile(6, 4, 32).step


def test_padding_costs() -> None:
    assert cycles(replace(OUTPUTS, height=4, width=7, block=48)) < cycles(
        replace(OUTPUTS, height=1, width=40, block=48)
    )
    # a tile has 48 entries
    assert cycles(replace(BATCHWISE, width=3, block=384)) * 1.5 < cycles(replace(BATCHWISE, width=3, block=32))


def test_rows_far_apart_in_place_miss() -> None:
    far = KernelSpec(Pattern(1, 64, 64, 64))  # rows of 16 KiB
    assert conflicts(VectorTiling(far, replace(OUTPUTS, height=8, width=3, block=384)))
    assert not conflicts(VectorTiling(far, replace(OUTPUTS, height=8, width=3, block=384, panel=1)))
    assert not conflicts(VectorTiling(KERNEL, OUTPUTS))
    in_place = replace(OUTPUTS, height=8, width=3, block=384)
    assert cycles(in_place, far) > 1.5 * cycles(replace(in_place, block=48, panel=1), far)


def test_turning_scattering_and_ragged_ends_cost() -> None:
    last = replace(KERNEL, layout="bsl")
    assert cycles(BATCHWISE) > 1.2 * cycles(BATCHWISE, last)  # rows become columns and rows again
    assert cycles(replace(OUTPUTS, panel=1), last) > 2 * cycles(replace(OUTPUTS, panel=1))  # element by element
    assert cycles(replace(BATCHWISE, block=384), last) < cycles(replace(BATCHWISE, block=352), last)


def test_exchanged_features_cost_elements_and_lines_of_their_own() -> None:
    def taken(text: str, constants: VectorConstants, layout: str = "bsf") -> float:
        return cycles(constants, KernelSpec(Pattern.parse(text), "float32", layout))

    for text in ("l.i@16,384,384,1", "16,384,384,1@k.i"):
        natural = str(Pattern.parse(text).natural)
        assert taken(text, BATCHWISE) > 1.4 * taken(natural, BATCHWISE)  # one by one, in lines of their own
        assert taken(text, replace(OUTPUTS, panel=1)) > 1.5 * taken(natural, replace(OUTPUTS, panel=1))
        assert taken(text, BATCHWISE, "bsl") == taken(natural, BATCHWISE, "bsl")  # rows of their own anyway
    # whole lines of neighbours are moved like features in order; with half lines, the other halves are moved too
    plain, lines, halves = (
        taken(f"{load}16,64,64,1", BATCHWISE.changed(lanes=8)) for load in ("", "l1:4.i.l2@", "l1:8.i.l2@")
    )
    assert plain == lines < halves
    # planes with several blocks on the diagonal have whole vectors of outputs, or of inputs
    for text in ("16,64,64,1@k.i", "l.i@16,64,64,1"):
        assert taken(text, BATCHWISE) == taken("16,64,64,1", BATCHWISE)
    copied = (taken(f"{load}16,64,64,1", replace(OUTPUTS, panel=1)) for load in ("", "l1:4.i.l2@", "l1:8.i.l2@"))
    plain, vectors, single = copied  # along the outputs
    assert plain == vectors < single


@pytest.mark.parametrize("text", [text for text in EXCHANGED if "@" in text])
def test_an_exchange_takes_about_as_many_times_as_long_as_on_a_processor(text: str) -> None:
    natural = str(Pattern.parse(text).natural)
    for number, (name, job) in enumerate((("vector", "multiply"), ("cpu_gradient", "gradient"))):
        found = []
        for each in (text, natural):
            kernel, family = KernelSpec(Pattern.parse(each), job=job), family_named(name)
            constants = family.default(kernel, ONE_CORE, 1568)
            found.append(
                predict_us(Machine("a processor", ONE_CORE, 1, {name: ONE_CORES}), family, kernel, constants, 1568)
            )
        measured = EXCHANGED[text][number] / EXCHANGED[natural][number]
        assert 0.5 < found[0] / found[1] / measured < 2


def test_exchanged_features_of_a_gradient_are_copied_one_by_one_or_as_vectors() -> None:
    def taken(text: str, layout: str = "bsf", **changes: Any) -> float:
        kernel = KernelSpec(Pattern.parse(text), layout=layout, job="gradient")
        constants = replace(family_named("cpu_gradient").default(kernel, LIMITS, BATCH), **changes)
        return VectorGradientTiling(kernel, constants).cycles(BATCH)

    plain = taken("16,64,64,1")
    assert taken("l1:4.i.l2@16,64,64,1") == plain  # whole lines of neighbours
    assert taken("l1:8.i.l2@16,64,64,1") < taken("l.i@16,64,64,1")  # half lines, and lines of one each
    assert 1.5 * plain < taken("l1:8.i.l2@16,64,64,1")
    assert 1.5 * plain < taken("16,64,64,1@k1:4.i.k2")  # outputs are always copied one by one
    assert taken("l.i@16,64,64,1@k.i") > 1.5 * taken("16,64,64,1@k.i")
    assert taken("l.i@16,64,64,1@k.i", "bsl") == taken("16,64,64,1", "bsl")
    batchwise = {"along": "batch", "height": 4, "width": 4}  # transposed
    assert taken("l1:4.i.l2@16,64,64,1", **batchwise) == taken("16,64,64,1", **batchwise)
    assert taken("l.i@16,64,64,1", **batchwise) > taken("16,64,64,1", **batchwise)
    assert taken("16,64,64,1@k.i", **batchwise) > taken("16,64,64,1", **batchwise)


def test_half_idle_cores_and_many_small_tasks_cost() -> None:
    family, machine = family_named("vector"), Machine("a processor", LIMITS, 2, {"vector": CEILINGS})
    one, two = (predict_us(machine, family, KERNEL, replace(OUTPUTS, block=48, parts=parts), 48) for parts in (1, 2))
    assert one > 1.2 * two
    assert cycles(replace(OUTPUTS, parts=8)) > cycles(OUTPUTS)


def test_a_chain_takes_as_long_as_its_factors() -> None:
    family = family_named("vector")
    kernel = KernelSpec((Pattern(2, 48, 192, 1), Pattern(1, 192, 48, 2)))
    constants = family.default(kernel, LIMITS, BATCH)
    alone = family_named("vector")
    parts = [KernelSpec(pattern) for pattern in kernel.factors]
    assert family.work(kernel, constants, BATCH).cycles == sum(
        alone.work(each, own, BATCH).cycles for each, own in zip(parts, constants.parsed, strict=True)
    )
