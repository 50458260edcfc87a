"""Barriers that never complete, or that nobody initialised."""

from tests.ptx.mistakes.mistake import Mistake

BARRIERS = [
    Mistake(
        "no arrival at empty",
        "ring",
        "mbarrier_arrive(empty + 8 * s);",
        "",
        "deadlock",
        r"threads 0 wait for mbarrier_wait at line \d+ called from \d+ \(phase 0: 32 of 32 arrivals and 0 bytes are "
        r"missing\)",
    ),
    Mistake(
        "too many bytes expected",
        "ring",
        "4 * ROW);\n            copy",
        "4 * ROW + 16);\n            copy",
        "deadlock",
        "threads 32-63 wait for mbarrier_wait .*0 of 1 arrivals and 16 bytes are missing",
    ),
    Mistake(
        "a count of half the arrivals",
        "ring",
        "mbarrier_init(empty + 8 * s, 32);",
        "mbarrier_init(empty + 8 * s, 16);",
        "deadlock",
        "16 of 16 arrivals",
    ),
    Mistake(
        "never initialised",
        "ring",
        "mbarrier_init(empty + 8 * s, 32);",
        "",
        "mbarrier",
        "nothing was initialised at byte",
    ),
    Mistake(
        "initialised twice",
        "ring",
        "mbarrier_init(empty + 8 * s, 32);",
        "mbarrier_init(full, 1);",
        "mbarrier",
        "holds a barrier already",
    ),
    Mistake(
        "written over",
        "ring",
        "    __syncthreads();\n",
        "    __syncthreads();\n    stages[STAGES * ROW] = 0;\n",
        "mbarrier",
        "the barrier at byte 256 .* was written over",
    ),
    Mistake(
        "one barrier in two places of the ring",
        "ring",
        "row % STAGES;\n            if",
        "0;\n            if",
        "mbarrier",
        "more arrivals",
    ),
]
