"""A section of a report is one job of the last template's version."""

from dataclasses import replace

from ksgen.tuning.report import sections_of
from tests.support.tuning_trials import KERNELS, some_trials


def test_a_section_is_one_job_of_the_last_template_version() -> None:
    trials = some_trials()
    stale = [
        replace(each, template="ffffffff", median_us=1.0, state="measured", measured_at="2026-11-20")
        for each in trials[:3]
    ]
    of_old_driver = replace(trials[4], driver="1", median_us=1.0, state="measured", measured_at="2026-11-20")
    present = [replace(each, measured_at="2026-11-21") for each in trials]
    first, second = sections_of([*stale, *present, of_old_driver])
    assert (first.kernel, second.kernel) == tuple(KERNELS)
    assert first.left_out == 4
    assert first.winner == min(
        (each for each in present if each.kernel == KERNELS[0] and each.median_us), key=lambda each: each.median_us or 0
    )
    assert list(first.by_family) == ["mma", "wgmma", "simt"]
    assert first.sentences == [
        "1.87 times as fast as the first candidate; the median of 20 blocks, uncertain by 2.1%.",
        "39% of the floor, which is 9 µs.",
        "36 candidates: 30 measured, 6 pruned.",
        "4 trials of earlier templates or drivers left out.",
    ]
    assert first.summary == ("23.1", "39%", "1.87", "36", f"mma: {first.winner.constants}")
