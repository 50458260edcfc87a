"""A spec as a user has it: a YAML file, its kernels and its layers. Never renders."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from pathlib import Path

from ksgen.errors import SpecError
from ksgen.files import read
from ksgen.pattern import Chain
from ksgen.spec.kernel import KernelSpec, LayerOptions
from ksgen.values import excerpt, shown

MOST_BYTES_OF_FILE = 2**22


@dataclass(frozen=True)
class Spec:
    """What one YAML file asks for: each kernel once, and the layers that share them."""

    name: str  # a Python identifier
    kernels: tuple[KernelSpec, ...]
    layers: Mapping[str, Chain]
    groups: Mapping[str, tuple[Chain, ...]] = field(default_factory=dict)  # layers of several chains on one x
    options: Mapping[str, LayerOptions] = field(default_factory=dict)  # of layers and groups
    launches: Mapping[str, tuple[KernelSpec, ...]] = field(default_factory=dict)  # of all of a layer or group, where there may be one
    wanted: Mapping[str, tuple[KernelSpec, ...]] = field(default_factory=dict)  # of a layer's or group's last factor, in its own layout

    @property
    def chains_of(self) -> dict[str, tuple[Chain, ...]]:
        """Of each layer one, of each group all."""
        return {name: (chain,) for name, chain in self.layers.items()} | dict(self.groups)

    def options_of(self, layer: str) -> LayerOptions:
        return self.options.get(layer, LayerOptions())


def load(path: str | Path) -> Spec:
    """The spec in a YAML file; `SpecError` names the file, and the line and key if it is their fault."""
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
    """The spec in a YAML text; messages call it `file`, and its stem names the spec."""
    from ksgen.spec.reader import read_spec  # imports PyYAML, which only this function needs

    return read_spec(text, file, _identifier(Path(file).stem))


def _identifier(stem: str) -> str:
    words = re.sub(r"[^0-9A-Za-z]+", "_", stem).strip("_")
    return words if words[:1].isalpha() and not iskeyword(words) else f"spec_{words}".rstrip("_")
