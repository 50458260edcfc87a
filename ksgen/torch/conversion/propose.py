"""`propose`: chains, and sums of chains, that could replace a dense layer, with their size, time and error."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from itertools import product
from math import gcd, inf, lcm, prod
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.errors import LaunchError, SpecError
from ksgen.measure.trust import describe_unreliable, marked
from ksgen.pattern import Chain, Pattern, block_butterfly, btt, dense, kaleidoscope, low_rank, square_dyadic
from ksgen.spec import PRECISIONS, PrecisionName
from ksgen.spec.kernel import check_word, checked_count
from ksgen.structures import Structure, dyad, kronecker, of_chain
from ksgen.torch.conversion.factorize import Factorization, SumFactorization, factorized
from ksgen.torch.conversion.merge import merged_chains
from ksgen.torch.conversion.sums import text_of
from ksgen.torch.conversion.times import Clock, Us, clock_of, measured_us
from ksgen.torch.layer.sum import of_structures
from ksgen.torch.operators.checks import check_flags, check_tensors
from ksgen.values import excerpt, listed

LOOKED_AT = 3  # chains that are factorized or measured per family, as a multiple of the chains listed
# structures per family whose fused launch `convert` expects. If it expected all of them, it would give the same layers
# for weights in float32, and others in 2 of 63 cases in bfloat16, with a step 13 % shorter and an error 2 % larger
LIKELY = 12
DENSE = "nn.Linear"
BUDGET = 0.3  # share of the dense weights by default
FAMILIES = (
    "low_rank", "monarch", "two_factors", "btt", "deformable_butterfly", "block_dense", "kronecker", "dyad", "blast",
    "block_butterfly", "square_dyadic", "kaleidoscope",
)  # fmt: skip
ITERATIVE = ("blast",)  # families that only L-BFGS factorizes, which takes minutes for large layers
# families that `convert` chooses from for given weights: the chain of a Kronecker product without its ties is a Monarch
# chain, and no farther
FOR_WEIGHTS = tuple(each for each in FAMILIES if each not in ("kronecker", *ITERATIVE))
Form = tuple[Structure, ...]  # one structure, or several that are added


@dataclass(frozen=True)
class Proposal:
    """A chain, a sum of chains, or the dense layer, with its cost."""

    family: str
    structures: tuple[Structure, ...]  # one, with its ties; or several, which are added
    expected_us: float | None  # by the cost model; a lower bound for the dense layer; None if unknown
    measured_us: float | None = None
    factorization: Factorization | SumFactorization | None = None
    doubt: str = ""  # why the measured time is unreliable; empty if it is reliable
    step_us: float | None = None  # expected time of a training step, forward and backward; None if unknown

    @property
    def structure(self) -> Structure:
        """The only structure, for `factorize` and `KSLinear.from_structure`; `SpecError` for a sum."""
        if len(self.structures) > 1:
            raise SpecError(
                f"{self.family} is a sum of {len(self.structures)} chains; accepted: its `structures`, for `factorize` "
                "and `KSSum.from_structures`"
            )
        return self.structures[0]

    @property
    def chain(self) -> Chain:
        """The only chain; `SpecError` for a sum."""
        return self.structure.chain

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chain, or those of a sum."""
        return tuple(each.chain for each in self.structures)

    @property
    def text(self) -> str:
        """The chains in words."""
        return text_of(self.chains)

    @property
    def parameters(self) -> int:
        """Number of weights, without a bias. Tied weights count once."""
        return sum(prod(shape) for each in self.structures for shape in each.shapes.values())

    @property
    def flops(self) -> int:
        """Multiplications and additions per row of x."""
        return 2 * sum(each.weight_count for each in self.chains)

    @property
    def relative_error(self) -> float | None:
        """Relative error of the given weight's factorization; None without a weight."""
        return self.factorization.relative_error if self.factorization else None

    @property
    def us(self) -> float:
        """Measured time, else expected time; infinite if both are unknown."""
        return next((us for us in (self.measured_us, self.expected_us) if us is not None), inf)


@dataclass(frozen=True)
class Proposals:
    """Proposed chains, best first: by error if a weight was given, else by time. `print` shows a table."""

    dense: Proposal
    chains: tuple[Proposal, ...]
    batch: int
    by: str  # source of the expected times
    looked_at: tuple[Proposal, ...] = field(default=(), repr=False)  # by family: all factorized or measured chains

    def __iter__(self) -> Iterator[Proposal]:
        return iter(self.chains)

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, index: int) -> Proposal:
        return self.chains[index]

    def __repr__(self) -> str:
        first = f", the first of them {self[0].text}" if self.chains else ""
        return f"Proposals({len(self)} chains{first}; print it for a table)"

    def __str__(self) -> str:
        has_error, is_measured = any(each.factorization for each in self), any(each.measured_us for each in self)
        titles = ["family", "chain", "parameters", "share", "operations per row", "expected, us", "training step, us"]
        titles += [*(["measured, us"] if is_measured else []), *(["error"] if has_error else [])]
        rows = []
        for each in (self.dense, *self):
            share = f"{each.parameters / self.dense.parameters:.1%}"
            cells = [each.family, each.text, f"{each.parameters:,}", share, f"{each.flops:,}"]
            cells += [_us(us, "at least " if each is self.dense else "") for us in (each.expected_us, each.step_us)]
            cells += [marked(_us(each.measured_us), each.doubt)] if is_measured else []
            cells += ["-" if each.relative_error is None else f"{each.relative_error:.3f}"] if has_error else []
            rows.append(cells)
        note = describe_unreliable([each.doubt for each in (self.dense, *self)], "measured time")
        bound, remark = self.dense.expected_us or inf, "" if self.chains else "No chain fits the budget. "
        if self.chains and all((each.expected_us or 0.0) >= bound for each in self):
            remark = "No chain is expected to take less time than the dense layer takes at least. "
        return (
            f"{table_of(titles, rows, width=140)}{remark}Times at batch {self.batch}, expected by "
            f"{self.by}.{' ' * bool(note)}{note}"
        )


def table_of(titles: Sequence[str], rows: Iterable[Sequence[str]], width: int = 200) -> str:
    """Render a table as text, with names and chains left-aligned."""
    from rich.console import Console
    from rich.table import Table

    table, text = Table(), StringIO()
    for title in titles:
        is_name = title in ("family", "layer", "layers", "chain")
        table.add_column(
            title,
            justify="left" if is_name else "right",
            overflow="fold" if width < 200 else "ellipsis",
            no_wrap=width >= 200,
        )
    for row in rows:
        table.add_row(*row)
    Console(file=text, width=width, highlight=False).print(table)
    return text.getvalue()


def _us(us: float | None, before: str = "") -> str:
    return "-" if us is None else f"{before}{us:.{0 if us >= 100 else 1}f}"


def propose(
    in_features: int,
    out_features: int,
    *,
    budget: float = BUDGET,
    device: Any = None,
    batch: int | None = None,
    precision: PrecisionName = "float32",
    weight: Tensor | None = None,
    measure: bool = False,
    merge: bool = False,
    structures: Iterable[str] | None = None,
    most: int = 3,
) -> Proposals:
    """Propose chains and sums of chains that could replace a dense layer, with their size, time and error.

    For each family of chains, such as "monarch", `most` chains are listed: those with the least expected time. With a
    `weight`, more chains are factorized, and the nearest ones are listed. With `measure`, more chains are timed, and
    their measured times decide. With a `weight`, BLAST is proposed only if `structures` name it, because nothing but
    L-BFGS factorizes it.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        budget: Largest share of the dense layer's weights, above 0 and up to 1. Each repetition of a tied weight
            counts.
        device: Device of PyTorch, or a CUDA target such as "sm_90a", which stands for its usual GPU. None: a GPU if
            PyTorch has one, else the processor.
        batch: Batch size for the times. None: 25088 on a GPU and 1568 on a processor.
        precision: Arithmetic of the products, such as "float16".
        weight: Matrix (out_features, in_features) to approximate, or None.
        measure: Whether to time the chains, as `KSLinear`, and the dense layer on the device.
        merge: Whether to propose chains with merged neighbours, too, as `optimize` merges them. A merged factor can
            represent every product of the factors it replaces, so the least possible error is never larger. The budget
            still holds.
        structures: Families to propose, such as "monarch" or "dyad". None: all of them.
        most: Number of chains per family.

    Returns:
        `Proposals`, best first: by error if a weight was given, else by time. `print` shows a table.

    Raises:
        SpecError: An option is not accepted.
        LaunchError: The weight has another shape, or the device does not exist.

    Examples:
        >>> from ksgen.torch import propose
        >>> found = propose(4, 4, budget=0.75, device="sm_90a", most=1)
        >>> found.dense.parameters, max(each.parameters for each in found)
        (16, 12)
    """
    whole = dense(in_features, out_features)
    check_flags(measure=measure, merge=merge)
    _check_options(budget, precision)
    most = checked_count("most", most, " (chains per family)")
    named = checked_families(structures)
    if weight is not None and structures is None:
        named = tuple(each for each in named if each not in ITERATIVE)
    if weight is not None:
        check_tensors("propose", weight=weight)
        if (shape := tuple(weight.shape)) != (wanted := (whole.out_features, whole.in_features)):
            raise LaunchError(f"propose: weight has shape {shape}; (out_features, in_features) = {wanted} is needed")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    clock = clock_of(device, precision, batch)
    if measure and clock.where is None:
        raise SpecError(
            f"measure=True with device={excerpt(device)}, which is a target; accepted: a device of this machine, such "
            "as cpu"
        )
    families = _affordable(whole, budget, named, merge, clock)
    looked_at = most if weight is None and not measure else LOOKED_AT * most
    proposals = _with_steps(whole, _fastest(families, clock.sum_us, looked_at), clock)
    if weight is not None:
        proposals[1:] = [replace(each, factorization=factorized(weight, each.structures)) for each in proposals[1:]]
    if measure:
        proposals = _measured(proposals, clock)
    listed: list[Proposal] = []
    for each in sorted(proposals[1:], key=_rank):
        if sum(other.family == each.family for other in listed) < most:
            listed.append(each)
    return Proposals(proposals[0], tuple(listed), clock.batch, clock.by, tuple(proposals[1:]))


def offers(
    in_features: int, out_features: int, *, budget: float, device: Any, precision: PrecisionName, merge: bool,
    structures: Collection[str], most: int,
) -> tuple[Proposal, ...]:  # fmt: skip
    """The dense layer, and structures that `convert` may take for it, with the time of a training step.

    Per named family, there are `most` structures at most: those whose forward pass has the least expected time. Fused
    launches count for the `LIKELY` structures that are fastest without them; others are dropped.
    """
    _check_options(budget, precision)
    whole, clock = dense(in_features, out_features), clock_of(device, precision)
    families = _affordable(whole, budget, structures, merge, clock)
    likely = _fastest(families, partial(clock.sum_us, fused=False), LIKELY)
    families = {family: [each.structures for each in likely if each.family == family] for family in families}
    return tuple(_with_steps(whole, _fastest(families, clock.sum_us, most), clock))


def checked_families(structures: object) -> tuple[str, ...]:
    """Names of families, by default all; `SpecError` for any other."""
    names = FAMILIES if structures is None else () if isinstance(structures, str) else listed(structures)
    if not names:
        raise SpecError(f"structures={excerpt(structures)}; accepted: a list of {', '.join(FAMILIES)}")
    for name in names:
        check_word("structures", name, FAMILIES)
    return tuple(names)


def _check_options(budget: object, precision: object) -> None:
    check_word("precision", precision, PRECISIONS)
    if not isinstance(budget, int | float) or isinstance(budget, bool) or not 0 < budget <= 1:
        raise SpecError(f"budget={excerpt(budget)}; accepted: a share of the dense weights, above 0 and up to 1")


def _affordable(
    whole: Chain, budget: float, names: Collection[str], merge: bool, clock: Clock
) -> dict[str, list[Form]]:
    """Structures within the budget by family; with `merge`, also chains of merged neighbours."""
    families = candidates(whole.in_features, whole.out_features, budget, names)
    if not merge:
        return families
    most = budget * whole.weight_count
    for forms in families.values():
        chains = [one.chain for one, *others in forms if not (others or any(one.ties))]
        merged = dict.fromkeys(new for chain in chains for new in merged_chains(chain, clock))
        forms += [(of_chain(each),) for each in merged if each.weight_count <= most and each not in chains]
    return families


def _fastest(
    families: Mapping[str, list[Form]], expected_us: Callable[[Sequence[Chain]], Us], most: int
) -> list[Proposal]:
    """The `most` structures per family with the least expected time."""
    found: list[Proposal] = []
    for family, forms in families.items():
        all_of_family = [Proposal(family, form, expected_us([each.chain for each in form])) for form in forms]
        found += sorted(all_of_family, key=_rank)[:most]
    return found


def _with_steps(whole: Chain, found: list[Proposal], clock: Clock) -> list[Proposal]:
    """The dense layer and the proposals, with expected times of training steps."""
    library = Proposal(DENSE, (of_chain(whole),), clock.dense_us(whole), step_us=clock.dense_step_us(whole))
    return [library, *(replace(each, step_us=clock.sum_step_us(each.chains)) for each in found)]


def _rank(proposal: Proposal) -> tuple[float, float]:
    """Sort key that puts the best first: error if it is known, then time."""
    return proposal.relative_error or 0.0, proposal.us


def _measured(proposals: list[Proposal], clock: Clock) -> list[Proposal]:
    """Add measured times to proposals; the first is the dense layer. Weights and x are random."""
    precision: Any = clock.precision
    options = {"device": clock.where, "dtype": getattr(torch, PRECISIONS[precision].dtype)}
    whole = proposals[0].chain
    layers: list[nn.Module] = [nn.Linear(whole.in_features, whole.out_features, bias=False, **options)]
    layers += [
        of_structures(each.structures, bias=False, precision=precision, **options).freeze() for each in proposals[1:]
    ]
    times = measured_us(layers, torch.randn(clock.batch, whole.in_features, **options))
    return [replace(each, measured_us=us, doubt=why) for each, (us, why) in zip(proposals, times, strict=True)]


# ---- chains per family within a budget


SIDES = (64, 32, 16, 8, 4, 1)  # block sides in descending preference, because kernels move full vectors
LEAST_KEPT = 0.8  # least share of the affordable inner features that a preferred side must keep
# criteria for large families: least share of the budget, and least block side; the first that any chain meets counts
WANTED = (
    (0.75, 16), (0.75, 8), (0.5, 16), (0.5, 8), (0.75, 4), (0.5, 4), (0.0, 1),
)  # fmt: skip
MOST_OF_A_FAMILY = 48  # chains kept: those whose intermediates, which are written and read, have the fewest features
MOST_REARRANGED = 1024  # shorter side of a matrix rearranged for a Kronecker product, which an SVD takes seconds for
_Shapes = tuple[tuple[int, int, int, int], ...]  # patterns of a chain's factors, or of a sum of them


def candidates(
    in_features: int, out_features: int, budget: float, names: Collection[str] = FAMILIES
) -> dict[str, list[Form]]:
    """Structures with at most the share `budget` of the dense weights, by family."""
    most = int(budget * in_features * out_features)
    rank = _even(min(most // (in_features + out_features), in_features, out_features), 1, 1)
    shapes = {
        "low_rank": [low_rank(in_features, out_features, rank).shapes] if rank else [],
        "monarch": _monarchs(in_features, out_features),
        "two_factors": _pairs(in_features, out_features, most),
        "btt": _btts(in_features, out_features, most),
        "deformable_butterfly": _deformed(in_features, out_features),
        "block_dense": _block_dense(in_features, out_features, most),
        "kronecker": _kronecker(in_features, out_features),
        "dyad": _dyads(in_features, out_features),
        "blast": _blasts(in_features, out_features, most),
    }
    makers: dict[str, Callable[..., Form]] = {  # others are plain chains
        "btt": lambda down, up: (of_chain(btt(in_features, out_features, down[0], up[0], down[1] // up[0])),),
        # A is the factor with a = 1
        "kronecker": lambda one, two: (kronecker(in_features, out_features, (two if one[0] > 1 else one)[1:3]),),
        "dyad": lambda straight, _: dyad(in_features, out_features, straight[0]),
    }
    found: dict[str, list[Form]] = {}
    for name in names:
        if name in shapes:
            make = makers.get(name, partial(_plain, name))
            found[name] = [make(*each) for each in _best(shapes[name], most, name)]
    if in_features == out_features:
        blocks = [each for each in divisors(in_features) if each > 1 and _is_power(in_features // each)]
        square = [block_butterfly(in_features, block) for block in blocks]
        square += [square_dyadic(in_features), kaleidoscope(in_features)] if _is_power(in_features) else []
        for chain in square:
            if chain.name in names and chain.weight_count <= most:
                found.setdefault(chain.name, []).append((of_chain(chain),))
    return {name: forms for name, forms in found.items() if forms}


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _is_power(count: int) -> bool:
    """Whether a count is a power of two, from two up."""
    return count > 1 and count & (count - 1) == 0


def _even(most: int, a: int, d: int) -> int:
    """The largest number up to `most` that is a multiple of a times a side and of d times the same side.

    The side is the first of `SIDES` whose number is at least a share `LEAST_KEPT` of `most`, else 1. The result is 0 if
    no multiple is small enough.
    """
    number = 0
    for side in SIDES:
        number = most // lcm(side * a, side * d) * lcm(side * a, side * d)
        if number >= LEAST_KEPT * most:
            return number
    return number


def _monarchs(in_features: int, out_features: int) -> Iterator[_Shapes]:
    for split_in, split_out in product(divisors(in_features)[1:], divisors(out_features)[1:]):
        block_in, block_out = in_features // split_in, out_features // split_out
        yield (split_in, block_out, block_in, 1), (1, split_out, split_in, block_out)


def _pairs(in_features: int, out_features: int, most: int) -> Iterator[_Shapes]:
    """Pairs (a, b, c, 1) then (1, b, c, d), as in the paper's layers.

    For every a and d, the pair has as many inner features as the budget allows. The least a and d are two: with a = 1
    or d = 1, one factor would be dense, as in low rank.
    """
    for a, d in product(divisors(in_features)[1:], divisors(out_features)[1:]):
        if inner := _even(most // (in_features // a + out_features // d), a, d):
            yield (a, inner // a, in_features // a, 1), (1, out_features // d, inner // d, d)


def _btts(in_features: int, out_features: int, most: int) -> Iterator[_Shapes]:
    """Factors of block tensor trains with the largest rank that the budget allows, without their exchange."""
    for columns, rows in product(divisors(in_features)[1:], divisors(out_features)[1:]):
        rank = min(most // (in_features * rows + out_features * columns), in_features // columns, out_features // rows)
        if rank:
            down = columns, rows * rank, in_features // columns, 1
            yield down, (rows, out_features // rows, columns * rank, 1)


def _block_dense(in_features: int, out_features: int, most: int) -> Iterator[_Shapes]:
    """Diagonal blocks and then a dense factor, with as many inner features as the budget allows."""
    for blocks in divisors(in_features)[1:]:
        if inner := _even(min(most // (in_features // blocks + out_features), in_features), blocks, 1):
            yield (blocks, inner // blocks, in_features // blocks, 1), (1, out_features, inner, 1)


def _kronecker(in_features: int, out_features: int) -> Iterator[_Shapes]:
    """Kronecker products A ⊗ B of two matrices, neither of which is a row or a column."""
    for columns, rows in product(divisors(in_features)[1:-1], divisors(out_features)[1:-1]):
        if min(rows * columns, (in_features // columns) * (out_features // rows)) <= MOST_REARRANGED:
            yield kronecker(in_features, out_features, (rows, columns)).chain.shapes


def _dyads(in_features: int, out_features: int) -> Iterator[_Shapes]:
    """Both summands of a DYAD: diagonal blocks, and the same blocks for permuted inputs."""
    for blocks in divisors(gcd(in_features, out_features))[1:]:
        rows, columns = out_features // blocks, in_features // blocks
        yield (blocks, rows, columns, 1), (1, rows, columns, blocks)


def _blasts(in_features: int, out_features: int, most: int) -> Iterator[_Shapes]:
    """BLAST chains with the largest rank that the budget allows."""
    for columns, rows in product(divisors(in_features)[1:], divisors(out_features)[1:]):
        largest = min(most // (in_features + out_features + rows * columns), in_features, out_features)
        if rank := _even(largest, 1, 1):
            down, mix = (columns, rank, in_features // columns, 1), (1, rows, columns, rank)
            yield down, mix, (rows, out_features // rows, rank, 1)


def _deformed(in_features: int, out_features: int) -> Iterator[_Shapes]:
    """Three factors through which every input reaches every output."""
    for (c1, c2, c3), (b1, b2, b3) in product(_triples(in_features), _triples(out_features)):
        yield (c2 * c3, b1, c1, 1), (c3, b2, c2, b1), (1, b3, c3, b1 * b2)


def _triples(number: int) -> list[tuple[int, int, int]]:
    """Decompositions of a number into three sides of at least two."""
    sides = [each for each in divisors(number) if each > 1]
    return [
        (one, two, number // one // two)
        for one, two in product(sides, sides)
        if number % (one * two) == 0 and number // (one * two) in sides
    ]


def _plain(name: str, *shapes: tuple[int, int, int, int]) -> Form:
    return (of_chain(Chain(tuple(Pattern(*each) for each in shapes), name)),)


def _best(found: Iterable[_Shapes], most: int, name: str) -> list[_Shapes]:
    """Select the best of a family, because large layers have thousands.

    Kronecker products meet no criteria: few sizes exist, and only their own sizes represent a matrix exactly.
    """
    best: list[_Shapes] = []
    criteria = list(WANTED if name != "kronecker" else WANTED[-1:])  # up to those that the best shapes meet
    for shapes in found:
        if (count := sum(map(prod, shapes))) > most:
            continue
        least = min(min(b, c) for _, b, c, _ in shapes)
        met = next((at for at, (used, side) in enumerate(criteria) if count >= used * most and least >= side), None)
        if met is None:
            continue
        if met < len(criteria) - 1:
            criteria, best = criteria[: met + 1], []
        best.append(shapes)
    return sorted(best, key=lambda shapes: sum(a * b * d for a, b, _, d in shapes))[:MOST_OF_A_FAMILY]
