"""Transforms of real numbers: steps around a complex Fourier transform, of half the size where that is possible."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ksgen.transforms.library import Library
from ksgen.transforms.transform import Transform

MakeComplex = Callable[[int], Transform]  # creates the complex transform of a size


def of_real(name: str, n: int, dft: MakeComplex) -> Transform:
    """Fourier transform of real numbers. For an even n, symmetry separates the spectra of even and odd places."""
    if n % 2:
        return replace(dft(n), name=name, is_real=True, after=lambda library, y: y[:, : n // 2 + 1])
    half = n // 2
    phases = np.exp(-2j * np.pi * np.arange(half + 1) / n)

    def after(library: Library, y: Any) -> Any:
        whole = library.joined(y, y[:, :1])
        mirrored = library.reversed(whole).conj()
        even, odd = (whole + mirrored) / 2, (whole - mirrored) / 2j
        return even + library.on_device_of(y, phases) * odd

    return replace(dft(half), name=name, size=n, is_real=True, before=_as_pairs, after=after)


def to_real(name: str, n: int, inverse: MakeComplex) -> Transform:
    """Inverse of `of_real`. Imaginary parts of the first frequency, and of the last one for an even n, are ignored."""
    if n % 2:

        def mirror(library: Library, x: Any) -> Any:
            x = _with_real_ends(library, x, last=False)
            return library.joined(x, library.reversed(x[:, 1:]).conj())

        return replace(inverse(n), name=name, size=n // 2 + 1, before=mirror, after=lambda library, y: y.real)
    half = n // 2
    phases = np.exp(2j * np.pi * np.arange(half) / n)

    def before(library: Library, x: Any) -> Any:
        x = _with_real_ends(library, x, last=True)
        first, mirrored = x[:, :half], library.reversed(x[:, 1:]).conj()
        even, odd = (first + mirrored) / 2, (first - mirrored) / 2
        return even + 1j * library.on_device_of(x, phases) * odd

    return replace(inverse(half), name=name, size=half + 1, before=before, after=lambda library, y: library.parts(y))


def of_cosines(name: str, n: int, rdft: Transform) -> Transform:
    """Cosine transform: a Fourier transform of the even places and then the reversed odd ones, times phases."""
    order = np.concatenate([np.arange(0, n, 2), np.arange(1, n, 2)[::-1]]).astype(np.int64)
    phases = 2 * np.exp(-0.5j * np.pi * np.arange(n // 2 + 1) / n)

    def before(library: Library, x: Any) -> Any:
        x = library.taken(x, library.on_device_of(x, order))
        return rdft.before(library, x) if rdft.before else x

    def after(library: Library, y: Any) -> Any:
        y = rdft.after(library, y) if rdft.after else y
        y = y * library.on_device_of(y, phases)
        return library.joined(y.real, -library.reversed(y.imag[:, 1 : (n + 1) // 2]))

    return replace(rdft, name=name, before=before, after=after)


def of_hartley(name: str, n: int, rdft: Transform) -> Transform:
    """Hartley transform by a real Fourier transform; the upper frequencies are conjugates of the lower ones."""

    def after(library: Library, y: Any) -> Any:
        y = rdft.after(library, y) if rdft.after else y
        others = y[:, 1 : (n + 1) // 2]
        return library.joined(y.real - y.imag, library.reversed(others.real + others.imag))

    return replace(rdft, name=name, after=after)


def _as_pairs(library: Library, x: Any) -> Any:
    return library.pairs(x if library.dtype_of(x) in ("float32", "float64") else library.cast(x, "float32"))


def _with_real_ends(library: Library, x: Any, last: bool) -> Any:
    x = library.as_numbers(x, is_complex=True)
    ends = [x[:, :1].real + 0j * x[:, :1].real, x[:, 1:]]
    if last and x.shape[1] > 1:
        ends = [ends[0], x[:, 1:-1], x[:, -1:].real + 0j * x[:, -1:].real]
    return library.joined(*(library.cast(each, library.dtype_of(x)) for each in ends))
