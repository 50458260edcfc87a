"""Defines which entries of K may be non-zero: a `Pattern` (a, b, c, d), a `Chain` of patterns, and chains with names
in the literature.

A pattern is the support I_a ⊗ 1_{b x c} ⊗ I_d of a matrix of a*b*d rows and a*c*d columns. The entry in row (i, k, j)
and column (i, l, j) may be non-zero, for i < a, k < b, l < c, j < d. A pattern may store its outputs in another order
of their indices, such as (i, j, k), and read its inputs in another order. Then the rows of its matrix, or the columns,
have that order. This module computes with whole numbers only; it uses neither arrays nor GPUs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, TypeGuard

from ksgen.errors import PatternError, warn_deprecated
from ksgen.order import Order
from ksgen.values import cached_property, excerpt, listed, whole_number

MOST_FEATURES = 2**31 - 1  # kernels count features in 32 bits; offsets also grow with the batch, and take 64

WRITTEN = re.compile(
    r"\s*(?:([ilj0-9:.]{1,200})\s*@\s*)?"
    r"(?=\([^)\]]*\)|\[[^)\]]*\]|[^()\[\]]*$)"  # parentheses, brackets, or neither
    r"[(\[]?" + ",".join([r"\s*([+-]?[0-9]{1,20})\s*"] * 4) + r"[)\]]?\s*(?:@\s*([ikj0-9:.]{1,200})\s*)?",
    re.ASCII,
)


class Gain(StrEnum):
    """Gain of one kernel over permute-multiply-permute, as suggested by (b + c)/(bc).

    It is a heuristic, not a measurement.
    """

    NONE = "nothing to win: d = 1 makes K block diagonal, so there is nothing to permute"
    LITTLE = "little to win: the multiplications hide the permutations"
    SOME = "something to win: the permutations are a visible part of the time"
    MOST = "most to win: the permutations are a large part of the time"


# Values of (b + c)/(bc) from which a gain is `MOST` and `SOME`: square blocks of 64 and of 256 have them. The share of
# time spent on permuting grows with the ratio and depends on the device, so these are round numbers, not measured
# boundaries.
_MOST_FROM, _SOME_FROM = 2 / 64, 2 / 256


@dataclass(frozen=True, order=True, slots=True, repr=False)
class Pattern:
    """Sparsity pattern of a Kronecker-sparse matrix K: the support I_a ⊗ 1_{b x c} ⊗ I_d.

    K has a*b*d rows and a*c*d columns. The entry in row (i, k, j) and column (i, l, j) is a weight, for i < a, k < b, l
    < c, j < d. All others are zero. Weights are an array of shape (a, b, c, d).

    Args:
        a: Number of diagonal blocks.
        b: Outputs of each small dense block.
        c: Inputs of each small dense block.
        d: Interleaved dense blocks in each diagonal block. With d = 1, K is block diagonal.
        store: Order in which outputs are stored, if it is not (i, k, j): the indices, slowest-varying first. An
            example is "i.j.k". An index may be divided into digits: in "k1:4.i.k2", k is k1 * b/4 + k2, with k1 < 4
            and k2 < b/4. An index or digit with a single value may be left out, as j is here.
        load: Order in which inputs lie in x, if it is not (i, l, j), such as "l.i.j": the indices, slowest-varying
            first.

    Raises:
        PatternError: A number is not a whole number of at least 1, or K has over 2^31 - 1 rows or columns. Also if
            `store` is not an order of the outputs, or `load` not one of the inputs.

    Examples:
        >>> from ksgen import Pattern
        >>> pattern = Pattern(6, 64, 32, 2)
        >>> pattern.in_features, pattern.out_features, pattern.weight_count
        (384, 768, 24576)
        >>> str(pattern)
        '6,64,32,2'
        >>> str(Pattern(6, 64, 32, 2, store="i.j.k"))
        '6,64,32,2@i.j.k'
        >>> str(Pattern(6, 64, 32, 2, load="l.i.j"))
        'l.i.j@6,64,32,2'
        >>> Pattern(6, 0, 32, 2)
        Traceback (most recent call last):
        ...
        ksgen.errors.PatternError: b=0; accepted: a whole number from 1 to 2147483647
    """

    a: int
    b: int
    c: int
    d: int
    store: str = ""
    load: str = ""

    def __post_init__(self) -> None:
        for name, count in zip("abcd", counts(a=self.a, b=self.b, c=self.c, d=self.d), strict=True):
            object.__setattr__(self, name, count)
        if (most := max(self.in_features, self.out_features)) > MOST_FEATURES:
            raise PatternError(f"pattern {self} has {most} features on a side; accepted: at most {MOST_FEATURES}")
        object.__setattr__(self, "store", self.outputs.normalized())
        object.__setattr__(self, "load", self.inputs.normalized())

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Read a pattern from text.

        Args:
            text: Four whole numbers with commas, such as "1,192,48,2", optionally in parentheses or brackets. The order
                in which outputs are stored may follow: "1,192,48,2@i.j.k". The order of the inputs in x may precede:
                "i.j.l@1,192,48,2".

        Returns:
            The pattern.

        Raises:
            PatternError: The text is not a pattern.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern.parse("(1, 192, 48, 2)")
            Pattern(a=1, b=192, c=48, d=2)
        """
        if not isinstance(text, str) or not (found := WRITTEN.fullmatch(text)):
            raise PatternError(
                f"{excerpt(text)} is not a pattern; accepted: whole numbers a,b,c,d such as 1,192,48,2, and perhaps "
                "orders of inputs and outputs: i.j.l@1,192,48,2@i.j.k"
            )
        load, *sizes, store = found.groups()
        a, b, c, d = map(int, sizes)
        return cls(a, b, c, d, store or "", load or "")

    @classmethod
    def read(cls, given: object, name: str = "pattern") -> "Pattern":
        """Read a pattern that a user gave in any form.

        Args:
            given: A `Pattern`, four numbers, or text: `Pattern(1, 192, 48, 2)`, `(1, 192, 48, 2)` or `"1,192,48,2"`.
            name: Name of the argument in messages.

        Returns:
            The pattern.

        Raises:
            PatternError: The value is not a pattern.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern.read((1, 192, 48, 2)) == Pattern.read("1,192,48,2")
            True
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if not _is_shape(given):
            raise PatternError(
                f"{name}={excerpt(given)}; accepted: a Pattern, four numbers (a, b, c, d), or text such as 1,192,48,2"
            )
        a, b, c, d = given
        return cls(a, b, c, d)

    def __repr__(self) -> str:
        orders = "".join(f", {name}={order!r}" for name, order in (("store", self.store), ("load", self.load)) if order)
        return f"Pattern(a={self.a}, b={self.b}, c={self.c}, d={self.d}{orders})"

    def __str__(self) -> str:
        load, store = (f"{self.load}@" if self.load else ""), (f"@{self.store}" if self.store else "")
        return load + ",".join(map(str, self.shape)) + store

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the weights: (a, b, c, d)."""
        return self.a, self.b, self.c, self.d

    @property
    def name(self) -> str:
        """Pattern in file names and kernel names: `1x192x48x2`, or `1x192x48x2_jk` with an order of outputs."""
        return "x".join(map(str, self.shape)) + self._orders

    @property
    def identifier(self) -> str:
        """Pattern in identifiers, such as `1_192_48_2`."""
        return "_".join(map(str, self.shape)) + self._orders

    @property
    def _orders(self) -> str:
        orders = (("_", self.store), ("_from_", self.load))
        return "".join(word + order.replace(":", "x").replace(".", "") for word, order in orders if order)

    @property
    def support(self) -> str:
        """Formula of the support, such as `I_1 ⊗ 1_{192x48} ⊗ I_2`."""
        orders = "".join(
            f", {each.features} in the order {each.text}" for each in (self.outputs, self.inputs) if each.is_exchanged
        )
        return f"I_{self.a} ⊗ 1_{{{self.b}x{self.c}}} ⊗ I_{self.d}{orders}"

    @property
    def outputs(self) -> Order:
        """Order in which outputs are stored."""
        return Order("outputs", (self.a, self.b, self.d), self.store)

    @property
    def inputs(self) -> Order:
        """Order in which inputs lie in x."""
        return Order("inputs", (self.a, self.c, self.d), self.load)

    @property
    def exchanged(self) -> Order | None:
        """The order of outputs, or else of inputs, that is not the natural one; None if there is none."""
        return next((each for each in (self.outputs, self.inputs) if each.is_exchanged), None)

    @property
    def is_exchanged(self) -> bool:
        """Whether outputs are not stored in the order (i, k, j), or inputs not read in the order (i, l, j)."""
        return bool(self.store or self.load)

    @property
    def natural(self) -> "Pattern":
        """The same pattern with outputs in the order (i, k, j), and inputs in the order (i, l, j)."""
        return Pattern(*self.shape) if self.is_exchanged else self

    @property
    def in_features(self) -> int:
        """Number of columns of K: a*c*d."""
        return self.a * self.c * self.d

    @property
    def out_features(self) -> int:
        """Number of rows of K: a*b*d."""
        return self.a * self.b * self.d

    @property
    def weight_count(self) -> int:
        """Number of values on the support: a*b*c*d."""
        return self.a * self.b * self.c * self.d

    @property
    def density(self) -> float:
        """Share of K's entries that may be non-zero: 1/(a*d)."""
        return 1 / (self.a * self.d)

    @property
    def transpose(self) -> "Pattern":
        """Pattern of the transpose of K, which multiplies the gradient of y to give the gradient of x.

        It reads inputs in the order in which this pattern stores outputs, and vice versa.
        """
        store, load = self.inputs.renamed("outputs"), self.outputs.renamed("inputs")
        return Pattern(self.a, self.c, self.b, self.d, store, load)

    def repeated(self, count: int) -> "Pattern":
        """Pattern of `count` matrices K on one block diagonal.

        Args:
            count: Number of matrices.

        Returns:
            The pattern, whose features are those of the matrices, concatenated.

        Examples:
            >>> from ksgen import Pattern
            >>> print(Pattern(2, 4, 3, 5, store="i.j.k").repeated(3))
            6,4,3,5@i.j.k
        """
        orders = (order.repeated(count) for order in (self.outputs, self.inputs))
        return Pattern(count * self.a, self.b, self.c, self.d, *orders)

    @property
    def rewrite_ratio(self) -> float:
        """Elements that permute-multiply-permute rewrites per multiplication: (b + c)/(bc)."""
        return (self.b + self.c) / (self.b * self.c)

    def predicts(self) -> Gain:
        """Predict the gain of one kernel over permute-multiply-permute from `rewrite_ratio`.

        The paper finds the gain largest if the ratio is large. This is a heuristic, not a measurement.

        Returns:
            A `Gain`, which is text: nothing, little, something or most to win.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(1, 64, 64, 16).predicts().name, Pattern(16, 64, 64, 1).predicts().name
            ('MOST', 'NONE')
        """
        if self.d == 1:
            return Gain.NONE
        if self.rewrite_ratio >= _MOST_FROM:
            return Gain.MOST
        return Gain.SOME if self.rewrite_ratio >= _SOME_FROM else Gain.LITTLE

    def column_order(self) -> tuple[int, ...]:
        """Compute the perfect shuffle Q of K = P K~ Q, where K~ is block diagonal with a*d blocks of b x c.

        The order does not include `load`.

        Returns:
            Indices: (Q x)[n] = x[order[n]].

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(1, 2, 2, 2).column_order()
            (0, 2, 1, 3)
        """
        return _shuffle(self.a, self.c, self.d)

    def row_order(self) -> tuple[int, ...]:
        """Compute the perfect shuffle P of K = P K~ Q, where K~ is block diagonal with a*d blocks of b x c.

        The order does not include `store`.

        Returns:
            Indices: (P y)[n] = y[order[n]].

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(1, 3, 2, 2).row_order()
            (0, 3, 1, 4, 2, 5)
        """
        return _shuffle(self.a, self.d, self.b)


def _set_state(pattern: Pattern, state: Sequence[Any]) -> None:
    """Read a pickle, also of a version without orders of features."""
    for name, value in zip(Pattern.__slots__, (*state, "", ""), strict=False):
        object.__setattr__(pattern, name, value)


# here, because a dataclass with slots replaces such a method of its own in Python 3.11.2
Pattern.__setstate__ = _set_state  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Chain:
    """Patterns whose product is one layer, in the order in which they multiply x.

    A chain supports `len`, indexing and iteration. Any factor may be given a `load` order, but only the first one keeps
    it. That of a later factor becomes part of the previous factor's `store` order.

    Args:
        factors: Patterns in any form that `Pattern.read` accepts. The input features of each must equal the output
            features of the previous one.
        name: Name for messages, which comparisons ignore.

    Raises:
        PatternError: No factor is given, or two neighbours do not fit.

    Examples:
        >>> from ksgen import Chain
        >>> chain = Chain(("2,48,192,1", "1,192,48,2"))
        >>> print(chain)
        2,48,192,1 then 1,192,48,2
        >>> len(chain), chain.in_features, chain.out_features, chain[1].d
        (2, 384, 384, 2)
        >>> Chain(("2,48,192,1", "1,192,64,2"))
        Traceback (most recent call last):
        ...
        ksgen.errors.PatternError: 2,48,192,1 gives 96 features, but the next pattern (1,192,64,2) takes 128; ...
    """

    factors: tuple[Pattern, ...]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.factors, str) or not (factors := listed(self.factors)):
            fields = getattr(type(self.factors), "__dataclass_fields__", ())
            hint = ", such as a structure's chain" if "chain" in fields else ""
            raise PatternError(f"factors={excerpt(self.factors)}; accepted: one Pattern or more{hint}")
        patterns = tuple(Pattern.read(each, f"factors[{place}]") for place, each in enumerate(factors))
        for first, then in pairwise(patterns):
            if first.out_features != then.in_features:
                raise PatternError(
                    f"{first} gives {first.out_features} features, but the next pattern ({then}) takes "
                    f"{then.in_features}; accepted: patterns that fit, in the order in which they multiply X"
                )
        object.__setattr__(self, "factors", tuple(_stored_for_next(patterns)))

    @classmethod
    def read(cls, given: object) -> "Chain":
        """Read a chain that a user gave in any form.

        Args:
            given: A `Chain`, a list of patterns, or the only pattern. Patterns have any form that `Pattern.read`
                accepts.

        Returns:
            The chain.

        Raises:
            PatternError: The value is not a chain, or its factors do not fit.

        Examples:
            >>> from ksgen import Chain
            >>> print(Chain.read(["2,48,192,1", (1, 192, 48, 2)]))
            2,48,192,1 then 1,192,48,2
            >>> len(Chain.read("1,192,48,2"))
            1
        """
        if isinstance(given, cls):
            return given
        is_one = isinstance(given, Pattern | str) or _is_shape(given)
        return cls((given,) if is_one else given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self.factors)

    def __len__(self) -> int:
        return len(self.factors)

    def __getitem__(self, index: int) -> Pattern:
        return self.factors[index]

    def __str__(self) -> str:
        return " then ".join(map(str, self.factors))

    @cached_property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Shape (a, b, c, d) of each factor's weights."""
        return tuple([each.shape for each in self.factors])

    @property
    def in_features(self) -> int:
        """Features that the first factor takes."""
        return self.factors[0].in_features

    @property
    def out_features(self) -> int:
        """Features that the last factor gives."""
        return self.factors[-1].out_features

    @property
    def weight_count(self) -> int:
        """Number of values on the supports of all factors."""
        return sum(pattern.weight_count for pattern in self.factors)

    @property
    def transposing_factor(self) -> int:
        """Index of the factor that changes the layout if y has another layout than x.

        Of the factors after the first, it is the one with the fewest inputs; a chain of one factor has index 0. Arrays
        before it have the layout of x, later ones that of y.
        """
        found = 0
        for number in range(1, len(self.factors)):  # torch.compile does not support `min` with a key
            if not found or self.factors[number].in_features < self.factors[found].in_features:
                found = number
        return found

    @property
    def turn(self) -> int:
        """Deprecated name of `transposing_factor`."""
        warn_deprecated("Chain.turn", "Chain.transposing_factor")
        return self.transposing_factor

    @property
    def is_exchanged(self) -> bool:
        """Whether a factor stores its outputs, or reads its inputs, in another order than the natural one."""
        return self.exchanged is not None

    @property
    def exchanged(self) -> Order | None:
        """The first order of outputs or inputs that is not the natural one; None if there is none."""
        return next((pattern.exchanged for pattern in self.factors if pattern.is_exchanged), None)

    @property
    def transpose(self) -> "Chain":
        """Chain of the transposed product: transposed factors in reverse order.

        An exchange between two factors becomes an exchange of the outputs of the transposed second factor. An exchange
        of the last factor's outputs becomes an exchange of the first factor's inputs.

        Raises:
            PatternError: The digits of an exchange and of the next factor do not divide each other.
        """
        return Chain(tuple(pattern.transpose for pattern in reversed(self.factors)), self.name)

    @property
    def is_chainable(self) -> bool:
        """Whether every neighbouring pair is chainable and nothing is exchanged, so that the factorisation by SVDs
        comes with its guarantees.
        """
        return not self.is_exchanged and all(are_chainable(left, right) for right, left in pairwise(self.factors))


Patterns = Chain | Pattern | str | Sequence[Pattern | str | Sequence[int]]  # input of `Chain.read`


def are_chainable(left: Pattern, right: Pattern) -> bool:
    """Whether K = left @ right is chainable in the sense of the butterfly-factorisation papers.

    left.a divides right.a, right.d divides left.d, and left.a*left.c/right.a = right.b*right.d/left.d is whole. Equal
    sizes are not enough: (1,128,128,3) @ (6,64,256,1) fits, but 128 is not a multiple of 6.
    """
    inner, rest = divmod(left.a * left.c, right.a)
    return right.a % left.a == 0 and left.d % right.d == 0 and rest == 0 and inner * left.d == right.b * right.d


def dense(in_features: int, out_features: int) -> Chain:
    """Create a chain of one dense factor."""
    in_features, out_features = counts(in_features=in_features, out_features=out_features)
    return Chain((Pattern(1, out_features, in_features, 1),), "dense")


def low_rank(in_features: int, out_features: int, rank: int) -> Chain:
    """Create a chain of two dense factors: down to `rank` features, then up.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        rank: Features of the intermediate, at most the smaller of `in_features` and `out_features`.

    Returns:
        The `Chain`.

    Raises:
        PatternError: A number is not accepted.

    Examples:
        >>> import ksgen
        >>> print(ksgen.low_rank(8, 6, rank=2))
        1,2,8,1 then 1,6,2,1
    """
    in_features, out_features, rank = counts(in_features=in_features, out_features=out_features, rank=rank)
    if rank > (most := min(in_features, out_features)):
        raise PatternError(f"rank={rank} for {in_features} to {out_features} features; accepted: 1 to {most}")
    return Chain((Pattern(1, rank, in_features, 1), Pattern(1, out_features, rank, 1)), "low_rank")


def square_dyadic(features: int) -> Chain:
    """Create the butterfly of the fast Fourier transform: L factors of 2 x 2 blocks for 2^L features.

    Args:
        features: Features of x and y, a power of two from 2 up.

    Returns:
        The `Chain`.

    Raises:
        PatternError: `features` is not a power of two.

    Examples:
        >>> import ksgen
        >>> print(ksgen.square_dyadic(8))
        4,2,2,1 then 2,2,2,2 then 1,2,2,4
    """
    return Chain(_butterfly(features, 1), "square_dyadic")


def kaleidoscope(features: int) -> Chain:
    """Create a transposed square dyadic butterfly followed by a square dyadic one: 2 L factors for 2^L features.

    Args:
        features: Features of x and y, a power of two from 2 up.

    Returns:
        The `Chain`.

    Raises:
        PatternError: `features` is not a power of two.

    Examples:
        >>> import ksgen
        >>> print(ksgen.kaleidoscope(4))
        1,2,2,2 then 2,2,2,1 then 2,2,2,1 then 1,2,2,2
    """
    butterfly = square_dyadic(features)
    return Chain((*butterfly.transpose, *butterfly), "kaleidoscope")


def block_butterfly(features: int, block: int) -> Chain:
    """Create a square dyadic butterfly with larger dense blocks: L factors for 2^L * block features.

    Each factor has b = c = 2 * block.

    Args:
        features: Features of x and y: `block` times a power of two from 2 up.
        block: Half of each factor's b and c; 1 gives the square dyadic butterfly.

    Returns:
        The `Chain`.

    Raises:
        PatternError: `features` is not accepted.

    Examples:
        >>> import ksgen
        >>> print(ksgen.block_butterfly(64, block=16))
        2,32,32,1 then 1,32,32,2
    """
    return Chain(_butterfly(features, block), "block_butterfly")


def monarch(in_features: int, out_features: int, split_in: int, split_out: int) -> Chain:
    """Create a Monarch chain: diagonal blocks, then blocks that mix across them.

    The first factor has `split_in` diagonal blocks. Each maps `in_features / split_in` features of x to `out_features /
    split_out` intermediate ones. The Monarch matrices of n x n are `monarch(n, n, s, s)` with s the square root of n.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        split_in: Divisor of `in_features`.
        split_out: Divisor of `out_features`.

    Returns:
        The `Chain`.

    Raises:
        PatternError: A split is not a divisor.

    Examples:
        >>> import ksgen
        >>> print(ksgen.monarch(64, 64, split_in=8, split_out=8))
        8,8,8,1 then 1,8,8,8
        >>> ksgen.monarch(64, 64, split_in=7, split_out=8)
        Traceback (most recent call last):
        ...
        ksgen.errors.PatternError: split_in=7; accepted: a divisor of in_features=64
    """
    in_features, out_features, split_in, split_out = _split_counts(in_features, out_features, split_in, split_out)
    block_in, block_out = in_features // split_in, out_features // split_out
    return Chain((Pattern(split_in, block_out, block_in, 1), Pattern(1, split_out, split_in, block_out)), "monarch")


def blast(in_features: int, out_features: int, split_in: int, split_out: int, rank: int) -> Chain:
    """Create a BLAST chain: blocks of low rank that share their left and right factors.

    The matrix has `split_out` x `split_in` blocks. Block (i, j) is B_i diag(D_ij) C_j, with `rank` entries in D_ij. So
    x is divided into `split_in` parts with `rank` inner features each, and these are mixed for each part of y.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        split_in: Divisor of `in_features`.
        split_out: Divisor of `out_features`.
        rank: Rank of each block.

    Returns:
        The `Chain`.

    Raises:
        PatternError: A split is not a divisor, or a number is not accepted.

    Examples:
        >>> import ksgen
        >>> print(ksgen.blast(64, 32, split_in=4, split_out=2, rank=8))
        4,8,16,1 then 1,2,4,8 then 2,16,8,1
    """
    in_features, out_features, split_in, split_out, rank = _split_counts(
        in_features, out_features, split_in, split_out, rank=rank
    )
    down = Pattern(split_in, rank, in_features // split_in, 1)
    up = Pattern(split_out, out_features // split_out, rank, 1)
    return Chain((down, Pattern(1, split_out, split_in, rank), up), "blast")


def btt(in_features: int, out_features: int, split_in: int, split_out: int, rank: int) -> Chain:
    """Create the chain of a block tensor train of two cores: a Monarch chain whose blocks have any rank.

    The matrix has `split_out` x `split_in` blocks of that rank. The first factor computes the inner features of all
    blocks. It exchanges digits, so that the inner features of a row of blocks are contiguous for the second factor.

    Args:
        in_features: Features of x.
        out_features: Features of y.
        split_in: Divisor of `in_features`.
        split_out: Divisor of `out_features`.
        rank: Rank of each block.

    Returns:
        The `Chain`.

    Raises:
        PatternError: A split is not a divisor, or a number is not accepted.

    Examples:
        >>> import ksgen
        >>> print(ksgen.btt(64, 32, split_in=4, split_out=2, rank=3))
        4,6,16,1@k1:2.i.k2:3 then 2,16,12,1
    """
    in_features, out_features, split_in, split_out, rank = _split_counts(
        in_features, out_features, split_in, split_out, rank=rank
    )
    first = Pattern(split_in, split_out * rank, in_features // split_in, 1, f"k1:{split_out}.i.k2:{rank}")
    return Chain((first, Pattern(split_out, out_features // split_out, split_in * rank, 1)), "btt")


def deformable_butterfly(in_features: int, blocks: Sequence[Sequence[int]]) -> Chain:
    """Create a deformable butterfly from blocks of b x c.

    A factor's d is the product of the b of the earlier factors. Its a is the number of its inputs divided by c*d.

    Args:
        in_features: Features of x.
        blocks: Pairs (b, c), in the order in which the factors multiply x.

    Returns:
        The `Chain`.

    Raises:
        PatternError: A block does not divide its features.

    Examples:
        >>> import ksgen
        >>> print(ksgen.deformable_butterfly(16, [(2, 4), (3, 2)]))
        4,2,4,1 then 2,3,2,2
    """
    (features,) = counts(in_features=in_features)
    if not isinstance(blocks, Sequence):
        raise PatternError(f"blocks={excerpt(blocks)}; accepted: a list of pairs (b, c)")
    factors: list[Pattern] = []
    d = 1
    for place, block in enumerate(blocks):
        if not isinstance(block, Sequence) or len(block) != 2:
            raise PatternError(f"blocks[{place}]={excerpt(block)}; accepted: a pair (b, c)")
        b, c = counts(**{f"blocks[{place}] b": block[0], f"blocks[{place}] c": block[1]})
        if features % (c * d):
            raise PatternError(
                f"blocks[{place}] c={c} with d={d}; accepted: c*d a divisor of this factor's {features} input features"
            )
        factors.append(Pattern(features // (c * d), b, c, d))
        features, d = factors[-1].out_features, b * d
    return Chain(tuple(factors), "deformable_butterfly")


_NAMED = dense, low_rank, square_dyadic, kaleidoscope, block_butterfly, monarch, blast, btt, deformable_butterfly
NAMED_CHAINS: dict[str, Callable[..., Chain]] = {each.__name__: each for each in _NAMED}


def _butterfly(features: int, block: int) -> tuple[Pattern, ...]:
    """Factors of a block butterfly, with b = c = 2 `block`; the first combines neighbouring blocks."""
    features, block = counts(features=features, block=block)
    count, rest = divmod(features, block)
    if rest or count < 2 or count & (count - 1):
        times = "" if block == 1 else f"block={block} times "
        raise PatternError(f"features={features}; accepted: {times}a power of two from 2 up")
    stages = count.bit_length() - 1
    return tuple(Pattern(2 ** (stages - 1 - stage), 2 * block, 2 * block, 2**stage) for stage in range(stages))


def _stored_for_next(patterns: Sequence[Pattern]) -> Iterator[Pattern]:
    """Patterns of a chain, each of which stores its outputs as the next one reads them. Only the first one reads
    exchanged inputs.
    """
    for number, (pattern, then) in enumerate(zip(patterns, (*patterns[1:], None), strict=True)):
        store = pattern.store
        if then is not None and then.load:
            if ends := pattern.outputs.undivided(then.inputs):
                raise PatternError(
                    f"{pattern} cannot store its outputs in the order in which the next pattern ({then}) reads them: "
                    f"digits begin every {ends[0]} and every {ends[1]} features, and {ends[0]} does not divide "
                    f"{ends[1]}; accepted: sizes that divide, or two chains: the second begins with {then}"
                )
            store = pattern.outputs.before(then.inputs)
        load = "" if number else pattern.load
        yield pattern if (store, load) == (pattern.store, pattern.load) else replace(pattern, store=store, load=load)


def _is_shape(given: object) -> TypeGuard[Sequence[int]]:
    """Whether a value is the four numbers of a pattern, and not a list of patterns."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return False
    return len(given) == 4 and not any(isinstance(each, Pattern | Sequence) for each in given)


def _shuffle(groups: int, rows: int, columns: int) -> tuple[int, ...]:
    """Order that reads the row-major matrix (rows x columns) of each group column by column."""
    starts = range(0, groups * rows * columns, rows * columns)
    return tuple(start + row * columns + column for start in starts for column in range(columns) for row in range(rows))


def _split_counts(in_features: int, out_features: int, split_in: int, split_out: int, **more: int) -> tuple[int, ...]:
    """All numbers, converted by `counts`; `PatternError` if a split is not a divisor."""
    given = {"in_features": in_features, "out_features": out_features, "split_in": split_in, "split_out": split_out}
    found = in_features, out_features, split_in, split_out, *_ = counts(**given, **more)
    if in_features % split_in:
        raise PatternError(f"split_in={split_in}; accepted: a divisor of in_features={in_features}")
    if out_features % split_out:
        raise PatternError(f"split_out={split_out}; accepted: a divisor of out_features={out_features}")
    return found


def counts(**given: object) -> tuple[int, ...]:
    """Convert whole numbers of at least 1 to int; `PatternError` names the first value that is not accepted."""
    found = []
    for name, value in given.items():
        count = whole_number(value)
        if count is None or not 1 <= count <= MOST_FEATURES:
            raise PatternError(f"{name}={excerpt(value)}; accepted: a whole number from 1 to {MOST_FEATURES}")
        found.append(count)
    return tuple(found)
