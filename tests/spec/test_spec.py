"""What a spec knows of its layers."""

from ksgen.pattern import Chain, Pattern
from ksgen.spec import LayerOptions, Spec

ONE, OTHER = Chain((Pattern(1, 4, 8, 1),)), Chain((Pattern(2, 4, 4, 1),))


def test_a_layer_is_one_chain_and_a_group_all_of_them() -> None:
    spec = Spec("own", (), {"up": ONE}, {"heads": (ONE, OTHER)}, {"up": LayerOptions(fuse="yes")})
    assert spec.chains_of == {"up": (ONE,), "heads": (ONE, OTHER)}
    assert spec.options_of("up").fuse == "yes"
    assert spec.options_of("heads") == LayerOptions()
