"""Lists the small kernels that prove a family on a GPU: of each precision, layout and job. Runs nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

from ksgen.emit.render import Source, render
from ksgen.families import Family, Limits, cuda_limits
from ksgen.families.expected import LARGE
from ksgen.launch.fused import packing_choices
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from ksgen.spec.kernel import activations_of
from ksgen.spec.storage import SAME, STORAGES, STORED, x_precisions
from ksgen.tuning.job import Candidate

# rows of whole 16-byte chunks in every precision, and ragged tiles; several j, in one tile and in several, and one j
FACTORS = (Pattern(2, 72, 40, 8), Pattern(3, 136, 104, 1))
SMALL = Pattern(2, 37, 13, 5)  # no size is a multiple of another, for families that accept it
LAYERS = (Pattern(2, 8, 24, 1), Pattern(1, 24, 8, 2))  # 48 -> 16 -> 48
WIDE = Pattern(2, 136, 144, 1)  # whole 16-byte chunks in eight bits
# larger than a tile and no multiple of it; the same with rows of whole 16-byte chunks; small batches of both kinds
BATCHES = (301, 312, 7, 8)


@dataclass(frozen=True)
class Case:
    """One kernel with one choice of constants, checked at each batch that its family takes."""

    kernel: KernelSpec
    candidate: Candidate
    batches: tuple[int, ...]

    @property
    def sources(self) -> list[Source]:
        """The kernel's source, and for a chain the sources that pack each factor's weights."""
        family, constants = self.candidate.family, self.candidate.constants
        of_factors = packing_choices(self.kernel, family, constants) if self.kernel.is_chain else []
        pairs = [(self.kernel, constants), *((factor, choice.constants) for factor, choice in of_factors)]
        return [render(kernel, chosen, family=family) for kernel, chosen in pairs]


def cases_of(family: Family[Any], target: str) -> list[Case]:
    """Return the cases that prove a family on a GPU, each source once.

    Their constants are those for the target's usual card, so that bundles contain the same sources.
    """
    limits = cuda_limits(target)
    cases: dict[tuple[KernelSpec, Any], Case] = {}
    clustered: set[object] = set()
    for kernel in _kernels(family, limits):
        batch = BATCHES[-1] if family.for_small_batches else LARGE
        for constants in (*family.defaults(kernel, limits, batch), *_in_clusters(family, kernel, limits, clustered)):
            batches = tuple(each for each in BATCHES if family.takes(kernel, each, aligned=True))
            cases[kernel, constants] = Case(kernel, Candidate(family.name, constants), batches)
    return list(cases.values())


def _kernels(family: Family[Any], limits: Limits) -> Iterator[KernelSpec]:
    """Yield kernels that the family supports: factors, gradients, chains, groups, and weights and X in other types.

    A family that must be proven before it is chosen gets every pattern and layout; any other family gets them in turn.
    """
    patterns = cycle([(SMALL, *FACTORS), (*FACTORS, SMALL), (*FACTORS[::-1], SMALL)])
    chains = cycle([(LAYERS,), (LAYERS, LAYERS), (LAYERS[:1], LAYERS[:1])])
    for precision, layout in product(PRECISIONS, LAYOUTS):
        full = Epilogue(True, "relu" if "relu" in activations_of(precision) else "none", True)
        for job, epilogue in (("multiply", full), ("gradient", Epilogue())):
            kernels = [KernelSpec(each, precision, layout, epilogue, job=job) for each in next(patterns)]
            yield from list(_supported(family, limits, kernels))[: None if family.by_warpgroups else 1]
        if layout == "bsf" or family.by_warpgroups:
            yield from _supported(family, limits, [KernelSpec(next(chains), precision, layout, full)])
    layouts = cycle(LAYOUTS)
    for storage, inputs in [*((each, SAME) for each in STORED), *((each, each) for each in STORAGES)]:
        turns = LAYOUTS if family.by_warpgroups else (next(layouts),)
        kernels = [
            KernelSpec(pattern, precision, layout, Epilogue(bias=True), weights=storage, inputs=inputs)
            for layout, pattern, precision in product(turns, (*FACTORS, WIDE), x_precisions(storage))
        ]
        yield from list(_supported(family, limits, kernels))[: len(turns)]


def _supported(family: Family[Any], limits: Limits, kernels: Iterable[KernelSpec]) -> Iterator[KernelSpec]:
    return (kernel for kernel in kernels if family.supports(kernel, limits))


def _in_clusters(family: Family[Any], kernel: KernelSpec, limits: Limits, done: set[object]) -> Iterator[Any]:
    """Yield constants without clusters, and with clusters of two blocks along the batch, once per type and layout."""
    for constants in family.defaults(kernel, limits, LARGE):
        key = type(constants), kernel.layout
        if not hasattr(constants, "cluster_batch") or key in done:
            continue
        done.add(key)
        for blocks in (1, 2):
            changed = replace(constants, cluster_batch=blocks, cluster_out=1)
            if all(rule.holds(kernel, changed) for rule in family.rules()):
                yield changed
