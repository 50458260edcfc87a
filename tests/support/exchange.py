"""The order of exchanged features, counted digit by digit, and patterns with such features."""

from hypothesis import strategies as st

from ksgen.order import Order
from ksgen.pattern import Pattern

# runs of neighbours that fill sectors, then features without neighbours
RUNS = ("l1:4.i.l2@8,64,64,1", "8,64,64,1@k1:4.i.k2")
SINGLE_INPUTS, SINGLE_OUTPUTS = "l.i@8,64,64,1", "8,64,64,1@k.i"
TEXTS = (*RUNS, SINGLE_INPUTS, SINGLE_OUTPUTS)
EXCHANGING = {  # a precision of each family that reads or stores exchanged features
    "simt": "float32", "mma": "bfloat16", "gemv": "float16", "wgmma_shared": "bfloat16", "wgmma_registers": "tf32",
    "gradient": "float32", "gradient_mma": "bfloat16",
}  # fmt: skip


def stored_order(order: Order) -> list[int]:
    """Feature at each place in memory, counted in the natural order, digit by digit."""
    _, inner, j = order.sizes
    units = dict(zip(order.names, (inner * j, j, 1), strict=True))
    found = [0]
    for digit in order.digits:
        found = [at + value * digit.unit * units[digit.name] for at in found for value in range(digit.size)]
    return found


@st.composite
def orders(draw: st.DrawFn, natural: Order) -> str:
    """Texts of orders whose indices are divided in two at most."""
    digits = []
    for index, size in zip(natural.names, natural.sizes, strict=True):
        first = draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
        digits += [f"{index}1:{first}", f"{index}2:{size // first}"]
    return ".".join(draw(st.permutations(digits)))


@st.composite
def exchanged_patterns(draw: st.DrawFn) -> Pattern:
    """Patterns that store outputs and read inputs in any order."""
    natural = Pattern(*(draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(4)))
    return Pattern(*natural.shape, draw(orders(natural.outputs)), draw(orders(natural.inputs)))
