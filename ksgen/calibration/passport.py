"""Passports of GPUs in one place: read one, make one, and see which families launchers may choose by it."""

from ksgen.calibration.proof import Step, prove
from ksgen.passport.standing import permitted
from ksgen.passport.store import Passport, Proof, load

__all__ = ["Passport", "Proof", "Step", "load", "permitted", "prove"]
