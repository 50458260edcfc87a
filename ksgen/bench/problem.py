"""Jobs of a benchmark, and the arrays of one job on the device, with the float64 reference for its results."""

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ksgen.bench.roster import COMPARISONS, Comparison
from ksgen.errors import KsgenError
from ksgen.measure.verify import CACHE_BYTES, tolerance
from ksgen.pattern import Chain, Pattern
from ksgen.reference import multiply
from ksgen.spec import PRECISIONS, KernelSpec
from ksgen.values import cached_property

MOST_SETS = 64  # sets of X and Y that runs alternate between
_ENDS, _BETWEEN = 16, 16  # compared rows of the batch: at both ends, where tiles are ragged, and in between
COMPARED = 2 * _ENDS + _BETWEEN


class JobArrays(Protocol):
    """Arrays that the contenders of one job work on."""

    sets: list[Tensor]  # copies of X

    @property
    def checked(self) -> int:
        """Number of compared rows of the batch."""

    def error(self, y: Any) -> float:
        """Error of a contender's result against float64."""


class Asked(ABC):
    """Job that all contenders compute: a product, or a layer."""

    precision: str  # a name in COMPARISONS
    layout: str
    batch: int

    @property
    def comparison(self) -> Comparison:
        return COMPARISONS[self.precision]

    @property
    def key(self) -> str:
        return f"{self.words} {self.precision} {self.layout} {self.batch}"

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of the job in its rows."""
        return {**self.named, "precision": self.precision, "layout": self.layout, "batch": self.batch}

    @property
    def bytes(self) -> int:
        return self.kernel(self.comparison.baselines).bytes(self.batch)

    @property
    @abstractmethod
    def words(self) -> str: ...
    @property
    @abstractmethod
    def named(self) -> dict[str, str]: ...
    @abstractmethod
    def kernel(self, arithmetic: str) -> KernelSpec:
        """Kernel of the full job in one launch."""

    @abstractmethod
    def factor(self, arithmetic: str) -> KernelSpec:
        """Kernel of one product of the job, whose instructions measure the device's limits."""

    @abstractmethod
    def tolerance(self, arithmetic: str) -> float:
        """Largest error that rounding explains."""

    @abstractmethod
    def problem(self, where: torch.device, seed: int) -> JobArrays: ...


def refuse_exchanges(given: Pattern | Chain) -> None:
    """Raise `KsgenError` if outputs are exchanged, which the other contenders do not do."""
    if given.is_exchanged:
        raise KsgenError(f"{given} exchanges outputs; accepted of a job to compare: outputs in the order i.k.j")


@dataclass(frozen=True)
class ProductJob(Asked):
    """A job for one product."""

    pattern: Pattern
    precision: str
    layout: str
    batch: int

    def __post_init__(self) -> None:
        refuse_exchanges(self.pattern)

    @property
    def words(self) -> str:
        return str(self.pattern)

    @property
    def named(self) -> dict[str, str]:
        return {"pattern": str(self.pattern)}

    def kernel(self, arithmetic: str) -> KernelSpec:
        return KernelSpec(self.pattern, arithmetic, self.layout)

    factor = kernel

    def tolerance(self, arithmetic: str) -> float:
        return tolerance(arithmetic, self.pattern.c)

    def problem(self, where: torch.device, seed: int) -> "ProductProblem":
        return ProductProblem(self, where, seed)


def sets_of(x: Tensor, job: Asked) -> list[Tensor]:
    """Copies of X, so many that all of a job's arrays exceed the cache."""
    return [x, *(x.clone() for _ in range(min(CACHE_BYTES // job.bytes, MOST_SETS - 1)))]


class ProductProblem:
    """Weights, and more sets of X than a cache holds. Equal jobs and seeds give equal arrays."""

    def __init__(self, job: ProductJob, where: torch.device, seed: int) -> None:
        self.job, self.where = job, where
        pattern, dtype = job.pattern, getattr(torch, PRECISIONS[job.comparison.baselines].dtype)
        draw = torch.Generator(where).manual_seed(zlib.crc32(f"{job.pattern} {job.batch} {seed}".encode()))
        inputs = pattern.in_features
        shape = (job.batch, inputs) if job.layout == "bsf" else (inputs, job.batch)
        self.weights = ((torch.rand(pattern.shape, generator=draw, device=where) * 2 - 1) / pattern.c**0.5).to(dtype)
        first = torch.randn(shape, generator=draw, device=where).to(dtype)
        self.sets = sets_of(first, job)

    @property
    def y_shape(self) -> tuple[int, int]:
        outputs = self.job.pattern.out_features
        return (self.job.batch, outputs) if self.job.layout == "bsf" else (outputs, self.job.batch)

    def error(self, y: Tensor) -> float:
        """Relative error (Frobenius) over the compared rows of the batch; NaN if any element of Y is not finite."""
        if tuple(y.shape) != self.y_shape or not bool(torch.isfinite(y).all()):
            return float("nan")
        difference = self._sample(y) - self._truth
        return float(np.linalg.norm(difference) / (np.linalg.norm(self._truth) or 1.0))

    @property
    def checked(self) -> int:
        return len(self._entries)

    @cached_property
    def _entries(self) -> Tensor:
        batch = self.job.batch
        if batch <= 2 * _ENDS + _BETWEEN:
            return torch.arange(batch, device=self.where)
        ends = [*range(_ENDS), *range(batch - _ENDS, batch)]
        between = torch.linspace(0, batch - 1, _BETWEEN).round().long().tolist()
        return torch.tensor(sorted({*ends, *between}), device=self.where)

    @cached_property
    def _truth(self) -> Any:
        weights = self.weights.double().cpu().numpy()
        return multiply(self.job.pattern, self._sample(self.sets[0]), weights, self.job.layout)

    def _sample(self, array: Tensor) -> Any:
        entries = self._entries.to(array.device)
        return array.index_select(0 if self.job.layout == "bsf" else 1, entries).double().cpu().numpy()
