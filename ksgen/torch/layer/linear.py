"""`KSLinear`: a chain of Kronecker-sparse factors in place of a `torch.nn.Linear`. Does not compute products itself."""

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import Any, Never, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ksgen.errors import LaunchError, PatternError, SpecError
from ksgen.pattern import Chain, Patterns
from ksgen.quantized import Per, Quantized, quantize, quantize_inputs
from ksgen.spec import LAYOUTS, PRECISIONS, Activation, Epilogue, Fuse, KernelSpec, Layout, PrecisionName, WeightStorage
from ksgen.spec.kernel import checked_count, is_word
from ksgen.spec.storage import STORED, x_precisions
from ksgen.structures import Structure, check_state, of_chain
from ksgen.torch.conversion.factorize import factorize
from ksgen.torch.layer.base import NOT_COPIED, ChainLayer
from ksgen.torch.layer.building import build_calls
from ksgen.torch.layer.explained import explained
from ksgen.torch.layer.group import KSLinears, Layers, group
from ksgen.torch.layer.initial import INITS, Init, initialize
from ksgen.torch.layer.stored import StoredWeights
from ksgen.torch.layer.tied import initialized, keep, packed, retie, stored, tie, untied
from ksgen.torch.layer.weight import Weight, is_traced
from ksgen.torch.operators import frozen
from ksgen.torch.operators.backends import (
    INTERMEDIATES,
    NAMES,
    BackendName,
    Intermediates,
    is_recomputed,
    multiply_all_by,
    recomputed,
)
from ksgen.torch.operators.checks import (
    check_activation,
    check_backend,
    check_device,
    check_dtype,
    check_fuse,
    check_precision,
    check_tensors,
    check_words,
    dtype_name,
)
from ksgen.torch.operators.ops import multiply, shaped
from ksgen.torch.operators.products import ACTIVATIONS, chain_to_dense, exchange_of, exchanged, natural
from ksgen.values import excerpt, listed, misfit

# end of a message about a layer whose `weight` is an attribute that each call sets, so that it may be outdated
COMPUTED = (
    "weight is computed by a hook at each call, such as that of weight_norm or prune; accepted: a parameter, as after "
    "torch.nn.utils.remove_weight_norm or prune.remove"
)
CALIBRATED_ROWS = 4096  # rows of x for the calibration of a layer's scales
OPTIONS: dict[str, Any] = {  # options that may be set later, with their defaults
    "layout": "bsf", "precision": None, "backend": "auto", "activation": "none", "between": "none", "fuse": "auto",
    "intermediates": "keep", "out_layout": None,
}  # fmt: skip


class KSLinear(ChainLayer, nn.Linear):
    """Linear layer y = activation(x K^T + bias) + residual, with K a product of Kronecker-sparse factors.

    The layer replaces an `nn.Linear`, is trained like one, and is a subclass of it. The parameters are `weights`, one
    tensor (a, b, c, d) per factor, and `bias`. `weight` is K, computed from the factors when its values are read.
    With an activation `between`, the layer has no K.

    x is (..., in_features) in layout "bsf" and (in_features, ...) in "bsl". y has the layout of x, or `out_layout`.
    A second argument of a call is the residual: `layer(x, residual)`. Options of the products can be set later, such as
    `layer.backend = "strided"`.

    Args:
        patterns: Factors in the order in which they multiply x: a `ksgen.Chain`, a list of patterns, or one pattern,
            such as "1,192,48,2". `ksgen.monarch` and others create chains.
        bias: Whether the layer has a bias (out_features,).
        activation: Activation of y: "none", "relu", "gelu", "gelu_tanh" or "silu".
        precision: Arithmetic of the products, such as "tf32x3" for float32 weights. None: that of the weights.
        device: Device of the parameters, as in `nn.Linear`.
        dtype: Dtype of the parameters. None: that of the precision, else PyTorch's default.
        init: Initial weights: "uniform" draws within +-1/sqrt(c), as the paper does. "orthogonal", "identity" and
            "fourier" make K an orthogonal, identity or Fourier matrix, if the chain can represent it.

    Advanced:
        between: Activation after each factor but the last, from the same list.
        layout: Layout of x and y: "bsf" (features last) or "bsl" (features first).
        out_layout: Layout of y: "bsf" or "bsl". None: that of x.
        backend: Method of the product: "auto" chooses between "ksgen" (kernels of ksgen) and "strided" (PyTorch's
            batched products on views). On a processor, it may also choose "bmm" or "einsum" for repeated calls, "bmm"
            for small training steps, and "dense" for frozen 16-bit weights. "bmm", "bsr", "einsum", "dense" and
            "sparse" use other operators of PyTorch, for comparison.
        fuse: Whether one launch runs all factors while no gradients are recorded. "auto" does so if that is faster,
            "no" never. "yes" always does, or raises an error.
        intermediates: Intermediates of training: "keep" stores them for the backward pass, "recompute" computes them
            again, "auto" recomputes them if they are larger than x.

    Raises:
        PatternError: The patterns are invalid or do not fit each other.
        SpecError: The value of an option is not accepted, or an option is given by position.
        LaunchError: Options exclude each other, the chain cannot represent the matrix of `init`, or the device does not
            exist.

    Examples:
        >>> import torch
        >>> from ksgen.torch import KSLinear
        >>> layer = KSLinear(["1,2,2,2", "2,2,2,1"], activation="relu")
        >>> layer.in_features, layer.out_features, sum(each.numel() for each in layer.weights)
        (4, 4, 16)
        >>> y = layer(torch.randn(5, 4))
        >>> y.shape
        torch.Size([5, 4])
        >>> y.sum().backward()
        >>> layer.weights[0].grad.shape
        torch.Size([1, 2, 2, 2])
        >>> layer.backend = "strided"
        >>> KSLinear("1,192,48,2", layout="sbf")
        Traceback (most recent call last):
        ...
        ksgen.errors.SpecError: layout='sbf'; did you mean bsf? accepted: bsf, bsl
    """

    # defaults for layers saved before these options existed
    between: Activation = "none"
    fuse: Fuse = "auto"
    intermediates: Intermediates = "keep"
    init: Init = "uniform"
    # standard deviations of a structure's initial weights, by factor: None for uniform ones; empty: all are uniform
    _scales: Sequence[float | None] = ()
    _settable: Collection[str] = tuple(OPTIONS)  # options that may be set later
    # attributes that cannot be set, each with the alternative that messages name
    _fixed: Mapping[str, str] = {"chain": "a new KSLinear"}
    # words of messages that refuse writes to `weight`
    _weight_is = "the product of the factors in `weights`"
    _nearest = "KSLinear(init=...), or KSLinear.from_linear for the nearest product to a matrix"

    def __init__(
        self,
        patterns: Patterns,
        bias: bool = True,
        *_unnamed: Never,
        activation: Activation = "none",
        precision: PrecisionName | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        init: Init = "uniform",
        between: Activation = "none",
        layout: Layout = "bsf",
        out_layout: Layout | None = None,
        backend: BackendName = "auto",
        fuse: Fuse = "auto",
        intermediates: Intermediates = "keep",
    ) -> None:
        if _unnamed:
            raise SpecError(
                f"KSLinear: {excerpt(_unnamed[0])} by position; accepted: options by name, such as KSLinear(patterns, "
                "layout='bsl')"
            )
        nn.Module.__init__(self)  # not nn.Linear's, which creates a dense parameter
        self.chain = Chain.read(patterns)
        if self.chain.is_exchanged:
            self._exchanges = tuple(map(exchange_of, self.chain))
        options: dict[str, Any] = {
            "layout": layout, "precision": precision, "backend": backend, "activation": activation, "between": between,
            "fuse": fuse, "intermediates": intermediates, "out_layout": out_layout,
        }  # fmt: skip
        check_device(device)
        dtype = checked_dtype(self.chain, bias, dtype, options)
        for name, value in options.items():
            self._set(name, value)
        self.weights = nn.ParameterList(
            torch.empty(pattern.shape, device=device, dtype=dtype) for pattern in self.chain
        )
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        )
        self.init = init
        self.reset_parameters()

    @classmethod
    def from_weights(
        cls, weights: Iterable[Tensor], bias: Tensor | None = None, *, patterns: Patterns | None = None, **options: Any
    ) -> "KSLinear":
        """Create a layer with copies of given weights.

        Args:
            weights: Tensors (a, b, c, d), one per factor, in the order in which they multiply x.
            bias: Tensor (out_features,), or None for a layer without a bias.
            patterns: Patterns of the factors, needed if one has a `store` or `load` order (see `Pattern`). None: those
                of the weights' shapes.
            **options: Options of `KSLinear`. Device and dtype are those of the first tensor by default.

        Returns:
            The layer.

        Raises:
            PatternError: No weights are given, or factors do not fit each other.
            LaunchError: The bias or the patterns do not fit, or an argument is not a dense tensor.

        Examples:
            >>> import torch
            >>> from ksgen.torch import KSLinear
            >>> layer = KSLinear.from_weights([torch.ones(1, 3, 2, 2)], torch.zeros(6))
            >>> layer.chain[0]
            Pattern(a=1, b=3, c=2, d=2)
        """
        if not (tensors := listed(weights)):
            raise PatternError(f"weights={excerpt(weights)}; accepted: one or more tensors of shape (a, b, c, d)")
        check_tensors(
            "KSLinear.from_weights", bias=bias, **{f"weights[{place}]": each for place, each in enumerate(tensors)}
        )
        options = {"device": tensors[0].device, "dtype": tensors[0].dtype} | options
        shapes = [tuple(each.shape) for each in tensors]
        layer = cls(shapes if patterns is None else patterns, bias=bias is not None, **options)
        if (needed := [pattern.shape for pattern in layer.chain]) != shapes:
            raise LaunchError(f"{layer._name()}: got weights of shapes {excerpt(shapes)}; {needed} are needed")
        if bias is not None and (wrong := misfit("bias", bias.shape, layer.bias.shape)):
            raise LaunchError(f"{layer._name()}: {wrong}")
        with torch.no_grad():
            for parameter, value in zip([*layer.weights, layer.bias], [*tensors, bias], strict=True):
                if value is not None:
                    parameter.copy_(value)
        return layer

    @classmethod
    def from_structure(
        cls,
        structure: Structure,
        state: Mapping[str, Tensor | None] | None = None,
        *,
        bias: bool | None = None,
        **options: Any,
    ) -> "KSLinear":
        """Create a layer whose K is a structured matrix.

        Args:
            structure: A structure such as `ksgen.structures.blast(...)`.
            state: Parameters to copy, and perhaps a bias. Names and shapes are those of `structure.shapes`, or of
                `structure.published.shapes` as in the state dict of the structure's authors. If a factor's weights are
                tied along a, d or both, its parameter is one slice. None: the parameters are drawn. A structure's own
                `init` or `scales` then apply unless `init` is given. If the structure has neither, weights are drawn as
                for any `KSLinear`.
            bias: Whether the layer has a bias. None: whether the state has one; without a state, it has one.
            **options: Options of `KSLinear`. Device and dtype are those of the first parameter by default.

        Returns:
            The layer.

        Raises:
            LaunchError: A parameter is missing, unknown, or of another shape, or `bias` contradicts the state. Also if
                the state is no mapping.

        Examples:
            >>> import torch
            >>> from ksgen import structures
            >>> from ksgen.torch import KSLinear
            >>> matrix = structures.low_rank(8, 6, rank=2)
            >>> KSLinear.from_structure(matrix, {"A": torch.ones(2, 8), "B": torch.ones(6, 2)}).out_features
            6
        """
        if not isinstance(structure, Structure):
            raise LaunchError(
                f"KSLinear.from_structure: structure={excerpt(structure)}; accepted: one ksgen.structures.Structure; "
                "KSSum.from_structures takes several"
            )
        if state is None:
            return cls._drawn(structure, bias is not False, options)
        check_state("KSLinear.from_structure", state)
        parameters, form = dict(state), structure.form_of(state)
        given = parameters.pop(form.bias, None)
        if given is not None and form.has_bias_column and given.shape == (structure.chain.out_features, 1):
            given = given[:, 0]
        if bias is not None and bias is not (given is not None):
            found = f"without {form.bias!r}" if given is None else f"with {form.bias!r}"
            raise LaunchError(
                f"KSLinear.from_structure: bias={bias!r} and a state {found}; accepted: bias=None, or a state that "
                "agrees"
            )
        layer = cls.from_weights(structure.from_state(parameters), given, patterns=structure.chain, **options)
        tie(layer.weights, structure.ties)
        return layer

    @classmethod
    def _drawn(cls, structure: Structure, bias: bool, options: dict[str, Any]) -> "KSLinear":
        """Create a layer whose parameters are drawn; tied ones are drawn as slices."""
        if structure.init:
            options = {"init": structure.init} | options
        if any(structure.ties):
            check_device(device := options.pop("device", None))
            layer = cls(structure.chain, bias, **options | {"device": "meta", "init": "uniform"})
            layer.init = options.get("init", "uniform")
            tie(layer.weights, structure.ties)
            layer.to_empty(device=torch.empty(0).device if device is None else device)
        else:
            layer = cls(structure.chain, bias, **options)
        if structure.scales and "init" not in options:
            layer._scales = tuple(map(structure.scales.get, structure.names))
        if layer._scales or any(structure.ties):
            layer.reset_parameters()  # refuses an `init` that tied weights cannot represent
        return layer

    @classmethod
    def from_linear(
        cls, linear: nn.Module, patterns: Patterns | Structure, *, refine: int = 0, **options: Any
    ) -> "KSLinear":
        """Create a layer whose K approximates the weight of an `nn.Linear`, using `factorize`. The bias is copied.

        Args:
            linear: The dense layer.
            patterns: Factors of K, in any form that `KSLinear` accepts, or a structure of `ksgen.structures`.
            refine: Steps of L-BFGS, as in `factorize`.
            **options: Options of `KSLinear`. Device and dtype are those of the dense layer by default.

        Returns:
            The layer.

        Raises:
            LaunchError: The layer is no `nn.Linear`, a hook computes its weight, or the weight has another shape or no
                values yet. Also if an activation `between` is given, or if the new layer would lack the activation of a
                `KSLinear`.

        Examples:
            >>> from torch import nn
            >>> from ksgen.torch import KSLinear
            >>> KSLinear.from_linear(nn.Linear(8, 4), "2,2,4,1").out_features
            4
        """
        if not isinstance(linear, nn.Linear):
            raise LaunchError(f"KSLinear.from_linear: got {type(linear).__name__}; accepted: an nn.Linear")
        activation = linear.activation if isinstance(linear, KSLinear) else "none"
        if activation not in ("none", options.get("activation")):
            raise LaunchError(
                f"KSLinear.from_linear: the layer has activation={activation!r}, which the new one would lack; "
                f"accepted: activation={activation!r}"
            )
        if wrong := unreadable(linear):
            raise LaunchError(f"KSLinear.from_linear: {wrong}")
        if options.get("between", "none") != "none":
            raise LaunchError(
                f"KSLinear.from_linear: between={excerpt(options['between'])} makes it nonlinear; accepted: 'none'"
            )
        structure = patterns if isinstance(patterns, Structure) else of_chain(Chain.read(patterns))
        state = factorize(linear.weight.detach(), structure, refine=refine).state
        options = {"device": linear.weight.device, "dtype": linear.weight.dtype} | options
        return cls.from_structure(structure, {**state, "bias": linear.bias}, **options)

    def to_linear(self) -> nn.Linear:
        """Convert to an `nn.Linear` with the same matrix and bias.

        The dense layer takes x with features last, as in layout "bsf". Sharded parameters are gathered, so every
        process has to call this.

        Returns:
            The dense layer, with copies of the values.

        Raises:
            LaunchError: The layer has an activation, which an `nn.Linear` lacks.

        Examples:
            >>> from ksgen.torch import KSLinear
            >>> KSLinear("1,3,2,2").to_linear()
            Linear(in_features=4, out_features=6, bias=True)
        """
        if self.activation != "none":
            raise LaunchError(
                f"{self._name()}: an nn.Linear has no activation={self.activation!r}; apply it separately, and set it "
                "to 'none' first"
            )
        return dense_layer(self.to_dense(), None if self.bias is None else _gathered(self.bias)).train(self.training)

    def to_dense(self) -> Tensor:
        """Compute the dense matrix K. Autograd can differentiate it with respect to the weights.

        Sharded weights are gathered, so every process has to call this method.

        Returns:
            K, a tensor (out_features, in_features).

        Raises:
            LaunchError: The layer has an activation `between`, and therefore no K.

        Examples:
            >>> import torch
            >>> from ksgen.torch import KSLinear
            >>> layer = KSLinear.from_weights([torch.ones(1, 1, 2, 2)]).requires_grad_(False)
            >>> layer.to_dense()
            tensor([[1., 0., 1., 0.],
                    [0., 1., 0., 1.]])
        """
        if self.between != "none":
            raise LaunchError(
                f"{self._name()}: with between={self.between!r} the layer has no matrix; accepted: between='none'"
            )
        return chain_to_dense(self.chain, self._factors()).contiguous()

    def _factors(self) -> Sequence[Tensor]:
        """Full weights of all factors, gathered if they are sharded."""
        return [_gathered(each) for each in self.weights]

    @property
    def weight(self) -> Tensor:
        """Lazy matrix K, dense only when its values are read.

        PyTorch's compilers get a plain tensor instead, and remove its computation if it is unused. They interrupt a
        program that reads the weight of a layer with an activation.
        """
        return self.to_dense() if is_traced(self) else Weight(self)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise LaunchError(
            f"{self._name()}: weight is {self._weight_is}, and cannot be set; accepted: KSLinear.from_linear"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # with a parameter as value, PyTorch would only report that the attribute exists
            object.__setattr__(self, name, value)
        if name in OPTIONS and name not in self._settable:  # such an attribute would have no effect
            raise LaunchError(
                f"{self._name()}: {name} is not an option of this layer; accepted: {', '.join(self._settable)}"
            )
        if name in OPTIONS:
            options = {each: getattr(self, each) for each in OPTIONS} | {name: value}
            # a cast of the weights may have invalidated the precision; calls report that, so that other options can
            # still be set
            checks_weights = name == "precision" or self.precision is None
            checked_dtype(self.chain, self.bias is not None, self._dtype if checks_weights else None, options)
            if (split := self.split) is not None and (
                {options["layout"], options["out_layout"] or self.layout} != {self.layout}
                or (options["between"] != "none" and split.sums_intermediates)
            ):
                raise LaunchError(
                    f"{self._name()}: {name}={value!r} of a layer that is split over processes; accepted: "
                    f"{getattr(self, name)!r}"
                )
            self._set(name, value)
            return
        if name in self._fixed and name in vars(self):
            raise LaunchError(f"{self._name()}: {name} cannot be set; accepted: {self._fixed[name]}")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """State of copies and pickles.

        PyTorch pickles no parametrized modules, so tied weights are saved as plain slices, with their ties.
        """
        state = {name: each for name, each in vars(self).items() if name not in NOT_COPIED}
        if "weights" in self._modules and (plain := untied(self.weights)):
            weights, state["_ties"] = plain
            state["_modules"] = {**self._modules, "weights": weights}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        ties = state.pop("_ties", {})
        super().__setstate__(state)
        if self._exchanges:  # exchanges in a pickle of an earlier version have other fields
            self._exchanges = tuple(map(exchange_of, self.chain))
        if ties:
            retie(self.weights, ties)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the layer. If layers share one list of tied weights, their copies share one copy of that list."""
        copied: Self
        copied = memo[id(self)] = type(self).__new__(type(self))
        # a parametrized bias changes the layer's type to one whose `__getstate__` raises an error
        kind: Any = parametrize.type_before_parametrizations(self)
        copied.__setstate__(copy.deepcopy(kind.__getstate__(self), memo))
        if (weights := self._modules.get("weights")) is not None:
            copied._modules["weights"] = memo.setdefault(id(weights), copied._modules["weights"])
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast like any module. Weights stay row-major, because `to(memory_format=...)` is meant for images."""
        super()._apply(lambda tensor: fn(tensor).contiguous(), recurse)
        return self

    @property
    def _dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    def _set(self, name: str, value: Any) -> None:
        """Set an option that was checked. An `out_layout` equal to `layout` becomes None."""
        super().__setattr__(name, value)
        if name in ("layout", "out_layout") and self.out_layout == self.layout:
            super().__setattr__("out_layout", None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. Refuses PyTorch's `ColwiseParallel`, which would treat factors as a dense weight."""
        if name.startswith("weights."):
            raise LaunchError(
                f"{self._name()}: {name} cannot be registered; accepted for tensor parallelism: styles of "
                "ksgen.torch.parallel"
            )
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Initialise the weights by `init`, and draw the bias within +-1/sqrt(in_features) like `nn.Linear`.

        "uniform" draws within +-1/sqrt(c), the bounds of the paper, or with the standard deviations of a structure.
        """
        check_words(init=(self.init, INITS))
        if self.init == "uniform":
            scales = self._scales or (None,) * len(self.chain)
            for pattern, weights, scale in zip(self.chain, initialized(self.weights), scales, strict=True):
                if scale is None:
                    _draw(weights, 1 / sqrt(pattern.c))
                else:
                    nn.init.normal_(weights, std=scale)
        else:
            initialize(self._name(), self.init, self.chain, initialized(self.weights))
        if self.bias is not None:
            _draw(self.bias, 1 / sqrt(self.in_features))

    def _multiplied(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if not torch.compiler.is_compiling():
            frozen.thaw_if_changed(self)
        if self._parallel is not None:
            return self._parallel(self, x, residual)
        return self._multiply(x, list(self.weights), self.bias, residual, self.activation)

    def _multiply(
        self, x: Tensor, weights: list[Tensor], bias: Tensor | None, residual: Tensor | None, activation: str
    ) -> Tensor:
        """Multiply by the weights of this process's own chain."""
        y_shape = self._checked_y_shape(x, residual)
        rows, added = self._as_matrix(x), None if residual is None else self._as_matrix(residual, self.y_layout)
        options: dict[str, Any] = {"layout": self.layout, "precision": self.precision, "activation": activation}
        options |= {"between": self.between, "fuse": self.fuse}
        if self.out_layout is not None:
            options |= {"out_layout": self.out_layout, "transposing_factor": self.own_chain.transposing_factor}
        if self._exchanges:
            options["exchanges"] = self._exchanges
        run: Callable[..., Tensor] = partial(multiply_all_by, self.backend, **options)
        if self.intermediates != "keep" and is_recomputed(
            self.intermediates, self.own_chain, (self.between, activation)
        ):
            run = partial(recomputed, run)
        y = run(rows, weights, bias, added)
        if torch.jit.is_tracing():
            return y.reshape(y_shape)  # a trace records how sizes follow from x; `shaped` would record constants
        return y if y.shape == y_shape else shaped(y, y_shape, activation)

    @staticmethod
    def group(layers: "Sequence[KSLinear | Layers]") -> KSLinears:
        """Combine layers that take the same x, such as q, k and v, into one module with concatenated outputs.

        One launch computes all of them if that is faster and no gradient is recorded.

        Args:
            layers: `KSLinear` or `KSSum` layers with equal `in_features`. One launch needs `KSLinear` of equal options.

        Returns:
            A `KSLinears` module: a call returns the concatenated outputs, and `parts(x)` a sequence with one output per
            layer.

        Raises:
            LaunchError: The list holds no layers, or layers with different `in_features`.

        Examples:
            >>> import torch
            >>> from ksgen.torch import KSLinear
            >>> qkv = KSLinear.group([KSLinear("1,3,2,2", bias=False) for _ in range(3)])
            >>> qkv(torch.ones(5, 4)).shape
            torch.Size([5, 18])
        """
        return group(layers)

    def build(self, batch: int | Sequence[int]) -> Self:
        """Compile all kernels of calls at some batch sizes now, in parallel, and time them for `backend="auto"`.

        Later calls at these sizes use the fastest method from the start, with or without gradients. In training mode,
        kernels of all gradients are included, also of the gradient of x. A terminal shows a progress bar. For x of
        another dtype, or under autocast, use `ksgen.torch.build`.

        Args:
            batch: Batch size, or a list of them: all dimensions of x except the features, multiplied.

        Returns:
            The layer itself.

        Raises:
            LaunchError: The layer is split or sharded over several processes.
            SpecError: A batch size is not a whole number of at least 1.
            ToolchainError: Compilation fails for a kernel that PyTorch's products cannot replace.

        Examples:
            >>> from ksgen.torch import KSLinear
            >>> layer = KSLinear("1,3,2,2").eval().build(batch=[1, 4])
        """
        # that of x; stored weights have another
        dtype = self._dtype if self.bias is None else self.bias.dtype
        sizes = [(checked_count("batch", each), self.in_features) for each in listed(batch) or [batch]]
        shapes = sizes if self.layout == "bsf" else [size[::-1] for size in sizes]
        device = next(self.buffers() if self.has_stored_type else self.parameters()).device
        new = partial(torch.zeros, dtype=dtype, device=device)
        # whether x has a gradient; x in eight bits has none
        steps = (False, True) if self.training and self._x_scale is None else (False,)
        build_calls(self, [((new(shape, requires_grad=each),), {}) for shape in shapes for each in steps])
        return self

    def freeze(self) -> Self:
        """Declare that the weights stay unchanged, so that packed forms are cached until the layer thaws.

        A detected change thaws the layer, with a warning. Moves of the layer, loads of its state, optimizer steps, and
        in-place writes that increment a tensor's version counter are detected. `train()` thaws the layer
        silently. A write through `.data`, NumPy, a collective or a CUDA graph's replay is not detected: thaw first.
        Copies of a frozen layer are not frozen.

        Returns:
            The layer itself.

        Raises:
            LaunchError: The weights are no plain tensors: a parametrization other than `Tied` computes them at each
                use, or FSDP2 gathers them.

        Examples:
            >>> from ksgen.torch import KSLinear
            >>> layer = KSLinear("1,3,2,2").eval().freeze()
            >>> layer.is_frozen
            True
        """
        self._freeze(self._name())
        return self

    def _freeze(self, name: str) -> bool:
        # keeps the repeated slices alive until `weights` holds them, because `Tied` refers to them weakly
        repeated = keep(self.weights)
        weights, again = self._own_weights(), self._own_weights()
        del repeated
        if computed := [each for each in weights if weights[each] is not again[each]]:
            raise LaunchError(
                f"{name}: its weights are computed at each use, by a parametrization; such a layer cannot be frozen; "
                "torch.nn.utils.parametrize.remove_parametrizations(layer.weights, name) makes plain weights, for "
                f"name in {computed}"
            )
        return frozen.freeze(self, name, weights)

    def thaw(self) -> Self:
        """Stop caching: each call packs the weights again.

        Frees cached forms, except memory that CUDA graphs read.

        Returns:
            The layer itself.

        Examples:
            >>> from ksgen.torch import KSLinear
            >>> KSLinear("1,3,2,2").eval().freeze().thaw().is_frozen
            False
        """
        frozen.thaw(self)
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether the layer is frozen, and no change of its weights was detected."""
        return frozen.is_frozen(self)

    def train(self, mode: bool = True) -> Self:
        """Set training mode like any module. `train(True)` also thaws the layer, unless it is a `QuantizedKSLinear`."""
        if mode and not self.has_stored_type:
            self.thaw()
        super().train(mode)
        return self

    def quantize(
        self, storage: WeightStorage, per: Per = "output", *, x: Tensor | None = None, x_too: bool = False
    ) -> "QuantizedKSLinear":
        """Create a layer for inference with these weights in eight bits, or in bfloat16. This layer stays unchanged.

        Args:
            storage: "int8", "e4m3", "e5m2", or "bfloat16" for x of float32.
            per: Unit with a scale of its own: "factor", "i" (a diagonal block) or "output". bfloat16 has no scales.
            x: Inputs of this layer for calibration; only the first 4096 rows count. Scales then minimise the change of
                the factors' outputs.
            x_too: True also quantizes the input of each call to eight bits, before the first factor. The input has one
                scale, the smallest one at which no element of these rows of `x` saturates.

        Returns:
            A `QuantizedKSLinear`, a `KSLinear` whose weights are not trained.

        Raises:
            LaunchError: An option is unknown, options exclude each other, or the layer is split over processes.

        Examples:
            >>> import torch
            >>> from ksgen.torch import KSLinear
            >>> layer = KSLinear.from_weights([torch.ones(1, 3, 2, 2)]).quantize("int8")
            >>> layer(torch.ones(1, 4))
            tensor([[2., 2., 2., 2., 2., 2.]])
        """
        self._refuse_out_layout("a quantized layer")
        dtype = dtype_name(self._dtype)
        is_rounded = is_word(storage, STORED) and not STORED[storage].is_scaled
        if is_rounded and dtype not in x_precisions(storage):
            already = f" (your layer is stored in {storage} already: use it unchanged)" if dtype == storage else ""
            wanted = f"a layer of {', '.join(x_precisions(storage))}{already}"
            raise LaunchError(f"{self._name()}: weights of {dtype} in {storage}; accepted: {wanted}")
        if type(x_too) is not bool:
            raise LaunchError(f"{self._name()}: x_too={excerpt(x_too)}; accepted: True or False")
        if x_too and x is None:
            raise LaunchError(
                f"{self._name()}: x_too=True without x; accepted: typical inputs of the layer as x, which determine "
                "the scale of x"
            )
        if self.split is not None:
            raise LaunchError(f"{self._name()}: split over processes; accepted: a layer that is not split")
        if self.precision not in (None, dtype):
            raise LaunchError(f"{self._name()}: precision={self.precision}; accepted for quantization: None or {dtype}")
        with torch.inference_mode(False), torch.no_grad():  # writes to tensors of inference mode are not detected
            rows = None if x is None else self._calibration_rows(x)
            parts: list[Quantized] = []
            for weights, exchange in zip(self.weights, map(exchange_of, self.chain), strict=True):
                rows = None if rows is None else natural(rows, exchange, self.layout)
                # `quantize_inputs` refuses bfloat16
                inputs = {"x_scale": quantize_inputs(rows, storage).scale} if x_too and not parts else {}  # type: ignore[arg-type]
                parts.append(made := quantize(weights, storage, per, x=rows, layout=self.layout, **inputs))
                if rows is not None:  # input of the next factor
                    y = multiply(
                        rows.float(), made.dequantized(), layout=self.layout, activation=self.between, backend="strided"
                    )
                    rows = exchanged(y, exchange, self.layout)
            stored = QuantizedKSLinear(self, parts)
        return stored.train(self.training)

    def _calibration_rows(self, x: Tensor) -> Tensor:
        """At most `CALIBRATED_ROWS` rows of x for the calibration of scales, as a matrix."""
        check_tensors(self._name(), x=x)
        self._y_shape(x)  # refuses x with another number of features
        rows = self._as_matrix(x.detach())
        return rows[:CALIBRATED_ROWS] if self.layout == "bsf" else rows[:, :CALIBRATED_ROWS]

    def _packed(self) -> list[Any]:
        """Weights per factor in the form that launchers accept; packed only once if the layer is frozen."""
        return packed(self.weights)

    def _multiplies(self, dtype: torch.dtype) -> bool:
        """Whether the weights multiply x of this dtype without a cast."""
        return all(each.dtype == dtype for each in self.weights.parameters())  # slices, if they are tied

    def _prepared_calls(self) -> dict[Hashable, Any] | None:
        """Calls that were prepared with these weights; None unless they are frozen."""
        return frozen.calls_of(self)

    def _stored(self) -> Mapping[str, Any]:
        """Parameters of the weights by name. If some are tied, also the full weights of all factors.

        Full weights are slices repeated along the tied axis: at each call, or only once if the layer is frozen.
        """
        weights: Any = self._modules["weights"]
        return stored(weights) if "parametrizations" in weights._modules else weights._parameters

    def _own_weights(self) -> dict[str, Tensor]:
        return stored(self.weights)

    def explain(self, batch: int = 1024, processes: int = 1) -> str:
        """Explain which backend multiplies each factor on the weights' device, and why. Measured times are included.

        Args:
            batch: Batch size: all dimensions of x except the features, multiplied.
            processes: Number of processes. More than 1 describes each possible split and its traffic.

        Returns:
            Text with one line or more per factor.

        Raises:
            SpecError: `batch` or `processes` is not a whole number of at least 1.

        Examples:
            >>> from ksgen.torch import KSLinear
            >>> print(KSLinear("1,3,2,2", backend="strided").explain(batch=4))
            1,3,2,2: strided, as asked for: batched products on views of X and Y, or on copies if no view exists
        """
        return explained(self, checked_count("batch", batch), checked_count("processes", processes))

    def extra_repr(self) -> str:
        words = [str(self.chain), f"in_features={self.in_features}", f"out_features={self.out_features}"]
        words += [f"bias={self.bias is not None}", *self._stored_words()]
        words += [f"{name}={getattr(self, name)}" for name in self._settable if getattr(self, name) != OPTIONS[name]]
        words += [] if self.split is None else [f"on this process {self.own_chain}"]
        return ", ".join(words)

    def _stored_words(self) -> list[str]:
        """Words for `repr` about the storage of the weights."""
        return []


class QuantizedKSLinear(StoredWeights, KSLinear):
    """A `KSLinear` for inference with weights in eight bits, or in bfloat16 for x of float32.

    `KSLinear.quantize` creates it. `values_1`, `scale_1` and so on are buffers, in the order in which factors multiply
    x. x is float32; for weights in eight bits it may also be float16 or bfloat16.

    If there is a buffer `x_scale`, x is quantized before the first factor, to the storage type of the weights. A buffer
    `x_saturated` then counts the elements of x beyond the range.
    """

    backend, precision = "auto", None
    _settable = ("layout", "activation", "between", "fuse")
    _fixed = dict.fromkeys(("chain", "storage", "per"), "a new layer by KSLinear.quantize")

    def __init__(self, layer: KSLinear, parts: Sequence[Quantized]) -> None:
        nn.Module.__init__(self)
        self.chain, self._exchanges = layer.chain, layer._exchanges
        for name in self._settable:
            self._set(name, getattr(layer, name))
        self._store(parts)
        bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_weights(cls, *_: Any, **__: Any) -> "QuantizedKSLinear":
        raise LaunchError("QuantizedKSLinear.from_weights; accepted: KSLinear.from_weights(...).quantize(storage)")

    @classmethod
    def from_linear(cls, *_: Any, **__: Any) -> "QuantizedKSLinear":
        raise LaunchError("QuantizedKSLinear.from_linear; accepted: KSLinear.from_linear(...).quantize(storage)")

    def quantize(self, *_: Any, **__: Any) -> "QuantizedKSLinear":
        raise LaunchError(f"{self._name()}: its weights are in {self.storage} already; accepted: the original KSLinear")


def checked_dtype(chain: Chain, bias: bool, dtype: torch.dtype | None, options: Mapping[str, Any]) -> torch.dtype:
    """Check all options, alone and in combination, and return the dtype of the weights.

    By default, the dtype is that of the precision, or PyTorch's default without a precision.
    """
    layout, precision, backend, activation, between, fuse, intermediates, out_layout = map(options.__getitem__, OPTIONS)
    check_words(backend=(backend, NAMES), between=(between, ACTIVATIONS), intermediates=(intermediates, INTERMEDIATES))
    if between != "none" and len(chain) < 2:
        raise LaunchError(
            f"KSLinear({chain}): between={between!r} with one factor; accepted: between='none', or two factors or more"
        )
    check_words(layout=(layout, LAYOUTS))
    check_words(out_layout=(layout if out_layout is None else out_layout, LAYOUTS))
    for pattern in chain:  # `KernelSpec` refuses unknown words, and sizes beyond memory
        KernelSpec(pattern, "float32" if precision is None else precision, layout, Epilogue(bias, activation))
    if dtype is None:
        dtype = torch.get_default_dtype() if precision is None else getattr(torch, PRECISIONS[precision].dtype)
    check_dtype(dtype)
    check_precision(precision, dtype_name(dtype))
    check_activation(activation, dtype)
    check_activation(between, dtype, "between")
    check_backend(backend, precision, dtype)
    check_fuse(fuse, backend)
    return dtype


def _draw(parameter: Tensor, bound: float) -> None:
    """Draw values uniformly within +-bound.

    Both parts of a complex number are drawn within a smaller bound, so that its variance equals that of a real number.
    """
    if parameter.is_complex():
        parameter, bound = torch.view_as_real(parameter.detach()), bound / sqrt(2)
    nn.init.uniform_(parameter, -bound, bound)


def _gathered(parameter: Any) -> Tensor:
    """The full parameter, gathered if it is sharded."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def is_computed(layer: nn.Module) -> bool:
    """Whether a hook sets a dense layer's `weight` at each call: an attribute, and no parameter or property."""
    return "weight" in vars(layer)


def uninitialized(module: nn.Module) -> str:
    """Message about the first parameter that waits for a call of a lazy layer; empty if there is none."""
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    needed = "has no values before the first call of its lazy layer; accepted: a model that was called once"
    return f"{lazy[0]} {needed}" if lazy else ""


def unreadable(layer: nn.Module) -> str:
    """Message about parameters of a dense layer that cannot be read; empty if they can."""
    return uninitialized(layer) or (COMPUTED if is_computed(layer) else "")


def dense_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Create an `nn.Linear` with copies of this weight and bias."""
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear
