"""How the d inputs of one l lie in the lanes of vectors whose lanes are neighbouring outputs (k, j)."""

from math import gcd

from ksgen.spec.precision import Precision, part_of


def period_of(d: int, lanes: int) -> int:
    """Vectors of neighbouring (k, j) after which their lanes hold the same j again."""
    return d // gcd(d, lanes)


def spread(d: int, lanes: int, mask: str, precision: Precision) -> list[str]:
    """For each vector of a period the expression that makes it of the inputs `at`. Where d does not divide the lanes but is less, it reads
    as many inputs as there are lanes: `at` points into a panel then. A complex number is two neighbours."""
    halves, at = precision.halves, f"(GLOBAL const {part_of(precision)}*)at" if precision.is_complex else "at"
    firsts = [each * lanes % d for each in range(period_of(d, lanes))]
    return [_spread(d * halves, lanes * halves, mask, first * halves, at) for first in firsts]


def _spread(d: int, lanes: int, mask: str, first: int, at: str) -> str:
    """A vector whose first lane has j = `first`."""
    if d == 1:
        return "(lanes)(*at)"
    if first + lanes <= d:
        return f"in_register(vload{lanes}(0, {at} + {first}))" if first else f"in_register(vload{lanes}(0, {at}))"
    wanted = [(first + lane) % d for lane in range(lanes)]
    if lanes % d == 0:
        return f"vload{d}(0, {at}).s{''.join(f'{j:x}' for j in wanted)}"
    if d < lanes:
        return f"shuffle2(vload{lanes}(0, {at}), vload{lanes}(0, {at}), ({mask})({_listed(wanted)}))"
    last = d - lanes  # where the vector of the last inputs begins
    taken = [j - last if j >= first else lanes + j for j in wanted]
    return f"shuffle2(vload{lanes}(0, {at} + {last}), vload{lanes}(0, {at}), ({mask})({_listed(taken)}))"


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices))
