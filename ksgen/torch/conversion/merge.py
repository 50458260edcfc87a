"""Merges neighbouring factors of a chain into denser ones if that is faster on a device. The product stays the same."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from itertools import islice
from math import inf
from typing import Any, overload

import torch
from torch import Tensor

from ksgen.devices.base import CPU_BATCH, GPU_BATCH
from ksgen.errors import LaunchError, PatternError
from ksgen.pattern import Chain, Pattern, Patterns
from ksgen.spec import PRECISIONS, KernelSpec, PrecisionName
from ksgen.spec.kernel import check_word, checked_count
from ksgen.torch.conversion.projection import covering, on_support
from ksgen.torch.conversion.times import Clock, clock_of, measured_us
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.products import chain_to_dense

TIMED = 3  # merges that are timed: each is compiled, which takes a second or more
MIN_SAVING = 0.05  # share of the time that a merge must save, as two timings of one layer may differ by less


@overload
def optimize(given: KSLinear, *, batch: int | None = None) -> KSLinear: ...
@overload
def optimize(
    given: Patterns, *, batch: int | None = None, device: Any = None, precision: PrecisionName = "float32"
) -> Chain: ...
def optimize(
    given: KSLinear | Patterns,
    *,
    batch: int | None = None,
    device: Any = None,
    precision: PrecisionName = "float32",
) -> KSLinear | Chain:
    """Merge neighbouring factors if that is faster: fewer factors, and the same matrix K.

    A merged factor has the smallest Kronecker-sparse support that contains the product. Its kernel usually reads more
    weights, and one intermediate less is written and read. For each number of factors the cost model selects the best
    merge. The three with the least expected times are then timed alternately, as frozen layers. The fastest is returned
    if it saves a twentieth of the time.

    Args:
        given: A `KSLinear` for inference, or the factors of a chain in any form that `KSLinear` accepts.
        batch: Batch size of the times. None: 25088 on a GPU and 1568 on a processor.
        device: Device of PyTorch for a chain. None: the processor. A layer is timed on its own device.
        precision: Arithmetic of a chain's products. For a layer, its own precision is used.

    Returns:
        A new `KSLinear` with merged weights or a merged `Chain`; the given layer or chain if no merge is faster.

    Raises:
        LaunchError: The layer has an activation between its factors, quantized weights, or is split over processes.
        PatternError: A factor exchanges its outputs or inputs.
        SpecError: An option is not accepted.

    Examples:
        >>> from ksgen import monarch
        >>> from ksgen.torch import optimize
        >>> optimize(monarch(64, 64, 8, 8), batch=4).out_features
        64
    """
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
    if order := layer.chain.exchanged:
        what = f"{layer.chain} exchanges {order.features}"
        raise PatternError(f"{what}; accepted for a chain to merge: {order.features} in {order.natural}")
    where, dtype = layer.weights[0].device, layer.weights[0].dtype
    clock = clock_of(where, precision)
    rows = checked_count("batch", (CPU_BATCH if clock.is_processor else GPU_BATCH) if batch is None else batch)
    layers = [layer, *(_merged(layer, sizes) for sizes in _partitions(layer.chain, clock, precision, rows))]
    frozen = [deepcopy(each).eval().requires_grad_(False).freeze() for each in layers]
    shape = (rows, layer.in_features) if layer.layout == "bsf" else (layer.in_features, rows)
    times = [us for us, _ in measured_us(frozen, torch.randn(shape, device=where, dtype=dtype))]
    best = min(range(len(layers)), key=times.__getitem__)
    return layers[best] if times[best] < (1 - MIN_SAVING) * times[0] else layer


def _partitions(chain: Chain, clock: Clock, precision: str, batch: int) -> list[list[int]]:
    """Select at most `TIMED` merges with the least expected times.

    A merge is a list of sizes: the number of neighbouring factors that each new factor replaces. All merges differ in
    their number of factors. If the cost model knows no time, the number of weights is used as the cost.
    """
    count = len(chain)

    @cache
    def cost(first: int, end: int) -> float:
        pattern = covering(chain.factors[first:end])
        us = clock.kernel_us(KernelSpec(pattern, precision), batch)
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
    return [sizes for _, sizes in sorted(each[count] for each in best[1:])][:TIMED]


def merged_chains(chain: Chain, clock: Clock, precision: str, batch: int) -> list[Chain]:
    """The chain with merged neighbours: at most `TIMED` merges, those with the least expected times."""
    partitions = _partitions(chain, clock, precision, batch)
    return [Chain(tuple(covering(part.factors) for part in _parts(chain, sizes))) for sizes in partitions]


def _parts(chain: Chain, sizes: Sequence[int]) -> list[Chain]:
    """Neighbouring factors of a chain, as many per part as the sizes say."""
    factors = iter(chain)
    return [Chain(tuple(islice(factors, size))) for size in sizes]


def _merged(layer: KSLinear, sizes: Sequence[int]) -> KSLinear:
    """Layer in which each factor is the product of the given number of neighbouring factors."""
    weights, patterns, given = list[Tensor](), list[Pattern](), iter(layer.weights)
    with torch.no_grad():
        for part in _parts(layer.chain, sizes):
            patterns.append(covering(part.factors))
            matrix = chain_to_dense(part, list(islice(given, len(part))))
            weights.append(on_support(matrix, patterns[-1]))
    options = {name: getattr(layer, name) for name in layer._settable if name not in ("between", "intermediates")}
    made = KSLinear.from_weights(weights, layer.bias, patterns=patterns, **options)
    made.requires_grad_(layer.weights[0].requires_grad)
    return made.train(layer.training)
