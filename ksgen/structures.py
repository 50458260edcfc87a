"""Structured matrices of the literature as chains, with the parameters of their authors' layers.

A structure assigns each parameter of its authors' layer to a factor of its chain. So checkpoints of such layers become
weights of launchers and of `KSLinear`, and back. Entries are only reordered, and repeated where a factor's weights are
tied. The parameters of GSOFT, and of PEFT's OFT and BOFT, become rotations. A sum of chains is a tuple of structures,
one per summand.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, sqrt
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from ksgen import pattern
from ksgen.errors import LaunchError, PatternError
from ksgen.pattern import Chain, Pattern
from ksgen.values import excerpt, listed, misfit

__all__ = [
    "Structure", "blast", "block_dense", "boft", "btt", "butterfly", "dyad", "gralora", "gs", "kronecker", "low_rank",
    "monarch", "oft",
]  # fmt: skip

DyadVariant = Literal["it", "ot", "dt"]
_ROUNDED = 0.02  # difference of a rotation's elements up to which it may be due to rounding to bfloat16


@dataclass(frozen=True)
class Structure:
    """A structured matrix as a chain, and the parameters of its authors' layer: one per factor, or one for all.

    Args:
        chain: The chain.
        shapes: Shape of each parameter, by name, in the order of the chain's factors.
        axes: Order in which a parameter stores the factor's axes a, b, c, d, by name; by default "abcd". With "B" and
            "C" in it, axes b and c are divided in two digits each. B and C, the higher ones, have two values, and b and
            c are the rest.
        scales: Standard deviations of the authors' initial values, by name; without them, those of `KSLinear`.
        tied: Axis of the factor along which all weights are equal, by name: 0 for a, 3 for d, or (0, 3) for both. The
            parameter is one slice of them.
        init: The authors' initial values as an `init` of `KSLinear`, such as "identity"; empty: by `scales`.
        are_rotations: Whether a block is the rotation (I + S)(I - S)^-1 of its parameter A, with S = (A - A^T) / 2. A
            parameter (blocks, entries) has the entries of S above its diagonal.
        has_rotations: Whether the parameters are rotations themselves.
        terms: Terms of PEFT's series in -S, which then replaces the rotation; 0: the rotation itself.
        parts: Index of each factor's part in the only parameter, if it has the parts of all factors.
        bias: Name of the authors' bias.
        has_bias_column: Whether the bias may have the shape (out_features, 1).
        scale: Name of the scale of the adapted layer's outputs, which a state may have if all its values are 1.
        published: The same structure with the names and shapes of its authors' state dict, if these are others.

    Examples:
        >>> from ksgen import structures
        >>> matrix = structures.monarch(64, 64, blocks=4)
        >>> print(matrix.chain)
        4,16,16,1 then 1,16,16,4
        >>> matrix.shapes
        {'blkdiag1': (4, 16, 16), 'blkdiag2': (4, 16, 16)}
    """

    chain: Chain
    shapes: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    tied: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    init: str = ""
    are_rotations: bool = False
    has_rotations: bool = False
    terms: int = 0
    parts: tuple[tuple[int, ...], ...] = ()
    bias: str = "bias"
    has_bias_column: bool = False
    scale: str = ""
    published: "Structure | None" = field(default=None, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each factor's parameter."""
        return tuple(self.shapes) * (len(self.chain) if self.parts else 1)

    @property
    def ties(self) -> tuple[str, ...]:
        """Axes along which each factor's weights are equal: "a", "d", "ad" or "". Axes of size 1 do not count."""
        stored = map(self._stored_shape, range(len(self.chain)))
        pairs = [zip("abcd", each.shape, part, strict=True) for each, part in zip(self.chain, stored, strict=True)]
        return tuple("".join(axis for axis, size, own in each if own < size) for each in pairs)

    def form_of(self, names: Iterable[str]) -> "Structure":
        """Choose between this structure and its `published` form.

        Args:
            names: Names of parameters, possibly among others, such as a state.

        Returns:
            The form whose parameters are all named; this structure if none is.

        Examples:
            >>> from ksgen import structures
            >>> matrix = structures.btt(64, 32, blocks=(2, 4), rank=3)
            >>> matrix.form_of(["op_params.0", "op_params.1", "b"]).bias
            'b'
        """
        return self.published if self.published and set(self.published.shapes) <= set(names) else self

    def from_state(self, state: Mapping[str, Any]) -> list[Any]:
        """Convert the authors' parameters to weights (a, b, c, d), one per factor.

        Args:
            state: NumPy arrays or tensors by name: exactly those of `shapes`, or of the shapes of the `published` form.

        Returns:
            Contiguous weights, in the order in which the factors multiply x. Tied weights are repeated. Weights may
            share memory with the parameters, unless they are rotations.

        Raises:
            LaunchError: A parameter is missing, unknown, or of another shape, or is complex but stands for rotations.
                Also if the state is no mapping.

        Examples:
            >>> import numpy as np
            >>> from ksgen import structures
            >>> matrix = structures.low_rank(8, 6, rank=2)
            >>> weights = matrix.from_state({"A": np.ones((2, 8)), "B": np.ones((6, 2))})
            >>> [each.shape for each in weights]
            [(1, 2, 8, 1), (1, 6, 2, 1)]
        """
        check_state(self.chain.name, state)
        form = self.form_of(state)
        if set(state) - {form.scale} != set(form.shapes):
            raise LaunchError(f"{self.chain.name}: got {names_of(state)}; {self._needed}")
        for name, shape in form.shapes.items():
            if (given := getattr(state[name], "shape", None)) is None:
                raise LaunchError(f"{self.chain.name}: {name}={excerpt(state[name])}; accepted: an array or a tensor")
            if wrong := misfit(name, given, shape):
                raise LaunchError(f"{self.chain.name}: {wrong}")
        if form.scale in state:
            scale = state[form.scale]
            if tuple(scale.shape[1:]) != (1,):
                needed = "(outputs of the adapted layer, 1) is needed"
                raise LaunchError(f"{self.chain.name}: {form.scale} has shape {tuple(scale.shape)}; {needed}")
            if not bool((scale == 1).all()):
                raise LaunchError(
                    f"{self.chain.name}: got {form.scale} that is not 1, which scales outputs of the adapted layer; "
                    f"accepted: a state without {form.scale}, and rows of that layer multiplied by it"
                )
        return [form._weights(state, number) for number in range(len(form.chain))]

    def to_state(self, weights: Iterable[Any], names: Iterable[str] | None = None) -> dict[str, Any]:
        """Convert weights (a, b, c, d), one per factor, to the authors' parameters.

        Args:
            weights: NumPy arrays or tensors, in the order in which the factors multiply x.
            names: Names of the parameters to return, possibly among others, such as the state that was converted. None:
                those of `shapes`.

        Returns:
            The parameters by name. They may share memory with the weights.

        Raises:
            LaunchError: A weight is missing, of another shape, or tied and not equal along its axes. Also if a block is
                no rotation although its parameter stands for one (`are_rotations`), or if a parameter is not named.

        Examples:
            >>> import numpy as np
            >>> from ksgen import structures
            >>> matrix = structures.low_rank(8, 6, rank=2)
            >>> weights = [np.ones((1, 2, 8, 1)), np.ones((1, 6, 2, 1))]
            >>> matrix.to_state(weights)["B"].shape
            (6, 2)
            >>> list(matrix.to_state(weights, names=["lora_A.weight", "lora_B.weight"]))
            ['lora_A.weight', 'lora_B.weight']
        """
        wanted = tuple(self.shapes if names is None else names)
        form = self.form_of(wanted)
        if not set(form.shapes) <= set(wanted):
            raise LaunchError(f"{self.chain.name}: names={excerpt(wanted)}; {self._needed}")
        given: tuple[Any, ...] = listed(weights) or ()
        shapes, needed = [tuple(each.shape) for each in given], [each.shape for each in self.chain]
        if shapes != needed:
            raise LaunchError(f"{self.chain.name}: got weights of shapes {excerpt(shapes)}; {needed} are needed")
        found = [form._parameter(each, number) for number, each in enumerate(given)]
        if not form.parts:
            return dict(zip(form.names, found, strict=True))
        ((name, shape),) = form.shapes.items()
        in_order = [found[form.parts.index(part)] for part in sorted(form.parts)]
        return {name: _library(found[0]).stack(in_order).reshape(shape)}

    @property
    def _needed(self) -> str:
        """The end of a message about names of parameters."""
        other = f", or {names_of(self.published.shapes)}" if self.published else ""
        return f"{names_of(self.shapes)} are needed{other}"

    def _weights(self, state: Mapping[str, Any], number: int) -> Any:
        """Weights of a factor."""
        name, factor = self.names[number], self.chain[number]
        blocks = state[name][self.parts[number]] if self.parts else state[name]
        if self.are_rotations:
            blocks = _rotations(blocks, self.terms)
        order, sizes = self._digits(number)
        stored = _permuted(blocks.reshape([sizes[each] for each in order]), tuple(map(order.index, sizes)))
        return _filled(stored.reshape(self._stored_shape(number)), factor)

    def _parameter(self, weights: Any, number: int) -> Any:
        """The parameter, or part of it, of a factor with these weights."""
        name, factor, stored_shape = self.names[number], self.chain[number], self._stored_shape(number)
        part = weights[tuple(map(slice, stored_shape))]
        if name in self.tied and not bool(((weights == part) | ((weights != weights) & (part != part))).all()):  # NaN
            raise LaunchError(
                f"{self.chain.name}: weights of {name} differ along {' or '.join(self.ties[number])} of {factor}, "
                "where they are tied; equal ones are needed"
            )
        order, sizes = self._digits(number)
        blocks = _permuted(part.reshape(list(sizes.values())), tuple(map(list(sizes).index, order)))
        shape = self.shapes[name][len(self.parts[number]) if self.parts else 0 :]
        if not self.are_rotations:
            return blocks.reshape(shape)
        found = _of_rotations(blocks.reshape(factor.a * factor.d, factor.b, factor.c), self.terms)
        if found is None:
            kinds = "rotations without the eigenvalue -1"
            if self.terms:
                kinds = f"values of PEFT's series of {self.terms} terms for an S with small entries"
            raise LaunchError(f"{self.chain.name}: {name} has blocks that are no rotations; accepted: {kinds}")
        return found[_above_diagonal(factor.b)] if len(shape) == 2 else found

    def _digits(self, number: int) -> tuple[str, dict[str, int]]:
        """Digits of a factor's weights in the order of its parameter, and their sizes in the order of the factor."""
        order = self.axes.get(self.names[number], "abcd")
        a, b, c, d = self._stored_shape(number)
        high = 2 if "B" in order else 1
        sizes = {"a": a, "B": high, "b": b // high, "C": high, "c": c // high, "d": d}
        return order, {digit: size for digit, size in sizes.items() if digit in order}

    def _stored_shape(self, number: int) -> tuple[int, ...]:
        """Shape of a parameter in the factor's order of axes: 1 along the axes of tied weights."""
        tied = self.tied.get(self.names[number], ())
        axes = (tied,) if isinstance(tied, int) else tied
        return tuple(1 if axis in axes else size for axis, size in enumerate(self.chain[number].shape))


def blast(in_features: int, out_features: int, blocks: int | tuple[int, int], rank: int) -> Structure:
    """Create a BLAST structure (Lee et al., 2024): blocks of low rank that share their left and right factors.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Number of blocks along y and along x: a pair, or one int for both.
        rank: Rank of each block.

    Returns:
        The `Structure`, with the parameters B, C and D. The authors' layer has no initial values of its own. Here each
        factor is drawn so that it keeps the mean square of its features.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> structures.blast(64, 32, blocks=(2, 4), rank=8).shapes
        {'C': (4, 8, 16), 'D': (2, 4, 8), 'B': (2, 16, 8)}
    """
    rows, columns = _checked_pair(blocks, in_features, out_features)
    chain = pattern.blast(in_features, out_features, columns, rows, rank)
    down, mix, up = chain
    return _keeping_size(Structure(chain, {"C": down.shape[:3], "D": mix.shape[1:], "B": up.shape[:3]}))


def monarch(in_features: int, out_features: int, blocks: int) -> Structure:
    """Create a Monarch structure (Dao et al., 2022): diagonal blocks, a permutation, and diagonal blocks.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Diagonal blocks of each factor, a divisor of `in_features` and `out_features`.

    Returns:
        The `Structure`, with the parameters blkdiag1 and blkdiag2. They are drawn as by default in `KSLinear`, within
        +-1/sqrt(columns of a block), which is the authors' choice, too.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> print(structures.monarch(64, 32, blocks=4).chain)
        4,8,16,1 then 1,8,8,4
    """
    block_in, block_out = _blocks_of(blocks, in_features=in_features, out_features=out_features)
    inner = min(block_in, block_out)
    first, second = Pattern(blocks, inner, block_in, 1), Pattern(1, block_out, inner, blocks)
    shapes = {"blkdiag1": first.shape[:3], "blkdiag2": (blocks, block_out, inner)}
    return Structure(Chain((first, second), "monarch"), shapes, {"blkdiag2": "adbc"})


def butterfly(features: int, block: int = 1) -> Structure:
    """Create a butterfly (Dao et al., 2019): factors of 2 x 2 matrices at strides 1, 2, 4, ...

    The entries of these matrices are `block` x `block` blocks.

    Args:
        features: Features of x and y: `block` times a power of two from 2 up.
        block: Rows and columns of each entry (Chen et al., 2022). If it is more than 1 and there are several factors,
            they store their outputs in another order (`Pattern.store`).

    Returns:
        The `Structure`, with torch-structured's parameter twiddle (1, 1, factors, pairs of entries, 2, 2). For larger
        blocks, its last axes are (..., 2, 2, block, block). Its initial scale is the authors' 1/sqrt(2) for single
        entries. It keeps the mean square of features for any block.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> print(structures.butterfly(8).chain)
        4,2,2,1 then 2,2,2,2 then 1,2,2,4
        >>> structures.butterfly(64, block=16).shapes
        {'twiddle': (1, 1, 2, 2, 2, 2, 16, 16)}
    """
    factors = pattern.block_butterfly(features, block).factors
    pairs, size, entries = features // (2 * block), 2 * block, (block, block) if block > 1 else ()
    if entries:  # the low digit of a feature is its place in a block, at each stride
        factors = tuple(_level(pairs, size, level) for level in range(len(factors)))
    shape = (1, 1, len(factors), pairs, 2, 2, *entries)
    return Structure(
        Chain(factors, "butterfly"),
        {"twiddle": shape},
        {"twiddle": "aBCbcd" if entries else "adbc"},
        {"twiddle": 1 / sqrt(size)},
        parts=tuple((0, 0, level) for level in range(len(factors))),
    )


def btt(in_features: int, out_features: int, blocks: int | tuple[int, int], rank: int) -> Structure:
    """Create a block tensor train of two cores (Qiu et al., 2024): a Monarch structure of blocks of any rank.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Number of blocks along y and along x: a pair, or one int for both.
        rank: Rank of each block.

    Returns:
        The `Structure`, with the authors' cores W1 (blocks of x, inputs, blocks of y * rank) and W2 (blocks of y,
        blocks of x * rank, outputs). Their repository names them op_params.0 and op_params.1, and the bias b. Initial
        scales follow the maximal-update parametrization.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> print(structures.btt(64, 32, blocks=(2, 4), rank=3).chain)
        4,6,16,1@k1:2.i.k2:3 then 2,16,12,1
    """
    rows, columns = _checked_pair(blocks, in_features, out_features)
    chain = pattern.btt(in_features, out_features, columns, rows, rank)
    found = _of_blocks(chain, "W1", "W2")
    scales = {name: sqrt(min(inputs, outputs)) / inputs for name, (_, inputs, outputs) in found.shapes.items()}
    return _also(replace(found, scales=scales), {"W1": "op_params.0", "W2": "op_params.1"}, bias="b")


def dyad(in_features: int, out_features: int, blocks: int, variant: DyadVariant = "it") -> tuple[Structure, Structure]:
    """Create a DYAD structure (Chandy et al., 2023): the sum of diagonal blocks and of permuted diagonal blocks.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Diagonal blocks k of both summands, a divisor of `in_features` and `out_features`.
        variant: Permutation of the second summand: "it" (inputs transposed: block i takes each k-th feature of x, from
            i on), "ot" (outputs transposed), or "dt" (both).

    Returns:
        A `Structure` per summand, with the parameters wl and wu (k, out_features / k, in_features / k). The bias may
        have the authors' shape (out_features, 1).

    Raises:
        PatternError: A number or the variant is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> [str(each.chain) for each in structures.dyad(64, 32, blocks=4)]
        ['4,8,16,1', '1,8,16,4@j.k']
    """
    inputs, outputs = _blocks_of(blocks, in_features=in_features, out_features=out_features)
    straight = Pattern(blocks, outputs, inputs, 1)
    permuted = {
        "it": Pattern(1, outputs, inputs, blocks, "j.k"),
        "ot": Pattern(blocks, outputs, inputs, 1, "k.i"),
        "dt": Pattern(1, outputs, inputs, blocks),
    }
    if not isinstance(variant, str) or variant not in permuted:
        raise PatternError(f"variant={excerpt(variant)}; accepted: {', '.join(permuted)}")
    shape, scale = straight.shape[:3], 1 / sqrt(3 * straight.in_features)  # of values within +-1/sqrt(in_features)
    order = "abcd" if variant == "ot" else "adbc"
    first = Structure(Chain((straight,), "dyad"), {"wl": shape}, {}, {"wl": scale}, has_bias_column=True)
    second = Chain((permuted[variant],), "dyad")
    return first, Structure(second, {"wu": shape}, {"wu": order}, {"wu": scale}, has_bias_column=True)


def gralora(in_features: int, out_features: int, blocks: int, rank: int) -> Structure:
    """Create the update of GraLoRA (Jung et al., 2025): a matrix of k x k blocks, each of rank `rank` / k.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Blocks k along each side, a divisor of `in_features`, `out_features` and `rank`.
        rank: Sum of the ranks of the k blocks in a row: each block has rank `rank` / k.

    Returns:
        The `Structure`, with PEFT's parameters gralora_A (k, in_features / k, rank) and gralora_B (k, rank,
        out_features / k). gralora_B is zero at first, as in PEFT, because an adapter begins as no change. gralora_A is
        drawn within +-1/sqrt(in_features / k).

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> print(structures.gralora(64, 32, blocks=2, rank=8).chain)
        2,8,32,1@k1:2.i.k2:4 then 2,16,8,1
    """
    *_, block_rank = _blocks_of(blocks, in_features=in_features, out_features=out_features, rank=rank)
    chain = Chain(pattern.btt(in_features, out_features, blocks, blocks, block_rank).factors, "gralora")
    found = _of_blocks(chain, "gralora_A", "gralora_B")
    return replace(found, scales={"gralora_B": 0.0})


def oft(features: int, block: int, terms: int | None = 5) -> Structure:
    """Create the rotation of OFT (Qiu et al., 2023): diagonal blocks R, each of which computes its part of y as x R.

    Args:
        features: Features of x and y.
        block: Rows and columns of a block, a divisor of `features`.
        terms: PEFT's `num_cayley_neumann_terms`, at least 4. None: `use_cayley_neumann=False`. Only its parameter
            oft_R.weight depends on them.

    Returns:
        The `Structure`, with the blocks R (features / block, block, block), or PEFT's parameter oft_R.weight
        (features / block, block (block - 1) / 2). The matrix is the identity at first.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> print(structures.oft(64, block=16).chain)
        4,16,16,1
    """
    (count,) = _blocks_of(block, name="block", features=features)
    if terms is not None and pattern.counts(terms=terms)[0] < 4:
        raise PatternError(f"terms={terms}; accepted: 4 or more, or None")
    found = replace(
        _of_blocks(Chain((Pattern(count, block, block, 1),), "oft"), "R"), init="identity", has_rotations=True
    )
    shapes = {"oft_R.weight": (count, block * (block - 1) // 2)}
    return replace(found, published=replace(found, shapes=shapes, axes={}, are_rotations=True, terms=terms or 0))


def boft(features: int, block: int, factors: int) -> Structure:
    """Create the rotation of BOFT (Liu et al., 2024): the product of block-diagonal rotations after permutations.

    The lowest digit u of a feature's index is below `block` / 2. Each block of level t mixes the features with all
    values of u and of bit t above u. By itself, a level reads and stores features in the order of their index, which
    its pattern states as an exchange. In the chain, each factor stores its outputs as the next one reads them. So only
    the first factor reads exchanged inputs.

    Args:
        features: Features of x and y.
        block: Rows and columns of a block, a divisor of `features`; even if there are several factors.
        factors: Number m of factors of the butterfly. With m = 1, this is OFT. 2^(m - 1) divides the number of blocks.

    Returns:
        The `Structure`, with the rotations R0, R1, ... (features / block, block, block) of PEFT's levels, or PEFT's
        parameter boft_R (m, features / block, block, block). A level computes x R, so the blocks of its matrix are the
        transposes of R. The last level multiplies x first. The matrix is the identity at first.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> print(structures.boft(64, block=8, factors=2).chain)
        i1:4.l1:2.i2:2.l2:4@8,8,8,1@i1:4.k1:2.i2:2.k2:4 then 8,8,8,1
    """
    (count,) = _blocks_of(block, name="block", features=features)
    (levels,) = pattern.counts(factors=factors)
    most = (count & -count).bit_length() if block % 2 == 0 else 1
    if levels > most:
        raise PatternError(f"factors={levels}; accepted: 1 to {most} for {count} blocks of {block}")
    last_first = range(levels)[::-1]
    chain = Chain(tuple(_level(count, block, level) for level in last_first), "boft")
    found = replace(_of_blocks(chain, *(f"R{level}" for level in last_first)), init="identity", has_rotations=True)
    parameter = replace(
        found,
        shapes={"boft_R": (levels, count, block, block)},
        axes={},
        are_rotations=True,
        parts=tuple((level,) for level in last_first),
        scale="boft_s",
    )
    return replace(found, published=parameter)


def gs(
    in_features: int,
    out_features: int,
    blocks: int | tuple[int, int],
    inner: int | None = None,
    orthogonal: bool = True,
) -> Structure:
    """Create a group-and-shuffle matrix P^T L P R (Gorbunov et al., 2024): L and R are block diagonal, P shuffles.

    L has k blocks. Block i reads every k-th inner feature from i on, and writes every k-th output.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Diagonal blocks of L and of R: a pair, or one int for both.
        inner: Features between R and L. None: the smaller of `in_features` and `out_features`.
        orthogonal: Whether the authors' parameters A stand for rotations, their blocks' Cayley transforms, as by
            default in GSOFT. False: they are the blocks themselves. Only rotations need equal numbers of features.

    Returns:
        The `Structure`, with GSOFT's parameters gsoft_R and gsoft_L (blocks, rows of a block, columns). If the blocks
        are square, the matrix is the identity at first.

    Raises:
        PatternError: A number is not accepted, or blocks of rotations are not square.

    Examples:
        >>> from ksgen import structures
        >>> print(structures.gs(64, 64, blocks=4).chain)
        4,16,16,1 then 1,16,16,4
        >>> structures.gs(64, 32, blocks=(4, 8), orthogonal=False).shapes
        {'gsoft_R': (8, 4, 8), 'gsoft_L': (4, 8, 8)}
    """
    if type(orthogonal) is not bool:
        raise PatternError(f"orthogonal={excerpt(orthogonal)}; accepted: True or False")
    left, right = blocks if isinstance(blocks, tuple | list) and len(blocks) == 2 else (blocks, blocks)
    inner = min(pattern.counts(in_features=in_features, out_features=out_features)) if inner is None else inner
    down = _blocks_of(right, in_features=in_features, inner=inner)
    up = _blocks_of(left, out_features=out_features, inner=inner)
    is_square = in_features == out_features == inner
    if orthogonal and not is_square:
        raise PatternError(
            f"orthogonal=True for {in_features} to {inner} to {out_features} features; accepted: equal numbers of "
            "them, or orthogonal=False"
        )
    first, second = Pattern(right, down[1], down[0], 1), Pattern(1, up[0], up[1], left)
    return Structure(
        Chain((first, second), "gs"),
        {"gsoft_R": first.shape[:3], "gsoft_L": (second.d, *second.shape[1:3])},
        {"gsoft_L": "adbc"},
        init="identity" if is_square else "",
        are_rotations=orthogonal,
    )


def kronecker(in_features: int, out_features: int, blocks: int | tuple[int, int]) -> Structure:
    """Create a Kronecker product A ⊗ B: a matrix of blocks, each of which is B times an entry of A.

    One factor of the chain repeats A, the other repeats B. They are applied in the order with fewer multiplications.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Rows and columns of A, which are the blocks along y and x: a pair, or one int for both.

    Returns:
        The `Structure`, with the parameters A (blocks along y, blocks along x) and B (rows and columns of a block).
        LoKr in PEFT names them lokr_w1 and lokr_w2. Both are drawn as by default in `KSLinear`. LoKr begins with A = 0,
        as an adapter.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> matrix = structures.kronecker(64, 32, blocks=(4, 8))
        >>> print(matrix.chain)
        1,4,8,8 then 4,8,8,1
        >>> matrix.shapes, matrix.tied
        ({'A': (4, 8), 'B': (8, 8)}, {'A': 3, 'B': 0})
    """
    rows, columns = _checked_pair(blocks, in_features, out_features)
    inputs, outputs = in_features // columns, out_features // rows
    b_first = Chain((Pattern(columns, outputs, inputs, 1), Pattern(1, rows, columns, outputs)), "kronecker")
    a_first = Chain((Pattern(1, rows, columns, inputs), Pattern(rows, outputs, inputs, 1)), "kronecker")
    chain = min(b_first, a_first, key=attrgetter("weight_count"))
    names = ("B", "A") if chain is b_first else ("A", "B")
    shapes = {name: factor.shape[1:3] for name, factor in zip(names, chain, strict=True)}
    found = Structure(chain, shapes, tied={name: {"A": 3, "B": 0}[name] for name in names})
    return _also(found, {"A": "lokr_w1", "B": "lokr_w2"})


def low_rank(in_features: int, out_features: int, rank: int) -> Structure:
    """Create a matrix of low rank: down to `rank` features, then up.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features of the intermediate, at most the smaller of both.

    Returns:
        The `Structure`, with LoRA's parameters A (rank, in_features) and B (out_features, rank), which PEFT names
        lora_A.weight and lora_B.weight. Both are drawn as by default in `KSLinear`, and A so in PEFT, too. LoRA begins
        with B = 0, as an adapter.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> structures.low_rank(64, 32, rank=8).shapes
        {'A': (8, 64), 'B': (32, 8)}
    """
    chain = pattern.low_rank(in_features, out_features, rank)
    found = Structure(chain, {name: factor.shape[1:3] for name, factor in zip(("A", "B"), chain, strict=True)})
    return _also(found, {"A": "lora_A.weight", "B": "lora_B.weight"})


def block_dense(in_features: int, out_features: int, blocks: int, rank: int) -> Structure:
    """Create a matrix of two factors: diagonal blocks, then a dense matrix.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        blocks: Diagonal blocks, a divisor of `in_features` and of `rank`.
        rank: Features of the intermediate.

    Returns:
        The `Structure`, with the parameters blkdiag and linear, which Wei et al. (2024) name lr. Each factor is drawn
        so that it keeps the mean square of its features. The authors also make each factor orthogonal; ksgen does not.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> from ksgen import structures
        >>> structures.block_dense(64, 32, blocks=4, rank=16).shapes
        {'blkdiag': (4, 4, 16), 'linear': (32, 16)}
    """
    block_in, block_out = _blocks_of(blocks, in_features=in_features, rank=rank)
    first, second = Pattern(blocks, block_out, block_in, 1), pattern.dense(rank, out_features)[0]
    shapes = {"blkdiag": first.shape[:3], "linear": second.shape[1:3]}
    found = _keeping_size(Structure(Chain((first, second), "block_dense"), shapes))
    return _also(found, {"blkdiag": "blkdiag", "linear": "lr"})


ONE_CHAIN: dict[str, Callable[..., Structure]] = {  # structures that are not sums of chains, by name
    each.__name__: each
    for each in (blast, block_dense, boft, btt, butterfly, gralora, gs, kronecker, low_rank, monarch, oft)
}
SUMS: dict[str, Callable[..., tuple[Structure, ...]]] = {"dyad": dyad}  # structures that are sums of chains, by name


def of_chain(chain: Chain, tied: Sequence[str] = ()) -> Structure:
    """Structure of a chain whose parameters are its own weights, named "0", "1" and so on.

    `tied` has the axes along which each factor's weights are equal: "a", "d", "ad", or "" for none. Their parameter is
    the first slice.
    """
    if tied and (len(tied) != len(chain) or not set(tied) <= {"", "a", "d", "ad"}):
        words = ", ".join(each or "none" for each in tied)
        raise PatternError(f"tied={excerpt(words)} of {chain}; accepted: one of none, a, d or ad per factor")
    axes = {str(number): tuple(map("abcd".index, tie)) for number, tie in enumerate(tied) if tie}
    whole = Structure(chain, {str(number): factor.shape for number, factor in enumerate(chain)}, tied=axes)
    return replace(whole, shapes={name: whole._stored_shape(int(name)) for name in whole.shapes})


def shared_names(structures: Sequence[Structure]) -> list[str]:
    """Names that parameters of several structures have."""
    counts = Counter(name for each in structures for name in each.shapes)
    return [name for name, count in counts.items() if count > 1]


def _of_blocks(chain: Chain, *names: str) -> Structure:
    """Structure of block-diagonal factors whose parameters have blocks (inputs, outputs)."""
    shapes = {name: (factor.a, factor.c, factor.b) for name, factor in zip(names, chain, strict=True)}
    return Structure(chain, shapes, dict.fromkeys(names, "acbd"))


def renamed(structure: Structure, names: Mapping[str, str]) -> Structure:
    """The structure with its parameters by other names."""

    def of(values: Mapping[str, Any]) -> dict[str, Any]:
        return {names[name]: value for name, value in values.items()}

    shapes, axes, scales, tied = map(of, (structure.shapes, structure.axes, structure.scales, structure.tied))
    return replace(structure, shapes=shapes, axes=axes, scales=scales, tied=tied, published=None)


def _also(structure: Structure, names: Mapping[str, str], bias: str = "bias") -> Structure:
    """The structure, which also accepts its parameters by other names."""
    return replace(structure, published=replace(renamed(structure, names), bias=bias))


def _keeping_size(structure: Structure) -> Structure:
    """The structure with initial values of variance 1/c, so that each factor keeps the mean square of its features."""
    pairs = zip(structure.shapes, structure.chain, strict=True)
    return replace(structure, scales={name: 1 / sqrt(factor.c) for name, factor in pairs})


def _level(count: int, size: int, level: int) -> Pattern:
    """Block-diagonal level of a butterfly.

    Each block mixes the features that differ only in the low digit, which is below size / 2, and in bit `level` above
    it.
    """
    order = f"i1.k1:2.i2:{2**level}.k2" if level else ""
    return Pattern(count, size, size, 1, order, order.replace("k", "l"))


def _checked_pair(blocks: Any, in_features: int, out_features: int) -> tuple[Any, Any]:
    """Numbers of blocks along y and along x, which divide the features."""
    pair = blocks if isinstance(blocks, tuple | list) else (blocks, blocks)
    if len(pair) != 2:
        raise PatternError(f"blocks={excerpt(blocks)}; accepted: a whole number, or a pair: those along y and along x")
    rows, columns = pair
    _blocks_of(columns, in_features=in_features)
    _blocks_of(rows, out_features=out_features)
    return rows, columns


def _blocks_of(blocks: object, name: str = "blocks", **features: int) -> tuple[int, ...]:
    """Divide features by a number of blocks; `PatternError` says which number is not divisible."""
    number, *sizes = pattern.counts(**{name: blocks}, **features)
    for each, size in zip(features, sizes, strict=True):
        if size % number:
            raise PatternError(f"{name}={number}; accepted: a divisor of {each}={size}")
    return tuple(size // number for size in sizes)


def _filled(array: Any, factor: Pattern) -> Any:
    """The array without gaps in memory, repeated along axes of the factor in which it has one slice."""
    if hasattr(array, "expand"):
        return array.expand(factor.shape).contiguous()
    for axis, size in enumerate(factor.shape):
        if array.shape[axis] != size:
            array = array.repeat(size, axis)
    return array.copy()


def _permuted(array: Any, axes: tuple[int, ...]) -> Any:
    """The array, or tensor, with its axes in another order."""
    return array.permute(axes) if hasattr(array, "permute") else array.transpose(axes)


def _rotations(parameters: Any, terms: int) -> Any:
    """Rotations of parameters A, or of the entries of S above the diagonal."""
    library, wide = _wide(parameters)
    if wide.ndim == 2:
        size = isqrt(2 * wide.shape[1]) + 1
        upper = library.zeros((len(wide), size, size), dtype=wide.dtype)
        upper[_above_diagonal(size)] = 2 * wide
        wide = upper
    return _like(_transformed(library, _skew(wide), terms), parameters)


def _of_rotations(rotations: Any, terms: int) -> Any:
    """Matrices S that stand for these rotations; None if these are none."""
    library, wide = _wide(rotations)
    try:
        skew = -_skew(wide) / 2 if terms else -_cayley(library, -wide)  # the transform is its own inverse, up to signs
        for _ in range(64 if terms else 0):
            skew = (skew + (_skew(_transformed(library, skew, terms)) - _skew(wide)) / 2).clip(-1, 1)
        is_exact = bool((abs(_transformed(library, _skew(skew), terms) - wide) <= _ROUNDED).all())
    except (np.linalg.LinAlgError, RuntimeError):  # a singular matrix, in NumPy and in PyTorch
        is_exact = False
    return _like(skew, rotations) if is_exact else None


def _transformed(library: Any, skew: Any, terms: int) -> Any:
    """(I + S)(I - S)^-1 of each matrix S, or PEFT's series I - 2 S + 2 S^2 - ..., whose last term has the factor 1."""
    if not terms:
        return _cayley(library, skew)
    identity = library.eye(skew.shape[1], dtype=skew.dtype)
    total = -skew
    for _ in range(terms - 2):
        total = -skew @ (2 * identity + total)
    return identity + total


def _skew(matrices: Any) -> Any:
    return (matrices - matrices.swapaxes(1, 2)) / 2


def _above_diagonal(size: int) -> Any:
    """Index of the entries above the diagonals of matrices, row by row."""
    return (slice(None), *np.triu_indices(size, 1))


def _cayley(library: Any, matrices: Any) -> Any:
    """(I + S)(I - S)^-1 of each matrix S."""
    identity = library.eye(matrices.shape[1], dtype=matrices.dtype)
    return library.linalg.solve(identity - matrices, identity + matrices)  # both factors commute


def _wide(array: Any) -> tuple[Any, Any]:
    """NumPy or PyTorch, and its array in float64 on the host; `LaunchError` for complex numbers."""
    if "complex" in str(array.dtype):
        raise LaunchError(f"rotations of {array.dtype}; accepted: real numbers")
    library = _library(array)
    return library, array.astype(np.float64) if library is np else array.detach().cpu().double()


def _library(array: Any) -> Any:
    return sys.modules["torch"] if hasattr(array, "permute") else np


def _like(wide: Any, array: Any) -> Any:
    """Convert the values to the type and the device of another array of the same library."""
    return wide.to(array.device, array.dtype) if hasattr(array, "permute") else wide.astype(array.dtype)


def names_of(given: Mapping[str, Any]) -> str:
    """Names of a state's parameters, in words."""
    return ", ".join(sorted(map(str, given))) or "no parameters"


def check_state(owner: str, state: object) -> None:
    """Raise `LaunchError` unless a state is a mapping. `owner` begins the message."""
    if not hasattr(state, "keys"):  # PyTorch's `ParameterDict` is no `Mapping`
        raise LaunchError(f"{owner}: state={excerpt(state)}; accepted: a mapping of names to arrays or tensors")
