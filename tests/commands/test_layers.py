"""The options by which a command line names a layer or a group, and what a mistake in them says."""

import pytest

from ksgen.commands.layers import Layer, chain_in
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue
from tests.support.commands import run

FIRST, SECOND = Pattern(2, 9, 5, 3), Pattern(1, 4, 18, 3)


def test_a_layer_is_what_launchers_ask_for() -> None:
    """The kernels of a group are slices, because its outputs share one array. A single product is no layer."""
    pair = chain_in("2,9,5,3 1,4,18,3")
    assert pair == Chain((FIRST, SECOND))
    layers = (
        Layer((FIRST,)),
        Layer((FIRST,), out_layout="bsl"),
        Layer((FIRST, SECOND), between="relu"),
        Layer((FIRST,), (pair,)),
    )
    found = [layer.launch("float32", "bsf", Epilogue(), "same") for layer in layers]
    assert [kernel and kernel.name.removeprefix("ks_2x9x5x3_") for kernel in found] == [
        None, "float32_bsf_to_bsl", "1x4x18x3_float32_bsf_relu_between", "and_2x9x5x3_1x4x18x3_float32_bsf_strided"
    ]  # fmt: skip
    assert [layer.is_asked_for for layer in layers] == [False, True, True, True]


def test_the_earlier_name_of_chain_is_read_and_warns() -> None:
    done = run("show", "1,2,3,1", "--beside", "1,4,3,1", "--group-with", "1,3,3,1", "--batch", "5")
    assert "ks_1x2x3x1_and_1x3x3x1_and_1x4x3x1_float32_bsf" in done.stdout
    assert done.stderr == "warning: --beside is deprecated and will be removed; use --group-with\n"
    assert "--beside" not in run("show", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--group-with", "1,2,3,1"),
            "got 0 patterns of a layer; accepted: one, such as ksgen run 1,192,48,2; one per factor of a layer; or "
            "--spec FILE",
        ),
        (
            ("1,2,3,1", "--group-with", "1,2,4,1"),
            "chains 1,2,3,1, 1,2,4,1 of a group; accepted: equal numbers of input features",
        ),
        (("1,2,3,1", "--group-with", " "), "--group-with ' '; accepted: patterns such as '6,64,64,1 1,768,192,2'"),
        (
            ("1,2,3,1", "--between", "relu"),
            "--between relu with one factor; accepted: a layer of two or more patterns",
        ),
        (
            ("1,2,3,1", "--group-with", "1,3,3,1", "--out-layout", "bsl"),
            "--out-layout bsl of a group of chains; accepted: --out-layout of one chain",
        ),
        (
            ("1,2,3,1", "--group-with", "1,3,3,1", "--job", "gradient"),
            "--job gradient of 1 pattern with --group-with; accepted: one pattern",
        ),
        (
            ("1,2,3,1", "1,4,2,1", "--job", "gradient"),
            "--job gradient of 2 patterns; accepted: one pattern, such as ksgen run 1,192,48,2",
        ),
        (
            ("1,2,3,1", "--job", "gradient", "--inputs", "int8"),
            "job=gradient with inputs=int8; accepted: inputs=same, because training",
        ),
        (
            ("1,2,3,1", "1,4,2,1", "--between", "relu", "--precision", "complex64"),
            "between=relu of complex numbers, complex64; accepted",
        ),
    ],
)
def test_mistakes_about_layers(arguments: tuple[str, ...], says: str) -> None:
    assert str(run("run", *arguments).exception).startswith(says)
