"""Shared parts of families that compute all factors of a layer in one launch: the factors as kernels, and constants
that hold tiles of each.

A chain's `tiles` is one string. It has the constants of each factor, separated by spaces; commas separate the factors
of a chain, and semicolons the chains of a group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

from ksgen.errors import ConstantsError
from ksgen.families.rules import Rule, first_broken, refusal
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.storage import SAME


@dataclass(frozen=True)
class FactorPlace:
    """Position of a factor in the chains of a kernel."""

    pattern: Pattern
    chain: int
    at: int  # in its chain, from 0
    is_last: bool


@lru_cache(1024)
def places(kernel: KernelSpec) -> tuple[FactorPlace, ...]:
    return tuple(
        FactorPlace(pattern, number, at, at + 1 == len(chain))
        for number, chain in enumerate(kernel.chains)
        for at, pattern in enumerate(chain)
    )


def transposes(kernel: KernelSpec, at: FactorPlace) -> bool:
    """Whether a factor reads another layout than it writes."""
    return kernel.out_layout is not None and at.at == kernel.chains[at.chain].transposing_factor


def transposed_bytes(kernel: KernelSpec, batch: int) -> int:
    """Bytes that separate launches read and write in addition, to transpose intermediates into the other layout."""
    if not kernel.out_layout:
        return 0
    return 2 * kernel.item_bytes * batch * sum(chain[chain.transposing_factor].in_features for chain in kernel.chains)


@lru_cache(1024)
def factor_kernels(kernel: KernelSpec) -> tuple[KernelSpec, ...]:
    """Each factor as a kernel of its own, chain by chain.

    The last factor of a chain has the kernel's epilogue; the others have the activation between factors. The layout is
    the one that the factor writes.
    """
    between = Epilogue(activation=kernel.between)
    alone = replace(kernel.untied, chains=kernel.chains[:1], between="none", out_layout=None, stride="dense")
    found = []
    for number, each in enumerate(places(kernel)):
        layout = kernel.layout if each.at < kernel.chains[each.chain].transposing_factor else kernel.y_layout
        inputs = kernel.inputs if each.at == 0 else SAME  # intermediates are stored like Y
        epilogue = kernel.epilogue if each.is_last else between
        own = replace(alone, chains=(Chain((each.pattern,)),), layout=layout, epilogue=epilogue, inputs=inputs)
        found.append(replace(own, tied=kernel.tied[number : number + 1]))
    return tuple(found)


def layer_kernels(kernel: KernelSpec) -> list[KernelSpec]:
    """Each chain of a group as a kernel of its own."""
    ends = list(accumulate(map(len, kernel.chains), initial=0))
    return [
        replace(
            kernel, chains=(chain,), between=kernel.between if len(chain) > 1 else "none", tied=kernel.tied[begin:end]
        )
        for chain, (begin, end) in zip(kernel.chains, pairwise(ends), strict=True)
    ]


# ---- tiles


@lru_cache(4096)
def listed(tiles: str) -> tuple[tuple[str, bool], ...]:
    """Text of each factor's constants, and whether it is its chain's last."""
    chains = [chain.split(", ") for chain in tiles.split("; ")]
    return tuple((words, at == len(chain)) for chain in chains for at, words in enumerate(chain, 1))


def lengths_of(tiles: str) -> list[int]:
    """Number of factors per chain whose constants are in a text."""
    return [len(chain.split(", ")) for chain in tiles.split("; ")]


def numbers_of(tiles: str, words: str, names: Sequence[str]) -> dict[str, int]:
    """Numbers in the text of a factor's constants, under these names."""
    try:
        return dict(zip(names, map(int, words.split()), strict=True))
    except ValueError:
        raise ConstantsError(f"tiles={tiles!r}: {words!r} must be {len(names)} integers: {', '.join(names)}") from None


def spelled(constants: Any, names: Sequence[str]) -> str:
    """Text of a factor's constants with these names, which `numbers_of` reads."""
    return " ".join(str(getattr(constants, name)) for name in names)


def tiles_of(kernel: KernelSpec, each: Iterable[str]) -> str:
    """Value of `tiles` that holds the texts of each factor's constants."""
    words = iter(each)
    return "; ".join(", ".join(islice(words, len(chain))) for chain in kernel.chains)


@lru_cache(4096)
def factors_hold(rules: tuple[Rule[Any], ...], each: tuple[tuple[KernelSpec, Any], ...]) -> bool:
    """Whether the constants of each factor keep its rules, cached because many combinations have equal factors."""
    return all(first_broken(rules, *own) is None for own in each)


def refused_factor(rules: tuple[Rule[Any], ...], each: Iterable[tuple[KernelSpec, Any]]) -> str:
    """Refusal of the first factor that breaks a rule; empty if none does."""
    for number, own in enumerate(each, 1):
        if broken := first_broken(rules, *own):
            return f"of factor {number}, {refusal(rules, broken, *own)}"
    return ""


def own_of_factors(kernel: KernelSpec, constants: Any) -> tuple[tuple[KernelSpec, Any], ...]:
    """Each factor as a kernel of its own, with its constants. A kernel that is not a chain is returned unchanged."""
    return tuple(zip(factor_kernels(kernel) if kernel.is_chain else [kernel], constants.parsed, strict=True))


def rule_of_tiles(rules: tuple[Rule[Any], ...]) -> Rule[Any]:
    """Rule that a chain's `tiles` holds what the rules of each factor allow."""

    def has_all(kernel: KernelSpec, constants: Any) -> bool:
        return bool(constants.parsed) and lengths_of(constants.tiles) == list(map(len, kernel.chains))

    def holds(kernel: KernelSpec, constants: Any) -> bool:
        return has_all(kernel, constants) and factors_hold(rules, own_of_factors(kernel, constants))

    def why(kernel: KernelSpec, constants: Any) -> str:
        if not has_all(kernel, constants):
            found, needed = (
                ", ".join(map(str, each)) for each in (lengths_of(constants.tiles), map(len, kernel.chains))
            )
            return f"factors per chain are {found} in tiles, and {needed} in the kernel"
        return refused_factor(rules, own_of_factors(kernel, constants))

    return Rule("tiles holds what each factor's own rules allow", holds, why)
