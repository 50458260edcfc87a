"""Compiles the kernels of a model before its first call, in parallel.

The model's own calls determine which kernels these are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ksgen.build.background import PendingError, deferred, finish_jobs
from ksgen.torch.operators.meanwhile import building, note_unsettled, times_unsettled

# consecutive calls that must find nothing missing; two, because a frozen layer prepares at its second call
LAST_CALLS = 2


def build(model: nn.Module, *x: Any, **options: Any) -> None:
    """Compile all kernels of a call of a model now, in parallel, and time them for `backend="auto"`.

    Later calls with such shapes use the fastest methods at once. The model is called a few times: random numbers and
    the running statistics of batch norms advance, as in any call. In training mode, gradients are computed too, but not
    stored. A terminal shows a progress bar.

    Args:
        model: Module with `KSLinear` layers, or one such layer.
        *x: Arguments of the call, such as a batch of inputs. Their values do not matter, their shapes do.
        **options: Arguments by name.

    Raises:
        ToolchainError: A kernel that PyTorch's products cannot replace cannot be compiled.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from ksgen.torch import KSLinear, build
        >>> model = nn.Sequential(KSLinear("1,3,2,2"), nn.ReLU()).eval()
        >>> build(model, torch.zeros(5, 4))
    """
    build_calls(model, [(x, options)])


def build_calls(model: nn.Module, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
    """Build like `build`, for several calls together, each with positional arguments and arguments by name."""
    rounds_left = LAST_CALLS
    token = building.set(True)
    try:
        with deferred(lambda: True):
            while rounds_left:
                before = times_unsettled()
                for x, options in calls:
                    try:
                        _call(model, x, options)
                    except PendingError:  # PyTorch's products cannot replace the missing kernel
                        note_unsettled()
                rounds_left = LAST_CALLS if finish_jobs() or before != times_unsettled() else rounds_left - 1
    finally:
        building.reset(token)


def _call(model: nn.Module, x: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Call the model. In training mode, gradients of its parameters are computed too, and dropped."""
    if not model.training:
        with torch.no_grad():
            model(*x, **options)
        return
    with torch.enable_grad():
        y = [each for each in tree_leaves(model(*x, **options)) if isinstance(each, Tensor) and each.requires_grad]
        trained = [each for each in model.parameters() if each.requires_grad]
        if y and trained:
            torch.autograd.grad(y, trained, [torch.ones_like(each) for each in y], allow_unused=True)
