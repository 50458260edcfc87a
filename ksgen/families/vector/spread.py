"""Statements that spread the d inputs of one l over vectors whose lanes are neighbouring outputs (k, j)."""

from math import gcd

from ksgen.spec.precision import Precision, part_of


def period_of(d: int, lanes: int) -> int:
    """Vectors of neighbouring (k, j) after which the j of their lanes repeat."""
    return d // gcd(d, lanes)


def spread(d: int, lanes: int, mask: str, precision: Precision, vectors: int) -> list[str]:
    """Statements that make the first vectors of a period, `each`, of the inputs `at`. A complex number is two
    neighbours.

    If d is less than the lanes and does not divide them, they read as many inputs as there are lanes, which must exist.
    """
    halves, at = precision.halves, f"(GLOBAL const {part_of(precision)}*)at" if precision.is_complex else "at"
    d, lanes, firsts = d * halves, lanes * halves, [each * lanes % d * halves for each in range(vectors)]
    if d == lanes:
        return [f"each[0] = in_register(vload{lanes}(0, {at}));"]
    if lanes % d == 0:
        return ["each[0] = (lanes)(*at);" if d == 1 else f"each[0] = {_repeated(d, lanes, at)};"]
    # loaded vectors, from which shuffles make the others
    kept = {0: "head", d - lanes: "tail"} if d > lanes else {0: "head"}
    loads = [
        f"const lanes {name} = in_register(vload{lanes}(0, {at}{f' + {first}' if first else ''}));"
        for first, name in kept.items()
    ]
    if 2 * d <= lanes:  # fewer bytes are less often parts of two lines
        loads = [f"const lanes head = in_register({_repeated(1 << (d - 1).bit_length(), lanes, at)});"]

    def vector(first: int) -> str:
        if first in kept and d > lanes:
            return kept[first]
        if first + lanes <= d:
            return f"in_register(vload{lanes}(0, {at} + {first}))"
        wanted = [(first + lane) % d for lane in range(lanes)]
        if d < lanes:
            return f"in_register(shuffle2(head, head, ({mask})({_listed(wanted)})))"
        return (
            "in_register(shuffle2(tail, head, "
            f"({mask})({_listed([j - d + lanes if j >= first else lanes + j for j in wanted])})))"
        )

    return [*loads, *(f"each[{number}] = {vector(first)};" for number, first in enumerate(firsts))]


def _repeated(inputs: int, lanes: int, at: str) -> str:
    """Expression of a broadcasting load."""
    return f"vload{inputs}(0, {at}).s{''.join(f'{lane % inputs:x}' for lane in range(lanes))}"


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices))
