"""Describes the sources to generate: a YAML spec, and its kernels and layers.

    defaults:                            # any of the eleven options; shown are their default values
      # float32, float64, float16, bfloat16, complex64, complex128, tf32, tf32x3, fp16x3, bf16x6, c64_tf32x3
      precision: float32
      layout: bsf                        # bsf: x is (batch, features); bsl: (features, batch)
      batch: any                         # any, or a batch size for which the kernel is specialised
      bias: false                        # the epilogue, in this order: + bias,
      activation: none                   #   none, relu, gelu, gelu_tanh, silu,
      residual: false                    #   + residual
      residual_first: false              # true: the residual is added before the activation
      gradients: false                   # true: kernels for the gradients of weights and of x, too
      stride: dense                      # any: arrays may be slices of larger ones; [dense, any]: kernels for both
      weights: same                      # int8, e4m3 or e5m2: eight bits, with scales; bfloat16: for x in float32
      inputs: same                       # storage of x: that of y, or that of eight-bit weights
    kernels:
      - 6,64,64,1                        # a pattern a,b,c,d with the defaults
      - {pattern: [2,48,192,1], precision: [float16, bfloat16], batch: [any, 25088]}
    layers:                              # patterns in the order in which they multiply x; the last one has the epilogue
      qkv: [[2,48,192,1], [1,192,48,2]]
      up: {chain: [[6,64,64,1], [1,768,192,2]], bias: true, activation: gelu}
      mix: {chain: {family: monarch, in_features: 1024, out_features: 1024, split_in: 32, split_out: 32}}
      heads: {group: [[[2,48,192,1], [1,192,48,2]], [[6,64,64,1]]], bias: true}  # chains that take the same x
      deep: {chain: [[6,64,64,1], [1,768,192,2]], between: relu}  # activation after each factor but the last
      transposed: {chain: [[6,64,64,1], [1,768,192,2]], out_layout: bsl}  # layout of y, if it differs from that of x
      whole: {chain: [[6,64,64,1], [1,768,192,2]], fuse: yes}  # one launch: auto (if faster), yes, no
      product: {chain: [[8,8,8,1], [1,8,8,8]], tied: [a, d]}  # axes along which a factor's weights are equal
    patterns: paper                      # the 627 patterns of the paper's benchmark, with the defaults

A list of values asks for one kernel per value. Layers share kernels, but `kernels` may list a kernel only once. The
values of `family` name functions of `ksgen.pattern`, those of `structure` functions of `ksgen.structures`. The other
keys of such a mapping are the function's arguments. `schema` returns the JSON schema of specs.
"""

import re
from dataclasses import replace
from keyword import iskeyword
from pathlib import Path
from typing import Any

from ksgen.errors import SpecError
from ksgen.files import read
from ksgen.spec.kernel import (
    ACTIVATIONS,
    JOBS,
    LAYOUTS,
    STRIDES,
    Activation,
    Epilogue,
    Fuse,
    Job,
    KernelSpec,
    LayerOptions,
    Layout,
)
from ksgen.spec.paper import paper_patterns, stratified
from ksgen.spec.precision import PRECISIONS, Precision, PrecisionName
from ksgen.spec.spec import Spec
from ksgen.spec.storage import STORAGES, WEIGHTS, ByteStorage, Storage, WeightStorage
from ksgen.values import excerpt, shown

__all__ = [
    "ACTIVATIONS", "JOBS", "LAYOUTS", "PRECISIONS", "STORAGES", "STRIDES", "WEIGHTS", "Activation", "ByteStorage",
    "Epilogue", "Fuse", "Job", "KernelSpec", "LayerOptions", "Layout", "Precision", "PrecisionName", "Spec", "Storage",
    "WeightStorage", "load", "paper_patterns", "parse", "schema", "stratified",
]  # fmt: skip

MOST_BYTES_OF_FILE = 2**22


def load(path: str | Path) -> Spec:
    """Load the spec in a YAML file. A `SpecError` names the file, and the line and key of wrong content."""
    try:
        path = Path(path)
    except TypeError:
        raise SpecError(f"spec={excerpt(path)}; accepted: the path of a YAML spec") from None
    file = shown(path)
    try:
        content = read(path, MOST_BYTES_OF_FILE)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{file}: cannot be read ({reason}); accepted: the path of a YAML spec") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{file}:{line}: byte 0x{content[error.start]:02x}; accepted: text in UTF-8") from error
    return parse(text, file)


def parse(text: str, file: str = "<text>") -> Spec:
    """Parse a spec from YAML text. Messages name `file`, and its stem becomes the spec's name."""
    from ksgen.spec.reader import read_spec  # imports PyYAML, which only this function needs

    title = Path(file).stem
    return replace(read_spec(text, file, _identifier(title)), title=title)


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a spec, which gives editors completion.

    It cannot express rules for several values, such as whether two patterns fit: only the reader checks those.
    """
    from ksgen.spec import reader

    return reader.schema()


def _identifier(stem: str) -> str:
    words = re.sub(r"[^0-9A-Za-z]+", "_", stem).strip("_")
    return words if words[:1].isalpha() and not iskeyword(words) else f"spec_{words}".rstrip("_")
