"""Invented results for tests of reports: every contender's time is a rule of its pattern. Nothing is measured."""

from ksgen.bench.roster import COMPARISONS, OTHERS, OURS
from ksgen.bench.rows import COLUMNS, OK, ResultRow, absent
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, KernelSpec

SPEEDS = {
    "bmm": 1.0,
    "einsum": 0.8,
    "bsr": 0.5,
    "dense": 0.3,
    "sparse": 0.1,
    "strided": 1.5,
    "three_passes": 1.2,
    "densified": 1.1,
    "pieces": 1.15,
    "onednn": 0.4,
    "grouped": 0.95,
    "semi_structured": 0.35,
    "compiled": 0.9,
    "scipy": 0.05,
    "lazylinop": 0.02,
    "torch_structured": 0.98,
    "nvmath": 0.15,
}


def row(pattern: str = "1,48,48,2", implementation: str = OURS, **values: object) -> ResultRow:
    """A row of an accurate result. Arguments replace its fields."""
    usual: dict[str, object] = {
        "pattern": pattern, "precision": "float32", "layout": "bsl", "batch": 25088, "implementation": implementation,
        "arithmetic": "float32", "status": OK, "measurements": 10, "runs": 10, "median_us": 100.0, "error": 1e-7,
        "tolerance": 1e-6,
        "checked": 48, "device": "Abacus", "runtime": "driver", "date": "2026-01-02", "commit": "c0ffee",
    }  # fmt: skip
    return ResultRow(**{name: values.get(name, usual.get(name, absent(name))) for name in COLUMNS})  # type: ignore[arg-type]


def rows_of(patterns: list[Pattern], precisions: tuple[str, ...] = ("float32", "float16")) -> list[ResultRow]:
    """A whole file of results: our gain grows with (b+c)/(bc), and with d in batch-size-first."""
    found = []
    for pattern in patterns:
        for precision in precisions:
            for layout in LAYOUTS:
                kernel = KernelSpec(pattern, COMPARISONS[precision].baselines, layout)
                floor = max(kernel.bytes(25088) / 4e6, kernel.flops(25088) / 6e7)
                bmm = floor * (1.3 + 40 * pattern.rewrite_ratio * (pattern.d > 1))
                gain = 0.8 + 30 * pattern.rewrite_ratio + (0.02 * pattern.d if layout == "bsf" else 0)
                common = {"precision": precision, "layout": layout, "floor_us": floor}
                ours = max(bmm / gain, 1.05 * floor)
                found.append(
                    row(
                        str(pattern),
                        OURS,
                        variant="default",
                        median_us=ours,
                        share_of_floor=floor / ours,
                        joule=ours * 4e-4,
                        **common,
                    )
                )
                for name in OTHERS:
                    if name == "strided" and layout == "bsf" and pattern.d > 1:
                        found.append(
                            row(
                                str(pattern),
                                name,
                                status="unsupported",
                                reason="no view",
                                median_us=None,
                                error=None,
                                **common,
                            )
                        )
                        continue
                    us = bmm / SPEEDS[name] * (pattern.a * pattern.d if name == "dense" else 1)
                    found.append(
                        row(str(pattern), name, median_us=us, share_of_floor=floor / us, joule=us * 5e-4, **common)
                    )
                found.append(
                    row(str(pattern), "rewriting", median_us=bmm - floor, error=None, tolerance=None, **common)
                )
    return found
