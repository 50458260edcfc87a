"""Fast transforms as chains of Kronecker-sparse factors, with their exact weights.

    from ksgen import transforms

    y = transforms.dft(360)(x)  # as numpy.fft.fft(x), in ksgen's kernels
    transforms.dft(360).chain  # 1,20,20,18 then 20,18,18,1

Called on arrays of NumPy, CuPy or PyTorch. docs/transforms.md says what each is, and in which order its chain leaves
what it computes.
"""

import numpy as np

from ksgen.pattern import Chain, Pattern
from ksgen.transforms import factors, wavelets
from ksgen.transforms.radices import butterfly, checked_inverse, checked_radix, checked_size, radices
from ksgen.transforms.real import of_cosines, of_hartley, of_real, to_real
from ksgen.transforms.transform import Transform, made_again
from ksgen.transforms.windowed import of_windows, to_windows

__all__ = ["RADIX", "Transform", "daubechies", "dct", "dft", "haar", "hadamard", "hartley", "irdft", "rdft"]

RADIX = 32  # largest product of several primes, unless the caller names another


@made_again
def dft(n: int, *, inverse: bool = False, radix: int = RADIX) -> Transform:
    """`numpy.fft.fft`, or `ifft`. One gather puts the chain's outputs, whose digits are reversed, in order."""
    found = radices(checked_size(n), checked_radix(radix))
    name = "idft" if checked_inverse(inverse) else "dft"
    return Transform(f"{name}({n})", butterfly(found, name), factors.fourier(found, inverse), digits=found)


@made_again
def rdft(n: int, *, radix: int = RADIX) -> Transform:
    """`numpy.fft.rfft`: n // 2 + 1 frequencies of real numbers. An even n takes a chain of half the size on pairs of
    neighbours."""
    return of_real(f"rdft({n})", checked_size(n), lambda size: dft(size, radix=radix))


@made_again
def irdft(n: int, *, radix: int = RADIX) -> Transform:
    """`numpy.fft.irfft(y, n)`: real numbers from n // 2 + 1 frequencies. An even n takes a chain of half the size."""
    return to_real(f"irdft({n})", checked_size(n), lambda size: dft(size, inverse=True, radix=radix))


@made_again
def dct(n: int, *, radix: int = RADIX) -> Transform:
    """`scipy.fft.dct(x, type=2)`: a real Fourier transform of x in another order, and one multiplication of each
    frequency."""
    return of_cosines(f"dct({n})", n, rdft(n, radix=radix))


@made_again
def hartley(n: int, *, radix: int = RADIX) -> Transform:
    """Sums of x[s] (cos + sin)(2 pi s k / n): the real parts of a Fourier transform less the imaginary ones."""
    return of_hartley(f"hartley({n})", n, rdft(n, radix=radix))


@made_again
def hadamard(n: int, *, radix: int = RADIX) -> Transform:
    """`scipy.linalg.hadamard(n) @ x`, in Sylvester's order, which the chain keeps: of real or complex numbers."""
    found = radices(checked_size(n, primes=(2,)), checked_radix(radix))
    return Transform(f"hadamard({n})", butterfly(found, "hadamard"), factors.hadamard(found))


@made_again
def haar(n: int) -> Transform:
    """Orthonormal Haar wavelets of real or complex numbers: the mean's coefficient, then each level from the coarsest
    on."""
    levels = checked_size(n, primes=(2,)).bit_length() - 1
    patterns = [Pattern(1 << levels - level - 1, 2, 2, 1 << level) for level in range(levels)] or [Pattern(1, 1, 1, 1)]
    steps = [np.arange(1 << level, n, 2 << level) for level in reversed(range(levels))]
    order = np.concatenate([np.zeros(1, np.int64), *steps]).astype(np.int64)
    return Transform(f"haar({n})", Chain(tuple(patterns), "haar"), factors.haar(levels) or (np.ones((1, 1, 1, 1)),), places=order)


@made_again
def daubechies(n: int, *, taps: int = 4, levels: int | None = None, inverse: bool = False, radix: int = RADIX) -> Transform:
    """`pywt.wavedec(x, f"db{taps // 2}", "periodization", levels)`, joined: means, then levels from the coarsest on.

    With `inverse=True` it is `pywt.waverec`. The chain is the factor of the finest levels, with windows of up to
    `radix` entries. Coarser levels are further transforms.
    """
    taps, inverse = wavelets.checked_taps(taps), checked_inverse(inverse)
    size, levels = wavelets.checked_levels(n, taps, levels)
    own = wavelets.within(taps, levels, checked_radix(radix))
    rest = None
    if own < levels:
        rest = daubechies(size >> own, taps=taps, levels=levels - own, inverse=inverse, radix=radix)
    make, name = (to_windows, "idaubechies") if inverse else (of_windows, "daubechies")
    return make(f"{name}({size}, taps={taps}, levels={levels})", size, taps, own, rest)
