"""Groups of KSLinear layers: values and gradients of each layer alone, when one launch serves them, what is refused."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
from torch import nn  # noqa: E402  (after the skip)

from ksgen.errors import LaunchError, ToolchainError  # noqa: E402
from ksgen.launch.fused import Verdict  # noqa: E402
from ksgen.launch.group import GroupLauncher  # noqa: E402
from ksgen.spec import Epilogue  # noqa: E402
from ksgen.torch import KSLinear, freeze  # noqa: E402
from ksgen.torch.layer import group  # noqa: E402
from ksgen.torch.layer.group import KSLinears  # noqa: E402
from ksgen.torch.operators import choice, meanwhile  # noqa: E402
from tests.support.torch_cases import use_kernels  # noqa: E402

CHAINS = ([(3, 5, 4, 2), (1, 7, 10, 3)], [(2, 9, 4, 3)], [(1, 4, 8, 3), (3, 6, 4, 1), (1, 5, 9, 2)])  # 24 -> 21, 54, 10
MANY = 120


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that one launch served."""
    use_kernels(monkeypatch)
    torch.manual_seed(0)
    found: list[int] = []
    call = GroupLauncher.__call__

    def watched(own: GroupLauncher, x: Any, *given: Any, **options: Any) -> Any:
        found.append(len(x))
        return call(own, x, *given, **options)

    monkeypatch.setattr(GroupLauncher, "__call__", watched)
    return found


@pytest.fixture
def in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run groups in one launch, as if measurements had favoured it."""
    monkeypatch.setattr(choice, "faster", lambda job, ways: "ksgen")


def layers(**options: Any) -> list[KSLinear]:
    return [KSLinear(chain, **options) for chain in CHAINS]


def rows(*shape: int, layout: str = "bsf") -> Any:
    return torch.randn(*shape, 24) if layout == "bsf" else torch.randn(24, *shape)


def test_one_launch_of_small_batches_where_it_is_asked_for(launched: list[int]) -> None:
    for fuse, expected in (("yes", [1]), ("auto", []), ("no", [])):
        launched.clear()
        own, x = layers(fuse=fuse, backend="ksgen"), rows(1)
        with torch.no_grad():
            assert torch.allclose(KSLinear.group(own)(x), torch.cat([layer(x) for layer in own], -1), atol=1e-5)
        assert launched == expected


@pytest.mark.exhaustive
@pytest.mark.usefixtures("in_one_launch")
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_are_those_of_each_alone(launched: list[int], layout: str, bias: bool) -> None:
    own = layers(layout=layout, bias=bias, activation="relu", backend="ksgen")
    together = KSLinear.group(own)
    assert isinstance(together, KSLinears)
    with torch.no_grad():
        for x in (
            rows(MANY, layout=layout),
            rows(6, 20, layout=layout),
            rows(3, 40, layout=layout).clone()[..., :] * 2,
        ):
            alone = [layer(x) for layer in own]
            for y, wanted in zip(together.parts(x), alone, strict=True):
                torch.testing.assert_close(y, wanted)
            torch.testing.assert_close(together(x), torch.cat(alone, -1 if layout == "bsf" else 0))
    assert len(launched) == (6 if layout == "bsf" else 0)  # each factor by itself in batch-size-last


@pytest.mark.usefixtures("in_one_launch")
def test_a_slice_of_a_larger_tensor(launched: list[int]) -> None:
    own, x = layers(backend="ksgen"), torch.randn(4, 30, 60)[..., 20:44]
    with torch.no_grad():
        for y, layer in zip(KSLinear.group(own).parts(x), own, strict=True):
            torch.testing.assert_close(y, layer(x.clone()))
    assert launched


@pytest.mark.usefixtures("in_one_launch")
def test_gradients_are_those_of_each_alone(launched: list[int]) -> None:
    own, x = layers(), rows(MANY).requires_grad_()
    together, weight = KSLinear.group(own), torch.randn(MANY, 85)
    (together(x) * weight).sum().backward()
    found = [x.grad, *(each.grad for each in together.parameters())]
    x.grad = None
    together.zero_grad()
    (torch.cat([layer(x) for layer in own], -1) * weight).sum().backward()
    for one, other in zip(found, [x.grad, *(each.grad for each in together.parameters())], strict=True):
        torch.testing.assert_close(one, other)
    assert not launched


@pytest.mark.usefixtures("in_one_launch")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_outputs_of_one_launch_may_be_written_to_in_training(launched: list[int], is_frozen: bool) -> None:
    """A frozen base with a trained addition, which the outputs of separate layers allow, too."""
    together, x = KSLinear.group(layers(backend="ksgen")).requires_grad_(False), rows(MANY)
    if is_frozen:
        together.freeze()
    for is_recorded in (True, False):
        for _ in range(3):
            added = nn.Parameter(torch.ones(21))
            with torch.set_grad_enabled(is_recorded):
                first, *others = together.parts(x)
            before = [each.clone() for each in others]
            first += added
            first.sum().backward()
            assert torch.equal(added.grad, torch.full((21,), float(MANY)))
            assert all(map(torch.equal, others, before))
    assert launched


@pytest.mark.usefixtures("in_one_launch")
def test_frozen_layers_notice_a_write(launched: list[int]) -> None:
    own, x = layers(backend="ksgen"), rows(MANY)
    together = KSLinear.group(own)
    freeze(together)
    with torch.no_grad():
        first = together(x)
        torch.testing.assert_close(first, torch.cat([layer(x) for layer in own], -1))
        own[1].weights[0].mul_(2)
        with pytest.warns(UserWarning, match="is frozen no more: weights.0 was written to"):
            again = together(x)
        torch.testing.assert_close(again, torch.cat([layer(x) for layer in own], -1))
        assert not torch.equal(first, again)
        own[2].weights[1] = nn.Parameter(own[2].weights[1] * 3)
        with pytest.warns(UserWarning, match="weights.1 was replaced by another tensor"):
            again = together(x)
        torch.testing.assert_close(again, torch.cat([layer(x) for layer in own], -1))
    assert launched


def test_auto_takes_the_faster_and_reports_it(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measured", {})
    own = layers()
    together, x = KSLinears(own), rows(MANY)
    with torch.no_grad():
        together(x)
        assert len(launched) >= meanwhile.ROUNDS  # it was timed against each layer alone
        assert "all layers: " in together.explain(MANY)
        assert {line[0] for line in together.explain(MANY).splitlines()} >= {"1", "2", "3"}
        (key,) = [each for each in choice._measured if isinstance(each[0][0], tuple) and each[0][0][0] == "group"]
        for faster, expected in (("each", 0), ("ksgen", 1)):
            monkeypatch.setitem(choice._measured, key, {"ksgen": 1.0, "each": 1.0} | {faster: 0.5})
            launched.clear()
            together(x)
            together.parts(x)
            assert len(launched) == 2 * expected


def test_in_batch_size_last_each_layer_is_launched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's launcher launches each factor by itself there, so that one launch is not timed, and not told of."""
    monkeypatch.setattr(choice, "_measured", {})
    own = [KSLinear(chain, layout="bsl") for chain in CHAINS]
    x = torch.randn(own[0].in_features, MANY)
    with torch.no_grad():
        together = KSLinears(own)
        torch.testing.assert_close(together(x), torch.cat([layer(x) for layer in own]))
        assert "all layers" not in together.explain(MANY)


def test_on_a_gpu_the_cost_model_decides(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's explanation shows the verdict. Layers run one by one from then on if one launch cannot be built."""
    own, x, asked = layers(activation="relu"), rows(MANY), []
    together = KSLinear.group(own)
    verdicts = [Verdict(True, "it is faster"), Verdict(False, "it is slower")]

    def expected(_own: GroupLauncher, _device: Any, *job: Any) -> Verdict:
        asked.append(job)
        return verdicts[0]

    monkeypatch.setattr(group, "_place_of", lambda _: "cuda")
    monkeypatch.setattr(choice, "is_one_launch", expected)
    monkeypatch.setattr(choice, "disable_fusion", lambda _own, error: verdicts.pop(0))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    with torch.no_grad():
        wanted = torch.cat([layer(x) for layer in own], -1)
        torch.testing.assert_close(together(x), wanted)
        assert together.explain(MANY).startswith("one launch: it is faster\n1. ")
        assert (launched, set(asked)) == ([MANY], {("float32", "bsf", Epilogue(True, "relu"), MANY)})

        def unbuilt(*_: Any, **__: Any) -> None:
            raise ToolchainError("no compiler")

        monkeypatch.setattr(GroupLauncher, "__call__", unbuilt)
        for _ in range(2):
            torch.testing.assert_close(torch.cat(list(together.parts(x)), -1), wanted)
    assert len(verdicts) == 1
    assert together.explain(MANY).startswith("layer by layer: it is slower\n")
    verdicts[0], own[1].activation = Verdict(True, "it is faster"), "none"
    assert together.explain(MANY).startswith("layer by layer: the layers differ in more than their chains\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda own: own[1].register_forward_hook(lambda *given: None),
        lambda own: setattr(own[1], "activation", "relu"),
        lambda own: setattr(own[0], "between", "relu"),
        lambda own: [setattr(each, "fuse", "no") for each in own],
        lambda own: setattr(own[1], "backend", "bmm"),
        lambda own: own[1].double(),
        lambda own: setattr(own[1], "bias", None),
    ],
)
def test_layers_that_differ_are_called_one_by_one(launched: list[int], change: Any) -> None:
    own = layers(backend="ksgen")
    change(own)
    together = KSLinears(own)
    with torch.no_grad():
        assert not together._fits_one_launch(rows(MANY))


def test_hooks_of_all_modules_see_each_layer(launched: list[int]) -> None:
    together, seen, x = KSLinears(layers(backend="ksgen")).eval().freeze(), list[Any](), rows(MANY)
    with torch.no_grad():
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
        try:
            for _ in range(3):
                together(x)
        finally:
            handle.remove()
        assert seen == [*together, together] * 3
        assert together._fits_one_launch(x)


def test_other_modules_in_a_layers_place() -> None:
    """Are explained, and have a matrix where they are an nn.Linear."""
    together, x = KSLinear.group(layers(bias=False)), rows(5)
    together[1] = nn.Linear(24, 6, bias=False)
    lines = together.explain(5).splitlines()
    assert (lines[0][:3], "2. Linear: no layer of ksgen, called directly" in lines) == ("1. ", True)
    torch.testing.assert_close(together(x), x @ together.to_dense().T)
    together[1] = nn.Sequential(nn.Linear(24, 6), nn.ReLU())
    assert "2. Sequential: no layer of ksgen, called directly" in together.explain(5)
    with pytest.raises(
        LaunchError, match="layer 2 of the group is a Sequential, whose matrix is not known; accepted: layers"
    ):
        together.to_dense()
    assert KSLinears([]).explain() == ""


def test_compiled_and_exported(launched: list[int]) -> None:
    """The operators of each layer are visible, as in a layer alone."""
    own, x = layers(), rows(MANY)
    together = KSLinear.group(own)
    with torch.no_grad():
        wanted = torch.cat([layer(x) for layer in own], -1)
        program = torch.export.export(together, (x,))
        torch.testing.assert_close(program.module()(x), wanted)
    assert not launched


@pytest.mark.usefixtures("in_one_launch")
def test_layers_that_are_transposed_later_are_refused(launched: list[int]) -> None:
    """The refusal includes shapes that would fit: x with as many rows as features."""
    for transposed in ((1,), (0, 1)):
        together, x = (
            KSLinear.group([KSLinear([(2, 8, 4, 3)], fuse="yes", backend="ksgen") for _ in range(2)]).eval(),
            rows(48),
        )
        together.freeze()
        with torch.no_grad():
            for _ in range(3):
                together(x)
            for number in transposed:
                together[number].out_layout = "bsl"
            launched.clear()
            for _ in range(3):
                with pytest.raises(
                    LaunchError, match="out_layout='bsl' of a layer of a group; accepted: layers without it"
                ):
                    together(x)
                assert [y.shape for y in together.parts(x)] == [(48, 48)] * 2
                torch.testing.assert_close(together.parts(x)[1], together[1](x))
        assert not launched


def test_outputs_of_several_layouts_are_not_concatenated() -> None:
    together, x = KSLinear.group([KSLinear([(2, 8, 4, 3)]) for _ in range(2)]), rows(24)
    together[1].layout = "bsl"
    with pytest.raises(LaunchError, match=r"layers of layouts bsf, bsl; accepted: one layout, or parts\(x\)"):
        together(x)
    assert [y.shape for y in together.parts(x)] == [(24, 48), (48, 24)]


def test_a_group_without_layers() -> None:
    together = KSLinear.group([KSLinear([(2, 8, 4, 3)])])[:0]
    assert list(together.parts(rows(2))) == []
    for call in (lambda: together(rows(2)), together.to_dense):
        with pytest.raises(LaunchError, match="a group without layers; accepted: one or more"):
            call()


def test_what_is_no_group() -> None:
    with pytest.raises(LaunchError, match="accepted: a list of KSLinear, one or more"):
        KSLinear.group([])
    with pytest.raises(LaunchError, match="accepted: a list of KSLinear, one or more"):
        KSLinear.group([nn.Linear(3, 4)])
    with pytest.raises(LaunchError, match="layers that take 24, 30 features; accepted: layers that take the same x"):
        KSLinear.group([KSLinear([(2, 9, 4, 3)]), KSLinear([(1, 3, 30, 1)])])
