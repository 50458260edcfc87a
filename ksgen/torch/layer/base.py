"""Forward pass common to all layers of a chain: prepared calls, x as a matrix, and the shape of y."""

from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor, fx, nn

from ksgen.build.background import PendingError, awaited
from ksgen.errors import LaunchError
from ksgen.pattern import Chain
from ksgen.spec import Activation, Layout
from ksgen.torch.layer.splits import Split
from ksgen.torch.operators import frozen, prepared, trained
from ksgen.torch.operators.checks import check_activation, check_tensors, check_words, dtype_name
from ksgen.torch.operators.meanwhile import building, note_unsettled
from ksgen.torch.operators.products import ACTIVATIONS, Exchange
from ksgen.values import misfit, misfit_of_x

# attributes of this process or of the very object, which copies and pickles of a layer lack: PyTorch, too, leaves out
# what `layer.compile()` stores, because that calls the original
NOT_COPIED = ("_replay", "_python_calls", "_compiled_call_impl", "_ready")


class ChainLayer:
    """Base of layers with a `chain` and a `layout`.

    Features come last in batch-size-first, and first in batch-size-last.
    """

    chain: Chain
    layout: Layout
    out_layout: Layout | None = None
    _kind = "KSLinear"  # class name in messages, because FSDP2 renames the class
    _exchanges: tuple[Exchange | None, ...] = ()  # one per factor; empty if no factor exchanges features
    has_stored_type = False  # whether the weights are stored in another type than that of x
    # scale of x if the layer quantizes it first; the default is for layers saved before that was possible
    _x_scale: float | None = None
    _replay: Any = None  # repeats prepared calls without Python code, see `ksgen.torch.operators.replay`
    _python_calls = 0  # prepared calls in Python
    _parallel: Any = None  # split over processes: a `ksgen.torch.parallel.Parallel`
    __call__: Callable[..., Any]  # inherited from nn.Module
    _multiplied: Callable[[Tensor, Tensor | None], Tensor]  # computes y from x and a residual that were checked

    @property
    def in_features(self) -> int:
        """Features of x."""
        return self.chain.in_features

    @property
    def out_features(self) -> int:
        """Features of y."""
        return self.chain.out_features

    @property
    def y_layout(self) -> str:
        """Layout of y and the residual."""
        return self.out_layout or self.layout

    @property
    def split(self) -> Split | None:
        """How the layer is split over processes; None if it is not split."""
        return None if self._parallel is None else self._parallel.split

    @property
    def own_chain(self) -> Chain:
        """Chain that this process multiplies by."""
        return self.chain if self.split is None else self.split.own

    def _refuse_out_layout(self, what: str) -> None:
        """Raise `LaunchError` if y has another layout than x; `what` names the use that does not support this."""
        if self.out_layout is not None:
            raise LaunchError(f"{self._name()}: out_layout={self.out_layout!r} of {what}; accepted: layers without it")

    def _name(self) -> str:
        return f"{self._kind}({self.chain}{'' if self.split is None else f'; on this process {self.own_chain}'})"

    def forward(self, x: Tensor, residual: Tensor | None = None, *, after: Activation = "none") -> Tensor:
        """Compute y = activation(x K^T + bias) + residual.

        Args:
            x: Input, (..., in_features) in layout "bsf", or (in_features, ...) in "bsl". A jagged nested tensor is
                accepted in "bsf".
            residual: Tensor like y that is added after the activation, or None.
            after: Another activation, which follows the residual. Repeated calls without gradients apply it inside the
                kernel, if the layer itself has no activation.

        Returns:
            y, (..., out_features) or (out_features, ...), of the dtype of x.

        Raises:
            LaunchError: x or the residual does not fit.

        Examples:
            >>> import torch
            >>> from ksgen.torch import KSLinear
            >>> layer = KSLinear.from_weights([torch.ones(1, 3, 2, 2)], activation="relu").requires_grad_(False)
            >>> layer(torch.ones(2, 5, 4)).shape
            torch.Size([2, 5, 6])
            >>> layer(-torch.ones(1, 4), torch.ones(1, 6))
            tensor([[1., 1., 1., 1., 1., 1.]])
        """
        if not isinstance(after, fx.Proxy) and after != "none":
            return self._activated(x, residual, after)
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and (replay := self._replay) is not None:
            repeated: Tensor | None = replay.run(self.__dict__, x, residual)
            if repeated is not None:
                return repeated
        y = trained.multiply(self, x, residual) if torch.is_grad_enabled() else prepared.multiply(self, x, residual)
        if y is not None:
            return y
        if isinstance(x, fx.Proxy):
            return as_leaf(self, self._name(), x, residual, **({"after": after} if isinstance(after, fx.Proxy) else {}))
        if isinstance(x, Tensor) and x.layout is torch.jagged:
            return self._of_jagged(x, residual)
        check_tensors(self._name(), x=x, residual=residual)
        if self._needs_kernels() and not is_compiling:
            return self._multiplied_by_kernels(x, residual)
        # PyTorch copies the next line into exported programs. Its error message quotes the line if a program is loaded
        # before `import ksgen.torch`.
        return self._multiplied(x, residual)  # needs: import ksgen.torch

    def _activated(self, x: Tensor, residual: Tensor | None, after: Activation) -> Tensor:
        """Compute y with an activation that follows the residual."""
        check_words(after=(after, ACTIVATIONS))
        layer: Any = self
        if layer.activation == "none" and (y := prepared.multiply(self, x, residual, after)) is not None:
            return y
        return activated(ChainLayer.forward(self, x, residual), after=after)  # not that of a subclass, which was called

    def __prepare_scriptable__(self) -> Never:
        """Refuse `torch.jit.script`, which calls this method first.

        TorchScript cannot compile code that chooses between backends.
        """
        raise LaunchError(
            f"{self._name()}: torch.jit.script cannot compile it; accepted: torch.jit.trace, torch.export or "
            "torch.compile"
        )

    def _multiplied_by_kernels(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Multiply by kernels that PyTorch's products cannot replace.

        The call waits until the kernels are compiled. During `build`, it notes missing kernels and returns zeros if no
        gradient is recorded. Otherwise PyTorch's products replace them, so that the backward kernels are noted too.
        """
        if not building.get():
            with awaited(self._name(), prepared.REMEDY):
                return self._multiplied(x, residual)
        try:
            return self._multiplied(x, residual)
        except PendingError:  # without gradients: `build` calls again, and needs only the shape of y
            note_unsettled()
            return x.new_zeros(self._y_shape(x))

    def _needs_kernels(self) -> bool:
        """Whether the layer waits for its kernels, because PyTorch has no such product or the user asked for them."""
        layer: Any = self
        if layer.has_stored_type or layer.backend == "ksgen" or layer.fuse == "yes":
            return True
        # `_dtype` is read last, because a parametrization computes the weights at each access
        return layer.precision is not None and layer.precision != dtype_name(layer._dtype)

    def _y_shape(self, x: Tensor) -> tuple[int, ...]:
        chain = self.own_chain
        if wrong := misfit_of_x(x.shape, chain.in_features, self.layout, "..."):
            raise LaunchError(f"{self._name()}: {wrong}")
        batch = x.shape[:-1] if self.layout == "bsf" else x.shape[1:]
        return (*batch, chain.out_features) if self.y_layout == "bsf" else (chain.out_features, *batch)

    def _checked_y_shape(self, x: Tensor, residual: Tensor | None) -> tuple[int, ...]:
        """Shape of y; `LaunchError` if the residual has another shape."""
        y_shape = self._y_shape(x)
        if residual is not None and (wrong := misfit("residual", residual.shape, y_shape)):
            raise LaunchError(f"{self._name()}: {wrong}")
        return y_shape

    def _as_matrix(self, tensor: Tensor, layout: str | None = None) -> Tensor:
        """Flatten all dimensions except the features into one batch dimension. `layout` is that of x by default."""
        is_bsf = (layout or self.layout) == "bsf"
        if tensor.dim() < 2:
            return tensor[None] if is_bsf else tensor[:, None]
        # not reshape(-1, ...), which fails if the dimension that `vmap` maps over is empty
        return tensor.flatten(0, -2) if is_bsf else tensor.flatten(1)

    def _of_jagged(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Multiply the concatenated rows of sequences of unequal lengths."""
        if "bsl" in (self.layout, self.y_layout):
            raise LaunchError(
                f"{self._name()}: x is a jagged tensor, whose features come last; accepted: layout='bsf' for x and y"
            )
        if x._ragged_idx == x.dim() - 1:
            raise LaunchError(
                f"{self._name()}: x is jagged in its last dimension, {tuple(x.shape)}; accepted: features in that "
                "dimension"
            )
        if residual is not None and (
            getattr(residual, "layout", None) != torch.jagged or residual.shape[:-1] != x.shape[:-1]
        ):
            raise LaunchError(f"{self._name()}: x is a jagged tensor; accepted: a residual with the same offsets")
        # without hooks, which see x and y themselves
        y = ChainLayer.forward(self, x.values(), None if residual is None else residual.values())
        extremes = {}
        if hasattr(x, "_maybe_min_seqlen"):  # since PyTorch 2.5
            extremes = {"min_seqlen": x._maybe_min_seqlen, "max_seqlen": x._maybe_max_seqlen}
        return torch.nested.nested_tensor_from_jagged(
            y, x.offsets(), lengths=x.lengths(), jagged_dim=x._ragged_idx, **extremes
        )


def activated(y: Tensor, **named: Any) -> Tensor:
    """Apply an activation, which is given as the only keyword argument. Error messages name it by that keyword."""
    ((name, activation),) = named.items()
    check_words(**{name: (activation, ACTIVATIONS)})
    if not isinstance(y, fx.Proxy):  # a proxy has no dtype yet
        check_activation(activation, y.dtype, name)
    return ACTIVATIONS[activation].apply(y)


def freeze(model: nn.Module) -> list[str]:
    """Declare that the weights of a model's layers will not change. Packed weights are then cached until a layer thaws.

    A detected change thaws the layer, with a warning. Detected changes are moves of a layer, loads of its state,
    optimizer steps, and in-place writes that increment a tensor's version counter. `train()` thaws without a warning.
    Writes through `.data`, NumPy, a collective or a CUDA graph's replay are not detected: thaw before them. Copies of a
    frozen layer are not frozen.

    Args:
        model: Module whose `KSLinear` layers are frozen.

    Returns:
        Names of the layers that are frozen now, including those that were frozen before.

    Raises:
        LaunchError: A layer cannot be frozen, such as one whose weights a parametrization other than `Tied` computes at
            each use. The call then freezes none of the layers.

    Examples:
        >>> from torch import nn
        >>> from ksgen.torch import KSLinear, freeze
        >>> model = nn.Sequential(KSLinear("1,3,2,2"), nn.ReLU()).eval()
        >>> freeze(model)
        ['0']
        >>> model[0].is_frozen
        True
    """
    names, new = list[str](), list[Any]()
    try:
        for name, layer in _layers(model):
            if layer.has_stored_type:  # caches without a declaration
                continue
            was_frozen = frozen.was_frozen(layer)
            if layer._freeze(f"{name}, a {layer._name()}," if name else layer._name()):
                names.append(name)
                new += [] if was_frozen else [layer]
    except LaunchError:
        for layer in new:
            frozen.thaw(layer)
        raise
    return names


def thaw(model: nn.Module) -> list[str]:
    """Thaw every frozen `KSLinear` of a model, so that each call packs the weights again.

    Each `QuantizedKSLinear` packs its weights again at its next call, as after its own `thaw`.

    Args:
        model: Module whose layers thaw.

    Returns:
        Names of the layers that were frozen.

    Examples:
        >>> from torch import nn
        >>> from ksgen.torch import KSLinear, freeze, thaw
        >>> model = nn.Sequential(KSLinear("1,3,2,2"), nn.ReLU()).eval()
        >>> freeze(model), thaw(model), thaw(model)
        (['0'], ['0'], [])
    """
    names = [name for name, layer in _layers(model) if frozen.was_frozen(layer)]
    for _, layer in _layers(model):
        layer.thaw()
    return names


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and layers of a model."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, ChainLayer)]


def as_leaf(layer: nn.Module, name: str, x: fx.Proxy, residual: Any, **named: Any) -> fx.Proxy:
    """Record a layer as one node of a graph that `torch.fx` traces."""
    if not (path := x.tracer.path_of_module(layer)):
        raise LaunchError(
            f"{name} is a leaf for torch.fx; accepted: a model that holds it, such as nn.Sequential(layer)"
        )
    return x.tracer.create_proxy("call_module", path, (x,) if residual is None else (x, residual), named)
