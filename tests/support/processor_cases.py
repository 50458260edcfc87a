"""Small cases of the processors' families, on any OpenCL device, whether it shares the host's memory or not: run and
compared.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np

from ksgen.devices.base import Device, uploaded
from ksgen.families import family_named
from ksgen.families.chains import factor_kernels
from ksgen.families.signature import each_chains, features_of, pitches_of, weights_of
from ksgen.launch import planner
from ksgen.launch.choice import Choice, choice_by_name, limits_of
from ksgen.launch.planner import PLANNER
from ksgen.measure.verify import Bench, compare, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from tests.support.host_launches import is_right
from tests.support.host_memory import rows_in, spread
from tests.support.products import arrays_of, truth_of


@dataclass(frozen=True)
class Case:
    pattern: tuple[int, int, int, int]
    precision: str = "float32"
    layout: str = "bsf"
    epilogue: tuple[bool, str, bool] = (False, "none", False)
    batches: tuple[int, ...] = (7,)
    family: str = "simt"
    constants: dict[str, Any] | None = None  # None: the family's default
    before: tuple[tuple[int, int, int, int], ...] = ()  # of a chain
    others: tuple[tuple[tuple[int, int, int, int], ...], ...] = ()  # of a group
    gaps: tuple[int, int, int] | None = None  # of slices: elements between rows of X, Y and the residual

    @property
    def job(self) -> str:
        return "gradient" if "gradient" in self.family else "multiply"

    def __str__(self) -> str:
        own = "_".join(map(str, (self.constants or {}).values())).replace(", ", "+").replace(" ", "-")
        shape = "_".join("x".join(map(str, each)) for each in (*self.before, self.pattern, *chain(*self.others)))
        gaps = "+".join(map(str, self.gaps or ()))
        return f"{self.family}_{shape}_{self.precision}_{self.layout}_{self.epilogue[1]}_{own}{gaps}"

    @property
    def kernel(self) -> KernelSpec:
        chains = [[Pattern(*each) for each in listed] for listed in ((*self.before, self.pattern), *self.others)]
        stride = "any" if self.gaps else "dense"
        return KernelSpec(chains, self.precision, self.layout, Epilogue(*self.epilogue), None, self.job, stride)

    def choice(self, kernel: KernelSpec, device: Device, batch: int) -> Choice:
        if self.constants is None:
            return choice_by_name(self.family, kernel, batch, limits_of(device))
        return Choice(self.family, family_named(self.family).constants(self.constants), "a test's")


def passes(device: Device, case: Case) -> list[bool]:
    """Per batch: whether the kernel agrees with float64, starting from workspaces full of NaN."""
    of_vectors = case.before or (case.gaps and case.family.startswith("vector"))
    passes_one = chain_passes if of_vectors else slices_pass if case.gaps else factor_passes
    return [passes_one(device, case, batch) for batch in case.batches]


def factor_passes(device: Device, case: Case, batch: int) -> bool:
    kernel = case.kernel
    problem = make_problem(kernel, batch)
    bench = Bench(device, problem)
    plan = PLANNER.plan_of(device, kernel, batch, case.choice(kernel, device, batch))
    return bench.check(plan, bench.pack(plan))[0] <= tolerance(kernel.precision, problem.terms)


def slices_pass(device: Device, case: Case, batch: int) -> bool:
    """Check slices. Inf and NaN, or elements that must not change, lie between rows."""
    from tests.support.kernels import multiply, on_device  # takes a second, which most cases need not wait for

    kernel = case.kernel
    problem, constants = make_problem(kernel, batch), case.choice(kernel, device, batch).constants
    # by its name there, which a test may change
    source = planner.render(kernel, constants, family=case.family, dialect=device.dialect)
    gaps = dict(zip(("x", "y", "residual"), case.gaps or (), strict=True))
    return compare(problem, multiply(problem, source, on_device(device), gaps=gaps))[0] <= tolerance(
        kernel.precision, problem.terms
    )


def chain_passes(device: Device, case: Case, batch: int) -> bool:
    """Check a chain, a group, or a kernel of slices."""
    kernel = case.kernel
    choice = case.choice(kernel, device, batch)
    whole = PLANNER.plan_of(device, kernel, batch, choice)
    arrays = arrays_of(kernel, batch)
    x_gap, y_gap, residual_gap = case.gaps or (0, 0, 0)
    gaps = {name: {"x": x_gap, "y": y_gap}.get(name[0], residual_gap) for name in features_of(kernel)}
    rows = {name: spread(arrays[name], gap) for name, gap in gaps.items()}
    at: dict[str, Any] = {name: uploaded(device, array) for name, array in (arrays | rows).items()}
    at |= {pitch: arrays[name].shape[1] + gaps[name] for name, pitch in pitches_of(kernel).items()}
    for name, number, factor, own in zip(
        weights_of(kernel), count(), factor_kernels(kernel), choice.constants.parsed, strict=False
    ):
        plan = PLANNER.plan_of(
            device, replace(factor, epilogue=Epilogue()), batch, Choice(case.family, own, "a test's")
        )
        at[name] = plan.pack(at[f"weights {number}"], None)
    at["workspace"] = uploaded(device, np.full(whole.workspace_bytes, 0xFF, np.uint8))
    whole.launch(whole.arguments(at), None)
    for number, name in enumerate(each_chains(kernel, "y")):
        device.download(got := np.empty_like(rows[name]), at[name])
        if not is_right(kernel, rows_in(got, arrays[name].shape, gaps[name]), truth_of(kernel, arrays, number)):
            return False
    return True


def tiles(
    along: str, lanes: int, height: int, width: int, block: int, parts: int, last: int, name: str = "panel"
) -> dict[str, Any]:
    """Constants of the vector families. They end with `panel` and `streaming` or, for a gradient, `pieces`."""
    found = {"along": along, "lanes": lanes, "height": height, "width": width, "block": block, "parts": parts}
    return found | {name: last} | ({"streaming": int(lanes == 8)} if name == "panel" else {})


def case_of(
    family: str, pattern: tuple[int, int, int, int], batch: int, constants: dict[str, Any], **more: Any
) -> Case:
    return Case(pattern, batches=(batch,), family=family, constants=constants, **more)


RELU, GELU = (True, "relu", True), (True, "gelu", True)  # epilogues
PAIRS = {"pairs": 1}
SLICES = [  # a row's end within a group, and rows of whole groups, which wide accesses move
    Case((2, 5, 9, 3), "float32", "bsf", RELU, gaps=(3, 5, 1)),
    Case((2, 4, 8, 2), "float16", "bsf", RELU, (8,), gaps=(8, 16, 24)),
    Case((2, 5, 9, 1), "float64", "bsl", RELU, gaps=(3, 5, 1)),
    Case((1, 8, 8, 1), "float32", "bsl", (False, "none", True), (8,), gaps=(8, 4, 12)),
]
of_vectors = partial(case_of, "vector")
VECTOR = [
    of_vectors((2, 5, 3, 2), 14, tiles("outputs", 8, 3, 2, 6, 2, 0), epilogue=RELU),
    of_vectors((2, 5, 3, 1), 14, tiles("outputs", 4, 3, 1, 6, 2, 1), precision="float16", layout="bsl"),
    of_vectors((1, 3, 2, 7), 7, tiles("outputs", 4, 2, 2, 6, 2, 1), precision="bfloat16"),
    of_vectors((2, 5, 3, 3), 14, tiles("batch", 8, 2, 1, 8, 1, 1), epilogue=GELU),
    of_vectors((2, 5, 3, 3), 14, tiles("batch", 4, 2, 2, 8, 3, 1), precision="bfloat16", layout="bsl"),
    of_vectors((2, 3, 3, 1), 5, tiles("batch", 2, 2, 2, 4, 1, 1), precision="float64"),
    # whose outputs wait
    of_vectors((1, 16, 5, 1), 9, tiles("outputs", 8, 3, 2, 6, 1, 0)),
    of_vectors((1, 6, 9, 1), 40, tiles("batch", 8, 2, 2, 32, 1, 1), layout="bsl"),
    of_vectors((2, 5, 3, 2), 14, tiles("outputs", 8, 3, 2, 6, 2, 1) | PAIRS, precision="bfloat16"),
    of_vectors((2, 5, 3, 3), 14, tiles("batch", 8, 2, 1, 8, 1, 1) | PAIRS, precision="bfloat16"),
    of_vectors((2, 5, 3, 3), 14, tiles("batch", 4, 2, 2, 8, 3, 1) | PAIRS, precision="bfloat16", layout="bsl"),
    of_vectors((2, 5, 3, 3), 5, tiles("outputs", 8, 2, 3, 6, 2, 1), epilogue=RELU),
    of_vectors((2, 5, 3, 6), 5, tiles("outputs", 8, 2, 3, 6, 2, 1) | PAIRS, precision="bfloat16"),
    of_vectors((2, 5, 3, 2), 14, tiles("outputs", 8, 3, 2, 6, 2, 0), epilogue=RELU, gaps=(3, 5, 1)),
    of_vectors((2, 5, 3, 3), 14, tiles("batch", 4, 2, 2, 8, 3, 1), precision="bfloat16", layout="bsl", gaps=(5, 2, 0)),
    # the last entry is copied
    of_vectors((2, 5, 3, 3), 9, tiles("outputs", 8, 2, 3, 4, 1, 0)),
]
FIRST, LAST = ((3, 5, 4, 2),), (1, 7, 10, 3)


def tiles_of_each(block: int, tiles: str, streaming: int) -> dict[str, Any]:
    return {"block": block, "tiles": tiles, "streaming": streaming}


ALONG_BATCH = tiles_of_each(12, "batch 4 2 1 1, batch 4 2 1 1", 0)
CHAIN = [
    of_vectors(LAST, 31, tiles_of_each(24, "outputs 8 3 2 0, batch 8 2 1 1", 1), epilogue=GELU, before=FIRST),
    of_vectors(LAST, 14, ALONG_BATCH, precision="float16", layout="bsl", before=FIRST),
    of_vectors(  # a group, of slices
        LAST, 31, tiles_of_each(24, "outputs 8 3 2 0, batch 8 2 1 1; batch 8 2 1 1", 1),
        epilogue=RELU, before=FIRST, others=(((2, 5, 4, 3),),), gaps=(1, 2, 3),
    ),
    # vectors of inputs that reach beyond a row's last ones: of X, and of the intermediate
    of_vectors(LAST, 31, tiles_of_each(12, "outputs 8 2 3 0, outputs 8 2 3 0", 0), before=((2, 5, 5, 3),)),
]  # fmt: skip
VECTOR_GRADIENT = [
    case_of("cpu_gradient", (2, 5, 3, 2), 14, tiles("outputs", 8, 3, 2, 6, 2, 1, "pieces")),
    case_of(
        "cpu_gradient", (2, 5, 3, 3), 14, tiles("batch", 4, 2, 2, 8, 2, 2, "pieces"), precision="bfloat16", layout="bsl"
    ),
]
AMX_TILES = {"block": 32, "outputs": 32, "parts": 2}
AMX = [
    case_of(
        "amx", (2, 20, 40, 1), 37, AMX_TILES | {"panel": 0, "streaming": 0, "depth": 1},
        precision="bfloat16", epilogue=RELU,
    ),
    case_of(
        "amx", (1, 17, 33, 2), 37, AMX_TILES | {"panel": 1, "streaming": 1, "depth": 1},
        precision="bf16x6", layout="bsl",
    ),
    case_of("cpu_gradient", (1, 17, 33, 3), 70, AMX_TILES | {"parts": 3, "pieces": 1}, precision="bf16x6"),
    case_of("cpu_gradient", (2, 20, 7, 2), 70, AMX_TILES | {"pieces": 2}, precision="bfloat16", layout="bsl"),
    case_of(
        "amx", (1, 17, 40, 3), 37, tiles_of_each(32, "32 0 1, 32 1 1", 1),
        precision="bfloat16", epilogue=RELU, before=((2, 60, 33, 1),),
    ),
    case_of(
        "amx", (1, 17, 40, 3), 70, tiles_of_each(64, "32 1 1, 32 1 2", 0),
        precision="bf16x6", layout="bsl", before=((2, 30, 33, 2),),
    ),
]  # fmt: skip
