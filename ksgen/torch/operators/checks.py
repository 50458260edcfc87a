"""Checks that tensors fit a product and each other, before any computation.

Errors name the value and what is accepted.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ksgen.errors import LaunchError, SpecError
from ksgen.launch.checks import refused_precision
from ksgen.spec.kernel import FUSES, activations_of, check_word
from ksgen.spec.precision import stored_types
from ksgen.values import excerpt, misfit, misfit_of_x, unlike

DTYPES = stored_types()
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def has_modes() -> bool:
    """Whether a dispatch mode has to see the operators, such as that of a trace before or after dispatch."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH))


def is_eager() -> bool:
    """Whether operators run at once, and no compiler, trace, dispatch mode or torch.func transform has to see them."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state():
        return False
    return not (has_modes() or torch._C._are_functorch_transforms_active())


def dtype_name(dtype: Any) -> str:
    """Name of a dtype: `torch.float32` gives `float32`."""
    return str(dtype).removeprefix("torch.")


def check_words(**given: tuple[str, Collection[str]]) -> None:
    """Raise `SpecError` for the first word that is not accepted."""
    for name, (word, accepted) in given.items():
        check_word(name, word, accepted)


def check_flags(**given: object) -> None:
    for name, flag in given.items():
        if not isinstance(flag, bool):
            raise SpecError(f"{name}={excerpt(flag)}; accepted: True or False")


def check_tensors(caller: str, **given: object) -> None:
    """Raise `LaunchError` for the first argument that is not a dense tensor. A bias or a residual may be None."""
    for name, tensor in given.items():
        if tensor is None and name in ("bias", "residual"):
            continue
        if not isinstance(tensor, Tensor):
            raise LaunchError(f"{caller}: {name} is {type(tensor).__name__}; accepted: a torch.Tensor")
        if tensor.is_nested:
            remedy = f"torch.nested.nested_tensor({name}.unbind(), layout=torch.jagged) as x and residual of a layer"
            raise LaunchError(
                f"{caller}: {name} is a nested {tensor.layout} tensor; accepted: a dense one, or {remedy}"
            )
        if tensor.layout is not torch.strided:
            raise LaunchError(
                f"{caller}: {name} is a {tensor.layout} tensor; accepted: a dense one, such as {name}.to_dense()"
            )


def check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"dtype={excerpt(dtype)}; accepted: {', '.join(f'torch.{name}' for name in DTYPES)}")


def check_device(device: Any) -> None:
    """Raise `LaunchError` if PyTorch cannot make tensors on this device."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # PyTorch raises many types here, AssertionError among them
        raise LaunchError(
            f"device={excerpt(device)}: no tensors there; accepted: a torch.device of this machine, such as cpu"
        ) from error


def check(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, layouts: Sequence[str],
    precision: str | None,
) -> None:  # fmt: skip
    """Raise `LaunchError` for the first tensor that does not fit the weights.

    `weights` has one tensor per factor, in the order in which they multiply x. `layouts` has the layout of x, and then
    that of each factor's x and y.
    """
    shape = tuple(x.shape)
    for each, before, now in zip(weights, layouts, layouts[1:], strict=False):
        if each.dim() != 4:
            raise LaunchError(f"got weights of shape {tuple(each.shape)}; (a, b, c, d) is needed")
        a, b, c, d = each.shape
        shape = shape if now == before else shape[::-1]
        if wrong := misfit_of_x(shape, a * c * d, now):
            raise LaunchError(f"multiply by {a},{b},{c},{d}: {wrong}")
        shape = (shape[0], a * b * d) if now == "bsf" else (a * b * d, shape[1])
    for name, given, needed in (("bias", bias, (a * b * d,)), ("residual", residual, shape)):
        if given is not None and (wrong := misfit(name, given.shape, needed)):
            raise LaunchError(f"multiply by {a},{b},{c},{d}: {wrong}")
    for name, given in (*[("weights", each) for each in weights], ("bias", bias), ("residual", residual)):
        if given is not None and given.dtype != x.dtype:
            raise LaunchError(unlike(name, dtype_name(given.dtype), dtype_name(x.dtype)))
        if given is not None and given.device != x.device:
            raise LaunchError(f"x lies on {x.device} and {name} on {given.device}; give both in one place")
    check_precision(precision, dtype_name(x.dtype))


def check_precision(precision: str | None, dtype: str) -> None:
    """Raise `LaunchError` if tensors of this dtype cannot be multiplied in this precision."""
    if dtype not in DTYPES:
        raise LaunchError(f"tensors of {dtype}; accepted: {', '.join(DTYPES)}")
    if wrong := refused_precision(precision, dtype):
        raise LaunchError(wrong)


def check_activation(activation: str, dtype: Any, word: str = "activation") -> None:
    """Raise `SpecError` for an activation of complex numbers: none is defined for them."""
    if activation not in activations_of(name := dtype_name(dtype)):
        raise SpecError(f"{word}={activation} of complex numbers, {name}; accepted: none")


def check_backend(backend: str, precision: str | None, dtype: Any) -> None:
    """Raise `SpecError` if the backend lacks the precision: PyTorch's products support only the tensors' own."""
    if precision not in (None, dtype_name(dtype)) and backend not in ("auto", "ksgen"):
        raise SpecError(
            f"precision={excerpt(precision)} with backend={excerpt(backend)}; only ksgen's kernels have it: "
            "backend='ksgen'"
        )


def check_fuse(fuse: str, backend: str) -> None:
    """Raise `SpecError` if the backend has no fused launch of all factors."""
    check_words(fuse=(fuse, FUSES))
    if fuse == "yes" and backend not in ("auto", "ksgen"):
        raise SpecError(
            f"fuse='yes' with backend={excerpt(backend)}; accepted: backend='ksgen', whose kernels can run all factors "
            "in one launch"
        )
