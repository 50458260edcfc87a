"""Renders a kernel and its constants as one source, and a spec as a folder of sources with importable launchers.

The same input gives the same bytes. Never chooses constants: a family does, or wisdom. A comment at the head of
an emitted CUDA source says how to launch it.
"""

import hashlib
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ksgen import __version__
from ksgen.emit.folder import write_folder
from ksgen.emit.templates import (
    DIALECTS,
    LIBRARIES,
    VECTOR_LIBRARIES,
    Dialect,
    dialects_of,
    fill,
    libraries,
    part_libraries,
    template_digest,
    template_of,
)
from ksgen.errors import ConstantsError, KsgenError
from ksgen.families import (
    Family,
    Geometry,
    Limits,
    check,
    cuda_limits,
    family_for,
    family_named,
    family_of,
    meant_for,
    requested_family,
)
from ksgen.families.amx.shape import INPUTS, TILE_SUMS
from ksgen.families.gpus import FULLEST, LEAST
from ksgen.families.ptx import WgmmaInstruction
from ksgen.families.signature import each_chains, features_of, layout_of, pitches_of, weights_of
from ksgen.pattern import Chain, Pattern
from ksgen.spec import PRECISIONS, KernelSpec, Spec
from ksgen.spec.kernel import is_word, pattern_as_list
from ksgen.spec.precision import part_of
from ksgen.spec.storage import STORED
from ksgen.values import excerpt

PORTABLE = {  # limits without a device: such sources run on every GPU since sm_80, or with every OpenCL driver
    "cuda": cuda_limits(LEAST),
    "opencl": replace(cuda_limits(LEAST), async_copies=False, tensor_cores=False),
}
NEWEST = cuda_limits(FULLEST)  # for families that need more than the portable limits
DIALECT_NAMES = {"cuda": "CUDA", "opencl": "OpenCL"}
LAYOUT_WORDS = {"bsf": "batch-size-first", "bsl": "batch-size-last"}
PROBE_AT_ONCE = 8  # products that a probe's warpgroup commits as one wgmma group


@dataclass(frozen=True)
class Source:
    """One emitted source, with its kernel, family and constants."""

    text: str = field(repr=False)
    entry: str
    dialect: Dialect
    kernel: KernelSpec
    family: str
    constants: Any

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def second_entry(self) -> str:
        """Name of the second entry: it packs weights, or adds the parts of their gradient."""
        return self.entry_of("sum" if self.kernel.job == "gradient" else "pack")

    @property
    def entries(self) -> list[str]:
        """Names of all entries in the source."""
        geometry = family_named(self.family).geometry(self.kernel, self.constants, self.kernel.batch or 1)
        passes = [self.entry_of(each.name) for each in (*geometry.before, *geometry.after)]
        second = [self.second_entry] if not self.kernel.is_chain else []
        adjoint = [self.entry_of("pack_adjoint")] if family_named(self.family).packs_adjoint(self.kernel) else []
        return list(dict.fromkeys([self.entry, *second, *adjoint, *passes]))

    def entry_of(self, name: str) -> str:
        return f"{self.entry}_{name}"


def render(
    kernel: KernelSpec, constants: Any = None, *, family: str | None = None, dialect: Dialect = "cuda"
) -> Source:
    """Render the kernel's source with these constants.

    The default is the family's constants for the portable limits, or for the newest GPU if those do not suffice. Ties
    decide no constants. Families that do not read tied weights once render the source of the untied kernel.
    """
    if not is_word(dialect, DIALECTS):
        raise KsgenError(f"unknown dialect {excerpt(dialect)}; accepted: {', '.join(DIALECTS)}")
    if constants is None:
        plain, limits = kernel.untied, PORTABLE[dialect]
        named = requested_family(family) if family else family_for(plain, limits)
        constants = named.default(plain, limits if named.supports(plain, limits) else NEWEST)
    chosen = family_of(constants)
    kernel = chosen.as_read(kernel, constants)
    check(chosen, kernel, constants)
    entry = entry_name(kernel, chosen, constants, PORTABLE[dialect])
    given, constants = constants, chosen.source_constants(kernel, constants)
    template = template_of(chosen, type(constants))
    extras = {"bias": kernel.epilogue.bias, "residual": kernel.epilogue.residual}
    added = [name for operand, wanted in extras.items() if wanted for name in each_chains(kernel, operand)]
    if dialect not in (known := dialects_of(chosen, type(constants))):
        raise KsgenError(f"{chosen.name} has no {DIALECT_NAMES[dialect]} source; accepted: dialect={known[0]}")
    variables = {
        "kernel": kernel,
        "constants": constants,
        "shape": chosen.shape(kernel, constants),  # sizes derived from the constants
        "constexprs": chosen.constexprs(kernel, constants),
        "dialect": dialect,
        "entry": entry,
        "version": __version__,
        "template": template,
        "template_digest": template_digest(chosen.name),
        "summary": _summary(kernel),
        "memory_lines": _memory_lines(kernel),
        "weights_of_all": weights_of(kernel),
        "results": each_chains(kernel, "y"),
        "extras": added,
        "extra_arguments": "".join(f", {name if wanted else '0'}" for name, wanted in extras.items()),
        "extra_pitches": ", residual_pitch" if kernel.epilogue.residual else ", 0",
        "pitches": pitches_of(kernel).values(),
        # pitches of contiguous rows, by array
        "row_pitches": {
            array: features if layout_of(kernel, array) == "bsf" else "batch"
            for array, features in ({} if kernel.is_strided else features_of(kernel)).items()
        },
        "launch_parameters": "".join(f"const extent {name}, " for name in constants.at_launch),
        # type of X: `given`, that of weights before packing, if X has eight bits too; else `stored`
        "x_stored": "given" if kernel.has_bytes_in else "stored",
        "input_storage": "bytes" if kernel.has_bytes_in else "same",
        "widen_x": "widen_input" if kernel.has_bytes_in else "widen",
        "accumulator": "real",
        "activated": "" if kernel.between == "none" else "activate_between",  # for intermediates
        "residual_first": kernel.epilogue.residual_first,
        "last_steps": "residual, activation" if kernel.epilogue.residual_first else "activation, residual",
        "part": part_of(kernel.arithmetic),
        "variants": (),
        "part_libraries": part_libraries(chosen, type(constants)),
        "launch_lines": launch_lines(chosen, kernel, constants, entry) if dialect == "cuda" else "",
        **chosen.variables(kernel, constants),
    }
    complexes = (f"complex_{kernel.job}", "complex") if kernel.arithmetic.is_complex else ()
    inputs = (f"{kernel.inputs}_inputs", "byte_inputs") if kernel.has_bytes_in else ()
    numbers = (*complexes, *((*inputs, STORED[kernel.weights].variant, "quantized") if kernel.is_quantized else ()))
    kinds = (kernel.precision, kernel.dtype, kernel.arithmetic.of_parts)
    # some activations have shorter code that is accurate enough for results in 16 bits
    ends = ("_in_16_bits", "") if dialect == "cuda" and kernel.item_bytes == 2 else ("",)
    of_kernel = (
        *(("residual_first",) if kernel.epilogue.residual_first else ()),
        *(f"between_{kernel.between}{end}" for end in ends),
        template.partition(".")[0],
        chosen.name,
        kernel.layout,
        *(f"{kernel.epilogue.activation}{end}" for end in ends),
        *kinds,
    )
    variants = (*variables["variants"], *numbers, *of_kernel)
    text = fill(template, variables, libraries(chosen, type(constants), dialect, kernel.is_chain), variants)
    return Source(text, entry, dialect, kernel, chosen.name, given)


def _summary(kernel: KernelSpec) -> str:
    """Precision, layouts, storage of weights and epilogue, for the second line of the source."""
    layouts = " to ".join(LAYOUT_WORDS[each] for each in dict.fromkeys((kernel.layout, kernel.y_layout)))
    stored = "X and weights" if kernel.has_bytes_in else "weights"
    quantized = (f"{kernel.weights} {stored}",) if kernel.is_quantized else ()
    return ", ".join((kernel.precision, layouts, *quantized, *(word for word in kernel.words if word != kernel.job)))


def _memory_lines(kernel: KernelSpec) -> str:
    """Comment on the arrays whose order in memory differs from that of indices in formulas; empty if there are none."""
    result, layout = ("dY", kernel.layout) if kernel.job == "gradient" else ("Y", kernel.y_layout)
    arrays = [array for array, each in (("X", kernel.layout), (result, layout)) if each == "bsl"]
    verb = "are" if len(arrays) > 1 else "is"
    words = f"// These are logical indices. In memory, {' and '.join(arrays)} {verb} (features, batch).\n"
    return words if arrays else ""


@dataclass(frozen=True)
class Probe:
    """Source that measures a device, without a kernel or constants."""

    text: str
    entry: str
    multiply_adds: int = 0  # per round and work group of a processor


def render_probe(
    precision: str, dialect: Dialect, threads: int, operand: str | None = None, wgmma: WgmmaInstruction | None = None
) -> Probe:
    """Copy and multiply-add kernels that `roofline.py` times. With an `operand`, tensor cores multiply."""
    multiplier = "probe/multiply_add" if operand is None else "wgmma/probe" if wgmma else "probe/mma"
    variables: dict[str, Any] = {"operand": operand, "wgmma": wgmma, "at_once": PROBE_AT_ONCE, "threads": threads}
    variables |= {"product": wgmma.along_inputs if wgmma else "", "multiplier": f"include/{multiplier}.j2"}
    variables |= {"precision": precision, "dialect": dialect}
    sums = PRECISIONS[precision].sums
    return _probe("probe.cu.j2", f"ks_probe_{precision}", LIBRARIES[dialect], sums, **variables)


def render_wait() -> Probe:
    """Kernel that keeps a CUDA GPU busy while `queued.py` enqueues the launches that it times."""
    return _probe("wait.cu.j2", "ks_wait", LIBRARIES["cuda"], PRECISIONS["float32"].sums)


def render_cache_probe(threads: int, blocks: int) -> Probe:
    """Kernel that reads an array in a CUDA GPU's L2 cache, with this number of blocks per multiprocessor."""
    return _probe("probe_cache.cu.j2", "ks_probe_cache", LIBRARIES["cuda"], threads=threads, blocks=blocks)


def render_processor_probe(precision: str, limits: Limits) -> Probe:
    """Copy and multiply-add kernels for a processor with the vector registers of `limits`."""
    known = PRECISIONS[precision]
    lanes = limits.vector_bytes // (8 if known.sums == "float64" else 4)
    sums = limits.vector_sums
    pairs = ("pairs",) if limits.multiplies_pairs(known.operand) else ()
    per_round, numbers = lanes * sums * (2 if pairs else 1), {"precision": precision, "lanes": lanes, "sums": sums}
    entry = f"ks_probe_{precision}"
    return _probe("probe_processor.cl.j2", entry, VECTOR_LIBRARIES, *pairs, known.sums, per_round=per_round, **numbers)


def render_tiles_probe(operand: str) -> Probe:
    """Kernel that computes four products of matrix tiles per round on a processor."""
    entry, per_round = f"ks_probe_tiles_{operand}", 4 * TILE_SUMS * INPUTS
    numbers: dict[str, Any] = {"operand": operand, "sums": TILE_SUMS}
    return _probe("probe_tiles.cl.j2", entry, VECTOR_LIBRARIES, per_round=per_round, **numbers)


def _probe(
    template: str, entry: str, libraries: Iterable[str], *variants: str, per_round: int = 0, **variables: Any
) -> Probe:
    variables |= {"entry": entry, "version": __version__}
    return Probe(fill(template, variables, libraries, variants), entry, per_round)


def entry_name(kernel: KernelSpec, family: Family[Any], constants: Any, portable: Limits) -> str:
    """The kernel's name, with a hash of family and source constants unless they are those of the portable default."""
    constants, plain = family.source_constants(kernel, constants), kernel.untied
    if (
        family in meant_for(plain, portable)
        and family is family_for(plain, portable)
        and constants == family.source_constants(plain, family.default(plain, portable))
    ):
        return kernel.name
    facts = json.dumps([constants.entry_family or family.name, constants.in_entries], sort_keys=True)
    return f"{kernel.name}_{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def emit(spec: Spec, folder: Path, dialect: Dialect = "cuda", family: str | None = None) -> list[Source]:
    """Write the spec's folder: one source per kernel, the manifest, the launchers.

    Files of an earlier emit are replaced; other files stay. With a `family`, it writes only the kernels that this
    family supports with the limits `NEWEST`.
    """
    kernels = [each for each in spec.kernels if family is None or family_named(family).supports(each, NEWEST)]
    if family and not kernels:
        why = family_named(family).why
        raise ConstantsError(f"{spec.name}: {family} supports none of its kernels ({why}); accepted: another, or none")
    every = [render(kernel, family=family, dialect=dialect) for kernel in kernels]
    # a kernel whose ties are not read has the source of another
    sources = list({source.digest: source for source in every}.values())
    files = {f"{source.entry}{DIALECTS[dialect]}": source.text for source in sources}
    names = [f"ks_{pattern.identifier}" for pattern in _patterns(spec)] + [f"layer_{name}" for name in spec.names]
    files["launchers.py"] = _launchers(spec)
    listed = "".join(f"    {name},\n" for name in names)
    quoted = "".join(f'    "{name}",\n' for name in names)
    files["__init__.py"] = (
        f'"""Launchers of {spec.name}. Written by `ksgen emit`."""\n\nfrom .launchers import (\n{listed})\n\n__all__ '
        f"= [\n{quoted}]\n"
    )
    write_folder(folder, files, _facts(spec, sources))
    return sources


def _facts(spec: Spec, sources: list[Source]) -> dict[str, Any]:
    """Content of the manifest."""

    def entry(source: Source) -> dict[str, Any]:
        kernel, family = source.kernel, family_named(source.family)
        geometry = family.geometry(kernel, source.constants, kernel.batch or 1)
        options: dict[str, Any] = {name: getattr(kernel, name) for name in ("job", "stride", "weights", "inputs")}
        unusual = {name: value for name, value in options.items() if value != getattr(KernelSpec, name)}
        unusual |= {"tied": kernel.tie} if kernel.tied else {}
        return unusual | {
            "entry": source.entry,
            "file": f"{source.entry}{DIALECTS[source.dialect]}",
            "sha256": source.digest,
            "pattern": pattern_as_list(kernel.pattern),
            "precision": kernel.precision,
            "layout": kernel.layout,
            "epilogue": kernel.epilogue.as_json,
            "batch": kernel.batch,
            "family": source.family,
            "constants": asdict(source.constants),
            "threads": geometry.block,
            "shared_bytes": geometry.shared_bytes,
            "packed_bytes": family.packed_bytes(kernel, source.constants),
        }

    def listed(chain: Chain) -> list[list[Any]]:
        return list(map(pattern_as_list, chain))

    layers = {name: listed(chain) for name, chain in spec.layers.items()}
    several = {
        kind: {name: list(map(listed, chains)) for name, chains in each.items()}
        for kind, each in (("groups", spec.groups), ("sums", spec.sums))
        if each
    }
    options = {name: given for name in spec.names if (given := spec.options_of(name).non_defaults)}
    title = {"title": spec.title} if spec.title else {}
    return {
        "ksgen": __version__,
        "spec": spec.name,
        **title,
        "layers": layers,
        **several,
        **({"options": options} if options else {}),
        "kernels": [entry(source) for source in sources],
    }


def _patterns(spec: Spec) -> list[Pattern]:
    return list(dict.fromkeys(kernel.pattern for kernel in spec.kernels))


def _launchers(spec: Spec) -> str:
    classes = {"ChainLauncher": spec.names, "GroupLauncher": spec.groups, "Launcher": True, "SumLauncher": spec.sums}
    lines = [
        f'"""Launchers of {spec.name}: y = ks_a_b_c_d(x, weights, layout="bsf"). Written by `ksgen emit`: edit the '
        'spec, not this file."""',
        "",
        f"from ksgen.launcher import {', '.join(name for name, is_used in classes.items() if is_used)}",
        "",
    ]
    lines += [f"ks_{pattern.identifier} = Launcher({_arguments(spec, pattern)})" for pattern in _patterns(spec)]
    lines += [f"layer_{name} = {_layer(spec, name, chain)}" for name, chain in spec.layers.items()]
    for launcher, several in (("GroupLauncher", spec.groups), ("SumLauncher", spec.sums)):
        for name, chains in several.items():
            layers = ", ".join(_layer(spec, name, chain) for chain in chains)
            lines.append(f"layer_{name} = {launcher}({layers})")
    return "\n".join(lines) + "\n"


def _layer(spec: Spec, title: str, chain: Chain) -> str:
    options = spec.options_of(title).non_defaults | spec.stated_of(title).non_defaults
    own = {name: value for name, value in options.items() if name != "between" or len(chain) > 1}
    return f"ChainLauncher({', '.join(f'ks_{pattern.identifier}' for pattern in chain)}{_as_arguments(own)})"


def _arguments(spec: Spec, pattern: Pattern) -> str:
    batches = sorted(
        {kernel.batch for kernel in spec.kernels if kernel.pattern == pattern and kernel.batch is not None}
    )
    options = ({"batches": batches} if batches else {}) | spec.stated_of(pattern).non_defaults
    if pattern.is_exchanged:
        return f'"{pattern}"' + _as_arguments(options)
    return ", ".join(map(str, pattern.shape)) + _as_arguments(options)


def _as_arguments(options: Mapping[str, Any]) -> str:
    """Keyword arguments that follow others, as Python spells them."""
    return "".join(
        f", {name}={json.dumps(value) if isinstance(value, str) else value}" for name, value in options.items()
    )


_BY_HAND = (
    "To launch by hand: grid and block have one dimension. Pass arrays as pointers, and the batch as a 64-bit integer.",
    "For more than 49152 bytes of shared memory, first set cudaFuncAttributeMaxDynamicSharedMemorySize of the kernel.",
)


def launch_lines(family: Family[Any], kernel: KernelSpec, constants: Any, entry: str) -> str:
    """Lines with grid, block, shared memory and arguments per entry, in launch order, for a fixed batch or any."""
    if family.maps(kernel, constants, kernel.batch or 1):
        return _comment(["Launched by ksgen's launchers, which describe X to it by a tensor map."])
    if kernel.is_chain:
        return _comment(
            [
                f"Launched by ksgen's launchers, which pack the weights of each factor as {family.name} does for it "
                "alone."
            ]
        )
    launches = (_gradient if kernel.job == "gradient" else _product)(family, kernel, constants, entry)
    return _comment([*_BY_HAND, *launches])


def _product(family: Family[Any], kernel: KernelSpec, constants: Any, entry: str) -> list[str]:
    packing, packed = family.pack_geometry(kernel, constants), family.packed_bytes(kernel, constants)
    given = ", ".join("packed" if name == "weights" else name for name in family.operands(kernel, constants))
    geometry, rest = _geometry(family, kernel, constants), ""
    if kernel.batch is None:
        grid, rest = f"{geometry.grid} * tiles", f": tiles = batch / {constants.tile_batch}, rounded up"
    else:
        grid = str(geometry.grid)
    first = _launch(f"{entry}_pack", str(packing.grid), packing, "w, packed")
    shape = ", ".join("1" if axis in kernel.tie else axis.upper() for axis in "abcd")
    of = kernel.dtype
    if kernel.is_quantized:
        times = " times the scale of X" if kernel.has_bytes_in else ""
        of = f"{kernel.weights} and, from byte {kernel.scales_begin} on, a float32 scale per output{times}"
    return [
        f"  {first}: w is ({shape}) of {of}, packed has {packed} bytes",
        f"  {_launch(entry, grid, geometry, f'{given}, batch')}{rest}",
        *_pitches(kernel),
    ]


def _pitches(kernel: KernelSpec) -> list[str]:
    """Comment lines about the pitches that a kernel of slices takes for its arrays."""
    pitches, rows = ", ".join(pitches_of(kernel).values()), {"bsf": "row of the batch", "bsl": "feature"}
    row = " or ".join(rows[each] for each in dict.fromkeys((kernel.layout, kernel.y_layout)))
    return (
        [f"  {pitches}: elements from a {row} to the next, in 64 bits; rows of Y must not overlap"] if pitches else []
    )


def _gradient(family: Family[Any], kernel: KernelSpec, constants: Any, entry: str) -> list[str]:
    """Launch lines of a gradient. Its kernel computes the number of parts by the rules in these lines."""
    given = f"{', '.join(family.operands(kernel, constants))}, batch"
    geometry, adding = _geometry(family, kernel, constants), family.pack_geometry(kernel, constants)
    second = f"  {_launch(f'{entry}_sum', str(adding.grid), adding, given)}"
    if kernel.batch is not None:
        first = (
            f"  {_launch(entry, str(geometry.grid), geometry, given)}: workspace has {geometry.workspace_bytes} bytes"
        )
        return [first, second] if geometry.after else [first]
    least = next(each.value for each in family.constexprs(kernel, constants) if each.name == "LEAST_STEPS")
    part_bytes = family.packed_bytes(kernel, constants) // constants.parts
    return [
        f"  steps = batch / {constants.tile_batch}, rounded up; most = min({constants.parts}, steps / {least}), but "
        "at least 1;",
        "  part = steps / most, rounded up; parts = steps / part, rounded up",
        f"  {_launch(entry, f'{geometry.grid} * parts', geometry, given)}: workspace has {part_bytes} * parts bytes; "
        "null for one part",
        f"{second}: only after several parts",
    ]


def _geometry(family: Family[Any], kernel: KernelSpec, constants: Any) -> Geometry:
    return family.geometry(kernel, constants, kernel.batch or 1)


def _launch(entry: str, grid: str, geometry: Geometry, given: str) -> str:
    shared = f", {geometry.shared_bytes}" if geometry.shared_bytes else ""
    return f"{entry}<<<{grid}, {geometry.block}{shared}>>>({given})"


def _comment(lines: list[str]) -> str:
    wrapped = (textwrap.fill(line, 120, initial_indent="// ", subsequent_indent="//     ") for line in lines)
    return "".join(f"{line}\n" for line in wrapped) + "\n"
