"""Launches of prepared calls: several calls become one, with scratch memory for their intermediates."""

import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ksgen.launch.memory import new_tensor
from ksgen.launch.plan import Call, Packing, RepeatedCall, RepeatedCalls
from ksgen.launcher import Weights

LINE_BYTES = 256  # alignment of scratch memory: that of GPU allocations, and whole cache lines of a processor
KEPT_BYTES = 2**22  # scratch memory that a thread keeps; more is allocated at each call, which replays do not do
_scratch = threading.local()


class Calls:
    """Calls that are launched sequentially, with the array numbers of their operands.

    The numbers of scratch memory, for intermediates, packed weights and workspaces, follow those of the arrays.
    """

    def __init__(self, arrays: int) -> None:
        """`arrays`: number of the first scratch memory."""
        self.repeated, self.packed = list[RepeatedCall](), list[Weights]()
        self._arrays, self._scratch_bytes = arrays, list[int]()

    def reserve(self, nbytes: int) -> int:
        """Reserve scratch memory, and return its number among the arrays."""
        self._scratch_bytes.append(nbytes)
        return self._arrays + len(self._scratch_bytes) - 1

    def enlarge(self, number: int, nbytes: int) -> None:
        index = number - self._arrays
        self._scratch_bytes[index] = max(self._scratch_bytes[index], nbytes)

    def add(
        self, call: Call, places: Mapping[str, int], weights: Sequence[Any] = (), numbers: Sequence[int] = (),
        are_adjoint: bool = False,
    ) -> None:  # fmt: skip
        """Add a launcher's prepared call, and reserve memory for its workspace and for the weights that it packs.

        `places` maps its operands to array numbers; by default, x has number 0 and the residual 1. `weights` are those
        that the call was prepared with; packed ones are kept. `numbers` are those of arrays that are packed at each
        call, as weights of the call's factor or of its adjoint.
        """
        plan, packs, arrays = call.plan, list[Packing](), {"x": 0, "residual": 1, **places}
        if not plan.device.shares_host and plan.workspace_bytes:
            arrays["workspace"] = self.reserve(plan.workspace_bytes)
        if numbers:
            for name, packer, number in zip(plan.weights, plan.packers or (plan,), numbers, strict=True):
                arrays[name] = self.reserve(packer.packed_bytes)
                packs.append(Packing(packer, number, arrays[name], are_adjoint))
        self.repeated.append(RepeatedCall.of(call, arrays, packs))
        self.packed += [each for each in weights if isinstance(each, Weights)]

    def offsets(self) -> list[int]:
        """Offset of each piece of scratch memory in bytes, and then the size of all pieces."""
        sizes = (-(-each // LINE_BYTES) * LINE_BYTES for each in self._scratch_bytes)
        return list(accumulate(sizes, initial=0))


class Launches:
    """Launches of prepared calls by one call, which adds their scratch memory."""

    # what a replay needs to know, as of `ksgen.torch.operators.trained.Trained`
    shapes: Sequence[Sequence[int]] = ()
    order: tuple[Sequence[int], Sequence[int]] = (), ()
    sums_bias = False

    def __init__(self, calls: Calls) -> None:
        self.launch = RepeatedCalls(calls.repeated, calls.packed)
        *self._begins, self._bytes = calls.offsets()

    @property
    def launches(self) -> "Sequence[Launches]":
        return [self]

    def run(self, addresses: list[int], like: Tensor) -> None:
        """Launch on arrays at these addresses, which become those of all arrays."""
        if self._bytes:
            memory = _scratch_memory(like, self._bytes)  # lives until the launches are enqueued
            begin = memory.data_ptr()
            addresses += [begin + each for each in self._begins]
        self.launch(addresses)

    def settled(self) -> tuple[tuple[Any, ...], int] | None:
        """Launches as `replay.cpp` reads them, and for how many calls; None while they are not settled."""
        if (found := self.launch.settled()) is None:
            return None
        function, recorded, threads, workspace_bytes, calls, most_ns = found
        offsets, nbytes = tuple(self._begins), self._bytes
        if workspace_bytes:
            offsets, nbytes = (nbytes, *offsets), nbytes + workspace_bytes
        if nbytes > KEPT_BYTES:
            return None
        return (function, recorded, threads, workspace_bytes > 0, offsets, nbytes, most_ns), calls


def _scratch_memory(x: Tensor, nbytes: int) -> Tensor:
    """Scratch memory of one call, for launches on the current stream.

    A thread keeps its memory on a processor: fresh pages cost more than a small product.
    """
    if not x.is_cpu or nbytes > KEPT_BYTES:
        return new_tensor(x, nbytes, dtype=torch.uint8)
    kept: Tensor | None = getattr(_scratch, "memory", None)
    if kept is None or kept.numel() < nbytes:
        kept = _scratch.memory = new_tensor(x, nbytes, dtype=torch.uint8)
    return kept
