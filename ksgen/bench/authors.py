"""Structured products in PyTorch, in the forms in which their authors published them.

Each form takes x (batch, in_features) and the authors' parameters by name, as
`ksgen.structures` names them. DYAD's form is that of its variant "it".
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Form = Callable[[Tensor, dict[str, Tensor]], Tensor]


def btt(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Batched products, with a permutation of the intermediate."""
    first, second = state["W1"], state["W2"]
    columns, rows = len(first), len(second)
    inner = torch.bmm(x.unflatten(1, (columns, -1)).transpose(0, 1), first).unflatten(2, (rows, -1))
    return torch.bmm(inner.permute(2, 1, 0, 3).flatten(2), second).transpose(0, 1).flatten(1)


def gralora(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two sums by `einsum`, with a permutation of the intermediate, as in PEFT."""
    down, up = state["gralora_A"], state["gralora_B"]
    inner = torch.einsum("bni,nir->bnr", x.unflatten(1, (len(down), -1)), down).unflatten(2, (len(down), -1))
    return torch.einsum("bjr,jro->bjo", inner.transpose(1, 2).flatten(2), up).flatten(1)


def blast(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Batched products for C and B, a weighted sum for D."""
    right, inner, left = state["C"], state["D"], state["B"]
    down = torch.bmm(x.unflatten(1, (len(right), -1)).transpose(0, 1), right.transpose(1, 2))
    mixed = torch.einsum("qbr,pqr->pbr", down, inner)
    return torch.bmm(mixed, left.transpose(1, 2)).transpose(0, 1).flatten(1)


def monarch(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two batched products, with a permutation before and after the second one."""
    first, second = state["blkdiag1"], state["blkdiag2"]
    inner = torch.bmm(x.unflatten(1, (len(first), -1)).transpose(0, 1), first.transpose(1, 2))
    inner = inner.permute(1, 0, 2).flatten(1).unflatten(1, (-1, len(second))).permute(2, 0, 1)
    return torch.bmm(inner, second.transpose(1, 2)).permute(1, 2, 0).flatten(1)


def butterfly(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """A product and a sum per stride, as in torch-structured; with larger blocks, a sum by `einsum`."""
    twiddle = state["twiddle"][0, 0]
    for level, own in enumerate(twiddle):
        stride = 2**level
        if own.ndim == 3:
            entries = own.view(-1, stride, 2, 2).permute(0, 2, 3, 1)
            x = (entries * x.unflatten(1, (-1, 1, 2, stride))).sum(dim=3).flatten(1)
        else:
            blocks, parts = own.unflatten(0, (-1, stride)), x.unflatten(1, (-1, 2, stride, own.shape[-1]))
            x = torch.einsum("itsjkl,bijtl->bistk", blocks, parts).flatten(1)
    return x


def kronecker(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two sums by `einsum`, over the columns of B and then over those of A."""
    left, right = state["A"], state["B"]
    inner = torch.einsum("bij,oj->bio", x.unflatten(1, (left.shape[1], -1)), right)
    return torch.einsum("bio,pi->bpo", inner, left).flatten(1)


def oft(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """One sum by `einsum` over the rows of each rotation, as in PEFT."""
    rotations = state["R"]
    return torch.einsum("bnk,nkc->bnc", x.unflatten(1, (len(rotations), -1)), rotations).flatten(1)


def boft(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """A dense product with the rotation of all levels, which PEFT computes in each call."""
    return x @ _rotation(state)


def _rotation(state: dict[str, Tensor]) -> Tensor:
    """Product of BOFT's levels: dense matrices of diagonal blocks, whose rows and columns are permuted."""
    count, block, _ = state["R0"].shape
    whole = torch.block_diag(*state["R0"])
    places = torch.arange(count * block, device=whole.device)
    for level in range(1, len(state)):
        order = places.view(-1, 2**level, 2, block // 2).transpose(1, 2).flatten()
        whole = torch.block_diag(*state[f"R{level}"])[order][:, order] @ whole
    return whole


def low_rank(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two dense products, down and up."""
    return x @ state["A"].t() @ state["B"].t()


def gs(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two batched products by blocks, which shuffle as a Monarch structure does."""
    return monarch(x, {"blkdiag1": state["gsoft_R"], "blkdiag2": state["gsoft_L"]})


def dyad(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two batched products, on a view of the columns of x and on a transposed view, and their sum."""
    straight, transposed, columns = state["wl"], state["wu"], x.t()
    count, _, inputs = straight.shape
    first = straight.bmm(columns.unflatten(0, (count, inputs)))
    return (first + transposed.bmm(columns.unflatten(0, (inputs, count)).transpose(0, 1))).flatten(0, 1).t()


def block_dense(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """A batched product by the blocks, then a linear layer."""
    blocks = state["blkdiag"]
    inner = torch.bmm(x.unflatten(1, (len(blocks), -1)).transpose(0, 1), blocks.transpose(1, 2))
    return functional.linear(inner.transpose(0, 1).flatten(1), state["linear"])


PUBLISHED = "published form"
FORMS: dict[str, Form] = {
    each.__name__: each
    for each in (btt, gralora, blast, monarch, butterfly, kronecker, low_rank, oft, boft, gs, dyad, block_dense)
}  # by the name of the structure's chain


def frozen(name: str, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the form of a structure with parameters that stay unchanged. BOFT's rotation is computed once."""
    if name == "boft":
        wide = {level: rotations.double() for level, rotations in state.items()}
        rotation = _rotation(wide).to(state["R0"].dtype)
        return lambda x: x @ rotation
    ready = {parameter: each.contiguous() for parameter, each in state.items()}
    return lambda x: FORMS[name](x, ready)
