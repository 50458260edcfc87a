"""The JSON fields of kernels and their times, by the schema of docs/json.md. Prints nothing."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ksgen.spec import KernelSpec
from ksgen.spec.kernel import pattern_as_list

if TYPE_CHECKING:
    from ksgen.wisdom.store import Entry

TIME_DIGITS = 3  # decimals of times, which are in microseconds: a nanosecond
DIGITS = 6  # significant digits of every other number


def kernel_figures(kernel: KernelSpec, batch: int | None) -> dict[str, Any]:
    """Facts that identify a kernel, and its batch. A batch of None means any batch."""
    factors = list(map(pattern_as_list, kernel.factors))
    return {
        "kernel": kernel.name,
        "job": kernel.job,
        "pattern": factors if kernel.is_chain else factors[0],
        **(_group_figures(kernel) if kernel.is_group else {}),
        "precision": kernel.precision,
        **({"stored_weights": kernel.weights} if kernel.is_quantized else {}),
        **({"stored_inputs": kernel.inputs} if kernel.has_bytes_in else {}),
        "layout": kernel.layout,
        "epilogue": kernel.epilogue.as_json,
        "batch": batch,
    } | {
        name: value
        for name, value in (("between", kernel.between), ("out_layout", kernel.out_layout))
        if value not in (None, "none")
    }


def _group_figures(kernel: KernelSpec) -> dict[str, Any]:
    """All chains of a group; `beside` is the deprecated field of all but the first."""
    chains = [list(map(pattern_as_list, chain)) for chain in kernel.chains]
    return {"chains": chains, "beside": chains[1:]}


def choice_figures(family: str, constants: Any) -> dict[str, Any]:
    """Facts about the family and constants of the kernel."""
    return {"family": family, "constants": asdict(constants)}


def entry_figures(entry: "Entry") -> dict[str, Any]:
    """Facts of the kernel's wisdom entry."""
    measured = dict(entry.measured)
    times = {name: measured.pop(name, None) for name in ("median_us", "floor_us")}
    which = kernel_figures(entry.kernel, entry.batch) | {"specialised": entry.kernel.batch is not None}
    return {
        **which,
        **choice_figures(entry.family, entry.constants),
        **times,
        "doubt": entry.doubt,
        "measured": measured,
    }


def tidy(content: Any, name: str = "") -> Any:
    """Return a copy of the data with rounded numbers.

    Times, whose names or parents' names end in `_us`, are rounded to a nanosecond, others to six significant digits.
    """
    if isinstance(content, dict):
        return {each: tidy(value, name if name.endswith("_us") else each) for each, value in content.items()}
    if isinstance(content, list | tuple):
        return [tidy(value, name) for value in content]
    if isinstance(content, float):
        return round(content, TIME_DIGITS) if name.endswith("_us") else float(f"{content:.{DIGITS}g}")
    return content
