"""Defines ksgen's exceptions: one root class and its subclasses. The command line shows them without a traceback.

Warnings point to the user's line.
"""

import os
import sys
import warnings


class KsgenWarning(UserWarning):
    """Category of ksgen's warnings. The command line shows them without the place in the code."""


class KsgenDeprecationWarning(KsgenWarning, DeprecationWarning):
    """Category of warnings about names that will be removed."""


def warn(message: str, place: tuple[str, int] | None = None) -> None:
    """Warn, and point to the user's line that led to the warning.

    `place` is a line that `cause` returned earlier. None: the line whose call led here.
    """
    if place is None:
        warnings.warn(message, KsgenWarning, stacklevel=_level() + 1)
    else:
        warnings.warn_explicit(message, KsgenWarning, *place)


def warn_deprecated(earlier: str, present: str) -> None:
    """Warn that a name will be removed, name its replacement, and point to the user's line."""
    message = f"{earlier} is deprecated and will be removed; use {present}"
    warnings.warn(message, KsgenDeprecationWarning, stacklevel=_level() + 1)


def cause() -> tuple[str, int]:
    """File and line, outside ksgen and PyTorch, whose call led here."""
    frame = sys._getframe(_level())
    return frame.f_code.co_filename, frame.f_lineno


def _level() -> int:
    """Stack level of the nearest frame outside ksgen and PyTorch; 1 is the frame that called this function's caller."""
    packages = [sys.modules.get(name) for name in (__package__, "torch")]  # PyTorch calls ksgen's modules and hooks
    passed_over = tuple(f"{os.path.dirname(each.__file__)}{os.sep}" for each in packages if each and each.__file__)
    frame, level = sys._getframe(2), 1
    while frame.f_back and frame.f_code.co_filename.startswith(passed_over):
        frame, level = frame.f_back, level + 1
    return level


class KsgenError(Exception):
    """Root of every error that ksgen raises on purpose.

    A message names the thing, its value, what is accepted, and the remedy. Subclasses in `ksgen.errors`: `PatternError`
    and `SpecError` (also a `ValueError`), `LaunchError` (also a `RuntimeError`), `ConstantsError`, `RenderError`,
    `ToolchainError` and `DeviceError`.

    Examples:
        >>> import ksgen
        >>> try:
        ...     ksgen.Pattern(6, 0, 32, 2)
        ... except ksgen.KsgenError as error:
        ...     print(error)
        b=0; accepted: a whole number from 1 to 2147483647
    """


class PatternError(KsgenError, ValueError):
    """An invalid pattern, chain or named family. Also a `ValueError`, which Python raises for wrong values."""


class SpecError(KsgenError, ValueError):
    """A YAML spec, or a kernel specification, that asks for something unknown or impossible. Also a `ValueError`."""


class ConstantsError(KsgenError):
    """Compile-time constants that break a rule of their kernel family."""


class RenderError(KsgenError):
    """A template that uses an undefined variable or cannot be read: a bug of ksgen."""


class ToolchainError(KsgenError):
    """No compiler, a compiler that refused the source, or one whose binaries the driver does not load."""


class DeviceError(KsgenError):
    """No device, a device that lacks a feature that is asked for, or a runtime that failed."""


class LaunchError(KsgenError, RuntimeError):
    """Arguments of a call that do not fit the kernel. Also a `RuntimeError`, which PyTorch raises for them."""
