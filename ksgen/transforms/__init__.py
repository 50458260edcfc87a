"""Fast transforms as chains of Kronecker-sparse factors, with their exact weights.

    from ksgen import transforms

    y = transforms.dft(360)(x)  # as numpy.fft.fft(x), in ksgen's kernels
    transforms.dft(360).chain  # 1,20,20,18 then 20,18,18,1

Transforms are called on arrays of NumPy, CuPy or PyTorch. docs/transforms.md defines each one, and the order of its
chain's outputs.
"""

import numpy as np

from ksgen.pattern import Chain, Pattern
from ksgen.transforms import factors, wavelets
from ksgen.transforms.factors import butterfly, checked_inverse, checked_radix, checked_size, radices
from ksgen.transforms.real import of_cosines, of_hartley, of_real, to_real
from ksgen.transforms.transform import Transform, made_again

__all__ = ["RADIX", "Transform", "daubechies", "dct", "dft", "haar", "hadamard", "hartley", "irdft", "rdft"]

RADIX = 32  # largest radix, unless the caller names another


@made_again
def dft(n: int, *, inverse: bool = False, radix: int = RADIX) -> Transform:
    """Create the discrete Fourier transform: `numpy.fft.fft`, or `numpy.fft.ifft`.

    The chain's outputs are in digit-reversed order. In a call, the factors store them in the order of frequencies.

    Args:
        n: Number of points: a product of the primes 2, 3, 5 and 7, up to 2^24.
        inverse: True creates the inverse transform, scaled by 1/n.
        radix: Largest radix of the chain: the block size of a factor. Accepted: 7 to 1024.

    Returns:
        `Transform` of n complex numbers to n complex numbers.

    Raises:
        PatternError: A number is not accepted; the message lists those that are.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> transforms.dft(4)(np.array([1, 0, 0, 0], np.complex64))
        array([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j], dtype=complex64)
    """
    found = radices(checked_size(n), checked_radix(radix))
    name = "idft" if checked_inverse(inverse) else "dft"
    return Transform(f"{name}({n})", butterfly(found, name), factors.fourier(found, inverse), digits=found)


@made_again
def rdft(n: int, *, radix: int = RADIX) -> Transform:
    """Create the Fourier transform of real numbers: `numpy.fft.rfft`.

    For an even n, the chain has half the size, and pairs of neighbours are its complex inputs.

    Args:
        n: Number of points: a product of the primes 2, 3, 5 and 7, up to 2^24.
        radix: Largest radix of the chain: the block size of a factor. Accepted: 7 to 1024.

    Returns:
        `Transform` of n real numbers to n // 2 + 1 complex frequencies.

    Raises:
        PatternError: A number is not accepted; the message lists those that are.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> transforms.rdft(4)(np.array([1, 0, 0, 0], np.float32))
        array([1.+0.j, 1.+0.j, 1.+0.j], dtype=complex64)
    """
    return of_real(f"rdft({n})", checked_size(n), lambda size: dft(size, radix=radix))


@made_again
def irdft(n: int, *, radix: int = RADIX) -> Transform:
    """Create the inverse Fourier transform to real numbers: `numpy.fft.irfft(y, n)`.

    For an even n, the chain has half the size.

    Args:
        n: Number of points: a product of the primes 2, 3, 5 and 7, up to 2^24.
        radix: Largest radix of the chain: the block size of a factor. Accepted: 7 to 1024.

    Returns:
        `Transform` of n // 2 + 1 complex frequencies to n real numbers.

    Raises:
        PatternError: A number is not accepted; the message lists those that are.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> transforms.irdft(4)(np.array([1, 1, 1], np.complex64))
        array([1., 0., 0., 0.], dtype=float32)
    """
    return to_real(f"irdft({n})", checked_size(n), lambda size: dft(size, inverse=True, radix=radix))


@made_again
def dct(n: int, *, radix: int = RADIX) -> Transform:
    """Create the cosine transform `scipy.fft.dct(x, type=2)`.

    It consists of a real Fourier transform of the reordered x, and of one multiplication per frequency.

    Args:
        n: Number of points: a product of the primes 2, 3, 5 and 7, up to 2^24.
        radix: Largest radix of the chain: the block size of a factor. Accepted: 7 to 1024.

    Returns:
        `Transform` of n real numbers to n real numbers.

    Raises:
        PatternError: A number is not accepted; the message lists those that are.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> transforms.dct(4)(np.ones(4, np.float32)).round(3) + 0
        array([8., 0., 0., 0.], dtype=float32)
    """
    return of_cosines(f"dct({n})", n, rdft(n, radix=radix))


@made_again
def hartley(n: int, *, radix: int = RADIX) -> Transform:
    """Create the Hartley transform: sums of x[s] (cos + sin)(2 pi s k / n).

    Its outputs are the real parts of a Fourier transform less the imaginary parts.

    Args:
        n: Number of points: a product of the primes 2, 3, 5 and 7, up to 2^24.
        radix: Largest radix of the chain: the block size of a factor. Accepted: 7 to 1024.

    Returns:
        `Transform` of n real numbers to n real numbers.

    Raises:
        PatternError: A number is not accepted; the message lists those that are.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> transforms.hartley(4)(np.array([0, 1, 0, 0], np.float32))
        array([ 1.,  1., -1., -1.], dtype=float32)
    """
    return of_hartley(f"hartley({n})", n, rdft(n, radix=radix))


@made_again
def hadamard(n: int, *, radix: int = RADIX) -> Transform:
    """Create the Walsh-Hadamard transform `scipy.linalg.hadamard(n) @ x`, in Sylvester's order.

    Args:
        n: Number of points: a power of two, up to 2^24.
        radix: Largest radix of the chain: the block size of a factor. Accepted: 7 to 1024.

    Returns:
        `Transform` of n real or complex numbers. The outputs of its chain are in Sylvester's order, too.

    Raises:
        PatternError: `n` is not a power of two.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> transforms.hadamard(4)(np.array([1, 2, 3, 4], np.float32))
        array([10., -2., -4.,  0.], dtype=float32)
    """
    found = radices(checked_size(n, primes=(2,)), checked_radix(radix))
    return Transform(f"hadamard({n})", butterfly(found, "hadamard"), factors.hadamard(found))


@made_again
def haar(n: int) -> Transform:
    """Create the orthonormal Haar wavelet transform.

    The first output is the coefficient of the mean. Each level follows, the coarsest first.

    Args:
        n: Number of points: a power of two, up to 2^24.

    Returns:
        `Transform` of n real or complex numbers.

    Raises:
        PatternError: `n` is not a power of two.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> transforms.haar(2)(np.array([1, 1], np.float32)).round(3)
        array([1.414, 0.   ], dtype=float32)
    """
    levels = checked_size(n, primes=(2,)).bit_length() - 1
    patterns = [Pattern(1 << levels - level - 1, 2, 2, 1 << level) for level in range(levels)] or [Pattern(1, 1, 1, 1)]
    steps = [np.arange(1 << level, n, 2 << level) for level in reversed(range(levels))]
    order = np.concatenate([np.zeros(1, np.int64), *steps]).astype(np.int64)
    return Transform(
        f"haar({n})", Chain(tuple(patterns), "haar"), factors.haar(levels) or (np.ones((1, 1, 1, 1)),), places=order
    )


@made_again
def daubechies(
    n: int, *, taps: int = 4, levels: int | None = None, inverse: bool = False, radix: int = RADIX
) -> Transform:
    """Create a Daubechies wavelet transform: `pywt.wavedec(x, f"db{taps // 2}", "periodization", levels)`.

    Outputs are PyWavelets' arrays, concatenated: the means, then the levels, the coarsest first. The chain is one
    factor for the finest levels. Coarser levels are a further transform of the means.

    Args:
        n: Number of points, which each level halves: an even number up to 2^24.
        taps: Number of filter coefficients: an even number from 2 to 20.
        levels: Number of levels. None: as many as `n` allows.
        inverse: True creates the inverse, `pywt.waverec`.
        radix: Largest window of the factor that combines several levels.

    Returns:
        `Transform` of n real or complex numbers.

    Raises:
        PatternError: A number is not accepted; the message lists those that are.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> y = transforms.daubechies(8, taps=4, levels=1)(np.ones(8, np.float32))
        >>> y.round(3) + 0
        array([1.414, 1.414, 1.414, 1.414, 0.   , 0.   , 0.   , 0.   ], dtype=float32)
    """
    taps, inverse = wavelets.checked_taps(taps), checked_inverse(inverse)
    size, levels = wavelets.checked_levels(n, taps, levels)
    finest = wavelets.levels_of_factor(taps, levels, checked_radix(radix))
    rest = None
    if finest < levels:
        rest = daubechies(size >> finest, taps=taps, levels=levels - finest, inverse=inverse, radix=radix)
    make, name = (wavelets.to_windows, "idaubechies") if inverse else (wavelets.of_windows, "daubechies")
    return make(f"{name}({size}, taps={taps}, levels={levels})", size, taps, finest, rest)
