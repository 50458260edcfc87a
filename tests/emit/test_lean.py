"""Nothing in an emitted text is unused: no macro, type, constant or function, in any family, precision, layout and
epilogue.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ksgen.emit.render import Source, render
from ksgen.families import FAMILIES, Limits, cuda_limits
from ksgen.families.gradient.plain import GradientConstants
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from ksgen.spec.kernel import activations_of

PROCESSOR = Limits(
    65536, registers=0, is_cpu=True, vector_bytes=64, tiles=("bf16", "f16"), multiprocessors=8, async_copies=False
)
TARGETS = (cuda_limits("sm_90a"), cuda_limits("sm_75"), PROCESSOR)
PATTERNS = ((1, 96, 48, 2), (6, 64, 64, 1), (2, 40, 24, 3))
EPILOGUES = (Epilogue(), Epilogue(True, "gelu", True), Epilogue(activation="relu"))
NOT_CODE = re.compile(r'//[^\n]*|(?<!_Pragma\()"(?:[^"\\\n]|\\.)*"')
DEFINITIONS = (  # of a name, wherever it stands
    re.compile(r"#define (\w+)"),
    re.compile(r"^typedef [^;{]*?(\w+)(?:\[[^;]*\])?;", re.M),
    re.compile(r"^typedef struct [^;]*?\{[^}]*\} (\w+);", re.M),
    re.compile(r"^struct (?:ALIGNED\([^{]*\) |alignas\(\d+\) )?(\w+) \{", re.M),
    re.compile(r"^constexpr [\w ]+?(\w+) +=", re.M),
    re.compile(r"\bDEVICE (?:static )?(?:constexpr )?(?:explicit )?[\w*& ]*?(\w+)\("),
    re.compile(r"^\s*constexpr \w+ (\w+) =", re.M),
)


def unused(text: str) -> set[str]:
    """Names that a text defines and does not use.

    What a factor of a chain has for itself, it undefines: that is no use.
    """
    code = re.sub(r"#undef \w+", "", NOT_CODE.sub(" ", text))
    defined: dict[str, int] = {}
    for start in {(found[1], found.start(1)) for each in DEFINITIONS for found in each.finditer(code)}:
        defined[start[0]] = defined.get(start[0], 0) + 1
    constructors = set(re.findall(r"DEVICE (?:explicit )?(\w+)\(", code)) & set(
        re.findall(r"struct (?:\w+\([^{;]*\) )?(\w+) \{", code)
    )
    uses = Counter(re.findall(r"[A-Za-z_]\w*", code))
    return {name for name, count in defined.items() if uses[name] <= count} - constructors


def texts(family: str) -> Iterator[Source]:
    """Under the default of each target, with no device's own precision or layout left out."""
    is_group = "group" in family
    jobs = ("gradient",) if "gradient" in family else ("chain",) if "chain" in family or is_group else ("multiply",)
    seen: set[Any] = set()
    for shape, precision, layout, epilogue, job in product(PATTERNS, PRECISIONS, LAYOUTS, EPILOGUES, jobs):
        first = [Pattern(shape[0], shape[2], 8, shape[3])] if job == "chain" else []
        # it has none
        if (job == "gradient" and epilogue != Epilogue()) or epilogue.activation not in activations_of(precision):
            continue
        others = [[Pattern(1, 24, first[0].in_features, 1)]] if is_group else []
        kernel = KernelSpec([[*first, Pattern(*shape)], *others], precision, layout, epilogue, job=job)
        for limits in TARGETS:
            if FAMILIES[family].supports(kernel, limits):
                constants = FAMILIES[family].default(kernel, limits)
                is_plain = family == "simt" or isinstance(constants, GradientConstants)
                for dialect in ("opencl",) if limits.is_cpu else ("cuda", "opencl") if is_plain else ("cuda",):
                    if dialect == "opencl" and getattr(constants, "copy", "registers") != "registers":
                        constants = FAMILIES[family].default(kernel, replace(limits, async_copies=False))
                    if (kernel, constants, dialect) not in seen:
                        seen.add((kernel, constants, dialect))
                        yield render(kernel, constants, family=family, dialect=dialect)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_emitted_is_unused(family: str) -> None:
    found = {name: source.entry for source in texts(family) for name in unused(source.text)}
    assert found == {}


@pytest.mark.parametrize(
    "more",
    [
        "#define SPARE 1\n",
        "typedef float spare;\n",
        "typedef struct { int at; } Spare;\n",
        "struct Spare { int at; };\n",
        "constexpr int SPARE = 1;  // SPARE\n",
        "DEVICE float spare(float value) { return value; }\n",
    ],
)
def test_what_is_unused_is_noticed(more: str) -> None:
    text = render(KernelSpec(Pattern(2, 64, 48, 4))).text
    assert unused(text) == set()
    assert {name.lower() for name in unused(text + more)} == {"spare"}
