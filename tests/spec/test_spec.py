"""What a spec knows of its layers."""

from ksgen.pattern import Chain, Pattern
from ksgen.spec import LayerOptions, Spec

ONE, OTHER = Chain((Pattern(1, 4, 8, 1),)), Chain((Pattern(2, 4, 4, 1),))


def test_a_layer_is_one_chain_and_a_group_all_of_them() -> None:
    sums = {"total": (ONE, OTHER)}
    spec = Spec("own", (), {"up": ONE}, {"heads": (ONE, OTHER)}, {"up": LayerOptions(fuse="yes")}, sums=sums)
    chains = {"up": (ONE,), "heads": (ONE, OTHER), "total[0]": (ONE,), "total[1]": (OTHER,)}
    assert (spec.chains_of, spec.names) == (chains, ("up", "heads", "total"))
    assert spec.options_of("up").fuse == "yes"
    assert spec.options_of("heads") == LayerOptions()
