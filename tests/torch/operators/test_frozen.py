"""Tests of weights that change: derived values are used again only while the layer is frozen.

Frozen layers thaw, with a warning, at every change that can be seen.
"""

import copy
import gc
import io
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install 'ksgen[torch]'")

from torch import nn  # noqa: E402  (after the skip)
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters  # noqa: E402

from ksgen.errors import LaunchError  # noqa: E402
from ksgen.launch.plan import Plan  # noqa: E402
from ksgen.launch.weights import Weights  # noqa: E402
from ksgen.spec import LAYOUTS  # noqa: E402
from ksgen.torch import KSLinear, freeze, multiply, thaw  # noqa: E402
from ksgen.torch.operators import choice, frozen, products  # noqa: E402
from ksgen.torch.operators.backends import BACKENDS, NAMES, multiply_all_by  # noqa: E402
from tests.support.torch_cases import error, matrix, truth, use_kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # block-sparse rows are in beta, says PyTorch
CHAIN = [(2, 8, 4, 3), (4, 6, 12, 1)]  # 24 -> 48 -> 24
NAME = r"KSLinear\(2,8,4,3 then 4,6,12,1\)"
WAYS = [*NAMES, "kernels"]
Write = Callable[[KSLinear], object]


def make(way: str, monkeypatch: pytest.MonkeyPatch, layout: str = "bsf", **options: Any) -> KSLinear:
    """A layer with a backend; "kernels" is ksgen's own, on the processor."""
    torch.manual_seed(0)
    if way == "kernels":
        use_kernels(monkeypatch)
    return KSLinear(CHAIN, backend="ksgen" if way == "kernels" else way, layout=layout, **options)


def check(layer: KSLinear, x: Any) -> None:
    """The layer multiplies by what its weights are now."""
    with torch.no_grad():
        found = layer(x)
    between = truth(x, layer.weights[0], layer.layout)
    assert error(found, truth(between, layer.weights[1], layer.layout, layer.bias)) < 1e-6


# ---- who writes


def others(layer: KSLinear) -> list[Any]:
    return [torch.randn_like(weights) for weights in layer.weights]


def in_place(layer: KSLinear) -> None:
    with torch.no_grad():
        for weights, other in zip(layer.weights, others(layer), strict=True):
            weights.copy_(other)


def by_data(layer: KSLinear) -> None:
    for weights, other in zip(layer.weights, others(layer), strict=True):
        weights.data.copy_(other)


def by_numpy(layer: KSLinear) -> None:
    for weights, other in zip(layer.weights, others(layer), strict=True):
        weights.detach().numpy()[...] = other.numpy()


def stepped(kind: Any, **options: Any) -> Write:
    def step(layer: KSLinear) -> None:
        for weights, other in zip(layer.weights, others(layer), strict=True):
            weights.grad = other
        kind(layer.weights.parameters(), lr=0.5, **options).step()
        for weights in layer.weights:
            weights.grad = None

    return step


def by_collective(layer: KSLinear) -> None:
    """Write as DDP's broadcasts do. A scatter is what changes values with one process."""
    for weights, other in zip(layer.weights, others(layer), strict=True):
        torch.distributed.scatter(weights.data, [other])


def loaded(**options: Any) -> Write:
    def load(layer: KSLinear) -> None:
        state = {f"weights.{number}": other for number, other in enumerate(others(layer))}
        layer.load_state_dict(layer.state_dict() | state, **options)

    return load


def by_new_data(layer: KSLinear) -> None:
    for weights, other in zip(layer.weights, others(layer), strict=True):
        weights.data = other


def by_vector(layer: KSLinear) -> None:
    vector_to_parameters(torch.randn_like(parameters_to_vector(layer.weights.parameters())), layer.weights.parameters())


def swapped(layer: KSLinear) -> None:
    for weights, other in zip(layer.weights, others(layer), strict=True):
        torch.utils.swap_tensors(weights, nn.Parameter(other))


def replaced(layer: KSLinear) -> None:
    for number, other in enumerate(others(layer)):
        layer.weights[number] = nn.Parameter(other)


def there_and_back(layer: KSLinear) -> None:
    """PyTorch counts nothing, and may give the memory that the weights had before."""
    layer.double().float()
    by_data(layer)


UNSEEN: dict[str, Write] = {".data": by_data, "NumPy": by_numpy, "collective": by_collective}
WRITTEN, MEMORY, STEP = "was written to", "got other memory", "was in a step of "
SEEN: dict[str, tuple[Write, str]] = {
    "in place": (in_place, WRITTEN),
    "AdamW fused": (stepped(torch.optim.AdamW, fused=True), f"{STEP}AdamW"),
    "SGD fused": (stepped(torch.optim.SGD, fused=True), f"{STEP}SGD"),
    "AdamW foreach": (stepped(torch.optim.AdamW, foreach=True), f"{STEP}AdamW"),
    "SGD": (stepped(torch.optim.SGD, foreach=False), f"{STEP}SGD"),
    "loaded": (loaded(), WRITTEN),
    "loaded, assigned": (loaded(assign=True), "was replaced by another tensor"),
    "new .data": (by_new_data, MEMORY),
    "vector": (by_vector, MEMORY),
    "swapped": (swapped, MEMORY),
    "replaced": (replaced, "was replaced by another tensor"),
    "there and back": (there_and_back, MEMORY),
}
WRITES = UNSEEN | {name: write for name, (write, _) in SEEN.items()}


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("gloo") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# ---- weights that are not frozen


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", WRITES)
def test_the_next_product_is_by_the_new_weights_whatever_wrote_them(
    write: str, way: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(way, monkeypatch, layout), matrix(5, 24, layout, torch.float32)
    check(layer, x)
    for _ in range(2):
        WRITES[write](layer)
        WRITES[write](layer)
        check(layer, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [way for way in WAYS if way != "bsr"])
@pytest.mark.parametrize("write", UNSEEN)
def test_gradients_of_x_are_by_the_new_weights(write: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(way, monkeypatch, bias=False), matrix(5, 24, "bsf", torch.float32, requires_grad=True)
    layer.requires_grad_(False)
    for _ in range(3):
        WRITES[write](layer)
        (found,) = torch.autograd.grad(layer(x).sum(), x)
        eye = torch.eye(24, requires_grad=True)
        expected = KSLinear.from_weights(layer.weights, backend="einsum")(eye).sum(1).detach().expand(5, 24)
        torch.testing.assert_close(found, expected)


# ---- frozen weights


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of functions that derive values from weights, in order."""
    made: list[str] = []

    def noted(function: Any, name: str) -> Any:
        return lambda *given, **options: made.append(name) or function(*given, **options)

    for name, backend in BACKENDS.items():
        if name != "einsum":  # which prepares nothing
            monkeypatch.setitem(BACKENDS, name, replace(backend, prepare=noted(backend.prepare, name)))
    monkeypatch.setattr(products, "by_matrix", noted(products.by_matrix, "by_matrix"))
    monkeypatch.setattr(products, "blocks_of", noted(products.blocks_of, "blocks_of"))
    monkeypatch.setattr(Plan, "pack", noted(Plan.pack, "pack"))
    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "einsum"])  # which prepares nothing
def test_frozen_weights_are_prepared_once_and_others_at_each_call(
    way: str, layout: str, monkeypatch: pytest.MonkeyPatch, prepared: list[str]
) -> None:
    monkeypatch.setattr("ksgen.torch.operators.prepared.multiply", lambda *_: None)
    layer, x = make(way, monkeypatch, layout), matrix(5, 24, layout, torch.float32)
    check(layer, x)  # "auto" times its ways
    prepared.clear()
    check(layer, x)
    once = list(prepared)
    assert len(once) >= 2  # a factor each
    for _ in range(2):
        check(layer, x)
    assert prepared == 3 * once
    prepared.clear()
    assert layer.freeze() is layer
    for _ in range(3):
        check(layer, x)
        check(layer, matrix(5, 24, layout, torch.float32))
    settled = list(prepared)
    layer.freeze()  # once more changes nothing
    check(layer, x)
    assert prepared == settled
    assert way == "auto" or sorted(prepared) == sorted(once)  # which prepares all of its ways
    prepared.clear()
    assert layer.thaw() is layer
    for _ in range(2):
        check(layer, x)
    assert prepared == 2 * once


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", SEEN)
def test_a_write_that_can_be_seen_thaws_in_words_once(write: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(way, monkeypatch), matrix(5, 24, "bsf", torch.float32)
    check(layer.freeze(), x)
    assert layer.is_frozen
    does, what = SEEN[write]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        does(layer)
        assert not layer.is_frozen
        for _ in range(2):
            check(layer, x)
    (message,) = [str(each.message) for each in told if "frozen" in str(each.message)]
    # neither ksgen's line nor PyTorch's
    assert [each.filename for each in told if "frozen" in str(each.message)] == [__file__]
    name = NAME.replace("\\", "")
    assert message.startswith(f"{name} is frozen no more: weights.")
    assert message.endswith(f" {what}; freeze() it again once its weights no longer change")
    assert not layer.is_frozen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_place(layer)
        check(layer.freeze(), x)
        check(layer, x)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "einsum"])
@pytest.mark.parametrize("write", UNSEEN)
def test_what_cannot_be_seen_is_what_freezing_promises(write: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(way, monkeypatch), matrix(5, 24, "bsf", torch.float32)
    check(layer.freeze(), x)
    UNSEEN[write](layer)
    assert layer.is_frozen  # and what it gives now may be by any of both
    check(layer.thaw(), x)


def test_training_mode_thaws_and_evaluation_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make("bmm", monkeypatch).freeze()
    assert layer.eval() is layer
    assert layer.is_frozen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nn.Sequential(layer).train()[0] is layer
    assert not layer.is_frozen


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_as_if_nothing_were_frozen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a step: while weights take gradients, nothing that was kept is used."""
    if way == "bsr":
        pytest.skip("it has no gradients")
    layer, plain, x = (
        make(way, monkeypatch),
        make(way, monkeypatch),
        matrix(5, 24, "bsf", torch.float32, requires_grad=True),
    )
    check(layer.freeze(), x)
    by_data(layer)  # against the promise: gradients are right even so
    for mine, other in zip(plain.weights, layer.weights, strict=True):
        mine.data.copy_(other)
    found, expected = (torch.autograd.grad(each(x).square().sum(), [x, *each.weights]) for each in (layer, plain))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("way", "forms"), [("kernels", 4), ("auto", 2), ("strided", 2), ("bmm", 2), ("dense", 2)])
def test_gradients_of_x_alone_take_what_is_kept(
    way: str, forms: int, monkeypatch: pytest.MonkeyPatch, prepared: list[str]
) -> None:
    """Transposed ones too."""
    layer, x = make(way, monkeypatch).requires_grad_(False), matrix(5, 24, "bsf", torch.float32, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), x)
    layer.freeze()
    prepared.clear()
    for _ in range(3):
        torch.testing.assert_close(torch.autograd.grad(layer(x).square().sum(), x), expected)
    assert len([each for each in prepared if each in ("pack", "by_matrix", "blocks_of")]) == (
        0 if way == "dense" else forms
    )
    assert prepared.count("dense") == (2 if way == "dense" else 0)


# ---- whole models


def test_a_model_is_frozen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(make("auto", monkeypatch), nn.GELU(), make("bmm", monkeypatch), nn.Linear(24, 24))
    x = torch.randn(5, 24)
    with torch.no_grad():
        expected = model(x)
        assert freeze(model) == ["0", "2"]
        assert (model[0].is_frozen, model[2].is_frozen) == (True, True)
        torch.testing.assert_close(model(x), expected)
        model[2].weights[1].mul_(2)
        with pytest.warns(
            UserWarning, match=rf"^2, a {NAME}, is frozen no more: weights.1 was written to; freeze\(\) it again once"
        ):
            model(x)
        assert (model[0].is_frozen, model[2].is_frozen) == (True, False)
        assert thaw(model) == ["0"]
        assert thaw(model) == []
    assert freeze(nn.Linear(3, 3)) == []
    assert freeze(model[0]) == [""]


def test_layers_that_share_weights_thaw_together(monkeypatch: pytest.MonkeyPatch, prepared: list[str]) -> None:
    first, second, x = make("bmm", monkeypatch), make("bmm", monkeypatch), torch.randn(5, 24)
    second.weights[1] = first.weights[1]
    model = nn.ModuleDict({"first": first, "second": second})
    freeze(model)
    check(first, x)
    check(second, x)
    assert prepared.count("bmm") == 3
    first.thaw()
    check(second, x)
    assert prepared.count("bmm") == 3
    freeze(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first.weights[1].mul_(2)
        check(first, x)
        check(second, x)
    assert [str(each.message).split(",")[0] for each in told] == ["first", "second"]


def test_an_optimizer_of_the_memory_that_holds_them_thaws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat parameters, of which a layer's weights are views."""
    layer, x = make("bmm", monkeypatch), torch.randn(5, 24)
    flat = nn.Parameter(parameters_to_vector(layer.weights.parameters()).detach())
    vector_to_parameters(flat.data, layer.weights.parameters())
    other = make("bmm", monkeypatch).freeze()
    check(layer.freeze(), x)
    flat.grad = torch.randn_like(flat)
    optimizer = torch.optim.AdamW([flat, nn.Parameter(torch.zeros(2).to_sparse())], fused=True)
    optimizer.param_groups[0]["params"][1].requires_grad_(False)
    with pytest.warns(UserWarning, match=rf"{NAME} is frozen no more: weights.0 was in a step of AdamW"):
        optimizer.step()
    check(layer, x)
    assert other.is_frozen


def test_a_warning_that_is_an_error_leaves_nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = [make("bmm", monkeypatch).freeze() for _ in range(2)], torch.randn(5, 24)
    parameters = [weights for layer in layers for weights in layer.weights]
    for weights in parameters:
        weights.grad = torch.ones_like(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD(parameters, fused=True)
        with pytest.raises(UserWarning, match="frozen no more"):
            optimizer.step()
    for layer in layers:
        assert not layer.is_frozen
        check(layer, x)


def test_nothing_of_a_deleted_layer_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = len(frozen._frozen), len(frozen._kept)
    layer = make("dense", monkeypatch).freeze()
    check(layer, torch.randn(5, 24))
    assert len(frozen._kept) == before[1] + 2
    del layer
    gc.collect()
    assert (len(frozen._frozen), len(frozen._kept)) == before


# ---- what PyTorch does with modules


@pytest.mark.parametrize("way", ["auto", "dense", "kernels"])
def test_copies_are_not_frozen_and_states_are_as_ever(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(way, monkeypatch), torch.randn(5, 24)
    state = {name: each.clone() for name, each in layer.state_dict().items()}
    check(layer.freeze(), x)
    torch.testing.assert_close(dict(layer.state_dict()), state)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert not other.is_frozen
        by_data(other)
        check(other, x)
        check(other.freeze(), x)
    assert layer.is_frozen
    check(layer, x)


def test_nothing_of_modules_is_hidden() -> None:
    assert not [name for name in ("freeze", "thaw", "is_frozen") if hasattr(nn.Module, name)]


def test_a_module_that_moves_by_swapping(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make("bmm", monkeypatch), torch.randn(5, 24)
    check(layer.freeze(), x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with pytest.warns(UserWarning, match="frozen no more: weights.0 got other memory"):
        check(layer, x.double())
    same = make("bmm", monkeypatch).freeze()
    same.float().cpu()
    assert same.is_frozen  # nothing moved


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["auto", "strided", "bmm", "dense", "kernels"])
def test_compiled_and_exported(way: str, monkeypatch: pytest.MonkeyPatch, prepared: list[str]) -> None:
    layer, x = make(way, monkeypatch), torch.randn(5, 24)
    with torch.no_grad():
        expected = layer(x)
        layer.freeze()
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        exported = torch.export.export(layer, (x,)).module()
        torch.testing.assert_close(exported(x), expected)
        torch.testing.assert_close(compiled(x), expected)
        assert layer.is_frozen
        prepared.clear()
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)
        if way == "kernels":
            assert prepared == []  # the operator takes what is kept
            layer.weights[1].mul_(2)
            with pytest.warns(UserWarning, match="frozen no more: weights.1 was written to"):
                compiled(x)
        by_data(layer.thaw())
        torch.testing.assert_close(compiled(x), layer(x))


def test_transforms_keep_nothing_and_thaw_nothing(monkeypatch: pytest.MonkeyPatch, prepared: list[str]) -> None:
    layer, x = make("bmm", monkeypatch).requires_grad_(False), torch.randn(3, 5, 24)
    with torch.no_grad():
        expected = layer(x)
    layer.freeze()
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
    own = dict(layer.named_parameters())
    found = torch.func.vmap(lambda weights, x: torch.func.functional_call(layer, weights, x), in_dims=(None, 0))(own, x)
    torch.testing.assert_close(found, expected)
    torch.func.grad(lambda x: layer(x).sum())(x)
    torch.func.grad(lambda weights: torch.func.functional_call(layer, weights, x).sum())(own)
    assert layer.is_frozen
    assert all(not kept.forms for kept in frozen._frozen[id(layer)].weights.values())
    check(layer, x[0])


def test_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes first serves outside it, gradients of x included.

    Weights that were made in it count nothing, and are not frozen.
    """
    layer, x = make("bmm", monkeypatch).requires_grad_(False).freeze(), torch.randn(5, 24)
    with torch.inference_mode():
        layer(x)
        inside = make("bmm", monkeypatch)
        told = (
            f"{NAME} is not frozen: weights.0 was made in torch.inference_mode, where writes are not counted; make "
            "or copy the layer"
        )
        with pytest.warns(UserWarning, match=told):
            assert not inside.freeze().is_frozen
        with pytest.warns(UserWarning, match="0, a KSLinear.* is not frozen"):
            assert freeze(torch.nn.Sequential(inside)) == []
        inside(x)
        inside.weights[0].zero_()
        assert torch.equal(inside(x), inside.bias.expand(5, -1))
    layer(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    check(inside, x)
    check(copied := copy.deepcopy(inside).freeze(), x)
    assert copied.is_frozen


def test_autocast_is_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make("bmm", monkeypatch), torch.randn(5, 24)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
        torch.testing.assert_close(layer.freeze()(x), expected)
        by_data(layer)
        thawed = copy.deepcopy(layer)(x)
        torch.testing.assert_close(layer(x), thawed)  # cast again at each call


def test_weights_that_cannot_stay_are_refused_and_a_later_parametrization_thaws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Half(nn.Module):
        def forward(self, weights: Any) -> Any:
            return weights / 2

    layer, x = make("bmm", monkeypatch).freeze(), torch.randn(5, 24)
    parametrize.register_parametrization(layer.weights, "0", Half())
    with pytest.warns(UserWarning, match="frozen no more: weights.0 was replaced by another tensor"):
        check(layer, x)
    with pytest.raises(
        LaunchError, match=f"{NAME}: its weights are computed at each use, by a parametrization; such a layer cannot be"
    ):
        layer.freeze()

    class Other(nn.Parameter):
        pass

    layer = make("bmm", monkeypatch)
    layer.weights[0] = Other(layer.weights[0].detach())
    with pytest.raises(LaunchError, match=f"{NAME}: weights.0 is a Other; only layers of plain tensors can be frozen"):
        layer.freeze()


# ---- CUDA graphs, as far as a processor shows


def test_what_a_graph_would_make_is_not_kept_and_what_it_reads_stays(
    monkeypatch: pytest.MonkeyPatch, prepared: list[str]
) -> None:
    layer, x = make("bmm", monkeypatch).freeze(), torch.randn(5, 24)
    monkeypatch.setattr(frozen, "_is_recorded", lambda device: True)
    check(layer, x)
    check(layer, x)
    assert prepared.count("bmm") == 4  # its replays make them
    monkeypatch.undo()
    check(layer, x)
    forms = [form for kept in frozen._frozen[id(layer)].weights.values() for form in kept.forms.values()]
    assert len(forms) == 2
    layer.thaw()
    held = [form for kept in frozen._in_graphs[layer] for form in kept.values()]
    assert all(one is other for one, other in zip(held, forms, strict=True))


def test_factors_by_themselves_take_what_a_layer_keeps(monkeypatch: pytest.MonkeyPatch, prepared: list[str]) -> None:
    monkeypatch.setattr(choice, "KERNEL_DEVICES", {"cuda"})
    layer, x = make("auto", monkeypatch).freeze(), torch.randn(5, 24)
    options = {"layout": "bsf", "precision": None, "activation": "none"}
    with torch.no_grad():
        for _ in range(2):
            multiply(x, layer.weights[0])
            multiply_all_by("bmm", x, [layer.weights[0]], None, None, **options)
    assert prepared.count("blocks_of") == prepared.count("bmm") == 1


@pytest.mark.parametrize("way", ["auto", "bmm", "einsum", "dense", "strided"])
def test_frozen_weights_are_cast_once_if_the_processor_has_no_products_of_their_type(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_WITHOUT_PRODUCTS", (torch.bfloat16,))
    layer = make(way, monkeypatch, dtype=torch.bfloat16).requires_grad_(False).eval().freeze()
    x, dense, cast = torch.randn(5, 24, dtype=torch.bfloat16), layer.to_linear(), []
    as_float = torch.Tensor.float

    def noted(tensor: Any) -> Any:
        cast.extend([] if tensor.dtype == torch.float32 else [tuple(tensor.shape)])
        return as_float(tensor)

    for _ in range(4):
        with torch.no_grad():
            layer(x)
    monkeypatch.setattr(torch.Tensor, "float", noted)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(x), atol=0.1, rtol=0.05)
    assert {shape[0] for shape in cast} <= {5}, "inputs alone are cast"
    layer(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, dense.weight.sum(0).expand(5, -1), atol=0.1, rtol=0.05)
    assert BACKENDS["bmm" if way == "auto" else way](x, layer.weights[0], "bsf").dtype == torch.bfloat16


@pytest.mark.parametrize("fuse", ["no", "yes"])
def test_a_call_while_another_thread_thaws_and_writes_is_by_the_new_weights(
    fuse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, use = make("ksgen", monkeypatch, fuse=fuse).eval().freeze(), Weights.use

    def written_meanwhile(*given: Any) -> Any:
        monkeypatch.setattr(Weights, "use", use)
        in_place(layer.thaw())
        return use(*given)

    monkeypatch.setattr(Weights, "use", written_meanwhile)
    check(layer, matrix(6, layer.in_features, "bsf", torch.float32))
    assert Weights.use is use, "the weights were packed"


def test_other_threads_may_freeze_layers_during_an_optimizers_step() -> None:
    """Each line of Python's weak dictionary stands for a switch to a thread that freezes one more layer."""
    others, frozen_too = [KSLinear(CHAIN).eval() for _ in range(20)], [KSLinear(CHAIN).eval().freeze()]
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    parameter.grad = torch.ones(1)

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code.co_filename != weakref.__file__:
            return None
        if event == "line" and others:
            frozen_too.append(others.pop().freeze())
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        optimizer.step()
    finally:
        sys.settrace(before)
    assert len(frozen_too) > 1
    assert all(each.is_frozen for each in frozen_too)
