"""Fusion of activations and sums into a layer's kernel: `torch.compile(model, options=FUSING)`.

Applies only if no gradient is recorded: the derivative of an activation needs its input, which a kernel does not store.
Backend "strided" is excluded: its epilogue consists of separate steps, which inductor fuses. FUSING is an option and
not registered at import: importing inductor takes seconds, and its settings belong to the user.
"""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node
from torch.nn import functional

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
except ImportError as error:
    raise ImportError(f"ksgen.torch.fusing needs PyTorch 2.6 or later, and {torch.__version__} is installed") from error

_MULTIPLY = torch.ops.ksgen.multiply.default
_RESIDUAL, _LAYOUT, _ACTIVATION, _BACKEND = 3, 4, 6, 8  # positions among the operator's arguments
_VIEWS = {"reshape", "view", "contiguous", torch.reshape, torch.ops.aten._unsafe_view}
_SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_IN_PLACE = {"setitem", "delitem", *(f"i{name}" for name in dir(operator) if hasattr(operator, f"i{name}"))}


def _gelu(node: Node) -> str:
    return {"none": "gelu", "tanh": "gelu_tanh"}[str(node.kwargs.get("approximate", "none"))]


_ACTIVATIONS: dict[Any, Callable[[Node], str]] = {
    functional.gelu: _gelu,
    **dict.fromkeys((functional.relu, torch.relu, "relu"), lambda _: "relu"),
    functional.silu: lambda _: "silu",
}


class EpilogueFusion(CustomGraphPass):
    """Inductor pass over the traced graph that fuses epilogues into products."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is _MULTIPLY and _takes_epilogue(node):
                _fuse(graph, node)

    def uuid(self) -> Any:
        return get_hash_for_files((str(Path(__file__)),))


FUSING = {"pre_grad_custom_pass": EpilogueFusion()}


def _takes_epilogue(product: Node) -> bool:
    """Whether an activation or a sum after the product may become part of it."""
    return product.args[_RESIDUAL] is None and product.args[_BACKEND] != "strided" and not _value(product).requires_grad


def _fuse(graph: Graph, product: Node) -> None:
    """Replace a product and the steps that follow it by one product with an epilogue."""
    taken, given, views = [product], list(product.args), list[Node]()
    while given[_RESIDUAL] is None and (step := _only_user(end := taken[-1])) is not None:
        if _has_effects_between(end, step):
            break
        if step.target in _VIEWS:
            views.append(step)
        elif step.target in _ACTIVATIONS and given[_ACTIVATION] == "none":
            given[_ACTIVATION] = _ACTIVATIONS[step.target](step)
        elif (added := _added(step, end)) is not None:
            given[_RESIDUAL] = added
        else:
            break
        taken.append(step)
    end = taken[-1]
    if given == list(product.args):
        return
    with graph.inserting_before(end):
        if given[_RESIDUAL] is not None:
            shape = (-1, _value(product).shape[1]) if given[_LAYOUT] == "bsf" else (_value(product).shape[0], -1)
            given[_RESIDUAL] = graph.call_method("reshape", (given[_RESIDUAL], *shape))
        fused = graph.call_function(_MULTIPLY, tuple(given))
        fused.meta["example_value"] = _value(product)
        for view in views:
            fused = graph.node_copy(view, lambda node, before=view.args[0], now=fused: now if node is before else node)
    end.replace_all_uses_with(fused)
    for node in reversed(taken):  # but no other dead code, because it may write in place
        graph.erase_node(node)


def _added(step: Node, end: Node) -> Node | None:
    """Operand that a step adds to `end`, if it has the same shape and type."""
    if step.target not in _SUMS or len(step.args) != 2 or step.kwargs:
        return None
    if step.target in (operator.iadd, "add_") and step.args[0] is not end:  # a write to the other operand
        return None
    others = [each for each in step.args if each is not end]
    if len(others) != 1 or not isinstance(others[0], Node) or not isinstance(value := _value(others[0]), torch.Tensor):
        return None
    last = _value(end)
    return others[0] if (value.shape, value.dtype, value.device) == (last.shape, last.dtype, last.device) else None


def _has_effects_between(first: Node, last: Node) -> bool:
    """Whether a node between two others may write to a tensor or change a mode.

    If so, the layer's product must not be moved past it.
    """
    node = first.next
    while node is not last:
        if _may_have_effects(node):
            return True
        node = node.next
    return False


def _may_have_effects(node: Node) -> bool:
    """Whether a node may do more than compute: write in place, or change a mode such as `torch.no_grad`."""
    if node.op not in ("call_function", "call_method") or node.is_impure():
        return node.op not in ("placeholder", "get_attr")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    writes = (
        name.endswith("_") or name in _IN_PLACE or "out" in node.kwargs or isinstance(node.target, HigherOrderOperator)
    )
    return writes or any(each is True for each in (*node.args, *node.kwargs.values()))  # `inplace` may be one of them


def _only_user(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and isinstance(_value(users[0]), torch.Tensor) else None


def _value(node: Node) -> Any:
    return node.meta.get("example_value")
