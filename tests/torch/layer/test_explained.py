"""What a layer explains: the lines of its own factors, and of a split layer what this process has and sends."""

import pytest

pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.torch import KSLinear
from ksgen.torch.layer.splits import split
from tests.support.torch_cases import use_kernels

UP = [(6, 64, 64, 1), (1, 768, 192, 2)]


class Parallel:
    """Stand-in for `ksgen.torch.parallel.Parallel`, with all that `explain` needs and no process group."""

    def __init__(self, layer: KSLinear, style: str) -> None:
        self.split = split(style, layer.chain, 2)


@pytest.mark.parametrize(
    ("style", "patterns", "last"),
    [("KSColwise", ("6,64,64,1", "1,384,192,2"), "_bias_gelu"), ("KSRowwise", ("3,64,64,1", "1,768,96,2"), "")],
)
def test_a_split_layer_explains_what_this_process_has(
    style: str, patterns: tuple[str, str], last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch)
    layer = KSLinear(UP, activation="gelu", backend="ksgen")
    whole = layer.explain(10)
    layer._parallel = Parallel(layer, style)
    told, *lines = layer.explain(10).splitlines()
    assert told == layer._parallel.split.explain(10, 4, has_bias=True)
    assert [line.partition(": ")[0] for line in lines] == list(patterns)
    assert all(
        f"ks_{pattern.replace(',', 'x')}_float32_bsf{end} at" in line
        for pattern, line, end in zip(patterns, lines, ("", last), strict=True)
    )
    assert f", on this process {' then '.join(patterns)}" in repr(layer)
    assert [line.partition(": ")[0] for line in whole.splitlines()] == ["6,64,64,1", "1,768,192,2"]
    assert "_bias_gelu at batch 10" in whole


def test_splits_come_last() -> None:
    lines = KSLinear(UP, backend="einsum").explain(10, processes=2).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["6,64,64,1:", "1,768,192,2:", "not", "KSColwise", "KSRowwise"]


def test_on_a_processor_it_says_what_was_asked_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    told = {
        fuse: KSLinear(UP, fuse=fuse, backend="ksgen").explain(10).splitlines()[0] for fuse in ("auto", "yes", "no")
    }
    assert told.pop("auto").startswith("6,64,64,1: ")
    assert told == {"yes": "one launch: fuse='yes'", "no": "one launch per factor: fuse='no'"}
