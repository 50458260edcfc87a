"""Chains and groups for GPUs in the emulator: one launch of all factors and one launch per factor, on equal arrays."""

from dataclasses import replace
from typing import Any

import numpy as np

from ksgen.emit.render import Source, render
from ksgen.families import check, cuda_limits, family_named
from ksgen.families.chains import factor_kernels
from ksgen.families.signature import each_chains, features_of, pitches_of
from ksgen.measure.verify import make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.reference import wide_type
from ksgen.spec import Epilogue, KernelSpec
from tests.support.kernels import Array, Run, as_bits, in_emulator, in_rows, shifted, spaced
from tests.support.kernels import pack as packed_by
from tests.support.products import arrays_of, truth_of

EVEN = (Pattern(2, 48, 64, 1), Pattern(1, 64, 48, 2))  # 128 -> 96 -> 128: nothing ragged
# 210 -> 120 -> 74 -> 19: every size with a rest
RAGGED = (Pattern(3, 20, 35, 2), Pattern(2, 37, 60, 1), Pattern(1, 19, 74, 1))
# 960 -> 576 -> 198 -> 30: j in several tiles
PLANES = (Pattern(1, 24, 40, 24), Pattern(6, 33, 96, 1), Pattern(2, 5, 33, 3))
# 240 -> 36 -> 66 -> 20: the second factor turns
NARROW = (Pattern(4, 3, 20, 3), Pattern(2, 33, 18, 1), Pattern(1, 20, 66, 1))
LIMITS = cuda_limits("sm_80")
GAP_OF_X, GAP = 5, 3  # elements between rows: of X, and of others
BAD = np.array([np.nan, np.inf, -np.inf])


def group_of(
    chains: tuple[tuple[Pattern, ...], ...],
    precision: str,
    layout: str,
    epilogue: Epilogue | None = None,
    stride: str = "dense",
) -> KernelSpec:
    return KernelSpec(chains, precision, layout, epilogue or Epilogue(), stride=stride)


def source_of(family: str, kernel: KernelSpec, constants: Any = None) -> Source:
    """A family's source, with its default constants unless others are given."""
    own = family_named(family)
    constants = constants or own.default(kernel, LIMITS)
    check(own, kernel, constants, LIMITS)
    return render(kernel, constants, family=family)


def is_right(kernel: KernelSpec, got: Array, truth: Array, chain: int = 0) -> bool:
    """Each factor rounds what it gives."""
    accepted = sum(tolerance(kernel.precision, each.c) for each in kernel.chains[chain])
    return bool(np.linalg.norm(got.astype(wide_type(got)) - truth) <= accepted * np.linalg.norm(truth))  # a NaN is not


def factor_sources(source: Source) -> list[Source]:
    """What packs each factor's weights."""
    alone = [replace(each, epilogue=Epilogue()) for each in factor_kernels(source.kernel)]
    return [render(each, own, family=source.family) for each, own in zip(alone, source.constants.parsed, strict=True)]


def run_chain(source: Source, arrays: dict[str, Array], run: Run, *, behind: int = 64) -> Array:
    """Y of one launch, NaN before.

    Inf and NaN lie behind X and between its rows; what lies behind Y and between its rows must stay.
    """
    [y] = run_group(source, arrays, run, behind=behind)
    return y


def run_group(source: Source, arrays: dict[str, Array], run: Run, *, behind: int = 64) -> list[Array]:
    """The same of several chains on one X: the outputs of all."""
    kernel, family = source.kernel, family_named(source.family)
    results = each_chains(kernel, "y")
    rows = {name: arrays[name] for name in features_of(kernel)}
    gaps = {name: (GAP_OF_X if name == "x" else GAP) * kernel.is_strided for name in rows}
    pitches = {name: array.shape[1] + gaps[name] for name, array in rows.items()}
    given: dict[str, Any] = {}
    for name, array in rows.items():
        fill = np.full_like(array[:1].reshape(-1)[:1], np.nan) if name in results else BAD
        laid = spaced(array if name not in results else np.full_like(array, np.nan), gaps[name], fill)
        given[name] = as_bits(shifted(np.concatenate([laid, np.resize(fill, behind).astype(array.dtype)])))
    for number, packing in enumerate(factor_sources(source)):
        problem = replace(make_problem(packing.kernel, 1), weights=arrays[f"weights {number}"])
        given[f"weights_{number + 1}"] = packed_by(problem, packing, run)
    given |= {name: as_bits(shifted(arrays[name])) for name in each_chains(kernel, "bias") if name in arrays}
    given |= {pitch: pitches[name] for name, pitch in pitches_of(kernel).items()}
    before, batch = (
        {name: given[name].copy() for name in results},
        arrays["x"].shape[0 if kernel.layout == "bsf" else 1],
    )
    order = family.operands(kernel, source.constants)
    run(
        source,
        source.entry,
        family.geometry(kernel, source.constants, batch),
        [*(given[name] for name in order), batch],
    )
    found = []
    for name in results:
        place = rows[name].shape, pitches[name]
        found.append(in_rows(given[name].view(rows[name].dtype), *place).copy())
        in_rows(given[name], *place)[...] = in_rows(before[name], *place)
        np.testing.assert_array_equal(
            given[name], before[name], err_msg=f"the kernel wrote behind {name}, or between its rows"
        )
    return found


def one_by_one(source: Source, arrays: dict[str, Array], run: Run, constants: list[Any] | None = None) -> Array:
    """The same by one launch per factor: with the chain's tiles, if no others are given."""
    x, batch = arrays["x"], arrays["x"].shape[0 if source.kernel.layout == "bsf" else 1]
    alone = family_named(source.family)
    chosen = constants or source.constants.parsed
    for number, (kernel, own) in enumerate(zip(factor_kernels(source.kernel), chosen, strict=True)):
        each = render(kernel, own, family=alone.name)
        x = x if x.shape[0 if kernel.layout == "bsf" else 1] == batch else np.ascontiguousarray(x.T)
        problem = replace(make_problem(kernel, batch), x=x, weights=arrays[f"weights {number}"])
        packed = packed_by(problem, each, run)
        y = np.full((batch, kernel.pattern.out_features)[:: 1 if kernel.layout == "bsf" else -1], np.nan, x.dtype)
        extras = [
            as_bits(arrays[name]) for name in ("bias", "residual") if name in arrays and getattr(kernel.epilogue, name)
        ]
        arguments = [as_bits(shifted(x)), packed, as_bits(y), *extras, batch]
        run(each, each.entry, alone.geometry(kernel, own, batch), arguments)
        x = y
    return x


def read_again(source: Source, batch: int) -> int:
    """Bytes of X that `mma` reads again in stages. The emulator counts only a block's first reading."""
    shape: Any = family_named(source.family).shape(source.kernel, source.constants)  # type: ignore[attr-defined]
    readings: int = sum(factor.readings for factor in shape.factors if factor.streamed)
    return max(0, readings - 1) * source.kernel.item_bytes * batch * source.kernel.in_features


def check_against_factors(
    source: Source, arrays: dict[str, Array], run: Run, constants: list[Any] | None = None
) -> None:
    """One launch is right, and gives the bits of one launch per factor."""
    got = run_chain(source, arrays, run)
    assert is_right(source.kernel, got, truth_of(source.kernel, arrays)), source.constants
    np.testing.assert_array_equal(got, one_by_one(source, arrays, run, constants))


def check_within_arrays(source: Source, batch: int) -> None:
    """A launch reads nothing outside its arrays and has no races."""
    arrays = arrays_of(source.kernel, batch)
    expected = run_chain(source, arrays, in_emulator())
    for sanitize in ("address", "race"):
        np.testing.assert_array_equal(run_chain(source, arrays, in_emulator(sanitize=sanitize), behind=0), expected)
