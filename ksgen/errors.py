"""What ksgen raises: one root, and children that say what the user gave wrong. Never a traceback for a user's mistake."""


class KsgenError(Exception):
    """The root of every error that ksgen raises on purpose."""


class PatternError(KsgenError):
    """A pattern, a chain or a named family that cannot be."""


class SpecError(KsgenError):
    """A YAML spec, or a kernel specification, that asks for something unknown."""


class ConstantsError(KsgenError):
    """Compile-time constants that break a rule of their kernel family."""


class RenderError(KsgenError):
    """A template that asks for a word that is not there, or that cannot be read: a mistake of ksgen's own."""


class ToolchainError(KsgenError):
    """No compiler, a compiler that refused the source, or one whose binaries the driver does not take."""


class DeviceError(KsgenError):
    """No device, a device that lacks what is asked of it, or a runtime that failed."""


class LaunchError(KsgenError, RuntimeError):
    """Arguments of a call that do not fit the kernel. A `RuntimeError` too, as PyTorch raises for them."""
