"""Cache of data derived from frozen weights, valid until they thaw or a change is detected.

Nothing is cached for other weights: PyTorch does not count every write, so their changes cannot be detected reliably.
"""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ksgen.errors import LaunchError, warn
from ksgen.launch.weights import Seen, WrittenError
from ksgen.launcher import Weights
from ksgen.torch.operators.checks import is_eager
from ksgen.torch.operators.choice import launcher
from ksgen.torch.operators.products import is_cast

Make = Callable[[Tensor], Any]
MOST_TRIES = 8  # attempts of a call while another thread writes to the weights


@dataclass(eq=False)
class _Kept:
    """A tensor of frozen layers: its state when frozen, and the data derived from it."""

    seen: Seen
    device: torch.device
    address: int  # address of its full storage
    layers: WeakSet[nn.Module] = field(default_factory=WeakSet)  # empty: no longer frozen
    forms: dict[Make, Any] = field(default_factory=dict)
    is_in_graph: bool = False  # whether a CUDA graph may read its forms

    def form(self, make: Make, uncached: Make) -> Any:
        """Compute make(weights) once. On a GPU, wait for the result, so that every stream may read it.

        During a graph capture, a form that is not cached yet is computed by uncached(weights) and not cached, because
        only replays compute it.
        """
        tensor, is_recorded = self.seen.tensor, _is_recorded(self.device)
        self.is_in_graph |= is_recorded
        if make in self.forms:
            return self.forms[make]
        if is_recorded:
            return uncached(tensor)
        with torch.inference_mode(False), torch.no_grad():
            made = make(tensor.detach())
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.forms.setdefault(make, made)


@dataclass(eq=False)
class _Frozen:
    """A frozen layer: its name for messages, its weights by name, and its prepared calls."""

    name: str
    weights: Mapping[str, _Kept]
    forget: "weakref.finalize[Any, nn.Module]"  # runs when the layer is freed
    seen: tuple[tuple[str, Seen], ...]  # by the name of the weights
    calls: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Group:
    """Frozen layers of a group, and calls prepared with the weights of all of them."""

    layers: list[_Frozen]
    calls: dict[Hashable, Any] = field(default_factory=dict)


# by the id of the layer, because a look-up in a `WeakKeyDictionary` takes as long as a small PyTorch operator
_frozen: dict[int, _Frozen] = {}
_groups: WeakKeyDictionary[nn.Module, _Group] = WeakKeyDictionary()
_kept: WeakValueDictionary[int, _Kept] = WeakValueDictionary()  # by the id of the tensor, which the value keeps alive
_in_graphs: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # thawed memory that graphs still read


def derived(weights: Tensor, make: Make, uncached: Make | None = None) -> Any:
    """Compute make(weights), once for frozen weights.

    `uncached`, by default `make`, is called each time for other weights. It is also called for frozen weights while
    autograd records operations on them. The same holds while PyTorch compiles, traces or transforms, or while a
    dispatch mode (`TorchDispatchMode`) is active.
    """
    uncached = uncached or make
    if torch.compiler.is_compiling() or not _kept or (torch.is_grad_enabled() and weights.requires_grad):
        return uncached(weights)
    kept = _kept.get(id(weights))
    if kept is None or not kept.layers or not is_eager():
        return uncached(weights)
    if what := kept.seen.what_happened():
        _end([(kept, what)])
        return uncached(weights)
    return kept.form(make, uncached)


def derived_for(x: Tensor, weights: Tensor, make: Make) -> Any:
    """Compute make(weights) for a product with x by `products.in_float32`, which then casts no frozen weights again."""
    return derived(weights, _widened(make) if is_cast(x) and is_cached(weights) else make)


@cache
def _widened(make: Make) -> Make:
    return lambda weights: make(weights).float()


def calls_of(layer: nn.Module) -> dict[Hashable, Any] | None:
    """Prepared calls of a frozen layer with unchanged weights; None for other layers."""
    frozen = _as_frozen(layer)
    return None if frozen is None else frozen.calls


def calls_of_group(group: nn.Module, layers: Sequence[nn.Module]) -> dict[Hashable, Any] | None:
    """Prepared calls of a group whose layers are all frozen; None otherwise.

    They are dropped once a layer thaws.
    """
    found: list[_Frozen] = []
    for layer in layers:
        if (frozen := _as_frozen(layer)) is None:
            return None
        found.append(frozen)
    record = _groups.get(group)
    if record is None or record.layers != found:  # of other layers, or of these before they thawed
        record = _groups[group] = _Group(found)
    return record.calls


def _as_frozen(layer: Any) -> _Frozen | None:
    """Record of a frozen layer with unchanged weights; None for other layers."""
    frozen = _frozen.get(id(layer))
    if frozen is None:
        return None
    weights = layer._stored()
    for name, seen in frozen.seen:  # pruning or a parametrization renames weights
        if weights.get(name) is not seen.tensor or seen.what_happened():
            return None
    return frozen if len(weights) == len(frozen.seen) else None


def record_of(layer: nn.Module) -> tuple[tuple[dict[int, _Frozen], int, Any], list[Seen]]:
    """The layer's entry (dictionary, key, value), and snapshots of its frozen weights.

    The value is Ellipsis if the layer has no entry.
    """
    frozen = _frozen.get(id(layer))
    return (_frozen, id(layer), frozen or ...), [seen for _, seen in frozen.seen] if frozen else []


def is_cached(weights: Tensor) -> bool:
    """Whether data derived from the weights may be cached, because they belong to a frozen layer."""
    kept = _kept.get(id(weights)) if _kept else None
    return kept is not None and bool(kept.layers) and is_eager()


def freeze(layer: nn.Module, name: str, weights: Mapping[str, Tensor]) -> bool:
    """Cache data derived from a layer's weights from now on. Returns whether the layer is frozen.

    The weights must be plain tensors of the layer. PyTorch counts no writes to tensors made in inference mode: a layer
    with such a tensor is not frozen, and a warning says so.
    """
    if was_frozen(layer) and not _changes(layer, weights):
        return True
    thaw(layer)
    if made_inside := [each for each, tensor in weights.items() if tensor.is_inference()]:
        how = "make or copy the layer outside it (copy.deepcopy), and freeze that one"
        warn(
            f"{name} is not frozen: weights.{made_inside[0]} was made in torch.inference_mode, where writes are not "
            f"counted; {how}"
        )
        return False
    _watch_optimizers()
    found = {}
    for each, tensor in weights.items():
        if type(tensor) not in (Tensor, nn.Parameter):
            raise LaunchError(
                f"{name}: weights.{each} is a {type(tensor).__name__}; only layers of plain tensors can be frozen"
            )
        if _is_gathered(tensor):
            raise LaunchError(
                f"{name}: FSDP2 gathers weights.{each} again after each step or load, which no counter shows; such a "
                "layer cannot be frozen"
            )
        kept = _kept.get(id(tensor))
        if kept is None or not kept.layers or kept.seen.what_happened():
            kept = _Kept(Seen(tensor), tensor.device, tensor.untyped_storage().data_ptr())
        found[each] = kept
    for kept in found.values():
        _kept[id(kept.seen.tensor)] = kept
        kept.layers.add(layer)
    forget = weakref.finalize(layer, _frozen.pop, id(layer), None)
    forget.atexit = False  # at exit the driver frees all memory
    _frozen[id(layer)] = _Frozen(name, found, forget, tuple([(each, kept.seen) for each, kept in found.items()]))
    return True


def thaw(layer: nn.Module) -> bool:
    """Stop caching data derived from a layer's weights. Returns whether the layer was frozen."""
    frozen = _frozen.pop(id(layer), None)
    if frozen is None:
        return False
    layer.__dict__.pop("_replay", None)  # has packed weights
    frozen.forget.detach()
    for kept in frozen.weights.values():
        kept.layers.discard(layer)
        if kept.is_in_graph or _is_recorded(kept.device):
            _in_graphs.setdefault(layer, []).append(kept.forms)
        elif kept.device.type == "cuda" and kept.forms:
            torch.cuda.synchronize(kept.device)  # other streams may still read them
    for group in [reference() for reference in _groups.keyrefs()]:  # other threads may add groups meanwhile
        if group is not None and (record := _groups.get(group)) and frozen in record.layers:
            _groups.pop(group, None)
    return True


def is_frozen(layer: Any) -> bool:
    return was_frozen(layer) and not _changes(layer, layer._own_weights())


def was_frozen(layer: nn.Module) -> bool:
    """Whether the layer was frozen and not thawed since; its weights may have changed."""
    return id(layer) in _frozen


def thaw_if_changed(layer: Any) -> None:
    """Thaw a frozen layer if a change of its weights is detected."""
    if was_frozen(layer) and is_eager() and (changes := _changes(layer, layer._own_weights())):
        _end(changes)


def _changes(layer: nn.Module, weights: Mapping[str, Tensor]) -> list[tuple[_Kept, str]]:
    """Weights of a frozen layer that have changed, each with a description of the change."""
    found, frozen = [], _frozen.get(id(layer))  # none, if another thread thaws the layer meanwhile
    for name, kept in frozen.weights.items() if frozen else ():
        replaced = "" if weights.get(name) is kept.seen.tensor else "was replaced by another tensor"
        if what := replaced or kept.seen.what_happened():
            found.append((kept, what))
    return found


def _end(changes: Iterable[tuple[_Kept, str]]) -> None:
    """Thaw the layers whose weights changed, and then warn about each of them."""
    messages = {}
    for kept, what in changes:
        for layer in list(kept.layers):
            if (frozen := _frozen.get(id(layer))) is None:
                continue
            weight = next(name for name, each in frozen.weights.items() if each is kept)
            messages[layer] = (
                f"{frozen.name} is frozen no more: weights.{weight} {what}; freeze() it again once its weights no "
                "longer change"
            )
            thaw(layer)
    for message in sorted(messages.values()):
        warn(message)


@cache
def _watch_optimizers() -> None:
    """Watch optimizer steps from the first frozen layer on: PyTorch does not count the writes of fused optimizers."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _kept:
        return
    stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    tensors, memory = {id(tensor) for tensor in stepped}, {_address_of(tensor) for tensor in stepped} - {0}
    what = f"was in a step of {type(optimizer).__name__}"
    frozen = [reference() for reference in _kept.valuerefs()]  # other threads may freeze layers meanwhile
    _end([(each, what) for each in frozen if each and (id(each.seen.tensor) in tensors or each.address in memory)])


def _address_of(tensor: Tensor) -> int:
    """Address of the tensor's storage, which may contain frozen weights; 0 if the tensor has no storage."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # sparse, or on several devices
        return 0


def _is_gathered(tensor: Tensor) -> bool:
    """Whether FSDP2 gathers a parameter into this tensor again and again: PyTorch counts none of these writes."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:  # PyTorch without FSDP2
        return False
    states = [each() for each in _module_state_mapping.values() if callable(each)]
    groups = [
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        if group
    ]
    return any(getattr(each, "_unsharded_param", None) is tensor for group in groups for each in group.fsdp_params)


def _is_recorded(device: torch.device) -> bool:
    """Whether the current stream is capturing a CUDA graph; False for devices other than CUDA."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


# ---- operands of launchers


def operand(weights: Tensor, transposed: bool) -> Any:
    """Operand of a launcher for weights (a, b, c, d), or for the adjoint (a, c, b, d).

    Gradients of x need the adjoint. Frozen weights are packed once, other weights before each launch.
    """
    return derived(weights, _pack_transposed, _transpose) if transposed else derived(weights, _pack, lambda raw: raw)


def despite_writes(use: Callable[[], Tensor]) -> Tensor:
    """Call `use`, which packs weights, and retry if another thread writes to the weights meanwhile."""
    for _ in range(MOST_TRIES - 1):
        try:
            return use()
        except WrittenError:
            continue
    return use()


def as_trained(weights: Tensor) -> Tensor:
    """Detach weights that require gradients.

    They are about to change, so nothing cached for them may be used, even if they are frozen. The detached tensor is
    another object, for which nothing is cached.
    """
    return weights.detach() if weights.requires_grad else weights


def row_major(weights: Tensor) -> Tensor:
    """The same values as launchers read them: without gaps, and neither conjugated nor negated lazily."""
    return weights.resolve_conj().resolve_neg().contiguous()


def _pack(weights: Tensor) -> Weights:
    return launcher(*weights.shape).pack(row_major(weights))


def _pack_transposed(weights: Tensor) -> Weights:
    return _pack(_transpose(weights))


def _transpose(weights: Tensor) -> Tensor:
    return weights.transpose(1, 2).conj().contiguous().resolve_conj()
