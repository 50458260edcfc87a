"""Inductor's timing of ksgen's operator next to PyTorch's own products: `torch.compile(model, options=AUTOTUNING)`.

A pass over the graph replaces `ksgen::multiply` by `ksgen::timed_multiply`. This is the same operator with `order` in
place of the argument `layout`, because inductor has an argument of that name itself. Inductor then times the operator
and the alternatives, on any device, and inlines an alternative that is faster. Only products with `backend="auto"` in
the tensors' own precision are replaced. AUTOTUNING is an option and not registered at import: importing inductor takes
seconds.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
except ImportError as error:
    raise ImportError(
        f"ksgen.torch.autotuning needs inductor's custom_op module, as PyTorch 2.13 has it; {torch.__version__} is "
        "installed"
    ) from error

from ksgen.pattern import Pattern
from ksgen.torch.operators import ops, products
from ksgen.torch.operators.checks import dtype_name

_MULTIPLY = torch.ops.ksgen.multiply.default
_BIAS, _RESIDUAL, _PRECISION, _BACKEND = 2, 3, 5, 8  # positions among the operator's arguments

_timed = torch.library.custom_op(
    "ksgen::timed_multiply",
    lambda *given: _MULTIPLY(*given),
    mutates_args=(),
    schema="(Tensor x, Tensor weights, Tensor? bias, Tensor? residual, str order, str? precision, str activation, "
    "bool transposed, str backend) -> Tensor",
)
_timed.register_fake(
    lambda x, weights, bias, residual, order, precision, activation, transposed, backend: ops.empty_y(
        x, weights, order, transposed
    )
)


def by_blocks(
    x: Tensor, weights: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, order: str,
    precision: str | None, activation: str, transposed: bool, backend: str,
) -> Tensor:  # fmt: skip
    """Multiply by one batched product of permuted copies."""
    return ops._product_of_pytorch(x, weights, bias, residual, order, precision, activation, transposed, backend)


def by_whole_matrix(
    x: Tensor, weights: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, order: str,
    precision: str | None, activation: str, transposed: bool, backend: str,
) -> Tensor:  # fmt: skip
    """Multiply by the dense matrix K."""
    matrix = products.to_dense(weights)
    y = products.by_whole_matrix(x, matrix.mH if transposed else matrix, order)
    return products.finish(y, bias, activation, residual, order)


def _alternatives(given: dict[str, Tensor]) -> list[CustomOpConfig]:
    """PyTorch's products that compete with the operator."""
    is_small = products.is_small(Pattern(*given["weights"].shape))
    methods = [by_blocks, by_whole_matrix] if is_small else [by_blocks]
    return [CustomOpConfig(each) for each in methods]


register_custom_op_autotuning(_timed, config_generator=_alternatives, name="ksgen_multiply")


class TimedProducts(CustomGraphPass):
    """Inductor pass over the graph that lets inductor time products."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.target is _MULTIPLY and _may_be_timed(node):
                node.target = _timed._opoverload

    def uuid(self) -> Any:
        # inductor inlines functions of all three modules
        return get_hash_for_files((__file__, ops.__file__, products.__file__))


AUTOTUNING = {"max_autotune": True, "post_grad_custom_pre_pass": TimedProducts()}


def _may_be_timed(product: Node) -> bool:
    """Whether PyTorch's products may replace this one.

    Inductor would take a residual without a bias for the bias. The alternatives exchange no features.
    """
    given: Any = product.args
    if any(given[_BACKEND + 1 :]):
        return False
    dtype = dtype_name(product.meta["val"].dtype)
    is_unambiguous = given[_RESIDUAL] is None or given[_BIAS] is not None
    return is_unambiguous and given[_BACKEND] == "auto" and given[_PRECISION] in (None, dtype)
