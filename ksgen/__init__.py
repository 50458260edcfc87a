"""ksgen multiplies by Kronecker-sparse matrices: it generates, builds, caches, tunes and launches the kernels."""

__version__ = "0.1.0"
