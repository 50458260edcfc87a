"""The order of exchanged outputs, counted digit by digit."""

from ksgen.pattern import Pattern


def stored_order(pattern: Pattern) -> list[int]:
    """Output at each place in memory, counted in the order (i, k, j), digit by digit."""
    units = {"i": pattern.b * pattern.d, "k": pattern.d, "j": 1}
    order = [0]
    for digit in pattern.digits:
        order = [at + value * digit.unit * units[digit.name] for at in order for value in range(digit.size)]
    return order
