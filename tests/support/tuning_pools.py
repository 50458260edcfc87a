"""Pools of candidates, for tests of what chooses among them."""

from ksgen.spec import KernelSpec
from ksgen.tuning.job import Job
from ksgen.tuning.model import Machine
from ksgen.tuning.pool import Pool, list_space, make_pool


def pool_of(kernel: KernelSpec, batch: int, machine: Machine, *rest: object) -> Pool:
    job = Job(kernel, batch)
    return make_pool(job, machine, list_space(job, machine), *rest)
