"""Merges neighbouring factors of a chain into denser ones if that is faster on a device. The product stays the same."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from itertools import islice
from math import inf
from typing import Any, overload

import torch
from torch import Tensor, nn

from ksgen.errors import LaunchError, PatternError
from ksgen.order import inverse_of
from ksgen.pattern import Chain, Pattern, Patterns
from ksgen.spec import PRECISIONS, KernelSpec, PrecisionName
from ksgen.spec.kernel import check_word
from ksgen.torch.conversion.projection import covering, stored_features
from ksgen.torch.conversion.relabelling import relabelled
from ksgen.torch.conversion.times import Clock, clock_of, measured_us
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.layer.tied import initialized, tie, ties_of
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.products import multiply_rows

TIMED = 3  # merges that are timed: each is compiled, which takes a second or more
_REMEMBERED = 4096  # merged factors, because `propose` compares many chains
MIN_SAVING = 0.05  # share of the time that a merge must save, as two timings of one layer may differ by less
MOST_TIMES = 16  # a merge whose expected time is longer, relative to that of the chain, is not built: it may be huge


@overload
def optimize(given: KSLinear, *, batch: int | None = None) -> KSLinear: ...
@overload
def optimize(
    given: Patterns, *, batch: int | None = None, device: Any = None, precision: PrecisionName = "float32"
) -> Chain: ...
def optimize(
    given: KSLinear | Patterns, *, batch: int | None = None, device: Any = None, precision: PrecisionName = "float32"
) -> KSLinear | Chain:
    """Merge neighbouring factors if that is faster: fewer factors, and the same matrix K.

    A merged factor has the smallest Kronecker-sparse support that contains the product. Its kernel usually reads more
    weights, and one intermediate less is written and read. For each number of factors the cost model selects the best
    merge. The three with the least expected times are then timed alternately, as frozen layers. The fastest is returned
    if it saves a twentieth of the time.

    Factors that exchange features are merged, too: a merged factor keeps the exchanges around it. Tied weights stay
    tied: such a factor is not merged.

    Args:
        given: A `KSLinear` for inference, or the factors of a chain in any form that `KSLinear` accepts.
        batch: Batch size of the times. None: 25088 on a GPU and 1568 on a processor.
        device: Device of PyTorch for a chain. None: the processor. A layer is timed on its own device.
        precision: Arithmetic of a chain's products. For a layer, its own precision is used.

    Returns:
        A new `KSLinear` with merged weights or a merged `Chain`; the given layer or chain if no merge is faster.

    Raises:
        LaunchError: The layer has quantized weights or an activation between its factors, or is split over processes.
        PatternError: The factors are no chain.
        SpecError: An option is not accepted.

    Examples:
        >>> from ksgen import monarch
        >>> from ksgen.torch import optimize
        >>> optimize(monarch(64, 64, 8, 8), batch=4).out_features
        64
    """
    if isinstance(given, nn.Module) and not isinstance(given, KSLinear):
        name = type(given).__name__
        raise LaunchError(f"optimize: got {name}; accepted: a KSLinear or a chain, such as each layer of a sum")
    if not isinstance(given, KSLinear):
        chain = Chain.read(given)
        check_word("precision", precision, PRECISIONS)
        dtype = getattr(torch, PRECISIONS[precision].dtype)
        layer = KSLinear(chain, bias=False, device=device, dtype=dtype, precision=precision)
        merged = _fastest(layer, batch, precision)
        return chain if merged is layer else merged.chain
    if given.between != "none" or given.has_stored_type or given.split is not None:
        raise LaunchError(
            f"{given._name()} cannot be merged; accepted: a KSLinear that is not split, without between and "
            "with unquantized weights"
        )
    return _fastest(given, batch, given.precision or dtype_name(given.weights[0].dtype))


def _fastest(layer: KSLinear, batch: int | None, precision: str) -> KSLinear:
    where, dtype = layer.weights[0].device, layer.weights[0].dtype
    clock = clock_of(where, precision, batch)
    partitions = _partitions(layer.chain, clock, ties_of(layer.weights))
    layers = [layer, *(_merged(layer, sizes) for sizes in partitions)]
    frozen = [deepcopy(each).eval().requires_grad_(False).freeze() for each in layers]
    shape = (clock.batch, layer.in_features) if layer.layout == "bsf" else (layer.in_features, clock.batch)
    times = [us for us, _ in measured_us(frozen, torch.randn(shape, device=where, dtype=dtype))]
    best = min(range(len(layers)), key=times.__getitem__)
    return layers[best] if times[best] < (1 - MIN_SAVING) * times[0] else layer


@lru_cache(_REMEMBERED)
def merged_factor(factors: tuple[Pattern, ...]) -> Pattern | None:
    """The smallest Kronecker-sparse factor for the product of neighbouring factors, with the exchanges around them.

    Factors that exchange features with each other are relabelled first. None if digits do not divide each other.
    """
    if len(factors) == 1:
        return factors[0]
    whole = Pattern(1, factors[-1].out_features, factors[0].in_features, 1)
    rows, columns = factors[-1].outputs.exchange(), factors[0].inputs.exchange()
    if any(each.store for each in factors[:-1]):
        if (found := relabelled(Chain(factors))) is None:
            return whole
        factors, rows, columns = found.chain.factors, inverse_of(*found.rows), inverse_of(*found.columns)
    covered = covering([each.natural for each in factors])
    if covered == whole:  # which has every matrix, whatever the order of features
        return whole
    store, load = covered.outputs.text_of(*rows), covered.inputs.text_of(*columns)
    if store is None or load is None:
        return None
    merged = replace(covered, store=store, load=load)
    return replace(merged, store=merged.outputs.of_sorted_block(), load=merged.inputs.of_sorted_block())


def _merged_chain(chain: Chain, sizes: Sequence[int]) -> Chain | None:
    """The chain with merged neighbours; None if digits of its exchanges do not divide each other."""
    found = [merged_factor(part.factors) for part in _parts(chain, sizes)]
    try:
        return None if None in found else Chain(tuple(each for each in found if each))
    except PatternError:
        return None


def _partitions(chain: Chain, clock: Clock, ties: Sequence[str] = ()) -> list[list[int]]:
    """Select at most `TIMED` merges with the least expected times. Factors with ties are not merged.

    A merge is a list of sizes: the number of neighbouring factors that each new factor replaces. All merges differ in
    their number of factors. Merges that should take over `MOST_TIMES` times as long as the chain are left out. If the
    cost model knows no time, the number of weights is used as the cost.
    """
    count = len(chain)

    @cache
    def cost(first: int, end: int) -> float:
        pattern = merged_factor(chain.factors[first:end])
        if pattern is None or (end - first > 1 and any(ties[first:end])):
            return inf
        us = clock.kernel_us(KernelSpec(replace(pattern, load="") if first else pattern, clock.precision))
        return float(pattern.weight_count) if us is None else us

    # best[m][end]: least cost of the factors before `end`, merged into m factors, and the sizes of these
    best: list[list[tuple[float, list[int]]]] = [[(0.0 if not end else inf, []) for end in range(count + 1)]]
    for _ in range(count - 1):
        shorter = best[-1]
        best.append(
            [
                min(
                    ((shorter[first][0] + cost(first, end), [*shorter[first][1], end - first]) for first in range(end)),
                    default=(inf, []),
                )
                for end in range(count + 1)
            ]
        )
    most = MOST_TIMES * sum(cost(place, place + 1) for place in range(count))
    found = (sizes for us, sizes in sorted(each[count] for each in best[1:]) if us <= most)
    return list(islice((sizes for sizes in found if _merged_chain(chain, sizes)), TIMED))


def merged_chains(chain: Chain, clock: Clock) -> list[Chain]:
    """The chain with merged neighbours: at most `TIMED` merges, those with the least expected times."""
    merged = (_merged_chain(chain, sizes) for sizes in _partitions(chain, clock))
    return [each for each in merged if each]


def _parts(chain: Chain, sizes: Sequence[int]) -> list[Chain]:
    """Neighbouring factors of a chain, as many per part as the sizes say."""
    factors = iter(chain)
    return [Chain(tuple(islice(factors, size))) for size in sizes]


def _merged(layer: KSLinear, sizes: Sequence[int]) -> KSLinear:
    """Layer in which each factor is the product of the given number of neighbouring factors."""
    weights, given, kept = list[Tensor](), iter(layer.weights), iter(ties_of(layer.weights))
    merged, ties = _merged_chain(layer.chain, sizes), list[str]()
    with torch.no_grad():
        for part in _parts(layer.chain, sizes):
            factors = list(islice(given, len(part)))
            ties.append("".join(islice(kept, len(part))))
            pattern = merged_factor(part.factors)
            assert pattern is not None  # as `_partitions` returns no other
            weights.append(factors[0] if len(part) == 1 else _product(part.factors, factors, pattern))
    options = {name: getattr(layer, name) for name in layer._settable if name not in ("between", "intermediates")}
    made = KSLinear.from_weights(weights, layer.bias, patterns=merged, **options)
    tie(made.weights, ties)
    made.requires_grad_(initialized(layer.weights)[0].requires_grad)
    return made.train(layer.training)


def _product(factors: Sequence[Pattern], weights: Sequence[Tensor], pattern: Pattern) -> Tensor:
    """Weights of a product of factors, for the pattern that covers it. The product itself is never dense.

    Blocks of the pattern share no features. So a row of x with a one in each block, at the same input l, gives the
    weights of this l in all blocks.
    """
    a, b, c, d = pattern.shape
    if b < c:  # fewer rows of the transpose
        turned = [each.transpose for each in reversed(factors)], [each.transpose(1, 2) for each in reversed(weights)]
        return _product(*turned, pattern.transpose).transpose(1, 2).contiguous()
    inputs, outputs = (stored_features(order, weights[0].device) for order in (pattern.inputs, pattern.outputs))
    ones = torch.eye(c, dtype=weights[0].dtype, device=weights[0].device)
    x = ones[:, None, :, None].expand(c, a, c, d).reshape(c, -1)[:, inputs]
    y = multiply_rows(x, factors, weights)
    return y[:, outputs.argsort()].reshape(c, a, b, d).permute(1, 2, 0, 3).contiguous()
