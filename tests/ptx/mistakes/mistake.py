"""What a mistake is."""

from dataclasses import dataclass

WRONG = "wrong result"  # what is caught by the output alone
EITHER = ("forward", "reverse")


@dataclass(frozen=True)
class Mistake:
    """A right case, the words that were changed, and how that shows."""

    name: str
    case: str
    right: str
    wrong: str
    kind: str
    message: str = ""
    build: str = "none"
    orders: tuple[str | int, ...] = ("forward",)
    also: tuple[str, str] | None = None  # a second place that was changed
    early: bool = False  # launched so, which the right case is not


SHARED_A = "wgmma bf16 A 128 along m B 0 48"
K_MAJOR_A = "wgmma bf16 A 128 B 128 48"
REGISTER_A = "wgmma bf16, A in registers"
MATRICES = "matrices load=False store=True"
BOX = "box swizzle=128"
