"""`KSSum`: the sum of layers on one x. Each adds the sum of the earlier layers as its residual."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.errors import LaunchError
from ksgen.families.vector.defaults import STREAMING_BYTES
from ksgen.spec import Activation
from ksgen.spec.kernel import checked_count, layout_word
from ksgen.structures import Structure, check_state, names_of, shared_names
from ksgen.torch.layer.base import ChainLayer, activated
from ksgen.torch.layer.group import Layers, are_watched
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.layer.weight import Weight, is_traced, refusing
from ksgen.torch.operators import prepared, replay
from ksgen.torch.operators.checks import check_words
from ksgen.torch.operators.choice import describe_times
from ksgen.torch.operators.products import ACTIVATIONS
from ksgen.values import excerpt, listed

_EQUAL = ("in_features", "out_features", "layout", "out_layout")  # attributes that are equal for all layers


class KSSum(Layers):
    """Sum of layers, y = activation(K_1 x + ... + K_n x + bias + residual): a matrix that is a sum of chains.

    A layer adds the sum of the earlier ones inside its last kernel, so that the sum takes no pass of its own. In
    repeated calls without gradients, the last kernel also applies the activation. Repeated calls of frozen layers on a
    processor launch all kernels together. The bias is the sum of the layers' biases. In 16 bits, each partial sum is
    rounded. The module is a list of its layers.

    Args:
        layers: Two or more `KSLinear` without an activation, with equal features and layouts.
        activation: Activation of y: "none", "relu", "gelu", "gelu_tanh" or "silu". It can be set later.

    Raises:
        SpecError: The activation is unknown.
        LaunchError: A layer is of another type, has an activation, or does not fit the others.

    Examples:
        >>> import torch
        >>> from ksgen.torch import KSLinear, KSSum
        >>> layer = KSSum([KSLinear("1,6,4,2"), KSLinear("2,6,4,1", bias=False)])
        >>> layer(torch.randn(5, 8)).shape
        torch.Size([5, 12])
        >>> KSSum([KSLinear("1,6,4,2"), KSLinear("2,5,4,1")])
        Traceback (most recent call last):
        ...
        ksgen.errors.LaunchError: KSSum: layers with out_features of 12, 10; accepted: equal ones
    """

    activation: Activation = "none"  # for modules saved before this option existed
    # words of messages that refuse writes to `weight`
    _weight_is = "the sum of products of the factors in the layers' `weights`"
    _nearest = "or KSSum.from_structures with the state of `factorize` for the nearest sum to a matrix"

    def __init__(self, layers: Iterable[KSLinear], activation: Activation = "none") -> None:
        check_words(activation=(activation, ACTIVATIONS))
        given = listed(layers) or ()
        if len(given) < 2 or not all(isinstance(each, ChainLayer) for each in given):
            raise LaunchError(f"KSSum: layers={excerpt(layers)}; accepted: a list of two KSLinear or more")
        _check(given)
        super().__init__(given)
        self.activation = activation

    @classmethod
    def from_structures(
        cls,
        structures: Iterable[Structure],
        state: Mapping[str, Tensor | None] | None = None,
        *,
        bias: bool = True,
        activation: Activation = "none",
        **options: Any,
    ) -> "KSSum":
        """Create a sum of structured matrices, such as those of `ksgen.structures.dyad`.

        Args:
            structures: A structure per summand.
            state: Parameters to copy from the layer that the structures' authors published, and the bias if it has
                one. The structures' parameters then need different names. None: they are drawn, as by
                `KSLinear.from_structure`.
            bias: Whether the sum has a bias, if there is no state. The first layer has it.
            activation: Activation of y.
            **options: Options of `KSLinear`.

        Returns:
            The module.

        Raises:
            LaunchError: A parameter is missing, unknown or of another shape, or several structures have it. Also if the
                state is no mapping.

        Examples:
            >>> from ksgen import structures
            >>> from ksgen.torch import KSSum
            >>> layer = KSSum.from_structures(structures.dyad(64, 32, blocks=4))
            >>> [str(each.chain) for each in layer]
            ['4,8,16,1', '1,8,16,4@j.k']
        """
        given: tuple[Structure, ...] = listed(structures) or ()
        if not given or not all(isinstance(each, Structure) for each in given):
            raise LaunchError(f"KSSum: structures={excerpt(structures)}; accepted: a list of two structures or more")
        if state is None:
            drawn = [KSLinear.from_structure(each, bias=bias and not at, **options) for at, each in enumerate(given)]
            return cls(drawn, activation)
        check_state("KSSum", state)
        forms = [each.form_of(state) for each in given]
        if twice := shared_names(forms):
            raise LaunchError(
                f"KSSum: several structures have the parameters {', '.join(twice)}; accepted: a state for structures "
                "with different names"
            )
        needed = [name for each in forms for name in each.shapes]
        if not set(needed) <= set(state):
            raise LaunchError(f"KSSum: got {names_of(state)}; needed: {', '.join(needed)}")
        rest, layers = dict(state), list[KSLinear]()
        for each, form in zip(given, forms, strict=True):
            own = {name: rest.pop(name) for name in (*form.shapes, form.scale, form.bias) if name in rest}
            layers.append(KSLinear.from_structure(each, own, **options))
        if rest:
            known = dict.fromkeys(name for each in forms for name in (*each.shapes, each.scale, each.bias) if name)
            raise LaunchError(
                f"KSSum: got {', '.join(sorted(map(str, rest)))}, which no structure has; accepted: {', '.join(known)}"
            )
        return cls(layers, activation)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute y = activation(K_1 x + ... + K_n x + bias + residual).

        Args:
            x: Input, as `KSLinear` takes it.
            residual: Tensor like y that is added before the activation, or None.

        Returns:
            y, of the dtype of x.

        Raises:
            LaunchError: x or the residual does not fit, or a layer's options were changed and no longer match.

        Examples:
            >>> import torch
            >>> from ksgen.torch import KSLinear, KSSum
            >>> layers = [KSLinear.from_weights([torch.ones(1, 2, 2, 1)]) for _ in range(2)]
            >>> KSSum(layers).requires_grad_(False)(torch.ones(1, 2))
            tensor([[4., 4.]])
        """
        if not len(self):
            raise LaunchError("KSSum: it has no layers; accepted: two KSLinear or more")
        check_words(activation=(self.activation, ACTIVATIONS))
        layers, found = list(self._modules.values()), None
        is_apart = torch.compiler.is_compiling() or torch.is_grad_enabled()
        if not (is_apart or are_watched(layers) or self._is_replayed(x)):
            replay.note()
            found = prepared.of_group(self, layers, x, residual, self.activation, True)
        if found:
            call, parameters = found
            if (whole := prepared.unless_refused(call.run, x, residual, parameters)) is not None:
                return whole
        _check(self)
        adds_apart = torch.jit.is_tracing()  # a trace must not depend on gradients
        y: Any = residual
        *first, last = enumerate(self)
        for number, layer in first:
            y = _added(layer, x, y, adds_apart and number > 0)
        return _added(last[1], x, y, adds_apart, self.activation)

    def _is_replayed(self, x: Any) -> bool:
        """Whether a replay per layer is expected to be faster than one call: no partial sum is streamed to memory."""
        if self.activation != "none" or type(x) is not Tensor or not x.is_cpu or not replay.may_decide():
            return False
        layers: list[Any] = list(self)
        if not all(isinstance(each, ChainLayer) and replay.may_repeat(each) for each in layers):
            return False
        nbytes = x.numel() * x.element_size()
        return bool(nbytes * layers[0].out_features < STREAMING_BYTES * layers[0].in_features)

    def __getitem__(self, idx: Any) -> Any:
        """Return a layer, or the sum of a slice of them, with the same activation."""
        found = super().__getitem__(idx)
        if isinstance(idx, slice):
            found.activation = self.activation
        return found

    def to_dense(self) -> Tensor:
        """Compute the sum of the layers' matrices differentiably.

        Returns:
            K, a tensor (out_features, in_features).

        Raises:
            LaunchError: A layer has an activation `between`, and therefore no matrix.

        Examples:
            >>> import torch
            >>> from ksgen.torch import KSLinear, KSSum
            >>> layers = [KSLinear.from_weights([torch.ones(1, 2, 2, 1)]) for _ in range(2)]
            >>> KSSum(layers).requires_grad_(False).to_dense()
            tensor([[2., 2.],
                    [2., 2.]])
        """
        return torch.stack(self._matrices()).sum(0)

    @property
    def weight(self) -> Tensor:
        """Lazy sum of the layers' matrices, dense only when its values are read, like the weight of a `KSLinear`."""
        return self.to_dense() if is_traced(self) else Weight(self, [each.weight for each in self])

    @property
    def bias(self) -> Tensor | None:
        """Bias of the sum, None if no layer has one.

        If one layer has a bias, this is its parameter. The sum of several is computed, and refuses writes.
        """
        given = [getattr(each, "bias", None) for each in self]
        found = [each for each in given if each is not None]
        if len(found) < 2 or torch.compiler.is_compiling():
            return sum(found[1:], found[0]) if found else None
        return refusing(sum(found[1:], found[0]), self)

    def _refusal(self, what: str) -> LaunchError:
        return LaunchError(
            f"KSSum: {what} would write to bias, which is the sum of the layers' biases; accepted: writes to those"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):  # with a parameter as value, PyTorch would only report that the attribute exists
            raise LaunchError(
                f"KSSum: {name} is a sum over the layers, and cannot be set; accepted: writes to the layers' "
                "parameters, or KSSum.from_structures"
            )
        super().__setattr__(name, value)

    def _name(self) -> str:
        return "KSSum"

    def explain(self, batch: int = 1024) -> str:
        """Explain which backend multiplies each factor of each layer, and why.

        Args:
            batch: Batch size: all dimensions of x except the features, multiplied.

        Returns:
            Text with one line or more per layer.

        Raises:
            SpecError: `batch` is not a whole number of at least 1.

        Examples:
            >>> from ksgen.torch import KSLinear, KSSum
            >>> layers = [KSLinear(each, backend="strided") for each in ("1,4,4,2", "2,4,4,1")]
            >>> print(KSSum(layers).explain(batch=4))  # doctest: +ELLIPSIS
            1. 1,4,4,2: strided, as asked for: ...
            2. 2,4,4,1: strided, as asked for: ...
        """
        lines = self._explained(checked_count("batch", batch))
        if all(isinstance(each, ChainLayer) for each in self):
            layers: list[Any] = list(self)
            bias, between = prepared.words_of_sum(layers)
            shapes, first = list(map(prepared.shapes_of, layers)), layers[0]
            layout = layout_word(first.layout, first.out_layout)
            lines += describe_times(shapes, first._dtype, layout, self.activation, bias, batch, between)
        return "\n".join(lines)


def of_structures(structures: Sequence[Structure], **options: Any) -> KSLinear | KSSum:
    """A layer of one structure, or a sum of several, with drawn weights."""
    if len(structures) > 1:
        return KSSum.from_structures(structures, **options)
    return KSLinear.from_structure(structures[0], **options)


def summands(layer: KSLinear | KSSum) -> list[KSLinear]:
    """The layer, or those of a sum."""
    return list(layer) if isinstance(layer, KSSum) else [layer]


def _added(layer: Any, x: Tensor, y: Tensor | None, is_apart: bool, activation: Activation = "none") -> Tensor:
    """Add a layer's product to y, and apply the activation to the sum."""
    if is_apart or not isinstance(layer, ChainLayer):  # a module of another type may have replaced a layer
        total: Tensor = layer(x) if y is None else y + layer(x)
    elif activation != "none" and type(layer).forward is ChainLayer.forward:
        return layer(x, y, after=activation)
    else:  # the `forward` of a subclass may not accept `after`
        total = layer(x, y)
    return total if activation == "none" else activated(total, activation=activation)


def _check(layers: Iterable[nn.Module]) -> None:
    """Raise `LaunchError` if attributes in `_EQUAL` differ, or for an activation, which belongs to the sum.

    Options may be set after the layers were combined. Modules of other types that replaced a layer are not checked.
    """
    chains: Sequence[Any] = [each for each in layers if isinstance(each, ChainLayer)]
    for each in chains:
        if each.activation != "none":
            raise LaunchError(
                f"KSSum: {each._name()} has activation={each.activation!r}; accepted: 'none', and an activation of the "
                "sum"
            )
    for name in _EQUAL:
        if len({getattr(each, name) for each in chains}) > 1:
            values = ", ".join(str(getattr(each, name)) for each in chains)
            raise LaunchError(f"KSSum: layers with {name} of {values}; accepted: equal ones")
